"""The built-in trainer, on top of the library: options, networks, data, progress, simulated ranks."""
