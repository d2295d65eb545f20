"""Zones as options of sbatch, which knows node features, not zones. Pure.

`--exclude` lists the nodes outside of named zones; `--constraint`, `--switches` and `--segment` keep a job in its
zones; `--prefer` also starts it elsewhere. For the latter, the worst nodes that Slurm may choose count.

--prefer has three forms: `zoneA`, any nodes of one zone; `[zoneA*3&zoneB*1]`, a number of nodes for each zone;
`zoneA|zoneB`, any nodes of these zones. Observed with 22.05, 24.11 and 26.05: for the second form, Slurm tries the
whole job in each zone alone, and keeps the first nodes of each. Without -n and --ntasks-per-node the CPUs of the zone
must be enough, with --ntasks-per-node the nodes. If they are not, it ignores the preference, and from 24.11 on also
with -n alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from slurmdl.errors import PlacementError
from slurmdl.slurm.hostlist import fold_hostlist

if TYPE_CHECKING:
    from slurmdl.cluster.snapshot import ClusterSnapshot
    from slurmdl.job_request import JobRequest
    from slurmdl.launch.cluster_state import ClusterState
    from slurmdl.placement.result import Placement
    from slurmdl.topology.topology import Topology

#: divisions of a job among zones that are compared
MAX_DIVISIONS = 16
#: constraints that can be joined with a feature: brackets, counts and alternatives do not nest in every release.
#: --prefer replaces --constraint while Slurm tries it (sbatch(1)), so it must hold both
_JOINABLE_CONSTRAINT = re.compile(r"[\w.:=+-]+(&[\w.:=+-]+)*")


@dataclass(frozen=True)
class ZonePreference:
    """A value of --prefer.

    Attributes:
        outcomes: the worst nodes for each division of the job among the zones, unless they are like the chosen ones.
        uncounted: why it does not say how many nodes of each zone, "" if it does.
    """

    value: str
    outcomes: tuple[tuple[str, ...], ...]
    uncounted: str = ""


@dataclass(frozen=True)
class _FreeNodes:
    """Free nodes of a zone, the worst first.

    Attributes:
        quality: of each node its tasks, and the capacity and latency of its link.
        cpus: unallocated CPUs of all.
    """

    names: tuple[str, ...]
    quality: tuple[tuple[float, ...], ...]
    cpus: int


def exclude_option(request: JobRequest, state: ClusterState) -> tuple[str, ...]:
    """The option that excludes all nodes outside the zones of --dl-zone, if there are any.

    Excluding nodes leaves the user's own --constraint unchanged. UsageError if a zone is unknown.
    """
    from slurmdl.placement.candidate_nodes import snapshot_nodes_in_zones

    is_inside = snapshot_nodes_in_zones(state.cluster, state.topology, request.options.zone)
    outside = [name for name, inside in zip(state.cluster.names, is_inside.tolist(), strict=True) if not inside]
    return (f"--exclude={fold_hostlist([*outside, *request.exclude])}",) if outside else ()


def segment_option(request: JobRequest, topology: Topology, placement: Placement) -> str:
    """The largest --segment of which this choice consists; "" without blocks, for single nodes, or if it is given."""
    if topology.kind != "block" or request.segment:
        return ""
    common = math.gcd(*placement.nodes_per_zone.values())
    base = topology.block_sizes[0] if topology.block_sizes else common
    size = max(size for size in range(1, common + 1) if common % size == 0 and size <= base)
    return f"--segment={size}" if size > 1 else ""


def zone_options(request: JobRequest, state: ClusterState, placement: Placement, segment: str) -> tuple[str, ...]:
    """Options that keep a job in its zones: features, on blocks also or only segments, on trees also --switches.

    `segment` is the result of `segment_option` if Slurm accepts it. Raises PlacementError if there is no option.
    """
    if segment and not exact_zone_features(state, placement.nodes_per_zone):
        return (segment,)
    features = exact_zone_features(state, request.options.zone or placement.nodes_per_zone)
    constraint = request.constraint
    if features and not constraint:
        option = f"--constraint={'|'.join(features)}"
    elif len(features) == 1 and constraint and _JOINABLE_CONSTRAINT.fullmatch(constraint):
        option = f"--constraint={constraint}&{features[0]}"
    elif state.topology.kind == "tree":
        option = f"--switches={len(placement.nodes_per_zone)}"
    else:
        raise PlacementError("--dl-node-binding=zone: no node features identify the zones, and --switches "
                             "is for trees only")
    return (option, segment) if segment else (option,)


def prefer_zones(request: JobRequest, state: ClusterState, placement: Placement) -> ZonePreference:
    """The preference for the zones of a placement that admits the fewest other nodes.

    Raises PlacementError with the reason if there is none.
    """
    counts = dict(placement.nodes_per_zone)
    names = placement_zones_text(placement)
    features = exact_zone_features(state, counts)
    if len(counts) == 1 and counts.keys() == leaf_zones(state.topology):
        raise PlacementError("every zone is needed")
    if not features:
        raise PlacementError(f"{names} would fit, but no node feature identifies it")
    constraint = request.constraint or ""
    if constraint and not _JOINABLE_CONSTRAINT.fullmatch(constraint):
        raise PlacementError(f"{names} would fit, but a preference cannot include --constraint={constraint}")
    terms = [f"{constraint}&{feature}" if constraint else feature for feature in features]
    free = _free_nodes(request, state, placement)
    if len(counts) == 1:
        return ZonePreference(terms[0], _worse_outcomes(placement, free, [counts]))
    problem = _uncountable_reason(request, free, len(placement.nodes))
    if not problem:
        grouped = [f"({term})" if constraint else term for term in terms]
        numbered = "&".join(f"{term}*{count}" for term, count in zip(grouped, counts.values(), strict=True))
        return ZonePreference(f"[{numbered}]", _worse_outcomes(placement, free, [counts]))
    uncounted = f"{names} would fit, but {problem}"
    segment = request.segment if 0 < request.segment < len(placement.nodes) else 1
    divisions = list(islice(_divisions({zone: len(free[zone].names) for zone in counts}, len(placement.nodes),
                                       segment), MAX_DIVISIONS + 1))
    if constraint or counts.keys() == leaf_zones(state.topology) or len(divisions) > MAX_DIVISIONS:
        raise PlacementError(uncounted)
    return ZonePreference("|".join(terms), _worse_outcomes(placement, free, divisions), uncounted)


def placement_zones_text(placement: Placement) -> str:
    """The zones of a placement in a message."""
    from slurmdl.placement.result import MAX_NAMED_ZONES

    names = list(placement.nodes_per_zone)
    return " + ".join(names) if len(names) <= MAX_NAMED_ZONES else f"{len(names)} zones"


def leaf_zones(topology: Topology, zones: Sequence[str] = ()) -> set[str]:
    """Zones with nodes of their own among the named zones and their descendants; all if none is named."""
    from slurmdl.placement.candidate_nodes import nodes_in_zones

    return {topology.zones[leaf] for leaf in set(topology.leaf[nodes_in_zones(topology, zones)].tolist())}


def _uncountable_reason(request: JobRequest, free: Mapping[str, _FreeNodes], nodes: int) -> str:
    """Why Slurm may ignore numbers of nodes per zone, or ""."""
    if 0 < request.segment < nodes:
        return "with --segment Slurm may ignore numbers of nodes per zone"
    if request.gpus or (request.ntasks is not None and not request.ntasks_per_node):
        return f"with {'these GPU options' if request.gpus else '-n and no --ntasks-per-node'} Slurm may ignore " \
               "numbers of nodes per zone"
    cpus = nodes * (request.cpus_per_task or 1)
    for zone, available in free.items():
        if len(available.names) < nodes and (request.ntasks_per_node or available.cpus < cpus):
            return f"Slurm may ignore numbers of nodes per zone, because {zone} alone could not hold the job"
    return ""


def _free_nodes(request: JobRequest, state: ClusterState, placement: Placement) -> dict[str, _FreeNodes]:
    """The nodes of each zone of a placement that Slurm may choose now."""
    import numpy as np

    from slurmdl.links.capacity import node_links
    from slurmdl.placement.candidate_nodes import topology_index
    from slurmdl.placement.eligibility import candidate_partitions, eligible_tasks

    cluster, topology = state.cluster, state.topology
    eligible = [eligible_tasks(request, cluster, partition)
                for partition in candidate_partitions(request, cluster) or (None,)]
    tasks = np.max([entry.tasks_now if placement.boots else entry.tasks_up for entry in eligible], axis=0)
    needed = request.ntasks_per_node or -(-(request.ntasks or 1) // len(placement.nodes))
    leaf = np.append(topology.leaf, -1)[topology_index(cluster, topology)]
    free = {}
    for zone in placement.nodes_per_zone:
        index = np.flatnonzero((leaf == topology.zone_index[zone]) & (tasks > 0))
        bandwidth, latency = node_links([cluster.names[i] for i in index.tolist()], state.scores)
        slots = np.minimum(tasks[index], needed)
        order = np.lexsort((-latency, bandwidth, slots))
        quality = np.column_stack([slots, bandwidth, latency])[order]
        free[zone] = _FreeNodes(tuple(cluster.names[i] for i in index[order].tolist()), tuple(map(tuple, quality)),
                                int(cluster.cpus_unallocated[index].sum()))
    return free


def _divisions(free: Mapping[str, int], nodes: int, segment: int) -> Iterator[dict[str, int]]:
    """All divisions of a job into multiples of `segment` among zones with these numbers of free nodes."""
    if not free:
        if not nodes:
            yield {}
        return
    (zone, most), *others = free.items()
    rest = sum(count - count % segment for _, count in others)
    least = max(0, nodes - rest)
    for count in range(least + -least % segment, min(most, nodes) + 1, segment):
        for division in _divisions(dict(others), nodes - count, segment):
            yield {zone: count, **division}


def _worse_outcomes(placement: Placement, free: Mapping[str, _FreeNodes],
                    divisions: Iterable[Mapping[str, int]]) -> tuple[tuple[str, ...], ...]:
    """The worst nodes of each division, unless they are like the chosen nodes."""
    chosen = set(placement.nodes)
    outcomes = []
    for division in divisions:
        names = tuple(name for zone, count in division.items() for name in free[zone].names[:count])
        is_like_chosen = dict(division) == dict(placement.nodes_per_zone) and all(
            free[zone].quality[:count] == tuple(quality for name, quality in zip(
                free[zone].names, free[zone].quality, strict=True) if name in chosen)
            for zone, count in division.items())
        if not is_like_chosen:
            outcomes.append(names)
    return tuple(outcomes)


def exact_zone_features(state: ClusterState, zones: Iterable[str]) -> tuple[str, ...]:
    """For each zone a feature of exactly its nodes, preferably the zone's name; () if a zone has none."""
    features = find_zone_features(state.cluster, state.topology, zones)
    return features if all(features) else ()


