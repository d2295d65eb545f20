"""Mixing of models: sums, means, weighted pairs."""
