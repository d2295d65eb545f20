"""Slurm 24.11 and 26.05 in chroots: --prefer with numbers of nodes, --segment on blocks, and the order of tasks.

Choices and requests are random; slurmdl and Slurm must agree on them.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
from jobs import NIGHTLY, slurm_release
from releases import RELEASES, RootCluster, skip_reason

from benchmarks.chroot_host import root_of
from slurmdl.cluster.reader import parse_snapshot
from slurmdl.dl_options import DlOptions
from slurmdl.errors import PlacementError
from slurmdl.job_request import build_request
from slurmdl.launch.cluster_state import ClusterState
from slurmdl.launch.zone_options import prefer_zones
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.place import place_job
from slurmdl.slurm.hostlist import expand_hostlist
from slurmdl.topology.topology_conf import parse_topology_conf

ZONES = {"zoneA": range(1, 5), "zoneB": range(5, 9), "zoneC": range(9, 13), "zoneD": range(13, 17)}
TREE = "".join(f"SwitchName={zone} Nodes=n[{nodes[0]}-{nodes[-1]}]\n" for zone, nodes in ZONES.items()) \
    + f"SwitchName=core Switches={','.join(ZONES)}\n"
BLOCKS = "BlockName=a Nodes=n[1-4]\nBlockName=b Nodes=n[5-8]\nBlockName=c Nodes=n[9-12]\nBlockSizes=4,8\n"
PARTITION = "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
CHOICES, REQUESTS = (8, 120) if NIGHTLY else (5, 48)


def node_line(first: int, last: int, more: str) -> str:
    ports = f"[{17000 + first}-{17000 + last}]"
    return f"NodeName=n[{first}-{last}] NodeHostname=login NodeAddr={{address}} Port={ports} RealMemory=4000 {more}\n"


@pytest.fixture(scope="module", params=RELEASES)
def start(request, tmp_path_factory):
    """A function that starts a cluster of a release; see RootCluster."""
    if reason := skip_reason(request.param):
        pytest.skip(reason)
    started = []

    def make(nodes: int, **options) -> RootCluster:
        base = options.pop("base", None) or tmp_path_factory.mktemp(request.param) / "host"
        started.append(RootCluster(root_of(request.param), base, nodes, None, **options))
        return started[-1]

    yield make
    for cluster in started:
        cluster.down()


def read_topology(cluster):
    return parse_topology_conf(str(cluster.etc / "topology.conf")).to_topology()


def read_snapshot(cluster):
    return parse_snapshot(cluster.run(["scontrol", "-o", "-d"],
                                      stdin="show nodes\nshow partitions\nshow config\n").stdout)


def preference_for(cluster, topology, nodes, settings):
    """The preference by which slurmdl would bind a job to these nodes; None if Slurm may ignore it."""
    state = ClusterState(read_snapshot(cluster), topology, LinkScores())
    request = build_request({"nodes": str(len(nodes)), **settings}, DlOptions())
    others = set(topology.nodes) - set(nodes)
    try:
        placement = place_job(replace(request, exclude=tuple(others)), state.cluster, topology, state.scores)
        preference = prefer_zones(request, state, placement)
    except PlacementError:
        return None
    assert set(placement.nodes) == set(nodes)
    return None if preference.uncounted else preference


def test_preferred_numbers_of_nodes_per_zone(start):
    cluster = start(16, files={"topology.conf": TREE}, lines="".join(
        node_line(nodes[0], nodes[-1], f"CPUs=4 Features={zone}") for zone, nodes in ZONES.items()) + PARTITION)
    source, topology = random.Random(41), read_topology(cluster)
    zone = {name: topology.leaf_of(name) for name in topology.nodes}
    got, unlike_slurms_own = [], 0
    while len(got) < CHOICES:
        cluster.cancel_all()
        if busy := source.sample(topology.nodes, source.randint(0, 6)):
            cluster.start(["sbatch", "-w", ",".join(busy), "--exclusive", "-o", "/dev/null", "--wrap=sleep 1000"])
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
            job = cluster.start(["sbatch", *options, *prefer, "-o", "/dev/null", "--wrap=sleep 1000"])
            counts.append(Counter(zone[name] for name in expand_hostlist(cluster.job(job)["NodeList"])))
            cluster.run(["scancel", str(job)]).check_returncode()
            cluster.wait(job)
        got.append((preference.value, busy, options, *counts))
        unlike_slurms_own += counts[2] != counts[0]
    assert [each for each in got if each[3] != each[4]] == []
    assert unlike_slurms_own > CHOICES // 4
    assert any("&" in value for value, *_ in got)


@pytest.fixture(scope="module")
def blocks(start, tmp_path_factory) -> RootCluster:
    """A cluster of blocks whose controller records the options of job_submit.lua, and answers with a segment."""
    base = tmp_path_factory.mktemp("blocks") / "host"
    base.mkdir()
    program = base / "slurmdl"
    program.write_text(f'#!/bin/sh\necho "$*" >>{base}/options\n' """echo '{"binding": ["--segment=2"]}'\n""")
    program.chmod(0o755)
    (base / "snapshot").touch()
    text = (Path(__file__).parents[2] / "etc/job_submit.lua").read_text()
    for old, new in (('SLURMDL = "slurmdl"', f'SLURMDL = "{program}"'), ("MAX_AGE = 15 ", "MAX_AGE = 1000 "),
                     ('"/run/slurmdl/snapshot"', f'"{base}/snapshot"'), ('TIMEOUT_S = "1"', 'TIMEOUT_S = "8"')):
        assert text.count(old) == 1
        text = text.replace(old, new)
    return start(12, base=base, files={"topology.conf": BLOCKS, "job_submit.lua": text}, lines=node_line(
        1, 12, "CPUs=2") + PARTITION + "TopologyPlugin=topology/block\nJobSubmitPlugins=lua\n")


def slurm_nodes(cluster, settings):
    """Nodes on which Slurm would start the job now; [] if it cannot."""
    done = cluster.run(["sbatch", "--test-only", *(f"--{name}={value}" for name, value in settings.items()),
                        "--wrap=:"], env={"TZ": "UTC"})
    match = re.search(r"to start at (\S+)(?: \S+)? using \d+ processors on nodes (\S+)", done.stderr)
    if not match:
        return []
    start_s = datetime.fromisoformat(match[1]).replace(tzinfo=timezone.utc).timestamp()
    return list(expand_hostlist(match[2])) if start_s < time.time() + 60 else []


def placed_nodes(cluster, topology, settings):
    """Nodes that slurmdl chooses for a start now; [] if it finds none."""
    request = build_request(settings, DlOptions())
    assert not request.unplaceable_reason, request
    try:
        placement = place_job(request, read_snapshot(cluster), topology, LinkScores())
    except PlacementError:
        return []
    return list(placement.nodes) if placement.free_now else []


def test_random_segments(blocks):
    source, topology, drained = random.Random(29), read_topology(blocks), []
    block = {name: topology.leaf_of(name) for name in topology.nodes}
    differences, started = [], 0
    for number in range(REQUESTS):
        if number % 12 == 0:
            blocks.cancel_all()
            blocks.resume(drained)
            drained = source.sample(topology.nodes, source.randint(0, 3))
            busy = source.sample([name for name in topology.nodes if name not in drained], source.randint(0, 3))
            if drained:
                blocks.root("scontrol", "update", f"nodename={','.join(drained)}", "state=drain", "reason=x")
            for job in [blocks.submit(["sbatch", "-w", name, "--exclusive", "--wrap=sleep 1000"]) for name in busy]:
                blocks.wait_for(job, {"RUNNING"})
        settings = {"nodes": str(source.randint(1, 10))}
        if source.random() < 0.8:
            settings["segment"] = str(source.randint(1, 5))
        if source.random() < 0.2:
            settings["exclusive"] = "topo"
        segment = int(settings.get("segment", "1"))
        if segment > int(settings["nodes"]) and slurm_release(blocks) < (26, 5):
            continue  # 24.11 refuses it, 26.05 ignores the segment
        slurm, placed = slurm_nodes(blocks, settings), placed_nodes(blocks, topology, settings)
        started += bool(slurm)
        counts = [Counter(block[name] for name in nodes).values() for nodes in (slurm, placed)]
        if bool(slurm) != bool(placed) or (segment <= int(settings["nodes"]) and any(
                count % segment for each in counts for count in each)):
            differences.append((settings, drained, busy, slurm, placed))
    assert not differences, '\n'.join(map(str, differences))
    assert started > REQUESTS // 4


def test_job_submit_reads_and_sets_segments_if_the_release_has_the_field(blocks):
    has_field, sizes = slurm_release(blocks) >= (26, 5), []
    for args in ((), ("--segment=4",)):
        job = blocks.submit(["sbatch", "-N4", "--hold", *args, "--wrap=true"],
                            env={"SLURMDL_OPT_NODE_BINDING": "zone"})
        sizes.append(blocks.job(job).get("SegmentSize"))
    assert sizes == (["2", "2"] if has_field else [None, None])  # 24.11 does not show it
    options = blocks.shared.with_name("options").read_text().splitlines()
    assert ["--segment=4" in line for line in options] == [False, has_field]


#: nodes n1 and n3 are in one leaf zone, n2 and n4 in the other
BY_NAME, BY_LEAF = ["n1", "n2", "n3", "n4"], ["n1", "n3", "n2", "n4"]
#: options of plain srun in a job of 4 nodes -> node of each task in Slurm 26.05 (docs/glossary.md, leaf order)
STEPS = {"": BY_NAME, "-n 4": BY_NAME, "-m block": BY_LEAF, "-n 8": [node for node in BY_LEAF for _ in range(2)],
         "-n 6": ["n1", "n1", "n3", "n3", "n2", "n4"]}


def test_only_block_distribution_of_26_05_follows_the_leaf_zones(start):
    cluster = start(4)
    script = cluster.script("\n".join(f"srun -l {options} printenv SLURMD_NODENAME > {number}"
                                      for number, options in enumerate(STEPS)))
    cluster.job_output(script, "-N4", "--exclusive", program="sbatch")
    for number, (options, by_leaf) in enumerate(STEPS.items()):
        lines = re.findall(r"^ *(\d+): (\w+)$", (script.parent / str(number)).read_text(), re.M)
        nodes = [node for _, node in sorted(lines, key=lambda line: int(line[0]))]
        assert nodes == (by_leaf if slurm_release(cluster) >= (26, 5) else sorted(nodes)), options
        assert len(nodes) == len(by_leaf), options
