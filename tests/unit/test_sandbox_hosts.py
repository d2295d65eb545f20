"""Sandbox: queueing disciplines, pairs of zones, and directories of sandboxes that start and end at the same time."""

from __future__ import annotations

import contextlib
import threading

import pytest

from slurmdl.errors import UsageError
from slurmdl.links.link_scores import inter_leaf_name
from slurmdl.sandbox import lifecycle, veth_links
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology

SPEC = SandboxSpec("any", round_robin_topology(4, 2))


def test_netem_delay_precedes_token_bucket():
    lines = veth_links.netem_lines("eth0", 0.01, "tbf rate 8000bit burst 70000 limit 280000")
    assert lines == ["qdisc replace dev eth0 root handle 1: netem delay 10000us limit 100000",
                     "qdisc replace dev eth0 parent 1:1 tbf rate 8000bit burst 70000 limit 280000"]
    assert veth_links.netem_lines("eth0", 0.01, "") == lines[:1]


@pytest.mark.parametrize("pair", ["zoneA:zoneZ", "zoneA|zoneA", "zoneA:", "zoneA:core", ":"])
def test_invalid_pair_of_leaf_zones_is_rejected(pair):
    with pytest.raises(UsageError, match=r"leaf zone|two different zones"):
        veth_links.find_inter_leaf(SPEC, pair)


def test_pair_of_leaf_zones_has_one_name():
    for pair in ("zoneB:zoneA", "zoneA|zoneB"):
        ends = veth_links.find_inter_leaf(SPEC, pair)
        assert ends and inter_leaf_name(*ends) == "zoneA|zoneB"
    assert veth_links.find_inter_leaf(SPEC, "n1") is None


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
