"""`slurmdl srun`: the rank map of the allocation that Slurm really gave, and the step that starts in that order.

Everything is made anew at each start, so a job that was requeued onto other nodes gets the map of those.
What cannot be mapped runs as the user wrote it, with one line on stderr that says why.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slurmdl import config, dl_options, getopt, process, units
from slurmdl.dl_options import DlOptions
from slurmdl.errors import (
    InputError,
    PlacementError,
    SlurmdlError,
    TrainError,
    UnavailableError,
    UsageError,
    nearest_first,
    warn,
)
from slurmdl.launch import allocation, dialects, late, layout, mark, srun_options, step, survey
from slurmdl.launch.step import Inline, Step
from slurmdl.output import show

if TYPE_CHECKING:
    from slurmdl.network.model import LinkScores
    from slurmdl.placement.model import RankMap
    from slurmdl.plan import Plan
    from slurmdl.topology.model import Topology

LAUNCHERS = ("srun", "mpirun")
#: how often, and seconds between, it is looked whether other steps of the job run
_LOOKS, _BETWEEN_LOOKS = 3, 0.3
_LONG: dict[str, getopt.Takes] = {**srun_options.LONG, **dl_options.LONG, **dict.fromkeys(srun_options.OURS, "yes")}


@dataclass(frozen=True)
class Controller:
    """What the controller's configuration says that decides how srun behaves.

    Attributes
    ----------
    version : (major, minor), e.g. (22, 5).
    packs : tasks fill a node before the next one (CR_Pack_Nodes).
    mpi : MpiDefault.
    plugins : directories of Slurm's plugins.
    zones : whether its topology plugin has zones.
    """

    version: tuple[int, int]
    packs: bool
    mpi: str
    plugins: tuple[str, ...]
    zones: bool

    @classmethod
    def parse(cls, text: str) -> Controller:
        """From the output of `scontrol show config`; InputError where that has no version."""
        keys = process.pairs(text)
        numbers = keys.get("SLURM_VERSION", "").split(".")
        if len(numbers) < 2 or not (numbers[0].isdigit() and numbers[1].isdigit()):
            raise InputError("scontrol show config: no SLURM_VERSION in its answer")
        return cls((int(numbers[0]), int(numbers[1])), "PACK_NODES" in keys.get("SelectTypeParameters", "").upper(),
                   keys.get("MpiDefault", ""), tuple(keys.get("PluginDir", "").split(":")),
                   keys.get("TopologyPlugin", "") not in ("topology/none", "topology/default", "topology/flat"))

    def has_pmi(self, name: str) -> bool:
        """Whether Slurm has the plugin of a PMI here, as mpi_pmix.so."""
        return any(os.path.exists(f"{folder}/mpi_{name}.so") for folder in self.plugins)

    def cpus_per_task(self, environ: Mapping[str, str]) -> int | None:
        """What srun takes from the environment: SRUN_CPUS_PER_TASK up to 23.02, SLURM_CPUS_PER_TASK since 23.11."""
        name = "SLURM_CPUS_PER_TASK" if self.version >= (23, 11) else "SRUN_CPUS_PER_TASK"
        value = environ.get(name, "")
        return int(value) if value.isdigit() and int(value) else None


@dataclass(frozen=True)
class Mapped:
    """A step that is mapped, with what the explanation tells of it, and why it has no zones ("" where it has).

    `text` is the map as --print-map wants it, "" where it is not asked for; `heard` are lines on the scores that
    mattered; `assumed` says on what the predictions rest.
    """

    step: Step
    text: str
    plan: Plan
    map: RankMap
    source: str
    complaint: str = ""
    heard: tuple[str, ...] = ()
    assumed: str = ""


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Replace this process by srun (or mpirun), so that signals and the exit status are its own.

    Returns only after a dry run, after --print-map, which starts nothing, and where mpirun had to be overheard.

    Raises
    ------
    UsageError : outside a job, or an unknown --dl-* option, launcher, format or value.
    PlacementError : the step cannot be mapped, and --dl-strict is given.
    UnavailableError : there is no srun, or no mpirun where that is asked for.
    TrainError : mpirun has lost a node.
    """
    line = getopt.parse(argv, srun_options.SHORT, _LONG)
    chosen = dl_options.settings(line.options)
    launcher = line.last("launcher") or "srun"
    if launcher not in LAUNCHERS:
        raise UsageError(f"--launcher: {launcher!r} is not valid; valid: {', '.join(LAUNCHERS)}")
    form = line.last("print-map")
    if line.has("print-map") and form not in dialects.FORMATS:
        valid = nearest_first(form or "", list(dialects.FORMATS))
        raise UsageError(f"--print-map: {form or ''!r} is not valid; valid: {', '.join(valid)}")
    if not environ.get("SLURM_JOB_ID"):
        allocation.read(environ)
    plain = Step(("srun", *_without_ours(argv, line)), unset=step.leftovers(environ))
    asks_srun = any(line.has(name) for name in srun_options.PASSED) or line.last("mpi") == "list"
    if asks_srun or not (line.operands or form):
        return _start(plain, environ)
    settings, marked, complaint = _given(environ)
    news = marked.news(environ) if marked else environ
    dl = dl_options.merge(settings.options, _requested(marked), dl_options.from_environment(news), chosen)
    # nothing of ours is said where the user wants nothing said
    say: Callable[[str], None] = (lambda _: None) if line.has("quiet") else warn
    misplaced = dl_options.misplaced(line.operands, "program")
    if misplaced:
        say(misplaced)
    chosen_step = plain
    try:
        if complaint is not None:
            raise complaint
        known = None
        if marked and marked.asked:
            environ = late.unchosen(environ, marked.asked)
            environ, known = _trimmed(marked, marked.asked, dl, settings, environ, say)
        mapped = _map(line, dl, settings, launcher, environ, say, known)
        chosen_step = mapped.step
        master = _other_master(mapped.plan, environ)
        if master:
            say(f"MASTER_ADDR={master} is another node than that of rank 0, which is {mapped.plan.nodes[0]}")
        if mapped.complaint:
            say(f"{mapped.complaint}; ranks in the order of the node names")
        if dl.explain:
            _explain(mapped)
        if form:
            print(mapped.text, end="")
            return 0
    except SlurmdlError as error:
        if dl.strict or launcher != "srun" or form:
            raise
        say(f"{error}; the step runs in srun's own order")
    except Exception as error:
        # a fault of ours must not cost the user the step
        if dl.strict or launcher != "srun" or form:
            raise
        if environ.get("SLURMDL_DEBUG") == "1":
            traceback.print_exc()
        say(f"internal error: {type(error).__name__}: {error}; the step runs in srun's own order")
    if dl.dry_run:
        _show(chosen_step)
        return 0
    return _start(chosen_step, environ)


