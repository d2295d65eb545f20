"""The topology that a job's partition uses, where the cluster has several: from what Slurm 26.05 says and reads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from slurmdl.config import Config
from slurmdl.errors import InputError, UnavailableError
from slurmdl.launch import cluster_state, step_context
from slurmdl.slurm.slurm_conf import SlurmConfig

DATA = Path(__file__).parent / "data"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for slurm.conf, and a scontrol that answers as that of 26.05 did."""
    shutil.copy(DATA / "scontrol-26.05.5.txt", tmp_path / "answer")
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\ncat {tmp_path}/answer\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    return tmp_path


@pytest.mark.parametrize(("partitions", "expected"), [
    ((), "leaves"), (("main",), "leaves"), (("blocks",), "blocks"), (("blocks", "main"), "blocks"),
    (("flat",), "flat"), (("unknown",), "leaves"),
])
@pytest.mark.parametrize("from_file", [False, True])
def test_topology_of_the_partition(cluster: Path, from_file: bool, partitions: tuple[str, ...],
                                   expected: str) -> None:
    if from_file:
        shutil.copy(DATA / "topology-26.05.5.yaml", cluster / "topology.yaml")
    seen = cluster_state.load_cluster_state(Config(), "auto", partitions)
    assert seen.topology.name == expected
    assert seen.topology.source == (str(cluster / "topology.yaml") if from_file else "scontrol show topoconf")
    assert len(seen.cluster.nodes) == 10


@pytest.mark.parametrize(("partition", "expected"), [
    ("main", ("spine", "leaf01")), ("flat", ()), ("blocks", ("b[1-4]", "b[1-2]", "b2")),
])
def test_a_step_takes_the_zones_of_its_partition(cluster: Path, partition: str, expected: tuple[str, ...]) -> None:
    controller = SlurmConfig((26, 5), False, "none", (), True)
    topology, complaint = step_context.load_job_topology(controller, ["n3"], partition, True)
    assert (topology.path_of("n3"), complaint) == (expected, "")


def test_a_topology_that_is_not_there(cluster: Path) -> None:
    (cluster / "topology.yaml").write_text("topology: other\nflat: true\n")
    with pytest.raises(InputError, match="no topology is named 'blocks'; valid: other"):
        cluster_state.load_cluster_state(Config(), "auto", ("blocks",))


def test_no_topology_at_all(cluster: Path) -> None:
    text = (cluster / "answer").read_text()
    (cluster / "answer").write_text(text[:text.index("scontrol: show topoconf")])
    with pytest.raises(UnavailableError, match="no topology"):
        cluster_state.load_cluster_state(Config(), "auto")
