"""SimGrid program of a simulation, run by the Python that SimGrid was built for.

    /usr/bin/python3 -I simgrid_engine.py < SPEC.json > RESULT.json

It must not import slurmdl. SPEC.json has the keys

- `links`: bytes/s of each link in each direction;
- `zones`: number of leaf zones; `hosts`: [leaf zone, link] of each host;
- `routes`: [leaf zone, leaf zone, [links in order]], link l as 2 l upward and 2 l + 1 downward; valid in both
  directions;
- `phases`: for each phase the flows [host, host, bytes] that start together; or
- `rank_hosts` and `programs`: host of each rank, and its list of steps, each a list of actions. A number waits until
  that many seconds after the start of the step. [sends, receives, latency], of [rank, bytes] and of ranks, posts all
  messages at once, waits for their completion, and then for `latency` seconds.

The result is the seconds of each phase, or the end times of the steps of each rank.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

try:
    from simgrid import Actor, Comm, Engine, LinkInRoute, Mailbox, NetZone, this_actor
except ImportError as error:
    sys.exit(f"{sys.executable}: {error}")

#: CM02 instead of LV08, which scales bandwidth by 0.97 for TCP on Gigabit Ethernet; no TCP window limit; no
#: acknowledgement traffic: capacities are net of these. Links have no latency, which would bias the sharing of links
SIMGRID_SETTINGS = ("network/model:CM02", "network/TCP-gamma:0", "network/crosstraffic:0")
LOOPBACK_BANDWIDTH = 1e15  # bytes/s between ranks of one host, effectively unlimited


def build_platform(spec: dict[str, Any]) -> list[Any]:
    """Create the SimGrid hosts: a star per leaf zone, with routes between zones."""
    root = NetZone.create_full_zone("root")
    zones = [NetZone.create_star_zone(f"zone{i}").set_parent(root) for i in range(spec["zones"])]
    gateways = [zone.create_router(f"gateway{i}") for i, zone in enumerate(zones)]
    zone_of_link = {link: zones[zone] for zone, link in spec["hosts"]}
    links = [zone_of_link.get(i, root).create_split_duplex_link(f"link{i}", bandwidth).seal()
             for i, bandwidth in enumerate(spec["links"])]
    hosts = []
    for i, (zone, link) in enumerate(spec["hosts"]):
        host = zones[zone].create_host(f"host{i}", 1)
        loopback = zones[zone].create_link(f"loopback{i}", LOOPBACK_BANDWIDTH).seal()
        zones[zone].add_route(host.netpoint, None, None, None, [LinkInRoute(links[link], LinkInRoute.UP)], True)
        zones[zone].add_route(host.netpoint, host.netpoint, None, None, [LinkInRoute(loopback)], False)
        hosts.append(host)
    for zone in zones:
        zone.seal()
    for left, right, route in spec["routes"]:
        hops = [LinkInRoute(links[hop // 2], LinkInRoute.DOWN if hop % 2 else LinkInRoute.UP) for hop in route]
        root.add_route(zones[left].netpoint, zones[right].netpoint, gateways[left], gateways[right], hops, True)
    root.seal()
    return hosts


def run_flows(phases: Sequence[Any], hosts: Sequence[Any], durations: list[float]) -> None:
    """Run the phases one after the other."""
    for flows in phases:
        start = Engine.clock
        Comm.wait_all([Comm.sendto_async(hosts[source], hosts[target], size) for source, target, size in flows])
        durations.append(Engine.clock - start)


def run_rank(rank: int, program: Sequence[Any], step_ends: list[float]) -> None:
    """Run the program of one rank."""
    for step in program:
        start = Engine.clock
        for action in step:
            if isinstance(action, list):
                sends, receives, latency = action
                # the second item of each pair is the receive buffer, which must stay alive
                receiving = [Mailbox.by_name(f"{peer}>{rank}").get_async() for peer in receives]
                sending = [Mailbox.by_name(f"{rank}>{peer}").put_async("", size) for peer, size in sends]
                Comm.wait_all([message for message, _ in receiving] + sending)
                this_actor.sleep_for(latency)
            elif start + action > Engine.clock:
                this_actor.sleep_until(start + action)
        step_ends.append(Engine.clock)


def main() -> None:
    spec = json.load(sys.stdin)
    engine = Engine(["engine", "--log=root.thresh:error", *(f"--cfg={setting}" for setting in SIMGRID_SETTINGS)])
    hosts = build_platform(spec)
    result: list[Any] = []
    if "phases" in spec:
        Actor.create("phases", hosts[0], run_flows, spec["phases"], hosts, result)
    else:
        for rank, (host, program) in enumerate(zip(spec["rank_hosts"], spec["programs"], strict=True)):
            result.append([])
            Actor.create(f"rank{rank}", hosts[host], run_rank, rank, program, result[rank])
    engine.run()
    if any(len(ends) < len(program) for ends, program in zip(result, spec.get("programs", ()), strict=False)):
        sys.exit("deadlock: ranks wait for messages without a sender")
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
