"""Command lines of a step as values: the user's `slurmdl srun`, and the command that starts the step. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile

from slurmdl import dl_options
from slurmdl import plan as plans
from slurmdl.dl_options import DlOptions
from slurmdl.errors import PlacementError, UsageError, sort_by_similarity
from slurmdl.launch.submission_record import SubmissionRecord
from slurmdl.plan import Plan
from slurmdl.slurm import getopt, step_layout
from slurmdl.slurm.getopt import CommandLine

STEP_STARTERS = ("srun", "mpirun")
#: options of slurmdl besides --dl-*
_WRAPPER_OPTIONS = frozenset({"step-starter", "print-rank-map"})
_LONG_OPTIONS: dict[str, getopt.HasArg] = {**step_layout.LONG_OPTIONS, **dl_options.LONG_OPTIONS,
                                           **dict.fromkeys(_WRAPPER_OPTIONS, "required")}

#: put before the program of each task; the environment has the script
TASK_SHELL = ("/bin/sh", "-c", 'eval "$SLURMDL_TASK_SCRIPT"', "slurmdl")
#: the same in an unmapped step; by SLURMDL_TASK_SCRIPT the SPANK plugin recognizes mapped ones, and sets no roles
UNMAPPED_TASK_SHELL = ("/bin/sh", "-c", 'eval "$SLURMDL_UNMAPPED_TASK_SCRIPT"', "slurmdl")

#: message of Open MPI 5.0's mpirun when it has lost a node; it ends all tasks and exits with status 0
NODE_LOST_MESSAGE = "has lost communication with a remote daemon"

#: variables set by the launcher and the task shell; unset for a step that starts inside a task
STEP_VARIABLES = ("SLURMDL_PLAN", "SLURMDL_TASK_SCRIPT", "SLURMDL_UNMAPPED_TASK_SCRIPT", "SLURMDL_ROLE_RANKS",
                  "SLURMDL_ZONE_RANKS", "SLURMDL_WORLD_SIZE", "SLURMDL_MASTER_ADDR", "SLURMDL_MASTER_PORT",
                  "SLURMDL_JOB_NAME", "SLURMDL_ROLE", "SLURMDL_ROLE_RANK", "SLURMDL_ZONE", "SLURMDL_LAUNCHER",
                  "SLURMDL_RANKS_PER_TASK", "SLURMDL_VERIFY", "SLURMDL_VERIFY_PYTHON", "SLURMDL_VERIFY_SCRIPT",
                  "SLURMDL_VERIFY_RANKS", "SLURMDL_EXPORTED")


@dataclass(frozen=True)
class SrunArgs:
    """A parsed command line of `slurmdl srun`.

    Attributes:
        srun_argv: the arguments without slurmdl's options.
        step_starter: one of STEP_STARTERS.
        map_format: one of rankmap_formats.FORMATS if only the rank map is printed, else "".
        settings: the --dl-* options.
    """

    line: CommandLine
    srun_argv: tuple[str, ...]
    step_starter: str
    map_format: str
    settings: Mapping[str, str]

    @property
    def starts_no_step(self) -> bool:
        """Whether srun itself starts no step, or there is no program: srun handles both itself."""
        passthrough = any(self.line.has_option(name) for name in step_layout.PASSTHROUGH)
        return passthrough or self.line.last_value("mpi") == "list" or not (self.line.operands or self.map_format)

    @property
    def needs_map(self) -> bool:
        """Whether a plain srun cannot replace the mapped step."""
        return self.step_starter != "srun" or bool(self.map_format)

    @property
    def spans_components(self) -> bool:
        """Whether the step runs on several components of a heterogeneous job."""
        groups = self.line.last_value("het-group") or self.line.last_value("pack-group") or ""
        return ":" in self.line.operands or (not groups.isdigit() and bool(groups))

    def is_ordered_by_srun(self, environ: Mapping[str, str]) -> bool:
        """Whether the tasks are ranks in the order of the step's nodes if srun orders them, rank 0 on the first node.

        Not with options of other plugins: the image of a container may lack a shell.
        """
        distribution = self.line.last_value("distribution") or environ.get("SLURM_DISTRIBUTION", "")
        names = {option.name if option.is_known and option.is_complete else "" for option in self.line.options
                 if not option.name.startswith("dl-")}
        return (environ.keys() >= {"SLURM_JOB_ID", "SLURM_JOB_NODELIST"}
                and environ.keys().isdisjoint(step_layout.NOT_ORDERED_BY_SRUN_ENV)
                and names <= step_layout.ORDERED_BY_SRUN | _WRAPPER_OPTIONS
                and not distribution.lower().startswith("arbitrary") and ":" not in self.line.operands
                and "/" not in (self.line.last_value("nodelist") or ""))

    def merge_options(self, environ: Mapping[str, str], record: SubmissionRecord | None = None,
                      site_options: Mapping[str, str] | None = None) -> DlOptions:
        """Merge the --dl-* options: site < submission < environment < command line.

        Raises UsageError for an invalid variable or value.
        """
        changed = record.environ_without_inputs(environ) if record else environ
        return dl_options.merge_layers(site_options or {}, record.options.step_settings() if record else {},
                                       dl_options.dl_settings_from_environ(changed), self.settings)

    def kill_on_bad_exit_option(self, environ: Mapping[str, str]) -> list[str]:
        """--kill-on-bad-exit for the built-in trainer, whose ranks would wait forever for a killed rank.

        Other programs may continue without a task. The user's own option has precedence.
        """
        is_chosen = self.line.has_option("kill-on-bad-exit") or "SLURM_KILL_BAD_EXIT" in environ
        return ["--kill-on-bad-exit=1"] if _is_trainer(self.line.operands) and not is_chosen else []


def parse_srun_argv(argv: Sequence[str],
                    plugin_options: Callable[[], Mapping[str, getopt.HasArg]] = dict) -> SrunArgs:
    """Parse the command line; `plugin_options` as for getopt.parse_command_line.

    UsageError for an unknown --dl-* option, step starter, format or value.
    """
    line = getopt.parse_command_line(argv, step_layout.SHORT_OPTIONS, _LONG_OPTIONS, plugin_options)
    settings = dl_options.collect_settings(line.options)
    starter = line.last_value("step-starter") or "srun"
    if starter not in STEP_STARTERS:
        raise UsageError(f"--step-starter: invalid value {starter!r}; expected one of {', '.join(STEP_STARTERS)}")
    map_format = line.last_value("print-rank-map") or ""
    if line.has_option("print-rank-map"):
        from slurmdl.launch.rankmap_formats import FORMATS

        if map_format not in FORMATS:
            valid = sort_by_similarity(map_format, list(FORMATS))
            raise UsageError(f"--print-rank-map: invalid value {map_format!r}; expected one of {', '.join(valid)}")
    removed = {option.index + i for option in line.options
               if option.name.startswith("dl-") or option.name in _WRAPPER_OPTIONS for i in range(len(option.args))}
    srun_argv = tuple(arg for i, arg in enumerate(argv) if i not in removed)
    return SrunArgs(line, srun_argv, starter, map_format, settings)


def _is_trainer(words: Sequence[str]) -> bool:
    """Whether a program is `slurmdl train` or `python -m slurmdl.train`, with any options of Python."""
    program, *operands = [words[0].rpartition("/")[2], *words[1:]] if words else [""]
    if program.startswith("python"):
        operands = list(dropwhile(lambda word: word.startswith("-") and word != "-m", operands))
        return operands[:2] == ["-m", "slurmdl.train"] or operands[:3] == ["-m", "slurmdl", "train"]
    return program == "slurmdl" and operands[:1] == ["train"]


@dataclass(frozen=True)
class TaskCommand:
    """The command of each task: a shell that sets the task's variables, then the user's program.

    Attributes:
        script: value of SLURMDL_TASK_SCRIPT, or SLURMDL_UNMAPPED_TASK_SCRIPT.
        shell: the arguments before the user's program.
        multi_prog: text of the configuration file of `srun --multi-prog`, with the task shell in it; "" without.
    """

    script: str
    shell: tuple[str, ...]
    program: tuple[str, ...]
    multi_prog: str = ""


def wrap_multi_prog(text: str, shell: Sequence[str]) -> str:
    """Put the task shell before every program in the configuration file of `srun --multi-prog`.

    The ranks keep their programs: only their nodes change.
    """
    prefix = " ".join(arg if arg.isalnum() or arg[0] in "/-" else f"'{arg}'" for arg in shell)
    lines, is_continuation = [], False
    for line in text.splitlines():
        fields = line.split(None, 1)
        if len(fields) == 2 and not fields[0].startswith("#") and not is_continuation:
            lines.append(f"{fields[0]} {prefix} {fields[1]}")
        else:
            lines.append(line)
        is_continuation = line.endswith("\\")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class InlineFile:
    """An argument that ends in the path of a file with this text.

    The started step inherits the files as file descriptors, so that no file remains.
    """

    prefix: str
    name: str
    text: str


@dataclass(frozen=True)
class StepCommand:
    """A command to execute.

    Attributes:
        argv: command line, the program first.
        environ_set, environ_unset: changes to the environment.
        failure_message: text on stderr that means failure whatever the exit status, or "".
        plan_file: file to remove at the end, or "".
    """

    argv: tuple[str | InlineFile, ...]
    environ_set: Mapping[str, str] = field(default_factory=dict)
    environ_unset: tuple[str, ...] = ()
    failure_message: str = ""
    plan_file: str = ""

    def argv_with_files(self, path_of: Callable[[InlineFile], str]) -> list[str]:
        """The command line with the path of each inline file."""
        return [arg.prefix + path_of(arg) if isinstance(arg, InlineFile) else arg for arg in self.argv]

    def inline_files(self) -> list[InlineFile]:
        return [arg for arg in self.argv if isinstance(arg, InlineFile)]

    def apply_to_environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        return {**{k: v for k, v in environ.items() if k not in self.environ_unset}, **self.environ_set}

    @property
    def oversized_plan(self) -> str:
        """The value of SLURMDL_PLAN if it is too long for a variable, else ""."""
        text = self.environ_set.get("SLURMDL_PLAN", "")
        return text if len(text) > plans.MAX_ENV_BYTES else ""


def inherited_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Variables that slurmdl set in an enclosing task, without those that the user set."""
    return (*STEP_VARIABLES, *environ.get("SLURMDL_EXPORTED", "").split())


