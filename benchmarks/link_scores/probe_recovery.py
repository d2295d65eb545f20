"""Accuracy of probes on shaped links: random settings of one node's link on a sandbox.

A setting is a rate, and a delay and a loss in each direction. An ordinary user runs `slurmdl links probe` PROBES
times; the median counts, as in a score. The expected round-trip time is twice the shaped delay plus the time of
the unshaped link. The negative control compares the measurements with another setting.

Idle-priority loops keep the CPUs awake during the probes: a halted virtual CPU needs up to a tenth of a millisecond
to wake up, which would count as link delay.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.results import Row, make_row
from slurmdl.errors import SandboxError
from slurmdl.links.samples import LinkSample, parse_sample_lines
from slurmdl.sandbox import lifecycle
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology
from slurmdl.slurm import hostlist

SETTINGS, NODES, NODE = 20, 4, "n3"
#: minimum and maximum bits/s and delay in seconds in each direction; shares of lost packets
RATES, DELAYS, LOSSES = (2e7, 8e8), (1e-4, 1e-2), (0.0, 0.01, 0.02, 0.03, 0.03, 0.05)
#: probes of a setting, and time budget of a probe in seconds
PROBES, BUDGET = 3, 18
#: payload share of a rate: frames of 9,000 bytes with 66 bytes of Ethernet, IP and TCP headers
PAYLOAD = 0.99


@dataclass(frozen=True)
class Setting:
    """Shaping of a link: bits/s, and in each direction delay in seconds and share of lost packets."""

    rate: float
    delay: float
    loss: float

    def __str__(self) -> str:
        return f"{self.rate / 1e6:.0f} Mbit/s, {self.delay * 1e3:.2f} ms, {self.loss:.0%}"


#: metric -> unit, expected value of a setting given the unshaped link, measured value, tolerance, and its description
METRICS: dict[str, tuple[str, Callable[[Setting, LinkSample], float], Callable[[LinkSample], float | None],
                         Callable[[float], float], str]] = {
    "throughput": ("Mbit/s", lambda s, _: s.rate * PAYLOAD / 1e6,
                   lambda m: None if m.throughput is None else m.throughput * 8e-6, lambda e: 0.1 * e, "within 10 %"),
    "round trip": ("ms", lambda s, base: 2e3 * s.delay + 1e3 * (base.rtt or 0.0),
                   lambda m: None if m.rtt is None else m.rtt * 1e3, lambda e: max(0.1 * e, 0.05),
                   "within 10 % or 50 us"),
    "loss": ("%", lambda s, _: 100 * s.loss, lambda m: None if m.loss is None else m.loss * 100, lambda e: 0.3,
             "within 0.3 points"),
}


def draw(seed: int, count: int = SETTINGS) -> list[Setting]:
    """Draw random settings with log-uniform rates and delays."""
    source = random.Random(seed)

    def between(low: float, high: float) -> float:
        return float(low * (high / low) ** source.random())

    return [Setting(between(*RATES), source.choice((0.0, between(*DELAYS), between(*DELAYS))),
                    source.choice(LOSSES)) for _ in range(count)]


@contextmanager
def awake() -> Iterator[None]:
    """Keep all CPUs awake (sched(7), SCHED_IDLE)."""
    loop = "import os\nos.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass"
    loops = [subprocess.Popen([sys.executable, "-IS", "-c", loop]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in loops:
            process.kill()
            process.wait()


def rows(seed: int = 0, count: int = SETTINGS) -> Iterator[Row]:
    """Yield the three metrics of each setting, the shares of recovered settings, and the negative control."""
    with awake():
        yield from _rows(seed, count)


def _rows(seed: int, count: int) -> Iterator[Row]:
    settings = draw(seed, count)
    sandbox = lifecycle.sandbox_up(SandboxSpec(f"links-{os.getpid()}", round_robin_topology(NODES, 1)))
    try:
        unshaped = [probe(sandbox) for _ in range(PROBES)]
        base = sorted(unshaped, key=lambda sample: sample.rtt or 0.0)[len(unshaped) // 2]
        yield make_row("round trip of the unshaped link", [1e3 * (sample.rtt or 0.0) for sample in unshaped], "ms")
        measured = []
        for setting in settings:
            sandbox.shape_link(NODE, rate=setting.rate, delay=setting.delay, loss=setting.loss)
            measured.append([probe(sandbox) for _ in range(PROBES)])
            yield from _setting_rows(setting, base, measured[-1])
    finally:
        lifecycle.sandbox_down(sandbox.spec.name)
    yield from summary(settings, base, measured)


def probe(sandbox: lifecycle.Sandbox) -> LinkSample:
    """Probe all nodes and return the sample of NODE; SandboxError if there is none."""
    # explicit names, because `--all` omits nodes that are still completing the previous probe
    nodes = hostlist.fold_hostlist(sandbox.spec.topology.nodes)
    done = subprocess.run(
        sandbox.command(["slurmdl", "links", "probe", f"--nodes={nodes}", f"--budget={BUDGET}s", "--output", "-"],
                        directory=str(sandbox.shared)), capture_output=True, text=True, timeout=120, check=False)
    samples = [sample for sample in parse_sample_lines(done.stdout.splitlines())
               if isinstance(sample, LinkSample) and sample.name == NODE]
    if not samples:
        raise SandboxError(f"links probe: {' '.join(done.stderr.split())[-300:] or 'no sample of ' + NODE}")
    return samples[0]


def _setting_rows(setting: Setting, base: LinkSample, measured: Sequence[LinkSample]) -> Iterator[Row]:
    for name, (unit, expect, get, tolerance, target) in METRICS.items():
        values = [float("nan") if value is None else value for value in map(get, measured)]
        expected, value = expect(setting, base), statistics.median(values)
        yield make_row(f"{setting}: {name}", values, unit, baseline=expected, target=target,
                       met=not any(map(math.isnan, values)) and abs(value - expected) <= tolerance(expected))


def summary(settings: Sequence[Setting], base: LinkSample,
            measured: Sequence[Sequence[LinkSample]]) -> Iterator[Row]:
    """Yield the share of recovered settings for each metric, and the same with other settings (control)."""
    for name in METRICS:
        def share(of: Sequence[Setting], name: str = name) -> float:
            hits = [row.met for setting, samples in zip(of, measured, strict=True)
                    for row in _setting_rows(setting, base, samples) if row.metric.endswith(f": {name}")]
            return sum(map(bool, hits)) / len(hits)

        recovered, control = share(settings), share([*settings[1:], settings[0]])
        yield make_row(f"settings whose {name} was recovered", [recovered], "", target="all", met=recovered == 1)
        yield make_row(f"settings whose {name} matches that of the next setting (control)", [control], "",
                       baseline=recovered, target="at most half of the baseline", met=control <= recovered / 2)
