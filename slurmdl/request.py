"""What the user asked for: sbatch's options as far as placement depends on them, and the --dl-* options."""

from __future__ import annotations

from dataclasses import dataclass, field

PLACES = ("pack", "balance", "spread")
BINDS = ("auto", "pin", "zone", "late", "off")


@dataclass(frozen=True)
class DlOptions:
    """The --dl-* options after precedence (script < environment < command line).

    Attributes
    ----------
    strategy : one of plan.STRATEGIES.
    ps : number of parameter servers (0 unless the strategy is ps).
    place : one of PLACES.
    bind : one of BINDS.
    zone : zones that the job may use; () for any.
    model_bytes : bytes that one replica of the parameters takes.
    traffic, scores : files or URLs, None / "auto" where not given.
    """

    strategy: str = "allreduce"
    ps: int = 0
    place: str = "pack"
    bind: str = "auto"
    zone: tuple[str, ...] = ()
    model_bytes: float = 100e6
    traffic: str | None = None
    scores: str = "auto"
    explain: bool = False
    dry_run: bool = False
    strict: bool = False


@dataclass(frozen=True)
class JobRequest:
    """One submission, as far as placement depends on it. None means: not given.

    Attributes
    ----------
    nodes : (least, most) number of nodes; most is None for an open range.
    ntasks, ntasks_per_node, cpus_per_task : counts.
    memory_per_node, memory_per_cpu : MB; 0 = all of the node.
    partitions : partitions named with -p, () for the default one.
    constraint : the text of --constraint.
    exclude, nodelist : hostlists, already expanded.
    gres_per_node : name or name:type -> count.
    exclusive : the job wants whole nodes.
    unpinnable : why the node choice cannot be pinned or preferred ("job array", "heterogeneous job", ...), "" else.
    requeue : the job may be requeued (Slurm's default).
    """

    dl: DlOptions = field(default_factory=DlOptions)
    nodes: tuple[int, int | None] | None = None
    ntasks: int | None = None
    ntasks_per_node: int | None = None
    cpus_per_task: int | None = None
    memory_per_node: int | None = None
    memory_per_cpu: int | None = None
    partitions: tuple[str, ...] = ()
    constraint: str | None = None
    exclude: tuple[str, ...] = ()
    nodelist: tuple[str, ...] = ()
    gres_per_node: dict[str, int] = field(default_factory=dict)
    exclusive: bool = False
    reservation: str | None = None
    unpinnable: str = ""
    requeue: bool = True
