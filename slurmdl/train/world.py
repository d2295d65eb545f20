"""The world of a rank: MPI startup, and the nodes, zones and roles of all ranks."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from slurmdl import plan as plans
from slurmdl.errors import InvalidOptionsError, InvalidRunError, SlurmdlError, UnavailableError, warn
from slurmdl.text import pluralize
from slurmdl.train.strategy_config import BACKENDS, StrategyConfig, check_compatibility, option_name
from slurmdl.train.transports.mpi import (
    EAGER_LIMIT_VARIABLE,
    MESSAGE_OVERHEAD_BYTES,
    MpiTransport,
    UlfmTransport,
    has_failed_ranks,
    open_mpi_major,
    ulfm_enabled,
    wait_until_ready,
)
from slurmdl.train.transports.torch_distributed import TorchTransport, init_torch, is_torchrun, rank_and_size
from slurmdl.train.transports.transport import CHUNK_BYTES, Transport

#: ranks that are listed one by one
MAX_LISTED_RANKS = 16

#: prefixes of the environment variables of MPI launchers
_MPI_LAUNCHER_PREFIXES = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "MPI_LOCALRANKID", "MV2_COMM_WORLD_", "PALS_", "ALPS_")
#: seconds that rank 0 has for a report before other ranks fail
_REPORT_GRACE_SECONDS = 2.0


@dataclass(frozen=True)
class World:
    """All ranks of a run.

    Attributes:
        transport: between all ranks; its rank is this one.
        config: with `strategy` (a key of STRATEGIES) and `comm_pattern` set.
        nodes, zones, roles: entry i belongs to rank i; a zone is the leaf zone, "" if unknown.
        costs: see plan.Plan; {} without a plan.
    """

    transport: Transport
    config: StrategyConfig
    nodes: tuple[str, ...]
    zones: tuple[str, ...]
    roles: tuple[str, ...]
    costs: Mapping[str, float]

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def strategy(self) -> str:
        return self.config.strategy or ""

    @property
    def comm_pattern(self) -> str:
        """One of plan.COMM_PATTERNS[strategy]."""
        return self.config.comm_pattern or ""

    @property
    def worker_count(self) -> int:
        return len(self.ranks_with_role("worker"))

    @property
    def worker_rank(self) -> int | None:
        """Index of this rank among the workers, None for a server."""
        return None if self.is_server else self.ranks_with_role("worker").index(self.rank)

    @property
    def is_server(self) -> bool:
        """Whether this rank is a parameter server."""
        return self.roles[self.rank] == "ps"

    @property
    def is_main(self) -> bool:
        """Whether this rank is the first alive worker, which logs, evaluates and saves."""
        return self.rank == self.alive_with_role("worker")[0]

    def ranks_with_role(self, role: str) -> tuple[int, ...]:
        return tuple(rank for rank, rank_role in enumerate(self.roles) if rank_role == role)

    def alive_with_role(self, role: str) -> tuple[int, ...]:
        """`ranks_with_role` without failed ranks."""
        return tuple(rank for rank in self.transport.alive_ranks if self.roles[rank] == role)

    def locality_levels(self) -> tuple[str, ...]:
        """See `message_levels`."""
        return message_levels(self.rank, self.nodes, self.zones)

    def format_rank(self, rank: int) -> str:
        """E.g. `rank 3 on node7`."""
        return f"rank {rank} on {self.nodes[rank]}"

    def __str__(self) -> str:
        """Nodes, zones and roles; of many ranks, consecutive ranks of one zone and role are grouped."""
        places = [(f"{zone} {role}".strip(), node)
                  for node, zone, role in zip(self.nodes, self.zones, self.roles, strict=True)]
        if len(places) <= MAX_LISTED_RANKS:
            return ", ".join(f"{rank} {node} ({label})" for rank, (label, node) in enumerate(places))
        parts, start = [], 0
        for label, group in groupby(places, key=lambda place: place[0]):
            nodes = [node for _, node in group]
            span = nodes[0] if len(set(nodes)) == 1 else f"{len(set(nodes))} nodes from {nodes[0]} to {nodes[-1]}"
            parts.append(f"{start} to {start + len(nodes) - 1} on {span} ({label})")
            start += len(nodes)
        return ", ".join(parts)


def message_levels(rank: int, nodes: Sequence[str], zones: Sequence[str]) -> tuple[str, ...]:
    """Locality level (p2p.LOCALITY_LEVELS) of a message to rank i as entry i; nodes without a zone share one."""
    return tuple("intra_node" if node == nodes[rank] else "intra_zone" if zone == zones[rank] else "inter_zone"
                 for node, zone in zip(nodes, zones, strict=True))


def is_rank_zero(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher started this process as rank 0, judged by the environment."""
    names = ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"]
    if torchrun_world_size(environ) > 1:
        names.insert(0 if is_torchrun(environ) else 3, "RANK")
    return next((environ[name] == "0" for name in names if name in environ), True)


