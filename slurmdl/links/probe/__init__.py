"""Active probes of links: `pairs` chooses pairs of nodes and estimates links from them, `measurement` and `reflector`
are the sides of a probe, `protocol` and `channel` the messages between them, `tcp_task` the step."""
