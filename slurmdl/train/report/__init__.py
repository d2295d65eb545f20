"""Measurements of a run, and their plot."""
