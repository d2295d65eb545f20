"""Checks of the site's setup (slurmdl doctor)."""
