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
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import dropwhile
from typing import TYPE_CHECKING, NoReturn

from slurmdl import attend, config, dl_options, getopt, process, units
from slurmdl.dl_options import DlOptions
from slurmdl.errors import (
    InputError,
    PlacementError,
    SlurmdlError,
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
#: where plans too long for the environment are kept, unless the configuration names a directory
PLAN_DIR = ".slurmdl"
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
    def ask(cls) -> Controller:
        """From the controller itself.

        Raises
        ------
        UnavailableError : it does not answer.
        InputError : as `parse`.
        """
        return cls.parse(process.query(["scontrol", "show", "config"]))

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

    Returns only after a dry run, and after --print-map, which starts nothing.

    Raises
    ------
    UsageError : outside a job, or an unknown --dl-* option, launcher, format or value.
    PlacementError : the step cannot be mapped, and --dl-strict is given.
    UnavailableError : there is no srun, or no mpirun where that is asked for.
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
    words, unset = _without_ours(argv, line), step.leftovers(environ)
    asks_srun = any(line.has(name) for name in srun_options.PASSED) or line.last("mpi") == "list"
    if asks_srun or not (line.operands or form):
        _start(Step(("srun", *words), unset=unset), environ)
    # the user's own words, which alone can be wrong usage
    dl = dl_options.merge(dl_options.from_environment(environ), chosen)
    # nothing of ours is said where the user wants nothing said
    say: Callable[[str], None] = (lambda _: None) if line.has("quiet") else warn
    misplaced = dl_options.misplaced(line.operands, "program")
    if misplaced:
        say(misplaced)
    controller = _Once()
    needs_map = launcher != "srun" or form is not None

    def unmapped(error: Exception) -> Step:
        """What srun starts by itself, with one line that says why; the error where that is not wanted."""
        if dl.strict or needs_map:
            raise error
        problem: object = error
        if not isinstance(error, SlurmdlError):
            # a fault of ours must not cost the user the step
            problem = f"internal error: {type(error).__name__}: {error}"
            if environ.get("SLURMDL_DEBUG") == "1":
                traceback.print_exception(error)
        extra: list[str] = []
        with suppress(Exception):
            extra = added_options(line, controller, environ)
        with suppress(Exception):
            say(f"{problem}; the step runs in srun's own order")
        return Step(("srun", *extra, *words), unset=unset)

    try:
        marked = mark.read(environ)
        layers = _requested(marked), dl_options.from_environment(marked.news(environ) if marked else environ), chosen
        dl = dl_options.merge(*layers)
        settings = config.load()
        dl = dl_options.merge(settings.options, *layers)
        known = None
        if marked and marked.asked:
            environ = late.unchosen(environ, marked.asked)
            environ, known = _trimmed(marked, marked.asked, dl, settings, controller, environ, say)
        mapped = _map(line, dl, settings, launcher, controller, environ, say, known)
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
        if not dl.dry_run:
            chosen_step = step.with_plan_file(chosen_step, settings.plan_dir or PLAN_DIR)
    except Exception as error:
        chosen_step = unmapped(error)
    if dl.dry_run:
        _show(chosen_step)
        return 0
    try:
        _start(chosen_step, environ)
    except UnavailableError as error:
        # the command line or the environment is longer with a map; without one the kernel may take them
        if not (isinstance(error.__cause__, OSError) and chosen_step.set):
            raise
        _start(unmapped(error), environ)


class _Once:
    """The controller's configuration, which is asked for once, whether it answers or not."""

    def __init__(self) -> None:
        self._answer: Controller | Exception | None = None

    def __call__(self) -> Controller:
        """The configuration; raises what `Controller.ask` raised."""
        if self._answer is None:
            try:
                self._answer = Controller.ask()
            except Exception as error:
                self._answer = error
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def _without_ours(argv: Sequence[str], line: getopt.CommandLine) -> list[str]:
    """The user's words as they stand, without our options."""
    ours = {option.index + i for option in line.options
            if option.name.startswith("dl-") or option.name in srun_options.OURS for i in range(len(option.words))}
    return [word for i, word in enumerate(argv) if i not in ours]


def _requested(marked: mark.Mark | None) -> dict[str, str]:
    """The settings of the submission that hold for its steps."""
    if marked is None:
        return {}
    dl = marked.dl
    flags = {name: "" for name, on in (("explain", dl.explain), ("strict", dl.strict)) if on}
    return {"strategy": dl.strategy, "ps": str(dl.ps), "model_bytes": str(dl.model_bytes), "scores": dl.scores,
            "probe": dl.probe, "rank0": dl.rank0, **({"traffic": dl.traffic} if dl.traffic else {}), **flags}


def _map(line: getopt.CommandLine, dl: DlOptions, settings: config.Config, launcher: str, ask: _Once,
         environ: Mapping[str, str], say: Callable[[str], None], known: LinkScores | None) -> Mapped:
    """The step, mapped by the scores that are known already, else by those that there are."""
    given = allocation.read(environ)
    controller = ask()
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
    variables: Mapping[str, str] = step.task_variables(plan)
    form = line.last("print-map")
    if form:
        if form == "shell":
            variables = step.with_plan_file(Step((), variables), settings.plan_dir or PLAN_DIR).set
        tasks = dialects.Tasks(plan, [node for node, _ in laid.slots], request.cpus_per_task or 1,
                               int(variables["SLURMDL_PORT"]), given.job, variables)
        return Mapped(Step(()), dialects.render(form, tasks), plan, rank_map, topology.source, complaint, heard,
                      assumptions)
    if launcher == "mpirun":
        if shutil.which("mpirun", path=environ.get("PATH")) is None:
            raise UnavailableError("--launcher=mpirun: mpirun is not in PATH")
        made = step.mpirun(line, plan, variables, environ, _has_ulfm(environ))
    else:
        made = step.srun(line, plan, added_options(line, ask, environ), variables, environ)
    return Mapped(made, "", plan, rank_map, topology.source, complaint, heard, assumptions)


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


def _trimmed(marked: mark.Mark, asked: mark.Asked, dl: DlOptions, settings: config.Config, ask: _Once,
             environ: Mapping[str, str], say: Callable[[str], None]) -> tuple[dict[str, str], LinkScores | None]:
    """The environment of a job that asked for more nodes than it needs, on the best of its nodes (see late), and the
    scores that these were chosen by, None where nothing had to be chosen."""
    used: list[LinkScores] = []

    def choose(held: late.Held) -> Sequence[str]:
        from slurmdl.launch import matrices
        from slurmdl.placement.keep import keep
        from slurmdl.request import JobRequest

        topology, _ = _zones(ask(), held.nodes, environ.get("SLURM_JOB_PARTITION", ""), dl.strict)
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
    from slurmdl.slurm.conf_files import topology_file_path
    from slurmdl.topology import read
    from slurmdl.topology.model import Topology

    try:
        # TopologyPlugin speaks of topology.conf; a topology.yaml (25.05 and newer) holds whatever it says
        file = topology_file_path()
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


def added_options(line: getopt.CommandLine, ask: Callable[[], Controller], environ: Mapping[str, str]) -> list[str]:
    """What srun is given beside the user's options, whether the step is mapped or not."""
    return [*mpi_option(line, ask, environ), *_end_option(line, environ)]


def mpi_option(line: getopt.CommandLine, ask: Callable[[], Controller], environ: Mapping[str, str]) -> list[str]:
    """--mpi for the MPI that PATH has; the wrong one starts every task as a world of its own.

    The user's --mpi and SLURM_MPI_TYPE win, and so does the cluster's default where it is the right one.
    """
    wanted = "" if line.has("mpi") or "SLURM_MPI_TYPE" in environ else pmi(environ)
    if not wanted:
        return []
    try:
        controller = ask()
        needed = controller.has_pmi(wanted) and not controller.mpi.startswith(wanted)
    except SlurmdlError:
        # srun lists its plugins without the controller
        listed = process.ask(["srun", "--mpi=list"], env=environ)
        needed = wanted in re.findall(r"\w+", listed.out + listed.err)
    return [f"--mpi={wanted}"] if needed else []


def _end_option(line: getopt.CommandLine, environ: Mapping[str, str]) -> list[str]:
    """--kill-on-bad-exit for the built-in trainer, whose ranks wait for ever for one that is killed.

    Another program may go on without one of its tasks. The user's own option wins.
    """
    asked = line.has("kill-on-bad-exit") or "SLURM_KILL_BAD_EXIT" in environ
    return ["--kill-on-bad-exit=1"] if is_trainer(line.operands) and not asked else []


def is_trainer(words: Sequence[str]) -> bool:
    """Whether a command line is `slurmdl train` or `python -m slurmdl.train`, with or without options of Python's."""
    program, *rest = [os.path.basename(words[0]), *words[1:]]
    if program.startswith("python"):
        rest = list(dropwhile(lambda word: word.startswith("-") and word != "-m", rest))
        return rest[:2] == ["-m", "slurmdl.train"] or rest[:3] == ["-m", "slurmdl", "train"]
    return program == "slurmdl" and rest[:1] == ["train"]


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
             f"{units.duration(mapped.map.anywhere.seconds)}")
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
    plan = step.long_plan(chosen)
    for name, value in chosen.set.items():
        show(f"export {name}={'file:PLAN' if name == 'SLURMDL_PLAN' and plan else shlex.quote(value)}")
    show(shlex.join(chosen.words(lambda file: file.name)))
    for file in [*chosen.files(), *([Inline("", "PLAN", plan)] if plan else [])]:
        show(f"# {file.name}:\n{file.text.rstrip()}")


def _start(chosen: Step, environ: Mapping[str, str]) -> NoReturn:
    """Become the program, or its parent where something is left to do at its end.

    Files of the command line are anonymous memory behind inherited descriptors: nothing is left to remove.
    """
    words = chosen.words(_in_memory)
    program = shutil.which(words[0], path=environ.get("PATH"))
    if program is None:
        raise UnavailableError(f"{words[0]}: not found in PATH; Slurm's client commands are needed")
    argv, variables = [program, *words[1:]], chosen.environment(environ)

    if not (chosen.plan_file or chosen.fails):
        process.become(argv, variables)
    try:
        attend.attend(argv, variables, remove=chosen.plan_file, fails=chosen.fails)
    except UnavailableError:
        with suppress(OSError):
            os.unlink(chosen.plan_file)
        raise


def _in_memory(file: Inline) -> str:
    descriptor = os.memfd_create(file.name, 0)
    with os.fdopen(os.dup(descriptor), "w", encoding="utf-8", errors="surrogateescape") as stream:
        stream.write(file.text)
    return f"/proc/self/fd/{descriptor}"
