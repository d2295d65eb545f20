"""Nodes, partitions and reservations as `scontrol show` prints them, of the running cluster or in saved text."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence

import numpy as np

from slurmdl.cluster.snapshot import (
    MAX_NUMBER,
    NULL_VALUES,
    ClusterSnapshot,
    IntArray,
    NodeProfile,
    Partition,
    Reservation,
    parse_gres,
)
from slurmdl.errors import InputError, OnError, raise_error
from slurmdl.slurm import hostlist
from slurmdl.slurm.output import SlurmOutput, split_output
from slurmdl.text import pluralize

#: KEY=VALUE at the beginning of the line or after a blank. Values with blanks (OS, Reason, Comment, Extra) are not
#: used, and free text comes after all used keys.
_KEY_VALUE = re.compile(r"(?:^| )(\w+)=([^ ]*)")
_STATE_SUFFIXES = "*~#!%$@+^-"
#: a field of the last line of a record: a record without it is cut off if others have it
_LAST_FIELDS = {"NodeName": " CfgTRES=", "PartitionName": " MaxMemPer", "ReservationName": " State="}


def parse_snapshot(text: str) -> ClusterSnapshot:
    """Parse the output of the running cluster; see `read_cluster`."""
    return read_cluster(split_output(text))


def read_cluster(output: SlurmOutput, on_error: OnError = raise_error,
                 on_warning: Callable[[str], None] | None = None) -> ClusterSnapshot:
    """Return the snapshot in the output of `scontrol -d show nodes`, `show partitions` and so on, and of sinfo.

    Records have one line each (-o) or several; the first of duplicate node records counts. `show config` provides the
    cluster's name and the default memory of jobs. The states of tables of sinfo replace those of scontrol.

    Args:
        on_error: gets each record without State or its last fields (cut off, or other text), and each malformed
            hostlist; the record is skipped if it returns.
        on_warning: gets the assumptions for what saved text may lack; None for the output of the running cluster.
    """
    nodes, partitions, records = (_complete_records(output, key, on_error) for key in _LAST_FIELDS)
    reservations = []
    for index, line in records:
        fields = _parse_fields(line)
        try:
            reservations.append(Reservation(fields["ReservationName"],
                                            tuple(hostlist.expand_hostlist(fields.get("Nodes", ""))),
                                            fields.get("State") == "ACTIVE"))
        except InputError as error:
            on_error(output.error(index, line, str(error)))
    lines = [line for _, line in nodes]
    snapshot = _build_snapshot(_with_gres_used(lines, output.file, on_warning) if on_warning else lines,
                               [_parse_partition(line, output.config) for _, line in partitions], reservations,
                               output.config.get("ClusterName", ""))
    if not output.tables or not on_warning:
        return snapshot
    from slurmdl.cluster.sinfo_parser import read_sinfo_tables  # only in saved text

    return read_sinfo_tables(output, on_error, on_warning).merge_over(snapshot)


def _complete_records(output: SlurmOutput, key: str, on_error: OnError) -> list[tuple[int, str]]:
    """Return the records of a key that have a State, without a last one of saved text that is cut off."""
    records, last_field = output.records[key], _LAST_FIELDS[key]
    if output.file and len(records) > 1 and last_field in records[0][1] and last_field not in records[-1][1]:
        on_error(output.error(*records[-1], "the record is cut off"))
        records = records[:-1]
    complete = []
    for index, line in records:
        if " State=" in line:
            complete.append((index, line))
        else:
            on_error(output.error(index, line, "the record has no State; expected the unchanged output of `scontrol "
                                               "-d show nodes`, `show partitions` or `show reservations`"))
    return complete


def _build_snapshot(lines: Sequence[str], partitions: Sequence[Partition],
                    reservations: Sequence[Reservation], name: str) -> ClusterSnapshot:
    """Return the snapshot of node records of one line each; the first of duplicate nodes counts.

    The arrays are built column by column; each distinct text is parsed once.
    """
    line_of_name: dict[str, str] = {}
    for line in lines:
        line_of_name.setdefault(line.partition(" ")[0].removeprefix("NodeName="), line)
    lines = list(line_of_name.values())
    profiles: dict[tuple[str, ...], int] = {}
    profile_index = [profiles.setdefault(texts, len(profiles)) for texts in zip(
        *(_record_column(lines, key) for key in ("State", "ActiveFeatures", "Gres", "GresUsed", "Partitions")),
        strict=True)]

    def numbers(key: str) -> IntArray:
        texts = _record_column(lines, key)
        parsed = {text: _parse_number(text) for text in set(texts)}
        return np.fromiter(map(parsed.__getitem__, texts), np.int64, len(texts))

    cpus = numbers("CPUEfctv")
    if not cpus.all():
        cpus = np.where(cpus > 0, cpus, numbers("CPUTot"))
    memory = np.maximum(0, numbers("RealMemory") - numbers("MemSpecLimit"))
    return ClusterSnapshot(
        tuple(line_of_name), np.array(profile_index, np.int32),
        tuple(_parse_profile(*texts) for texts in profiles), cpus,
        np.maximum(0, cpus - numbers("CPUAlloc")), memory, np.maximum(0, memory - numbers("AllocMem")),
        numbers("Weight"), tuple(partitions), tuple(reservations), name)


def _record_column(lines: Sequence[str], key: str) -> list[str]:
    """Return the value of one key in each record of one line, "" if absent; the first key of a record is none."""
    prefix = f" {key}="
    return [line.partition(prefix)[2].partition(" ")[0] for line in lines]


def _with_gres_used(lines: list[str], file: str, on_warning: Callable[[str], None]) -> list[str]:
    """Return node records with GresUsed, which `scontrol show nodes` has with -d only.

    It follows from AllocTRES if the cluster counts the resource (AccountingStorageTRES). Otherwise a node in use has
    no free resources of this kind.
    """
    result, from_tres, assumed = list(lines), 0, 0
    # GresUsed is before State; after it, a reason may hold the same words
    for i in [i for i, line in enumerate(lines) if line.find(" GresUsed=", 0, line.find(" State=")) < 0]:
        line, _, rest = lines[i].partition(" State=")
        gres, state, configured, allocated = (_record_column([lines[i]], key)[0]
                                              for key in ("Gres", "State", "CfgTRES", "AllocTRES"))
        if gres in ("", "(null)"):
            continue
        used, is_assumed = _gres_used(gres, state, configured, allocated)
        from_tres, assumed = from_tres + (not is_assumed), assumed + is_assumed
        result[i] = f"{line} GresUsed={used} State={rest}"
    if from_tres:
        on_warning(f"{file}: {pluralize(from_tres, 'node')} without GresUsed (scontrol without -d); used generic "
                   "resources are those of AllocTRES")
    if assumed:
        on_warning(f"{file}: {pluralize(assumed, 'node')} without GresUsed (scontrol without -d), or the same in "
                   "CfgTRES; nodes in use count as without free generic resources")
    return result


def _gres_used(gres: str, state: str, configured: str, allocated: str) -> tuple[str, bool]:
    """Return the value of GresUsed, and whether it is an assumption."""
    counted = dict(part.partition("=")[::2] for part in allocated.split(",") if part.startswith("gres/"))
    total = parse_gres(gres)
    is_in_use = any(flag.startswith(("ALLOC", "MIX", "COMPLETING")) for flag in state.split("+"))
    used: list[str] = []
    is_assumed = False
    for kind in dict.fromkeys(name.partition(":")[0] for name in total):
        names = [name for name in total if name.partition(":")[0] == kind]
        of_kind = counted.get(f"gres/{kind}", "0")
        if all(f"gres/{name}=" in configured for name in names):
            used += [f"{name}:{counted.get(f'gres/{name}', '0')}" for name in names]
        elif f"gres/{kind}=" in configured and (len(names) == 1 or of_kind == "0"):
            used += [f"{name}:{of_kind}" for name in names]
        else:
            is_assumed = True
            used += [f"{name}:{total[name] if is_in_use else 0}" for name in names]
    return ",".join(used), is_assumed


def _parse_fields(line: str) -> dict[str, str]:
    """Return values by key. The first of duplicate keys counts: `Reason=broken State=IDLE` is no state."""
    fields: dict[str, str] = {}
    for key, value in _KEY_VALUE.findall(line):
        fields.setdefault(key, "" if value in NULL_VALUES else value)
    return fields


def _parse_profile(state: str, features: str, gres: str, gres_used: str, partitions: str) -> NodeProfile:
    return NodeProfile(*_parse_state(state), _split_list(features), _split_list(partitions), _gres_items(gres),
                       _gres_items(gres_used))


# many profiles have the same texts
@functools.cache
def _parse_state(text: str) -> tuple[tuple[str, ...], bool]:
    parts = tuple(part.rstrip(_STATE_SUFFIXES) for part in text.split("+") if part) or ("UNKNOWN",)
    return parts, "*" not in text and "NOT_RESPONDING" not in parts


@functools.cache
def _gres_items(text: str) -> tuple[tuple[str, int], ...]:
    return tuple(parse_gres(text).items())


def _parse_partition(line: str, config: dict[str, str]) -> Partition:
    """Parse a record of one line; `config` has the cluster's DefMemPerCPU and DefMemPerNode."""
    fields = _parse_fields(line)
    # UNLIMITED: the cluster's default applies
    limits = {key: value for key, value in fields.items() if key.startswith("DefMemPer") and value.isdigit()}
    default = limits or config
    # Slurm 26.05 has Exclusive=NODE next to OverSubscribe=NO
    oversubscribe = "EXCLUSIVE" if fields.get("Exclusive") == "NODE" else fields.get("OverSubscribe", "NO")
    return Partition(fields["PartitionName"], fields.get("Default") == "YES", fields.get("State", "UP"),
                     oversubscribe, _parse_number(default.get("DefMemPerCPU", "")) or None,
                     _parse_number(default.get("DefMemPerNode", "")) or None, fields.get("Topology", ""),
                     _parse_number(fields.get("PriorityTier", "1")))


@functools.cache
def _split_list(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word and word not in NULL_VALUES)


def _parse_number(text: str) -> int:
    match = re.match(r"[0-9]{1,15}", text)
    return min(MAX_NUMBER, int(match[0])) if match else 0
