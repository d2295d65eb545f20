"""Where a service listens, or is to be found, as it is typed."""

from __future__ import annotations

from slurmdl.errors import UsageError


def address(text: str, option: str) -> tuple[str, int]:
    """HOST:PORT, [IPV6]:PORT or :PORT as host ("" for all of this machine) and port; UsageError for anything else."""
    host, colon, port = text.rpartition(":")
    plain = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or (":" in plain and plain == host) or not port.isascii() or not port.isdecimal() \
            or int(port) > 65535:
        raise UsageError(f"{option} {text}: not an address; valid: HOST:PORT, [IPV6]:PORT or :PORT")
    return plain, int(port)