def _without_ours(argv: Sequence[str], line: getopt.CommandLine) -> list[str]:
    """The user's words as they stand, without our options."""
    ours = {option.index + i for option in line.options
            if option.name.startswith("dl-") or option.name in srun_options.OURS for i in range(len(option.words))}
    return [word for i, word in enumerate(argv) if i not in ours]


def _given(environ: Mapping[str, str]) -> tuple[config.Config, mark.Mark | None, InputError | None]:
    """The configuration, what `slurmdl sbatch` left for this job, and what is malformed in them."""
    try:
        return config.load(), mark.read(environ), None
    except InputError as error:
        return config.Config(), None, error


def _requested(marked: mark.Mark | None) -> dict[str, str]:
    """The settings of the submission that hold for its steps."""
    if marked is None:
        return {}
    dl = marked.dl
    flags = {name: "" for name, on in (("explain", dl.explain), ("strict", dl.strict)) if on}
    return {"strategy": dl.strategy, "ps": str(dl.ps), "model_bytes": str(dl.model_bytes), "scores": dl.scores,
            "probe": dl.probe, "rank0": dl.rank0, **({"traffic": dl.traffic} if dl.traffic else {}), **flags}


def _map(line: getopt.CommandLine, dl: DlOptions, settings: config.Config, launcher: str,
         environ: Mapping[str, str], say: Callable[[str], None], known: LinkScores | None) -> Mapped:
    """The step, mapped by the scores that are known already, else by those that there are."""
    given = allocation.read(environ)
    controller = Controller.parse(process.query(["scontrol", "show", "config"]))
    if controller.packs:
        raise PlacementError("SelectTypeParameters has CR_Pack_Nodes: its layout is not mapped")
    request = layout.read(line, environ, controller.cpus_per_task(environ))
    laid = layout.layout(given, request)
    if laid.if_alone and _others_run(given.job):
        raise PlacementError("other steps of the job run: which nodes and CPUs are left is Slurm's choice")
    topology, complaint = _zones(controller, given.nodes, environ.get("SLURM_JOB_PARTITION", ""), dl.strict)
    scores = _scores(dl, settings, given.nodes, topology, environ, say) if known is None else known
    plan, rank_map = _plan(laid, topology, scores, dl)
    heard = _heard(rank_map, given.nodes, topology, scores) if dl.explain and scores.measured else ()
    assumptions = _assumed(dl, topology, scores) if dl.explain else ""
    text = environ.get("SLURM_ARRAY_TASK_ID", "")
    array_task = int(text) if text.isdigit() else 0
    form = line.last("print-map")
    variables = step.task_variables(plan, given.job, array_task, settings.plan_dir or ".slurmdl") \
        if form in (None, "shell") else {}
    if form:
        tasks = dialects.Tasks(plan, [node for node, _ in laid.slots], request.cpus_per_task or 1,
                               step.port(given.job, array_task), given.job, variables)
        return Mapped(Step(()), dialects.render(form, tasks), plan, rank_map, topology.source, complaint, heard,
                      assumptions)
    if launcher == "mpirun":
        if shutil.which("mpirun", path=environ.get("PATH")) is None:
            raise UnavailableError("--launcher=mpirun: mpirun is not in PATH")
        made = step.mpirun(line, plan, variables, environ, _has_ulfm(environ))
    else:
        together = [*mpi_option(line, controller, environ), *_end_option(line, environ)]
        made = step.srun(line, plan, together, variables, environ)
    return Mapped(made, "", plan, rank_map, topology.source, complaint, heard,
                      assumptions)


