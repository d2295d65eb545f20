"""Replay of a job trace on a simulated cluster: what Slurm's and slurmdl's choice of nodes do to all jobs.

The policies run on one trace, or on the generated traces of several seeds in parallel processes. The report has
distributions per policy as text, JSON and SVG.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from slurmdl.errors import InputError
from slurmdl.history.best_nodes import CommCosts
from slurmdl.history.leaves import Leaves
from slurmdl.history.scheduler import Communication, Machine, NodeChoice, Schedule, SchedulerTiming, Simulation
from slurmdl.history.slurm_rules import SlurmRule
from slurmdl.history.traces import JobTrace, generate_lublin_trace
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.arrays import BoolArray, FloatArray, IntArray
from slurmdl.text import pluralize
from slurmdl.topology.drawing import svg_document, svg_text
from slurmdl.topology.topology import Topology

#: all jobs by Slurm's rule; all by slurmdl's choice; a share of the users by slurmdl's choice; control: random nodes
POLICIES = ("slurm", "slurmdl", "mixed", "random")
SLOWDOWN_BOUND_S = 10.0  # Feitelson: run times below it count as this long

#: metric -> attribute of PolicyOutcome, the factor to the shown unit, and this unit on axes
DISTRIBUTIONS: Mapping[str, tuple[str, float, str]] = {
    "waiting time, min": ("wait_s", 1 / 60, " min"),
    f"bounded slowdown ({SLOWDOWN_BOUND_S:g} s)": ("slowdown", 1.0, "x"),
    "leaf zones / fewest (jobs of 2+ nodes)": ("spread", 1.0, "x"),
    "step-time factor of communication (bound jobs)": ("factor", 1.0, "x"),
    "resulting / recorded run time (bound jobs)": ("run_ratio", 1.0, "x")}
#: metric -> attribute of PolicyOutcome
SHARES = {"utilisation": "utilization", "useful utilisation": "useful",
          "largest job inside one leaf, of all nodes": "leaf_nodes",
          "largest job that could start, of all nodes": "startable_nodes"}
_MARGIN, _HEADING = 24, 64  # pixels
_PANEL_WIDTH, _PANEL_HEIGHT, _GAP = 360, 200, 70
_COLUMNS = 3
_MAX_POINTS = 80  # quantiles of a curve
_MAX_TICKS = 6
_COLORS = {"slurm": "#475569", "slurmdl": "#1d4ed8", "mixed": "#15803d", "random": "#c2410c"}



def random_nodes(rule: SlurmRule, seed: int) -> NodeChoice:
    """Random free nodes whenever Slurm's rule could start the job."""
    generator = np.random.default_rng(seed)

    def choose(free: IntArray, nodes: int) -> IntArray | None:
        if not rule.fits(free, nodes):
            return None
        return np.asarray(generator.multivariate_hypergeometric(free, nodes, method="marginals"))

    return choose


def jobs_with_slurmdl(trace: JobTrace, policy: str, share: float, seed: int) -> BoolArray:
    """Whether slurmdl places each job; shape (jobs,). With `mixed`, users are drawn by the seed."""
    if policy != "mixed":
        return np.full(len(trace), policy == "slurmdl")
    users = int(trace.user.max(initial=0)) + 1
    chosen = np.random.default_rng([seed, 2]).permutation(users)[:round(share * users)]
    return np.isin(trace.user, chosen)


@dataclass(frozen=True, eq=False)
class ReplaySettings:
    """What to simulate.

    Attributes:
        policies: names in POLICIES.
        share: share of the users with slurmdl in the policy `mixed`.
        strategy, model_bytes: communication of the jobs, see CommCosts.
        scores: default link scores.
    """

    topology: Topology
    policies: tuple[str, ...]
    share: float = 0.5
    strategy: str = "allreduce"
    model_bytes: float = 100e6
    scores: LinkScores = field(default_factory=LinkScores)
    communication: Communication = field(default_factory=Communication)
    timing: SchedulerTiming = field(default_factory=SchedulerTiming)

    def machine(self) -> Machine:
        leaves = Leaves.from_topology(self.topology)
        return Machine(CommCosts(leaves, self.scores, [self.strategy], self.model_bytes))


