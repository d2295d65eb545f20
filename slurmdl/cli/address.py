"""Where a service listens, or is to be found, and the networks of its peers, as they are typed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurmdl.errors import UsageError

if TYPE_CHECKING:
    from slurmdl.links.tcp_server import IPNetwork


def parse_address(text: str, option: str) -> tuple[str, int]:
    """HOST:PORT, [IPV6]:PORT or :PORT as host ("" for all of this machine) and port; UsageError for anything else."""
    host, colon, port = text.rpartition(":")
    plain = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or (":" in plain and plain == host) or not port.isascii() or not port.isdecimal() \
            or int(port) > 65535:
        raise UsageError(f"{option} {text}: not an address; valid: HOST:PORT, [IPV6]:PORT or :PORT")
    return plain, int(port)


def parse_networks(text: str, option: str) -> tuple[IPNetwork, ...]:
    """Addresses and networks of IPv4 and IPv6 with commas between; UsageError for anything else."""
    import ipaddress

    try:
        return tuple(ipaddress.ip_network(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"{option} {text}: {error}; valid: networks and addresses such as 10.0.0.0/8, 192.168.1.5 "
                         "or fd00::/8, with commas between") from error
