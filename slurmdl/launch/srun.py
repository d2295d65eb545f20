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
from dataclasses import replace
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
from slurmdl.launch import (
    late_binding,
    rankmap_formats,
    step_command,
    submission_record,
    supervisor,
    task_command,
)
from slurmdl.launch.srun_args import SrunArgs, parse_srun_argv
from slurmdl.launch.step_command import InlineFile, StepCommand
from slurmdl.slurm import getopt, jobs, process, slurm_conf
from slurmdl.slurm.slurm_conf import SlurmConfig, start_config_query
from slurmdl.text import print_escaped

#: directory of plans that are too long for the environment, unless the configuration names one
DEFAULT_PLAN_DIR = ".slurmdl"


def run_srun(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Replace this process by srun (or mpirun), so that signals and the exit status are those of the program.

    Returns only after a dry run, after --print-rank-map, which start nothing, and after an error that the deciding
    process has printed: an invalid variable, with --dl-strict a step that cannot be mapped, or bad nodes that nothing
    replaces (--dl-preflight). Raises UsageError for an unknown --dl-* option, step starter, format or value,
    UnavailableError if srun (or mpirun with --step-starter=mpirun) is missing.
    """
    args = parse_srun_argv(argv, partial(getopt.plugin_options, "srun"))
    if args.calls_plain_srun:
        _exec_step(StepCommand(("srun", *args.srun_argv), environ_unset=step_command.inherited_variables(environ)),
                   environ)
    # outside the guard: a mistake in the user's own options is a usage error
    dl = args.merge_options(environ)
    on_warning: Callable[[str], None] = (lambda _: None) if args.line.has_option("quiet") else warn
    misplaced = dl_options.misplaced_option_warning(args.line.operands, "program")
    if misplaced:
        on_warning(misplaced)

    def unmapped_step(error: Exception, is_too_long: bool = False) -> StepCommand:
        """The step as the user wrote it, after a warning; raise `error` if that is not wanted."""
        if dl.strict or args.needs_map:
            raise error
        return _unmapped_step(args, None if is_too_long else dl, error, start_config_query(), environ, on_warning)

    status, output = None, ""
    # memory limits and crashes of libraries may end the process that decides; this one starts the step in any case
    try:
        result = process.run_in_child(partial(_decide, args, dl, environ, on_warning))
        if result.sent:
            status, output, environ = result.sent["status"], result.sent["output"], result.sent["environ"]
            dl = records.from_json(DlOptions, result.sent["options"])
        if result.failure:
            raise UnavailableError(f"the choice of the rank map {result.failure}")
        command = records.from_json(StepCommand, result.sent["command"])
    except Exception as error:
        command = unmapped_step(error)
    if status is not None:
        print(output, end="")
        return int(status)
    if dl.dry_run:
        _print_dry_run(command)
        return 0
    try:
        _exec_step(command, environ)
    except UnavailableError as error:
        # with a map the arguments or the environment may exceed the kernel's limit; the plain step may not
        if not (isinstance(error.__cause__, OSError) and command.environ_set):
            raise
        _exec_step(unmapped_step(error, is_too_long=True), environ)


def _decide(args: SrunArgs, dl: DlOptions, environ: Mapping[str, str], on_warning: Callable[[str], None],
            send: Callable[[dict[str, Any]], None]) -> None:
    """Map the ranks of the step, and send the command for `run_srun`, or a status if no step is to be started.

    It sends the options as soon as they are complete.
    """
    get_slurm_config = start_config_query()

    def send_progress(command: StepCommand, status: int | None = None, output: str = "") -> None:
        send({"status": status, "output": output, "options": records.to_json(dl), "environ": dict(environ),
              "command": records.to_json(command)})

    command = StepCommand(())
    try:
        jobs.read_allocation(environ)
        record = submission_record.read_record(environ)
        dl = args.merge_options(environ, record)
        site_config = config.load_config()
        dl = args.merge_options(environ, record, site_config.options)
        send_progress(command)
        from slurmdl.launch import step_context, step_plan

        link_scores, left_out = None, frozenset[str]()
        if dl.preflight and not (dl.dry_run or args.map_format):
            from slurmdl.launch import start_preflight

            left_out = start_preflight.check_nodes_once(dl, record.requested_size if record else None,
                                                        site_config, get_slurm_config, environ, on_warning)
        if record and record.requested_size:
            environ = late_binding.environ_with_requested_size(environ, record.requested_size)
            environ, link_scores = step_context.shrink_late_bound_job(record, dl, site_config, get_slurm_config,
                                                                      environ, on_warning, left_out)
        context = step_context.gather_context(args, dl, site_config, get_slurm_config, environ, on_warning,
                                              link_scores)
        step = step_plan.plan_step(context)
        for warning in step.warnings:
            on_warning(warning)
        if record and (problem := step_plan.broken_promise(record, step, dl)):
            on_warning(problem)
        debug("decision: %d ranks in the order %s, zones from %s", len(step.plan), step.rank_map.order,
              step.topology_source)
        if dl.explain:
            for line in step_plan.explanation_lines(step):
                warn(line)
        command = step.command
        # a map for other launchers keeps a long plan in a file only if its text names the plan
        if args.map_format in ("shell", "env") or not (args.map_format or dl.dry_run):
            command = with_plan_file(command, site_config.plan_dir or DEFAULT_PLAN_DIR)
        if args.map_format:
            map_input = step_plan.rank_map_input(context, step.plan, command.environ_set)
            send_progress(command, 0, rankmap_formats.format_rank_map(args.map_format, map_input))
            return
    except Exception as error:
        if isinstance(error, BadNodesError) or dl.strict or args.needs_map:
            send_progress(command, report_error(error))
            return
        command = _unmapped_step(args, dl, error, get_slurm_config, environ, on_warning)
    send_progress(command)


def _unmapped_step(args: SrunArgs, dl: DlOptions | None, error: Exception,
                   get_slurm_config: Callable[[], SlurmConfig], environ: Mapping[str, str],
                   on_warning: Callable[[str], None]) -> StepCommand:
    """The step in srun's own order, after a warning with the reason; no failure here costs the step.

    Without `dl` its tasks get no variables.
    """
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
    with suppress(Exception):
        # the order of Slurm 26.05 follows the topology: its first node is not known to be the first of a list
        if dl and args.is_ordered_by_srun(environ) and _tasks_are_ranks(args, dl, environ) \
                and get_slurm_config().version < (26, 5):
            task = task_command.build_task_command(args.line, "srun", environ, is_mapped=False)
            return step_command.unmapped_command(args.line, args.srun_argv, task, extra_options,
                                                 task_command.pick_free_port(), environ)
    return StepCommand(("srun", *extra_options, *args.srun_argv),
                       environ_unset=step_command.inherited_variables(environ))


def _tasks_are_ranks(args: SrunArgs, dl: DlOptions, environ: Mapping[str, str]) -> bool:
    """Whether each task of an unmapped step is one rank; otherwise a launcher or the program sets the ranks."""
    from slurmdl.launch import launchers

    if dl.ranks_per_node or dl.mesh or dl.groups or dl.launcher_name not in ("auto", "none"):
        return False
    return dl.launcher == "none" or launchers.find_launcher(args.line.operands, environ) is None


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