@dataclass(frozen=True, eq=False)
class PolicyOutcome:
    """Outcome of one policy with one seed. Arrays of shape (jobs,) unless noted.

    Attributes:
        slowdown: waiting and resulting run time over the recorded run time, both times at least SLOWDOWN_BOUND_S.
        spread: leaf zones over the fewest possible on the empty cluster; of jobs with several nodes.
        factor, run_ratio: predicted communication time over that of the reference, and resulting over recorded run
            time; of jobs bound by communication.
        placed: whether slurmdl placed the job.
        utilization, useful, leaf_nodes, startable_nodes: as in Schedule.
    """

    policy: str
    seed: int
    wait_s: FloatArray
    slowdown: FloatArray
    spread: FloatArray
    factor: FloatArray
    run_ratio: FloatArray
    response_s: FloatArray
    placed: BoolArray
    utilization: float
    useful: float
    leaf_nodes: float
    startable_nodes: float


def usable_trace(trace: JobTrace, machine: Machine) -> JobTrace:
    """The trace without jobs that can never start on this cluster; the reasons are in its notes."""
    trace = trace.without_jobs_above(machine.leaves.nodes)
    rejected = machine.never_starts(trace)
    if rejected.any():
        note = (f"{pluralize(int(rejected.sum()), 'job')} skipped: Slurm's node selection does not start them even "
                "on the empty cluster")
        if rejected.all():
            raise InputError(f"no usable job: {note}", trace.source)
        trace = replace(trace.selected(~rejected), notes=(*trace.notes, note))
    if unused := len(machine.leaves.topology.nodes) - machine.leaves.nodes:
        note = f"{pluralize(unused, 'node')} in no zone not used, as by Slurm"
        trace = replace(trace, notes=(*trace.notes, note))
    return trace


def replay_policies(trace: JobTrace, machine: Machine, settings: ReplaySettings,
                    seed: int) -> Iterator[PolicyOutcome]:
    """Simulate each policy on the same trace."""
    bound = settings.communication.bound_jobs(trace, seed)
    for policy in settings.policies:
        placed = jobs_with_slurmdl(trace, policy, settings.share, seed)
        choice = random_nodes(machine.rule, seed) if policy == "random" else machine.rule.choose
        simulation = Simulation(trace, machine, choice, placed, bound, settings.communication, settings.timing)
        yield summarize_schedule(simulation.run(), trace, machine, policy, seed, placed, bound)


def summarize_schedule(schedule: Schedule, trace: JobTrace, machine: Machine, policy: str, seed: int,
                       placed: BoolArray, bound: BoolArray) -> PolicyOutcome:
    """Compute the metrics of one simulation."""
    wait = schedule.start_s - trace.submit_s
    response = wait + schedule.run_s
    several = trace.nodes > 1
    spread = schedule.zones / machine.leaves.fewest[trace.nodes]
    slowdown = np.maximum(1.0, response / np.maximum(trace.run_s, SLOWDOWN_BOUND_S))
    return PolicyOutcome(policy, seed, wait, slowdown, spread[several], schedule.factor[bound],
                         (schedule.run_s / trace.run_s)[bound], response, placed, schedule.utilization,
                         schedule.useful, schedule.leaf_nodes, schedule.startable_nodes)


def _replay_seed(settings: ReplaySettings, jobs: int, load: float, seed: int) -> list[PolicyOutcome]:
    """Simulate the policies for one seed; runs in a worker process."""
    machine = settings.machine()
    trace = usable_trace(generate_lublin_trace(jobs, machine.leaves.nodes, load, seed), machine)
    return list(replay_policies(trace, machine, settings, seed))


