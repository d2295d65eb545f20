"""Blocks of nodes (topology/block): the sizes that are planned with, and the aggregates of neighbours.

After src/plugins/topology/block/block_record.c of Slurm 24.05.
"""

from __future__ import annotations

from collections.abc import Sequence

from slurmdl.topology.build import ZoneDecl
from slurmdl.topology.hostlist import ranged_string

#: blocks in the aggregates where the file gives no BlockSizes
_DEFAULT_MULTIPLES = (2, 4, 8, 16)
#: aggregates of more blocks are refused by Slurm (MAX_BLOCK_LEVELS)
_MAX_MULTIPLE = 2**15


def level_multiples(sizes: Sequence[int]) -> tuple[int, ...]:
    """Blocks in the aggregates of each level, for BlockSizes in nodes; the first size is that of a base block.

    Raises
    ------
    ValueError : a size is not the first one times a power of two; the text says which.
    """
    if not sizes:
        return _DEFAULT_MULTIPLES
    found = set()
    for size in sizes:
        step, rest = divmod(size, sizes[0]) if sizes[0] else (0, 0)
        if rest or step & (step - 1) or not 1 <= step <= _MAX_MULTIPLE:
            raise ValueError(f"BlockSizes: {size} is not {sizes[0]} times a power of two up to {_MAX_MULTIPLE}")
        found.add(step)
    return tuple(sorted(found - {1}))


def aggregate_blocks(blocks: Sequence[ZoneDecl], multiples: Sequence[int]) -> list[ZoneDecl]:
    """The zones above the base blocks, named by their members as Slurm does: b1, b2 -> b[1-2].

    Aggregates of a level begin at multiples of its step, so the order of the blocks matters. An aggregate that
    would hold one zone only is left out.
    """
    found: list[ZoneDecl] = []
    tops = [(i, 1, block.name) for i, block in enumerate(blocks)]
    for step in multiples:
        merged: list[tuple[int, int, str]] = []
        groups: dict[int, list[tuple[int, int, str]]] = {}
        for top in tops:
            groups.setdefault(top[0] // step, []).append(top)
        for group in groups.values():
            if len(group) == 1:
                merged += group
                continue
            first, last = group[0][0], group[-1][0] + group[-1][1]
            name = ranged_string(block.name for block in blocks[first:last])
            found.append(ZoneDecl(name, tuple(name for _, _, name in group)))
            merged.append((first, last - first, name))
        tops = merged
        if step >= len(blocks):
            break
    return found


def undersized_block(blocks: Sequence[ZoneDecl], sizes: Sequence[int]) -> tuple[ZoneDecl, str] | None:
    """The first block with fewer nodes than a base block needs, and what is wrong; empty ones wait for nodes."""
    counts = [len(set(block.nodes)) for block in blocks]
    base = sizes[0] if sizes else next((count for count in counts if count), 0)
    for block, count in zip(blocks, counts, strict=True):
        if 0 < count < base:
            return block, (f"block {block.name!r} has {count} nodes; a block has at least the {base} of "
                           f"{'BlockSizes' if sizes else 'the first block'}")
    return None
