"""The command of a mapped step as a value: command line, environment and the files that it reads. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slurmdl import plan as plans
from slurmdl.errors import PlacementError
from slurmdl.launch.rankmap_formats import hostfile_text
from slurmdl.launch.task_command import TaskCommand
from slurmdl.plan import Plan
from slurmdl.slurm import srun_options
from slurmdl.slurm.getopt import CommandLine

#: message of Open MPI 5.0's mpirun when it has lost a node; it ends all tasks and exits with status 0
NODE_LOST_MESSAGE = "has lost communication with a remote daemon"

#: variables set by the launcher and the task shell; unset for a step that starts inside a task
STEP_VARIABLES = ("SLURMDL_PLAN", "SLURMDL_TASK_SCRIPT", "SLURMDL_UNMAPPED_TASK_SCRIPT", "SLURMDL_ROLE_RANKS",
                  "SLURMDL_ZONE_RANKS", "SLURMDL_WORLD_SIZE", "SLURMDL_MASTER_ADDR", "SLURMDL_MASTER_PORT",
                  "SLURMDL_JOB_NAME", "SLURMDL_ROLE", "SLURMDL_ROLE_RANK", "SLURMDL_ZONE", "SLURMDL_LAUNCHER",
                  "SLURMDL_RANKS_PER_TASK", "SLURMDL_VERIFY", "SLURMDL_VERIFY_PYTHON", "SLURMDL_VERIFY_SCRIPT",
                  "SLURMDL_VERIFY_RANKS", "SLURMDL_EXPORTED")


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


def srun_command(line: CommandLine, plan: Plan, task: TaskCommand, extra_options: Sequence[str],
                 variables: Mapping[str, str], environ: Mapping[str, str], ranks_per_task: int = 1) -> StepCommand:
    """The command that starts the step by srun: `--distribution=arbitrary` with a host file of one line per task.

    Args:
        line: the user's command line; the host file replaces its layout options.
        extra_options: further options for srun, such as --mpi.
        variables: result of `task_variables`.
    """
    replaced = {o.name for o in line.options if o.name.startswith("dl-")} | srun_options.WRAPPER_OPTIONS
    args = [*line.args_except(srun_options.LAYOUT_OPTIONS | replaced), *extra_options]
    variables = {**variables, "SLURMDL_TASK_SCRIPT": task.script}
    per_node = line.last_value("tasks-per-node") or line.last_value("ntasks-per-node")
    if per_node:
        variables["SLURM_NTASKS_PER_NODE"] = per_node  # for the tasks; the host file has the layout
    name_option, name_variable = _step_name(line, environ)
    args, variables = [*args, *name_option], {**variables, **name_variable}
    # srun truncates the host file to SLURM_NTASKS unless the command line has the count
    args += [f"--ntasks={len(plan) // ranks_per_task}", "--distribution=arbitrary"]
    program: list[str | InlineFile] = [*task.shell, *task.program]
    if task.multi_prog:
        program = [InlineFile("", "PROGRAMS", task.multi_prog), *task.program[1:]]
    return StepCommand(("srun", *args, InlineFile("--nodelist=", "HOSTFILE", hostfile_text(plan, ranks_per_task)),
                        *program),
                       variables, inherited_variables(environ))


def unmapped_command(line: CommandLine, srun_argv: Sequence[str], task: TaskCommand, extra_options: Sequence[str],
                     master_port: int, environ: Mapping[str, str]) -> StepCommand:
    """The command that starts the step as the user wrote it, with the ranks of srun's order in the tasks' variables.

    Args:
        srun_argv: the user's arguments for srun.
        task: command of each task of an unmapped step.
    """
    name_option, variables = _step_name(line, environ)
    # in the script, since the SPANK plugin removes the variables of maps
    variables["SLURMDL_UNMAPPED_TASK_SCRIPT"] = f"SLURMDL_MASTER_PORT={master_port}\n{task.script}"
    options = srun_argv[:len(srun_argv) - len(line.operands)]
    return StepCommand(("srun", *extra_options, *name_option, *options, *task.shell, *task.program), variables,
                       inherited_variables(environ))


def _step_name(line: CommandLine, environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Option by which accounting shows the program instead of the shell, variable by which tasks see the job's name.
    """
    if line.has_option("job-name"):
        return [], {}
    return [f"--job-name={line.operands[0].rpartition('/')[2]}"], {
        "SLURMDL_JOB_NAME": environ.get("SLURM_JOB_NAME", "")}


def mpirun_command(line: CommandLine, plan: Plan, task: TaskCommand, variables: Mapping[str, str],
                   environ: Mapping[str, str], with_ulfm: bool = False) -> StepCommand:
    """The command that starts the step by Open MPI's mpirun, which starts its daemons by srun.

    Open MPI takes a host file as the rank order only with its sequential mapper (mpirun(1), --map-by seq). Raises
    PlacementError if an option has no counterpart in mpirun. With `with_ulfm` the ranks may continue after the loss
    of a rank (Open MPI 5); otherwise mpirun ends all ranks.
    """
    valid = srun_options.LAYOUT_OPTIONS | {"cpus-per-task", "step-starter"}
    for option in line.options:
        if option.name not in valid and not option.name.startswith("dl-"):
            raise PlacementError(f"{option.args[0]}: mpirun has no such option; expected with --step-starter=mpirun: "
                                 f"{', '.join(sorted('--' + name for name in valid))}")
    variables = {**variables, "SLURMDL_TASK_SCRIPT": task.script}
    # without --noprefix Open MPI puts the directory of its mpirun first in PATH
    args: list[str | InlineFile] = ["mpirun", "--noprefix", "-np", str(len(plan)), "--hostfile",
                                    InlineFile("", "HOSTFILE", hostfile_text(plan)), "--map-by", "seq",
                                    "--bind-to", "none", *(["--with-ft", "ulfm"] if with_ulfm else [])]
    for name in variables:
        args += ["-x", name]
    return StepCommand((*args, *task.shell, *task.program), variables, inherited_variables(environ),
                       NODE_LOST_MESSAGE if with_ulfm else "")


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
