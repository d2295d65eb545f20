"""`slurmdl srun`: map the ranks of a step onto the nodes of the job and start the step in that order.

Every start computes a new map, so a job that was requeued onto other nodes gets a map of those nodes.
A step that cannot be mapped runs as the user wrote it, with one line on stderr that says why.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from slurmdl import config, dl_options, records
from slurmdl import plan as plans
from slurmdl.dl_options import DlOptions
from slurmdl.errors import (
    BadNodesError,
    PlacementError,
    SlurmdlError,
    UnavailableError,
    debug,
    internal_error_text,
    print_traceback,
    report_error,
    warn,
)
from slurmdl.launch import launchers, step_command, step_inputs, submission_record
from slurmdl.launch.step_command import InlineFile, SrunArgs, StepCommand
from slurmdl.launch.step_inputs import StepCall
from slurmdl.slurm import getopt, jobs, process, slurm_conf
from slurmdl.slurm.slurm_conf import SlurmConfig, start_config_query
from slurmdl.text import print_escaped

SRUN_HELP = """\
usage: slurmdl srun [--dl-*] [--step-starter=NAME] [--print-rank-map=FORMAT] [srun options] program [args]

Inside a job or an salloc: orders the ranks of the step by the zones of the allocated nodes, then executes srun
with all its options unchanged. srun determines tasks per node and CPUs per task.
A step that cannot be mapped, or outside a job, runs as plain srun, with one line on stderr that gives the reason.

  --step-starter=srun|mpirun  program that starts the tasks (default: srun; mpirun is Open MPI's)
  --print-rank-map=FORMAT     print the rank map instead of starting a step; needs no program. FORMAT is
                              slurm-hostfile, openmpi-rankfile, openmpi-seq, mpich-rank-order, intel-machinefile,
                              hydra-hostfile, torchrun, or shell: variables for `srun --dl-rank-map`, an option of
                              slurmdl's SPANK plugin:
                                  eval "$(slurmdl srun --print-rank-map=shell)"
                              Open MPI 5 rejects rank files with a dash in the name.
"""
#: directory of plans that are too long for the environment, unless the configuration names one
DEFAULT_PLAN_DIR = ".slurmdl"


@dataclass(frozen=True)
class Outcome:
    """What is to be done: the deciding process sends it to the one that does it.

    Attributes:
        command: starts the step.
        options, environ: as far as they are known: of all layers, and of the job with its final nodes.
        status: exit status if no step is started; None to start one.
        output: the rank map to print.
    """

    command: StepCommand
    options: DlOptions
    environ: Mapping[str, str]
    status: int | None = None
    output: str = ""


def run_srun(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Replace this process by srun (or mpirun), so that signals and the exit status are those of the program.

    Returns only after a dry run, after --print-rank-map, which start nothing, and after an error that is printed
    already: an invalid variable, with --dl-strict a step that cannot be mapped, or bad nodes that nothing replaces
    (--dl-preflight). Raises UsageError for an unknown --dl-* option, step starter, format or value, UnavailableError
    if srun (or mpirun with --step-starter=mpirun) is missing.
    """
    if argv[:1] in (["--help"], ["-h"]):
        print(f"{SRUN_HELP}\n{dl_options.help_text()}\nsrun's own options: srun --help")
        return 0
    args = step_command.parse_srun_argv(argv, partial(getopt.plugin_options, "srun"))
    if args.starts_no_step:
        _exec_step(step_command.plain_command(args, environ), environ)
    # outside the guard: a mistake in the user's own options is a usage error
    outcome = Outcome(StepCommand(()), args.merge_options(environ), dict(environ))
    on_warning: Callable[[str], None] = (lambda _: None) if args.line.has_option("quiet") else warn
    if misplaced := dl_options.misplaced_option_warning(args.line.operands, "program"):
        on_warning(misplaced)
    # memory limits and crashes of libraries may end the process that decides; this one starts the step in any case
    try:
        result = process.run_in_child(partial(_decide, args, outcome, on_warning))
        if result.sent:
            outcome = records.from_json(Outcome, result.sent)
        if result.failure:
            raise UnavailableError(f"the choice of the rank map {result.failure}")
    except Exception as error:
        outcome = _without_map(args, outcome, error, start_config_query(), on_warning)
    try:
        return _finish(outcome)
    except UnavailableError as error:
        # with a map the arguments or the environment may exceed the kernel's limit; the plain step may not
        if not (isinstance(error.__cause__, OSError) and outcome.command.environ_set):
            raise
        return _finish(_without_map(args, outcome, error, start_config_query(), on_warning, with_variables=False))


def _decide(args: SrunArgs, outcome: Outcome, on_warning: Callable[[str], None],
            send: Callable[[dict[str, Any]], None]) -> None:
    """Map the ranks of the step, and send the outcome; the options first, as soon as they are complete."""
    get_slurm_config = start_config_query()
    try:
        environ = outcome.environ
        jobs.read_allocation(environ)
        record = submission_record.read_record(environ)
        outcome = replace(outcome, options=args.merge_options(environ, record))
        site_config = config.load_config()
        options = args.merge_options(environ, record, site_config.options)
        outcome = replace(outcome, options=options)
        send(records.to_json(outcome))
        call = StepCall(args, options, environ, record, site_config, get_slurm_config, on_warning)
        size, excluded = record.requested_size if record else None, frozenset[str]()
        checks_nodes = options.preflight and not (options.dry_run or args.map_format)
        if checks_nodes or size:
            from slurmdl.launch import job_start
        if checks_nodes:
            excluded = job_start.check_nodes_once(call)
        if size:
            outcome = replace(outcome, environ=job_start.environ_with_requested_size(environ, size))
            call = job_start.reduce_job(replace(call, environ=outcome.environ), size, excluded)
            outcome = replace(outcome, environ=call.environ)
        outcome = _map_step(call, outcome)
    except Exception as error:
        outcome = _without_map(args, outcome, error, get_slurm_config, on_warning)
    send(records.to_json(outcome))


def _map_step(call: StepCall, outcome: Outcome) -> Outcome:
    """The outcome with the command of the mapped step, or the text of its rank map; SlurmdlError without a map."""
    from slurmdl.launch import step_plan

    inputs = step_inputs.read_inputs(call)
    step = step_plan.plan_step(inputs)
    for warning in step.warnings:
        call.on_warning(warning)
    debug("decision: %d ranks in the order %s, zones from %s", len(step.plan), step.rank_map.order,
          inputs.topology.source)
    for line in step.explanation:
        warn(line)
    command, map_format = step.command, call.args.map_format
    # a map for other launchers keeps a long plan in a file only if its text names the plan
    if map_format in ("shell", "env") or not (map_format or call.options.dry_run):
        command = with_plan_file(command, call.site_config.plan_dir or DEFAULT_PLAN_DIR)
    if not map_format:
        return replace(outcome, command=command)
    from slurmdl.launch.rankmap_formats import RankMapInput, format_rank_map

    map_input = RankMapInput(step.plan, [node for node, _ in inputs.layout.node_tasks], inputs.cpus_per_task,
                             inputs.master_port, inputs.allocation.job_id, command.environ_set)
    return replace(outcome, status=0, output=format_rank_map(map_format, map_input))


def _without_map(args: SrunArgs, outcome: Outcome, error: Exception, get_slurm_config: Callable[[], SlurmConfig],
                 on_warning: Callable[[str], None], with_variables: bool = True) -> Outcome:
    """The outcome with the step in srun's own order, after a warning with the reason; no failure here costs the step.

    With --dl-strict, bad nodes, or if a plain srun cannot replace the mapped step, `error` is reported instead. The
    tasks get the variables of their ranks, if they are ranks, and with `with_variables`.
    """
    options, environ = outcome.options, outcome.environ
    if isinstance(error, BadNodesError) or options.strict or args.needs_map:
        return replace(outcome, status=report_error(error))
    reason = str(error)
    if not isinstance(error, SlurmdlError):
        reason = internal_error_text(error)
        print_traceback(error)
    extra_options: list[str] = []
    note = ""
    with suppress(Exception):
        mpi_option = slurm_conf.mpi_type_option(args.line, get_slurm_config, environ)
        if mpi_option == ["--mpi=pmix"] and args.spans_components and slurm_conf.pmix_hangs_across_components(
                get_slurm_config):
            mpi_option, note = [], ", without --mpi=pmix: with it, srun before Slurm 24.11 can hang at the step's end"
        extra_options = [*mpi_option, *args.kill_on_bad_exit_option(environ)]
    debug("decision: srun's own order: %s", reason)
    with suppress(Exception):
        on_warning(f"{reason}; the step runs in srun's own order{note}")
    command = step_command.plain_command(args, environ, extra_options)
    with suppress(Exception):
        # the order of Slurm 26.05 follows the topology: its first node is not known to be the first of a list
        if with_variables and args.is_ordered_by_srun(environ) and _tasks_are_ranks(args, options, environ) \
                and get_slurm_config().version < (26, 5):
            task = step_inputs.build_task_command(args.line, "srun", environ, is_mapped=False)
            command = step_command.unmapped_command(args, task, environ, extra_options, step_inputs.pick_free_port())
    return replace(outcome, command=command, status=None)


def _tasks_are_ranks(args: SrunArgs, options: DlOptions, environ: Mapping[str, str]) -> bool:
    """Whether each task of an unmapped step is one rank; otherwise a launcher or the program sets the ranks."""
    if options.ranks_per_node or options.mesh or options.groups or options.launcher_name not in ("auto", "none"):
        return False
    return options.launcher == "none" or launchers.find_launcher(args.line.operands, environ) is None


def _finish(outcome: Outcome) -> int:
    """Print the rank map or the dry run, or replace this process by the step."""
    if outcome.status is not None:
        print(outcome.output, end="")
        return outcome.status
    if outcome.options.dry_run:
        _print_dry_run(outcome.command)
        return 0
    _exec_step(outcome.command, outcome.environ)


def with_plan_file(command: StepCommand, directory: str) -> StepCommand:
    """Move the plan of a step into a file if it is too long for a variable.

    Raises PlacementError if the file cannot be written. All nodes share the directory.
    """
    if not command.oversized_plan:
        return command
    try:
        path = plans.write_plan_file(command.oversized_plan, directory)
    except OSError as error:
        raise PlacementError(f"{os.path.abspath(directory)}: the plan cannot be written ({error.strerror}); set "
                             "plan_dir in slurmdl.yaml to a directory that all nodes share") from error
    return replace(command, environ_set={**command.environ_set, "SLURMDL_PLAN": f"file:{path}"}, plan_file=path)


def _print_dry_run(command: StepCommand) -> None:
    """Print the changes of the environment, the command line and the text of each file on stdout."""
    for name in command.environ_unset:
        if name in os.environ and name not in command.environ_set:
            print_escaped(f"unset {name}")
    plan = command.oversized_plan
    for name, value in command.environ_set.items():
        print_escaped(f"export {name}={'file:PLAN' if name == 'SLURMDL_PLAN' and plan else shlex.quote(value)}")
    print_escaped(shlex.join(command.argv_with_files(lambda file: file.name)))
    for file in [*command.inline_files(), *([InlineFile("", "PLAN", plan)] if plan else [])]:
        print_escaped(f"# {file.name}:\n{file.text.rstrip()}")


def _exec_step(command: StepCommand, environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by the program, or by its supervisor if something is left to do at its end.

    Inline files are anonymous memory with inherited descriptors: nothing is left to remove.
    """
    args = command.argv_with_files(_memfd_path)
    program = shutil.which(args[0], path=environ.get("PATH"))
    if program is None:
        raise UnavailableError(f"{args[0]}: not found in PATH; Slurm's client commands are needed")
    argv, variables = [program, *args[1:]], command.apply_to_environ(environ)
    if not (command.plan_file or command.failure_message):
        process.exec_program(argv, variables)
    from slurmdl.slurm import supervisor

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
