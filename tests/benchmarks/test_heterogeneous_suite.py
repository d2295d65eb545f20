"""Cases and evaluation of the benchmark of heterogeneous ranks, which needs sandboxes (make bench-heterogeneous)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

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
from benchmarks.results import Row
from benchmarks.virtual_runs import Outcome
from slurmdl.cluster.snapshot import ClusterSnapshot, Node, Partition
from slurmdl.placement.result import Cost
from slurmdl.sandbox.spec import round_robin_topology
from slurmdl.train.trainer.options import parse_train_options
from slurmdl.train.trainer.trainer import train

SIXTEEN = round_robin_topology(placement_savings.NODES, placement_savings.ZONES)


def by_metric(rows: Sequence[Row]) -> dict[str, Row]:
    return {row.metric: row for row in rows}


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
    whole = 2 * 6 * job.request.dl.model_bytes
    assert predicted(job, variants[DEFAULT], SIXTEEN).inter_node_bytes == pytest.approx(whole)
    # placed: each server shares its node with one worker
    assert predicted(job, variants[PLACED], SIXTEEN).inter_node_bytes == pytest.approx(whole * 5 / 6)


def cost(sent: float, seconds: float = 1.0) -> Cost:
    return Cost(seconds, sent, sent)


def result(seconds: float, *, idle: float = 0.5, sent: float = 100.0, nodes: Sequence[str] = ("n1",)) -> Result:
    return Result({"rank_map": [{"node": node} for node in nodes],
                   "bytes_sent": {"intra_node": 0.0, "intra_zone": 0.0, "inter_zone": sent},
                   "steps": 10, "seconds_per_step": seconds}, (seconds,) * 10, idle)


def test_evaluate_compares_savings_with_least_bytes() -> None:
    def outcomes(placed: float, chance: float) -> list[JobOutcome]:
        costs = {PLACED: cost(placed), LEAF: cost(100.0), DEFAULT: cost(200.0), NEGATIVE_CONTROL: cost(chance),
                 LEAST: cost(50.0)}
        return [JobOutcome("PS", costs)] * 3

    rows = by_metric(list(placement_savings.evaluate(outcomes(50.0, 70.0))))
    saved = rows[f"PS: bytes across nodes saved relative to {DEFAULT}, 3 jobs"]
    assert (saved.value, saved.baseline, saved.met) == (75.0, 75.0, None)
    assert "12 %" in saved.target
    share = f"PS: bytes across zones saved relative to {LEAF}, as a share of the largest possible saving, per job"
    assert (rows[share].value, rows[share].met) == (1.0, True)
    control = f"PS: bytes across zones of {NEGATIVE_CONTROL} over those of placement (control)"
    assert (rows[control].value, rows[control].met) == (1.4, True)
    worse = by_metric(list(placement_savings.evaluate(outcomes(52.0, 50.0))))
    assert (worse[share].value, worse[share].met) == (pytest.approx(0.96), False)
    assert worse[control].met is False


def test_evaluate_without_possible_saving_has_no_targets() -> None:
    same = dict.fromkeys((*VARIANTS, NEGATIVE_CONTROL, LEAST), cost(100.0))
    rows = list(placement_savings.evaluate([JobOutcome("allreduce", same)]))
    assert [row.value for row in rows] == [0.0] * 4
    assert all(row.met is None for row in rows)


def test_ran_evaluates_step_times() -> None:
    def rows(placed: float, chance: float, idle: float = 0.5) -> dict[str, Row]:
        seconds_by_variant = {PLACED: placed, LEAF: 1.0, DEFAULT: 2.0, NEGATIVE_CONTROL: chance}
        runs = {variant: (Run.of(result(seconds, idle=idle)), cost(20.0, seconds)) for variant,
                seconds in seconds_by_variant.items()}
        return by_metric(list(placement_savings.run_rows("allreduce", [runs])))

    good = rows(0.5, 1.5)
    over = f"allreduce, run: seconds per step, placed, over those of {DEFAULT}"
    assert (good[over].value, good[over].baseline, good[over].met) == (0.25, 0.25, True)
    assert good["allreduce, run: metered bytes across zones over modeled ones"].value == 0.5
    lost = f"allreduce, run: seconds per step of {NEGATIVE_CONTROL} over those of placement (control)"
    assert (good[lost].value, good[lost].met) == (3.0, True)
    assert rows(1.1, 1.1)[f"allreduce, run: seconds per step, placed, over those of {LEAF}"].met is False
    assert rows(1.1, 1.1)[lost].met is False
    assert f"{over}; CPU-bound: 10% idle" in rows(0.5, 1.5, idle=0.1)
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


def test_throughput_evaluate_computes_shares_of_speed_without_communication() -> None:
    def asynchronous(rate: float) -> Result:
        return Result({"samples_per_second": rate}, (), 0.5)

    def synchronous(seconds: float) -> Result:
        """Slow until the batch sizes converge, then `seconds` per step."""
        first = (9.0,) * throughput.SETTLED
        return Result({"num_workers": 8, "batch_size": 64}, (*first, seconds, seconds), 0.5)

    # 8 ranks with 64 samples in 0.5 s: 1,024 samples/s
    results = {OFF: [asynchronous(1000.0)] * 3,
               GOSSIP: [asynchronous(940.0), asynchronous(960.0), asynchronous(970.0)],
               BALANCED: [synchronous(0.5)] * 3, throughput.NEGATIVE_CONTROL: [synchronous(1.0)] * 3}
    rows = by_metric(list(throughput.evaluate("x", results)))
    gossip = rows[f"x: {GOSSIP}, as a share of {OFF}"]
    assert (gossip.value, gossip.met, gossip.repeats) == (0.96, True, 3)
    assert rows[f"x: {BALANCED}"].value == 1024.0
    assert rows[f"x: {BALANCED}, as a share of {OFF}"].met is True
    assert rows[f"x: {throughput.NEGATIVE_CONTROL}, as a share of {OFF}"].met is True
    slow = by_metric(list(throughput.evaluate("x", {**results, BALANCED: [synchronous(0.6)] * 3,
                                                    throughput.NEGATIVE_CONTROL: [synchronous(0.5)] * 3})))
    assert slow[f"x: {BALANCED}, as a share of {OFF}"].met is False
    assert slow[f"x: {throughput.NEGATIVE_CONTROL}, as a share of {OFF}"].met is False


def test_accuracy_evaluate_pairs_seeds_and_requires_worse_control() -> None:
    noise = np.random.default_rng(1).normal(0, 0.5, (5, 2)).tolist()

    def outcomes(right: float, local_accuracy: float | None = None) -> list[list[Outcome]]:
        local = right if local_accuracy is None else local_accuracy
        return [[Outcome(right + offset, local + offset, 1, 0.5) for offset in folds] for folds in noise]

    def rows(slow: float, alone: float) -> dict[str, Row]:
        cases = {(variant, speeds): outcomes(97.0 if speeds == EQUAL else slow)
                 for variant in (GOSSIP, BALANCED) for speeds in (EQUAL, *SPEEDS)}
        control = outcomes(97.0, local_accuracy=alone)
        return by_metric(list(accuracy.evaluate({**cases, (NO_EXCHANGE, EQUAL): control})))

    for speeds in SPEEDS:
        metric = f"{GOSSIP}: accuracy, {speeds} vs. {EQUAL}"
        good = rows(96.8, 80.0)[metric]
        assert (good.value, good.met) == (pytest.approx(-0.2), True)
        assert good.baseline == pytest.approx(97.0, abs=0.5)
        assert rows(96.0, 80.0)[metric].met is False
    control = f"control: {NO_EXCHANGE}, vs. {GOSSIP}"
    assert rows(97.0, 80.0)[control].met is True
    assert rows(97.0, 96.9)[control].met is False


@pytest.mark.nightly
def test_accuracy_run_returns_outcomes_by_seed_and_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "COMMON", ("--virtual-ranks", "2", "--model", "mlp:8", "--steps", "12"))
    monkeypatch.setattr(accuracy, "FOLDS", 2)
    by_case = accuracy.run({("gossip", EQUAL): ("--strategy", "gossip")}, range(4, 6))
    assert [len(folds) for folds in by_case["gossip", EQUAL]] == [2, 2]
    assert len({outcome.accuracy for folds in by_case["gossip", EQUAL] for outcome in folds}) > 1


@pytest.mark.parametrize("options", [*throughput.VARIANTS.values(), *(
    f"{variant.options} --virtual-zones {variant.zones}"
    for variant in (*gossip_variants.COMBINATIONS, *gossip_variants.ALLREDUCE))])
@pytest.mark.parametrize("slow", SPEEDS.values())
def test_variants_train_with_all_speeds(options: str, slow: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--virtual-ranks 8 --model mlp:8 --batch-size 4 --steps 3 --emulate-compute 0.01 "
                 f"--straggler {slow} {options}")
    summary = train(parse_train_options(arguments.split(), {}))
    assert summary is not None
    assert summary["num_workers"] == 8
    assert summary["samples_per_second"] > 0


def test_gossip_variants_throughput_targets_depend_on_balance() -> None:
    variants = [*gossip_variants.COMBINATIONS, *gossip_variants.ALLREDUCE]
    assert [gossip_variants.throughput(variant, "", [94.0, 98.0], 100.0).met for variant in variants] == [
        *[False, True] * 6, None, None]
    assert [gossip_variants.throughput(variant, "", [94.0, 95.0], 100.0).met for variant in variants] == [
        *[True, False] * 6, None, None]
