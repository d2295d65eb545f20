#!/bin/bash
# Six workers, one to a node, that average their gradients at every step. Submit with
#
#     slurmdl sbatch examples/allreduce.sh
#
# Slurm reads the #SBATCH lines, slurmdl the #DL lines; with plain sbatch the job runs too, unplaced.
#SBATCH --job-name=allreduce
#SBATCH --nodes=6
#SBATCH --ntasks=6
#SBATCH --time=10
#DL --dl-strategy=allreduce

# the ranks of the ring follow the zones of the nodes that Slurm gave
slurmdl srun python -m slurmdl.train --steps 200 --seed 1