def srun_command(args: SrunArgs, plan: Plan, task: TaskCommand, variables: Mapping[str, str],
                 environ: Mapping[str, str], extra_options: Sequence[str] = (),
                 ranks_per_task: int = 1) -> StepCommand:
    """The command that starts the step by srun: `--distribution=arbitrary` with a host file of one line per task.

    Args:
        args: the user's command line; the host file replaces its layout options.
        variables: result of `task_variables`.
        extra_options: further options for srun, such as --mpi.
    """
    line = args.line
    replaced = {o.name for o in line.options if o.name.startswith("dl-")} | _WRAPPER_OPTIONS
    name_option, name_variable = _step_name(line, environ)
    variables = {**variables, "SLURMDL_TASK_SCRIPT": task.script, **name_variable}
    per_node = line.last_value("tasks-per-node") or line.last_value("ntasks-per-node")
    if per_node:
        variables["SLURM_NTASKS_PER_NODE"] = per_node  # for the tasks; the host file has the layout
    program: list[str | InlineFile] = [*task.shell, *task.program]
    if task.multi_prog:
        program = [InlineFile("", "PROGRAMS", task.multi_prog), *task.program[1:]]
    kept = line.args_except(step_layout.LAYOUT_OPTIONS | replaced)
    # srun truncates the host file to SLURM_NTASKS unless the command line has the count
    argv = ("srun", *kept, *extra_options, *name_option, f"--ntasks={len(plan) // ranks_per_task}",
            "--distribution=arbitrary", InlineFile("--nodelist=", "HOSTFILE", _hostfile(plan, ranks_per_task)),
            *program)
    return StepCommand(argv, variables, inherited_variables(environ))


