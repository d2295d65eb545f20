"""Durations as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """A duration in its two largest units: `5 s`, `2 min 5 s`, `3 h 20 min`, `2 d 4 h`; less than 1 s is `0 s`."""
    whole = max(0, round(seconds))
    for large, small, size_s, part_s in (("d", "h", 86_400, 3_600), ("h", "min", 3_600, 60), ("min", "s", 60, 1)):
        if whole >= size_s:
            rest = whole % size_s // part_s
            return f"{whole // size_s} {large} {rest} {small}" if rest else f"{whole // size_s} {large}"
    return f"{whole} s"