def _has_ulfm(environ: Mapping[str, str]) -> bool:
    """Whether the mpirun in PATH is Open MPI's from 5.0 on, whose ranks may go on without one that is lost."""
    told = re.match(r"mpi\w+ \(Open MPI\) (\d+)", process.ask(["mpirun", "--version"], env=environ).out)
    return told is not None and int(told[1]) >= 5


def _scores(dl: DlOptions, settings: config.Config, nodes: Sequence[str], topology: Topology,
            environ: Mapping[str, str], say: Callable[[str], None]) -> LinkScores:
    """What is known of the links, and what a probe of the job's nodes adds where that is asked for."""
    scores = survey.link_scores(settings, dl.scores, say, dl.strict)
    if dl.probe == "0":
        return scores
    from slurmdl.launch import probing

    return probing.refreshed(scores, nodes, topology, float(dl.probe), environ, say)


def _assumed(dl: DlOptions, topology: Topology, scores: LinkScores) -> str:
    from slurmdl.placement import assumed

    return assumed.text(dl, topology, scores)


def _heard(ranks: RankMap, nodes: Sequence[str], topology: Topology, scores: LinkScores) -> tuple[str, ...]:
    from slurmdl.placement import scored

    told = scored.lines(scored.of_step(ranks, nodes, topology, scores), scores)
    return tuple(" ".join(line.split()) for line in told)


