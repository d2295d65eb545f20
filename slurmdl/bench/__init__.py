"""Benchmarks that users run on their own cluster: `slurmdl bench`."""
