"""Topology of a job's partition on a cluster with several topologies, from output and files of Slurm 26.05."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm

from slurmdl.config import Config
from slurmdl.errors import InputError, UnavailableError
from slurmdl.launch import cluster_state, step_inputs
from slurmdl.slurm.slurm_conf import SlurmConfig

DATA = Path(__file__).parent / "data"


@pytest.fixture
def cluster(fake_slurm: FakeSlurm) -> Path:
    """A directory for slurm.conf, and a scontrol with the output of 26.05."""
    fake_slurm.answer("scontrol", (DATA / "scontrol-26.05.5.txt").read_text())
    return fake_slurm.directory


@pytest.mark.parametrize(("partitions", "expected"), [
    ((), "leaves"), (("main",), "leaves"), (("blocks",), "blocks"), (("blocks", "main"), "blocks"),
    (("flat",), "flat"), (("unknown",), "leaves"),
])
@pytest.mark.parametrize("from_file", [False, True])
def test_cluster_state_has_the_topology_of_the_partition(cluster: Path, from_file: bool, partitions: tuple[str, ...],
                                   expected: str) -> None:
    if from_file:
        shutil.copy(DATA / "topology-26.05.5.yaml", cluster / "topology.yaml")
    state = cluster_state.load_cluster_state(Config(), "auto", partitions)
    assert state.topology.name == expected
    assert state.topology.source == (str(cluster / "topology.yaml") if from_file else "scontrol show topoconf")
    assert len(state.cluster.nodes) == 10


@pytest.mark.parametrize(("partition", "expected"), [
    ("main", ("spine", "leaf01")), ("flat", ()), ("blocks", ("b[1-4]", "b[1-2]", "b2")),
])
def test_step_uses_topology_of_its_partition(cluster: Path, partition: str, expected: tuple[str, ...]) -> None:
    slurm_config = SlurmConfig((26, 5), False, "none", (), True)
    topology, reason = step_inputs.load_job_topology(slurm_config, ["n3"], partition, True)
    assert (topology.path_of("n3"), reason) == (expected, "")


def test_missing_topology_of_partition_is_rejected(cluster: Path) -> None:
    (cluster / "topology.yaml").write_text("topology: other\nflat: true\n")
    with pytest.raises(InputError, match="'blocks' does not exist; expected one of other"):
        cluster_state.load_cluster_state(Config(), "auto", ("blocks",))


def test_no_topology(cluster: Path) -> None:
    text = (cluster / "scontrol.answer").read_text()
    (cluster / "scontrol.answer").write_text(text[:text.index("scontrol: show topoconf")])
    with pytest.raises(UnavailableError, match="no topology"):
        cluster_state.load_cluster_state(Config(), "auto")
