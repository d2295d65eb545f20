"""What a source declares of one topology, line by line, before it is looked at as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slurmdl.errors import InputError
from slurmdl.topology import blocks
from slurmdl.topology.build import ZoneDecl, build_topology, to_link_speed
from slurmdl.topology.model import Topology
from slurmdl.topology.tree import children_by_zone, nodes_by_leaf

#: called with a fault where the reader can go on; the readers raise it, `check` collects it
OnError = Callable[[InputError], None]


def raise_error(error: InputError) -> None:
    raise error


@dataclass(frozen=True)
class TopologySource:
    """One topology as its source declares it.

    Attributes
    ----------
    zones : of blocks the base blocks only; their aggregates follow from the order and the sizes.
    kind, source, name, notes, block_sizes : as in Topology.
    """

    zones: tuple[ZoneDecl, ...]
    kind: str
    source: str
    name: str = "default"
    notes: tuple[str, ...] = ()
    block_sizes: tuple[int, ...] = ()

    @classmethod
    def from_topology(cls, topology: Topology) -> TopologySource:
        """What a source would declare of this topology, without a place in a file.

        A speed that no reader would take from a LinkSpeed is left out.
        """
        nodes, below = nodes_by_leaf(topology), children_by_zone(topology)
        speeds = [to_link_speed(speed) for speed in topology.uplink_bandwidth.tolist()]
        zones = [ZoneDecl(name, tuple(topology.zones[child] for child in below.get(zone, ())),
                          tuple(nodes.get(zone, ())), speeds[zone])
                 for zone, name in enumerate(topology.zones) if topology.kind != "block" or not topology.level[zone]]
        return cls(tuple(zones), topology.kind, topology.source, topology.name, topology.notes, topology.block_sizes)

    def to_topology(self) -> Topology:
        """The canonical form.

        Raises
        ------
        InputError : the zones are no forest, a name stands twice or is not declared, a block is too small.
        """
        if self.kind == "flat":
            return Topology.flat((), self.source, self.name, self.notes)
        zones = list(self.zones)
        if self.kind == "block":
            small = blocks.undersized_block(zones, self.block_sizes)
            if small:
                raise small[0].error(small[1])
            zones += blocks.aggregate_blocks(zones, blocks.level_multiples(self.block_sizes))
        return build_topology(zones, kind=self.kind, source=self.source, name=self.name, notes=self.notes,
                     block_sizes=self.block_sizes)
