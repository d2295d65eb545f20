"""Meshes of ranks: parsing, coordinates, traffic, and the choice of nodes and ranks for them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from slurmdl import plan as plans
from slurmdl import planned_mesh, records
from slurmdl.config import load_config
from slurmdl.dl_options import DlOptions
from slurmdl.errors import InputError, PlacementError, UsageError
from slurmdl.job_request import JobRequest
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.links.score_sources import load_from_sources
from slurmdl.mesh import (
    DEFAULT_MODEL,
    Mesh,
    MeshTraffic,
    boxes,
    bytes_leaving,
    min_bytes_leaving,
    model_volumes,
    parse_mesh,
    parse_model,
    size_mismatch,
)
from slurmdl.placement.explain import link_assumption
from slurmdl.placement.iteration_cost import network_links, predict_cost
from slurmdl.placement.mesh_orders import consecutive_box, mesh_orders
from slurmdl.placement.place import place_job
from slurmdl.placement.rank_orders import best_rank_map
from slurmdl.topology.topology import Topology
from tests.placing import cluster, node, two_level

#: node links of 1,000 bytes/s, uplinks of 50
SCORES = LinkScores(default_node_bandwidth=1000.0, default_zone_bandwidth=(50.0,), default_latency=0.0)
#: n1, n3, ... in z0 and n2, n4, ... in z1
TWO_ZONES = two_level(["n1", "n3", "n5", "n7"], ["n2", "n4", "n6", "n8"])
EIGHT = cluster(*(node(f"n{i}") for i in range(1, 9)))


def traffic_of(mesh: str, volumes: str) -> MeshTraffic:
    traffic = DlOptions(mesh=mesh, bytes=volumes).traffic
    assert isinstance(traffic, MeshTraffic)
    return traffic


def test_ranks_are_numbered_as_in_a_device_mesh() -> None:
    mesh = parse_mesh("dp=2,pp=3,tp=4", "--dl-mesh")
    ranks = np.arange(24).reshape(2, 3, 4)
    for rank in range(24):
        coordinates = mesh.coordinates(rank)
        assert ranks[coordinates["dp"], coordinates["pp"], coordinates["tp"]] == rank


def test_device_mesh_has_the_same_groups(tmp_path) -> None:
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


def test_megatron_groups_are_those_of_its_documentation() -> None:
    """16 ranks with tensor size 2 and pipeline size 4: initialize_model_parallel lists these groups."""
    traffic = traffic_of("megatron:tp2-cp1-dp2-pp4", "tp=1,pp=1,dp=1")
    groups = {dimension.kind: sorted(traffic.groups(dimension.dims).tolist()) for dimension in traffic.dimensions}
    assert groups["tp"] == [[i, i + 1] for i in range(0, 16, 2)]
    assert groups["dp"] == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert groups["pp"] == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


def test_megatron_experts_divide_the_data_parallel_ranks() -> None:
    traffic = traffic_of("megatron:tp2-cp1-ep2-dp4-pp2", "ep=1")
    assert traffic.mesh.ranks == 16
    assert traffic.groups(traffic.dimensions[0].dims).tolist()[:2] == [[0, 2], [1, 3]]
    with_context = traffic_of("megatron:tp2-cp2-ep4-dp4-pp1", "ep=1")
    assert with_context.mesh.ranks == 16
    assert [0, 2, 4, 6] in with_context.groups(with_context.dimensions[0].dims).tolist()


@pytest.mark.parametrize(("text", "message"), [
    ("dpp=2", "unknown dimension 'dpp'; expected .*dp"), ("dp=0", "dp: invalid size '0'; expected a whole number"),
    ("dp=2,dp_replicate=2", "dp_replicate is given twice"), ("tp8", "expected dimensions and sizes"),
    ("dp=", "invalid size ''"), ("dp=4096,tp=4096", "16777216 ranks; expected at most"),
    ("megatron:tp2-ep3-dp4", "ep3 does not divide dp4 x cp1"), ("megatron:tp2,dp4", "expected dimensions and sizes"),
    ("megatron:tp2-dp2-cp2-ep4", "dp directly after cp")])
def test_invalid_mesh_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"^--dl-mesh={re.escape(text)}: .*{message}") as raised:
        parse_mesh(text, "--dl-mesh")
    assert "\n" not in str(raised.value)


def test_mesh_of_another_size_names_the_sizes_that_fit() -> None:
    mesh = parse_mesh("dp=2,pp=2,tp=8", "--dl-mesh")
    assert size_mismatch(mesh, 32) == ""
    assert size_mismatch(mesh, 64).endswith("expected dp=4")
    assert size_mismatch(mesh, 40).endswith("expected 32 or 48 ranks, or sizes whose product is 40")
    with pytest.raises(UsageError, match=r"a mesh of 32 ranks; the job has 8; expected 16 ranks, or"):
        place_job(JobRequest(DlOptions(mesh="dp=2,pp=2,tp=8"), nodes=(4, 4), ntasks=8), EIGHT, TWO_ZONES, SCORES)
    with pytest.raises(PlacementError, match="a mesh of 32 ranks"):
        DlOptions(mesh="dp=2,pp=2,tp=8").traffic.phases(8)


@pytest.mark.parametrize(("text", "message"), [
    ("params=7B,hidden=4096,seq=1", "layers is missing; expected params, hidden, layers, seq"),
    ("parms=7B", "unknown key 'parms'; expected params"), ("params=x,hidden=1,layers=1,seq=1", "params: invalid"),
    (f"{DEFAULT_MODEL},dtype=int4", "dtype: invalid value 'int4'; expected bf16"),
    (f"{DEFAULT_MODEL},expert-params=8B", "expert-params: expected at most params")])
def test_invalid_model_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_model(text, "--dl-model")


def test_volumes_of_a_model() -> None:
    mesh = parse_mesh("dp=2,pp=4,tp=8", "--dl-mesh")
    volumes = model_volumes(parse_model(f"{DEFAULT_MODEL},micro-batches=3", "--dl-model"), mesh)
    activations = 4096 * 4096 * 2
    assert volumes["tp"].bytes == 4 * 8 * 3 * activations  # 8 layers of each stage, 3 micro-batches
    assert volumes["pp"].bytes == 3 * activations / 8
    context = model_volumes(parse_model(DEFAULT_MODEL, "--dl-model"), parse_mesh("cp=2,tp=4", "--dl-mesh"))
    assert (context["cp"].bytes, context["cp"].operations) == (6 * 32 * activations / 4, 3 * 32)
    assert volumes["dp"].bytes == 7e9 * 2 / 32
    assert model_volumes(parse_model(DEFAULT_MODEL, "--dl-model"), mesh)["pp"].bytes == 16 * activations / 8
    hybrid = model_volumes(parse_model(DEFAULT_MODEL, "--dl-model"), parse_mesh("hsdp=4x8", "--dl-mesh"))
    assert hybrid["fsdp"].bytes == 3 * 7e9 * 2
    assert hybrid["dp"].bytes == 7e9 * 2 / 8
    experts = model_volumes(parse_model("params=9B,hidden=64,layers=1,seq=1,expert-params=8B", "--dl-model"),
                            parse_mesh("dp=2,ep=4", "--dl-mesh"))
    assert experts["dp"].bytes == (1e9 + 2e9) * 2


def test_phases_of_each_kind() -> None:
    traffic = traffic_of("dp=3,tp=2", "dp=30,tp=8")
    tensor, data = traffic.phases(traffic.mesh.ranks)
    assert list(zip(tensor.source.tolist(), tensor.target.tolist(), strict=True))[:2] == [(0, 1), (1, 0)]
    assert tensor.bytes_per_pair == 2 * 8 / 2
    assert data.bytes_per_pair == 2 * 30 * 2 / 3
    assert sorted(zip(data.source.tolist(), data.target.tolist(), strict=True)) == [
        (0, 2), (1, 3), (2, 4), (3, 5), (4, 0), (5, 1)]
    forward, backward = traffic_of("pp=3", "pp=5").phases(3)
    assert (forward.source.tolist(), forward.target.tolist()) == ([0, 1], [1, 2])
    assert (backward.source.tolist(), backward.target.tolist()) == ([1, 2], [0, 1])
    (experts,) = traffic_of("ep=3", "ep=9").phases(3)
    assert len(experts.source) == 6 and experts.bytes_per_pair == 3


def test_gradients_are_reduced_over_context_and_experts_too() -> None:
    traffic = traffic_of("dp=2,ep=2,tp=2", "dp=1")
    assert sorted(traffic.groups(traffic.dimensions[0].dims)[0].tolist()) == [0, 2, 4, 6]


def test_bytes_that_leave_a_box_are_those_of_the_cost_model() -> None:
    """A box of consecutive ranks on one node: the bytes over its link, for all boxes of several meshes."""
    generator = np.random.default_rng(1)
    for mesh in ("dp=4,pp=2,tp=2", "ep=2,pp=4,tp=2", "dp=2,cp=2,tp=4", "fsdp=4,dp=2,tp=2"):
        names = [name for name, _ in (item.split("=") for item in mesh.split(","))]
        traffic = traffic_of(mesh, ",".join(f"{name}={generator.integers(1, 9)}" for name in names))
        sizes = traffic.mesh.sizes
        for box in boxes(sizes, 4, (1,) * len(sizes)):
            inside = np.ones(traffic.mesh.ranks, bool)
            for rank in range(traffic.mesh.ranks):
                position = traffic.mesh.coordinates(rank).values()
                inside[rank] = all(at < count for at, count in zip(position, box, strict=True))
            node_of_rank = np.where(inside, 0, 1)
            links = network_links(["n1", "n2"], two_level(["n1"], ["n2"]), LinkScores(
                default_node_bandwidth=1.0, default_zone_bandwidth=(1e9,), default_latency=0.0))
            assert bytes_leaving(traffic, box) == pytest.approx(
                predict_cost(traffic.phases(traffic.mesh.ranks), links, node_of_rank).seconds), (mesh, box)


def test_consecutive_box() -> None:
    assert consecutive_box((4, 2, 8), 8) == (1, 1, 8)
    assert consecutive_box((4, 2, 8), 4) == (1, 1, 4)
    assert consecutive_box((4, 2, 8), 16) == (1, 2, 8)
    assert consecutive_box((4, 3, 2), 4) is None


def test_orders_are_permutations_and_the_first_is_consecutive_if_that_is_best() -> None:
    traffic = traffic_of("dp=4,pp=2,tp=4", "tp=100,pp=1,dp=10")
    orders = list(mesh_orders(traffic, 4, [2]))
    assert len(orders) > 4 and len({order.tobytes() for order in orders}) == len(orders)
    for order in orders:
        assert sorted(order.tolist()) == list(range(32)) and order[0] == 0
    assert orders[0].tolist() == list(range(32))
    for order in mesh_orders(traffic, 4, [2], node_by_node=True):
        assert all((block == block[0] + np.arange(4)).all() for block in order.reshape(-1, 4))


@pytest.mark.parametrize(("mesh", "together"), [("dp=2,pp=4", "pp"), ("pp=2,dp=4", "dp"), ("pp=2,dp=2,tp=2", "tp")])
def test_groups_with_most_traffic_stay_in_a_zone(mesh: str, together: str) -> None:
    """Whatever the order of the dimensions, unlike the numbering of plain srun."""
    names = parse_mesh(mesh, "--dl-mesh").names
    volumes = ",".join(f"{name}={1000 if name == together else 1}" for name in names)
    request = JobRequest(DlOptions(mesh=mesh, bytes=volumes), nodes=(8, 8))
    placement = place_job(request, EIGHT, TWO_ZONES, SCORES)
    assert placement.rank_map
    traffic = traffic_of(mesh, f"{together}=1")
    for group in traffic.groups(traffic.dimensions[0].dims).tolist():
        assert len({TWO_ZONES.leaf_of(placement.rank_map.nodes[rank]) for rank in group}) == 1
    costs = placement.rank_map.order_costs
    assert placement.rank_map.cost.seconds < costs["alphabetical"].seconds / 2


def test_nodes_are_chosen_in_segments_that_hold_whole_groups() -> None:
    """Leaves with 5, 5 and 4 free nodes, groups of 4: 4 + 4 instead of 5 + 3."""
    topology = two_level(["a1", "a2", "a3", "a4", "a5"], ["b1", "b2", "b3", "b4", "b5"], ["c1", "c2", "c3", "c4"])
    nodes = cluster(*(node(name) for name in topology.nodes))
    request = JobRequest(DlOptions(mesh="dp=3,tp=4", bytes="tp=1000,dp=1"), nodes=(12, 12))
    placement = place_job(request, nodes, topology, SCORES)
    assert sorted(placement.nodes_per_zone.values()) == [4, 4, 4]


def test_launcher_numbers_the_ranks_of_a_node_consecutively() -> None:
    slots = [(f"n{i}", 2) for i in range(1, 9)]
    traffic = DlOptions(mesh="pp=2,dp=4,tp=2", bytes="tp=5,dp=1000,pp=1").traffic
    rank_map = best_rank_map(slots, TWO_ZONES, SCORES, traffic, node_by_node=True)
    assert all(rank_map.nodes[2 * i] == rank_map.nodes[2 * i + 1] for i in range(8))
    assert {TWO_ZONES.leaf_of(name) for name in rank_map.nodes[:8]} == {"z0"}


def test_one_task_per_node_starts_the_ranks_of_the_mesh() -> None:
    request = JobRequest(DlOptions(mesh="dp=4,tp=2", bytes="tp=1000,dp=1"), nodes=(4, 4))
    placement = place_job(request, EIGHT, TWO_ZONES, SCORES)
    assert placement.rank_map and len(placement.rank_map.nodes) == 8
    assert all(placement.rank_map.nodes[2 * i] == placement.rank_map.nodes[2 * i + 1] for i in range(4))


def test_lower_bound_never_exceeds_the_cost() -> None:
    traffic = traffic_of("dp=4,pp=2", "dp=100,pp=60")
    assert 0 < min_bytes_leaving(traffic, 2) <= min(
        bytes_leaving(traffic, box) for box in boxes((4, 2), 2, (1, 1)))


def block_topology(*counts: int) -> Topology:
    from slurmdl.topology.source import ZoneDecl, build_topology

    zones = [ZoneDecl(f"b{i}", nodes=tuple(f"b{i}n{j}" for j in range(count))) for i, count in enumerate(counts)]
    return build_topology(zones, kind="block", source="test")


@pytest.mark.parametrize("strategy", ["allreduce", "gossip", "ps"])
def test_segments_of_the_user_are_kept(strategy: str) -> None:
    topology = block_topology(5, 3, 7)
    nodes = cluster(*(node(name) for name in topology.nodes))
    dl = DlOptions(strategy, ps=2 if strategy == "ps" else 0)
    placement = place_job(JobRequest(dl, nodes=(8, 8), segment=4), nodes, topology, SCORES)
    assert placement.nodes_per_zone == {"b0": 4, "b2": 4}
    with pytest.raises(PlacementError, match="--segment=4: no choice of 12 nodes"):
        place_job(JobRequest(dl, nodes=(12, 12), segment=4), nodes, topology, SCORES)


def test_segments_that_no_block_can_hold() -> None:
    topology = block_topology(4, 4)
    nodes = cluster(*(node(name) for name in topology.nodes))
    with pytest.raises(PlacementError, match="--segment=6: the largest block has 4 nodes"):
        place_job(JobRequest(nodes=(6, 6), segment=6), nodes, topology, SCORES)
    with pytest.raises(PlacementError, match="--segment=3 does not divide 4 nodes; expected 1, 2, 4"):
        place_job(JobRequest(nodes=(4, 4), segment=3), nodes, topology, SCORES)
    assert place_job(JobRequest(nodes=(2, 2), segment=4), nodes, topology, SCORES).nodes, "Slurm ignores it"


def test_switches_limit_the_leaf_zones() -> None:
    topology = two_level(["a1", "a2"], ["b1", "b2"], ["c1", "c2", "c3", "c4"])
    all_free = cluster(*map(node, topology.nodes))
    assert len(place_job(JobRequest(nodes=(6, 6), switches=2), all_free, topology, SCORES).nodes_per_zone) == 2
    six_free = cluster(*(node(name, "DOWN" if name in ("c3", "c4") else "IDLE") for name in topology.nodes))
    assert len(place_job(JobRequest(nodes=(6, 6)), six_free, topology, SCORES).nodes_per_zone) == 3
    with pytest.raises(PlacementError, match="--switches=2: no choice"):
        place_job(JobRequest(nodes=(6, 6), switches=2), six_free, topology, SCORES)


def test_exclusive_blocks_have_no_other_jobs() -> None:
    topology = block_topology(4, 4)
    busy = [node(name, **({"state": "ALLOCATED", "cpus_unallocated": 0} if name == "b0n0" else {}))
            for name in topology.nodes]
    placement = place_job(JobRequest(nodes=(2, 2), exclusive=True, exclusive_blocks=True), cluster(*busy), topology,
                          SCORES)
    assert placement.nodes_per_zone == {"b1": 2}


def test_planned_mesh_is_that_of_the_plan() -> None:
    plan = plans.Plan("allreduce", ("n1",) * 8, ("worker",) * 8, {}, mesh="dp=2,tp=4")
    environ = {"SLURMDL_PLAN": plans.encode_plan(plan)}
    assert planned_mesh(environ) == Mesh(("dp", "tp"), (2, 4))
    assert planned_mesh(environ).coordinates(6) == {"dp": 1, "tp": 2}
    for without in ({}, {"SLURMDL_PLAN": plans.encode_plan(plans.Plan("allreduce", ("n1",), ("worker",), {}))}):
        with pytest.raises(InputError, match="the step has no mesh; expected"):
            planned_mesh(without)


def test_two_tiers_are_configured_and_shown(tmp_path) -> None:
    file = tmp_path / "slurmdl.yaml"
    file.write_text("link_defaults: {leaf_bandwidth: 3.6e12, node_bandwidth: 2.0e11, rails: 4}\n")
    scores = load_from_sources(load_config([str(file)]), "off", {}).scores
    assert (scores.default_leaf_bandwidth, scores.default_node_bandwidth, scores.default_rails) == (3.6e12, 2e11, 4)
    assert LinkScores.from_json(records.to_json(scores)) == scores
    with pytest.raises(InputError, match=r"default_rails 0.5: expected a whole number"):
        LinkScores.from_json({"default_rails": 0.5})
    shown = link_assumption(TWO_ZONES, scores)
    assert shown.startswith("links 1.6 Tbit/s on 4 rails, 28.8 Tbit/s inside a leaf zone"), shown
    for value in ("0", "1.5", "x", "-2"):
        file.write_text(f"link_defaults: {{rails: {value}}}\n")
        with pytest.raises(InputError, match=r"link_defaults.rails: invalid value .*; expected"):
            load_config([str(file)])


def test_a_leaf_zone_with_a_network_of_its_own_is_preferred() -> None:
    """Three nodes in the zone of fast node links, or with NVLink between four slow ones."""
    fast = {name: LinkScore(4000.0, 0.0) for name in ("n1", "n3", "n5", "n7")}
    slow = {name: LinkScore(1000.0, 0.0) for name in ("n2", "n4", "n6", "n8")}
    request = JobRequest(DlOptions(mesh="dp=4", bytes="dp=1000"), nodes=(4, 4))
    plain = LinkScores(nodes={**fast, **slow}, default_latency=0.0)
    assert place_job(request, EIGHT, TWO_ZONES, plain).nodes_per_zone == {"z0": 4}
    tiers = LinkScores(nodes={**fast, **slow}, default_latency=0.0, default_leaf_bandwidth=10000.0)
    placement = place_job(request, EIGHT, TWO_ZONES, tiers)
    assert placement.rank_map and placement.rank_map.cost.seconds == pytest.approx(1500 / 10000)
