"""Active probes of links: `schedule` pairs the nodes, `measure` and `reflector` are the two sides of a probe,
`protocol` and `channel` the messages between them, `tcp_task` and `mpi_task` the tasks of the Slurm step, and
`link_estimator` derives links from pairs."""
