"""Parsers of addresses and networks in options; a module without argparse, for `slurmdl links counters`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurmdl.errors import UsageError

if TYPE_CHECKING:
    from slurmdl.links.tcp_server import IPNetwork


def parse_address(text: str, option: str) -> tuple[str, int]:
    """Host ("" for all interfaces) and port of HOST:PORT, [IPV6]:PORT or :PORT; UsageError for anything else."""
    host, colon, port = text.rpartition(":")
    plain = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or (":" in plain and plain == host) or not port.isascii() or not port.isdecimal() \
            or int(port) > 65535:
        raise UsageError(f"{option} {text}: invalid address; expected HOST:PORT, [IPV6]:PORT or :PORT")
    return plain, int(port)


def parse_networks(text: str, option: str) -> tuple[IPNetwork, ...]:
    """IPv4 and IPv6 addresses and networks separated by commas; UsageError for anything else."""
    import ipaddress

    try:
        return tuple(ipaddress.ip_network(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"{option} {text}: {error}; expected networks and addresses separated by commas, e.g. "
                         "10.0.0.0/8,192.168.1.5,fd00::/8") from error
