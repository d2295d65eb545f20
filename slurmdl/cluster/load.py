"""Load a cluster snapshot: from the controller with the configured backend, from its last answer, or from a file.

The backend `scontrol` is the default. PySlurm (`cluster_backend: pyslurm` of slurmdl.yaml) reads libslurm's
structures, which change with every Slurm release: built for another release it crashes or reads wrong data. Its calls
hold the GIL while the controller is silent, and libslurm exits the process on an invalid slurm.conf. So it runs in a
separate process with a timeout.

Its API (25.11) lacks three things, which one call of scontrol adds: the topology of a partition; the partitions, and
thus nodes, that the user may see, as it always requests hidden ones too; and generic resources, for which it has no
allocated counts and, for repeated kinds, no totals.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING

from slurmdl.errors import InputError, UnavailableError, debug, warn
from slurmdl.files import read_trusted_text, untrusted_reason, write_atomic
from slurmdl.slurm import process, slurm_conf

if TYPE_CHECKING:
    from slurmdl.cluster.snapshot import ClusterSnapshot
    from slurmdl.slurm.output import SlurmOutput

#: longest answer that is kept, of 40,000 nodes
_MAX_KEPT_CHARS = 32 * 2**20


class ClusterQuery:
    """A query of nodes, partitions, reservations and defaults, started at once, in parallel with this process.

    scontrol runs while this process imports NumPy, which takes as long: 30 ms less per submission at 10,000 nodes
    (`benchmarks.placement --only sbatch-overhead`).

    Args:
        backend: `cluster_backend` of slurmdl.yaml; `auto` is scontrol even if PySlurm is installed: one call also
            returns zones and generic resources, it is faster (docs/admin.md), and it works with every Slurm release.
        with_topology: also query the zones.
        max_age_s: an answer to a query of this user that is not older is used again (`keep`); 0 for none.
    """

    def __init__(self, backend: str, with_topology: bool = False, max_age_s: float = 0.0) -> None:
        self._with_topology = with_topology
        self._key = _answer_key(with_topology) if max_age_s and backend != "pyslurm" else ""
        self._text, self._time = (_read_kept_answer(self._key, max_age_s) if self._key else None) or ("", time.time())
        self._is_kept = bool(self._text)
        self._wait = None if self._is_kept else self._start(backend)

    def _start(self, backend: str) -> Callable[[], tuple[ClusterSnapshot, SlurmOutput]]:
        if backend == "pyslurm":
            return lambda: _fetch_with_pyslurm(self._with_topology)
        defaults = slurm_conf.read_cluster_defaults()
        reports = ("nodes", "partitions", "reservations", *("config",) * (defaults is None))
        wait = process.start_scontrol_show(reports, self._with_topology)

        def result() -> tuple[ClusterSnapshot, SlurmOutput]:
            answer = wait()
            self._text = "".join(f"{key} = {value}\n" for key, value in (defaults or {}).items()) + answer.stdout
            return self._parse(answer.first_error)

        return result

    @functools.cached_property
    def answer(self) -> tuple[ClusterSnapshot, SlurmOutput]:
        """The snapshot, and the output of scontrol, which has the zones if they are requested and available.

        Waits for Slurm. Raises UnavailableError if the backend is missing, hangs, fails or has no node.
        """
        return self._wait() if self._wait else self._parse("")

    def _parse(self, problem: str) -> tuple[ClusterSnapshot, SlurmOutput]:
        from slurmdl.cluster.reader import read_cluster
        from slurmdl.slurm.output import split_output

        output = split_output(self._text)
        snapshot = read_cluster(output)
        if not snapshot.names:
            raise UnavailableError(f"scontrol: {problem or 'no node in its output'}")
        return snapshot, output

    @property
    def age_s(self) -> float:
        """Time since Slurm was queried, if this is the answer to an earlier query; else 0."""
        return time.time() - self._time if self._is_kept else 0.0

    def keep(self) -> None:
        """Keep the answer for the user's next submissions; a failure costs them a query."""
        if not self._key or self._is_kept or not 0 < len(self._text) <= _MAX_KEPT_CHARS:
            return
        path = _kept_answer_path()
        directory = os.path.dirname(path)
        try:
            with suppress(FileExistsError):
                os.mkdir(directory, 0o700)
            if reason := untrusted_reason(directory, os.lstat(directory), {0, os.geteuid()}):
                raise InputError(reason, directory)
            write_atomic(path, f"{json.dumps([self._key, self._time])}\n{self._text}", mode=0o600)
        except (OSError, UnicodeError, InputError) as error:
            debug("the nodes are not kept: %s", error)

    def forget(self) -> None:
        """Remove the kept answer, because this user changes the state of the nodes."""
        with suppress(OSError):
            os.unlink(_kept_answer_path())


