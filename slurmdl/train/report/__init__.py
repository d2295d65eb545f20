"""Measurements of a run."""
