"""Active probes of links: `probe_step` starts a step and estimates links from its pairs of nodes, `tcp_task` is its
task, `pair_probe` both sides of a pair, `protocol` and `channel` the data between them."""
