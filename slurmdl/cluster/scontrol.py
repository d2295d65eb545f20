"""One bounded call of scontrol for all that is read from the controller, and the reader of its text."""

from __future__ import annotations

import re

from slurmdl import process
from slurmdl.cluster.model import ClusterSnapshot, Node, Partition
from slurmdl.errors import UnavailableError

#: KEY=VALUE at the begin of the line or after a blank. The values read here hold no blanks; those that do (OS,
#: Reason, Comment, Extra) are not read, and what people may write freely comes after all that is.
_PAIR = re.compile(r"(?:^|\s)(\w+)=(\S*)")
#: in `show config`, KEY = VALUE on a line of its own
_DEFAULT_MEMORY = re.compile(r"^(DefMemPer(?:CPU|Node)) += (\d+)$", re.MULTILINE)
_SUFFIXES = "*~#!%$@+^-"


def fetch(with_topology: bool = False) -> tuple[ClusterSnapshot, str]:
    """Nodes, partitions and defaults, and what scontrol says of the zones where wanted, from one call of it.

    The sub-commands are given on its standard input, so that they share one process and one time limit. One
    that fails does not lose the others: without partitions or topology a snapshot of the nodes remains.

    Returns
    -------
    the snapshot, and the text of `scontrol show topoconf` and `show topology` ("" where not wanted or not available).

    Raises
    ------
    UnavailableError : scontrol is missing, hangs, or gives no node.
    """
    wanted = ["show nodes", "show partitions", "show config"] + ["show topoconf", "show topology"] * with_topology
    answer = process.ask(["scontrol", "-o", "-d"], stdin="".join(f"{command}\n" for command in wanted))
    snapshot = parse(answer.out)
    if not snapshot.names:
        raise UnavailableError(f"scontrol: {answer.first_error or 'gives no node'}")
    # the zones come last; before them stand nodes, partitions and the configuration, `KEY = VALUE` on its lines
    lines = answer.out.splitlines() if with_topology else []
    last = max((i for i, line in enumerate(lines) if re.match(r"(Node|Partition)Name=|\w+ += ", line)), default=-1)
    return snapshot, "".join(f"{line}\n" for line in lines[last + 1:] if not line.startswith("scontrol:"))


def snapshot() -> ClusterSnapshot:
    """The nodes and partitions of the cluster now."""
    return fetch()[0]


def parse(text: str) -> ClusterSnapshot:
    """The snapshot in the output of `scontrol -o -d show nodes` and `show partitions`, one record a line.

    Of `show config` the default memory of jobs is read. Lines that are none of these are passed over.
    """
    nodes: dict[str, Node] = {}
    partitions: list[Partition] = []
    config = dict(_DEFAULT_MEMORY.findall(text))
    for line in text.splitlines():
        if line.startswith("NodeName="):
            node = _node(_fields(line))
            nodes.setdefault(node.name, node)
        elif line.startswith("PartitionName="):
            partitions.append(_partition(_fields(line), config))
    return ClusterSnapshot.of(nodes.values(), partitions)


def _fields(line: str) -> dict[str, str]:
    """Key -> value. Of a key that stands twice the first counts: `Reason=broken State=IDLE` is no state."""
    fields: dict[str, str] = {}
    for key, value in _PAIR.findall(line):
        fields.setdefault(key, "" if value in ("(null)", "N/A", "n/a") else value)
    return fields


def _node(fields: dict[str, str]) -> Node:
    state = tuple(part.rstrip(_SUFFIXES) for part in fields.get("State", "UNKNOWN").split("+") if part)
    cpus = _number(fields.get("CPUEfctv") or fields.get("CPUTot", ""))
    memory = _number(fields.get("RealMemory", "")) - _number(fields.get("MemSpecLimit", ""))
    return Node(
        name=fields["NodeName"],
        state=state,
        responding="*" not in fields.get("State", "") and "NOT_RESPONDING" not in state,
        cpus=cpus,
        cpus_free=max(0, cpus - _number(fields.get("CPUAlloc", ""))),
        memory=memory,
        memory_free=max(0, memory - _number(fields.get("AllocMem", ""))),
        features=_words(fields.get("ActiveFeatures", "")),
        partitions=_words(fields.get("Partitions", "")),
        gres=_gres(fields.get("Gres", "")),
        gres_used=_gres(fields.get("GresUsed", "")),
        weight=_number(fields.get("Weight", "1")),
    )


def _partition(fields: dict[str, str], config: dict[str, str]) -> Partition:
    # a partition shows UNLIMITED where the cluster's own default holds
    own = {key: value for key, value in fields.items() if key.startswith("DefMemPer") and value.isdigit()}
    default = own or config
    return Partition(fields["PartitionName"], fields.get("Default") == "YES", fields.get("State", "UP"),
                     fields.get("OverSubscribe", "NO"), _number(default.get("DefMemPerCPU", "")) or None,
                     _number(default.get("DefMemPerNode", "")) or None, fields.get("Topology", ""))


def _gres(text: str) -> dict[str, int]:
    """`gpu:a100:4(S:0-1),tmp:1K` -> {"gpu:a100": 4, "tmp": 1024}; index lists and sockets are dropped.

    The same name and type may stand several times, once for each set of cores; the counts are added.
    """
    counts: dict[str, int] = {}
    for part in re.sub(r"\([^)]*\)", "", text).replace(":no_consume", "").split(","):
        match = re.fullmatch(r"(.+?)(?::(\d+)([KMGTP]?))?", part.strip())
        if match:
            count = int(match[2] or 1) * 1024 ** " KMGTP".index(match[3] or " ")
            counts[match[1]] = counts.get(match[1], 0) + count
    return counts


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _number(text: str) -> int:
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0
