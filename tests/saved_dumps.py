"""Writers of scontrol's and sinfo's text for tests: generated clusters in the forms that Slurm prints.

Forms of Slurm 22.05 to 26.05: src/api/node_info.c, src/plugins/topology, src/sinfo/print.c.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurmdl.slurm.hostlist import ranged_string
from slurmdl.topology.topology import Topology

NODE_FIELDS = (
    "NodeName={name} Arch=x86_64 CoresPerSocket=64 ", "CPUAlloc={used} CPUEfctv=128 CPUTot=128 CPULoad=0.00",
    "AvailableFeatures=zone{zone},fast", "ActiveFeatures=zone{zone}", "Gres={gres}", "{gres_used}",
    "NodeAddr={name} NodeHostName={name} Version=24.11.5", "OS=Linux 5.14.0 #1 SMP PREEMPT_DYNAMIC ",
    "RealMemory=512000 AllocMem={memory} FreeMem=N/A Sockets=2 Boards=1",
    "State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A", "Partitions=main,all ",
    "BootTime=None SlurmdStartTime=None", "CfgTRES=cpu=128,mem=500G,billing=128{counted}",
    "AllocTRES={allocated}", "CurrentWatts=0 AveWatts=0", "{reason}")
#: states of nodes 1, 2, 3 ... in turn, with CPUs and GPUs in use
STATES = (("IDLE", 0, 0), ("MIXED", 32, 1), ("ALLOCATED", 128, 4), ("IDLE+DRAIN", 0, 0), ("DOWN*", 0, 0),
          ("IDLE~", 0, 0), ("MIXED#", 64, 2), ("IDLE+CLOUD+POWERED_DOWN", 0, 0))
PARTITIONS = ("PartitionName=main AllowGroups=ALL Default=YES State=UP TotalCPUs=1 DefMemPerNode=UNLIMITED "
              "MaxMemPerNode=UNLIMITED\nPartitionName=all AllowGroups=ALL Default=NO State=UP TotalCPUs=1 "
              "DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED\n")


def format_node(number: int, one_line: bool, details: bool = True, gres: str = "gpu:a100:4(S:0-1)",
                counts_gres: bool = True) -> str:
    """Record of node n0001, n0002, ... as `scontrol show nodes` prints it; `details`: with -d."""
    state, used, gpus = STATES[(number - 1) % len(STATES)]
    fields = [part.format(
        name=f"n{number:04d}", used=used, zone=number // 18, gres=gres, memory=used * 100, state=state,
        gres_used=f"GresUsed=gpu:a100:{gpus}(IDX:0-3)" if details else "",
        counted=",gres/gpu=4,gres/gpu:a100=4" * counts_gres,
        allocated=f"cpu={used},mem={used * 100}M"
        + f",gres/gpu={gpus},gres/gpu:a100={gpus}" * (counts_gres and gpus > 0),
        reason="Reason=bad disk = 3 State=IDLE GresUsed=none [root@2026-01-02T03:04:05]" if "DRAIN" in state else "")
        for part in NODE_FIELDS]
    separator = " " if one_line else "\n   "
    return separator.join(field for field in fields if field) + "\n" * (1 if one_line else 2)


def format_show_topology(topology: Topology) -> str:
    """Text of `scontrol show topology` (the same with -o), each zone with all nodes below it."""
    lines = []
    for zone, name in enumerate(topology.zones):
        nodes = ranged_string(topology.nodes[i] for i in topology.indices_below(zone))
        nodes = f" Nodes={nodes}" if nodes else ""
        level = int(topology.level[zone])
        if topology.kind == "tree":
            children = ranged_string(topology.zones[i] for i in np.flatnonzero(topology.parent == zone))
            speed = topology.uplink_bandwidth[zone] * 8 / 1e6
            lines.append(f"SwitchName={name} Level={level} "
                         f"LinkSpeed={1 if np.isnan(speed) else round(speed)}{nodes}"
                         + f" Switches={children}" * bool(children))
        elif topology.kind == "block":
            lines.append(f"{'BlockName' if level == 0 else 'AggregatedBlock'}={name} BlockIndex={zone}{nodes} "
                         f"BlockSize={_block_size(topology, zone)}")
        else:
            lines.append(f"RingName={name}{nodes} RingSize={topology.node_count[zone]}")
    return "".join(f"{line}\n" for line in lines)


def _block_size(topology: Topology, zone: int) -> int:
    """BlockSize of the lowest level whose aggregates may have this many blocks."""
    inside = np.arange(len(topology.zones)) == zone
    for _ in range(int(topology.level.max()) + 1):
        inside |= inside[topology.parent] & (topology.parent >= 0)
    blocks = int((inside & (topology.level == 0)).sum())
    return min(size for size in topology.block_sizes if size >= blocks * topology.block_sizes[0])


def format_sinfo(rows: Sequence[Sequence[str]], widths: Sequence[int], header: Sequence[str]) -> str:
    """A table of sinfo; a negative width is right-justified."""
    return "".join(" ".join(f"{cell:>{-width}}" if width < 0 else f"{cell:{width}}"
                            for cell, width in zip(row, widths, strict=True)).rstrip() + "\n"
                   for row in (header, *rows))
