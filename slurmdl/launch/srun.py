"""`slurmdl srun`: the rank map of the allocation that Slurm really gave, and the step that starts in that order.

Everything is made anew at each start, so a job that was requeued onto other nodes gets the map of those.
What cannot be mapped runs as the user wrote it, with one line on stderr that says why.
"""

from __future__ import annotations

import os
import shlex
import shutil
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import dropwhile
from typing import TYPE_CHECKING, NoReturn

from slurmdl import config, dl_options, units
from slurmdl.dl_options import DlOptions
from slurmdl.errors import (
    PlacementError,
    SlurmdlError,
    UnavailableError,
    UsageError,
    sort_by_similarity,
    warn,
)
from slurmdl.launch import cluster_state, late_binding, rankmap_formats, step_command, submission_record, supervisor
from slurmdl.launch.step_command import InlineFile, StepCommand
from slurmdl.slurm import allocation, getopt, process, srun_options
from slurmdl.slurm import step_layout as step_layout_module
from slurmdl.slurm.pmi import _mpirun_has_ulfm, mpi_type_option
from slurmdl.slurm.slurm_conf import SlurmConfig
from slurmdl.text import print_escaped

if TYPE_CHECKING:
    from slurmdl.links.link_scores import LinkScores
    from slurmdl.placement.result import RankMap
    from slurmdl.plan import Plan
    from slurmdl.topology.topology import Topology

LAUNCHERS = ("srun", "mpirun")
#: where plans too long for the environment are kept, unless the configuration names a directory
DEFAULT_PLAN_DIR = ".slurmdl"
#: how often, and seconds between, it is looked whether other steps of the job run
_STEP_CHECKS, _STEP_CHECK_INTERVAL_S = 3, 0.3
_LONG_OPTIONS: dict[str, getopt.HasArg] = {**srun_options.LONG_OPTIONS, **
    dl_options.LONG_OPTIONS, **dict.fromkeys(srun_options.WRAPPER_OPTIONS, "yes")}




@dataclass(frozen=True)
class MappedStep:
    """A step that is mapped, with what the explanation tells of it, and why it has no zones ("" where it has).

    `text` is the map as --print-rank-map wants it, "" where it is not asked for; `heard` are lines on the scores that
    mattered; `assumed` says on what the predictions rest.
    """

    command: StepCommand
    rank_map_text: str
    plan: Plan
    rank_map: RankMap
    topology_source: str
    no_zones_reason: str = ""
    score_report: tuple[str, ...] = ()
    assumptions: str = ""