def plain_command(args: SrunArgs, environ: Mapping[str, str], extra_options: Sequence[str] = ()) -> StepCommand:
    """The command that starts the step as the user wrote it."""
    return StepCommand(("srun", *extra_options, *args.srun_argv), environ_unset=inherited_variables(environ))


def unmapped_command(args: SrunArgs, task: TaskCommand, environ: Mapping[str, str], extra_options: Sequence[str],
                     master_port: int) -> StepCommand:
    """The command that starts the step as the user wrote it, with the ranks of srun's order in the tasks' variables.

    `task` is the command of each task of an unmapped step.
    """
    name_option, variables = _step_name(args.line, environ)
    # in the script, since the SPANK plugin removes the variables of maps
    variables["SLURMDL_UNMAPPED_TASK_SCRIPT"] = f"SLURMDL_MASTER_PORT={master_port}\n{task.script}"
    options = args.srun_argv[:len(args.srun_argv) - len(args.line.operands)]
    return StepCommand(("srun", *extra_options, *name_option, *options, *task.shell, *task.program), variables,
                       inherited_variables(environ))


def _step_name(line: CommandLine, environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Option by which accounting shows the program instead of the shell, variable by which tasks see the job's name.
    """
    if line.has_option("job-name"):
        return [], {}
    return [f"--job-name={line.operands[0].rpartition('/')[2]}"], {
        "SLURMDL_JOB_NAME": environ.get("SLURM_JOB_NAME", "")}


def mpirun_command(args: SrunArgs, plan: Plan, task: TaskCommand, variables: Mapping[str, str],
                   environ: Mapping[str, str], with_ulfm: bool = False) -> StepCommand:
    """The command that starts the step by Open MPI's mpirun, which starts its daemons by srun.

    Open MPI takes a host file as the rank order only with its sequential mapper (mpirun(1), --map-by seq). Raises
    PlacementError if an option has no counterpart in mpirun. With `with_ulfm` the ranks may continue after the loss
    of a rank (Open MPI 5); otherwise mpirun ends all ranks.
    """
    valid = step_layout.LAYOUT_OPTIONS | {"cpus-per-task", "step-starter"}
    for option in args.line.options:
        if option.name not in valid and not option.name.startswith("dl-"):
            raise PlacementError(f"{option.args[0]}: mpirun has no such option; expected with --step-starter=mpirun: "
                                 f"{', '.join(sorted('--' + name for name in valid))}")
    variables = {**variables, "SLURMDL_TASK_SCRIPT": task.script}
    # without --noprefix Open MPI puts the directory of its mpirun first in PATH
    argv: list[str | InlineFile] = ["mpirun", "--noprefix", "-np", str(len(plan)), "--hostfile",
                                    InlineFile("", "HOSTFILE", _hostfile(plan)), "--map-by", "seq",
                                    "--bind-to", "none", *(["--with-ft", "ulfm"] if with_ulfm else [])]
    for name in variables:
        argv += ["-x", name]
    return StepCommand((*argv, *task.shell, *task.program), variables, inherited_variables(environ),
                       NODE_LOST_MESSAGE if with_ulfm else "")


def _hostfile(plan: Plan, ranks_per_task: int = 1) -> str:
    """Line i is the node of task i: for srun --distribution=arbitrary, and Open MPI under --map-by seq."""
    return "".join(f"{node}\n" for node in plan.nodes[::ranks_per_task])


def task_variables(plan: Plan, master_port: int) -> dict[str, str]:
    """The variables that are the same for all tasks; the task shell derives the others from them."""
    zones = [plan.leaf_zone(rank) for rank in range(len(plan))]
    return {
        "SLURMDL_PLAN": plans.encode_plan(plan),
        "SLURMDL_WORLD_SIZE": str(len(plan)),
        "SLURMDL_ROLE_RANKS": _fold_by_name(plan.roles),
        "SLURMDL_ZONE_RANKS": _fold_by_name(zones),
        "SLURMDL_MASTER_ADDR": plan.nodes[0],
        "SLURMDL_MASTER_PORT": str(master_port),
    }


def _fold_by_name(names: Sequence[str]) -> str:
    """Ranks of each name, given the name of each rank, "" for none: "A:0-3;B:4,6;"."""
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        if name:
            ranks.setdefault(name, []).append(rank)
    return "".join(f"{name}:{fold_ranks(own)};" for name, own in ranks.items())


def fold_ranks(ranks: Iterable[int]) -> str:
    """Fold ascending ranks: 0, 4, 5 -> "0,4-5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
