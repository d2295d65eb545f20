"""Measuring links: rounds.py says who probes whom, measure.py and reflector.py are the two sides of a pair, wire.py
what they send, channel.py proves who sent it, task.py runs them as a Slurm step, and fit.py makes links of what the
pairs measured."""
