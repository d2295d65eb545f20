"""PySlurm backend, for `cluster_backend: pyslurm` of slurmdl.yaml.

PySlurm reads libslurm's structures, which change with every Slurm release: built for another release it crashes or
reads wrong data. Its calls hold the GIL while the controller is silent, and libslurm exits the process on an invalid
slurm.conf. So it runs in a separate process with a timeout.

Its API (25.11) lacks three things, which one call of scontrol adds: the topology of a partition; the partitions, and
thus nodes, that the user may see, as it always requests hidden ones too; and generic resources, for which it has no
allocated counts and, for repeated kinds, no totals.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import compress

import numpy as np

from slurmdl.cluster.scontrol_parser import read_cluster
from slurmdl.cluster.snapshot import NODE_ARRAYS, ClusterSnapshot, NodeProfile
from slurmdl.errors import UnavailableError
from slurmdl.slurm import process
from slurmdl.slurm.output import SlurmOutput, split_output
from slurmdl.slurm.run_module import module_argv


def fetch_with_pyslurm(with_topology: bool = False) -> tuple[ClusterSnapshot, SlurmOutput]:
    """Return the same as `load.start_cluster_query` with scontrol.

    Raises UnavailableError if PySlurm or scontrol is missing, hangs or fails, or PySlurm is of another release.
    """
    worker = process.run_command(module_argv("slurmdl.cluster.pyslurm_worker"), name="PySlurm")
    if worker.returncode:
        messages = worker.stderr.strip().splitlines() or [f"exit status {worker.returncode}"]
        raise UnavailableError(f"PySlurm: {messages[-1]}")
    known = split_output(worker.stdout)
    reports = ("nodes", "partitions") if known.config["GresTypes"] else ("partitions",)
    answer = process.start_scontrol_show(reports, with_topology)()
    output = split_output(answer.stdout)
    snapshot = _merge_snapshots(read_cluster(known), read_cluster(output))
    if not snapshot.names:
        raise UnavailableError(f"scontrol: {answer.first_error or 'no partition with nodes in its output'}")
    return snapshot, output


def _merge_snapshots(pyslurm_snapshot: ClusterSnapshot, scontrol_snapshot: ClusterSnapshot) -> ClusterSnapshot:
    """Restrict PySlurm's snapshot to what scontrol shows the user, and add topologies and generic resources.

    A node is visible if one of its partitions is, or if it is in none (slurmctld's pack_all_nodes).
    """
    topologies = {partition.name: partition.topology for partition in scontrol_snapshot.partitions}
    gres_profiles = dict(zip(scontrol_snapshot.names, scontrol_snapshot.profile_index.tolist(), strict=True))
    visible = np.array([not profile.partitions or any(name in topologies for name in profile.partitions)
                        for profile in pyslurm_snapshot.profiles], bool)[pyslurm_snapshot.profile_index]
    names = tuple(compress(pyslurm_snapshot.names, visible.tolist()))
    index_of_pair: dict[tuple[int, int], int] = {}
    profile_index = [
        index_of_pair.setdefault((profile, gres_profiles.get(name, -1)), len(index_of_pair))
        for name, profile in zip(names, pyslurm_snapshot.profile_index[visible].tolist(), strict=True)]
    scontrol_profiles = (*scontrol_snapshot.profiles, NodeProfile(()))  # index -1: no generic resources
    profiles = tuple(
        replace(pyslurm_snapshot.profiles[left], gres=scontrol_profiles[right].gres,
                gres_used=scontrol_profiles[right].gres_used,
                partitions=tuple(name for name in pyslurm_snapshot.profiles[left].partitions if name in topologies))
        for left, right in index_of_pair)
    return ClusterSnapshot(
        names, np.array(profile_index, np.int32), profiles,
        **{name: getattr(pyslurm_snapshot, name)[visible] for name in NODE_ARRAYS},
        partitions=tuple(replace(partition, topology=topologies[partition.name])
                         for partition in pyslurm_snapshot.partitions if partition.name in topologies),
        reservations=pyslurm_snapshot.reservations, name=pyslurm_snapshot.name)
