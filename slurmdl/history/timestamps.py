"""Times as sacct prints them: ISO 8601 with T or a blank, with or without zone, or epoch seconds."""

from __future__ import annotations

import re
from datetime import datetime

#: texts of a time that is not known
_UNKNOWN = frozenset({"", "Unknown", "None", "N/A", "NONE", "unknown"})
_ISO = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d) ?(?:(Z)|([+-]\d\d)(?::?(\d\d))?)?")
_EPOCH = re.compile(r"[0-9]{1,11}")
#: seconds of the last digit of the minute and the seconds, e.g. `7:59`
_SECONDS = {f"{minute}:{second:02}": 60 * minute + second for minute in range(10) for second in range(60)}
#: time limits that are no duration
_NO_LIMIT = frozenset({"", "UNLIMITED", "Partition_Limit", "INVALID", "None", "Unknown"})
_LIMIT = re.compile(r"(?:(\d{1,6})-)?(\d{1,6}):(\d\d):(\d\d)")


class TimestampParser:
    """Parser with a cache: one entry for each ten minutes.

    A local time that occurs twice, when clocks go back, is read as the first one; `second_occurrence` returns the
    second. A local time that never occurs is read as if clocks had not gone forward.

    Attributes:
        has_local_times: whether a time without zone was read.
    """

    def __init__(self) -> None:
        self.has_local_times = False
        self._base: dict[str, int] = {}
        self._shift: dict[str, int] = {}

    def parse(self, text: str) -> int:
        """Epoch seconds, -1 for an unknown time. Raises ValueError for any other format."""
        base = self._base.get(text[:15] + text[19:])
        if base is not None:
            seconds = _SECONDS.get(text[15:19])
            if seconds is not None:
                return base + seconds
        return self._parse_new(text)

    def second_occurrence(self, text: str, seconds: int) -> int:
        """The second time that the clock showed `text`, or `seconds`, its only one."""
        return seconds + self._shift.get(text[:15] + text[19:], 0)

    def _parse_new(self, text: str) -> int:
        if text in _UNKNOWN:
            return -1
        if _EPOCH.fullmatch(text):
            return int(text) or -1
        match = _ISO.fullmatch(text)
        if not match:
            raise ValueError(f"{text!r} is no time")
        day, time, is_utc, hours, minutes = match.groups()
        zone = "+00:00" if is_utc else f"{hours}:{minutes or '00'}" if hours else ""
        moment = datetime.fromisoformat(f"{day}T{time[:4]}0:00{zone}")
        try:
            base = int(moment.timestamp())
        except (OverflowError, OSError) as error:
            raise ValueError(f"{text!r} is out of range") from error
        if not zone:
            self.has_local_times = True
            shift = int(moment.replace(fold=1).timestamp()) - base
            if shift > 0:
                self._shift[text[:15]] = shift
        seconds = _SECONDS.get(text[15:19])
        if seconds is None or base <= 0:
            raise ValueError(f"{text!r} is no time")
        self._base[text[:15] + text[19:]] = base
        return base + seconds


def parse_time_limit(text: str) -> int:
    """Seconds of sacct's Timelimit, `[days-]hours:minutes:seconds`; -1 for none, or one that is not known.

    Raises ValueError for any other format.
    """
    if text in _NO_LIMIT:
        return -1
    match = _LIMIT.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is no time limit")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