def find_zone_features(cluster: ClusterSnapshot, topology: Topology, zones: Iterable[str]) -> tuple[str, ...]:
    """For each zone a feature of exactly its nodes, preferably the zone's name; "" for a zone without one."""
    import numpy as np

    from slurmdl.placement.candidate_nodes import topology_index

    index = topology_index(cluster, topology)
    # snapshot index of each node of the topology, -1 for nodes that the snapshot lacks
    snapshot_index = np.full(len(topology.nodes) + 1, -1, np.int64)
    snapshot_index[index] = np.arange(len(index))
    order = np.argsort(cluster.profile_index, kind="stable")
    ends = np.cumsum(np.bincount(cluster.profile_index, minlength=len(cluster.profiles)))
    nodes_of_profile = np.split(order, ends[:-1])
    profiles_with: dict[str, list[int]] = {}
    for number, profile in enumerate(cluster.profiles):
        for feature in set(profile.features):
            profiles_with.setdefault(feature, []).append(number)
    node_count = {feature: int(sum(len(nodes_of_profile[number]) for number in numbers))
                  for feature, numbers in profiles_with.items()}
    features = []
    for zone in zones:
        nodes = snapshot_index[topology.indices_below(topology.zone_index[zone])]
        nodes = np.sort(nodes[nodes >= 0])
        # a feature of all nodes is a feature of the first one
        candidates = cluster.profiles[cluster.profile_index[nodes[0]]].features if len(nodes) else ()
        exact = [name for name in candidates if node_count[name] == len(nodes) and np.array_equal(
            np.sort(np.concatenate([nodes_of_profile[number] for number in profiles_with[name]])), nodes)]
        features.append(zone if zone in exact else min(exact, default=""))
    return tuple(features)
