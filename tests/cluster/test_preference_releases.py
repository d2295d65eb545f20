"""--prefer with the number of nodes in each zone: random choices, and the nodes that Slurm 24.11 and 26.05 give."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from jobs import NIGHTLY
from releases import RELEASES, RootCluster, skip_reason

from benchmarks.chroot_host import root_of
from slurmdl.cluster.reader import parse_snapshot
from slurmdl.dl_options import DlOptions
from slurmdl.errors import PlacementError
from slurmdl.job_request import build_request
from slurmdl.launch.cluster_state import ClusterState
from slurmdl.launch.zone_options import ZonePreference, prefer_zones
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.place import place_job
from slurmdl.slurm.hostlist import expand_hostlist
from slurmdl.topology.topology import Topology
from slurmdl.topology.topology_conf import declare_topology_conf

ZONES = {"zoneA": range(1, 5), "zoneB": range(5, 9), "zoneC": range(9, 13), "zoneD": range(13, 17)}
TOPOLOGY = "".join(f"SwitchName={zone} Nodes=n[{nodes[0]}-{nodes[-1]}]\n" for zone, nodes in ZONES.items()) \
    + f"SwitchName=core Switches={','.join(ZONES)}\n"
NODES = "".join(f"NodeName=n[{nodes[0]}-{nodes[-1]}] NodeHostname=login NodeAddr={{address}} "
                f"Port=[{17000 + nodes[0]}-{17000 + nodes[-1]}] CPUs=4 RealMemory=4000 Features={zone}\n"
                for zone, nodes in ZONES.items())
PARTITION = "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
CHOICES = 8 if NIGHTLY else 5
SEED = 41


@pytest.fixture(scope="module", params=RELEASES)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RootCluster]:
    if reason := skip_reason(request.param):
        pytest.skip(reason)
    made = RootCluster(root_of(request.param), tmp_path_factory.mktemp(request.param) / "host", 16, None,
                       lines=NODES + PARTITION, files={"topology.conf": TOPOLOGY})
    try:
        yield made
    finally:
        made.down()


def preference_for(cluster: RootCluster, topology: Topology, nodes: list[str],
                   settings: dict[str, str]) -> ZonePreference | None:
    """The preference by which slurmdl would bind a job to these nodes; None if Slurm may ignore it."""
    text = cluster.run(["scontrol", "-o", "-d"], stdin="show nodes\nshow partitions\nshow config\n").stdout
    state = ClusterState(parse_snapshot(text), topology, LinkScores())
    request = build_request({"nodes": str(len(nodes)), **settings}, DlOptions())
    others = set(topology.nodes) - set(nodes)
    try:
        placement = place_job(replace(request, exclude=tuple(others)), state.cluster, topology, state.scores)
        preference = prefer_zones(request, state, placement)
    except PlacementError:
        return None
    assert set(placement.nodes) == set(nodes)
    return None if preference.uncounted else preference


def test_numbers_of_nodes_per_zone(cluster: RootCluster) -> None:
    source = random.Random(SEED)
    topology = declare_topology_conf(str(cluster.etc / "topology.conf")).to_topology()
    zone = {name: topology.leaf_of(name) for name in topology.nodes}
    got: list[tuple[Any, ...]] = []
    unlike_slurms_own = 0
    while len(got) < CHOICES:
        cluster.cancel_all()
        busy = source.sample(topology.nodes, source.randint(0, 6))
        if busy:
            cluster.wait_for(cluster.submit(["sbatch", "-w", ",".join(busy), "--exclusive", "-o", "/dev/null",
                                             "--wrap=sleep 1000"]), {"RUNNING"})
        pair = source.sample([*ZONES], 2)
        free = [name for name in topology.nodes if name not in busy and zone[name] in pair]
        chosen = source.sample(free, min(len(free), source.choice((2, 3, 4))))
        settings = source.choice(({}, {"ntasks-per-node": "2"}, {"cpus-per-task": "2"}))
        preference = preference_for(cluster, topology, chosen, settings) if len(chosen) > 1 else None
        if preference is None:
            continue
        options = [f"-N{len(chosen)}", *(f"--{name}={value}" for name, value in settings.items())]
        counts = [Counter(zone[name] for name in chosen)]
        for prefer in ([f"--prefer={preference.value}"], []):
            job = cluster.submit(["sbatch", *options, *prefer, "-o", "/dev/null", "--wrap=sleep 1000"])
            nodes = expand_hostlist(cluster.wait_for(job, {"RUNNING"})["NodeList"])
            counts.append(Counter(zone[name] for name in nodes))
            cluster.run(["scancel", str(job)]).check_returncode()
            cluster.wait(job)
        got.append((preference.value, busy, options, *counts))
        unlike_slurms_own += counts[2] != counts[0]
    assert [each for each in got if each[3] != each[4]] == []
    assert unlike_slurms_own > CHOICES // 4
    assert any("&" in value for value, *_ in got)
