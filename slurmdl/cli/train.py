"""Train a network with MPI, one replica per rank (the same as `python -m slurmdl.train`)."""

from __future__ import annotations

from slurmdl.train.__main__ import main


def run(argv: list[str]) -> int:
    """Train as one rank of an MPI program; see slurmdl.train.trainer.options for the options."""
    return main(argv)
