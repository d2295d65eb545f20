"""A real Slurm cluster on one machine: every host a set of namespaces, every link shaped.

spec.py says what to build, hosts.py makes and enters the hosts, fabric.py lays and shapes the links,
slurm.py writes Slurm's files and starts its daemons, cluster.py puts them together (up, down, run). cloud.py is
for clusters whose nodes are names only: they may have many thousands, and only the controller is real.
"""