def _trimmed(marked: mark.Mark, asked: mark.Asked, dl: DlOptions, settings: config.Config, environ: Mapping[str, str],
             say: Callable[[str], None]) -> tuple[dict[str, str], LinkScores | None]:
    """The environment of a job that asked for more nodes than it needs, on the best of its nodes (see late), and the
    scores that these were chosen by, None where nothing had to be chosen."""
    used: list[LinkScores] = []

    def choose(held: late.Held) -> Sequence[str]:
        from slurmdl.launch import matrices
        from slurmdl.placement.keep import keep
        from slurmdl.request import JobRequest

        controller = Controller.parse(process.query(["scontrol", "show", "config"]))
        topology, _ = _zones(controller, held.nodes, environ.get("SLURM_JOB_PARTITION", ""), dl.strict)
        wanted = JobRequest(replace(dl, place=marked.dl.place), (asked.nodes, asked.nodes), asked.tasks,
                            asked.tasks_per_node)
        used.append(_scores(dl, settings, held.nodes, topology, environ, say))
        return keep(held.nodes, wanted, held.batch, topology, used[0], matrices.of(dl))

    return late.trim(environ, asked, choose, _others_run, say, dry_run=dl.dry_run), used[0] if used else None


def _others_run(job: int) -> bool:
    """Whether a step other than the batch script and its like runs in the job.

    One whose srun has just ended is listed a moment longer on a busy controller, so a step that is seen is looked
    for again.
    """
    for look in range(_LOOKS):
        time.sleep(_BETWEEN_LOOKS if look else 0.0)
        steps = process.query(["squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i"]).split()
        if not any(name.rpartition(".")[2].isdigit() for name in steps):
            return False
    return True


def _zones(controller: Controller, nodes: Sequence[str], partition: str, strict: bool) -> tuple[Topology, str]:
    """The zones of the partition; or none and the reason, since roles and variables are of use without, too."""
    from slurmdl.topology import read
    from slurmdl.topology.model import Topology

    try:
        # TopologyPlugin speaks of topology.conf; a topology.yaml (25.05 and newer) holds whatever it says
        file = read.beside_slurm_conf()
        held = controller.version >= (25, 5) if file is None else file.endswith(".yaml")
        if not (controller.zones or held):
            raise UnavailableError("the cluster's topology has no zones")
        several = read.read_all()
        return several.of(_topology_of(partition) if len(several.each) > 1 else ""), ""
    except SlurmdlError as error:
        if strict:
            raise
        return Topology.flat(nodes), str(error)


def _topology_of(partition: str) -> str:
    """Name of the topology that a partition uses, "" for the default."""
    from slurmdl.cluster import scontrol

    return scontrol.parse(process.query(["scontrol", "-o", "show", "partition", partition])).topology_of([partition])


def _plan(laid: layout.Layout, topology: Topology, scores: LinkScores, dl: DlOptions) -> tuple[Plan, RankMap]:
    from slurmdl.launch import matrices
    from slurmdl.launch.zone_costs import zone_costs
    from slurmdl.placement.cost import links
    from slurmdl.placement.ranks import rankmap
    from slurmdl.placement.traffic import Traffic
    from slurmdl.plan import PATTERNS, Plan

    if dl.ps >= laid.ntasks:
        raise PlacementError(f"--dl-ps={dl.ps}: the step has {laid.ntasks} tasks, and at least one must be a worker")
    found = rankmap.rank_map(laid.slots, topology, scores, Traffic.of(dl, matrices.of(dl)), dl.rank0)
    zones = {node: topology.path(node) for node, _ in laid.slots}
    costs = zone_costs(links(list(zones), topology, scores))
    traffic = dl.traffic if dl.traffic in PATTERNS[dl.strategy] else ""
    return Plan(dl.strategy, found.nodes, found.roles, zones, costs, traffic), found


def pmi(environ: Mapping[str, str]) -> str:
    """The PMI by which the MPI in PATH learns its ranks from srun, "" where there is none or it is not known."""
    found = shutil.which("mpirun", path=environ.get("PATH"))
    launcher = os.path.basename(os.path.realpath(found)) if found else ""
    return "pmix" if launcher in ("orterun", "prterun", "mpirun.openmpi", "prte") else \
        "pmi2" if launcher in ("mpiexec.hydra", "mpirun.mpich", "mpiexec.mpich") else ""


def mpi_option(line: getopt.CommandLine, controller: Controller, environ: Mapping[str, str]) -> list[str]:
    """--mpi for the MPI that PATH has; the wrong one starts every task as a world of its own.

    The user's --mpi and SLURM_MPI_TYPE win, and so does the cluster's default where it is the right one.
    """
    wanted = "" if line.has("mpi") or "SLURM_MPI_TYPE" in environ else pmi(environ)
    fits = not wanted or controller.mpi.startswith(wanted) or not controller.has_pmi(wanted)
    return [] if fits else [f"--mpi={wanted}"]


