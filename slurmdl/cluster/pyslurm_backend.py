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

from slurmdl.cluster import scontrol_parser
from slurmdl.cluster.snapshot import NODE_ARRAYS, ClusterSnapshot, NodeProfile
from slurmdl.errors import UnavailableError
from slurmdl.slurm import process
from slurmdl.slurm.scontrol import start_scontrol_show
from slurmdl.slurm.slurm_conf import parse_key_values

#: finds the modules where this process found them; a directory of the user's is no place to import from
_WORKER_CODE = "import sys; sys.path[:] = sys.argv[1:]; from slurmdl.cluster import pyslurm_child; pyslurm_child.main()"


def fetch_with_pyslurm(with_topology: bool = False) -> tuple[ClusterSnapshot, str]:
    """As `read.start` with scontrol: the same snapshot field by field, and the same text of the zones.

    Raises
    ------
    UnavailableError : PySlurm is missing, of another release than the controller, hangs or fails; so of scontrol.
    """
    told = _run_worker()
    gres = parse_key_values(told)["GresTypes"]
    answer = start_scontrol_show(("nodes", "partitions") if gres else ("partitions",), with_topology)()
    snapshot = _merge_snapshots(scontrol_parser.parse_snapshot(told), scontrol_parser.parse_snapshot(answer.stdout))
    if not snapshot.names:
        raise UnavailableError(f"scontrol: {answer.first_error or 'shows no partition with nodes'}")
    return snapshot, scontrol_parser.topology_text(answer.stdout) if with_topology else ""


def _run_worker() -> str:
    answer = process.run_command([sys.executable, "-c", _WORKER_CODE, *sys.path], name="PySlurm")
    if answer.returncode:
        said = answer.stderr.strip().splitlines() or [f"ended with status {answer.returncode}"]
        raise UnavailableError(f"PySlurm: {said[-1]}")
    return answer.stdout


def _merge_snapshots(pyslurm_snapshot: ClusterSnapshot, scontrol_snapshot: ClusterSnapshot) -> ClusterSnapshot:
    """What PySlurm told, as far as scontrol shows it to the user, with what only scontrol tells.

    A node is shown where one of its partitions is, or where it is in none (slurmctld's pack_all_nodes).

    Parameters
    ----------
    seen : the partitions that scontrol shows; its nodes, where generic resources are wanted.
    """
    topologies = {partition.name: partition.topology for partition in scontrol_snapshot.partitions}
    resources = dict(zip(scontrol_snapshot.names, scontrol_snapshot.profile_index.tolist(), strict=True))
    shown = np.array([not kind.partitions or any(name in topologies for name in kind.partitions)
                      for kind in pyslurm_snapshot.profiles], bool)[pyslurm_snapshot.profile_index]
    names = tuple(compress(pyslurm_snapshot.names, shown.tolist()))
    of_pair: dict[tuple[int, int], int] = {}
    kind = [of_pair.setdefault((own, resources.get(name, -1)), len(of_pair))
            for name, own in zip(names, pyslurm_snapshot.profile_index[shown].tolist(), strict=True)]
    kinds = tuple(_merge_profiles(pyslurm_snapshot.profiles[own], scontrol_snapshot.profiles[other] if other >= 0 else None, topologies)
                  for own, other in of_pair)
    return ClusterSnapshot(
        names, np.array(kind, np.int32), kinds, **{name: getattr(pyslurm_snapshot, name)[shown] for name in NODE_ARRAYS},
        partitions=tuple(replace(partition, topology=topologies[partition.name]) for partition in pyslurm_snapshot.partitions
                         if partition.name in topologies), reservations=pyslurm_snapshot.reservations)


def _merge_profiles(pyslurm_profile: NodeProfile, scontrol_profile: NodeProfile |
                    None, visible_partitions: Collection[str]) -> NodeProfile:
    return replace(pyslurm_profile, partitions=tuple(name for name in pyslurm_profile.partitions if name in visible_partitions),
                   gres=scontrol_profile.gres if scontrol_profile else (), gres_used=scontrol_profile.gres_used if scontrol_profile else ())