def replay_seeds(settings: ReplaySettings, jobs: int, load: float, seeds: Sequence[int],
                 processes: int = 1) -> list[list[PolicyOutcome]]:
    """Outcomes of a generated trace of each seed, in the order of the seeds; equal for any number of processes."""
    replay_seed = partial(_replay_seed, settings, jobs, load)
    if processes <= 1 or len(seeds) == 1:
        return list(map(replay_seed, seeds))
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(min(processes, len(seeds))) as pool:
        return pool.map(replay_seed, seeds, chunksize=1)


def pool_outcomes(outcomes: Sequence[PolicyOutcome]) -> PolicyOutcome:
    """One outcome of several seeds: distributions over all jobs, means of the shares."""
    first = outcomes[0]
    if len(outcomes) == 1:
        return first
    arrays: dict[str, Any] = {name: np.concatenate([getattr(outcome, name) for outcome in outcomes])
                              for name in ("wait_s", "slowdown", "spread", "factor", "run_ratio", "response_s",
                                           "placed")}
    shares: dict[str, Any] = {name: float(np.mean([getattr(outcome, name) for outcome in outcomes]))
              for name in ("utilization", "useful", "leaf_nodes", "startable_nodes")}
    return PolicyOutcome(first.policy, first.seed, **arrays, **shares)


def summarize_values(values: FloatArray) -> dict[str, float]:
    """Median, mean and 95th percentile; 0 without values."""
    if not len(values):
        return {"median": 0.0, "mean": 0.0, "p95": 0.0}
    return {"median": float(np.median(values)), "mean": float(values.mean()),
            "p95": float(np.percentile(values, 95))}


def format_replay(outcomes: Sequence[PolicyOutcome]) -> list[str]:
    """Lines of a table with a column per policy."""
    width = max(map(len, [*DISTRIBUTIONS, *SHARES])) + 1
    rows = [("", [outcome.policy for outcome in outcomes]), ("", ["median / mean / p95"] * len(outcomes))]
    for metric, (attribute, scale, _) in DISTRIBUTIONS.items():
        values = [summarize_values(getattr(outcome, attribute) * scale).values() for outcome in outcomes]
        rows.append((metric, [" / ".join(map(format_three_digits, triple)) for triple in values]))
    for metric, attribute in SHARES.items():
        rows.append((metric, [f"{getattr(outcome, attribute):.1%}" for outcome in outcomes]))
    lines = [f"{metric:{width}}" + "".join(f"{cell:>22}" for cell in cells) for metric, cells in rows]
    for outcome in outcomes:
        if outcome.policy == "mixed":
            lines += _format_users(outcome)
    return lines


def _format_users(outcome: PolicyOutcome) -> list[str]:
    parts = [(name, outcome.wait_s[chosen]) for name, chosen in
             (("with slurmdl", outcome.placed), ("without", ~outcome.placed)) if chosen.any()]
    text = "; ".join(f"{name} {pluralize(len(wait), 'job')}, mean wait {wait.mean() / 60:.3g} min"
                     for name, wait in parts)
    return [f"mixed: {text}"]


