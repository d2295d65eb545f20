"""Replay of a job trace on a simulated cluster: what Slurm's and slurmdl's choice of nodes do to all jobs."""
