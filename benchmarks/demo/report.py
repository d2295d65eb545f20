"""Text and result rows of the demo's outcomes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.demo.jobs import (
    BAD_LINK,
    CONTROL,
    JOBS,
    LEAF,
    PLACED,
    PLAIN,
    VARIANTS,
    Job,
    Outcome,
    Outcomes,
)
from benchmarks.results import Row, make_row
from slurmdl.slurm.hostlist import fold_hostlist

if TYPE_CHECKING:
    from benchmarks.demo.cluster import DemoCluster

#: relative difference of step times that counts as a gain or a loss
MARGIN = 1.05
#: and of bytes between zones, and of step times of the bad link's control
BYTES_MARGIN, HEALTHY_MARGIN = 1.01, 1.2
BAR = 20  # characters
#: jobs whose bytes between zones are judged
BYTES_JOBS = ("mesh", "ps", "allreduce")


@dataclass(frozen=True)
class Line:
    """A line of the table and of the picture.

    Attributes:
        share: step time relative to the slowest of the job.
        gain: over the better of plain and leaf order, for slurmdl's lines; "" for others.
    """

    job: str
    placement: str
    nodes: str
    zones: int
    seconds: float
    share: float
    gain: str


def make_lines(outcomes: Outcomes) -> list[Line]:
    """Lines in the order of the acts; those of a job with another's baseline follow that job's."""
    lines = []
    for job in JOBS:
        others = [outcomes[job.baseline or job.key, variant].median_s for variant in (PLAIN, LEAF)]
        for variant in (variant for variant in VARIANTS if variant in job.variants):
            outcome = outcomes[job.key, variant]
            slowest = max(*others, outcome.median_s)
            lines.append(Line(job.key, variant, fold_hostlist(sorted(outcome.rank_nodes)), outcome.zones,
                              outcome.median_s, outcome.median_s / slowest,
                              describe_gain(min(others) / outcome.median_s) if variant == PLACED else ""))
    return lines


def describe_gain(speedup: float) -> str:
    """Describe a ratio of step times; differences within MARGIN are none."""
    if speedup > MARGIN:
        return f"{speedup:.1f} x as fast"
    return "none" if speedup >= 1 / MARGIN else f"slower: {speedup:.2f} x"


def format_run(job: Job, variant: str, outcome: Outcome, cluster: DemoCluster) -> str:
    """One line about the newest run of a job."""
    by_zone: dict[str, int] = {}
    for node in outcome.rank_nodes:
        by_zone[cluster.zone(node)] = by_zone.get(cluster.zone(node), 0) + 1
    zones = " + ".join(f"{count} in {zone}" for zone, count in sorted(by_zone.items()))
    label = f"{variant}, islands" if job.baseline else variant
    accuracy = f", accuracy {outcome.accuracy:.1%}" if outcome.accuracy is not None else ""
    return (f"  {label:17} {outcome.seconds[-1]:.3f} s/step{accuracy}, "
            f"{outcome.inter_zone_bytes[-1] / job.steps / 1e6:.2f} MB/step between zones; {zones}")


def describe_probe(links: str, node: str) -> str:
    """Describe the line of a node in the output of `slurmdl links show`."""
    for line in links.splitlines():
        # name, kind, zone, slowdown, throughput and its unit, and more
        name, *words = line.split() or [""]
        if name == node and len(words) > 4:
            return f"{node}: {words[3]} {words[4]}, slowdown {words[2]}"
    return f"{node}: not measured"


def format_table(outcomes: Outcomes) -> str:
    """The table of all jobs, with a bar for each step time."""
    cells = [("job", "placement", "nodes", "zones", "s/step", "", "gain over the better")]
    previous = ""
    for line in make_lines(outcomes):
        cells.append((line.job if line.job != previous else "", line.placement, line.nodes, str(line.zones),
                      f"{line.seconds:.3f}", "█" * max(round(BAR * line.share), 1), line.gain))
        previous = line.job
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def format_closing(picture: str, log: str, seconds: float) -> str:
    """What follows the table: notes, files, and the commands for one's own cluster."""
    return f"""\
Gain: against the better of plain and leaf order; less than {MARGIN - 1:.0%} is none. Steps of `mesh` and
`bad link` only communicate, the others train. `islands` is compared with `allreduce`.
picture: {picture}
details: {log} (placements, reasons, job output)
{seconds:.0f} s in all; the cluster is removed. On your own cluster:
  slurmdl doctor                  # has the cluster what slurmdl needs?
  slurmdl links probe --all       # measure the links of idle nodes
  slurmdl place -N8 job.sh        # nodes and ranks the job would get, and why
  slurmdl sbatch -N8 job.sh       # submit; in the script: slurmdl srun instead of srun"""


def make_rows(outcomes: Outcomes) -> list[Row]:
    """Rows of results: step times, and bytes between zones, of all jobs and controls."""
    return [row for job in JOBS for row in _rows_of_job(job, outcomes)]


def _rows_of_job(job: Job, outcomes: Outcomes) -> Iterator[Row]:
    metrics: Sequence[tuple[str, str, float]] = [("seconds per step", "s", MARGIN)]
    if job.key in BYTES_JOBS:
        metrics = [*metrics, ("bytes across zones", "B", BYTES_MARGIN)]
    for metric, unit, slack in metrics:
        medians = {variant: _median(outcome, unit) for variant, outcome in _outcomes_of(job, outcomes).items()}
        for variant in (variant for variant in (*VARIANTS, CONTROL) if (job.key, variant) in outcomes):
            value, target, met = medians[variant], "", None
            if variant == PLACED and job.can_gain:
                target, met = "below leaf order and plain", slack * value < min(medians[LEAF], medians[PLAIN])
            elif variant == PLACED:
                target, met = f"at most {slack} x leaf order", value <= slack * medians[LEAF]
            elif variant == CONTROL and job is BAD_LINK:
                target = f"plain, before the link is bad: at most {HEALTHY_MARGIN} x slurmdl"
                met = value <= HEALTHY_MARGIN * medians[PLACED]
            elif variant == CONTROL:
                target, met = f"above {slack} x slurmdl", value > slack * medians[PLACED]
            yield make_row(f"{job.key}: {metric}, {variant}", _samples(outcomes[job.key, variant], unit), unit,
                           baseline=medians[LEAF], target=target, met=met)


def _outcomes_of(job: Job, outcomes: Outcomes) -> Mapping[str, Outcome]:
    """Way of submission -> results, with plain and leaf order of the job's baseline."""
    return {variant: outcome for key in (job.baseline, job.key) for (owner, variant), outcome in outcomes.items()
            if owner == key and (key == job.key or variant in (PLAIN, LEAF))}


def _samples(outcome: Outcome, unit: str) -> Sequence[float]:
    return outcome.seconds if unit == "s" else outcome.inter_zone_bytes


def _median(outcome: Outcome, unit: str) -> float:
    return make_row("", _samples(outcome, unit), unit).value
