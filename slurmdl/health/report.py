"""The result of a preflight, as a table for people and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from slurmdl.health.preflight import Preflight
from slurmdl.health.verdicts import NodeReport
from slurmdl.text import pluralize
from slurmdl.units import format_bit_rate, format_bytes

_HEADER = ("node", "CPU", "memory", "bandwidth", "disk", "clock", "GPUs", "link", "loss")


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
