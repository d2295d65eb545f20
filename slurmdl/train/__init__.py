"""The training runtime: MPI ranks that each hold a replica and keep it together with the others by a strategy.

It reads its environment and knows nothing of placement or launch: of slurmdl it imports `plan` and `errors` only.
"""
