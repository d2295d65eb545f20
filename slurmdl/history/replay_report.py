"""Report of a replay: distributions per policy as text and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slurmdl.history.replay import SLOWDOWN_BOUND_S, PolicyOutcome
from slurmdl.history.trace import FloatArray
from slurmdl.text import pluralize

#: metric -> attribute of PolicyOutcome, and the factor to the shown unit
DISTRIBUTIONS: Mapping[str, tuple[str, float]] = {
    "waiting time, min": ("wait_s", 1 / 60),
    f"bounded slowdown ({SLOWDOWN_BOUND_S:g} s)": ("slowdown", 1.0),
    "leaf zones / fewest (jobs of 2+ nodes)": ("spread", 1.0),
    "step-time factor of communication (bound jobs)": ("factor", 1.0),
    "resulting / recorded run time (bound jobs)": ("run_ratio", 1.0)}
#: metric -> attribute of PolicyOutcome
SHARES = {"utilisation": "utilization", "useful utilisation": "useful",
          "largest job inside one leaf, of all nodes": "leaf_nodes",
          "largest job that could start, of all nodes": "startable_nodes"}


def summarize_values(values: FloatArray) -> dict[str, float]:
    """Median, mean and 95th percentile; 0 without values."""
    if not len(values):
        return {"median": 0.0, "mean": 0.0, "p95": 0.0}
    return {"median": float(np.median(values)), "mean": float(values.mean()),
            "p95": float(np.percentile(values, 95))}


def format_replay(outcomes: Sequence[PolicyOutcome]) -> list[str]:
    """Lines of a table with a column per policy."""
    width = max(map(len, [*DISTRIBUTIONS, *SHARES])) + 1
    columns = [22] * len(outcomes)
    lines = ["".join([f"{'':{width}}", *(f"{outcome.policy:>{column}}"
                                         for outcome, column in zip(outcomes, columns, strict=True))]),
             "".join([f"{'':{width}}", *(f"{'median / mean / p95':>{column}}" for column in columns)])]
    for metric, (attribute, scale) in DISTRIBUTIONS.items():
        cells = []
        for outcome, column in zip(outcomes, columns, strict=True):
            values = summarize_values(getattr(outcome, attribute) * scale)
            cells.append(f"{' / '.join(format_three_digits(value) for value in values.values()):>{column}}")
        lines.append(f"{metric:{width}}" + "".join(cells))
    for metric, attribute in SHARES.items():
        lines.append(f"{metric:{width}}" + "".join(f"{getattr(outcome, attribute):>{column}.1%}" for outcome, column
                                                   in zip(outcomes, columns, strict=True)))
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
             **{attribute: summarize_values(getattr(outcome, attribute)) for attribute, _ in DISTRIBUTIONS.values()},
             **{attribute: getattr(outcome, attribute) for attribute in SHARES.values()},
             **({"mean_wait_with_slurmdl_s": float(outcome.wait_s[outcome.placed].mean()),
                 "mean_wait_without_s": float(outcome.wait_s[~outcome.placed].mean())}
                if outcome.policy == "mixed" and 0 < outcome.placed.sum() < len(outcome.placed) else {})}
            for outcome in outcomes]
