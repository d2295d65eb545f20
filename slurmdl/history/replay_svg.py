"""SVG of a replay: the distribution of each metric as a step curve per policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from slurmdl.history.replay import PolicyOutcome
from slurmdl.history.replay_report import DISTRIBUTIONS, format_three_digits
from slurmdl.history.trace import FloatArray
from slurmdl.topology.svg import svg_document, svg_text

MARGIN, HEADING = 24, 64  # pixels
PANEL_WIDTH, PANEL_HEIGHT, GAP = 360, 200, 70
COLUMNS = 3
MAX_POINTS = 80  # quantiles of a curve
COLORS = {"slurm": "#475569", "slurmdl": "#1d4ed8", "mixed": "#15803d", "random": "#c2410c"}


def draw_replay(title: str, outcomes: Sequence[PolicyOutcome]) -> str:
    """SVG document with a panel per metric: share of the jobs (vertical) with at most this value (horizontal)."""
    elements: list[str] = []
    for i, (metric, (attribute, scale)) in enumerate(DISTRIBUTIONS.items()):
        x = MARGIN + 30 + i % COLUMNS * (PANEL_WIDTH + GAP)
        y = HEADING + 30 + i // COLUMNS * (PANEL_HEIGHT + GAP)
        elements += _draw_panel(x, y, metric, {outcome.policy: getattr(outcome, attribute) * scale
                                               for outcome in outcomes})
    rows = -(-len(DISTRIBUTIONS) // COLUMNS)
    bottom = HEADING + 30 + rows * (PANEL_HEIGHT + GAP)
    left = float(MARGIN)
    for outcome in outcomes:
        color = COLORS[outcome.policy]
        elements.append(f'<rect x="{left:g}" y="{bottom - 11:g}" width="14" height="14" fill="{color}"/>')
        elements.append(svg_text(left + 20, bottom, outcome.policy))
        left += 130
    return svg_document(title, MARGIN + COLUMNS * (PANEL_WIDTH + GAP), bottom + 24, elements)


def _draw_panel(x: float, y: float, metric: str, values: dict[str, FloatArray]) -> Iterator[str]:
    yield svg_text(x, y - 10, metric, weight="bold")
    yield (f'<rect x="{x:g}" y="{y:g}" width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" fill="none" '
           f'stroke="#64748b"/>')
    for share in (0.0, 0.5, 1.0):
        yield svg_text(x - 28, y + PANEL_HEIGHT * (1 - share) + 4, f"{share:g}", size=11)
    everything = np.concatenate(list(values.values())) if values else np.zeros(0)
    if not len(everything):
        return
    # values above the largest of the 99th percentiles are cut off
    high = max(float(np.percentile(part, 99)) for part in values.values() if len(part))
    low = float(everything.min())
    is_log = high > 50 * max(low, 1.0)
    floor = max(low, 0.1) if is_log else low
    begin, end = (np.log(floor), np.log(high)) if is_log else (low, high)
    span = float(end - begin) or 1.0
    for value in np.linspace(begin, begin + span, 4).tolist():
        label = float(np.exp(value)) if is_log else value
        across = (value - begin) / span * (PANEL_WIDTH - 20)
        yield svg_text(x + across, y + PANEL_HEIGHT + 16, format_three_digits(label), size=11)
    for policy, part in values.items():
        if not len(part):
            continue
        shares = np.linspace(0, 1, MAX_POINTS)
        quantiles = np.quantile(part, shares)
        position = np.log(np.maximum(quantiles, floor)) if is_log else quantiles
        offsets = np.clip((position - begin) / span, 0, 1) * PANEL_WIDTH
        points = " ".join(f"{x + dx:.1f},{y + PANEL_HEIGHT * (1 - share):.1f}"
                          for dx, share in zip(offsets.tolist(), shares.tolist(), strict=True))
        yield (f'<polyline points="{points}" fill="none" stroke="{COLORS[policy]}" stroke-width="2" '
               f'stroke-opacity="0.8"/>')
