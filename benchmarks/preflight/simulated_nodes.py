"""Nodes of a simulated cluster, in the place of srun: the tasks of a step answer as real ones would, with values of
their own instead of measurements. The leader of a link probe and its connections are real.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

from slurmdl.links.probe import tcp_task
from slurmdl.links.probe.pair_probe import PairMeasurement, Peer, ProbeConfig
from slurmdl.slurm.hostlist import expand_hostlist

CPU_FAULT, LINK_FAULT, BROKEN_PAIR = "n50", "n70", ("n10", "n90")
#: seconds until the task of a node has started, and of the checks of a node
_START_S, _CHECKS_S = 1.0, 2.0
#: seconds of the check of one pair, both nodes at once, measured on a sandbox
_PAIR_CHECK_S = 0.003


def run_step(argv: Sequence[str], seed: int) -> None:
    """Answer for all nodes of a step that srun would start with these arguments."""
    nodes = expand_hostlist(next(arg for arg in argv if arg.startswith("--nodelist=")).partition("=")[2])
    if "slurmdl.health.node_checks" in argv:
        run_checks(nodes, argv[argv.index("slurmdl.health.node_checks") + 1:], random.Random(seed))
    else:
        run_probe(nodes, random.Random(seed))


def run_checks(nodes: Sequence[str], checks: Sequence[str], rng: random.Random) -> None:
    time.sleep(_START_S + _CHECKS_S)
    for node in nodes:
        for check in checks:
            values = _check_values(node, check, rng)
            print(json.dumps({"node": node, "check": check, "values": values}), flush=True)


def _check_values(node: str, check: str, rng: random.Random) -> dict[str, Any]:
    match check:
        case "clock":
            return {"time": time.time()}
        case "disk":
            return {"directory": "/tmp", "free": 1e11, "write_seconds": 0.01}
        case "memory":
            return {"available": 2e11, "total": 2.5e11, "bandwidth": rng.gauss(1e10, 2e8)}
        case "cpu":
            share = 1 / 3 if node == CPU_FAULT else 1.0
            return {"cpus": 64, "rate": share * rng.gauss(3e9, 3e7), "speed": rng.gauss(5e7, 5e5), "withheld": 0.0}
    return {}


def run_probe(nodes: Sequence[str], rng: random.Random) -> None:
    """Run the leader, and in another process a follower for each other node, in a thread."""
    def measure_pair(names: tuple[str, str], address: object, config: ProbeConfig, *args: object) -> PairMeasurement:
        time.sleep(config.expected_s)
        rate = (1e8 if LINK_FAULT in names else 1.2e9) * rng.gauss(1.0, 0.02)
        return PairMeasurement(*names, forward=rate, backward=rate, rtt=rng.gauss(2e-5, 1e-6), rtt_p99=5e-5, loss=0.0)

    def unreachable_peers(peers: Sequence[Peer], *args: object) -> list[str]:
        time.sleep(_PAIR_CHECK_S * len(peers))
        partner = dict([BROKEN_PAIR, BROKEN_PAIR[::-1]]).get(getattr(node_of_thread, "name", nodes[0]))
        return [name for name, _, _ in peers if name == partner]

    def run_follower(node: str, secret: bytes) -> None:
        node_of_thread.name = node
        tcp_task.run_follower("127.0.0.1", tcp_task.leader_ports(secret), secret, node)

    node_of_thread = threading.local()  # without a name in the leader's own thread
    for name, function in (("measure_pair", measure_pair), ("unreachable_peers", unreachable_peers),
                           ("Reflector", _NoReflector)):
        setattr(tcp_task, name, function)
    time.sleep(_START_S)
    threading.stack_size(256 * 1024)
    secret = os.environ[tcp_task.SECRET_VARIABLE].encode()
    if os.fork() == 0:
        for node in nodes[1:]:
            threading.Thread(target=run_follower, args=(node, secret)).start()
        return
    os.environ.update(SLURM_STEP_NODELIST=",".join(nodes), SLURMD_NODENAME=nodes[0], SLURM_PROCID="0")
    tcp_task.run_task(tcp_task.main)


class _NoReflector:
    """In the place of the server of each node that answers probes."""

    def __init__(self, *args: object) -> None:
        self.port = 1
