"""PySlurm in the place of scontrol, where `cluster_backend` of slurmdl.yaml asks for it.

PySlurm reads libslurm's structures, which change with every release of Slurm: built for another one it crashes or
reads nonsense. Its calls hold the interpreter for as long as the controller lets them wait, and libslurm ends a
process whose slurm.conf it does not like. So it is imported in a process of its own, bounded in time as scontrol is.

Its API (25.11) lacks three things, which one call of scontrol beside it adds: the topology that a partition uses;
which partitions the user sees, and with them which nodes, since it always asks for the hidden ones, too; and generic
resources, of which it tells neither what is allocated nor, where a kind stands several times, how many there are.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import replace
from itertools import compress

import numpy as np

from slurmdl import process
from slurmdl.cluster import scontrol
from slurmdl.cluster.model import NUMBERS, ClusterSnapshot, Kind
from slurmdl.errors import UnavailableError
from slurmdl.slurm.scontrol import start_scontrol_show

#: finds the modules where this process found them; a directory of the user's is no place to import from
_START = "import sys; sys.path[:] = sys.argv[1:]; from slurmdl.cluster import pyslurm_child; pyslurm_child.main()"


def fetch(with_topology: bool = False) -> tuple[ClusterSnapshot, str]:
    """As `read.start` with scontrol: the same snapshot field by field, and the same text of the zones.

    Raises
    ------
    UnavailableError : PySlurm is missing, of another release than the controller, hangs or fails; so of scontrol.
    """
    told = _ask()
    gres = process.pairs(told)["GresTypes"]
    answer = start_scontrol_show(("nodes", "partitions") if gres else ("partitions",), with_topology)()
    snapshot = _joined(scontrol.parse(told), scontrol.parse(answer.out))
    if not snapshot.names:
        raise UnavailableError(f"scontrol: {answer.first_error or 'shows no partition with nodes'}")
    return snapshot, scontrol.zones(answer.out) if with_topology else ""


def _ask() -> str:
    answer = process.ask([sys.executable, "-c", _START, *sys.path], name="PySlurm")
    if answer.status:
        said = answer.err.strip().splitlines() or [f"ended with status {answer.status}"]
        raise UnavailableError(f"PySlurm: {said[-1]}")
    return answer.out


def _joined(told: ClusterSnapshot, seen: ClusterSnapshot) -> ClusterSnapshot:
    """What PySlurm told, as far as scontrol shows it to the user, with what only scontrol tells.

    A node is shown where one of its partitions is, or where it is in none (slurmctld's pack_all_nodes).

    Parameters
    ----------
    seen : the partitions that scontrol shows; its nodes, where generic resources are wanted.
    """
    topologies = {partition.name: partition.topology for partition in seen.partitions}
    resources = dict(zip(seen.names, seen.kind.tolist(), strict=True))
    shown = np.array([not kind.partitions or any(name in topologies for name in kind.partitions)
                      for kind in told.kinds], bool)[told.kind]
    names = tuple(compress(told.names, shown.tolist()))
    of_pair: dict[tuple[int, int], int] = {}
    kind = [of_pair.setdefault((own, resources.get(name, -1)), len(of_pair))
            for name, own in zip(names, told.kind[shown].tolist(), strict=True)]
    kinds = tuple(_kind(told.kinds[own], seen.kinds[other] if other >= 0 else None, topologies)
                  for own, other in of_pair)
    return ClusterSnapshot(
        names, np.array(kind, np.int32), kinds, **{name: getattr(told, name)[shown] for name in NUMBERS},
        partitions=tuple(replace(partition, topology=topologies[partition.name]) for partition in told.partitions
                         if partition.name in topologies), reservations=told.reservations)


def _kind(told: Kind, seen: Kind | None, partitions: Collection[str]) -> Kind:
    return replace(told, partitions=tuple(name for name in told.partitions if name in partitions),
                   gres=seen.gres if seen else (), gres_used=seen.gres_used if seen else ())
