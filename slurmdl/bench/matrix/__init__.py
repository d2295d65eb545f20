"""A matrix of training jobs, side by side on a cluster: `slurmdl bench run` and `slurmdl bench report`."""
