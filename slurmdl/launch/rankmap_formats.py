"""Rank maps in the formats of other launchers.

Each text is parsed again before it is returned: it must put every rank on its node of the plan.

Two formats are for `eval` in a job script: `shell` has the variables of `srun --dl-rank-map`, for slurmdl's Slurm
plugin; `env` has the plan and the master address, for `slurmdl env` in each task.

Sources: srun(1), SLURM_HOSTFILE; mpirun(1) of Open MPI, --rankfile and --map-by seq; intro_mpi(3) of HPE Cray MPI,
MPICH_RANK_REORDER_METHOD; Intel MPI Library Developer Reference, -machinefile; MPICH, Using the Hydra Process
Manager, host files; PyTorch, torchrun.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from slurmdl.errors import PlacementError
from slurmdl.plan import Plan, decode_plan, encode_plan


@dataclass(frozen=True)
class RankMapInput:
    """A rank map and further inputs of the launchers.

    Attributes:
        plan: node and role of each rank.
        nodes: distinct nodes in Slurm's order, the default order of launchers.
        master_port: port on the node of rank 0.
        task_variables: result of step_command.task_variables.
    """

    plan: Plan
    nodes: Sequence[str]
    cpus_per_task: int = 1
    master_port: int = 0
    job_id: int = 0
    task_variables: Mapping[str, str] = field(default_factory=dict)

    def ranks_by_node(self) -> dict[str, list[int]]:
        """Node -> its ranks, in the order of `nodes`."""
        ranks: dict[str, list[int]] = {node: [] for node in self.nodes}
        for rank, node in enumerate(self.plan.nodes):
            ranks[node].append(rank)
        return ranks

    def node_runs(self) -> list[tuple[str, int]]:
        """The node and the length of each run of ranks on one node."""
        return [(node, len(list(run))) for node, run in groupby(self.plan.nodes)]


def format_rank_map(format_name: str, map_input: RankMapInput) -> str:
    """The text for a launcher, in one of FORMATS; PlacementError if the format cannot express this map."""
    format_text, parse_text = FORMATS[format_name]
    text = format_text(map_input)
    if tuple(parse_text(text, map_input)) != map_input.plan.nodes:
        raise PlacementError(f"--print-rank-map={format_name}: the text would not put every rank on its node")
    return text


def _format_rankfile(map_input: RankMapInput) -> str:
    """Each task of a node gets the next `cpus_per_task` CPUs."""
    next_cpu: dict[str, int] = {}
    lines = []
    for rank, node in enumerate(map_input.plan.nodes):
        first = next_cpu.get(node, 0)
        last = first + map_input.cpus_per_task - 1
        next_cpu[node] = last + 1
        lines.append(f"rank {rank}={node} slot={first if first == last else f'{first}-{last}'}\n")
    return "".join(lines)


def _parse_rankfile(text: str, map_input: RankMapInput) -> list[str]:
    nodes = {int(rank): node for rank, node in re.findall(r"^rank (\d+)=(\S+) slot=", text, re.MULTILINE)}
    return [nodes[rank] for rank in sorted(nodes)]


def _format_rank_order(map_input: RankMapInput) -> str:
    """The ranks of each node, in the order in which Slurm starts the tasks."""
    return "".join(",".join(map(str, ranks)) + "\n" for ranks in map_input.ranks_by_node().values())


def _parse_rank_order(text: str, map_input: RankMapInput) -> list[str]:
    slots = [node for node, ranks in map_input.ranks_by_node().items() for _ in ranks]
    ranks = [int(rank) for rank in text.replace("\n", ",").split(",") if rank]
    nodes = dict(zip(ranks, slots, strict=True))
    return [nodes[rank] for rank in sorted(nodes)]


def _format_machinefile(map_input: RankMapInput) -> str:
    """NODE:COUNT for each run of ranks on one node; Hydra (also in Intel MPI) assigns ranks line by line."""
    return "".join(f"{node}:{count}\n" for node, count in map_input.node_runs())


def _parse_machinefile(text: str, map_input: RankMapInput) -> list[str]:
    pairs = [line.rpartition(":") for line in text.splitlines()]
    return [node for node, _, count in pairs for _ in range(int(count))]


def _format_torchrun(map_input: RankMapInput) -> str:
    """A line `NODE OPTIONS` per node: rank = node_rank * nproc_per_node + local rank."""
    runs = map_input.node_runs()
    counts = sorted({count for _, count in runs})
    if len(runs) > len(set(map_input.plan.nodes)):
        raise PlacementError("--print-rank-map=torchrun: the ranks of a node are not consecutive; expected another "
                             "format")
    if len(counts) > 1:
        raise PlacementError(f"--print-rank-map=torchrun: nodes with {counts[0]} and with {counts[-1]} tasks; "
                             "expected the same number on each")
    return "".join(f"{node} --nnodes={len(runs)} --node_rank={number} --nproc_per_node={count} "
                   f"--master_addr={runs[0][0]} --master_port={map_input.master_port}\n"
                   for number, (node, count) in enumerate(runs))


def _parse_torchrun(text: str, map_input: RankMapInput) -> list[str]:
    lines = re.findall(r"^(\S+) --nnodes=\d+ --node_rank=(\d+) --nproc_per_node=(\d+) ", text, re.MULTILINE)
    return [node for node, _, count in sorted(lines, key=lambda line: int(line[1])) for _ in range(int(count))]


#: maximum length of a variable with its name (execve(2), MAX_ARG_STRLEN)
_MAX_VARIABLE_BYTES = 128 * 1024
#: variable of a rank map -> variable of the tasks
_TASK_VARIABLES = {"SLURMDL_RANKMAP_ROLE_RANKS": "SLURMDL_ROLE_RANKS",
                   "SLURMDL_RANKMAP_ZONE_RANKS": "SLURMDL_ZONE_RANKS", "SLURMDL_RANKMAP_PLAN": "SLURMDL_PLAN"}


def _format_shell(map_input: RankMapInput) -> str:
    """Export the variables of the map, and unset those of a previous map."""
    nodes = ",".join(node if count == 1 else f"{node}(x{count})" for node, count in map_input.node_runs())
    values = {"SLURMDL_RANKMAP_JOB": str(map_input.job_id), "SLURMDL_RANKMAP_NODES": nodes}
    values.update({name: map_input.task_variables[task_name] for name, task_name in _TASK_VARIABLES.items()
                   if task_name in map_input.task_variables})
    for name, value in values.items():
        if len(name) + len(value) + 2 > _MAX_VARIABLE_BYTES:
            raise PlacementError(f"--print-rank-map=shell: {name} is longer than a variable can be; expected "
                                 "another format")
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in values.items()]
    return "".join([*lines, *(f"unset {name}\n" for name in _TASK_VARIABLES if name not in values)])


def _parse_shell(text: str, map_input: RankMapInput) -> list[str]:
    values = dict(word.split("=", 1) for word in shlex.split(text) if "=" in word)
    pairs = re.findall(r"([^,(]+)(?:\(x([0-9]+)\))?(?:,|$)", values["SLURMDL_RANKMAP_NODES"])
    return [node for node, count in pairs for _ in range(int(count or 1))]


def _format_env(map_input: RankMapInput) -> str:
    """Export the plan and the address of rank 0."""
    plan = map_input.task_variables.get("SLURMDL_PLAN") or encode_plan(map_input.plan)
    values = {"SLURMDL_PLAN": plan, "MASTER_ADDR": map_input.plan.nodes[0],
              "MASTER_PORT": str(map_input.master_port)}
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())


def _parse_env(text: str, map_input: RankMapInput) -> Sequence[str]:
    values = dict(word.split("=", 1) for word in shlex.split(text) if "=" in word)
    return decode_plan(values["SLURMDL_PLAN"]).nodes


#: a function that formats the text, and one that parses the node of each rank from it
_Format = tuple[Callable[[RankMapInput], str], Callable[[str, RankMapInput], Sequence[str]]]
#: line i is the node of rank i
_HOSTFILE: _Format = (lambda map_input: "".join(f"{node}\n" for node in map_input.plan.nodes),
                      lambda text, _: text.splitlines())
FORMATS: Mapping[str, _Format] = {
    "slurm-hostfile": _HOSTFILE,
    "openmpi-rankfile": (_format_rankfile, _parse_rankfile),
    "openmpi-seq": _HOSTFILE,
    "mpich-rank-order": (_format_rank_order, _parse_rank_order),
    "intel-machinefile": (_format_machinefile, _parse_machinefile),
    "hydra-hostfile": (_format_machinefile, _parse_machinefile),
    "torchrun": (_format_torchrun, _parse_torchrun),
    "shell": (_format_shell, _parse_shell),
    "env": (_format_env, _parse_env),
}
