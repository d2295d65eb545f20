"""Report of a replay: distributions per policy as text, JSON and SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from slurmdl.history.replay import SLOWDOWN_BOUND_S, PolicyOutcome
from slurmdl.placement.arrays import FloatArray
from slurmdl.text import pluralize
from slurmdl.topology.drawing import svg_document, svg_text

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
