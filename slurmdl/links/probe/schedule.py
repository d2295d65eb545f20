"""Schedule of the probes: rounds of disjoint pairs, so that no probe disturbs another.

Each node is paired with a few others of its zone, and a few pairs of nodes measure the path between two zones:
O(nodes + zones^2) probes. Both are round-robin tournaments by the circle method: with n players (n even), round r
pairs i with r - i modulo n - 1; the player paired with itself gets the last player.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

#: default number of rounds inside zones, and of node pairs per pair of zones
ROUNDS_IN_ZONE, PAIRS_PER_ZONE_PAIR = 4, 2

ProbeRound = list[tuple[int, int]]


def round_robin_schedule(leaf: Sequence[int], seed: int = 0, *, rounds_in_zone: int = ROUNDS_IN_ZONE,
                         pairs_per_zone_pair: int = PAIRS_PER_ZONE_PAIR) -> Iterator[ProbeRound]:
    """Yield rounds of node index pairs, those inside zones first. A round has at most one pair per node, and at most
    one inter-zone pair per zone.

    Parameters
    ----------
    leaf : leaf zone of each node as a number; nodes without a zone share one.
    rounds_in_zone : rounds inside zones; small zones need fewer.
    pairs_per_zone_pair : node pairs that measure the path between two zones.
    """
    rng = random.Random(seed)
    zones: dict[int, list[int]] = {}
    for node, zone in enumerate(leaf):
        zones.setdefault(zone, []).append(node)
    members = list(zones.values())
    for nodes in members:
        rng.shuffle(nodes)
    rounds = [_sample_rounds(len(nodes), rounds_in_zone, rng) for nodes in members]
    for i in range(max(map(len, rounds), default=0)):
        yield [(nodes[a], nodes[b]) for nodes, numbers in zip(members, rounds, strict=True) if i < len(numbers)
               for a, b in _round_pairs(len(nodes), numbers[i])]
    used = [0] * len(members)  # pairs so far, per zone
    for _ in range(pairs_per_zone_pair):
        for number in _sample_rounds(len(members), len(members), rng):
            pairs = []
            for a, b in _round_pairs(len(members), number):
                pairs.append((members[a][used[a] % len(members[a])], members[b][used[b] % len(members[b])]))
                used[a] += 1
                used[b] += 1
            yield pairs


def _sample_rounds(players: int, max_rounds: int, rng: random.Random) -> list[int]:
    """Numbers of at most `max_rounds` rounds of a tournament in random order; none for less than two players."""
    total = players - 1 + players % 2 if players > 1 else 0
    return rng.sample(range(total), min(max_rounds, total))


def _round_pairs(players: int, round_number: int) -> Iterator[tuple[int, int]]:
    """Pairs of one round; with an odd number of players one of them is idle."""
    circle = players - 1 + players % 2
    for i in range(circle):
        j = (round_number - i) % circle
        if i < j:
            yield i, j
        elif i == j and players % 2 == 0:
            yield i, players - 1
