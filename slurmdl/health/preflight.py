"""Check the nodes of a job before it starts: run all checks on all nodes, judge them, and check the bad ones again.

A second run of the failed checks, on the suspected nodes and a few good ones, must find the same fault: a short load
spike must not condemn a node. The result is shown as a table, or as JSON.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from types import MappingProxyType
from typing import Any

from slurmdl.errors import SlurmdlError, UnavailableError
from slurmdl.health.faults import SCREENING, Fault, NodeReport, find_faults
from slurmdl.health.node_checks import CHECKS
from slurmdl.links.probe.probe_step import ProbeStep, run_probe_step
from slurmdl.links.samples import LinkSample, merge_into_sample_file
from slurmdl.links.score_sources import user_probe_file
from slurmdl.slurm import jobs, process
from slurmdl.slurm.slurm_conf import cluster_name
from slurmdl.text import pluralize
from slurmdl.topology.topology import Topology
from slurmdl.units import format_bit_rate, format_bytes

DEFAULT_BUDGET_S = 30.0
#: share of the budget for the checks of the nodes; the links have the rest
_NODE_SHARE = 0.5
#: good nodes of each zone that are measured again together with the suspected nodes of the zone
_REFERENCE_NODES = 2
#: nodes that are measured again because a suspected node cannot exchange data with them
_MAX_PEERS = 8
_HEADER = ("node", "CPU", "memory", "bandwidth", "disk", "clock", "GPUs", "link", "loss")


@dataclass(frozen=True)
class Preflight:
    """The result.

    Attributes:
        reports: node -> its results of the first run.
        faults: confirmed faults, in the order of the nodes.
        link_samples: of the first run.
        unconfirmed: faults that a second run did not find.
        seconds: duration of everything.
    """

    reports: Mapping[str, NodeReport]
    faults: Sequence[Fault]
    unconfirmed: Sequence[Fault] = ()
    link_samples: Sequence[LinkSample] = ()
    seconds: float = 0.0

    @property
    def reasons(self) -> dict[str, str]:
        """Bad node -> what is wrong with it, one line."""
        return {node: "; ".join(dict.fromkeys(fault.text for fault in self.faults if fault.node == node))
                for node in dict.fromkeys(fault.node for fault in self.faults)}


def run_preflight(nodes: Sequence[str], topology: Topology, environ: Mapping[str, str],
                  on_warning: Callable[[str], None], budget_s: float = DEFAULT_BUDGET_S,
                  with_links: bool = True, site_reasons: Mapping[str, str] = MappingProxyType({})) -> Preflight:
    """Check nodes within about `budget_s` seconds. Raises UnavailableError if no node answers.

    Args:
        with_links: also probe the links, which needs two nodes.
        site_reasons: node -> why it is bad by the site's own checks (site_checks), whatever these checks find.
    """
    start, with_links = time.monotonic(), with_links and len(nodes) > 1
    checks = tuple(CHECKS)
    reports = run_node_checks(nodes, checks, environ, budget_s * (_NODE_SHARE if with_links else 0.8))
    if not any(report.values for report in reports.values()):
        errors = [error for report in reports.values() for error in report.errors.values()]
        raise UnavailableError(f"preflight: no node answered ({next(iter(errors), 'no output')})")
    samples: Sequence[LinkSample] = ()
    if with_links:
        left_s = max(2.0, budget_s - (time.monotonic() - start))
        samples = _probe_links(reports, topology, environ, 0.6 * left_s, on_warning)
    suspected = find_faults(reports, checks, bool(samples), SCREENING)
    confirmed = _confirm(suspected, reports, topology, environ, max(3.0, budget_s - (time.monotonic() - start)),
                         on_warning)
    confirmed += [Fault(node, "site", site_reasons[node]) for node in nodes if node in site_reasons]
    confirmed_keys = {(fault.node, fault.check) for fault in confirmed}
    return Preflight(reports, confirmed, [fault for fault in suspected
                                          if (fault.node, fault.check) not in confirmed_keys],
                     samples, time.monotonic() - start)


def keep_link_samples(result: Preflight, environ: Mapping[str, str], on_warning: Callable[[str], None]) -> None:
    """Add the measured links to the user's own probes, whose scores order the ranks of this job and of later ones."""
    if not result.link_samples:
        return
    try:
        path = user_probe_file(environ, cluster_name(environ))
        merge_into_sample_file(path, result.link_samples)
    except SlurmdlError as error:
        on_warning(f"preflight: the links are not kept: {error}")
    except OSError as error:
        on_warning(f"preflight: {path}: the links are not kept ({error.strerror})")


