"""What a source declares of one topology, line by line, before it is looked at as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slurmdl.errors import InputError
from slurmdl.topology import blocks
from slurmdl.topology.build import Declared, build, link_speed
from slurmdl.topology.model import Topology
from slurmdl.topology.tree import children, members

#: called with a fault where the reader can go on; the readers raise it, `check` collects it
OnFault = Callable[[InputError], None]


def refuse(fault: InputError) -> None:
    raise fault


@dataclass(frozen=True)
class Contents:
    """One topology as its source declares it.

    Attributes
    ----------
    zones : of blocks the base blocks only; their aggregates follow from the order and the sizes.
    kind, source, name, notes, block_sizes : as in Topology.
    """

    zones: tuple[Declared, ...]
    kind: str
    source: str
    name: str = "default"
    notes: tuple[str, ...] = ()
    block_sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, topology: Topology) -> Contents:
        """What a source would declare of this topology, without a place in a file.

        A speed that no reader would take from a LinkSpeed is left out.
        """
        nodes, below = members(topology), children(topology)
        speeds = [link_speed(speed) for speed in topology.speed.tolist()]
        zones = [Declared(name, tuple(topology.zones[child] for child in below.get(zone, ())),
                          tuple(nodes.get(zone, ())), speeds[zone])
                 for zone, name in enumerate(topology.zones) if topology.kind != "block" or not topology.level[zone]]
        return cls(tuple(zones), topology.kind, topology.source, topology.name, topology.notes, topology.block_sizes)

    def topology(self) -> Topology:
        """The canonical form.

        Raises
        ------
        InputError : the zones are no forest, a name stands twice or is not declared, a block is too small.
        """
        if self.kind == "flat":
            return Topology.flat((), self.source, self.name, self.notes)
        zones = list(self.zones)
        if self.kind == "block":
            small = blocks.too_small(zones, self.block_sizes)
            if small:
                raise small[0].error(small[1])
            zones += blocks.aggregates(zones, blocks.steps(self.block_sizes))
        return build(zones, kind=self.kind, source=self.source, name=self.name, notes=self.notes,
                     block_sizes=self.block_sizes)
