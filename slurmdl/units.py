"""Quantities for people, in one format everywhere: three digits and a unit, as "320 MB", "25.6 s", "10 Gbit/s"."""

from __future__ import annotations

from collections.abc import Sequence


def format_bytes(count_bytes: float) -> str:
    """Bytes, in powers of 1000: "320 MB"."""
    return _format_scaled(count_bytes, ("B", "kB", "MB", "GB", "TB"))


def format_bit_rate(bytes_per_s: float) -> str:
    """What a link carries, as makers of networks say it: "10 Gbit/s" for 1.25e9 bytes/s."""
    return _format_scaled(8 * bytes_per_s, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"))


def format_duration(seconds: float) -> str:
    """Seconds: "25.6 s", "65.2 ms", "20 us"."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if not seconds or float(f"{seconds * factor:.3g}") >= 1 or unit == "us":
            return f"{_format_digits(seconds * factor)} {unit}"
    raise AssertionError


def format_coarse_duration(seconds: float) -> str:
    """Whole seconds, in the two largest units, for waiting times: "5 s", "2 min 5 s", "3 h 20 min", "2 d 4 h"."""
    whole = max(0, round(seconds))
    for large, small, size_s, part_s in (("d", "h", 86_400, 3_600), ("h", "min", 3_600, 60), ("min", "s", 60, 1)):
        if whole >= size_s:
            rest = whole % size_s // part_s
            return f"{whole // size_s} {large} {rest} {small}" if rest else f"{whole // size_s} {large}"
    return f"{whole} s"


def _format_scaled(value: float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if float(f"{value:.3g}") < 1000:
            return f"{_format_digits(value)} {unit}"
        value /= 1000
    return f"{_format_digits(value)} {units[-1]}"


def _format_digits(value: float) -> str:
    return f"{value:,.0f}" if float(f"{value:.3g}") >= 1000 else f"{value:.3g}"