def torchrun_world_size(environ: Mapping[str, str] = os.environ) -> int:
    """Number of ranks according to the variables of torchrun; 1 if they are not set."""
    size = environ.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() and "RANK" in environ else 1


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """Slurm's name of this node, else the short host name."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def zone_path(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Zones of this node, root first, from SLURM_TOPOLOGY_ADDR; () if it is not set.

    The address is e.g. `core.leafA.n1` with the pattern `switch.switch.node` (srun(1), OUTPUT ENVIRONMENT
    VARIABLES); levels that a branch of the tree lacks are empty.
    """
    kinds = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    names = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".", len(kinds) - 1)
    return tuple(name for kind, name in zip(kinds, names, strict=False) if kind != "node" and name)


def init_transport(backend: str = "auto", environ: Mapping[str, str] = os.environ,
                   wait_limit_s: float = 0.0) -> MpiTransport | TorchTransport:
    """Connect to the other ranks by a backend, one of BACKENDS.

    `auto` takes what the launch offers: MPI if it is installed and an MPI launcher started the ranks, else
    torch.distributed, e.g. under torchrun, or if Slurm started several tasks without a PMI. A single process needs
    neither, and prefers MPI. `wait_limit_s` is that of the watchdog, 0 for none.
    """
    if backend not in BACKENDS:
        raise InvalidOptionsError(f"--backend {backend!r} is not one of {', '.join(BACKENDS)}")
    if backend == "auto":
        backend = _offered_backend(environ)
    return init_mpi(environ) if backend == "mpi" else init_torch(environ, wait_limit_s)


def _offered_backend(environ: Mapping[str, str]) -> str:
    if is_torchrun(environ):
        return "torch"
    by_mpi = any(name.startswith(_MPI_LAUNCHER_PREFIXES) for name in environ)
    if not by_mpi and has_torch_ranks():  # of torch.multiprocessing.spawn, without variables
        return "torch"
    return "mpi" if (by_mpi or rank_and_size(environ)[1] == 1) and _has_mpi() else "torch"


def has_torch_ranks() -> bool:
    """Whether this process is connected to other ranks by torch.distributed."""
    distributed = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_available() and distributed.is_initialized()
                and distributed.get_world_size() > 1)


def _has_mpi() -> bool:
    """Whether mpi4py finds an MPI library; MPI is not initialized."""
    try:
        import mpi4py
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI  # noqa: F401
    except (ImportError, RuntimeError):
        return False
    return True


