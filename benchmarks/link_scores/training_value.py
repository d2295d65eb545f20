"""Value of link scores for training: the same job on a sandbox with two degraded nodes, with several placement rules.

Twelve nodes in two zones; one has a tenth of its link rate, another loses 2 % of its packets and has 10 ms of delay.
A probe measures all links. Then the same training runs on the nodes and in the rank order of each rule, alternating:

- Slurm: its own choice, ranks in order of node names.
- leaf order: the same nodes, ranks ordered by leaf.
- zone: slurmdl without link scores.
- link scores: slurmdl with link scores and without zones.
- zone + link scores: slurmdl with both.
- zone + throughput only, delay only, loss only: slurmdl with zones and one metric of each link.
- shuffled: slurmdl with zones and the scores of other nodes (negative control); the gain must vanish.

In addition, 20 jobs of random sizes are submitted while some nodes are busy: a degraded node may be chosen only if
too few other nodes are free.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.results import Row, make_row
from slurmdl.errors import SandboxError
from slurmdl.links import aggregate
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.links.samples import LinkSample, parse_sample_lines
from slurmdl.sandbox import lifecycle
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology
from slurmdl.slurm import hostlist

NODES, ZONES, RANKS = 12, 2, 4
#: bits/s of the links of nodes and zones; low, so that two CPUs are not the bottleneck
NODE_RATE, ZONE_RATE = 2e8, 2e8
SLOW, LOSSY = "n03", "n01"
MODEL = "mlp:256,128"
STEPS, WARM_UP, REPEATS, TRIALS = 12, 2, 3, 20
PLAIN, LEAF, ZONE, SCORE, BOTH = "Slurm", "leaf order", "zone", "link scores", "zone + link scores"
SHUFFLED = "shuffled (control)"
METRICS = ("throughput", "delay", "loss")
#: attempts to start a step: Open MPI 4.1.4 sometimes crashes in MPI_Init if a message arrives too early, and
#: `srun -K` then ends the other ranks
_STARTS = 8
_FLAT = f"SwitchName=all Nodes=n[01-{NODES}]\n"


def rows(seed: int = 0) -> Iterator[Row]:
    """Yield median and 99th percentile of the step time by rule, and the trials with busy nodes."""
    sandbox = lifecycle.sandbox_up(SandboxSpec(
        f"gain-{os.getpid()}", round_robin_topology(NODES, ZONES), node_rate=NODE_RATE, zone_rate=ZONE_RATE,
        zone_features=False, slurm_conf_lines=("SchedulerParameters=batch_sched_delay=0,sched_min_interval=0",)))
    try:
        benchmark = _TrainingBenchmark(sandbox, random.Random(seed))
        benchmark.degrade()
        yield from benchmark.measure_choices()
        yield from benchmark.measure_step_times()
    finally:
        lifecycle.sandbox_down(sandbox.spec.name)


class _TrainingBenchmark:
    """Measurements on a running sandbox."""

    def __init__(self, sandbox: lifecycle.Sandbox, source: random.Random) -> None:
        self.sandbox, self.random = sandbox, source
        self.folder = sandbox.shared / "gain"
        self._call(["mkdir", "-p", str(self.folder)], str(sandbox.shared))
        self.scores = LinkScores()

    def degrade(self) -> None:
        """Degrade two links and probe all links."""
        self.sandbox.shape_link(SLOW, rate=NODE_RATE / 10)
        self.sandbox.shape_link(LOSSY, delay=1e-2, loss=0.02)
        text = self._call(["slurmdl", "links", "probe", "--all", "--budget=20s", "--output", "-"])
        samples = [sample for sample in parse_sample_lines(text.splitlines()) if isinstance(sample, LinkSample)]
        self.scores = aggregate.aggregate_scores(samples, time.time())

    def measure_choices(self) -> Iterator[Row]:
        """Run trials with random busy nodes, with enough free clean nodes or one too few."""
        for spare, condition, expectation in ((0, "enough healthy nodes free", "no degraded node is chosen"),
                                              (-1, "one healthy node too few free",
                                               "exactly one degraded node is chosen")):
            as_expected = []
            for _ in range(TRIALS):
                clean = [node for node in self.sandbox.spec.topology.nodes if node not in (SLOW, LOSSY)]
                size = self.random.randint(2, 6)
                extra = 0 if spare else self.random.randint(0, 2)
                busy = self.random.sample(clean, len(clean) - size - spare - extra)
                bad = {SLOW, LOSSY} & set(self._nodes_of_new_job(size, busy))
                as_expected.append(len(bad) == -spare)
            yield make_row(f"trials with {condition}: {expectation}", [sum(as_expected)], "", target=str(TRIALS),
                           met=sum(as_expected) == TRIALS)

    def _nodes_of_new_job(self, size: int, busy: Sequence[str]) -> list[str]:
        """Return the nodes of a job that is submitted while other nodes are busy."""
        path = self._write_scores(self.scores, "scores")
        blocker = self._call(["sbatch", "--parsable", "-o/dev/null", f"-N{len(busy)}",
                              f"-w{hostlist.fold_hostlist(busy)}", "--exclusive",
                              "--wrap", "sleep 60"]).strip() if busy else ""
        try:
            if blocker:
                self._wait_for(blocker)
            job = self._call(["slurmdl", "sbatch", "--parsable", f"--dl-link-scores={path}",
                              "--dl-node-binding=nodelist", f"-N{size}", "--exclusive",
                              "-o/dev/null", "--wrap", "sleep 60"]).strip()
            return self._wait_for(job)
        finally:
            self._call(["scancel", "-u", self.sandbox.user.name])
            while self._call(["squeue", "-h"]).strip():
                time.sleep(0.1)

    def _wait_for(self, job: str) -> list[str]:
        """Wait until a job runs; return its nodes."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            state, _, nodes = self._call(["squeue", "-h", "-j", job, "-o", "%T %N"]).strip().partition(" ")
            if state == "RUNNING":
                return hostlist.expand_hostlist(nodes)
            time.sleep(0.1)
        raise SandboxError(f"job {job} does not start")

    def measure_step_times(self) -> Iterator[Row]:
        """Measure step times by rule."""
        names = list(self.scores.nodes)
        shuffled = names[1:] + names[:1]
        # assign the scores of the degraded links to healthy nodes
        wrong_nodes = {a: self.scores.nodes[b] for a, b in zip(names, shuffled, strict=True)}
        wrong_scores = replace(self.scores, nodes=wrong_nodes)
        flat = self.folder / "flat.conf"
        flat.write_text(_FLAT)
        all_scores = self._write_scores(self.scores, "all")
        orders = {ZONE: self._choose_nodes("off"), SCORE: self._choose_nodes(all_scores, str(flat)),
                  BOTH: self._choose_nodes(all_scores)}
        for metric in METRICS:
            nodes_of_metric = {name: _only(score, metric) for name, score in self.scores.nodes.items()}
            one_metric = replace(self.scores, nodes=nodes_of_metric, zones={}, inter_leaf={})
            orders[f"zone + {metric} only"] = self._choose_nodes(self._write_scores(one_metric, metric))
        orders[SHUFFLED] = self._choose_nodes(self._write_scores(wrong_scores, "wrong"))
        slurm_nodes = sorted(self._slurm_nodes())
        by_leaf = sorted(slurm_nodes, key=lambda node: (self.sandbox.spec.topology.leaf_of(node), node))
        orders = {PLAIN: slurm_nodes, LEAF: by_leaf, **orders}
        seconds: dict[str, list[list[float]]] = {variant: [] for variant in orders}
        for _ in range(REPEATS):
            for variant, nodes in orders.items():
                seconds[variant].append(self._train(nodes))
                print(f"{variant}: {' '.join(nodes)}: {statistics.median(seconds[variant][-1]):.4f} s",
                      file=sys.stderr)
        yield from evaluate(seconds, orders)

    def _slurm_nodes(self) -> list[str]:
        """Return the nodes that Slurm assigns to a job."""
        job = self._call(["sbatch", "--parsable", f"-N{RANKS}", "-o/dev/null", "--wrap", "sleep 30"]).strip()
        try:
            return self._wait_for(job)
        finally:
            self._call(["scancel", job])

    def _choose_nodes(self, scores: str, topology: str = "") -> list[str]:
        """Return the node of each rank that `slurmdl place` chooses."""
        topology_option = [f"--topology={topology}"] if topology else []
        text = self._call(["slurmdl", "place", "--json", f"--dl-link-scores={scores}", *topology_option, f"-N{RANKS}",
                           "--ntasks-per-node=1", "--dl-strategy=allreduce"])
        placement = json.loads(text)["placement"]
        if placement is None:
            raise SandboxError(f"slurmdl place --dl-link-scores={scores}: nothing chosen: {text[:200]}")
        return list(placement["rank_map"]["nodes"])

    def _write_scores(self, scores: LinkScores, name: str) -> str:
        path = self.folder / f"{name}.json"
        path.write_text(scores.to_text())
        return str(path)

    def _train(self, nodes: Sequence[str]) -> list[float]:
        """Train on these nodes in this rank order; return the seconds of each step."""
        hostfile, metrics = self.folder / "hosts", self.folder / "metrics"
        hostfile.write_text("\n".join(nodes) + "\n")
        train = ["salloc", "-Q", f"-N{RANKS}", f"-w{hostlist.fold_hostlist(sorted(nodes))}",
                 "env", f"SLURM_HOSTFILE={hostfile}", "srun", "--mpi=pmix", "-K", "-n", str(RANKS), "-m", "arbitrary",
                 "python", "-m", "slurmdl.train",
                 "--strategy", "allreduce", "--comm-pattern", "ring", "--model", MODEL, "--steps", str(STEPS),
                 "--log-every", str(STEPS), "--metrics", str(metrics)]
        for start in range(_STARTS):
            metrics.unlink(missing_ok=True)
            try:
                self._call(train)
                break
            except SandboxError:
                if start + 1 == _STARTS:
                    raise
        return [float(json.loads(line)["seconds"]) for line in Path(metrics).read_text().splitlines()][WARM_UP:]

    def _call(self, argv: Sequence[str], directory: str = "") -> str:
        """Run a command on the login host as the ordinary user; return its stdout."""
        done = subprocess.run(self.sandbox.command(argv, directory=directory or str(self.folder)),
                              capture_output=True, text=True, timeout=240, check=False)
        if done.returncode:
            raise SandboxError(f"{' '.join(argv[:3])}: exit status {done.returncode}: "
                               f"{' '.join(done.stderr.split())[-300:]}")
        return done.stdout


