"""A real Slurm cluster on one machine: each host is a set of namespaces, each link is shaped.

spec.py describes a sandbox and writes Slurm's files, namespaces.py starts and enters the hosts, veth_links.py creates
and shapes the links, lifecycle.py starts Slurm's daemons and combines them.
"""
