#!/bin/bash
# Six workers, one per node, average their gradients in every step. Submit with
#
#     slurmdl sbatch examples/allreduce.sh
#
# Slurm reads the #SBATCH lines, slurmdl the #DL lines. With plain sbatch the job also runs, without placement.
#SBATCH --job-name=allreduce
#SBATCH --nodes=6
#SBATCH --ntasks=6
#SBATCH --time=10
#DL --dl-strategy=allreduce

# orders the ranks of the ring by the zones of the allocated nodes
slurmdl srun python -m slurmdl.train --steps 200 --seed 1
