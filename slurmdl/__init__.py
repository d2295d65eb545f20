"""slurmdl: network-aware placement and MPI training of neural networks on Slurm."""

__version__ = "0.1.0"
