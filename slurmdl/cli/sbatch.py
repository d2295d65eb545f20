"""place a job and submit it with sbatch (also installed as dlsbatch)"""

from __future__ import annotations


def run(argv: list[str]) -> int:
    """`slurmdl sbatch`: see slurmdl.launch.sbatch.submit."""
    from slurmdl.launch import sbatch

    return sbatch.run_sbatch(argv)