def format_three_digits(value: float) -> str:
    """`1.23`, `123`, `12,345`."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def replay_to_json(outcomes: Sequence[PolicyOutcome]) -> list[dict[str, Any]]:
    """The same numbers as JSON values; times in seconds."""
    return [{"policy": outcome.policy, "jobs": len(outcome.wait_s),
             **{attribute: summarize_values(getattr(outcome, attribute)) for attribute, *_ in DISTRIBUTIONS.values()},
             **{attribute: getattr(outcome, attribute) for attribute in SHARES.values()},
             **({"mean_wait_with_slurmdl_s": float(outcome.wait_s[outcome.placed].mean()),
                 "mean_wait_without_s": float(outcome.wait_s[~outcome.placed].mean())}
                if outcome.policy == "mixed" and 0 < outcome.placed.sum() < len(outcome.placed) else {})}
            for outcome in outcomes]


def draw_replay(title: str, outcomes: Sequence[PolicyOutcome]) -> str:
    """SVG document with a panel per metric: share of the jobs (vertical) with at most this value (horizontal)."""
    elements: list[str] = []
    for i, (metric, (attribute, scale, unit)) in enumerate(DISTRIBUTIONS.items()):
        x = _MARGIN + 40 + i % _COLUMNS * (_PANEL_WIDTH + _GAP)
        y = _HEADING + 30 + i // _COLUMNS * (_PANEL_HEIGHT + _GAP)
        elements += _draw_panel(x, y, metric, unit, {outcome.policy: getattr(outcome, attribute) * scale
                                                     for outcome in outcomes})
    bottom = _HEADING + 30 + -(-len(DISTRIBUTIONS) // _COLUMNS) * (_PANEL_HEIGHT + _GAP)
    for i, outcome in enumerate(outcomes):
        left = _MARGIN + 130 * i
        elements.append(f'<rect x="{left}" y="{bottom - 11}" width="14" height="14" '
                        f'fill="{_COLORS[outcome.policy]}"/>')
        elements.append(svg_text(left + 20, bottom, outcome.policy))
    return svg_document(title, _MARGIN + _COLUMNS * (_PANEL_WIDTH + _GAP), bottom + 24, elements)


def _draw_panel(x: float, y: float, metric: str, unit: str, values: dict[str, FloatArray]) -> Iterator[str]:
    yield svg_text(x, y - 10, metric, weight="bold")
    yield (f'<rect x="{x:g}" y="{y:g}" width="{_PANEL_WIDTH}" height="{_PANEL_HEIGHT}" fill="none" '
           f'stroke="#64748b"/>')
    for share in (0.0, 0.5, 1.0):
        yield svg_text(x - 36, y + _PANEL_HEIGHT * (1 - share) + 4, f"{share:.0%}", size=11)
    values = {policy: part for policy, part in values.items() if len(part)}
    if not values:
        return
    # values above the largest of the 99th percentiles are cut off
    low, high = (float(max(np.percentile(part, 99) for part in values.values())) if is_high else
                 float(min(part.min() for part in values.values())) for is_high in (False, True))
    is_log = high > 50 * max(low, 1.0)
    low = max(low, 0.1) if is_log else low
    high = high if high > low else low + 1.0

    def across(numbers: FloatArray) -> FloatArray:
        """Horizontal positions in the panel."""
        begin, end, at = (np.log(low), np.log(high), np.log(np.maximum(numbers, low))) if is_log else \
            (low, high, numbers)
        return np.asarray(x + np.clip((at - begin) / (end - begin), 0, 1) * _PANEL_WIDTH)

    ticks = round_ticks(low, high, is_log)
    for tick, dx in zip(ticks, across(np.array(ticks)).tolist(), strict=True):
        label = f"{tick:,g}{unit}" if tick < 1e6 else f"{tick:g}{unit}"
        yield f'<path d="M{dx:.1f} {y + _PANEL_HEIGHT:g}v4" stroke="#64748b"/>'
        yield svg_text(dx - 3 * len(label), y + _PANEL_HEIGHT + 16, label, size=11)
    shares = np.linspace(0, 1, _MAX_POINTS)
    for policy, part in values.items():
        points = " ".join(f"{dx:.1f},{y + _PANEL_HEIGHT * (1 - share):.1f}" for dx, share in
                          zip(across(np.quantile(part, shares)).tolist(), shares.tolist(), strict=True))
        yield (f'<polyline points="{points}" fill="none" stroke="{_COLORS[policy]}" stroke-width="2" '
               f'stroke-opacity="0.8"/>')


def round_ticks(low: float, high: float, is_log: bool) -> list[float]:
    """Round numbers from `low` to `high`: powers of ten on a logarithmic axis, else 1, 2 or 5 of them apart."""
    if is_log:
        return [10.0**k for k in range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)]
    power = 10.0 ** math.floor(math.log10((high - low) / _MAX_TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= _MAX_TICKS)
    return [float(f"{step * k:.9g}") for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
