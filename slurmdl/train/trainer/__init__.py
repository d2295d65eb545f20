"""The built-in trainer on top of the library: options, models, data, progress, virtual ranks."""
