"""The service of a node that probes a few others now and then, so that nodes which jobs hold have scores, too."""

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

#: what one probe costs: some 4 MB, and a fifth of a second of the link
LIGHT_PROBE = ProbeConfig(rtt_probes=50, rtt_seconds=0.1, loss_probes=500, loss_probe_rate=2500.0, stream_bytes=2_000_000, stream_seconds=0.1,
               timeout_s=4.0)


def ring_peers(topology: Topology, node: str, count: int) -> list[str]:
    """Whom a node probes: the next ones in its zone, in a ring, so that each node is probed as often as it probes.

    A node that is alone in its zone, or in none, takes the next ones of all nodes.
    """
    index = topology.node_index.get(node)
    if index is None:
        return []
    leaf = topology.leaf[index]
    zone = [name for name, other in zip(topology.nodes, topology.leaf, strict=True) if other == leaf]
    ring = zone if len(zone) > 1 and leaf >= 0 else list(topology.nodes)
    at = ring.index(node)
    return [ring[(at + step) % len(ring)] for step in range(1, min(count, len(ring) - 1) + 1)]


def probe_peers(node: str, peers: Sequence[str], port: int, interval_s: float, warn: Callable[[str], None],
           config: ProbeConfig = LIGHT_PROBE) -> Iterator[LinkSample]:
    """Probe one peer after the other, all within `every` seconds, for ever; after each the sample of the own link.

    The first probe comes at a moment that depends on the node's name, so that the nodes of a cluster that was
    switched on at once do not probe at once. A peer that does not answer is told to `say` when it begins to.
    """
    latest: dict[str, PairMeasurement] = {}
    silent: set[str] = set()
    pause = interval_s / len(peers)
    due = time.monotonic() + random.Random(node).uniform(0, pause)
    for turn, peer in enumerate(cycle(peers), 1):
        time.sleep(max(0.0, due - time.monotonic()))
        due = max(due + pause, time.monotonic())
        try:
            latest[peer] = measure_pair((node, peer), (peer, port), config)
            silent.discard(peer)
        except Exception as error:  # whatever a peer sends, the next one has its turn
            latest.pop(peer, None)
            if peer not in silent:
                warn(f"{peer} does not answer ({error})")
            silent.add(peer)
            continue
        # of one way alone nobody knows whose fault it is; the others have their turn first
        sample = estimate_own_link(list(latest.values()), node, time.time())
        if sample is not None and (len(latest) > 1 or turn >= len(peers)):
            yield sample