def _end_option(line: getopt.CommandLine, environ: Mapping[str, str]) -> list[str]:
    """--kill-on-bad-exit for an MPI program: its ranks wait for one that is killed for ever, and srun with them.

    The user's own word wins.
    """
    asked = line.has("kill-on-bad-exit") or "SLURM_KILL_BAD_EXIT" in environ or line.last("mpi") == "none"
    return [] if asked or not pmi(environ) else ["--kill-on-bad-exit=1"]


def _other_master(plan: Plan, environ: Mapping[str, str]) -> str:
    """The user's own MASTER_ADDR where it names another node of the job than that of rank 0, "" else."""
    master = environ.get("MASTER_ADDR", "")
    if "MASTER_ADDR" in environ.get("SLURMDL_SET", "").split():
        return ""
    name = master.partition(".")[0]
    others = {node.partition(".")[0] for node in allocation.read(environ).nodes} - {plan.nodes[0].partition(".")[0]}
    return master if name in others else ""


def _explain(mapped: Mapped) -> None:
    plan, cost = mapped.plan, mapped.map.cost
    warn(f"{len(plan)} tasks on {len(set(plan.nodes))} nodes, order {mapped.map.order or 'alphabetical'}, zones from "
         f"{mapped.source}")
    warn(f"an iteration of {plan.strategy} ({mapped.assumed}): {units.size(cost.bytes_across_zones)} across zones, "
         f"{units.size(cost.bytes_across_nodes)} across nodes, {units.duration(cost.seconds)}, "
         f"busiest: {cost.busiest or 'none'}")
    if mapped.map.held and mapped.map.anywhere:
        warn(f"rank 0 stays on {plan.nodes[0]}, the first node: with --dl-rank0=any an iteration takes "
             f"{mapped.map.anywhere.seconds:g} s")
    start = 0
    for rank in range(1, len(plan) + 1):
        if rank == len(plan) or plan.nodes[rank] != plan.nodes[start] or plan.roles[rank] != plan.roles[start]:
            ranks = str(start) if rank == start + 1 else f"{start}-{rank - 1}"
            warn(f"rank {ranks}: {plan.nodes[start]}, zone {plan.zone(start) or 'none'}, {plan.roles[start]}")
            start = rank
    for told in mapped.heard:
        warn(told)


def _show(chosen: Step) -> None:
    """The dry run: what would be unset and set, the command line, and the text of each file, on stdout."""
    for name in chosen.unset:
        if name in os.environ and name not in chosen.set:
            show(f"unset {name}")
    for name, value in chosen.set.items():
        show(f"export {name}={shlex.quote(value)}")
    show(shlex.join(chosen.words(lambda file: file.name)))
    for file in chosen.files():
        show(f"# {file.name}:\n{file.text.rstrip()}")


def _start(chosen: Step, environ: Mapping[str, str]) -> int:
    """Become the program; where its exit status is not to be trusted, become its parent, and return the status.

    Files are anonymous memory behind inherited descriptors: nothing is left to remove.
    """
    words = chosen.words(_in_memory)
    program = shutil.which(words[0], path=environ.get("PATH"))
    if program is None:
        raise UnavailableError(f"{words[0]}: not found in PATH; Slurm's client commands are needed")
    argv, variables = [program, *words[1:]], chosen.environment(environ)
    if not chosen.fails:
        process.become(argv, variables)
    status, failed = process.overhear(argv, variables, chosen.fails.encode())
    if failed and not status:
        raise TrainError(f"{words[0]} {chosen.fails}, and has ended all tasks; its own exit status is 0")
    return status


def _in_memory(file: Inline) -> str:
    descriptor = os.memfd_create(file.name, 0)
    with os.fdopen(os.dup(descriptor), "w", encoding="utf-8", errors="surrogateescape") as stream:
        stream.write(file.text)
    return f"/proc/self/fd/{descriptor}"
