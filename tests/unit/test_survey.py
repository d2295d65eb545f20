"""The topology that a job's partition uses, where the cluster has several."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmdl.config import Config
from slurmdl.errors import InputError, UnavailableError
from slurmdl.launch import survey

#: as `scontrol -o -d` of 25.05 and newer answers; the oldest release at hand knows neither Topology= nor topoconf
NODES = "NodeName=n1 State=IDLE CPUTot=4\nNodeName=n2 State=IDLE CPUTot=4\n"
PARTITIONS = """\
PartitionName=main Default=YES State=UP Topology=
PartitionName=fast Default=NO State=UP Topology=blocks
PartitionName=stale Default=NO State=UP Topology=gone
DefMemPerNode           = UNLIMITED
"""
TOPOCONF = """\
- topology: tree
  cluster_default: true
  tree:
    switches:
    - switch: s1
      nodes: n[1-2]
- topology: blocks
  block:
    block_sizes: [1]
    blocks: [{block: b1, nodes: n1}, {block: b2, nodes: n2}]
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for slurm.conf, and a scontrol that answers with the files in it."""
    (tmp_path / "nodes").write_text(NODES + PARTITIONS)
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\ncat {tmp_path}/nodes\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    return tmp_path


@pytest.mark.parametrize(("partitions", "expected"), [
    ((), "tree"), (("main",), "tree"), (("fast",), "blocks"), (("fast", "main"), "blocks"), (("unknown",), "tree"),
])
@pytest.mark.parametrize("source", ["controller", "file"])
def test_topology_of_the_partition(cluster: Path, source: str, partitions: tuple[str, ...], expected: str) -> None:
    if source == "file":
        (cluster / "topology.yaml").write_text(TOPOCONF)
    else:
        (cluster / "nodes").write_text(f"{NODES}{PARTITIONS}{TOPOCONF}SwitchName=s1 Level=0 Nodes=n[1-2]\n")
    seen = survey.take(Config(), "auto", partitions)
    assert seen.topology.name == expected
    assert seen.topology.source == (str(cluster / "topology.yaml") if source == "file" else "scontrol show topoconf")
    assert len(seen.cluster.nodes) == 2


def test_a_topology_that_is_not_there(cluster: Path) -> None:
    (cluster / "topology.yaml").write_text(TOPOCONF)
    with pytest.raises(InputError, match="no topology is named 'gone'; valid: tree, blocks"):
        survey.take(Config(), "auto", ("stale",))


def test_no_topology_at_all(cluster: Path) -> None:
    with pytest.raises(UnavailableError, match="no topology"):
        survey.take(Config(), "auto")
