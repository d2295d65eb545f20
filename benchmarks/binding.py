"""Jobs that `slurmdl sbatch` binds on clusters in use: the nodes that Slurm gives, and what was promised.

Sandboxes of equal zones, on which other jobs hold random nodes, and one uplink and one node are slow. Jobs of five
kinds are submitted; each starts and reports its nodes. The cost model gives the time of an iteration on them, and
the submission has recorded the time that it promised.

The negative control prefers the zones of the chosen nodes without the number of nodes in each, and promises the time
on the chosen nodes.
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice

from benchmarks.cloud_nodes import SLURM_CONF_LINES
from benchmarks.gpu_requests import slurm_version
from benchmarks.results import Row, make_row
from benchmarks.suite import Suite, start
from slurmdl.errors import SandboxError
from slurmdl.launch import submission, submission_record
from slurmdl.launch.step_plan import build_plan
from slurmdl.links.link_scores import LinkScores
from slurmdl.links.score_sources import parse_scores
from slurmdl.sandbox import lifecycle
from slurmdl.sandbox.lifecycle import Sandbox
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology
from slurmdl.slurm.hostlist import expand_hostlist, fold_hostlist
from slurmdl.slurm.step_layout import StepLayout
from slurmdl.topology.topology import Topology

OCCUPANCIES, SANDBOXES = 100, 2
NODES, ZONES, CPUS = 16, 4, 8
#: nodes that other jobs hold, fewest and most
BUSY = (4, 8)
#: kind of job -> its options
KINDS = {
    "allreduce": ("-N4",),
    "parameter servers": ("-N6", "--dl-strategy=ps", "--dl-ps=2"),
    "gossip": ("-N6", "--dl-strategy=gossip"),
    "pairs of tp": ("-N6", "--dl-mesh=dp=3,tp=2"),
    "pipelines": ("-N6", "--dl-mesh=dp=2,pp=3"),
}
#: a job got what was promised up to this ratio of the times
LIMIT = 1.02
#: a job starts and reports within this time; a preference that cannot be met is taken back after 20 s
_START_TIMEOUT_S = 60.0
_JOB = """#!/bin/sh
printf '%s\\n%s\\n' "$SLURM_JOB_NODELIST" "$SLURMDL_SUBMISSION" >"$1.new"
mv "$1.new" "$1"
"""


@dataclass(frozen=True)
class Occupancy:
    """A cluster in use: the nodes that other jobs hold, a zone with a slow uplink and a node with a slow link."""

    busy: tuple[str, ...]
    slow_zone: str
    slow_node: str

    def scores_text(self) -> str:
        """The slow links as a file of link scores."""
        return json.dumps({"zones": {self.slow_zone: {"throughput": 2.5e8}}, "nodes": {self.slow_node: {
            "throughput": 1.25e8}}})


@dataclass(frozen=True)
class Outcome:
    """What one job got: seconds of an iteration by the cost model.

    Attributes:
        promised: None if the job was not bound.
        got, own: on its nodes; on those that Slurm chose itself.
        chosen, uncounted: on the nodes that slurmdl chose; on those of the control. None if Slurm's own choice was
            good enough.
    """

    kind: str
    promised: float | None
    got: float
    own: float
    chosen: float | None = None
    uncounted: float | None = None


def random_occupancies(seed: int, topology: Topology) -> Iterator[Occupancy]:
    """Yield random states of the cluster; the slow node is free."""
    generator = random.Random(seed)
    zones = [topology.zones[leaf] for leaf in sorted(set(topology.leaf.tolist()))]
    while True:
        busy = sorted(generator.sample(topology.nodes, generator.randint(*BUSY)), key=topology.nodes.index)
        free = [node for node in topology.nodes if node not in busy]
        yield Occupancy(tuple(busy), generator.choice(zones), generator.choice(free))


class BoundJobs:
    """Submits jobs to a sandbox and computes the times on their nodes."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.directory = sandbox.shared / "binding"
        self.directory.mkdir()
        os.chown(self.directory, sandbox.user.uid, sandbox.user.gid)
        (self.directory / "job.sh").write_text(_JOB)

    def outcomes(self, occupancy: Occupancy) -> Iterator[Outcome]:
        """Submit one job of each kind: by slurmdl, by plain sbatch, and if other nodes are better, the control."""
        topology = self.sandbox.spec.topology
        scores_file, scores = self.directory / "scores.json", parse_scores(occupancy.scores_text(), time.time())
        scores_file.write_text(occupancy.scores_text())

        def seconds(options: Sequence[str], nodes: Sequence[str]) -> float:
            return iteration_seconds(options, nodes, topology, scores)

        with self.occupied(occupancy.busy):
            for kind, options in KINDS.items():
                nodes, record, log = self.start(["slurmdl", "sbatch", "--dl-explain",
                                                 f"--dl-link-scores={scores_file}", *options])
                plain = [option for option in options if not option.startswith("--dl-")]
                own = self.start(["sbatch", *plain])[0]
                promise = submission_record.parse_record(record).promise
                chosen = uncounted = None
                if "no binding is needed" not in log:
                    chosen_nodes = _chosen_nodes(log)
                    zones = "|".join(sorted(set(map(topology.leaf_of, chosen_nodes))))
                    chosen = seconds(options, chosen_nodes)
                    uncounted = seconds(options, self.start(["sbatch", f"--prefer={zones}", *plain])[0])
                yield Outcome(kind, promise.seconds if promise else None, seconds(options, nodes),
                              seconds(options, own), chosen, uncounted)

    @contextmanager
    def occupied(self, nodes: Sequence[str]) -> Iterator[None]:
        """Hold these nodes."""
        job = self.run(["sbatch", "--parsable", "--exclusive", f"-N{len(nodes)}", "-w", fold_hostlist(nodes),
                        "-o", "/dev/null", "--wrap", "sleep 3600"]).stdout.strip()
        self.wait(f'[ "$(squeue -h -j {job} -o %t)" = R ]')
        try:
            yield
        finally:
            self.run(["scancel", job])
            self.wait_for_nodes(0)

    def start(self, command: Sequence[str]) -> tuple[list[str], str, str]:
        """Submit a job and wait for its end; return its nodes, SLURMDL_SUBMISSION, and slurmdl's messages."""
        answer = self.directory / "answer"
        answer.unlink(missing_ok=True)
        done = self.run([*command, "-o", "/dev/null", "job.sh", str(answer)])
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not answer.exists():
            if time.monotonic() > deadline:
                raise SandboxError(f"{' '.join(command)}: not started after {_START_TIMEOUT_S:.0f} s: {done.stderr}")
            time.sleep(0.05)
        self.wait_for_nodes(1)
        nodes, _, record = answer.read_text().partition("\n")
        return expand_hostlist(nodes), record.strip(), done.stderr

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command as the user on the login node; SandboxError if it fails."""
        done = subprocess.run(self.sandbox.command(command, directory=str(self.directory)), capture_output=True,
                              text=True, check=False)
        if done.returncode:
            raise SandboxError(f"{' '.join(command)}: status {done.returncode}: {done.stderr.strip()[-300:]}")
        return done

    def wait_for_nodes(self, jobs: int) -> None:
        """Wait until only this number of jobs is left, running or completing."""
        self.wait(f'[ "$(squeue -h -o %A | wc -l)" = {jobs} ]')

    def wait(self, condition: str) -> None:
        """Wait until a shell condition holds on the login node; SandboxError if it does not."""
        self.run(["timeout", f"{_START_TIMEOUT_S:.0f}", "sh", "-c", f"until {condition}; do sleep 0.1; done"])


def _chosen_nodes(log: str) -> list[str]:
    """The nodes that slurmdl chose, by the explanation of --dl-explain."""
    choice = re.search(r"^choice +(\S+): ", log, re.MULTILINE)
    if choice is None:
        raise SandboxError(f"no choice of nodes: {log.strip()[-300:]}")
    return expand_hostlist(choice[1])


def iteration_seconds(options: Sequence[str], nodes: Sequence[str], topology: Topology, scores: LinkScores) -> float:
    """The time of an iteration of a job with these options, one task on each node, in the best order of ranks."""
    request = submission.parse_submission(submission.SbatchCall.from_argv([*options, "--wrap=true"]), {}).request
    layout = StepLayout(tuple((node, 1) for node in nodes))
    return build_plan(layout, topology, scores, request.options)[1].cost.seconds


@contextmanager
def zones_sandbox(name: str) -> Iterator[Sandbox]:
    """A sandbox of equal zones with a feature for each."""
    sandbox = lifecycle.sandbox_up(SandboxSpec(name, round_robin_topology(NODES, ZONES), zone_rate=0, cpus=CPUS,
                                               slurm_conf_lines=SLURM_CONF_LINES[:1]))
    try:
        yield sandbox
    finally:
        lifecycle.sandbox_down(name)


def measure(sandboxes: Sequence[Sandbox], occupancies: Sequence[Occupancy]) -> list[Outcome]:
    """Measure all occupancies, divided among the sandboxes."""
    def measure_part(index: int) -> list[Outcome]:
        jobs = BoundJobs(sandboxes[index])
        return [outcome for occupancy in occupancies[index::len(sandboxes)] for outcome in jobs.outcomes(occupancy)]

    with ThreadPoolExecutor(len(sandboxes)) as pool:
        return [outcome for part in pool.map(measure_part, range(len(sandboxes))) for outcome in part]


def share_as_promised(ratios: Sequence[float]) -> float:
    """The share of jobs, in percent, whose nodes are as good as promised."""
    return 100 * sum(ratio <= LIMIT for ratio in ratios) / len(ratios)


def outcome_rows(outcomes: Sequence[Outcome]) -> Iterator[Row]:
    """Yield the rows of all kinds, of each kind, and of the control."""
    for kind in ("", *KINDS):
        of_kind = [outcome for outcome in outcomes if kind in ("", outcome.kind)]
        bound = [(outcome, outcome.promised) for outcome in of_kind if outcome.promised]
        name = kind or "all kinds"
        yield make_row(f"{name}: bound jobs", [len(bound)], "", baseline=len(of_kind))
        if not kind:
            own_is_best = sum(outcome.chosen is None for outcome in of_kind)
            yield make_row(f"{name}: jobs for which Slurm's own choice is good enough", [own_is_best], "",
                           baseline=len(of_kind))
        if not bound:
            continue
        ratios = [outcome.got / promised for outcome, promised in bound]
        share = share_as_promised(ratios)
        yield make_row(f"{name}: bound jobs whose nodes are as good as promised", [share], "%",
                       target="at least 95 %", met=share >= 95)
        yield make_row(f"{name}: worst ratio of the time on the job's nodes to the promised one", [max(ratios)], "")
        gains = [outcome.own / outcome.got for outcome, _ in bound]
        yield make_row(f"{name}: time on the nodes of Slurm's own choice, over that of the bound job", [
            statistics.median(gains)], "")
    control = [outcome.uncounted / outcome.chosen for outcome in outcomes if outcome.uncounted and outcome.chosen]
    if control:
        share = share_as_promised(control)
        yield make_row("control, the same zones without numbers: jobs whose nodes are as good as promised", [share],
                       "%", target="below 95 %", met=share < 95)
        yield make_row("control: jobs", [len(control)], "")


def rows(_: str, seed: int, quick: bool) -> Iterator[Row]:
    """Yield the rows of the only part."""
    with ExitStack() as stack:
        sandboxes = [stack.enter_context(zones_sandbox(f"binding-{os.getpid()}-{i}")) for i in range(SANDBOXES)]
        generator = random_occupancies(seed, sandboxes[0].spec.topology)
        count = OCCUPANCIES // (10 if quick else 1)
        yield from outcome_rows(measure(sandboxes, list(islice(generator, count))))


SUITE = Suite("binding", "Nodes that Slurm gives to bound jobs on clusters in use, and promised ones (needs root).",
              ("occupancies",), rows, slurm_version, quick="a tenth of the occupancies")


if __name__ == "__main__":
    start(SUITE.main)
