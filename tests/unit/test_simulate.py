"""Simulated step times: SimGrid against closed forms, the shortcut against single messages, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from placing import two_level
from simulating import needs_simgrid

from slurmdl import comm_layout
from slurmdl.cli.main import main
from slurmdl.gossip_graphs import GRAPHS
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.placement.iteration_cost import NetworkLinks, network_links
from slurmdl.simulate import predict as predicting
from slurmdl.simulate.compare import SimulatedJob
from slurmdl.simulate.network_flows import MERGE_ABOVE, SimulatedNetwork, flow_phases
from slurmdl.simulate.predict import Prediction, predict_step, step_end_times, zones_of_ranks
from slurmdl.simulate.workload import FORWARD_SHARE, PACKED_ELEMENT_BYTES, SHARD_BLOCK, TrainingWorkload
from slurmdl.topology import example
from slurmdl.topology.topology import Topology
from slurmdl.train.compressors import COMPRESSORS
from slurmdl.train.strategies import parameter_server
from slurmdl.train.trainer import workloads

#: bytes/s of a node's link and of an uplink, and seconds of each link
NODE, UPLINK, DELAY = 1e6, 5e5, 1e-3
SCORES = LinkScores(default_node_bandwidth=NODE, default_zone_bandwidth=(UPLINK,), default_latency=DELAY)
PAIRS = two_level(("a", "b", "c"), ("d", "e", "f"))
#: bytes of a model of so many parameters
SIZE, PARAMETERS = 1e6, 250_000


def network(*nodes: str, topology: Topology = PAIRS, scores: LinkScores = SCORES) -> NetworkLinks:
    return network_links(nodes, topology, scores)


def step(training: TrainingWorkload, *nodes: str, scores: LinkScores = SCORES, detail: str = "messages",
         steps: int = 0) -> Prediction:
    """One rank on each of these nodes, in this order."""
    return predict_step(training, network(*nodes, scores=scores), np.arange(len(nodes)), steps, detail)


def flows(nodes: NetworkLinks, *flows: tuple[int, int]) -> float:
    """Seconds of flows of SIZE bytes that begin together, without delays."""
    its = SimulatedNetwork(nodes)
    work = {**its.platform_spec(flows), "phases": [[[source, target, int(SIZE)] for source, target in flows]]}
    return float(predicting._run_engine(work)[0])


@needs_simgrid
@pytest.mark.parametrize(("pairs", "seconds"), [
    ([(0, 1)], SIZE / NODE), ([(0, 3)], SIZE / UPLINK),
    # two share an uplink, or the link of a node, and take twice as long; one each way do not
    ([(0, 3), (1, 4)], 2 * SIZE / UPLINK), ([(0, 1), (0, 2)], 2 * SIZE / NODE), ([(0, 3), (3, 0)], SIZE / UPLINK),
    ([(0, 3), (0, 1)], SIZE / UPLINK),
], ids=["zone", "across", "uplink", "link", "duplex", "max-min"])
def test_flows_share_links(pairs: list[tuple[int, int]], seconds: float) -> None:
    assert flows(network(*"abcdef"), *pairs) == pytest.approx(seconds, rel=1e-6)


@needs_simgrid
@pytest.mark.parametrize("detail", ["messages", "flows"])
def test_closed_forms(detail: str) -> None:
    near, far = 2 * DELAY, 4 * DELAY

    def seconds(training: TrainingWorkload, *nodes: str) -> float:
        return step(training, *nodes, detail=detail).step_seconds

    pair = TrainingWorkload("gossip", PARAMETERS, comm_pattern="base-2", compute_seconds=0.5)
    assert seconds(pair, "a", "b") == pytest.approx(0.5 + SIZE / NODE + near)
    assert seconds(pair, "a", "d") == pytest.approx(0.5 + SIZE / UPLINK + far)
    # each of n ranks sends 2 (n - 1) / n of each bucket, in turns
    ring = TrainingWorkload("allreduce", PARAMETERS)
    turns = 2 * sum(1 if detail == "messages" and start < comm_layout.DIRECT_ELEMENTS else 2
                    for start in comm_layout.bucket_starts(PARAMETERS))
    assert seconds(ring, "a", "b", "c") == pytest.approx(4 / 3 * SIZE / NODE + turns * near, rel=1e-4)
    # one server pulls and pushes the model to each of three workers
    server = TrainingWorkload("ps", PARAMETERS, 1, compute_seconds=1.0)
    assert seconds(server, "d", "a", "b", "c") == pytest.approx(1 + 2 * 3 * SIZE / UPLINK + 2 * far, rel=1e-4)


@needs_simgrid
def test_a_slow_way_between_two_zones() -> None:
    slow = LinkScores(default_node_bandwidth=NODE, default_zone_bandwidth=(UPLINK,), default_latency=DELAY,
                      inter_leaf={"z0|z1": LinkScore(1e5, rtt=0.2)})
    plain = step(TrainingWorkload("gossip", PARAMETERS, comm_pattern="base-2"), "a", "d").step_seconds
    found = step(TrainingWorkload("gossip", PARAMETERS, comm_pattern="base-2"), "a", "d", scores=slow)
    assert found.step_seconds > 4 * plain
    assert found.step_seconds == pytest.approx(step(TrainingWorkload("gossip", PARAMETERS, comm_pattern="base-2"), "d", "a",
                                               scores=slow).step_seconds)


@needs_simgrid
def test_ranks_on_one_node_and_nodes_without_a_zone() -> None:
    flat = network_links(("x", "y"), Topology.flat(("x", "y")), SCORES)
    training = TrainingWorkload("gossip", PARAMETERS, comm_pattern="base-2")
    for detail in ("messages", "flows"):
        assert predict_step(training, flat, np.array([0, 1]), granularity=detail).step_seconds == pytest.approx(SIZE / NODE
                                                                                                 + 2 * DELAY)
        assert predict_step(training, flat, np.array([0, 0]),
                            granularity=detail).step_seconds == pytest.approx(0, abs=1e-6)


@needs_simgrid
def test_allreduce_hides_what_it_sends_behind_the_backward_pass() -> None:
    def seconds(compute: float, overlap: bool) -> float:
        return step(TrainingWorkload("allreduce", PARAMETERS, compute_seconds=compute,
                    overlap=overlap), "a", "b", "c").step_seconds

    alone = seconds(0.0, True)
    assert seconds(10.0, False) == pytest.approx(10 + alone)
    assert 10 < seconds(10.0, True) < 10 + alone * 0.6
    assert step(TrainingWorkload("allreduce", PARAMETERS, compute_seconds=10.0, overlap=False), "a", "b", "c").exposed_comm_fraction == \
        pytest.approx(alone / (10 + alone))


@needs_simgrid
@pytest.mark.parametrize("training", [
    TrainingWorkload(
    "allreduce", 2_000_000, compute_seconds=0.5), TrainingWorkload(
        "allreduce", 2_000_000, comm_pattern="hierarchical"),
    TrainingWorkload(
    "gossip", 500_000, comm_pattern="one-peer-exponential", compute_seconds=0.1), TrainingWorkload(
        "ps", 2_500_000, 2, compute_seconds=0.1),
    TrainingWorkload("adaptive-gossip", 500_000, compute_seconds=0.1, period=3, compression="int4"),
], ids=["ring", "hierarchical", "exponential", "ps", "adaptive"])
def test_flows_are_near_single_messages(training: TrainingWorkload) -> None:
    nodes = network(*"abcdef")
    place = np.array([0, 1, 3, 4, 2, 5])
    one, other = (predict_step(training, nodes, place, granularity=detail) for detail in ("messages", "flows"))
    assert other.step_seconds == pytest.approx(one.step_seconds, rel=0.1)
    assert other.inter_zone_bytes == one.inter_zone_bytes


@needs_simgrid
def test_nodes_that_are_alike_stand_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = example.tree_topology((1, 8, 64))
    nodes = network_links(topology.nodes, topology, LinkScores(default_zone_bandwidth=(2e9,)))
    place = np.random.default_rng(3).permutation(64)
    training = TrainingWorkload("ps", 4_000_000, 4)
    assert MERGE_ABOVE > 4 * 60
    alone = predict_step(training, nodes, place, granularity="flows")
    monkeypatch.setattr("slurmdl.simulate.network_flows.MERGE_ABOVE", 1)
    its = SimulatedNetwork(nodes)
    taken = flow_phases(training, nodes, its, place, zones_of_ranks(nodes, place), 1)
    assert max(len(phase.size) for phase in taken) <= 4 * 8
    assert taken[0].size.sum() == pytest.approx(60 * 16e6)
    assert predict_step(
    training,
    nodes,
    place,
    granularity="flows").step_seconds == pytest.approx(
        alone.step_seconds,
         rel=0.05)


@needs_simgrid
def test_the_same_seed_gives_the_same_answer_and_another_one_another() -> None:
    def seconds(seed: int) -> list[float]:
        training = TrainingWorkload("gossip", PARAMETERS, seed=seed)
        return step_end_times(training, network(*"abcdef"), np.arange(6), 5)[:, -1].tolist()

    assert seconds(1) == seconds(1) != seconds(2)


@needs_simgrid
@pytest.mark.parametrize("strategy", ["allreduce", "gossip", "adaptive-gossip", "ps"])
def test_placed_is_never_slower_than_random(strategy: str) -> None:
    topology = example.tree_topology((1, 2, 8, 96))
    training = TrainingWorkload(strategy, 4_000_000, 4 if strategy == "ps" else 0,
                        comm_pattern="base-2" if "gossip" in strategy else "")
    for seed in range(2):
        case = SimulatedJob(
    training,
    topology,
    LinkScores(
        default_zone_bandwidth=(
            1.25e9,
            )),
            32,
            32,
            busy_share=0.4,
             seed=seed)
        found = case.predict_policies()
        assert found["placed"].step_seconds <= found["random"].step_seconds * 1.02
        assert found["placed"].inter_zone_bytes <= found["random"].inter_zone_bytes


def test_sizes_are_those_of_the_trainer() -> None:
    for name, its in COMPRESSORS.items():
        assert PACKED_ELEMENT_BYTES[name] * (1 << 20) == its.packed_bytes(1 << 20), name
    assert (SHARD_BLOCK, FORWARD_SHARE) == (parameter_server.SHARD_BLOCK, workloads.FORWARD_SHARE)
    for size, count in ((1_000, 3), (25_000_000, 16), (7 * SHARD_BLOCK + 5, 7)):
        found = [part.stop - part.start for part in parameter_server.split_by_speed(size, [1.0] * count)]
        assert TrainingWorkload("ps", size, count).shard_sizes() == found


@given(st.integers(1, 30_000_000))
def test_buckets_grow_and_one_ends_where_those_end_that_are_exchanged_at_once(size: int) -> None:
    edges = [*comm_layout.bucket_starts(size), size]
    lengths = np.diff(edges)
    assert edges[0] == 0 and (lengths > 0).all() and lengths.max() <= 1.5 * comm_layout.MAX_BUCKET_ELEMENTS
    assert lengths[0] <= min(size, comm_layout.FIRST_BUCKET_ELEMENTS)
    assert lengths[0] >= min(size, comm_layout.FIRST_BUCKET_ELEMENTS, max(comm_layout._MIN_FIRST_BUCKET_ELEMENTS, size / 2))
    assert size <= comm_layout.DIRECT_ELEMENTS or comm_layout.DIRECT_ELEMENTS in edges


def test_buckets_cover_the_model_from_its_end() -> None:
    found = TrainingWorkload("allreduce", 25_000_000, compute_seconds=3.0).gradient_buckets()
    assert sum(elements for _, elements, _ in found) == 25_000_000
    ready = [seconds for *_, seconds in found]
    assert ready == sorted(ready)
    assert 1 < ready[0] < 1.1 and ready[-1] == pytest.approx(3.0)
    late = TrainingWorkload("allreduce", 9_000_000, compute_seconds=3.0, overlap=False).gradient_buckets()
    assert {seconds for *_, seconds in late} == {3.0}


FILE = "--topology=topology/topology.conf"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No configuration of the user, and paths as a user in the project's directory types them."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(Path(__file__).parents[2])


@needs_simgrid
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", FILE, "-N", "6", "--strategy", "ps", "--ps", "2", "--parameters", "1M"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines()[2:]] == ["placed", "leaf", "random"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["policies"]) == ["placed", "leaf order", "random"]
    for its in found["policies"].values():
        assert set(its) == {"step_seconds", "exposed_comm_fraction", "inter_zone_bytes", "steps", "granularity"}
    assert main([*words[:2], "--nodes", "n[1-4]", "--ntasks-per-node=2", "--comm-pattern", "hierarchical"]) == 0
    assert "8 ranks on 4 of 8 nodes" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "status", "says"), [
    (["-N", "9"], 64, "-N 9: topology/topology.conf has 8 free nodes; expected 1 to 8"),
    (["-N", "4", "--ranks", "9"], 64, "--ranks 9: expected 4 to 4"),
    (["--nodes", "n[7-9]"], 64, "n9 is not in topology/topology.conf"), ([], 64, "-N or --nodes"),
    (["-N", "4", "--topology", "nowhere.conf"], 65, "nowhere.conf"),
    (["-N", "4", "--strategy", "local-sgd"], 64, "expected allreduce, gossip, adaptive-gossip, ps"),
    (["-N", "4", "--comm-pattern", "link-aware", "--strategy", "gossip"], 64, "--comm-pattern link-aware: not supported with gossip"),
    (["-N", "4", "--strategy", "ps", "--ps", "4"], 64, "expected 1 to 3 parameter servers"),
    (["-N", "4", "--ps", "2"], 64, "allreduce has no parameter servers"),
    (["-N", "4", "--strategy", "gossip", "--compression", "int4"], 64, "expected none, fp16"),
    (["-N", "4", "--period", "3"], 64, "--period 3: allreduce exchanges in every step"),
    (["-N", "4", "--strategy", "gossip", "--period", "3", "--steps", "4"], 64, "a multiple of --period 3"),
    (["-N", "4", "--parameters", "-3"], 64, "--parameters"), (["-N", "4", "--busy-share", "2"], 64, "--busy-share 2"),
    (["-N", "8", "--busy-share", "0.6"], 64, "free nodes at --busy-share 0.6"), (["-N", "4", "--compute-seconds=nan"], 64, "--compute-seconds"),
], ids=["nodes", "ranks", "unknown-node", "none", "file", "strategy", "links", "servers", "ps",
        "compress", "period", "steps", "parameters", "busy", "free", "compute"])
def test_refusals(words: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", FILE, *words]) == status
    error = capsys.readouterr().err
    assert says in error and len(error.splitlines()) == 1


def test_without_simgrid_the_way_to_it_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(predicting, "SIMGRID_PYTHON", str(bare))
    assert main(["simulate", FILE, "-N", "4"]) == 69
    assert f"has no SimGrid; install it: {predicting.INSTALL_COMMAND}" in capsys.readouterr().err


def test_every_pattern_is_simulated_or_refused() -> None:
    for pattern in GRAPHS:
        if pattern != "link-aware":
            TrainingWorkload("gossip", 1_000, comm_pattern=pattern).check_supported(8)
