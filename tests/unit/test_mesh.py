"""Meshes of ranks and named groups of nodes: options, coordinates, bytes, and the nodes and ranks chosen for them."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from placing import SCORES, idle, job, matrix, two_level

from slurmdl import plan as plans
from slurmdl import planned_group, planned_mesh
from slurmdl.config import load_config
from slurmdl.dl_options import DlOptions, merge_layers
from slurmdl.errors import InputError, PlacementError, UsageError
from slurmdl.groups import GroupTraffic, parse_group_bytes, parse_groups
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.links.score_sources import load_from_sources
from slurmdl.mesh import (
    DEFAULT_MODEL,
    Mesh,
    MeshTraffic,
    boxes,
    bytes_leaving,
    model_volumes,
    parse_mesh,
    parse_model,
    parse_volumes,
)
from slurmdl.placement.explain import link_assumption
from slurmdl.placement.iteration_cost import network_links, predict_cost
from slurmdl.placement.mesh_orders import consecutive_box, mesh_orders
from slurmdl.placement.place import place_job
from slurmdl.placement.rank_orders import best_rank_map
from slurmdl.placement.result import RankMap
from slurmdl.topology.topology import Topology

#: n1, n3, ... in z0 and n2, n4, ... in z1
TWO_ZONES = two_level(["n1", "n3", "n5", "n7"], ["n2", "n4", "n6", "n8"])
LEAVES = two_level([f"a{i}" for i in range(4)], [f"b{i}" for i in range(4)], [f"c{i}" for i in range(4)])
THIN = LinkScores(default_node_bandwidth=1e9, default_zone_bandwidth=(1e8,), default_latency=0.0)


def traffic_of(mesh: str, volumes: str) -> MeshTraffic:
    traffic = DlOptions(mesh=mesh, bytes=volumes).traffic
    assert isinstance(traffic, MeshTraffic)
    return traffic


def groups_of(mesh: str) -> dict[str, list[list[int]]]:
    """Ranks of the groups along each kind of dimension, sorted."""
    kinds = dict.fromkeys(re.findall("[a-z]+(?==|[0-9])", mesh.removeprefix("megatron:")))
    traffic = traffic_of(mesh, ",".join(f"{kind}=1" for kind in kinds if kind != "cp" or "cp1" not in mesh))
    return {dimension.kind: sorted(map(sorted, traffic.groups(dimension.dims).tolist()))
            for dimension in traffic.dimensions}


def place(options: DlOptions, topology: Topology, nodes: int, scores: LinkScores = SCORES,
          **fields: object) -> RankMap:
    rank_map = place_job(job(nodes, options, **fields), idle(topology), topology, scores).rank_map
    assert rank_map is not None
    return rank_map


def test_ranks_are_numbered_as_in_a_device_mesh() -> None:
    mesh, ranks = parse_mesh("dp=2,pp=3,tp=4", "--dl-mesh"), np.arange(24).reshape(2, 3, 4)
    for rank in range(24):
        assert ranks[tuple(mesh.coordinates(rank)[name] for name in ("dp", "pp", "tp"))] == rank


def test_device_mesh_has_the_same_groups() -> None:
    distributed = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    traffic = traffic_of("dp=2,pp=3,tp=4", "tp=1,pp=1,dp=1")
    distributed.init_process_group("fake", store=FakeStore(), rank=13, world_size=24)
    try:
        mesh = init_device_mesh("cpu", traffic.mesh.sizes, mesh_dim_names=traffic.mesh.names)
        for dimension in traffic.dimensions:
            group = distributed.get_process_group_ranks(mesh.get_group(dimension.kind))
            assert group in traffic.groups(dimension.dims).tolist()
            assert mesh.get_local_rank(dimension.kind) == traffic.mesh.coordinates(13)[dimension.kind]
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(("mesh", "kind", "groups"), [
    # 16 ranks with tensor size 2 and pipeline size 4: initialize_model_parallel of Megatron lists these groups
    ("megatron:tp2-cp1-dp2-pp4", "tp", [[i, i + 1] for i in range(0, 16, 2)]),
    ("megatron:tp2-cp1-dp2-pp4", "dp", [[i + j, i + j + 2] for i in range(0, 16, 4) for j in (0, 1)]),
    ("megatron:tp2-cp1-dp2-pp4", "pp", [[i, i + 4, i + 8, i + 12] for i in range(4)]),
    # experts divide the data-parallel ranks
    ("megatron:tp2-cp1-ep2-dp4-pp2", "ep", [[i + j, i + j + 2] for i in range(0, 16, 4) for j in (0, 1)]),
    ("megatron:tp2-cp2-ep4-dp4-pp1", "ep", [[8 * i + j + 2 * k for k in range(4)] for i in (0, 1) for j in (0, 1)]),
    ("megatron:tp2-dp4-cp1-ep2", "ep", [[0, 2], [1, 3], [4, 6], [5, 7]]),
    # gradients are reduced over context and experts, too
    ("dp=2,ep=2,tp=2", "dp", [[0, 2, 4, 6], [1, 3, 5, 7]]), ("dp=2,cp=2", "dp", [[0, 1, 2, 3]]),
])
def test_groups_of_a_dimension(mesh: str, kind: str, groups: list[list[int]]) -> None:
    assert groups_of(mesh)[kind] == groups


@pytest.mark.parametrize(("parse", "text", "message"), [
    *((parse_mesh, text, f"^--dl-mesh={re.escape(text)}: .*{message}") for text, message in (
        ("dpp=2", "unknown dimension 'dpp'; expected .*dp"),
        ("dp=0", "dp: invalid size '0'; expected a whole number"), ("dp=", "invalid size ''"),
        ("dp=2,dp_replicate=2", "dp_replicate is given twice"), ("tp8", "expected dimensions and sizes"),
        ("dp=4096,tp=4096", "16777216 ranks; expected at most"),
        ("megatron:tp2-ep3-dp4", "ep3 does not divide dp4 x cp1"),
        ("megatron:tp2,dp4", "expected dimensions and sizes"),
        ("megatron:tp2-dp2-cp2-ep4", "dp directly after cp"))),
    (parse_model, "params=7B,hidden=4096,seq=1", "layers is missing; expected params, hidden, layers, seq"),
    (parse_model, "parms=7B", "unknown key 'parms'; expected params"),
    (parse_model, "params=x,hidden=1,layers=1,seq=1", "params: invalid value 'x'; expected a number above 0"),
    (parse_model, "params=1.5,hidden=1,layers=1,seq=1", "params: invalid value '1.5'"),
    (parse_model, f"{DEFAULT_MODEL},micro-batch=0", "micro-batch: invalid value '0'"),
    (parse_model, f"{DEFAULT_MODEL},dtype=int4", "dtype: invalid value 'int4'; expected bf16"),
    (parse_model, f"{DEFAULT_MODEL},expert-params=8B", "expert-params: expected at most params"),
    (lambda text, source: parse_volumes(text, parse_mesh("dp=2", ""), source), "tp=1G",
     "unknown dimension 'tp'; expected dp"),
    *((lambda text, source: merge_layers({"groups": text}), text, f"--dl-groups=.*{message}") for text, message in (
        ("trainer=8", "one group; expected names"), ("trainer=8,trainer=2", "trainer is given twice"),
        ("ps=2,worker=4", "ps is a reserved name"), ("a=0,b=2", "invalid group 'a=0'"),
        ("a,b=2", "invalid group 'a'"), ("a=x,b=2", "invalid group 'a=x'"), ("a=1,,b=2", "invalid group ''"),
        ("a b=1,c=2", "invalid group 'a b=1'"))),
    *((lambda text, source: merge_layers({"groups": "train=2,roll=3", "mesh": text}), text, message)
      for text, message in (
        ("dp=2,tp=2", "no group 'dp=2,tp=2'; expected GROUP:MESH/"),
        ("trian:dp=2", "no group 'trian'; .* train, roll"),
        ("train:dpp=2", "--dl-mesh=train:=dpp=2: unknown dimension 'dpp'"),
        ("train:dp=3", "train: a mesh of 3 ranks on 2 nodes"),
        ("train:dp=2,tp=4/roll:dp=3,tp=2", "ranks per node: train 4, roll 2; expected equal numbers"))),
    *((lambda text, source: parse_group_bytes(text, parse_groups("a=2,b=2", "--dl-groups", "b:dp=4"), "--dl-bytes"),
       text, message) for text, message in (
        ("a=1G,d=2G", "unknown group 'd'; expected a, b"), ("a:d=2G", "unknown group 'd'"),
        ("a=x", "a: invalid value 'x'"), ("a:b", "a:b: invalid value ''"), ("b=1G", "b has a mesh"))),
    (lambda text, source: merge_layers({"groups": "a=2,b=1"}, {"mesh": text}), "a:dp=4",
     "--dl-mesh=a:dp=4: unknown dimension 'a:dp'"),
    (lambda text, source: merge_layers({"groups": text, "ps": "1"}), "a=2,b=1",
     "--dl-groups=a=2,b=1: not valid with --dl-strategy=ps"),
])
def test_invalid_option_is_refused_in_one_line(parse: Callable[[str, str], object], text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        parse(text, "--dl-mesh")
    assert "\n" not in str(raised.value)


def test_layers() -> None:
    """Groups replace a mesh of a weaker layer, a mesh the groups: both belong in one layer."""
    assert merge_layers({"mesh": "dp=4"}, {"groups": "a=2,b=1"}).mesh == ""
    assert merge_layers({"groups": "a=2,b=1"}, {"mesh": "dp=4"}).groups == ""
    assert merge_layers({"groups": "a=2,b=1"}, {"strategy": "gossip"}).groups == ""


@pytest.mark.parametrize(("ranks", "message"), [
    (32, ""), (64, "expected dp=4"), (40, "expected 32 or 48 ranks, or sizes whose product is 40")])
def test_mesh_of_another_size_names_the_sizes_that_fit(ranks: int, message: str) -> None:
    mismatch = DlOptions(mesh="dp=2,pp=2,tp=8").traffic.size_mismatch(1, ranks)
    assert mismatch.endswith(message) and bool(mismatch) == bool(message)


A = 4096 * 4096 * 2  # bytes of the activations of DEFAULT_MODEL


@pytest.mark.parametrize(("model", "mesh", "expected"), [
    # 8 layers of each stage, 3 micro-batches
    (f"{DEFAULT_MODEL},micro-batches=3", "dp=2,pp=4,tp=8", {
        "tp": (4 * 8 * 3 * A, 4 * 8 * 3), "pp": (3 * A / 8, 3), "dp": (7e9 * 2 / 32, 1)}),
    (DEFAULT_MODEL, "dp=2,pp=4,tp=8", {"pp": (16 * A / 8, 16)}),
    (DEFAULT_MODEL, "cp=2,tp=4", {"cp": (6 * 32 * A / 4, 3 * 32), "tp": (4 * 32 * A / 2, 4 * 32)}),
    (DEFAULT_MODEL, "hsdp=4x8", {"fsdp": (3 * 7e9 * 2, 3 * 32), "dp": (7e9 * 2 / 8, 1)}),
    (f"{DEFAULT_MODEL},dtype=fp32,micro-batch=2", "cp=2,pp=2,tp=2", {"pp": (8 * 4 * A / 4, 8)}),
    ("params=9B,hidden=64,layers=1,seq=1,expert-params=8B", "dp=2,ep=4", {
        "dp": ((1e9 + 2e9) * 2, 1), "ep": (4 * 2 * 128, 4)}),
    ("params=9B,hidden=64,layers=2,seq=1,expert-params=8B,topk=3", "ep=4,cp=2,tp=2,pp=1", {
        "ep": (4 * 2 * 3 * 128 / 4, 4 * 2)}),
])
def test_volumes_of_a_model(model: str, mesh: str, expected: dict[str, tuple[float, float]]) -> None:
    volumes = model_volumes(parse_model(model, "--dl-model"), parse_mesh(mesh, "--dl-mesh"))
    assert {kind: (volumes[kind].bytes, volumes[kind].operations) for kind in expected} == expected


def test_given_bytes_replace_those_of_the_model() -> None:
    traffic = DlOptions(mesh="hsdp=4x8", model=DEFAULT_MODEL, bytes="dp=5").traffic
    assert isinstance(traffic, MeshTraffic)
    assert traffic.mesh.sizes == (4, 8)
    assert (traffic.volumes["dp"].bytes, traffic.volumes["fsdp"].bytes) == (5, 3 * 7e9 * 2)
    groups = DlOptions(groups="a=2,b=1", mesh="a:dp=2", bytes="b=3,dp=7").traffic
    assert isinstance(groups, GroupTraffic)
    assert (groups.inside, groups.meshes["a"].volumes["dp"].bytes) == ({"b": 3}, 7)


@pytest.mark.parametrize(("mesh", "volumes", "expected"), [
    ("dp=3,tp=2", "dp=30,tp=8", [([(0, 1), (1, 0), (2, 3), (3, 2), (4, 5), (5, 4)], 2 * 8 / 2, 2),
                                 ([(0, 2), (1, 3), (2, 4), (3, 5), (4, 0), (5, 1)], 2 * 30 * 2 / 3, 4)]),
    ("pp=3", "pp=5", [([(0, 1), (1, 2)], 5, 1), ([(1, 0), (2, 1)], 5, 1)]),
    ("ep=3", "ep=9", [([(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)], 3, 1)]),
    ("fsdp=3", "fsdp=9", [([(0, 1), (1, 2), (2, 0)], 9 * 2 / 3, 2)]),
])
def test_phases_of_each_kind(mesh: str, volumes: str,
                             expected: list[tuple[list[tuple[int, int]], float, float]]) -> None:
    traffic = traffic_of(mesh, volumes)
    assert [(sorted(zip(phase.source.tolist(), phase.target.tolist(), strict=True)), phase.bytes_per_pair,
             phase.rounds) for phase in traffic.phases(traffic.mesh.ranks)] == expected


@pytest.mark.parametrize("mesh", ["dp=4,pp=2,tp=2", "ep=2,pp=4,tp=2", "dp=2,cp=2,tp=4", "fsdp=4,dp=2,tp=2"])
def test_bytes_that_leave_a_box_are_those_of_the_cost_model(mesh: str) -> None:
    """A box of consecutive ranks on one node: the bytes over its link, for all boxes of several meshes."""
    names = re.findall("[a-z]+", mesh)
    traffic = traffic_of(mesh, ",".join(f"{name}={3 + 2 * i}" for i, name in enumerate(names)))
    sizes = traffic.mesh.sizes
    links = network_links(["n1", "n2"], two_level(["n1"], ["n2"]), LinkScores(
        default_node_bandwidth=1.0, default_zone_bandwidth=(1e9,), default_latency=0.0))
    for ranks in (2, 4, 8):
        found = [*boxes(sizes, ranks, (1,) * len(sizes))]
        for box in found:
            positions = (traffic.mesh.coordinates(rank).values() for rank in range(traffic.mesh.ranks))
            outside = [any(at >= count for at, count in zip(position, box, strict=True)) for position in positions]
            assert bytes_leaving(traffic, box) == pytest.approx(
                predict_cost(traffic.phases(traffic.mesh.ranks), links, np.array(outside, int)).seconds), (mesh, box)
        assert traffic.min_node_bytes(ranks) == min(bytes_leaving(traffic, box) for box in found) > 0
    assert traffic.min_node_bytes(3) == 0.0


@pytest.mark.parametrize(("sizes", "ranks", "box"), [
    ((4, 2, 8), 8, (1, 1, 8)), ((4, 2, 8), 4, (1, 1, 4)), ((4, 2, 8), 16, (1, 2, 8)), ((4, 3, 2), 4, None),
    ((4, 2, 8), 1, (1, 1, 1)), ((4, 2, 8), 128, None)])
def test_consecutive_box(sizes: tuple[int, ...], ranks: int, box: tuple[int, ...] | None) -> None:
    assert consecutive_box(sizes, ranks) == box


def test_orders_are_permutations_and_the_first_is_consecutive_if_that_is_best() -> None:
    traffic = traffic_of("dp=4,pp=2,tp=4", "tp=100,pp=1,dp=10")
    orders = list(mesh_orders(traffic, 4, [2]))
    assert len(orders) > 4 and len({order.tobytes() for order in orders}) == len(orders)
    for order in orders:
        assert sorted(order.tolist()) == list(range(32)) and order[0] == 0
    assert orders[0].tolist() == list(range(32))
    node_by_node = [*mesh_orders(traffic, 4, [2], node_by_node=True)]
    assert node_by_node and all((block == block[0] + np.arange(4)).all() for order in node_by_node
                                for block in order.reshape(-1, 4))
    assert not [*mesh_orders(traffic, 3, [2], node_by_node=True)]


@pytest.mark.parametrize(("mesh", "together"), [("dp=2,pp=4", "pp"), ("pp=2,dp=4", "dp"), ("pp=2,dp=2,tp=2", "tp")])
def test_groups_with_most_traffic_stay_in_a_zone(mesh: str, together: str) -> None:
    """Whatever the order of the dimensions, unlike the numbering of plain srun."""
    volumes = ",".join(f"{name}={1000 if name == together else 1}" for name in re.findall("[a-z]+", mesh))
    rank_map = place(DlOptions(mesh=mesh, bytes=volumes), TWO_ZONES, 8)
    for group in groups_of(mesh)[together]:
        assert len({TWO_ZONES.leaf_of(rank_map.nodes[rank]) for rank in group}) == 1
    assert rank_map.cost.seconds < rank_map.order_costs["alphabetical"].seconds / 2


def test_launcher_numbers_the_ranks_of_a_node_consecutively() -> None:
    slots = [(f"n{i}", 2) for i in range(1, 9)]
    traffic = traffic_of("pp=2,dp=4,tp=2", "tp=5,dp=1000,pp=1")
    rank_map = best_rank_map(slots, TWO_ZONES, SCORES, traffic, node_by_node=True)
    assert rank_map.nodes[::2] == rank_map.nodes[1::2]
    assert {TWO_ZONES.leaf_of(name) for name in rank_map.nodes[:8]} == {"z0"}
    # one task per node starts the ranks of the mesh
    launched = place(DlOptions(mesh="dp=4,tp=2", bytes="tp=1000,dp=1"), TWO_ZONES, 4)
    assert len(launched.nodes) == 8 and launched.nodes[::2] == launched.nodes[1::2]
    assert DlOptions(mesh="dp=2,tp=3").traffic.launched_ranks_per_node(6, 6) == 0  # a task is a rank


@pytest.mark.parametrize("tasks", [(2, 1, 1, 2), (1, 2, 2, 1), (3, 1, 1, 1)])
@pytest.mark.parametrize("node_by_node", [False, True])
def test_mesh_on_nodes_with_different_numbers_of_tasks(tasks: tuple[int, ...], node_by_node: bool) -> None:
    slots = [(f"n{i}", count) for i, count in enumerate(tasks, 1)]
    traffic = traffic_of("dp=3,tp=2", "dp=10,tp=1000")
    rank_map = best_rank_map(slots, TWO_ZONES, SCORES, traffic, node_by_node=node_by_node)
    assert {name: rank_map.nodes.count(name) for name, _ in slots} == dict(slots) and rank_map.nodes[0] == "n1"
    # two ranks that exchange most share a zone if the zones have pairs of tasks
    pairs = zip(rank_map.nodes[::2], rank_map.nodes[1::2], strict=True)
    apart = sum(TWO_ZONES.leaf_of(left) != TWO_ZONES.leaf_of(right) for left, right in pairs)
    assert node_by_node or apart == (tasks[0] + tasks[2]) % 2


def test_a_leaf_zone_with_a_network_of_its_own_is_preferred() -> None:
    """Three nodes in the zone of fast node links, or with NVLink between four slow ones."""
    nodes = {f"n{i}": LinkScore(4000.0 if i % 2 else 1000.0, 0.0) for i in range(1, 9)}
    options = DlOptions(mesh="dp=4", bytes="dp=1000")
    plain = place(options, TWO_ZONES, 4, LinkScores(nodes=nodes, default_latency=0.0))
    assert {TWO_ZONES.leaf_of(name) for name in plain.nodes} == {"z0"}
    tiers = place(options, TWO_ZONES, 4, LinkScores(nodes=nodes, default_latency=0.0, default_leaf_bandwidth=10000.0))
    assert tiers.cost.seconds == pytest.approx(1500 / 10000)


def test_two_tiers_are_configured_and_shown(tmp_path) -> None:
    file = tmp_path / "slurmdl.yaml"
    file.write_text("link_defaults: {leaf_bandwidth: 3.6e12, node_bandwidth: 2.0e11, rails: 4}\n")
    scores = load_from_sources(load_config([str(file)]), "off", {}).scores
    assert (scores.default_leaf_bandwidth, scores.default_node_bandwidth, scores.default_rails) == (3.6e12, 2e11, 4)
    shown = link_assumption(TWO_ZONES, scores)
    assert shown.startswith("links 1.6 Tbit/s on 4 rails, 28.8 Tbit/s inside a leaf zone"), shown
    for value in ("0", "1.5", "x", "-2"):
        file.write_text(f"link_defaults: {{rails: {value}}}\n")
        with pytest.raises(InputError, match=r"link_defaults.rails: invalid value .*; expected"):
            load_config([str(file)])


# --- named groups


def zones_by_role(rank_map: RankMap) -> dict[str, set[str]]:
    return {role: {name[0] for name, own in zip(rank_map.nodes, rank_map.roles, strict=True) if own == role}
            for role in rank_map.roles}


def test_traffic_inside_and_between_groups() -> None:
    traffic = DlOptions(groups="a=2,b=3", bytes="a=1G,a:b=6G").traffic
    total = np.sum([matrix(phase, 10) for phase in traffic.phases(10)], axis=0)
    assert total[:4, :4].sum() == pytest.approx(4 * 2 * 1e9 * 3 / 4)  # a ring of four ranks
    assert total[:4, 4:] == pytest.approx(np.full((4, 6), 6e9 / 24))
    assert not total[4:].any()
    assert traffic.roles(10) == ("a",) * 4 + ("b",) * 6
    assert traffic.kind == "groups" and not traffic.is_zone_dependent
    # by default a ring in each group
    phases = DlOptions(groups="a=2,b=3", bytes="8").traffic.phases(5)
    assert [sorted({*phase.source.tolist(), *phase.target.tolist()}) for phase in phases] == [[0, 1], [2, 3, 4]]
    # many pairs are not listed, and have the same bytes
    large = DlOptions(groups="a=1,b=1", bytes="a:b=9G").traffic.phases(2 * 65)[-1]
    assert large.all_pairs and matrix(large, 130).sum() == pytest.approx(9e9)


def test_meshes_of_groups() -> None:
    traffic = DlOptions(groups="a=2,b=1", mesh="a:dp=2,tp=4/b:tp=4", bytes="tp=1G").traffic
    total = np.sum([matrix(phase, 12) for phase in traffic.phases(12)], axis=0)
    assert {tuple(pair) for pair in np.argwhere(total).tolist()} == {
        (4 * block + i, 4 * block + (i + 1) % 4) for block in range(3) for i in range(4)}


def test_each_group_fills_zones_of_its_own_and_those_that_exchange_much_share_one() -> None:
    """Rings over thin uplinks: three groups of four nodes, three leaf zones of four nodes."""
    placement = place_job(job(12, DlOptions(groups="x=4,y=4,z=4", bytes="x=1G,y=1G,z=1G"), ntasks_per_node=2),
                          idle(LEAVES), LEAVES, THIN)
    rank_map = placement.rank_map
    assert rank_map is not None
    assert all(len(zones) == 1 for zones in zones_by_role(rank_map).values())
    assert rank_map.cost.inter_zone_bytes == 0
    assert rank_map.nodes[0] == placement.nodes[0]  # rank 0 on the first node
    zones = zones_by_role(place(DlOptions(groups="x=2,y=2,z=4", bytes="x:y=8G,z=1G"), LEAVES, 8, THIN))
    assert zones["x"] == zones["y"] and len(zones["x"] | zones["z"]) == 2


@pytest.mark.parametrize("tasks", [1, 3])
def test_a_node_has_ranks_of_one_group(tasks: int) -> None:
    options = DlOptions(groups="x=3,y=2,z=4", bytes="x=1G,y:z=3G,z:x=1G", rank0="any")
    rank_map = place(options, LEAVES, 9, THIN, ntasks_per_node=tasks)
    assert len(set(zip(rank_map.nodes, rank_map.roles, strict=True))) == 9
    assert rank_map.roles == ("x",) * 3 * tasks + ("y",) * 2 * tasks + ("z",) * 4 * tasks


def test_launcher_starts_the_ranks_of_the_meshes() -> None:
    options = DlOptions(groups="x=2,y=4", mesh="x:dp=2,tp=8/y:dp=4,tp=8")
    assert options.traffic.launched_ranks_per_node(6, 6) == 8
    rank_map = place(options, LEAVES, 6, THIN)
    assert len(rank_map.nodes) == 48
    assert rank_map.nodes[::8] == tuple(dict.fromkeys(rank_map.nodes))


def test_wrong_number_of_nodes() -> None:
    options = DlOptions(groups="x=2,y=4")
    with pytest.raises(UsageError, match="--dl-groups=x=2,y=4: 6 nodes; the job has 8; expected y=6"):
        place(options, LEAVES, 8)
    with pytest.raises(PlacementError, match="6 nodes; the job has 2; expected 6 nodes"):
        best_rank_map([("a0", 1), ("a1", 1)], LEAVES, THIN, options.traffic)
    slots = [(name, 1 + (name == "a0")) for name in LEAVES.nodes[:6]]
    with pytest.raises(PlacementError, match="different numbers of tasks; expected --ntasks-per-node"):
        best_rank_map(slots, LEAVES, THIN, options.traffic)


# --- in a step


def test_planned_mesh_and_group() -> None:
    def environ(role: str, **fields: str) -> dict[str, str]:
        plan = plans.Plan("allreduce", ("n1", "n2", "n3"), ("a", "a", "b"), {}, **fields)
        return {"SLURMDL_PLAN": plans.encode_plan(plan), "SLURMDL_ROLE": role}

    mesh = planned_mesh(environ("worker", mesh="dp=2,tp=4"))
    assert mesh == Mesh(("dp", "tp"), (2, 4)) and mesh.coordinates(6) == {"dp": 1, "tp": 2}
    own = {"mesh": "a:dp=2", "groups": "a=2,b=1"}
    assert planned_mesh(environ("a", **own)).sizes == (2,)
    group = planned_group(environ("b", **own))
    assert (group.name, group.ranks, group.nodes) == ("b", (2,), ("n3",))
    for function, wrong, message in (
            (planned_mesh, {}, "the step has no mesh; expected"),
            (planned_mesh, environ("a"), "the step has no mesh; expected"),
            (planned_mesh, environ("b", **own), r"the group 'b' .* has no mesh; the meshes are a:dp=2"),
            (planned_group, environ("c", **own), "expected `slurmdl srun` with --dl-groups"),
            (planned_group, {"SLURMDL_ROLE": "a"}, "expected `slurmdl srun` with --dl-groups")):
        with pytest.raises(InputError, match=message):
            function(wrong)
