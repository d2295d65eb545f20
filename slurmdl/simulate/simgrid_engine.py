"""SimGrid's side of a simulation: a program of its own, which runs by the Python that SimGrid was built for.

    /usr/bin/python3 -I engine.py < WORK.json > ANSWER.json

It imports nothing of slurmdl, and nothing that Debian's python3 and python3-simgrid do not have. WORK.json is

- `links`: bytes/s that each link carries in each direction;
- `zones`: number of leaf zones; `hosts`: [leaf zone, link] of each host;
- `ways`: [leaf zone, other leaf zone, [links in their order]], a link l as 2 l upwards and 2 l + 1 downwards; each
  serves both directions;
- `phases`: for each the flows [host, host, bytes] that begin together; or
- `places` and `programs`: the host of each rank, and what it does: a list of steps, each a list of actions. A number
  waits for that many seconds after the begin of the step; [sends, receives, delay], of [rank, bytes] and of ranks,
  posts all these messages at once, waits until the last has arrived, and for `delay` seconds more.

The answer is the seconds of each phase, or of each rank the seconds at the end of each of its steps.
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

#: CM02 without the factors that were fitted to TCP on Gigabit Ethernet of 2008 (LV08, 0.97 of the bandwidth), without
#: a largest window (TCP-gamma) and without acknowledgements as traffic (crosstraffic): capacities are what messages
#: get. Links have no latency: flows would share a link in inverse proportion to theirs
SIMGRID_SETTINGS = ("network/model:CM02", "network/TCP-gamma:0", "network/crosstraffic:0")
#: bytes/s between ranks of one host, which costs nothing
LOOPBACK_BANDWIDTH = 1e15


def build_platform(work: dict[str, Any]) -> list[Any]:
    """Hosts of SimGrid: a star for each leaf zone, with a way between those that exchange anything."""
    root = NetZone.create_full_zone("root")
    zones = [NetZone.create_star_zone(f"zone{number}").set_parent(root) for number in range(work["zones"])]
    gates = [zone.create_router(f"gate{number}") for number, zone in enumerate(zones)]
    home = {link: zones[zone] for zone, link in work["hosts"]}
    links = [home.get(number, root).create_split_duplex_link(f"link{number}", carries).seal()
             for number, carries in enumerate(work["links"])]
    hosts = []
    for number, (zone, link) in enumerate(work["hosts"]):
        host = zones[zone].create_host(f"host{number}", 1)
        inside = zones[zone].create_link(f"inside{number}", LOOPBACK_BANDWIDTH).seal()
        zones[zone].add_route(host.netpoint, None, None, None, [LinkInRoute(links[link], LinkInRoute.UP)], True)
        zones[zone].add_route(host.netpoint, host.netpoint, None, None, [LinkInRoute(inside)], False)
        hosts.append(host)
    for zone in zones:
        zone.seal()
    for one, other, way in work["ways"]:
        passed = [LinkInRoute(links[turn // 2], LinkInRoute.DOWN if turn % 2 else LinkInRoute.UP) for turn in way]
        root.add_route(zones[one].netpoint, zones[other].netpoint, gates[one], gates[other], passed, True)
    root.seal()
    return hosts


def run_flows(phases: Sequence[Any], hosts: Sequence[Any], answer: list[float]) -> None:
    """One phase after the other."""
    for flows in phases:
        begun = Engine.clock
        Comm.wait_all([Comm.sendto_async(hosts[source], hosts[target], size) for source, target, size in flows])
        answer.append(Engine.clock - begun)


def run_rank(rank: int, program: Sequence[Any], step_ends: list[float]) -> None:
    """What one rank does."""
    for step in program:
        begun = Engine.clock
        for action in step:
            if isinstance(action, list):
                sends, receives, delay = action
                # the second of each pair is where a message is put: it must live until then
                arriving = [Mailbox.by_name(f"{peer}>{rank}").get_async() for peer in receives]
                leaving = [Mailbox.by_name(f"{rank}>{peer}").put_async("", size) for peer, size in sends]
                Comm.wait_all([message for message, _ in arriving] + leaving)
                this_actor.sleep_for(delay)
            elif begun + action > Engine.clock:
                this_actor.sleep_until(begun + action)
        step_ends.append(Engine.clock)


def main() -> None:
    work = json.load(sys.stdin)
    engine = Engine(["engine", "--log=root.thresh:error", *(f"--cfg={setting}" for setting in SIMGRID_SETTINGS)])
    hosts = build_platform(work)
    answer: list[Any] = []
    if "phases" in work:
        Actor.create("phases", hosts[0], run_flows, work["phases"], hosts, answer)
    else:
        for rank, (place, program) in enumerate(zip(work["places"], work["programs"], strict=True)):
            answer.append([])
            Actor.create(f"rank{rank}", hosts[place], run_rank, rank, program, answer[rank])
    engine.run()
    if any(len(ends) < len(program) for ends, program in zip(answer, work.get("programs", ()), strict=False)):
        sys.exit("ranks wait for messages that nobody sends")
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