def evaluate(seconds: Mapping[str, Sequence[Sequence[float]]], orders: Mapping[str, Sequence[str]]) -> Iterator[Row]:
    """Yield median and 99th percentile of the step times of each rule; the baseline is Slurm's own choice."""
    def tail(steps: Sequence[float]) -> float:
        return sorted(steps)[min(len(steps) - 1, len(steps) * 99 // 100)]

    for name, metric in (("median", statistics.median), ("99th percentile", tail)):
        values_by_variant = {variant: [float(metric(steps)) for steps in runs] for variant, runs in seconds.items()}
        medians = {variant: statistics.median(values) for variant, values in values_by_variant.items()}
        for variant, values in values_by_variant.items():
            target: str = ""
            met: bool | None = None
            if variant == BOTH:
                target = "below Slurm, leaf order and zone"
                met = medians[variant] < min(medians[PLAIN], medians[LEAF], medians[ZONE])
            elif variant == SHUFFLED:
                target = "more than half of the gain is lost"
                met = medians[ZONE] - medians[variant] < 0.5 * (medians[ZONE] - medians[BOTH])
            yield make_row(f"{name} seconds per step, {variant} ({hostlist.fold_hostlist(sorted(orders[variant]))})",
                           values, "s", baseline=medians[PLAIN], target=target, met=met)


def _only(score: LinkScore, metric: str) -> LinkScore:
    """Return a score with only one known metric."""
    by_metric = {"throughput": LinkScore(score.throughput),
                 "delay": LinkScore(None, score.rtt, rtt_p99=score.rtt_p99),
                 "loss": LinkScore(None, loss=score.loss)}
    return replace(by_metric[metric], age=score.age, samples=score.samples, source=score.source)
