"""A real Slurm cluster on one machine: each host is a set of namespaces, each link is shaped.

spec.py describes a sandbox, namespaces.py starts and enters the hosts, veth_links.py creates and shapes the links,
slurm_daemons.py writes Slurm's files and starts its daemons, lifecycle.py combines them.
"""