def init_mpi(environ: Mapping[str, str] = os.environ) -> MpiTransport:
    """Initialize MPI if necessary and return its transport.

    If Open MPI is initialized here and the environment does not set its TCP eager limit, the limit is raised so that
    chunks are sent eagerly. Raises UnavailableError without MPI, and InvalidRunError if every task has an MPI world
    of its own, e.g. under torchrun or an unsupported PMI of srun.
    """
    try:
        import mpi4py
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UnavailableError(f"no MPI: {error} (needed: an MPI library, pip install 'slurmdl[train]')") from error
    task_counts = (environ.get(name, "") for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
    tasks = next((int(count) for count in task_counts if count.isdigit()), 1)  # 1 outside of Slurm
    if not MPI.Is_initialized():
        _check_launcher(environ)
        lacks_pmix = MPI.Get_library_version().startswith("Open MPI") and not environ.keys() & {
            "PMIX_NAMESPACE", "OMPI_COMM_WORLD_SIZE"}  # set by PMIx and by mpirun
        if tasks > 1 and is_rank_zero(environ) and lacks_pmix:
            warn(f"train: Slurm started {tasks} tasks without PMIx, which Open MPI needs in most builds; if MPI "
                 "cannot start, use `slurmdl srun`, or `srun --mpi=pmix`")
        os.environ.setdefault(EAGER_LIMIT_VARIABLE, str(CHUNK_BYTES + MESSAGE_OVERHEAD_BYTES))
        MPI.Init_thread()
        atexit.register(finalize_mpi)
        wait_until_ready(MPI)
    if MPI.COMM_WORLD.Get_size() == 1 and tasks > 1:
        raise InvalidRunError(f"MPI has 1 rank where Slurm has {tasks} tasks: srun and this MPI do not share a PMI; "
                              "use `slurmdl srun`, or `srun --mpi=pmix` (`srun --mpi=list` lists the plugins), or if "
                              "Slurm has no suitable PMI, `slurmdl srun --step-starter=mpirun` or --backend torch")
    if MPI.COMM_WORLD.Get_size() == 1 and torchrun_world_size(environ) > 1:
        raise _launcher_error(environ)
    return (UlfmTransport if ulfm_enabled(environ) else MpiTransport)(MPI.COMM_WORLD)


def _check_launcher(environ: Mapping[str, str]) -> None:
    """Reject one of several processes started by a launcher other than MPI's.

    MPI would treat each process as a world of one rank, or fail or hang in MPI_Init.
    """
    by_mpi = any(name.startswith(_MPI_LAUNCHER_PREFIXES) for name in environ)
    shared = is_torchrun(environ) and environ.get("LOCAL_WORLD_SIZE", "1") != "1"
    if torchrun_world_size(environ) > 1 and (shared or not by_mpi):
        if not is_rank_zero(environ):
            # the launcher kills all ranks when one exits; rank 0 reports
            time.sleep(_REPORT_GRACE_SECONDS)
        raise _launcher_error(environ)


def _launcher_error(environ: Mapping[str, str]) -> InvalidRunError:
    count = torchrun_world_size(environ)
    processes = f"process{'es' * (count != 1)}"
    culprit = f"torchrun started {count} {processes}" if is_torchrun(environ) else f"WORLD_SIZE={count}"
    return InvalidRunError(
        f"{culprit}, which is no MPI launcher; expected --backend torch, `slurmdl srun python SCRIPT`, "
        f"`srun --mpi=pmix python SCRIPT` or `mpirun -n {count} python SCRIPT`")


def no_recovery_reason(environ: Mapping[str, str] = os.environ) -> str:
    """Reason why the run cannot continue after a rank failure."""
    mpi = sys.modules.get("mpi4py.MPI")
    if not mpi or not mpi.Is_initialized():
        return "the backend torch cannot go on without a rank; MPI with ULFM can"
    name = mpi.Get_library_version().partition(",")[0].replace(" v", " ")
    if open_mpi_major(mpi) >= 5:
        return f"{name} was started without ULFM: slurmdl srun --step-starter=mpirun, or mpirun --with-ft ulfm"
    reason = f"no ULFM in {name}"
    if environ.get("PMIX_NAMESPACE", "").startswith("slurm."):
        reason += "; srun ends them only with --kill-on-bad-exit, which `slurmdl srun` sets for `slurmdl train`"
    return reason


def finalize_mpi() -> None:
    """Finalize MPI if it is initialized and no rank has failed; MPI_Finalize may wait for failed ranks."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized() and not (
            ulfm_enabled() and has_failed_ranks(mpi.COMM_WORLD)):
        mpi.Finalize()


def create_world(config: StrategyConfig, transport: Transport, environ: Mapping[str, str] = os.environ,
                 must_match: Mapping[str, object] | None = None) -> World:
    """Gather the ranks' nodes, zones and options, and choose strategy, roles and communication pattern. Collective.

    The step's plan is used if it matches the ranks and nodes; otherwise it is ignored with a warning, and zones come
    from the tasks' environment. `config` takes precedence over the plan. Raises InvalidOptionsError if the options
    or `must_match`, further values by name, differ between ranks, or if a combination is invalid (COMBINATIONS).
    """
    options_text = {name: str(value) for name, value in {**vars(config), **(must_match or {})}.items()}
    tasks = transport.allgather((node_name(environ), zone_path(environ), options_text))
    first = tasks[0][2]
    for rank, (_, _, options) in enumerate(tasks):
        for name, value in options.items():
            if value != first[name]:
                raise InvalidOptionsError(f"rank {rank} has {option_name(name)} {value} but rank 0 has "
                                          f"{first[name]}: all ranks need the same options")
    nodes = tuple(node for node, _, _ in tasks)
    plan = transport.broadcast(_usable_plan(nodes, environ) if transport.rank == 0 else None)
    zones = tuple(plan.leaf_zone(rank) if plan else "".join(path[-1:]) for rank, (_, path, _) in enumerate(tasks))
    strategy = config.strategy or (plan.strategy if plan else "allreduce")
    roles = _assign_roles(strategy, config.ps, plan, len(nodes))
    config = replace(config, strategy=strategy)
    config = replace(config, comm_pattern=_choose_comm_pattern(config, plan, zones))
    if plan and plan.strategy == strategy and plan.islands and not config.islands:
        config = replace(config, islands=plan.islands)
    check_compatibility(config)
    if config.islands == "zone" and not all(zones):
        unknown = zones.index("")
        raise InvalidOptionsError(f"--islands zone: the zone of rank {unknown} on {nodes[unknown]} is unknown; "
                                  "expected a start by `slurmdl srun`, or topology/tree in Slurm; or --islands node")
    world = World(transport, config, nodes, zones, roles, plan.costs if plan else {})
    if transport.watchdog:
        transport.watchdog.format_rank = world.format_rank
    return world


def _usable_plan(nodes: tuple[str, ...], environ: Mapping[str, str]) -> plans.Plan | None:
    try:
        plan = plans.plan_from_environ(environ)
    except SlurmdlError as error:
        warn(f"train: the plan is ignored: {error}")
        return None
    if plan is None:
        return None
    if len(plan) != len(nodes):
        warn(f"train: the plan is ignored: it is for {pluralize(len(plan), 'rank')}, these are {len(nodes)}")
        return None
    verdict, line = plans.compare_ranks(plan.nodes, dict(enumerate(nodes)))
    warn(line + plans.segments_text(plan, environ) if verdict == "correct" else f"train: the plan is ignored: {line}")
    return plan if verdict == "correct" else None


def _assign_roles(strategy: str, ps: int | None, plan: plans.Plan | None, size: int) -> tuple[str, ...]:
    """Role of every rank: the plan's if its number of servers matches, else servers first."""
    if strategy not in plans.STRATEGIES:
        raise InvalidOptionsError(f"strategy {strategy!r} is not one of {', '.join(plans.STRATEGIES)}")
    if strategy != "ps":
        if ps:
            raise InvalidOptionsError(f"--ps {ps}: strategy {strategy} has no parameter servers; --strategy ps has")
        return ("worker",) * size
    planned = plan.roles.count("ps") if plan else 0
    servers = ps if ps is not None else planned or 1
    if not 0 < servers < size:
        raise InvalidOptionsError(
            f"{servers} parameter servers in {size} ranks: at least 1 server and 1 worker are needed")
    if plan and servers == planned:
        return plan.roles
    return ("ps",) * servers + ("worker",) * (size - servers)


def _choose_comm_pattern(config: StrategyConfig, plan: plans.Plan | None, zones: Sequence[str] = ()) -> str:
    """Communication pattern: configured, else planned for this strategy, else the default."""
    strategy = config.strategy or ""
    valid = plans.COMM_PATTERNS[strategy]
    planned = plan.comm_pattern if plan and plan.strategy == strategy else ""
    multiple_zones = len(set(zones)) > 1 and all(zones)
    pattern = config.comm_pattern or planned or plans.default_pattern(strategy, multiple_zones)
    if pattern not in valid:
        raise InvalidOptionsError(f"--comm-pattern {pattern}: strategy {strategy} has {', '.join(valid)}")
    return pattern
