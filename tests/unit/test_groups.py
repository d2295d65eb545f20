"""Named groups of nodes: options, traffic, nodes and ranks."""

from __future__ import annotations

import numpy as np
import pytest

from slurmdl import planned_group, planned_mesh
from slurmdl.dl_options import DlOptions, merge_layers
from slurmdl.errors import InputError, PlacementError, UsageError
from slurmdl.groups import parse_group_bytes, parse_groups
from slurmdl.job_request import JobRequest
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.place import place_job
from slurmdl.placement.rank_orders import best_rank_map
from slurmdl.plan import Plan, encode_plan
from tests.placing import cluster, matrix, node, two_level

LEAVES = two_level([f"a{i}" for i in range(4)], [f"b{i}" for i in range(4)], [f"c{i}" for i in range(4)])
IDLE = cluster(*(node(name) for name in LEAVES.nodes))
THIN = LinkScores(default_node_bandwidth=1e9, default_zone_bandwidth=(1e8,), default_latency=0.0)


def zones_by_role(nodes: tuple[str, ...], roles: tuple[str, ...]) -> dict[str, set[str]]:
    return {role: {name[0] for name, own in zip(nodes, roles, strict=True) if own == role} for role in roles}


@pytest.mark.parametrize(("text", "message"), [
    ("trainer=8", "one group; expected names"), ("trainer=8,trainer=2", "trainer is given twice"),
    ("ps=2,worker=4", "ps is a reserved name"), ("a=0,b=2", "invalid group 'a=0'"), ("a,b=2", "invalid group 'a'"),
    ("a=x,b=2", "invalid group 'a=x'"), ("a=1,,b=2", "invalid group ''"), ("a b=1,c=2", "invalid group 'a b=1'")])
def test_invalid_groups(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"--dl-groups=.*{message}"):
        merge_layers({"groups": text})


@pytest.mark.parametrize(("meshes", "message"), [
    ("dp=2,tp=2", "no group 'dp=2,tp=2'; expected GROUP:MESH/"), ("trian:dp=2", "no group 'trian'; .* train, roll"),
    ("train:dpp=2", "--dl-mesh=train:=dpp=2: unknown dimension 'dpp'"),
    ("train:dp=3", "train: a mesh of 3 ranks on 2 nodes"),
    ("train:dp=2,tp=4/roll:dp=3,tp=2", "ranks per node: train 4, roll 2; expected equal numbers")])