def run_srun(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Replace this process by srun (or mpirun), so that signals and the exit status are its own.

    Returns only after a dry run, and after --print-rank-map, which starts nothing.

    Raises
    ------
    UsageError : outside a job, or an unknown --dl-* option, launcher, format or value.
    PlacementError : the step cannot be mapped, and --dl-strict is given.
    UnavailableError : there is no srun, or no mpirun where that is asked for.
    """
    line = getopt.parse_command_line(argv, srun_options.SHORT_OPTIONS, _LONG_OPTIONS)
    chosen = dl_options.collect_settings(line.options)
    launcher = line.last_value("launcher") or "srun"
    if launcher not in LAUNCHERS:
        raise UsageError(f"--launcher: {launcher!r} is not valid; valid: {', '.join(LAUNCHERS)}")
    form = line.last_value("print-rank-map")
    if line.has_option("print-rank-map") and form not in rankmap_formats.FORMATS:
        valid = sort_by_similarity(form or "", list(rankmap_formats.FORMATS))
        raise UsageError(f"--print-rank-map: {form or ''!r} is not valid; valid: {', '.join(valid)}")
    if not environ.get("SLURM_JOB_ID"):
        allocation.read_allocation(environ)
    words, unset = _args_for_srun(argv, line), step_command.inherited_variables(environ)
    asks_srun = any(line.has_option(name) for name in srun_options.PASSTHROUGH) or line.last_value("mpi") == "list"
    if asks_srun or not (line.operands or form):
        _exec_step(StepCommand(("srun", *words), environ_unset=unset), environ)
    # the user's own words, which alone can be wrong usage
    dl = dl_options.merge_layers(dl_options.dl_settings_from_environ(environ), chosen)
    # nothing of ours is said where the user wants nothing said
    say: Callable[[str], None] = (lambda _: None) if line.has_option("quiet") else warn
    misplaced = dl_options.misplaced_option_warning(line.operands, "program")
    if misplaced:
        say(misplaced)
    controller = _CachedSlurmConfig()
    needs_map = launcher != "srun" or form is not None

    def unmapped(error: Exception) -> StepCommand:
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
        return StepCommand(("srun", *extra, *words), environ_unset=unset)

    try:
        marked = submission_record.read_record(environ)
        layers = _settings_of_record(marked), dl_options.dl_settings_from_environ(
            marked.environ_without_inputs(environ) if marked else environ), chosen
        dl = dl_options.merge_layers(*layers)
        settings = config.load_config()
        dl = dl_options.merge_layers(settings.options, *layers)
        known = None
        if marked and marked.requested_size:
            environ = late_binding.environ_with_requested_size(environ, marked.requested_size)
            environ, known = _shrink_job(marked, marked.requested_size, dl, settings, controller, environ, say)
        mapped = _map_step(line, dl, settings, launcher, controller, environ, say, known)
        chosen_step = mapped.command
        master = _conflicting_master_addr(mapped.plan, environ)
        if master:
            say(f"MASTER_ADDR={master} is another node than that of rank 0, which is {mapped.plan.nodes[0]}")
        if mapped.no_zones_reason:
            say(f"{mapped.no_zones_reason}; ranks in the order of the node names")
        if dl.explain:
            _print_explanation(mapped)
        if form:
            print(mapped.rank_map_text, end="")
            return 0
        if not dl.dry_run:
            chosen_step = step_command.with_plan_file(chosen_step, settings.plan_dir or DEFAULT_PLAN_DIR)
    except Exception as error:
        chosen_step = unmapped(error)
    if dl.dry_run:
        _print_dry_run(chosen_step)
        return 0
    try:
        _exec_step(chosen_step, environ)
    except UnavailableError as error:
        # the command line or the environment is longer with a map; without one the kernel may take them
        if not (isinstance(error.__cause__, OSError) and chosen_step.environ_set):
            raise
        _exec_step(unmapped(error), environ)


class _CachedSlurmConfig:
    """The controller's configuration, which is asked for once, whether it answers or not."""

    def __init__(self) -> None:
        self._result: SlurmConfig | Exception | None = None

    def __call__(self) -> SlurmConfig:
        """The configuration; raises what `Controller.ask` raised."""
        if self._result is None:
            try:
                self._result = SlurmConfig.query()
            except Exception as error:
                self._result = error
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


def _args_for_srun(argv: Sequence[str], line: getopt.CommandLine) -> list[str]:
    """The user's words as they stand, without our options."""
    ours = {option.index + i for option in line.options
            if option.name.startswith("dl-") or option.name in srun_options.WRAPPER_OPTIONS for i in range(len(option.args))}
    return [word for i, word in enumerate(argv) if i not in ours]


def _settings_of_record(record: submission_record.SubmissionRecord | None) -> dict[str, str]:
    """The settings of the submission that hold for its steps."""
    if record is None:
        return {}
    dl = record.options
    flags = {name: "" for name, on in (("explain", dl.explain), ("strict", dl.strict)) if on}
    return {"strategy": dl.strategy, "ps": str(dl.ps), "model_bytes": str(dl.model_bytes), "scores": dl.link_scores,
            "probe": dl.probe, "rank0": dl.rank0, **({"traffic": dl.comm_pattern} if dl.comm_pattern else {}), **flags}


def _map_step(line: getopt.CommandLine, dl: DlOptions, site_config: config.Config, launcher: str, get_slurm_config: _CachedSlurmConfig,
         environ: Mapping[str, str], on_warning: Callable[[str], None], known_scores: LinkScores | None) -> MappedStep:
    """The step, mapped by the scores that are known already, else by those that there are."""
    given = allocation.read_allocation(environ)
    controller = get_slurm_config()
    if controller.pack_nodes:
        raise PlacementError("SelectTypeParameters has CR_Pack_Nodes: its layout is not mapped")
    request = step_layout_module.parse_step_request(line, environ, controller.srun_cpus_per_task(environ))
    laid = step_layout_module.compute_step_layout(given, request)
    if laid.only_if_alone and _other_steps_run(given.job_id):
        raise PlacementError("other steps of the job run: which nodes and CPUs are left is Slurm's choice")
    topology, complaint = _load_zones(controller, given.nodes, environ.get("SLURM_JOB_PARTITION", ""), dl.strict)
    scores = _load_scores(dl, site_config, given.nodes, topology, environ,
                          on_warning) if known_scores is None else known_scores
    plan, rank_map = _build_plan(laid, topology, scores, dl)
    heard = _score_report_lines(rank_map, given.nodes, topology, scores) if dl.explain and scores.link_count else ()
    assumptions = _assumptions_text(dl, topology, scores) if dl.explain else ""
    variables: Mapping[str, str] = step_command.task_variables(plan)
    form = line.last_value("print-rank-map")
    if form:
        if form == "shell":
            variables = step_command.with_plan_file(
    StepCommand((), variables), site_config.plan_dir or DEFAULT_PLAN_DIR).environ_set
        tasks = rankmap_formats.RankMapInput(plan, [node for node, _ in laid.node_tasks], request.cpus_per_task or 1,
                               int(variables["SLURMDL_MASTER_PORT"]), given.job_id, variables)
        return MappedStep(StepCommand(()), rankmap_formats.format_rank_map(form, tasks), plan, rank_map, topology.source, complaint, heard,
                      assumptions)
    if launcher == "mpirun":
        if shutil.which("mpirun", path=environ.get("PATH")) is None:
            raise UnavailableError("--launcher=mpirun: mpirun is not in PATH")
        made = step_command.mpirun_command(line, plan, variables, environ, _mpirun_has_ulfm(environ))
    else:
        made = step_command.srun_command(line, plan, added_options(line, get_slurm_config, environ), variables, environ)
    return MappedStep(made, "", plan, rank_map, topology.source, complaint, heard, assumptions)




def _load_scores(dl: DlOptions, site_config: config.Config, nodes: Sequence[str], topology: Topology,
            environ: Mapping[str, str], on_warning: Callable[[str], None]) -> LinkScores:
    """What is known of the links, and what a probe of the job's nodes adds where that is asked for."""
    scores = cluster_state.load_link_scores(site_config, dl.link_scores, on_warning, dl.strict)
    if dl.probe == "0":
        return scores
    from slurmdl.launch import probe_step

    return probe_step.with_probed_scores(scores, nodes, topology, float(dl.probe), environ, on_warning)


def _assumptions_text(dl: DlOptions, topology: Topology, scores: LinkScores) -> str:
    from slurmdl.placement import score_report as score_report_module

    return score_report_module.format_assumptions(dl, topology, scores)


def _score_report_lines(rank_map: RankMap, nodes: Sequence[str],
                        topology: Topology, scores: LinkScores) -> tuple[str, ...]:
    from slurmdl.placement import score_report as score_report_module

    told = score_report_module.format_score_report(score_report_module.decisive_step_scores(rank_map, nodes, topology, scores), scores)
    return tuple(" ".join(line.split()) for line in told)


def _shrink_job(record: submission_record.SubmissionRecord, requested_size: submission_record.RequestedSize, dl: DlOptions, site_config: config.Config, get_slurm_config: _CachedSlurmConfig,
             environ: Mapping[str, str], on_warning: Callable[[str], None]) -> tuple[dict[str, str], LinkScores | None]:
    """The environment of a job that asked for more nodes than it needs, on the best of its nodes (see late), and the
    scores that these were chosen by, None where nothing had to be chosen."""
    used: list[LinkScores] = []

    def choose(held: late_binding.JobNodes) -> Sequence[str]:
        from slurmdl.job_request import JobRequest
        from slurmdl.launch import traffic_file
        from slurmdl.placement.place import select_subset

        topology, _ = _load_zones(get_slurm_config(), held.nodes, environ.get("SLURM_JOB_PARTITION", ""), dl.strict)
        wanted = JobRequest(replace(dl, place=record.options.place), (requested_size.nodes, requested_size.nodes), requested_size.tasks,
                            requested_size.tasks_per_node)
        used.append(_load_scores(dl, site_config, held.nodes, topology, environ, on_warning))
        return select_subset(held.nodes, wanted, held.batch_host, topology,
                             used[0], traffic_file.load_traffic_matrices(dl))

    return late_binding.shrink_job(environ, requested_size, choose, _other_steps_run,
                           on_warning, dry_run=dl.dry_run), used[0] if used else None


def _other_steps_run(job_id: int) -> bool:
    """Whether a step other than the batch script and its like runs in the job.

    One whose srun has just ended is listed a moment longer on a busy controller, so a step that is seen is looked
    for again.
    """
    for look in range(_STEP_CHECKS):
        time.sleep(_STEP_CHECK_INTERVAL_S if look else 0.0)
        steps = process.check_output(["squeue", "--noheader", "--steps", f"--jobs={job_id}", "--format=%i"]).split()
        if not any(name.rpartition(".")[2].isdigit() for name in steps):
            return False
    return True


def _load_zones(slurm_config: SlurmConfig, nodes: Sequence[str],
                partition: str, strict: bool) -> tuple[Topology, str]:
    """The zones of the partition; or none and the reason, since roles and variables are of use without, too."""
    from slurmdl.slurm.slurm_conf import topology_file_path
    from slurmdl.topology import load
    from slurmdl.topology.topology import Topology

    try:
        # TopologyPlugin speaks of topology.conf; a topology.yaml (25.05 and newer) holds whatever it says
        file = topology_file_path()
        held = slurm_config.version >= (25, 5) if file is None else file.endswith(".yaml")
        if not (slurm_config.has_topology or held):
            raise UnavailableError("the cluster's topology has no zones")
        several = load.load_topologies()
        return several.get(_partition_topology(partition) if len(several.topologies) > 1 else ""), ""
    except SlurmdlError as error:
        if strict:
            raise
        return Topology.flat(nodes), str(error)


def _partition_topology(partition: str) -> str:
    """Name of the topology that a partition uses, "" for the default."""
    from slurmdl.cluster import scontrol_parser

    return scontrol_parser.parse_snapshot(process.check_output(
        ["scontrol", "-o", "show", "partition", partition])).topology_of([partition])


def _build_plan(step_layout: step_layout_module.StepLayout, topology: Topology,
                scores: LinkScores, dl: DlOptions) -> tuple[Plan, RankMap]:
    from slurmdl.launch import traffic_file
    from slurmdl.launch.plan_builder import compute_zone_costs
    from slurmdl.placement.iteration_cost import network_links
    from slurmdl.placement.ranks import rank_orders
    from slurmdl.placement.traffic import Traffic
    from slurmdl.plan import COMM_PATTERNS, Plan

    if dl.ps >= step_layout.ntasks:
        raise PlacementError(
            f"--dl-ps={dl.ps}: the step has {step_layout.ntasks} tasks, and at least one must be a worker")
    found = rank_orders.best_rank_map(
    step_layout.node_tasks,
    topology,
    scores,
    Traffic.from_options(
        dl,
        traffic_file.load_traffic_matrices(dl)),
         dl.rank0)
    zones = {node: topology.path_of(node) for node, _ in step_layout.node_tasks}
    costs = compute_zone_costs(network_links(list(zones), topology, scores))
    traffic = dl.comm_pattern if dl.comm_pattern in COMM_PATTERNS[dl.strategy] else ""
    return Plan(dl.strategy, found.nodes, found.roles, zones, costs, traffic), found




def added_options(line: getopt.CommandLine, get_slurm_config: Callable[[
                  ], SlurmConfig], environ: Mapping[str, str]) -> list[str]:
    """What srun is given beside the user's options, whether the step is mapped or not."""
    return [*mpi_type_option(line, get_slurm_config, environ), *_kill_on_bad_exit_option(line, environ)]




def _kill_on_bad_exit_option(line: getopt.CommandLine, environ: Mapping[str, str]) -> list[str]:
    """--kill-on-bad-exit for the built-in trainer, whose ranks wait for ever for one that is killed.

    Another program may go on without one of its tasks. The user's own option wins.
    """
    asked = line.has_option("kill-on-bad-exit") or "SLURM_KILL_BAD_EXIT" in environ
    return ["--kill-on-bad-exit=1"] if is_trainer(line.operands) and not asked else []


def is_trainer(args: Sequence[str]) -> bool:
    """Whether a command line is `slurmdl train` or `python -m slurmdl.train`, with or without options of Python's."""
    program, *rest = [os.path.basename(args[0]), *args[1:]]
    if program.startswith("python"):
        rest = list(dropwhile(lambda word: word.startswith("-") and word != "-m", rest))
        return rest[:2] == ["-m", "slurmdl.train"] or rest[:3] == ["-m", "slurmdl", "train"]
    return program == "slurmdl" and rest[:1] == ["train"]


def _conflicting_master_addr(plan: Plan, environ: Mapping[str, str]) -> str:
    """The user's own MASTER_ADDR where it names another node of the job than that of rank 0, "" else."""
    master = environ.get("MASTER_ADDR", "")
    if "MASTER_ADDR" in environ.get("SLURMDL_EXPORTED", "").split():
        return ""
    name = master.partition(".")[0]
    others = {node.partition(".")[0] for node in allocation.read_allocation(
        environ).nodes} - {plan.nodes[0].partition(".")[0]}
    return master if name in others else ""


def _print_explanation(mapped: MappedStep) -> None:
    plan, cost = mapped.plan, mapped.rank_map.cost
    warn(f"{len(plan)} tasks on {len(set(plan.nodes))} nodes, order {mapped.rank_map.order or 'alphabetical'}, zones from "
         f"{mapped.topology_source}")
    warn(f"an iteration of {plan.strategy} ({mapped.assumptions}): {units.format_bytes(cost.inter_zone_bytes)} across zones, "
         f"{units.format_bytes(cost.inter_node_bytes)} across nodes, {units.format_duration(cost.seconds)}, "
         f"busiest: {cost.bottleneck_link or 'none'}")
    if mapped.rank_map.rank0_slowdown and mapped.rank_map.any_rank0_cost:
        warn(f"rank 0 stays on {plan.nodes[0]}, the first node: with --dl-rank0=any an iteration takes "
             f"{units.format_duration(mapped.rank_map.any_rank0_cost.seconds)}")
    start = 0
    for rank in range(1, len(plan) + 1):
        if rank == len(plan) or plan.nodes[rank] != plan.nodes[start] or plan.roles[rank] != plan.roles[start]:
            ranks = str(start) if rank == start + 1 else f"{start}-{rank - 1}"
            warn(f"rank {ranks}: {plan.nodes[start]}, zone {plan.leaf_zone(start) or 'none'}, {plan.roles[start]}")
            start = rank
    for told in mapped.score_report:
        warn(told)


def _print_dry_run(command: StepCommand) -> None:
    """The dry run: what would be unset and set, the command line, and the text of each file, on stdout."""
    for name in command.environ_unset:
        if name in os.environ and name not in command.environ_set:
            print_escaped(f"unset {name}")
    plan = step_command.oversized_plan(command)
    for name, value in command.environ_set.items():
        print_escaped(f"export {name}={'file:PLAN' if name == 'SLURMDL_PLAN' and plan else shlex.quote(value)}")
    print_escaped(shlex.join(command.argv_with_files(lambda file: file.name)))
    for file in [*command.inline_files(), *([InlineFile("", "PLAN", plan)] if plan else [])]:
        print_escaped(f"# {file.name}:\n{file.text.rstrip()}")


def _exec_step(command: StepCommand, environ: Mapping[str, str]) -> NoReturn:
    """Become the program, or its parent where something is left to do at its end.

    Files of the command line are anonymous memory behind inherited descriptors: nothing is left to remove.
    """
    words = command.argv_with_files(_memfd_path)
    program = shutil.which(words[0], path=environ.get("PATH"))
    if program is None:
        raise UnavailableError(f"{words[0]}: not found in PATH; Slurm's client commands are needed")
    argv, variables = [program, *words[1:]], command.apply_to_environ(environ)

    if not (command.plan_file or command.failure_message):
        process.exec_program(argv, variables)
    try:
        supervisor.exec_supervised(argv, variables, remove_file=command.plan_file,
                               failure_message=command.failure_message)
    except UnavailableError:
        with suppress(OSError):
            os.unlink(command.plan_file)
        raise


def _memfd_path(file: InlineFile) -> str:
    descriptor = os.memfd_create(file.name, 0)
    with os.fdopen(os.dup(descriptor), "w", encoding="utf-8", errors="surrogateescape") as stream:
        stream.write(file.text)
    return f"/proc/self/fd/{descriptor}"
