"""Cases and evaluation of the benchmark of heterogeneous ranks, which needs sandboxes (make bench-heterogeneous)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from judging import check_rows

from benchmarks.heterogeneous import accuracy, gossip_variants, no_bottleneck_control, placement_savings, throughput
from benchmarks.heterogeneous.accuracy import EQUAL, NO_EXCHANGE
from benchmarks.heterogeneous.placement_methods import (
    DEFAULT,
    KINDS,
    LEAF,
    NEGATIVE_CONTROL,
    PLACED,
    VARIANTS,
    Job,
    Run,
)
from benchmarks.heterogeneous.placement_savings import LEAST, Case, JobOutcome, draw, orders, predicted
from benchmarks.heterogeneous.throughput import BALANCED, GOSSIP, OFF, SPEEDS
from benchmarks.heterogeneous.trainer_jobs import Result, cpu_bound_note
from benchmarks.virtual_runs import Outcome
from slurmdl.cluster.snapshot import ClusterSnapshot, Node, Partition
from slurmdl.placement.result import Cost
from slurmdl.sandbox.spec import round_robin_topology
from slurmdl.train.strategy_config import check_compatibility
from slurmdl.train.trainer.options import parse_train_options
from slurmdl.train.trainer.trainer import train

SIXTEEN = round_robin_topology(placement_savings.NODES, placement_savings.ZONES)


def snapshot(busy: Sequence[str]) -> ClusterSnapshot:
    free_cpus = {name: 0 if name in busy else placement_savings.CPUS for name in SIXTEEN.nodes}
    return ClusterSnapshot.from_nodes(
        [Node(name, ("IDLE",) if cpus else ("ALLOCATED",), cpus=4, cpus_unallocated=cpus, memory=4000,
              memory_unallocated=1000 * cpus, partitions=("main",)) for name, cpus in free_cpus.items()],
        (Partition("main", True),))


def test_draw_is_random_and_reproducible() -> None:
    cases = draw(SIXTEEN, 3)
    assert cases == draw(SIXTEEN, 3) != draw(SIXTEEN, 4)
    cases_per_kind = placement_savings.OCCUPANCIES // len(KINDS)
    assert Counter(case.job.kind for case in cases) == dict.fromkeys(KINDS, cases_per_kind)
    assert {case.job.tasks_per_node for case in cases} == {2, 3, 4}
    assert all(case.job.nodes <= len(SIXTEEN.nodes) - len(case.busy) for case in cases)
    assert all((case.job.ps > 0) == (case.job.kind == "PS") for case in cases)
    small = sum(case.job.nodes * case.job.tasks_per_node <= placement_savings.RANKS for case in cases)
    assert small > placement_savings.RUN


@pytest.mark.parametrize("number", range(8))
def test_orders_use_free_nodes_and_exact_optimum_sends_least(number: int) -> None:
    case = draw(SIXTEEN, 5)[number]
    slurm = sorted(set(SIXTEEN.nodes) - set(case.busy))[:case.job.nodes]
    variants = orders(case, SIXTEEN, snapshot(case.busy), slurm, np.random.default_rng(1))
    assert (LEAST in variants) == (case.job.kind != "gossip, base graph")
    for order in variants.values():
        assert set(Counter(order).values()) == {case.job.tasks_per_node}
        assert len(set(order)) == case.job.nodes
        assert not set(order) & set(case.busy)
    assert set(variants[LEAF]) == set(variants[DEFAULT]) == set(slurm)
    zones = [SIXTEEN.leaf_of(node) for node in variants[LEAF]]
    assert zones == sorted(zones)
    sent = {variant: predicted(case.job, order, SIXTEEN).inter_zone_bytes for variant, order in variants.items()}
    assert sent.get(LEAST, 0.0) <= min(sent.values()) * (1 + 1e-9)


def test_predicted_colocated_servers_send_all_bytes() -> None:
    """4 nodes of 2 ranks, both servers on the first node: all 6 workers are on other nodes."""
    job = Job("PS", 4, 2, 2)
    case = Case(job, SIXTEEN.nodes[4:])
    variants = orders(case, SIXTEEN, snapshot(case.busy), SIXTEEN.nodes[:4], np.random.default_rng(1))
    whole = 2 * 6 * job.request.options.model_bytes
    assert predicted(job, variants[DEFAULT], SIXTEEN).inter_node_bytes == pytest.approx(whole)
    # placed: each server shares its node with one worker
    assert predicted(job, variants[PLACED], SIXTEEN).inter_node_bytes == pytest.approx(whole * 5 / 6)


def cost(sent: float, seconds: float = 1.0) -> Cost:
    return Cost(seconds, sent, sent)


def result(seconds: float, *, idle: float = 0.5) -> Result:
    sent = {"intra_node": 0.0, "intra_zone": 0.0, "inter_zone": 100.0}
    return Result({"rank_map": [{"node": "n1"}], "bytes_sent": sent, "steps": 10, "seconds_per_step": seconds},
                  (seconds,) * 10, idle)


@pytest.mark.parametrize(("placed", "chance", "met"), [(50.0, 70.0, True), (52.0, 50.0, False)])
def test_savings_are_compared_with_least_bytes(placed: float, chance: float, met: bool) -> None:
    costs = {PLACED: cost(placed), LEAF: cost(100.0), DEFAULT: cost(200.0), NEGATIVE_CONTROL: cost(chance),
             LEAST: cost(50.0)}
    rows = [*placement_savings.evaluate([JobOutcome("PS", costs)] * 3)]
    check_rows(rows, {
        f"PS: bytes across nodes saved relative to {DEFAULT}, 3 jobs": (100 - placed / 2, None),
        f"PS: bytes across zones saved relative to {LEAF}, as a share of the largest possible saving, per job": (
            (100 - placed) / 50, met),
        f"PS: bytes across zones of {NEGATIVE_CONTROL} over those of placement (control)": (chance / placed, met)})
    saved = next(row for row in rows if row.metric.startswith(f"PS: bytes across nodes saved relative to {DEFAULT}"))
    assert saved.baseline == 75.0 and "12 %" in saved.target
    same = dict.fromkeys((*VARIANTS, NEGATIVE_CONTROL, LEAST), cost(100.0))
    rows = [*placement_savings.evaluate([JobOutcome("allreduce", same)])]
    assert [(row.value, row.met) for row in rows] == [(0.0, None)] * 4, "no saving is possible"


@pytest.mark.parametrize(("placed", "chance", "idle", "met"), [
    (0.5, 1.5, 0.5, True), (1.1, 1.1, 0.5, False), (0.5, 1.5, 0.1, True)])
def test_step_times_are_compared_with_those_of_slurm(placed: float, chance: float, idle: float, met: bool) -> None:
    seconds = {PLACED: placed, LEAF: 1.0, DEFAULT: 2.0, NEGATIVE_CONTROL: chance}
    runs = {variant: (Run.of(result(value, idle=idle)), cost(20.0, value)) for variant, value in seconds.items()}
    note = "; CPU-bound: 10% idle" if idle == 0.1 else ""
    check_rows(placement_savings.run_rows("allreduce", [runs]), {
        f"allreduce, run: seconds per step, placed, over those of {DEFAULT}{note}": (placed / 2, True),
        f"allreduce, run: seconds per step, placed, over those of {LEAF}{note}": (placed, met),
        "allreduce, run: metered bytes across zones over modeled ones": 0.5,
        f"allreduce, run: seconds per step of {NEGATIVE_CONTROL} over those of placement (control){note}": (
            chance / placed, met)})
    assert cpu_bound_note([result(1.0)]) == ""


@pytest.mark.parametrize(("ratio", "noise", "ties", "differs"), [
    (1.0, 0.01, True, False), (1.2, 0.01, False, False), (0.5, 0.01, False, True), (1.05, 0.1, True, False),
    (1.0, 0.5, False, False)], ids=["equal", "slower", "faster", "noisy", "too noisy to tell"])
def test_no_bottleneck_control_separates_tie_and_difference(ratio: float, noise: float, ties: bool,
                                                            differs: bool) -> None:
    spread = np.exp(noise * np.array([-1.0, -0.5, 0.0, 0.5, 1.0]))
    runs = [{PLACED: Run.of(result(ratio * factor)), DEFAULT: Run.of(result(1.0))} for factor in spread.tolist()]
    assert no_bottleneck_control.evaluate("PS", runs, shaped=False).met is ties
    assert no_bottleneck_control.evaluate("PS", runs, shaped=True).met is differs


@pytest.mark.parametrize(("balanced", "control", "met"), [(0.5, 1.0, True), (0.6, 0.5, False)])
def test_throughput_is_a_share_of_the_speed_without_communication(balanced: float, control: float, met: bool) -> None:
    def asynchronous(rate: float) -> Result:
        return Result({"samples_per_second": rate}, (), 0.5)

    def synchronous(seconds: float) -> Result:
        """Slow until the batch sizes converge, then `seconds` per step: 8 ranks with 64 samples."""
        first = (9.0,) * throughput.SETTLED
        return Result({"num_workers": 8, "batch_size": 64}, (*first, seconds, seconds), 0.5)

    results = {OFF: [asynchronous(1000.0)] * 3, GOSSIP: [asynchronous(rate) for rate in (940.0, 960.0, 970.0)],
               BALANCED: [synchronous(balanced)] * 3, throughput.NEGATIVE_CONTROL: [synchronous(control)] * 3}
    check_rows(throughput.evaluate("x", results), {
        f"x: {GOSSIP}, as a share of {OFF}": (0.96, True), f"x: {BALANCED}": 512 / balanced,
        f"x: {BALANCED}, as a share of {OFF}": met, f"x: {throughput.NEGATIVE_CONTROL}, as a share of {OFF}": met})


@pytest.mark.parametrize(("slow", "alone", "met"), [(96.8, 80.0, True), (96.0, 96.9, False)])
def test_accuracy_pairs_seeds_and_requires_worse_control(slow: float, alone: float, met: bool) -> None:
    noise = np.random.default_rng(1).normal(0, 0.5, (5, 2)).tolist()

    def outcomes(right: float, local: float) -> list[list[Outcome]]:
        return [[Outcome(right + offset, local + offset, 1, 0.5) for offset in folds] for folds in noise]

    cases = {(variant, speeds): outcomes(right, right) for variant in (GOSSIP, BALANCED)
             for speeds in (EQUAL, *SPEEDS) for right in [97.0 if speeds == EQUAL else slow]}
    check_rows(accuracy.evaluate({**cases, (NO_EXCHANGE, EQUAL): outcomes(97.0, alone)}), {
        f"control: {NO_EXCHANGE}, vs. {GOSSIP}": met,
        **{f"{GOSSIP}: accuracy, {speeds} vs. {EQUAL}": (slow - 97.0, met) for speeds in SPEEDS}})


@pytest.mark.nightly
def test_accuracy_run_returns_outcomes_by_seed_and_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "COMMON", ("--virtual-ranks", "2", "--model", "mlp:8", "--steps", "12"))
    monkeypatch.setattr(accuracy, "FOLDS", 2)
    by_case = accuracy.run({("gossip", EQUAL): ("--strategy", "gossip")}, range(4, 6))
    assert [len(folds) for folds in by_case["gossip", EQUAL]] == [2, 2]
    assert len({outcome.accuracy for folds in by_case["gossip", EQUAL] for outcome in folds}) > 1


def test_variants_are_valid_trainer_options_and_train() -> None:
    """Two of them train: the others differ in strategy and links, which the tests of the strategies cover."""
    variants = [*throughput.VARIANTS.values(), *(f"{variant.options} --virtual-zones {variant.zones}" for variant in (
        *gossip_variants.COMBINATIONS, *gossip_variants.ALLREDUCE))]
    for number, (options, slow) in enumerate(itertools.product(variants, SPEEDS.values())):
        arguments = f"--virtual-ranks 8 --model mlp:8 --batch-size 4 --steps 3 --emulate-compute 0.01 {options}"
        parsed = parse_train_options([*arguments.split(), "--straggler", slow], {})
        config = parsed.strategy_config
        pattern = {"gossip": "base-2", "allreduce": "ring"}.get(config.strategy, config.comm_pattern)
        check_compatibility(replace(config, comm_pattern=pattern))
        if number in (0, len(throughput.VARIANTS) * len(SPEEDS)):
            summary = train(parsed)
            assert summary is not None
            assert summary["num_workers"] == 8 and summary["samples_per_second"] > 0


def test_gossip_variants_throughput_targets_depend_on_balance() -> None:
    variants = [*gossip_variants.COMBINATIONS, *gossip_variants.ALLREDUCE]
    assert [gossip_variants.throughput(variant, "", [94.0, 98.0], 100.0).met for variant in variants] == [
        *[False, True] * 6, None, None]
    assert [gossip_variants.throughput(variant, "", [94.0, 95.0], 100.0).met for variant in variants] == [
        *[True, False] * 6, None, None]
