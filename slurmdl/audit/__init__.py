"""Audit of past jobs: how their nodes lay in the topology, from the records of Slurm's accounting."""
