"""Periodic probes of a few peers, so that nodes have link scores while jobs occupy them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

from slurmdl.links.probe.link_estimator import estimate_own_link
from slurmdl.links.probe.measure import measure_pair
from slurmdl.links.probe.measurement import PairMeasurement, ProbeConfig
from slurmdl.links.samples import LinkSample
from slurmdl.topology.topology import Topology

#: cost of one probe: about 4 MB, and the link for 0.2 s
LIGHT_PROBE = ProbeConfig(rtt_probes=50, rtt_seconds=0.1, loss_probes=500, loss_probe_rate=2500.0,
                          stream_bytes=2_000_000, stream_seconds=0.1, timeout_s=4.0)


def ring_peers(topology: Topology, node: str, count: int) -> list[str]:
    """Peers that a node probes: its successors in a ring, so each node is probed as often as it probes.

    The ring consists of the nodes of its leaf zone, or of all nodes if it is alone there or in no zone.
    """
    index = topology.node_index.get(node)
    if index is None:
        return []
    leaf = topology.leaf[index]
    zone = [name for name, node_leaf in zip(topology.nodes, topology.leaf, strict=True) if node_leaf == leaf]
    ring = zone if len(zone) > 1 and leaf >= 0 else list(topology.nodes)
    position = ring.index(node)
    return [ring[(position + step) % len(ring)] for step in range(1, min(count, len(ring) - 1) + 1)]


def probe_peers(node: str, peers: Sequence[str], port: int, interval_s: float, warn: Callable[[str], None],
                config: ProbeConfig = LIGHT_PROBE) -> Iterator[LinkSample]:
    """Probe one peer after the other forever, all within `interval_s`; yield a sample of the own link after each.

    The first probe is delayed depending on the node's name, so nodes that start together do not probe together.
    `warn` is called when a peer stops answering.
    """
    latest: dict[str, PairMeasurement] = {}
    failed: set[str] = set()
    pause = interval_s / len(peers)
    due = time.monotonic() + random.Random(node).uniform(0, pause)
    for count, peer in enumerate(cycle(peers), 1):
        time.sleep(max(0.0, due - time.monotonic()))
        due = max(due + pause, time.monotonic())
        try:
            latest[peer] = measure_pair((node, peer), (peer, port), config)
            failed.discard(peer)
        except Exception as error:  # an invalid peer must not stop the probes of the others
            latest.pop(peer, None)
            if peer not in failed:
                warn(f"{peer} does not answer ({error})")
            failed.add(peer)
            continue
        # a single path cannot be attributed to one of its ends: wait until all peers were probed
        sample = estimate_own_link(list(latest.values()), node, time.time())
        if sample is not None and (len(latest) > 1 or count >= len(peers)):
            yield sample
