"""How zones with their counts are written."""

from __future__ import annotations

from collections.abc import Mapping

from slurmdl.topology.hostlist import fold

#: most zones that are named one by one
MAX_ZONES = 4


def label(zones: Mapping[str, int]) -> str:
    """`leafA x3 + leafB x1`, most first; many zones are folded by their counts: `z[0-7] x9 + z[8-30] x8`."""
    counts = sorted(zones.items(), key=lambda entry: -entry[1])
    if len(counts) > MAX_ZONES:
        alike: dict[int, list[str]] = {}
        for zone, count in counts:
            alike.setdefault(count, []).append(zone)
        counts = [(fold(names), count) for count, names in alike.items()]
    shown = " + ".join(f"{zone} x{count}" for zone, count in counts[:MAX_ZONES])
    return shown if len(counts) <= MAX_ZONES else f"{shown} + ..."