def run_node_checks(nodes: Sequence[str], checks: Sequence[str], environ: Mapping[str, str],
                    limit_s: float) -> dict[str, NodeReport]:
    """Run checks on nodes by a step with one task per node; a node that does not answer in time has no values."""
    reports = {node: NodeReport() for node in nodes}
    argv = [*jobs.node_step_argv(nodes, environ, "slurmdl-preflight", ("--mpi=none", "--cpu-bind=none")),
            *process.module_argv("slurmdl.health.node_checks", *checks)]
    step_error, expected = "", len(nodes) * len(checks)
    lines = process.stream_lines(argv, env=jobs.node_step_environ(environ), stdin="", timeout=limit_s)
    try:
        for line in lines:
            expected -= _add_result(reports, line, time.time())
            if not expected:
                break
    except UnavailableError as error:
        step_error = str(error)
    finally:
        lines.close()
    if any(report.values for report in reports.values()):  # the step has run, and some nodes are late
        step_error = ""
    for report in reports.values():
        answers = bool(report.values or report.errors)
        for check in checks:
            if check not in report.values:
                late = f"its {check} check has no result within {limit_s:.0f} s" if answers else "it does not answer"
                report.errors.setdefault(check, step_error or late)
    return reports


def _add_result(reports: Mapping[str, NodeReport], line: str, arrival: float) -> bool:
    """Add one line of a task to the reports; return whether it is a result."""
    try:
        result = json.loads(line)
        report, check = reports[result["node"]], result["check"]
        if "error" in result:
            report.errors[check] = str(result["error"])
        else:
            report.values[check] = dict(result["values"])
            if check == "clock":
                report.clock_offset = float(result["values"]["time"]) - arrival
    except (ValueError, KeyError, TypeError):
        return False  # another program's line, e.g. of a login script
    return True


def _probe_links(reports: Mapping[str, NodeReport], topology: Topology, environ: Mapping[str, str], budget_s: float,
                 on_warning: Callable[[str], None]) -> Sequence[LinkSample]:
    """Add the links of the nodes that answered; a node that no other node can reach gets none.

    Returns the samples; if there are none, a warning says why.
    """
    nodes = tuple(node for node, report in reports.items() if report.values)
    if len(nodes) < 2:
        return []
    probe = ProbeStep(nodes, topology, budget_s=budget_s, start_timeout_s=5.0, rounds_in_zone=3,
                      pairs_per_zone_pair=1, checks_all_pairs=True)
    try:
        result = run_probe_step(probe, environ, on_warning)
    except SlurmdlError as error:
        on_warning(f"preflight: the links are not checked: {error}")
        return []
    leaf, sizes = probe.leaf_by_node(), Counter(probe.leaf_by_node().values())
    for sample in result.samples:
        if sample.kind == "node":
            report = reports[sample.name]
            report.link, report.is_alone_in_zone = sample, sizes[leaf.get(sample.name, "")] == 1
    for first, second in result.unreachable:
        reports[first].unreachable |= {second}
        reports[second].unreachable |= {first}
    return result.samples


def _confirm(suspected: Sequence[Fault], reports: Mapping[str, NodeReport], topology: Topology,
             environ: Mapping[str, str], limit_s: float, on_warning: Callable[[str], None]) -> list[Fault]:
    """Repeat the failed checks on the suspected nodes and a few good ones; return the faults found again.

    The checks of the nodes are compared within the second run, as the load of a cluster changes. The links of the
    suspected nodes are compared with the links of all others: of few links a missing pair makes all seem slow.
    """
    bad = tuple(dict.fromkeys(fault.node for fault in suspected))
    if not bad:
        return []
    peers = sorted({peer for node in bad for peer in reports[node].unreachable})[:_MAX_PEERS]
    nodes = tuple(dict.fromkeys([*bad, *peers, *_reference_nodes(bad, reports, topology)]))
    checks = tuple(check for check in CHECKS if any(fault.check == check for fault in suspected))
    with_links = any(fault.check == "link" for fault in suspected)
    again = run_node_checks(nodes, checks or ("clock",), environ, limit_s * (0.5 if with_links else 1.0))
    faults = list(find_faults(again, checks, with_links=False))
    if with_links:
        _probe_links(again, topology, environ, 0.4 * limit_s, on_warning)
        faults += confirmed_link_faults(bad, reports, again)
    found = {(fault.node, fault.check): fault for fault in faults}
    keys = dict.fromkeys((fault.node, fault.check) for fault in suspected)
    return [found[key] for key in keys if key in found]


