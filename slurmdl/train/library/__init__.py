"""The library for training scripts: `startup.init` and `run.Run`."""