def test_invalid_meshes_of_groups(meshes: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        merge_layers({"groups": "train=2,roll=3", "mesh": meshes})


@pytest.mark.parametrize(("text", "message"), [
    ("a=1G,d=2G", "unknown group 'd'; expected a, b"), ("a:d=2G", "unknown group 'd'"),
    ("a=x", "a: invalid value 'x'"), ("a:b", "a:b: invalid value ''"), ("b=1G", "b has a mesh")])
def test_invalid_bytes_of_groups(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_group_bytes(text, parse_groups("a=2,b=2", "--dl-groups", "b:dp=4"), "--dl-bytes")


def test_layers() -> None:
    """Groups replace a mesh of a weaker layer, a mesh the groups: both belong in one layer."""
    assert merge_layers({"mesh": "dp=4"}, {"groups": "a=2,b=1"}).mesh == ""
    assert merge_layers({"groups": "a=2,b=1"}, {"mesh": "dp=4"}).groups == ""
    with pytest.raises(UsageError, match="--dl-mesh=a:dp=4: unknown dimension 'a:dp'"):
        merge_layers({"groups": "a=2,b=1"}, {"mesh": "a:dp=4"})
    assert merge_layers({"groups": "a=2,b=1"}, {"strategy": "gossip"}).groups == ""
    with pytest.raises(UsageError, match="--dl-groups=a=2,b=1: not valid with --dl-strategy=ps"):
        merge_layers({"groups": "a=2,b=1", "ps": "1"})


def test_traffic_inside_and_between_groups() -> None:
    dl = DlOptions(groups="a=2,b=3", bytes="a=1G,a:b=6G")
    traffic = dl.traffic
    total = sum(matrix(phase, 10) for phase in traffic.phases(10))
    assert isinstance(total, np.ndarray)
    assert total[:4, :4].sum() == pytest.approx(4 * 2 * 1e9 * 3 / 4)  # a ring of four ranks
    assert total[:4, 4:] == pytest.approx(np.full((4, 6), 6e9 / 24))
    assert not total[4:].any()
    assert traffic.roles(10) == ("a",) * 4 + ("b",) * 6
    assert traffic.kind == "groups" and not traffic.is_zone_dependent
    with pytest.raises(PlacementError, match="9 ranks on 5 nodes; expected the same number on each node"):
        traffic.phases(9)


def test_default_traffic_is_a_ring_in_each_group() -> None:
    phases = DlOptions(groups="a=2,b=3", bytes="8").traffic.phases(5)
    assert [sorted({*phase.source.tolist(), *phase.target.tolist()}) for phase in phases] == [[0, 1], [2, 3, 4]]


def test_meshes_of_groups() -> None:
    dl = DlOptions(groups="a=2,b=1", mesh="a:dp=2,tp=4/b:tp=4", bytes="tp=1G")
    total = sum(matrix(phase, 12) for phase in dl.traffic.phases(12))
    assert isinstance(total, np.ndarray)
    assert {tuple(pair) for pair in np.argwhere(total).tolist()} == {
        (4 * block + i, 4 * block + (i + 1) % 4) for block in range(3) for i in range(4)}
    with pytest.raises(PlacementError, match="a: 4 ranks on each node; the job has 6 ranks on 3 nodes"):
        dl.traffic.phases(6)


def test_each_group_fills_zones_of_its_own() -> None:
    """Rings over thin uplinks: three groups of four nodes, three leaf zones of four nodes."""
    dl = DlOptions(groups="x=4,y=4,z=4", bytes="x=1G,y=1G,z=1G")
    placement = place_job(JobRequest(dl, nodes=(12, 12), ntasks_per_node=2), IDLE, LEAVES, THIN)
    rank_map = placement.rank_map
    assert rank_map is not None
    assert all(len(zones) == 1 for zones in zones_by_role(rank_map.nodes, rank_map.roles).values())
    assert rank_map.cost.inter_zone_bytes == 0
    assert rank_map.nodes[0] == placement.nodes[0]  # rank 0 on the first node


def test_groups_that_exchange_much_share_a_zone() -> None:
    dl = DlOptions(groups="x=2,y=2,z=4", bytes="x:y=8G,z=1G")
    placement = place_job(JobRequest(dl, nodes=(8, 8)), IDLE, LEAVES, THIN)
    assert placement.rank_map is not None
    zones = zones_by_role(placement.rank_map.nodes, placement.rank_map.roles)
    assert zones["x"] == zones["y"] and len(zones["x"] | zones["z"]) == 2


@pytest.mark.parametrize("tasks", [1, 3])
def test_a_node_has_ranks_of_one_group(tasks: int) -> None:
    dl = DlOptions(groups="x=3,y=2,z=4", bytes="x=1G,y:z=3G,z:x=1G", rank0="any")
    placement = place_job(JobRequest(dl, nodes=(9, 9), ntasks_per_node=tasks), IDLE, LEAVES, THIN)
    assert placement.rank_map is not None
    pairs = set(zip(placement.rank_map.nodes, placement.rank_map.roles, strict=True))
    assert len(pairs) == 9
    assert placement.rank_map.roles == ("x",) * 3 * tasks + ("y",) * 2 * tasks + ("z",) * 4 * tasks


def test_launcher_starts_the_ranks_of_the_meshes() -> None:
    dl = DlOptions(groups="x=2,y=4", mesh="x:dp=2,tp=8/y:dp=4,tp=8")
    assert dl.traffic.launched_ranks_per_node(6, 6) == 8
    assert DlOptions(mesh="dp=2,tp=3").traffic.launched_ranks_per_node(6, 6) == 0  # a task is a rank
    placement = place_job(JobRequest(dl, nodes=(6, 6)), IDLE, LEAVES, THIN)
    assert placement.rank_map is not None
    assert len(placement.rank_map.nodes) == 48
    assert placement.rank_map.nodes[::8] == tuple(dict.fromkeys(placement.rank_map.nodes))


def test_wrong_number_of_nodes() -> None:
    dl = DlOptions(groups="x=2,y=4")
    with pytest.raises(UsageError, match="--dl-groups=x=2,y=4: 6 nodes; the job has 8; expected y=6"):
        place_job(JobRequest(dl, nodes=(8, 8)), IDLE, LEAVES, THIN)
    with pytest.raises(PlacementError, match="6 nodes; the job has 2; expected 6 nodes"):
        best_rank_map([("a0", 1), ("a1", 1)], LEAVES, THIN, dl.traffic)
    slots = [(name, 1 + (name == "a0")) for name in LEAVES.nodes[:6]]
    with pytest.raises(PlacementError, match="different numbers of tasks; expected --ntasks-per-node"):
        best_rank_map(slots, LEAVES, THIN, dl.traffic)


def test_own_group_and_its_mesh() -> None:
    plan = Plan("allreduce", ("n1", "n2", "n3"), ("a", "a", "b"), {}, mesh="a:dp=2", groups="a=2,b=1")
    environ = {"SLURMDL_PLAN": encode_plan(plan), "SLURMDL_ROLE": "a"}
    assert planned_mesh(environ).sizes == (2,)
    group = planned_group({**environ, "SLURMDL_ROLE": "b"})
    assert (group.name, group.ranks, group.nodes) == ("b", (2,), ("n3",))
    for wrong in ({**environ, "SLURMDL_ROLE": "c"}, {"SLURMDL_ROLE": "a"}):
        with pytest.raises(InputError, match="expected `slurmdl srun` with --dl-groups"):
            planned_group(wrong)
    with pytest.raises(InputError, match=r"the group 'b' .* has no mesh; the meshes are a:dp=2"):
        planned_mesh({**environ, "SLURMDL_ROLE": "b"})
