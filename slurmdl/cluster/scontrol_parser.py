"""Parse the output of `scontrol show` into a cluster snapshot."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from slurmdl.cluster.snapshot import MAX_NUMBER, ClusterSnapshot, IntArray, NodeProfile, Partition, Reservation
from slurmdl.errors import InputError
from slurmdl.slurm import hostlist

#: KEY=VALUE at the beginning of the line or after a blank. Values with blanks (OS, Reason, Comment, Extra) are not
#: used, and free text comes after all used keys.
_KEY_VALUE = re.compile(r"(?:^| )(\w+)=([^ ]*)")
#: beginnings of the used keys of `show config`
CONFIG_KEYS = ("ClusterName", "DefMemPer")
_STATE_SUFFIXES = "*~#!%$@+^-"
_NULL_VALUES = frozenset(("(null)", "N/A", "n/a"))
_CONTINUATION = "\n   "  # between the parts of a record; a blank with -o


def topology_text(output: str) -> str:
    """Return the output of `show topoconf` and `show topology` in the output of a combined call."""
    # zones come last, after nodes, partitions, reservations and the configuration (`KEY = VALUE`, controller state)
    lines = output[max(0, output.rfind("\nNodeName=")):].split("\n")[:-1]
    before = re.compile(r"(Node|Partition|Reservation)Name=|No reservations|\w+ += |Slurmctld\(")
    last = max((i for i, line in enumerate(lines) if before.match(line)), default=-1)
    return "".join(f"{line}\n" for line in lines[last + 1:] if not line.startswith("scontrol:"))


def parse_snapshot(text: str) -> ClusterSnapshot:
    """Parse the output of `scontrol -d show nodes`, `show partitions`, `show reservations` and `show config`.

    Records have one line each (-o) or several. The first of duplicate node records counts. `show config` provides the
    cluster's name and the default memory of jobs. Other lines are ignored. Raises InputError if a record has no State
    (truncated or other text), or a hostlist is malformed.
    """
    config: dict[str, str] = {}
    records: dict[str, list[str]] = {"NodeName": [], "PartitionName": [], "ReservationName": []}
    for line in text.replace(_CONTINUATION, " ").split("\n"):
        key, _, value = line.partition("=")
        if key in records:
            if " State=" not in value:
                raise InputError(f"{line.partition(' ')[0]}: no State; expected the unchanged output of "
                                 "`scontrol -d show nodes`, `show partitions` and `show reservations`, also with -o")
            records[key].append(line)
        elif key.startswith(CONFIG_KEYS):
            config[key.strip()] = value.strip()
    reservations = [parse_reservation(line) for line in records["ReservationName"]]
    return build_snapshot(records["NodeName"], [parse_partition(line, config) for line in records["PartitionName"]],
                          reservations, config.get("ClusterName", ""))


def build_snapshot(lines: Sequence[str], partitions: Sequence[Partition],
                   reservations: Sequence[Reservation], name: str = "") -> ClusterSnapshot:
    """Return the snapshot of node records of one line each; the first of duplicate nodes counts.

    The arrays are built column by column; each distinct text is parsed once.
    """
    line_of_name: dict[str, str] = {}
    for line in lines:
        line_of_name.setdefault(line.partition(" ")[0].removeprefix("NodeName="), line)
    lines = list(line_of_name.values())
    profiles: dict[tuple[str, ...], int] = {}
    profile_index = [profiles.setdefault(texts, len(profiles)) for texts in zip(
        *(record_column(lines, key) for key in ("State", "ActiveFeatures", "Gres", "GresUsed", "Partitions")),
        strict=True)]

    def numbers(key: str) -> IntArray:
        return _parse_numbers(record_column(lines, key))

    cpus = numbers("CPUEfctv")
    if not cpus.all():
        cpus = np.where(cpus > 0, cpus, numbers("CPUTot"))
    memory = np.maximum(0, numbers("RealMemory") - numbers("MemSpecLimit"))
    return ClusterSnapshot(
        tuple(line_of_name), np.array(profile_index, np.int32),
        tuple(_parse_profile(*texts) for texts in profiles), cpus,
        np.maximum(0, cpus - numbers("CPUAlloc")), memory, np.maximum(0, memory - numbers("AllocMem")),
        numbers("Weight"), tuple(partitions), tuple(reservations), name)


def record_column(lines: Sequence[str], key: str) -> list[str]:
    """Return the value of one key in each record of one line, "" if absent; the first key of a record is none."""
    prefix = f" {key}="
    return [line.partition(prefix)[2].partition(" ")[0] for line in lines]


def _parse_fields(line: str) -> dict[str, str]:
    """Return values by key. The first of duplicate keys counts: `Reason=broken State=IDLE` is no state."""
    fields: dict[str, str] = {}
    for key, value in _KEY_VALUE.findall(line):
        fields.setdefault(key, "" if value in _NULL_VALUES else value)
    return fields


def _parse_profile(state: str, features: str, gres: str, gres_used: str, partitions: str) -> NodeProfile:
    parts = tuple(part.rstrip(_STATE_SUFFIXES) for part in state.split("+") if part) or ("UNKNOWN",)
    responding = "*" not in state and "NOT_RESPONDING" not in parts
    return NodeProfile(parts, responding, _split_list(features), _split_list(partitions),
                       tuple(parse_gres(gres).items()), tuple(parse_gres(gres_used).items()))


def parse_reservation(line: str) -> Reservation:
    """Parse a record of one line; InputError if its hostlist is malformed."""
    fields = _parse_fields(line)
    return Reservation(fields["ReservationName"], tuple(hostlist.expand_hostlist(fields.get("Nodes", ""))),
                       fields.get("State") == "ACTIVE")


def parse_partition(line: str, config: dict[str, str]) -> Partition:
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


def parse_gres(text: str) -> dict[str, int]:
    """Parse `gpu:a100:4(S:0-1),tmp:1K` -> {"gpu:a100": 4, "tmp": 1024}; indices and sockets are ignored.

    Repeated names, one per set of cores, are summed.
    """
    counts: dict[str, int] = {}
    if text in _NULL_VALUES:
        return counts
    for part in re.sub(r"\([^)]*\)", "", text).replace(":no_consume", "").split(","):
        match = re.fullmatch(r"(.+?)(?::([0-9]{1,15})([KMGTP]?))?", part.strip())
        if match:
            count = int(match[2] or 1) * 1024 ** " KMGTP".index(match[3] or " ")
            counts[match[1]] = min(MAX_NUMBER, counts.get(match[1], 0) + count)
    return counts


def _split_list(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word and word not in _NULL_VALUES)


def _parse_numbers(texts: Sequence[str]) -> IntArray:
    numbers = {text: _parse_number(text) for text in set(texts)}
    if len(numbers) == 1:
        return np.full(len(texts), next(iter(numbers.values())), np.int64)
    return np.fromiter(map(numbers.__getitem__, texts), np.int64, len(texts))


def _parse_number(text: str) -> int:
    match = re.match(r"[0-9]{1,15}", text)
    return min(MAX_NUMBER, int(match[0])) if match else 0
