"""Parse the output of `scontrol show` into a snapshot of the cluster."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from slurmdl.cluster.model import ClusterSnapshot, IntArray, Kind, Partition, Reservation
from slurmdl.errors import InputError
from slurmdl.topology import hostlist

#: KEY=VALUE at the begin of the line or after a blank. The values read here hold no blanks; those that do (OS,
#: Reason, Comment, Extra) are not read, and what people may write freely comes after all that is.
_PAIR = re.compile(r"(?:^| )(\w+)=([^ ]*)")
#: in `show config`, KEY = VALUE on a line of its own
_DEFAULT_MEMORY = re.compile(r"^(DefMemPer(?:CPU|Node)) += (\d+)$", re.MULTILINE)
_SUFFIXES = "*~#!%$@+^-"
_NONE = frozenset(("(null)", "N/A", "n/a"))
#: what stands between the parts of a record without -o; with -o it is a blank
_NEXT_LINE = "\n   "
#: numbers stay far below what 64 bits hold, so that sums of them do, too
_MOST = 2 ** 40


def zones(out: str) -> str:
    """The text of `show topoconf` and `show topology` in the output of a call that shows them."""
    # the zones come last; before them stand nodes, partitions, reservations and the configuration, `KEY = VALUE`,
    # which ends with how the controller is
    lines = _nodes_and_rest(out)[1].split("\n")[:-1]
    before = re.compile(r"(Node|Partition|Reservation)Name=|No reservations|\w+ += |Slurmctld\(")
    last = max((i for i, line in enumerate(lines) if before.match(line)), default=-1)
    return "".join(f"{line}\n" for line in lines[last + 1:] if not line.startswith("scontrol:"))


def parse(text: str) -> ClusterSnapshot:
    """The snapshot in the output of `scontrol -d show nodes`, `show partitions` and `show reservations`.

    Records may have one line each (-o) or several. If a node stands twice, the first record counts. From
    `show config` the default memory of jobs is read. Lines that belong to none of these are passed over.

    Raises
    ------
    InputError : a record has no state, so that the text is cut off or has another form; a list of nodes is malformed.
    """
    text = text.replace(_NEXT_LINE, " ")
    for line in text.split("\n"):
        if line.startswith(("NodeName=", "PartitionName=", "ReservationName=")) and " State=" not in line:
            raise InputError(f"{line.partition(' ')[0]}: the record has no State; valid is the unchanged output of "
                             "`scontrol -d show nodes`, `show partitions` and `show reservations`, also with -o")
    nodes, rest = _nodes_and_rest(text)
    config = dict(_DEFAULT_MEMORY.findall(rest))
    partitions, reservations = [], []
    for line in rest.split("\n"):
        if line.startswith("PartitionName="):
            partitions.append(_partition(_fields(line), config))
        elif line.startswith("ReservationName="):
            reservations.append(_reservation(_fields(line)))
    return _snapshot([line for line in nodes.split("\n") if line.startswith("NodeName=")], partitions, reservations)


def _nodes_and_rest(text: str) -> tuple[str, str]:
    """The text up to the last line of a node, and what comes behind it."""
    last = text.rfind("\nNodeName=")
    if last < 0 and not text.startswith("NodeName="):
        return "", text
    end = text.find("\n", last + 1) + 1 or len(text)
    return text[:end], text[end:]


def _snapshot(lines: Sequence[str], partitions: Sequence[Partition],
              reservations: Sequence[Reservation]) -> ClusterSnapshot:
    """The nodes column by column: in a cluster of thousands few texts differ, and each is looked at once."""
    of_name: dict[str, str] = {}
    for line in lines:
        of_name.setdefault(line.partition(" ")[0], line)
    lines, names = list(of_name.values()), [begin.removeprefix("NodeName=") for begin in of_name]
    kinds: dict[tuple[str, ...], int] = {}
    kind = [kinds.setdefault(texts, len(kinds)) for texts in zip(
        *(_column(lines, key) for key in ("State", "ActiveFeatures", "Gres", "GresUsed", "Partitions")), strict=True)]
    cpus = _numbers(_column(lines, "CPUEfctv"))
    cpus = np.where(cpus > 0, cpus, _numbers(_column(lines, "CPUTot")))
    memory = np.maximum(0, _numbers(_column(lines, "RealMemory")) - _numbers(_column(lines, "MemSpecLimit")))
    return ClusterSnapshot(
        tuple(names), np.array(kind, np.int32), tuple(_kind(*texts) for texts in kinds), cpus,
        np.maximum(0, cpus - _numbers(_column(lines, "CPUAlloc"))), memory,
        np.maximum(0, memory - _numbers(_column(lines, "AllocMem"))), _numbers(_column(lines, "Weight")),
        tuple(partitions), tuple(reservations))


def _column(lines: Sequence[str], key: str) -> list[str]:
    """The value of one key in each line, "" where it has none; as `_fields` reads it, for a key within the line."""
    begin = f" {key}="
    return [line.partition(begin)[2].partition(" ")[0] for line in lines]


def _fields(line: str) -> dict[str, str]:
    """Key -> value. Of a key that stands twice the first counts: `Reason=broken State=IDLE` is no state."""
    fields: dict[str, str] = {}
    for key, value in _PAIR.findall(line):
        fields.setdefault(key, "" if value in _NONE else value)
    return fields


def _kind(state: str, features: str, gres: str, gres_used: str, partitions: str) -> Kind:
    parts = tuple(part.rstrip(_SUFFIXES) for part in state.split("+") if part) or ("UNKNOWN",)
    return Kind(parts, "*" not in state and "NOT_RESPONDING" not in parts, _words(features), _words(partitions),
                tuple(_gres(gres).items()), tuple(_gres(gres_used).items()))


def _reservation(fields: dict[str, str]) -> Reservation:
    return Reservation(fields["ReservationName"], tuple(hostlist.expand(fields.get("Nodes", ""))),
                       fields.get("State") == "ACTIVE")


def _partition(fields: dict[str, str], config: dict[str, str]) -> Partition:
    # a partition shows UNLIMITED where the cluster's own default holds
    own = {key: value for key, value in fields.items() if key.startswith("DefMemPer") and value.isdigit()}
    default = own or config
    # Slurm 26.05 has a key of its own for whole nodes, beside OverSubscribe=NO
    share = "EXCLUSIVE" if fields.get("Exclusive") == "NODE" else fields.get("OverSubscribe", "NO")
    return Partition(fields["PartitionName"], fields.get("Default") == "YES", fields.get("State", "UP"),
                     share, _number(default.get("DefMemPerCPU", "")) or None,
                     _number(default.get("DefMemPerNode", "")) or None, fields.get("Topology", ""),
                     _number(fields.get("PriorityTier", "1")))


def _gres(text: str) -> dict[str, int]:
    """`gpu:a100:4(S:0-1),tmp:1K` -> {"gpu:a100": 4, "tmp": 1024}; index lists and sockets are dropped.

    The same name and type may stand several times, once for each set of cores; the counts are added.
    """
    counts: dict[str, int] = {}
    if text in _NONE:
        return counts
    for part in re.sub(r"\([^)]*\)", "", text).replace(":no_consume", "").split(","):
        match = re.fullmatch(r"(.+?)(?::([0-9]{1,15})([KMGTP]?))?", part.strip())
        if match:
            count = int(match[2] or 1) * 1024 ** " KMGTP".index(match[3] or " ")
            counts[match[1]] = min(_MOST, counts.get(match[1], 0) + count)
    return counts


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word and word not in _NONE)


def _numbers(texts: Sequence[str]) -> IntArray:
    # few texts differ
    numbers = {text: _number(text) for text in set(texts)}
    return np.array([numbers[text] for text in texts], np.int64)


def _number(text: str) -> int:
    match = re.match(r"[0-9]{1,15}", text)
    return min(_MOST, int(match[0])) if match else 0
