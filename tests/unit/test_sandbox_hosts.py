"""Sandbox: queueing disciplines, and directories of sandboxes that start and end at the same time."""

from __future__ import annotations

import contextlib
import threading

from slurmdl.sandbox import lifecycle, veth_links
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology

SPEC = SandboxSpec("any", round_robin_topology(4, 2))


def test_netem_delay_precedes_token_bucket():
    lines = veth_links.netem_lines("eth0", 0.01, "tbf rate 8000bit burst 70000 limit 280000")
    assert lines == ["qdisc replace dev eth0 root handle 1: netem delay 10000us limit 100000",
                     "qdisc replace dev eth0 parent 1:1 tbf rate 8000bit burst 70000 limit 280000"]
    assert veth_links.netem_lines("eth0", 0.01, "") == lines[:1]


def test_sandbox_starts_while_another_removes_the_empty_parent(tmp_path):
    root = tmp_path / "sandboxes" / "one"
    stop = threading.Event()

    def remove_parent() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                root.parent.rmdir()

    other = threading.Thread(target=remove_parent)
    other.start()
    try:
        for _ in range(500):
            lifecycle._create_root(root)
            root.rmdir()
    finally:
        stop.set()
        other.join()
