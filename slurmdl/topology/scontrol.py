"""Reader of the text of `scontrol show topology` (trees and blocks)."""

from __future__ import annotations

import re

from slurmdl.errors import InputError
from slurmdl.topology import hostlist
from slurmdl.topology.build import Declared, build
from slurmdl.topology.model import Topology

_PAIR = re.compile(r"(\w+)=(\S*)")


def parse(text: str) -> Topology:
    """The topology in the output of `scontrol show topology`, with or without -o.

    Here a switch above the leaves has both Switches and Nodes; its Nodes repeat those of its leaves.
    Lines that declare no zone (prompts, messages, the aggregates of blocks) are passed over.

    Raises
    ------
    InputError : no zone is in the text, or a zone below another is missing.
    """
    switches: list[Declared] = []
    blocks: list[Declared] = []
    for number, line in enumerate(text.splitlines(), 1):
        pairs = dict(_PAIR.findall(line))
        name = pairs.get("SwitchName") or pairs.get("BlockName")
        if not name:
            continue
        speed = pairs.get("LinkSpeed", "")
        zone = Declared(name, tuple(hostlist.expand(pairs.get("Switches", ""))),
                        tuple(hostlist.expand(pairs.get("Nodes") or pairs.get("nodes") or "")),
                        int(speed) if speed.isdigit() else None, "scontrol show topology", number, line)
        (switches if "SwitchName" in pairs else blocks).append(zone)
    if not switches and not blocks:
        raise InputError("scontrol show topology: lists no zone (TopologyPlugin may be topology/flat or none)")
    return build(switches or blocks, kind="tree" if switches else "block", source="scontrol show topology")
