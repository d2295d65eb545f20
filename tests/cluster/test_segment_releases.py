"""--segment on blocks: random requests, decided by slurmdl and by Slurm 24.11 and 26.05 in chroots."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path

import pytest
from jobs import NIGHTLY
from releases import RELEASES, RootCluster, skip_reason

from benchmarks.chroot_host import root_of
from slurmdl.cluster.reader import parse_snapshot
from slurmdl.dl_options import DlOptions
from slurmdl.errors import PlacementError
from slurmdl.job_request import build_request
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.place import place_job
from slurmdl.slurm.hostlist import expand_hostlist
from slurmdl.topology.topology import Topology
from slurmdl.topology.topology_conf import declare_topology_conf

BLOCKS = "BlockName=a Nodes=n[1-4]\nBlockName=b Nodes=n[5-8]\nBlockName=c Nodes=n[9-12]\nBlockSizes=4,8\n"
NODES = 12
REQUESTS = 120 if NIGHTLY else 48
SEED = 29


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    if reason := skip_reason(request.param):
        pytest.skip(reason)
    return str(request.param)


def job_submit_lua(directory: Path) -> str:
    """The script of the controller with a program that records its options and answers with a binding to blocks."""
    program = directory / "slurmdl"
    program.write_text(f'#!/bin/sh\necho "$*" >>{directory}/options\n'
                       """echo '{"binding": ["--segment=2"]}'\n""")
    program.chmod(0o755)
    (directory / "snapshot").touch()
    text = (Path(__file__).parents[2] / "etc/job_submit.lua").read_text()
    for old, new in (('SLURMDL = "slurmdl"', f'SLURMDL = "{program}"'), ("MAX_AGE = 15 ", "MAX_AGE = 1000 "),
                     ('"/run/slurmdl/snapshot"', f'"{directory}/snapshot"'), ('TIMEOUT_S = "1"', 'TIMEOUT_S = "8"')):
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


@pytest.fixture(scope="module")
def cluster(release: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RootCluster]:
    conf = ("NodeName=n[1-{nodes}] NodeHostname=login NodeAddr={address} Port=[17001-{last}] CPUs=2 RealMemory=4000\n"
            "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\nTopologyPlugin=topology/block\n"
            "JobSubmitPlugins=lua\n")
    base = tmp_path_factory.mktemp(release) / "host"
    base.mkdir()
    made = RootCluster(root_of(release), base, NODES, None, lines=conf,
                       files={"topology.conf": BLOCKS, "job_submit.lua": job_submit_lua(base)})
    try:
        yield made
    finally:
        made.down()


def slurm_nodes(cluster: RootCluster, settings: Mapping[str, str]) -> list[str]:
    """Nodes on which Slurm would start the job now; [] if it cannot."""
    done = cluster.run(["sbatch", "--test-only", *(f"--{name}={value}" for name, value in settings.items()),
                        "--wrap=:"], env={"TZ": "UTC"})
    match = re.search(r"to start at (\S+)(?: \S+)? using \d+ processors on nodes (\S+)", done.stderr)
    if not match:
        return []
    start = datetime.fromisoformat(match[1]).replace(tzinfo=timezone.utc).timestamp()
    return list(expand_hostlist(match[2])) if start < time.time() + 60 else []


def placed_nodes(cluster: RootCluster, topology: Topology, settings: Mapping[str, str]) -> list[str]:
    """Nodes that slurmdl chooses for a start now; [] if it finds none."""
    text = cluster.run(["scontrol", "-o", "-d"], stdin="show nodes\nshow partitions\nshow config\n").stdout
    request = build_request(settings, DlOptions())
    assert not request.unplaceable_reason, request
    try:
        placement = place_job(request, parse_snapshot(text), topology, LinkScores())
    except PlacementError:
        return []
    return list(placement.nodes) if placement.free_now else []


def test_random_segments(cluster: RootCluster, release: str) -> None:
    source = random.Random(SEED)
    topology = declare_topology_conf(str(cluster.etc / "topology.conf")).to_topology()
    block = {name: topology.leaf_of(name) for name in topology.nodes}
    differences, started = [], 0
    drained: list[str] = []
    for number in range(REQUESTS):
        if number % 12 == 0:
            cluster.cancel_all()
            cluster.resume(drained)
            drained = source.sample(topology.nodes, source.randint(0, 3))
            busy = source.sample([name for name in topology.nodes if name not in drained], source.randint(0, 3))
            if drained:
                cluster.run(["scontrol", "update", f"nodename={','.join(drained)}", "state=drain", "reason=x"],
                            as_root=True).check_returncode()
            jobs = [cluster.submit(["sbatch", "-w", name, "--exclusive", "--wrap=sleep 1000"]) for name in busy]
            for job in jobs:
                cluster.wait_for(job, {"RUNNING"})
        settings = {"nodes": str(source.randint(1, 10))}
        if source.random() < 0.8:
            settings["segment"] = str(source.randint(1, 5))
        if source.random() < 0.2:
            settings["exclusive"] = "topo"
        segment = int(settings.get("segment", "1"))
        if segment > int(settings["nodes"]) and release == "trixie":
            continue  # 24.11 refuses it, 26.05 ignores the segment
        slurm, placed = slurm_nodes(cluster, settings), placed_nodes(cluster, topology, settings)
        started += bool(slurm)
        if bool(slurm) != bool(placed):
            differences.append((settings, drained, busy, slurm, placed))
        elif segment <= int(settings["nodes"]):
            for nodes in filter(None, (slurm, placed)):
                counts = Counter(block[name] for name in nodes)
                if any(count % segment for count in counts.values()):
                    differences.append((settings, drained, busy, slurm, placed))
    assert not differences, '\n'.join(map(str, differences))
    assert started > REQUESTS // 4


def test_job_submit_reads_and_sets_segments_if_the_release_has_the_field(cluster: RootCluster, release: str) -> None:
    sizes, options = [], cluster.shared.with_name("options")
    for args in ((), ("--segment=4",)):
        job = cluster.submit(["sbatch", "-N4", "--hold", *args, "--wrap=true"],
                             env={"SLURMDL_OPT_NODE_BINDING": "zone"})
        sizes.append(cluster.job(job).get("SegmentSize"))
    assert sizes == (["2", "2"] if release == "forky" else [None, None])  # 24.11 does not show it
    assert ["--segment=4" in line for line in options.read_text().splitlines()] == [False, release == "forky"]