def query_cluster(backend: str, with_topology: bool = False) -> tuple[ClusterSnapshot, SlurmOutput]:
    """The answer to a `ClusterQuery`; raises as it does."""
    return ClusterQuery(backend, with_topology).answer


def _kept_answer_path() -> str:
    """File in a private directory of the user on this host, in memory if possible."""
    parent = os.environ.get("XDG_RUNTIME_DIR", "")
    return os.path.join(parent if os.path.isdir(parent) else "/tmp", f"slurmdl-{os.geteuid()}", "nodes")


def _answer_key(with_topology: bool) -> str:
    """What identifies the cluster and the query: slurm.conf and its version; "" without the file."""
    path = slurm_conf.slurm_conf_path()
    try:
        status = os.stat(path)
    except OSError:
        return ""
    return f"{path} {status.st_dev} {status.st_ino} {status.st_mtime_ns} {status.st_size} {with_topology}"


def _read_kept_answer(key: str, max_age_s: float) -> tuple[str, float] | None:
    """The text and the time of the kept answer, if only this user or root could write it and it is young enough."""
    try:
        header, _, text = read_trusted_text(_kept_answer_path(), follow_links=False).partition("\n")
        kept_key, started = json.loads(header)
        age_s = time.time() - started
    except (InputError, ValueError, TypeError, RecursionError) as error:
        debug("no kept nodes: %s", error)
        return None
    return (text, started) if kept_key == key and 0 <= age_s <= max_age_s and text else None


def _fetch_with_pyslurm(with_topology: bool = False) -> tuple[ClusterSnapshot, SlurmOutput]:
    """Return the same as the answer of a `ClusterQuery` with scontrol.

    Raises UnavailableError if PySlurm or scontrol is missing, hangs or fails, or PySlurm is of another release.
    """
    from slurmdl.cluster.reader import read_cluster
    from slurmdl.slurm.output import split_output

    worker = process.run_command(process.module_argv("slurmdl.cluster.pyslurm_worker"), name="PySlurm")
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
    import numpy as np

    from slurmdl.cluster.snapshot import NODE_ARRAYS, ClusterSnapshot, NodeProfile

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


def load_cluster_file(path: str, on_warning: Callable[[str], None] = warn) -> ClusterSnapshot:
    """Load a snapshot file: JSON of `ClusterSnapshot.to_json`, or saved text of scontrol and sinfo.

    `on_warning` gets what is skipped or assumed (`read_cluster`). Raises InputError with the file if it cannot
    be read, or has no node.
    """
    from slurmdl.cluster.reader import read_cluster
    from slurmdl.cluster.snapshot import ClusterSnapshot
    from slurmdl.files import read_limited
    from slurmdl.slurm.output import MAX_SAVED_BYTES, Problems, decode_saved_text, split_output

    try:
        with open(path, "rb") as file:  # possibly a pipe: `--cluster <(scontrol -d show nodes)`
            text = decode_saved_text(read_limited(file, path, MAX_SAVED_BYTES), path, on_warning)
        if text.lstrip().startswith("{"):
            snapshot = ClusterSnapshot.from_json(json.loads(text))
        else:
            output = split_output(text, path)
            problems = Problems(output)
            snapshot = read_cluster(output, problems, on_warning)
            if snapshot.names:
                problems.report(on_warning)
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file=path) from error
    except InputError as error:
        raise InputError(str(error), file=path) if error.file is None else error from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not JSON ({error})", file=path) from error
    if not snapshot.names:
        raise InputError("has no node; expected JSON with nodes, the text of `scontrol -d show nodes` and `show "
                         "partitions` (also with -o), or a table of sinfo with NODELIST and STATE", file=path)
    return snapshot
