"""Benchmarks of slurmdl itself and of the papers behind it, for a checkout; not part of the installed package.

    python -m benchmarks.NAME [--results FILE]

Every benchmark has a negative control and judges ratios within one run. docs/benchmarks.md lists them.
"""
