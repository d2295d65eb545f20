"""Bad nodes: how they are found, remembered, and left out of jobs that start or are requeued."""
