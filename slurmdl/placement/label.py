"""How zones with their counts are written."""

from __future__ import annotations

from collections.abc import Mapping

from slurmdl.topology.hostlist import fold_hostlist

#: most zones that are named one by one
MAX_NAMED_ZONES = 4
#: longest text that names zones
MAX_LABEL_LENGTH = 80


def format_zone_counts(counts_by_zone: Mapping[str, int]) -> str:
    """`leafA x3 + leafB x1`, most first.

    Many zones are folded by their counts (`z[0-7] x9 + z[8-30] x8`); where that is still long they are counted
    (`54 zones x4-13`).
    """
    counts = sorted(counts_by_zone.items(), key=lambda entry: -entry[1])
    most, least = counts[0][1], counts[-1][1]
    many = f"{len(counts_by_zone)} zones x{least}-{most}" if least < most else f"{len(counts_by_zone)} zones x{most}"
    if len(counts) > MAX_NAMED_ZONES:
        alike: dict[int, list[str]] = {}
        for zone, count in counts:
            alike.setdefault(count, []).append(zone)
        if len(alike) > MAX_NAMED_ZONES:
            return many
        counts = [(fold_hostlist(names), count) for count, names in alike.items()]
    text = " + ".join(f"{zone} x{count}" for zone, count in counts)
    return text if len(text) <= MAX_LABEL_LENGTH or len(counts_by_zone) <= MAX_NAMED_ZONES else many
