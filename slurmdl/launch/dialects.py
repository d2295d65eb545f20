"""A rank map in the words of other launchers, for those who start their tasks themselves.

Each text is read back before it is handed out: it must give every rank the node of the plan, rank 0 that of the
master among them.

`shell` is for the plugin of slurmdl in Slurm: what `srun --dl-map` reads, for `eval` in a job script.

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
from slurmdl.plan import Plan


@dataclass(frozen=True)
class Tasks:
    """A rank map, and what the launchers need beside it.

    Attributes
    ----------
    plan : node and role of each rank.
    nodes : distinct nodes in Slurm's order, in which launchers number the tasks by default.
    cpus_per_task : CPUs of each task.
    port : port on the node of rank 0, the master.
    job : number of the job whose map it is.
    variables : what the tasks are given, as step.task_variables makes it.
    """

    plan: Plan
    nodes: Sequence[str]
    cpus_per_task: int = 1
    port: int = 0
    job: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)

    def ranks(self) -> dict[str, list[int]]:
        """Node -> its ranks, in the order of `nodes`."""
        found: dict[str, list[int]] = {node: [] for node in self.nodes}
        for rank, node in enumerate(self.plan.nodes):
            found[node].append(rank)
        return found

    def runs(self) -> list[tuple[str, int]]:
        """The node and the length of each run of ranks on one node."""
        return [(node, len(list(run))) for node, run in groupby(self.plan.nodes)]


def render(form: str, tasks: Tasks) -> str:
    """The text for a launcher.

    Parameters
    ----------
    form : one of FORMATS.

    Raises
    ------
    PlacementError : the launcher cannot express this map.
    """
    write, read = FORMATS[form]
    text = write(tasks)
    if tuple(read(text, tasks)) != tasks.plan.nodes:
        raise PlacementError(f"--print-map={form}: the text would not put every rank on its node")
    return text


def hostfile(plan: Plan) -> str:
    """Line i is the node of rank i: SLURM_HOSTFILE, and Open MPI's host file under --map-by seq."""
    return "".join(f"{node}\n" for node in plan.nodes)


def _lines(tasks: Tasks) -> str:
    return hostfile(tasks.plan)


def _read_lines(text: str, tasks: Tasks) -> list[str]:
    return text.splitlines()


def _rankfile(tasks: Tasks) -> str:
    """The tasks of a node take its CPUs one after the other, `cpus_per_task` each."""
    seen: dict[str, int] = {}
    lines = []
    for rank, node in enumerate(tasks.plan.nodes):
        first = seen.get(node, 0)
        seen[node] = first + tasks.cpus_per_task
        last = first + tasks.cpus_per_task - 1
        lines.append(f"rank {rank}={node} slot={first if first == last else f'{first}-{last}'}\n")
    return "".join(lines)


def _read_rankfile(text: str, tasks: Tasks) -> list[str]:
    found = {int(rank): node for rank, node in re.findall(r"^rank (\d+)=(\S+) slot=", text, re.MULTILINE)}
    return [found[rank] for rank in sorted(found)]


def _rank_order(tasks: Tasks) -> str:
    """The ranks of each node, node by node in the order in which Slurm starts the tasks."""
    return "".join(",".join(map(str, ranks)) + "\n" for ranks in tasks.ranks().values())


def _read_rank_order(text: str, tasks: Tasks) -> list[str]:
    slots = [node for node, ranks in tasks.ranks().items() for _ in ranks]
    ranks = [int(rank) for rank in text.replace("\n", ",").split(",") if rank]
    found = dict(zip(ranks, slots, strict=True))
    return [found[rank] for rank in sorted(found)]


def _machinefile(tasks: Tasks) -> str:
    """NODE:COUNT for each run of ranks on one node; Hydra, which Intel MPI uses too, gives out ranks line by line."""
    return "".join(f"{node}:{count}\n" for node, count in tasks.runs())


def _read_machinefile(text: str, tasks: Tasks) -> list[str]:
    pairs = [line.rpartition(":") for line in text.splitlines()]
    return [node for node, _, count in pairs for _ in range(int(count))]


def _torchrun(tasks: Tasks) -> str:
    """For each node a line `NODE OPTIONS`: rank = node_rank * nproc_per_node + local rank."""
    runs = tasks.runs()
    counts = sorted({count for _, count in runs})
    if len(runs) > len(set(tasks.plan.nodes)):
        raise PlacementError("--print-map=torchrun: the ranks of a node do not stand together; valid: every other "
                             "format")
    if len(counts) > 1:
        raise PlacementError(f"--print-map=torchrun: nodes with {counts[0]} and with {counts[-1]} tasks; "
                             "valid: the same number on each")
    return "".join(f"{node} --nnodes={len(runs)} --node_rank={number} --nproc_per_node={count} "
                   f"--master_addr={runs[0][0]} --master_port={tasks.port}\n"
                   for number, (node, count) in enumerate(runs))


def _read_torchrun(text: str, tasks: Tasks) -> list[str]:
    lines = re.findall(r"^(\S+) --nnodes=\d+ --node_rank=(\d+) --nproc_per_node=(\d+) ", text, re.MULTILINE)
    return [node for node, _, count in sorted(lines, key=lambda line: int(line[1])) for _ in range(int(count))]


#: longest value of one variable, with its name before it (execve(2), MAX_ARG_STRLEN)
_MAX_VARIABLE = 128 * 1024
#: variable of a map -> that of the step's tasks which it becomes
_OF_MAP = {"SLURMDL_MAP_PS_RANKS": "SLURMDL_PS_RANKS", "SLURMDL_MAP_ZONE_RANKS": "SLURMDL_ZONE_RANKS",
           "SLURMDL_MAP_PLAN": "SLURMDL_PLAN"}


def _shell(tasks: Tasks) -> str:
    """Exports of one map; what it does not have is unset, so that nothing of a map before stays."""
    nodes = ",".join(node if count == 1 else f"{node}(x{count})" for node, count in tasks.runs())
    values = {"SLURMDL_MAP_JOB": str(tasks.job), "SLURMDL_MAP_NODES": nodes}
    values.update({name: tasks.variables[of] for name, of in _OF_MAP.items() if of in tasks.variables})
    for name, value in values.items():
        if len(name) + len(value) + 2 > _MAX_VARIABLE:
            raise PlacementError(f"--print-map=shell: {name} is longer than a variable can be; valid: every other "
                                 "format")
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in values.items()]
    return "".join([*lines, *(f"unset {name}\n" for name in _OF_MAP if name not in values)])


def _read_shell(text: str, tasks: Tasks) -> list[str]:
    values = dict(word.split("=", 1) for word in shlex.split(text) if "=" in word)
    pairs = re.findall(r"([^,(]+)(?:\(x([0-9]+)\))?(?:,|$)", values["SLURMDL_MAP_NODES"])
    return [node for node, count in pairs for _ in range(int(count or 1))]


#: name -> how the text is written, and how the node of each rank is read from it
FORMATS: Mapping[str, tuple[Callable[[Tasks], str], Callable[[str, Tasks], list[str]]]] = {
    "slurm-hostfile": (_lines, _read_lines),
    "openmpi-rankfile": (_rankfile, _read_rankfile),
    "openmpi-seq": (_lines, _read_lines),
    "mpich-rank-order": (_rank_order, _read_rank_order),
    "intel-machinefile": (_machinefile, _read_machinefile),
    "hydra-hostfile": (_machinefile, _read_machinefile),
    "torchrun": (_torchrun, _read_torchrun),
    "shell": (_shell, _read_shell),
}
