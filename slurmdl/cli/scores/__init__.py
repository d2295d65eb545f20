"""The subcommands of `slurmdl score`, one file each."""
