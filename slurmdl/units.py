"""Quantities: formatted with three digits and a unit ("320 MB", "25.6 s", "10 Gbit/s"), and parsed from options."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slurmdl.errors import UsageError

_RATE_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_SECONDS_PER_UNIT = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}


def format_bytes(count_bytes: float) -> str:
    """Bytes, in powers of 1000: "320 MB"."""
    return _format_scaled(count_bytes, ("B", "kB", "MB", "GB", "TB"))


def format_bit_rate(bytes_per_s: float) -> str:
    """A bandwidth in bytes/s as bits/s: "10 Gbit/s" for 1.25e9."""
    return _format_scaled(8 * bytes_per_s, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"))


def format_duration(seconds: float) -> str:
    """Seconds: "25.6 s", "65.2 ms", "20 us"."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if not seconds or float(f"{seconds * factor:.3g}") >= 1:
            return f"{_format_digits(seconds * factor)} {unit}"
    return f"{_format_digits(seconds * 1e6)} us"


def format_coarse_duration(seconds: float) -> str:
    """Whole seconds in the two largest units, for waiting times: "5 s", "2 min 5 s", "3 h 20 min", "2 d 4 h"."""
    whole = max(0, round(seconds))
    for large, small, large_s, small_s in (("d", "h", 86_400, 3_600), ("h", "min", 3_600, 60), ("min", "s", 60, 1)):
        if whole >= large_s:
            remainder = whole % large_s // small_s
            return f"{whole // large_s} {large} {remainder} {small}" if remainder else f"{whole // large_s} {large}"
    return f"{whole} s"


def parse_bytes(text: str, source: str) -> float:
    """Bytes of `400M`, `1.5Gi` or `1e8`; UsageError names `source`, e.g. the option."""
    match = re.fullmatch(r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)([kKMGT]i?)?B?", text)
    if not match or not 0 < (number := float(match[1])) < float("inf"):
        raise UsageError(f"{source}: invalid value {text!r}; expected bytes greater than 0, e.g. 1e8, 400M, 1.5Gi")
    prefix = match[2] or ""
    return float(number * (1024 if prefix.endswith("i") else 1000) ** " KMGT".index((prefix[:1] or " ").upper()))


def parse_bit_rate(text: str) -> float:
    """Bits/s of `50mbit`, `1g`, `200kbit` or a plain number; UsageError for anything else or below 8 kbit/s."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])?(?:bit)?", text.strip(), re.IGNORECASE)
    rate = float(match[1]) * _RATE_FACTORS[(match[2] or "").lower()] if match else 0.0
    if rate < 8e3:
        raise UsageError(f"invalid rate {text!r}; expected at least 8kbit, e.g. 50mbit, 1gbit or 200000")
    return rate


def parse_duration(text: str, min_s: float = 0.0, max_s: float = 10.0) -> float:
    """Seconds of `10ms`, `250us`, `1s`, `5m` (minutes) or a plain number; UsageError if not within the bounds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s|m)?", text.strip())
    seconds = float(match[1]) * _SECONDS_PER_UNIT[match[2] or "s"] if match else -1.0
    if not min_s <= seconds <= max_s:
        raise UsageError(f"invalid time {text!r}; expected {min_s:g}s to {max_s:g}s, e.g. 10ms, 250us or 2s")
    return seconds


def parse_fraction(text: str) -> float:
    """A fraction below 1 from `2%` or `0.02`; UsageError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(%)?", text.strip())
    fraction = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= fraction < 1:
        raise UsageError(f"invalid fraction {text!r}; expected at least 0 and less than 1, e.g. 0.02 or 2%")
    return fraction


def _format_scaled(value: float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if float(f"{value:.3g}") < 1000:
            return f"{_format_digits(value)} {unit}"
        value /= 1000
    return f"{_format_digits(value)} {units[-1]}"


def _format_digits(value: float) -> str:
    return f"{value:,.0f}" if float(f"{value:.3g}") >= 1000 else f"{value:.3g}"
