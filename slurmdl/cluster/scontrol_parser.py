"""Parse the output of `scontrol show` into a snapshot of the cluster."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from slurmdl.cluster.snapshot import ClusterSnapshot, IntArray, NodeProfile, Partition, Reservation
from slurmdl.errors import InputError
from slurmdl.slurm import hostlist

#: KEY=VALUE at the begin of the line or after a blank. The values read here hold no blanks; those that do (OS,
#: Reason, Comment, Extra) are not read, and what people may write freely comes after all that is.
_KEY_VALUE = re.compile(r"(?:^| )(\w+)=([^ ]*)")
#: in `show config`, KEY = VALUE on a line of its own
_DEFAULT_MEMORY_LINE = re.compile(r"^(DefMemPer(?:CPU|Node)) += (\d+)$", re.MULTILINE)
_STATE_SUFFIXES = "*~#!%$@+^-"
_NULL_VALUES = frozenset(("(null)", "N/A", "n/a"))
#: what stands between the parts of a record without -o; with -o it is a blank
_CONTINUATION = "\n   "
#: numbers stay far below what 64 bits hold, so that sums of them do, too
_MAX_NUMBER = 2 ** 40


def topology_text(output: str) -> str:
    """The text of `show topoconf` and `show topology` in the output of a call that shows them."""
    # the zones come last; before them stand nodes, partitions, reservations and the configuration, `KEY = VALUE`,
    # which ends with how the controller is
    lines = _split_after_nodes(output)[1].split("\n")[:-1]
    before = re.compile(r"(Node|Partition|Reservation)Name=|No reservations|\w+ += |Slurmctld\(")
    last = max((i for i, line in enumerate(lines) if before.match(line)), default=-1)
    return "".join(f"{line}\n" for line in lines[last + 1:] if not line.startswith("scontrol:"))


def parse_snapshot(text: str) -> ClusterSnapshot:
    """The snapshot in the output of `scontrol -d show nodes`, `show partitions` and `show reservations`.

    Records may have one line each (-o) or several. If a node stands twice, the first record counts. From
    `show config` the default memory of jobs is read. Lines that belong to none of these are passed over.

    Raises
    ------
    InputError : a record has no state, so that the text is cut off or has another form; a list of nodes is malformed.
    """
    text = text.replace(_CONTINUATION, " ")
    for line in text.split("\n"):
        if line.startswith(("NodeName=", "PartitionName=", "ReservationName=")) and " State=" not in line:
            raise InputError(f"{line.partition(' ')[0]}: the record has no State; valid is the unchanged output of "
                             "`scontrol -d show nodes`, `show partitions` and `show reservations`, also with -o")
    nodes, rest = _split_after_nodes(text)
    config = dict(_DEFAULT_MEMORY_LINE.findall(rest))
    partitions, reservations = [], []
    for line in rest.split("\n"):
        if line.startswith("PartitionName="):
            partitions.append(_parse_partition(_parse_fields(line), config))
        elif line.startswith("ReservationName="):
            reservations.append(_parse_reservation(_parse_fields(line)))
    return _build_snapshot([line for line in nodes.split(
        "\n") if line.startswith("NodeName=")], partitions, reservations)


def _split_after_nodes(text: str) -> tuple[str, str]:
    """The text up to the last line of a node, and what comes behind it."""
    last = text.rfind("\nNodeName=")
    if last < 0 and not text.startswith("NodeName="):
        return "", text
    end = text.find("\n", last + 1) + 1 or len(text)
    return text[:end], text[end:]


def _build_snapshot(lines: Sequence[str], partitions: Sequence[Partition],
              reservations: Sequence[Reservation]) -> ClusterSnapshot:
    """The nodes column by column: in a cluster of thousands few texts differ, and each is looked at once."""
    of_name: dict[str, str] = {}
    for line in lines:
        of_name.setdefault(line.partition(" ")[0], line)
    lines, names = list(of_name.values()), [begin.removeprefix("NodeName=") for begin in of_name]
    kinds: dict[tuple[str, ...], int] = {}
    kind = [kinds.setdefault(texts, len(kinds)) for texts in zip(
        *(_column(lines, key) for key in ("State", "ActiveFeatures", "Gres", "GresUsed", "Partitions")), strict=True)]
    cpus = _parse_numbers(_column(lines, "CPUEfctv"))
    cpus = np.where(cpus > 0, cpus, _parse_numbers(_column(lines, "CPUTot")))
    memory = np.maximum(
    0,
    _parse_numbers(
        _column(
            lines,
            "RealMemory")) -
            _parse_numbers(
                _column(
                    lines,
                     "MemSpecLimit")))
    return ClusterSnapshot(
        tuple(names), np.array(kind, np.int32), tuple(_parse_profile(*texts) for texts in kinds), cpus,
        np.maximum(0, cpus - _parse_numbers(_column(lines, "CPUAlloc"))), memory,
        np.maximum(0, memory - _parse_numbers(_column(lines, "AllocMem"))), _parse_numbers(_column(lines, "Weight")),
        tuple(partitions), tuple(reservations))


def _column(lines: Sequence[str], key: str) -> list[str]:
    """The value of one key in each line, "" where it has none; as `_fields` reads it, for a key within the line."""
    begin = f" {key}="
    return [line.partition(begin)[2].partition(" ")[0] for line in lines]


def _parse_fields(line: str) -> dict[str, str]:
    """Key -> value. Of a key that stands twice the first counts: `Reason=broken State=IDLE` is no state."""
    fields: dict[str, str] = {}
    for key, value in _KEY_VALUE.findall(line):
        fields.setdefault(key, "" if value in _NULL_VALUES else value)
    return fields


def _parse_profile(state: str, features: str, gres: str, gres_used: str, partitions: str) -> NodeProfile:
    parts = tuple(part.rstrip(_STATE_SUFFIXES) for part in state.split("+") if part) or ("UNKNOWN",)
    return NodeProfile(parts, "*" not in state and "NOT_RESPONDING" not in parts, _split_list(features), _split_list(partitions),
                tuple(_parse_gres(gres).items()), tuple(_parse_gres(gres_used).items()))


def _parse_reservation(fields: dict[str, str]) -> Reservation:
    return Reservation(fields["ReservationName"], tuple(hostlist.expand_hostlist(fields.get("Nodes", ""))),
                       fields.get("State") == "ACTIVE")


def _parse_partition(fields: dict[str, str], config: dict[str, str]) -> Partition:
    # a partition shows UNLIMITED where the cluster's own default holds
    own = {key: value for key, value in fields.items() if key.startswith("DefMemPer") and value.isdigit()}
    default = own or config
    # Slurm 26.05 has a key of its own for whole nodes, beside OverSubscribe=NO
    share = "EXCLUSIVE" if fields.get("Exclusive") == "NODE" else fields.get("OverSubscribe", "NO")
    return Partition(fields["PartitionName"], fields.get("Default") == "YES", fields.get("State", "UP"),
                     share, _parse_number(default.get("DefMemPerCPU", "")) or None,
                     _parse_number(default.get("DefMemPerNode", "")) or None, fields.get("Topology", ""),
                     _parse_number(fields.get("PriorityTier", "1")))


def _parse_gres(text: str) -> dict[str, int]:
    """`gpu:a100:4(S:0-1),tmp:1K` -> {"gpu:a100": 4, "tmp": 1024}; index lists and sockets are dropped.

    The same name and type may stand several times, once for each set of cores; the counts are added.
    """
    counts: dict[str, int] = {}
    if text in _NULL_VALUES:
        return counts
    for part in re.sub(r"\([^)]*\)", "", text).replace(":no_consume", "").split(","):
        match = re.fullmatch(r"(.+?)(?::([0-9]{1,15})([KMGTP]?))?", part.strip())
        if match:
            count = int(match[2] or 1) * 1024 ** " KMGTP".index(match[3] or " ")
            counts[match[1]] = min(_MAX_NUMBER, counts.get(match[1], 0) + count)
    return counts


def _split_list(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word and word not in _NULL_VALUES)


def _parse_numbers(texts: Sequence[str]) -> IntArray:
    # few texts differ
    numbers = {text: _parse_number(text) for text in set(texts)}
    return np.array([numbers[text] for text in texts], np.int64)


def _parse_number(text: str) -> int:
    match = re.match(r"[0-9]{1,15}", text)
    return min(_MAX_NUMBER, int(match[0])) if match else 0
