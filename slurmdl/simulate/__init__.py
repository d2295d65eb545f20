"""Simulated step times of placements on clusters of any size, with SimGrid."""
