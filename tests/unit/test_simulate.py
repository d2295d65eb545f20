"""Simulated step times: SimGrid against closed forms, flows against messages, unsupported workloads."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from placing import two_level
from simgrid_marker import needs_simgrid

from slurmdl import comm_layout
from slurmdl.cli.main import main
from slurmdl.gossip_graphs import GRAPHS
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.placement.iteration_cost import network_links
from slurmdl.simulate import predict as predicting
from slurmdl.simulate.compare import SimulatedJob
from slurmdl.simulate.predict import (
    MERGE_ABOVE,
    Prediction,
    SimulatedNetwork,
    flow_phases,
    predict_step,
    step_end_times,
    zones_of_ranks,
)
from slurmdl.simulate.workload import TrainingWorkload
from slurmdl.topology.source import tree_topology
from slurmdl.topology.topology import Topology
from slurmdl.traffic import Traffic

#: bytes/s of node links and uplinks, one-way latency of each link in s
NODE, UPLINK, LATENCY = 1e6, 5e5, 1e-3
SCORES = LinkScores(default_node_bandwidth=NODE, default_zone_bandwidth=(UPLINK,), default_latency=LATENCY)
PAIRS = two_level(("a", "b", "c"), ("d", "e", "f"))
#: size of the model in bytes and in parameters
SIZE, PARAMETERS = 1e6, 250_000


NEAR, FAR = 2 * LATENCY, 4 * LATENCY
PAIR = Traffic("gossip", SIZE, pattern="base-2")
SLOW_PATH = LinkScores(default_node_bandwidth=NODE, default_zone_bandwidth=(UPLINK,), default_latency=LATENCY,
                       inter_leaf={"z0|z1": LinkScore(1e5, rtt=0.2)})
FLAT = Topology.flat(("x", "y"))


def step(workload: TrainingWorkload, nodes: str, topology: Topology = PAIRS, scores: LinkScores = SCORES,
         granularity: str = "messages") -> Prediction:
    """Predict a step whose ranks are on the nodes of these letters."""
    links = network_links(tuple(dict.fromkeys(nodes)), topology, scores)
    node_of_rank = np.array([links.nodes.index(name) for name in nodes])
    return predict_step(workload, links, node_of_rank, granularity=granularity)


@needs_simgrid
@pytest.mark.parametrize(("pairs", "seconds"), [
    ([(0, 1)], SIZE / NODE), ([(0, 3)], SIZE / UPLINK),
    # two flows on the same uplink or node link take twice as long, two in opposite directions do not
    ([(0, 3), (1, 4)], 2 * SIZE / UPLINK), ([(0, 1), (0, 2)], 2 * SIZE / NODE), ([(0, 3), (3, 0)], SIZE / UPLINK),
    ([(0, 3), (0, 1)], SIZE / UPLINK),
], ids=["zone", "across", "uplink", "link", "duplex", "max-min"])
def test_concurrent_flows_share_links(pairs: list[tuple[int, int]], seconds: float) -> None:
    """Of SIZE bytes, without latency."""
    spec = {**SimulatedNetwork(network_links(tuple("abcdef"), PAIRS, SCORES)).platform_spec(pairs),
            "phases": [[[source, target, int(SIZE)] for source, target in pairs]]}
    assert predicting._run_engine(spec)[0] == pytest.approx(seconds, rel=1e-6)


def ring_rounds(granularity: str) -> int:
    """Of each of n ranks, which sends 2 (n - 1) / n of each bucket in turns."""
    return 2 * sum(1 if granularity == "messages" and start < comm_layout.DIRECT_ELEMENTS else 2
                   for start in comm_layout.bucket_starts(PARAMETERS))


@needs_simgrid
@pytest.mark.parametrize("granularity", ["messages", "flows"])
@pytest.mark.parametrize(("traffic", "compute", "nodes", "topology", "scores", "seconds"), [
    (PAIR, 0.5, "ab", PAIRS, SCORES, 0.5 + SIZE / NODE + NEAR),
    (PAIR, 0.5, "ad", PAIRS, SCORES, 0.5 + SIZE / UPLINK + FAR),
    *((PAIR, 0.0, nodes, PAIRS, SLOW_PATH, SIZE / 1e5 + 0.102) for nodes in ("ad", "da")),
    (Traffic("allreduce", SIZE), 0.0, "abc", PAIRS, SCORES, None),
    # one server exchanges the model with three workers
    (Traffic("ps", SIZE, 1), 1.0, "dabc", PAIRS, SCORES, 1 + 2 * 3 * SIZE / UPLINK + 2 * FAR),
    # nodes without a zone, and a single node
    (PAIR, 0.0, "xy", FLAT, SCORES, SIZE / NODE + NEAR), (PAIR, 0.0, "xx", FLAT, SCORES, 0.0),
], ids=["near", "far", "slow-path", "slow-path-back", "ring", "server", "flat", "one-node"])
def test_step_times_match_closed_forms(traffic: Traffic, compute: float, nodes: str, topology: Topology,
                                       scores: LinkScores, seconds: float | None, granularity: str) -> None:
    if seconds is None:
        seconds = 4 / 3 * SIZE / NODE + ring_rounds(granularity) * NEAR
    prediction = step(TrainingWorkload(traffic, compute_seconds=compute), nodes, topology, scores, granularity)
    assert prediction.step_seconds == pytest.approx(seconds, rel=1e-4, abs=1e-6)


@needs_simgrid
def test_allreduce_overlaps_the_backward_pass() -> None:
    def predict(compute: float, overlap: bool) -> Prediction:
        return step(TrainingWorkload(Traffic("allreduce", SIZE), compute_seconds=compute, overlap=overlap), "abc")

    alone = predict(0.0, True).step_seconds
    assert predict(10.0, False).step_seconds == pytest.approx(10 + alone)
    assert 10 < predict(10.0, True).step_seconds < 10 + alone * 0.6
    assert predict(10.0, False).exposed_comm_fraction == pytest.approx(alone / (10 + alone))


@needs_simgrid
@pytest.mark.parametrize("workload", [
    TrainingWorkload(Traffic("allreduce", 8e6), compute_seconds=0.5),
    TrainingWorkload(Traffic("allreduce", 8e6, pattern="hierarchical")),
    TrainingWorkload(Traffic("gossip", 2e6, pattern="one-peer-exponential"), compute_seconds=0.1),
    TrainingWorkload(Traffic("ps", 1e7, 2), compute_seconds=0.1),
    TrainingWorkload(Traffic("adaptive-gossip", 2e6), compute_seconds=0.1, period=3, compression="int4"),
    TrainingWorkload(Traffic("local-sgd", 2e6, islands="zone"), compute_seconds=0.1, period=4),
    TrainingWorkload(Traffic("gossip", 2e6, pattern="base-2", islands="zone"), 0.1, period=2, compression="int4"),
], ids=["ring", "hierarchical", "exponential", "ps", "adaptive", "islands", "gossip-islands"])
def test_flows_approximate_messages(workload: TrainingWorkload) -> None:
    by_message, by_flow = (step(workload, "abdecf", granularity=granularity) for granularity in ("messages", "flows"))
    assert by_flow.step_seconds == pytest.approx(by_message.step_seconds, rel=0.1)
    assert by_flow.inter_zone_bytes == by_message.inter_zone_bytes


@needs_simgrid
def test_merged_identical_nodes_give_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = tree_topology((1, 8, 64))
    nodes = network_links(topology.nodes, topology, LinkScores(default_zone_bandwidth=(2e9,)))
    node_of_rank = np.random.default_rng(3).permutation(64)
    workload = TrainingWorkload(Traffic("ps", 16e6, 4))
    assert MERGE_ABOVE > 4 * 60
    unmerged = predict_step(workload, nodes, node_of_rank, granularity="flows")
    monkeypatch.setattr("slurmdl.simulate.predict.MERGE_ABOVE", 1)
    simulated = SimulatedNetwork(nodes)
    _, phases = flow_phases(workload, simulated, node_of_rank, zones_of_ranks(nodes, node_of_rank), 1)
    assert max(len(phase.size) for phase in phases) <= 4 * 8
    assert phases[0].size.sum() == pytest.approx(60 * 16e6)
    merged = predict_step(workload, nodes, node_of_rank, granularity="flows")
    assert merged.step_seconds == pytest.approx(unmerged.step_seconds, rel=0.05)


@needs_simgrid
def test_simulation_is_reproducible_by_seed() -> None:
    links = network_links(tuple("abcdef"), PAIRS, SCORES)

    def seconds(seed: int) -> list[float]:
        workload = TrainingWorkload(Traffic("gossip", SIZE), seed=seed)
        return step_end_times(workload, links, np.arange(6), 5)[:, -1].tolist()

    assert seconds(1) == seconds(1) != seconds(2)


@needs_simgrid
@pytest.mark.parametrize("strategy", ["allreduce", "gossip", "adaptive-gossip", "ps"])
def test_placed_is_not_slower_than_random(strategy: str) -> None:
    topology = tree_topology((1, 2, 8, 96))
    workload = TrainingWorkload(Traffic(strategy, 16e6, 4 if strategy == "ps" else 0,
                                        "base-2" if "gossip" in strategy else ""))
    for seed in range(2):
        scores = LinkScores(default_zone_bandwidth=(1.25e9,))
        job = SimulatedJob(workload, topology, scores, 32, 32, busy_share=0.4, seed=seed)
        predictions = job.predict_policies()
        assert predictions["placed"].step_seconds <= predictions["random"].step_seconds * 1.02
        assert predictions["placed"].inter_zone_bytes <= predictions["random"].inter_zone_bytes


@given(st.integers(1, 30_000_000))
def test_bucket_sizes_grow_and_respect_the_direct_exchange_limit(size: int) -> None:
    edges = [*comm_layout.bucket_starts(size), size]
    lengths = np.diff(edges)
    assert edges[0] == 0 and (lengths > 0).all() and lengths.max() <= 1.5 * comm_layout.MAX_BUCKET_ELEMENTS
    assert lengths[0] <= min(size, comm_layout.FIRST_BUCKET_ELEMENTS)
    assert lengths[0] >= min(size, comm_layout.FIRST_BUCKET_ELEMENTS,
                             max(comm_layout._MIN_FIRST_BUCKET_ELEMENTS, size / 2))
    assert size <= comm_layout.DIRECT_ELEMENTS or comm_layout.DIRECT_ELEMENTS in edges


def test_buckets_cover_the_model_from_its_last_parameter() -> None:
    buckets = TrainingWorkload(Traffic("allreduce", 1e8), compute_seconds=3.0).gradient_buckets()
    assert sum(elements for _, elements, _ in buckets) == 25_000_000
    ready = [seconds for *_, seconds in buckets]
    assert ready == sorted(ready)
    assert 1 < ready[0] < 1.1 and ready[-1] == pytest.approx(3.0)
    late = TrainingWorkload(Traffic("allreduce", 36e6), compute_seconds=3.0, overlap=False).gradient_buckets()
    assert {seconds for *_, seconds in late} == {3.0}


FILE = "--topology=topology/topology.conf"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No user configuration; paths relative to the root of the project."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(Path(__file__).parents[2])


@needs_simgrid
def test_command_prints_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["simulate", FILE, "-N", "6", "--strategy", "ps", "--ps", "2", "--parameters", "1M"]
    assert main(args) == 0
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines()[2:]] == ["placed", "leaf", "random"]
    assert main([*args, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert list(output["policies"]) == ["placed", "leaf order", "random"]
    for prediction in output["policies"].values():
        assert set(prediction) == {"step_seconds", "exposed_comm_fraction", "inter_zone_bytes", "steps",
                                   "granularity"}
    assert main([*args[:2], "--nodes", "n[1-4]", "--ntasks-per-node=2", "--comm-pattern", "hierarchical"]) == 0
    assert "8 ranks on 4 of 8 nodes" in capsys.readouterr().out


@pytest.mark.parametrize(("args", "status", "message"), [
    (["-N", "9"], 64, "-N 9: topology/topology.conf has 8 free nodes; expected 1 to 8"),
    (["-N", "4", "--ranks", "9"], 64, "--ranks 9: expected 4 to 4"),
    (["--nodes", "n[7-9]"], 64, "n9 is not in topology/topology.conf"), ([], 64, "-N or --nodes"),
    (["-N", "4", "--topology", "nowhere.conf"], 65, "nowhere.conf"),
    (["-N", "4", "--strategy", "local-sgd"], 64, "expected allreduce, gossip, adaptive-gossip, ps"),
    (["-N", "4", "--comm-pattern", "ring", "--strategy", "gossip"], 64,
     "--comm-pattern ring: not supported with gossip"),
    (["-N", "4", "--islands", "zone"], 64, "--strategy allreduce: not supported with --islands; expected local-sgd"),
    (["-N", "4", "--strategy", "gossip", "--islands", "node"], 64, "--islands node: not supported; expected zone"),
    (["-N", "4", "--strategy", "ps", "--ps", "4"], 64, "expected 1 to 3 parameter servers"),
    (["-N", "4", "--ps", "2"], 64, "allreduce has no parameter servers"),
    (["-N", "4", "--strategy", "gossip", "--compression", "int4"], 64, "expected none, fp16"),
    (["-N", "4", "--period", "3"], 64, "--period 3: allreduce exchanges in every step"),
    (["-N", "4", "--strategy", "gossip", "--period", "3", "--steps", "4"], 64, "a multiple of --period 3"),
    (["-N", "4", "--parameters", "-3"], 64, "--parameters"), (["-N", "4", "--busy-share", "2"], 64, "--busy-share 2"),
    (["-N", "8", "--busy-share", "0.6"], 64, "free nodes at --busy-share 0.6"),
    (["-N", "4", "--compute-seconds=nan"], 64, "--compute-seconds"),
], ids=["nodes", "ranks", "unknown-node", "none", "file", "strategy", "pattern", "islands", "level",
        "servers", "ps", "compress", "period", "steps", "parameters", "busy", "free", "compute"])
def test_invalid_option_is_reported_in_one_line(args: list[str], status: int, message: str,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", FILE, *args]) == status
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_missing_simgrid_reports_the_install_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(predicting, "SIMGRID_PYTHON", str(bare))
    assert main(["simulate", FILE, "-N", "4"]) == 69
    assert "has no SimGrid; install it: apt install python3-simgrid" in capsys.readouterr().err


def test_every_gossip_graph_is_supported() -> None:
    for pattern in GRAPHS:
        TrainingWorkload(Traffic("gossip", 4e3, pattern=pattern)).check_supported(8)
