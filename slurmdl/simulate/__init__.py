"""Step times of placements on clusters of any size, by SimGrid."""
