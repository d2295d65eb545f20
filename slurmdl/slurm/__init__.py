"""Talk to Slurm's commands and find Slurm's files. Standard library only, so that submitting starts fast."""
