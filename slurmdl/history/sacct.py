"""Query of Slurm's accounting, and periods of time."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping

from slurmdl.errors import UsageError
from slurmdl.history.accounting import SACCT_COLUMNS, JobTable, read_job_records
from slurmdl.history.timestamps import TimestampParser
from slurmdl.slurm import process

QUERY_TIMEOUT_S = 600.0
#: period without --since
DEFAULT_PERIOD_S = 7 * 86_400
#: variables of Slurm that a query keeps: where the cluster is, and how to log in
_KEPT_VARIABLES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_SACK_KEY", "SLURM_SACK_JWKS")
_UNITS_S = {"minute": 60, "hour": 3_600, "day": 86_400, "week": 604_800}
_RELATIVE = re.compile(r"now(?:-([0-9]{1,6})(minute|hour|day|week)s?)?")
_ISO = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}(T[0-9]{2}:[0-9]{2}(:[0-9]{2})?)?")


def query_accounting(since_s: int, until_s: int) -> JobTable:
    """Records of all jobs that ran or waited in a period, from `sacct`.

    Raises UnavailableError if sacct is missing, hangs or fails, and InputError as `read_job_records`.
    """
    # sacct reads local times; these are times of its TZ, which is this process's
    period = [f"-{option}{time.strftime('%FT%T', time.localtime(seconds))}"
              for option, seconds in (("S", since_s), ("E", until_s))]
    argv = ["sacct", "-a", "-X", "-P", "-D", *period, "-o", ",".join(SACCT_COLUMNS)]
    lines = process.stream_lines(argv, stdin="", timeout=QUERY_TIMEOUT_S, env=_query_environment(os.environ))
    return read_job_records(lines, "sacct")


def parse_moment(text: str, option: str, now_s: float) -> int:
    """Epoch seconds of `2024-05-01`, `2024-05-01T12:30`, `now-7days` or epoch seconds; UsageError otherwise."""
    relative = _RELATIVE.fullmatch(text)
    if relative:
        return int(now_s) - int(relative[1] or 0) * _UNITS_S.get(relative[2], 0)
    padded = text
    if match := _ISO.fullmatch(text):
        padded += "" if match[2] else ":00" if match[1] else "T00:00:00"
    try:
        seconds = TimestampParser().parse(padded)
    except ValueError:
        seconds = -1
    if seconds < 0:
        raise UsageError(f"{option} {text}: expected a time such as 2024-05-01, 2024-05-01T12:30 or now-7days")
    return seconds


def _query_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment in which sacct prints epoch seconds and English words, whatever the user has set."""
    kept = {name: value for name, value in environ.items()
            if not name.startswith(("SLURM_", "SACCT_", "LC_")) or name in _KEPT_VARIABLES}
    return {**kept, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
