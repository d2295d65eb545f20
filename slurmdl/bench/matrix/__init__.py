"""Matrix of training jobs on a cluster: `slurmdl bench run` and `slurmdl bench report`."""
