"""Probe links by a Slurm step on the nodes of this job, or by a job of its own."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from slurmdl import records
from slurmdl.errors import InputError, UnavailableError
from slurmdl.links.probe import tcp_task
from slurmdl.links.probe.measurement import PairMeasurement, ProbeConfig
from slurmdl.links.probe.pairs import PAIRS_PER_ZONE_PAIR, ROUNDS_IN_ZONE, estimate_links, round_robin_schedule
from slurmdl.links.samples import LinkSample
from slurmdl.slurm import jobs, process
from slurmdl.slurm.run_module import module_argv
from slurmdl.topology.topology import Topology


@dataclass(frozen=True)
class ProbeStep:
    """The settings of a probe.

    Attributes:
        nodes, topology: at least two nodes, and their zones.
        config: of one pair; scaled so that all rounds fit in the budget.
        budget_s: time for all rounds.
        start_timeout_s: time for the step to start, in addition to the budget.
        interface: to probe over; "" for the interface by which the nodes reach each other's names.
        rounds_in_zone, pairs_per_zone_pair: see `round_robin_schedule`.
        checks_all_pairs: also check that every pair of nodes can exchange data.
    """

    nodes: tuple[str, ...]
    topology: Topology
    config: ProbeConfig = field(default_factory=ProbeConfig)
    budget_s: float = 30.0
    start_timeout_s: float = 30.0
    interface: str = ""
    srun_args: tuple[str, ...] = ()
    source: str = "probe"
    rounds_in_zone: int = ROUNDS_IN_ZONE
    pairs_per_zone_pair: int = PAIRS_PER_ZONE_PAIR
    checks_all_pairs: bool = False

    def leaf_by_node(self) -> dict[str, str]:
        """Leaf zone of each node that has one."""
        return {node: leaf for node in self.nodes if (leaf := self.topology.leaf_of(node))}

    def schedule(self) -> tcp_task.ProbeSchedule:
        """The schedule for the tasks of the step."""
        leaf = self.leaf_by_node()
        leaf_index = {name: i for i, name in enumerate(dict.fromkeys(leaf.values()))}
        rounds = list(round_robin_schedule([leaf_index.get(leaf.get(node, ""), -1) for node in self.nodes],
                                           rounds_in_zone=self.rounds_in_zone,
                                           pairs_per_zone_pair=self.pairs_per_zone_pair))
        # the tasks need time to start, and a pair time for its replies
        config = self.config.scaled_to(max(0.1, 0.6 * self.budget_s / max(1, len(rounds))))
        return tcp_task.ProbeSchedule(self.nodes, rounds, config, self.budget_s, self.interface,
                                      self.checks_all_pairs)

    def srun_argv(self, environ: Mapping[str, str]) -> list[str]:
        """srun's command line."""
        return [*jobs.node_step_argv(self.nodes, environ, "slurmdl-probe", ("--mpi=none", *self.srun_args)),
                *module_argv("slurmdl.links.probe.tcp_task")]


@dataclass(frozen=True)
class ProbeResult:
    """The samples of the measured links, and the pairs of nodes that cannot exchange data, if all were checked."""

    samples: Sequence[LinkSample]
    unreachable: Sequence[tuple[str, str]] = ()


def run_probe_step(probe: ProbeStep, environ: Mapping[str, str], on_warning: Callable[[str], None]) -> ProbeResult:
    """Run the step and return what was measured.

    If the step fails early, the pairs measured so far count; the error and the step's notes are warnings. Raises
    UnavailableError if srun is missing, or no pair was measured.
    """
    env = jobs.node_step_environ(environ)
    env[tcp_task.SECRET_VARIABLE] = secrets.token_hex()
    measurements: list[PairMeasurement] = []
    unreachable: list[tuple[str, str]] = []
    warnings = []
    schedule = probe.schedule()
    lines = process.stream_lines(probe.srun_argv(environ), env=env, stdin=json.dumps(records.to_json(schedule)),
                                 timeout=probe.start_timeout_s + schedule.check_limit_s + probe.budget_s)
    try:
        for line in lines:
            message = _parse_message(line)
            if message == tcp_task.END_MESSAGE:
                break
            if "note" in message:
                warnings.append(str(message["note"]))
            elif "unreachable" in message:
                unreachable.append(_parse_pair(message["unreachable"]))
            else:
                measurements.append(records.from_json(PairMeasurement, message, "pair"))
    except (UnavailableError, InputError) as error:
        warnings.append(str(error))
    finally:
        lines.close()
    if not measurements and not unreachable:
        raise UnavailableError(f"probe: no pair of nodes was measured ({warnings[0] if warnings else 'no answer'})")
    for warning in dict.fromkeys(warnings):
        on_warning(f"probe: {warning}")
    return ProbeResult(estimate_links(measurements, probe.leaf_by_node(), time.time(), probe.source), unreachable)


def _parse_message(line: str) -> dict[str, object]:
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise InputError(f"the step wrote {line.strip()[:80]!r}")
    return message


def _parse_pair(names: object) -> tuple[str, str]:
    match names:
        case [str(first), str(second)]:
            return first, second
    raise InputError(f"the step wrote {names!r} as a pair of nodes")
