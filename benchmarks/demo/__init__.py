"""What placement gains on a real Slurm: four acts on a sandbox, each beside plain Slurm and leaf order.

All runs use Slurm's topology/tree and the same free nodes. They differ in submission and start:

- plain: `sbatch` and `srun`; ranks in alphabetical order of the nodes.
- leaf order: Slurm's choice of nodes, ranks ordered by leaf switch, as by `srun -m block` of Slurm 26.05.
- slurmdl: `slurmdl sbatch` and `slurmdl srun`.
- control (with --results only): see `jobs.Job.control`.
"""

from benchmarks.demo.story import main

__all__ = ["main"]
