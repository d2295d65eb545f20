"""One bounded call of scontrol for all that is read from the controller, and the reader of its text."""

from __future__ import annotations

import re

from slurmdl import process
from slurmdl.cluster.model import ClusterSnapshot, Node, Partition
from slurmdl.errors import UnavailableError

#: keys of `scontrol -o -d show nodes`, 22.05 to 26.05. Values may hold blanks (OS, Reason, Comment, Extra),
#: so a value ends where the next of these begins, and of a key that stands twice the first counts: what
#: users and administrators may write freely comes last in the line.
_NODE_KEYS = frozenset("""
    NodeName Arch CoresPerSocket CPUAlloc CPUEfctv CPUTot CPULoad AvailableFeatures ActiveFeatures Gres GresDrain
    GresUsed NodeAddr NodeHostName Port Version OS RealMemory AllocMem FreeMem Sockets Boards CoreSpecCount
    CPUSpecList MemSpecLimit State NextState ThreadsPerCore TmpDisk Weight Owner MCS_label Partitions BootTime
    SlurmdStartTime LastBusyTime ResumeAfterTime CfgTRES AllocTRES CapWatts CurrentWatts AveWatts ExtSensorsJoules
    ExtSensorsWatts ExtSensorsTemp Reason Comment Extra InstanceId InstanceType ReservationName BcastAddr
    Topology CertFlags GpuSpec RestrictedCoresPerGPU Parameters DynamicNode""".split())
_KEY = re.compile(r"(?:^|\s)(\w+)=")
_SUFFIXES = "*~#!%$@+^-"


def fetch(with_topology: bool = False) -> tuple[ClusterSnapshot, str]:
    """Nodes and partitions, and the text of `show topology` where wanted, from one call of scontrol.

    The sub-commands are given on its standard input, so that they share one process and one time limit. One
    that fails does not lose the others: without partitions or topology a snapshot of the nodes remains.

    Returns
    -------
    the snapshot, and the text of `scontrol show topology` ("" where not wanted or not available).

    Raises
    ------
    UnavailableError : scontrol is missing, hangs, or gives no node.
    """
    wanted = ["show nodes", "show partitions"] + ["show topology"] * with_topology
    answer = process.ask(["scontrol", "-o", "-d"], stdin="".join(f"{command}\n" for command in wanted))
    snapshot = parse(answer.out)
    if not snapshot.nodes:
        raise UnavailableError(f"scontrol: {answer.first_error or 'gives no node'}")
    zones = [line for line in answer.out.splitlines() if re.match(r"(SwitchName|BlockName)=", line)]
    return snapshot, "".join(f"{line}\n" for line in zones)


def snapshot() -> ClusterSnapshot:
    """The nodes and partitions of the cluster now."""
    return fetch()[0]


def parse(text: str) -> ClusterSnapshot:
    """The snapshot in the output of `scontrol -o -d show nodes` and `show partitions`, one record a line.

    Lines that are neither (prompts, messages, zones) are passed over.
    """
    nodes, partitions = [], []
    for line in text.splitlines():
        if line.startswith("NodeName="):
            nodes.append(_node(_fields(line, _NODE_KEYS)))
        elif line.startswith("PartitionName="):
            partitions.append(_partition(_fields(line)))
    return ClusterSnapshot(tuple(nodes), tuple(partitions))


def _fields(line: str, known: frozenset[str] = frozenset()) -> dict[str, str]:
    """Key -> value; where `known` is given a value reaches to the next known key, else to the next key."""
    keys = [match for match in _KEY.finditer(line) if not known or match[1] in known]
    fields: dict[str, str] = {}
    for match, following in zip(keys, [*keys[1:], None], strict=True):
        value = line[match.end():following.start() if following else len(line)].strip()
        fields.setdefault(match[1], "" if value in ("(null)", "N/A", "n/a") else value)
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


def _partition(fields: dict[str, str]) -> Partition:
    return Partition(fields["PartitionName"], fields.get("Default") == "YES", fields.get("State", "UP"),
                     fields.get("OverSubscribe", "NO"))


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
