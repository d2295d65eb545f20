"""The library for training scripts: `init`, and what stands behind `wrap` and `loader`."""
