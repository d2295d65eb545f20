"""Who probes whom, and when: rounds of disjoint pairs, so that no probe disturbs another.

Inside a zone each node meets a few others, and a few pairs of nodes measure the way between two zones: O(nodes +
zones^2) probes. Both are rounds of a tournament, drawn up by the circle method: with n players (n even), round r
pairs i with the player at r - i modulo n - 1, and whoever would meet himself meets the last one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

#: how many others each node meets in its zone, and how many pairs of nodes meet for two zones
ROUNDS_IN_ZONE, PAIRS_PER_ZONE_PAIR = 4, 2

ProbeRound = list[tuple[int, int]]


def round_robin_schedule(leaf: Sequence[int], seed: int = 0, *, rounds_in_zone: int = ROUNDS_IN_ZONE,
                         pairs_per_zone_pair: int = PAIRS_PER_ZONE_PAIR) -> Iterator[ProbeRound]:
    """The rounds, those inside the zones first; in each, no node is in two pairs, no zone in two of those between.

    Parameters
    ----------
    leaf : the leaf zone of each node; nodes of the same number are in one, nodes in none have one number, too.
    inside : rounds inside the zones; a zone of few nodes has no more than it needs for each pair to meet.
    between : pairs of nodes for two zones.

    Yields
    ------
    pairs of indices of nodes.
    """
    draw = random.Random(seed)
    zones: dict[int, list[int]] = {}
    for node, zone in enumerate(leaf):
        zones.setdefault(zone, []).append(node)
    members = list(zones.values())
    for nodes in members:
        draw.shuffle(nodes)
    played = [_sample_rounds(len(nodes), rounds_in_zone, draw) for nodes in members]
    for number in range(max(map(len, played), default=0)):
        yield [(nodes[i], nodes[j]) for nodes, drawn in zip(members, played, strict=True) if number < len(drawn)
               for i, j in _round_pairs(len(nodes), drawn[number])]
    turn = [0] * len(members)
    for _ in range(pairs_per_zone_pair):
        for number in _sample_rounds(len(members), len(members), draw):
            games = []
            for a, b in _round_pairs(len(members), number):
                games.append((members[a][turn[a] % len(members[a])], members[b][turn[b] % len(members[b])]))
                turn[a] += 1
                turn[b] += 1
            yield games


def _sample_rounds(players: int, max_rounds: int, rng: random.Random) -> list[int]:
    """Numbers of at most `most` rounds of a tournament, in random order; none where nobody can meet."""
    total = players - 1 + players % 2 if players > 1 else 0
    return rng.sample(range(total), min(max_rounds, total))


def _round_pairs(players: int, round_number: int) -> Iterator[tuple[int, int]]:
    """The pairs of one round; with an odd number of players one has a rest."""
    circle = players - 1 + players % 2
    for i in range(circle):
        j = (round_number - i) % circle
        if i < j:
            yield i, j
        elif i == j and players % 2 == 0:
            yield i, players - 1