def confirmed_link_faults(suspected: Collection[str], reports: Mapping[str, NodeReport],
                          again: Mapping[str, NodeReport]) -> list[Fault]:
    """Faults of the suspected nodes' links, measured in a second run; the first one counts where that is missing.

    It is missing if a node does not reach the leader of the second run, e.g. the other node of a broken pair: so the
    second run decides on a pair only if it measured both nodes.
    """
    measured = {node for node, report in again.items() if report.link}
    merged = {node: replace(report, unreachable=report.unreachable - measured if node in measured else
                            report.unreachable) for node, report in reports.items()}
    for node, report in again.items():
        merged[node].unreachable |= report.unreachable
        if node in suspected and report.link and (report.link.throughput is not None or not reports[node].link):
            merged[node].link = report.link
    return [fault for fault in find_faults(merged, (), with_links=True) if fault.node in suspected]


def _reference_nodes(bad: Sequence[str], reports: Mapping[str, NodeReport], topology: Topology) -> list[str]:
    """Good nodes, those of each bad node's leaf zone first: a link is measured best inside the zone."""
    good = [node for node, report in reports.items() if node not in bad and report.values]
    rates = {node: reports[node].values.get("cpu", {}).get("rate", 0.0) for node in good}
    center = median(rates.values()) if rates else 0.0
    good.sort(key=lambda node: abs(rates[node] - center))  # the nearest to the median is the best measure
    chosen: dict[str, None] = {}
    for leaf in dict.fromkeys(map(topology.leaf_of, bad)):
        chosen |= dict.fromkeys([node for node in good if topology.leaf_of(node) == leaf][:_REFERENCE_NODES])
    missing = max(0, _REFERENCE_NODES - len(chosen))
    return [*chosen, *[node for node in good if node not in chosen][:missing]]


def format_table(result: Preflight) -> str:
    """One row per node, the bad nodes with their faults below, and the decision.

    CPU is the share of the median node's work; memory and disk are free bytes, clock is the offset from the median.
    """
    reports = result.reports
    rates = [value for report in reports.values() if (value := _work_rate(report)) is not None]
    offsets = [report.clock_offset for report in reports.values() if report.clock_offset is not None]
    typical_rate, typical_offset = (median(values) if values else 0.0 for values in (rates, offsets))
    rows = [_HEADER, *(_row(node, report, typical_rate, typical_offset) for node, report in reports.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for kind, faults in (("bad", result.faults), ("not confirmed", result.unconfirmed)):
        lines += dict.fromkeys(f"{kind}: {fault.node}: {fault.text}" for fault in faults)
    bad = len(result.reasons)
    lines.append(f"{bad} of {pluralize(len(reports), 'node')} bad, {result.seconds:.1f} s")
    return "\n".join(lines)


def _work_rate(report: NodeReport) -> float | None:
    cpu = report.values.get("cpu")
    return cpu["rate"] / cpu["cpus"] if cpu else None


def _row(node: str, report: NodeReport, typical_rate: float, typical_offset: float) -> tuple[str, ...]:
    rate, gpu = _work_rate(report), report.values.get("gpu")
    offset = None if report.clock_offset is None else report.clock_offset - typical_offset
    return (node,
            "-" if rate is None or not typical_rate else f"{rate / typical_rate:.0%}",
            _cell(report, "memory", "available", format_bytes),
            _cell(report, "memory", "bandwidth", lambda value: f"{format_bytes(value)}/s"),
            _cell(report, "disk", "free", format_bytes),
            "-" if offset is None else f"{offset:+.1f} s",
            f"{gpu['gpus']} of {gpu['allocated']}" if gpu else "-",
            "-" if report.link is None or report.link.throughput is None else
            format_bit_rate(report.link.throughput),
            "-" if report.link is None or report.link.loss is None else f"{report.link.loss:.2%}")


def _cell(report: NodeReport, check: str, key: str, format_value: Callable[[float], str]) -> str:
    value = report.values.get(check, {}).get(key)
    return "-" if value is None else format_value(value)


def preflight_to_json(result: Preflight, node: str) -> Mapping[str, Any]:
    """The results of one node, in the units of the checks: bytes, seconds, bytes/s."""
    report = result.reports[node]
    faults: Sequence[str] = list(dict.fromkeys(fault.text for fault in result.faults if fault.node == node))
    link = report.link
    return {"node": node, "bad": bool(faults), "faults": faults, "checks": report.values, "errors": report.errors,
            "clock_offset": report.clock_offset,
            "link": None if link is None else {"throughput": link.throughput, "rtt": link.rtt, "loss": link.loss}}
