#!/bin/bash
# Pipeline and data parallelism on eight nodes: the four stages of each replica share a zone. Submit with
#
#     slurmdl sbatch examples/mesh.sh
#
#SBATCH --job-name=mesh
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --time=10
#DL --dl-mesh=dp=2,pp=4 --dl-bytes=pp=400M,dp=100M

slurmdl srun python examples/mesh.py
