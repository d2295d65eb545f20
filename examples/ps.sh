#!/bin/bash
# Two parameter servers and four workers. Submit with
#
#     slurmdl sbatch examples/ps.sh
#
# Slurm reads the #SBATCH lines, slurmdl the #DL lines. With plain sbatch the job also runs, without placement.
#SBATCH --job-name=ps
#SBATCH --nodes=6
#SBATCH --ntasks=6
#SBATCH --time=10
#DL --dl-strategy=ps --dl-ps=2

# slurmdl srun assigns the server ranks; the trainer reads strategy and roles from the plan
slurmdl srun python -m slurmdl.train --steps 200 --seed 1
