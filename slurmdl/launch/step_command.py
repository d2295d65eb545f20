"""A mapped step as a value: its command line, its environment and the files that it reads.

A rank map and a plan go in; the words of an `srun` or of an `mpirun` come out. Nothing is started here.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurmdl import plan as plans
from slurmdl.errors import InputError, PlacementError
from slurmdl.launch.rankmap_formats import hostfile_text
from slurmdl.plan import Plan
from slurmdl.slurm import srun_options
from slurmdl.slurm.getopt import CommandLine

#: what the program of a task is put behind; the text itself is in the environment
TASK_SHELL = ("/bin/sh", "-c", 'eval "$SLURMDL_TASK_SCRIPT"', "slurmdl")
#: bash, called as sh, hands on variables whose names are none for the shell (exported functions); dash drops them
TASK_SHELL_BASH = ("/bin/bash", "--posix", "-c", *TASK_SHELL[2:])

#: how many ports are tried at most
_MAX_PORT_DRAWS = 100

#: what Open MPI 5.0's mpirun says where it has lost a node: it ends all tasks, and then with status 0
NODE_LOST_MESSAGE = "has lost communication with a remote daemon"

#: what the launcher and the tasks' shell set; a step started from inside a task starts without them
STEP_VARIABLES = ("SLURMDL_PLAN", "SLURMDL_TASK_SCRIPT", "SLURMDL_PS_RANKS", "SLURMDL_ZONE_RANKS", "SLURMDL_WORLD_SIZE", "SLURMDL_MASTER_ADDR",
           "SLURMDL_MASTER_PORT", "SLURMDL_JOB_NAME", "SLURMDL_ROLE", "SLURMDL_ROLE_RANK", "SLURMDL_ZONE", "SLURMDL_EXPORTED")


@dataclass(frozen=True)
class InlineFile:
    """A word of a command line that ends in the path of a file with this text.

    The files are inherited file descriptors when the step starts, so that none is left behind.
    """

    prefix: str
    name: str
    text: str


@dataclass(frozen=True)
class StepCommand:
    """What is executed.

    Attributes
    ----------
    argv : words of the command line, the program first.
    set, unset : changes to the environment.
    fails : words on its stderr with which it has failed whatever its exit status is, "" for none.
    plan_file : file to remove when it has ended, "" for none.
    """

    argv: tuple[str | InlineFile, ...]
    environ_set: Mapping[str, str] = field(default_factory=dict)
    environ_unset: tuple[str, ...] = ()
    failure_message: str = ""
    plan_file: str = ""

    def argv_with_files(self, path_of: Callable[[InlineFile], str]) -> list[str]:
        """The command line, with `place` giving the path of each file."""
        return [word.prefix + path_of(word) if isinstance(word, InlineFile) else word for word in self.argv]

    def inline_files(self) -> list[InlineFile]:
        return [word for word in self.argv if isinstance(word, InlineFile)]

    def apply_to_environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        return {**{k: v for k, v in environ.items() if k not in self.environ_unset}, **self.environ_set}


def inherited_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Variables that an enclosing mapped task has from us; those that the user set are not among them."""
    return (*STEP_VARIABLES, *environ.get("SLURMDL_EXPORTED", "").split())


def srun_command(line: CommandLine, plan: Plan, extra_options: Sequence[str], variables: Mapping[str, str],
         environ: Mapping[str, str]) -> StepCommand:
    """The step through srun: `--distribution=arbitrary` over a host file of one line per rank.

    Parameters
    ----------
    line : the user's command line; of its options only those that decide the layout give way to the host file.
    extra : further options for srun, such as --mpi.
    variables : as `task_variables` gives them.
    """
    own = {o.name for o in line.options if o.name.startswith("dl-")} | srun_options.WRAPPER_OPTIONS
    words = [*line.args_except(srun_options.LAYOUT_OPTIONS | own), *extra_options]
    variables = {**variables, "SLURMDL_TASK_SCRIPT": _task_script("task_srun.sh")}
    per_node = line.last_value("tasks-per-node") or line.last_value("ntasks-per-node")
    if per_node:
        variables["SLURM_NTASKS_PER_NODE"] = per_node  # srun hands it on to the tasks; the host file has the layout
    if not line.has_option("job-name"):
        # accounting shows the name of the program, not that of the shell before it; the tasks see the job's name
        words.append(f"--job-name={os.path.basename(line.operands[0])}")
        variables["SLURMDL_JOB_NAME"] = environ.get("SLURM_JOB_NAME", "")
    # the count stands on the command line, as srun cuts the file to SLURM_NTASKS
    words += [f"--ntasks={len(plan)}", "--distribution=arbitrary"]
    shell = _task_shell(environ)
    if line.has_option("multi-prog"):
        programs = InlineFile("", "PROGRAMS", wrap_multi_prog(line.operands[0], shell))
        rest: list[str | InlineFile] = [programs, *line.operands[1:]]
    else:
        rest = [*shell, *_resolve_program(line, environ), *line.operands[1:]]
    return StepCommand(("srun", *words, InlineFile("--nodelist=", "HOSTFILE", hostfile_text(plan)), *rest),
                variables, inherited_variables(environ))


def mpirun_command(line: CommandLine, plan: Plan, variables: Mapping[str, str], environ: Mapping[str, str],
           with_ulfm: bool = False) -> StepCommand:
    """The step through Open MPI's mpirun, which starts its daemons by srun inside the allocation.

    Host files are no order for Open MPI but under its sequential mapper (mpirun(1), --map-by seq).

    Parameters
    ----------
    ulfm : the ranks may go on without one that is lost (Open MPI 5); else mpirun ends them all.
    """
    valid = srun_options.LAYOUT_OPTIONS | {"cpus-per-task", "launcher"}
    for option in line.options:
        if option.name not in valid and not option.name.startswith("dl-"):
            raise PlacementError(f"{option.args[0]}: mpirun has no such option; valid with --launcher=mpirun: "
                                 f"{', '.join(sorted('--' + name for name in valid))}")
    variables = {**variables, "SLURMDL_TASK_SCRIPT": _task_script("task_mpirun.sh")}
    # without --noprefix Open MPI puts the directory of its mpirun before the user's PATH
    words: list[str | InlineFile] = ["mpirun", "--noprefix", "-np", str(len(plan)), "--hostfile",
                                 InlineFile("", "HOSTFILE", hostfile_text(plan)), "--map-by", "seq",
                                 "--bind-to", "none", *(["--with-ft", "ulfm"] if with_ulfm else [])]
    for name in variables:
        words += ["-x", name]
    return StepCommand((*words, *_task_shell(environ), *line.operands), variables,
                       inherited_variables(environ), NODE_LOST_MESSAGE if with_ulfm else "")


def task_variables(plan: Plan) -> dict[str, str]:
    """The variables that all tasks share; a shell before the program makes from them those that differ."""
    zones: dict[str, list[int]] = {}
    for rank in range(len(plan)):
        if plan.leaf_zone(rank):
            zones.setdefault(plan.leaf_zone(rank), []).append(rank)
    return {
        "SLURMDL_PLAN": plans.encode_plan(plan),
        "SLURMDL_WORLD_SIZE": str(len(plan)),
        "SLURMDL_PS_RANKS": fold_ranks(rank for rank, role in enumerate(plan.roles) if role == "ps"),
        "SLURMDL_ZONE_RANKS": "".join(f"{zone}:{fold_ranks(ranks)};" for zone, ranks in zones.items()),
        "SLURMDL_MASTER_ADDR": plan.nodes[0],
        "SLURMDL_MASTER_PORT": str(pick_free_port()),
    }


def oversized_plan(command: StepCommand) -> str:
    """The plan of a step if it is too long for a variable, else ""."""
    text = command.environ_set.get("SLURMDL_PLAN", "")
    return text if len(text) > plans.MAX_ENV_BYTES else ""


def with_plan_file(command: StepCommand, directory: str) -> StepCommand:
    """The step with its plan in a file, if that is too long for a variable.

    Parameters
    ----------
    directory : one that the nodes share.

    Raises
    ------
    PlacementError : the file cannot be written.
    """
    text = oversized_plan(command)
    if not text:
        return command
    try:
        path = plans.write_plan_file(text, directory)
    except OSError as error:
        raise PlacementError(f"{os.path.abspath(directory)}: the plan cannot be written ({error.strerror}); set "
                             "plan_dir in slurmdl.yaml to a directory that all nodes share") from error
    return replace(command, environ_set={**command.environ_set, "SLURMDL_PLAN": f"file:{path}"}, plan_file=path)


def pick_free_port() -> int:
    """A port for rank 0: one that is free here, as `slurmdl srun` most often runs on the host of rank 0.

    It is drawn at random, so that nobody can occupy it beforehand, below the ports that Linux gives out by itself
    (32768) and above those of services.
    """
    for _ in range(_MAX_PORT_DRAWS):
        port = 10_000 + secrets.randbelow(22_000)
        if _is_port_free(port):
            break
    return port


def _is_port_free(port: int) -> bool:
    """Whether a server can listen at this port of this host, for IPv6 and IPv4; True where that cannot be tried."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family) as server:
                server.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
    return True


def fold_ranks(ranks: Iterable[int]) -> str:
    """Ascending ranks as 0,4-5."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def wrap_multi_prog(path: str, shell: Sequence[str]) -> str:
    """The file of `srun --multi-prog` with the tasks' shell before every program.

    The ranks keep their programs: only the nodes of the ranks differ. PlacementError where it cannot be read.
    """
    prefix = " ".join(word if word.isalnum() or word[0] in "/-" else f"'{word}'" for word in shell)
    try:
        text = Path(path).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise PlacementError(f"--multi-prog: {path}: {error.strerror}") from error
    lines, continued = [], False
    for line in text.splitlines():
        fields = line.split(None, 1)
        if len(fields) == 2 and not fields[0].startswith("#") and not continued:
            lines.append(f"{fields[0]} {prefix} {fields[1]}")
        else:
            lines.append(line)
        continued = line.endswith("\\")
    return "\n".join(lines) + "\n"


def _task_shell(environ: Mapping[str, str]) -> tuple[str, ...]:
    odd = any(not name.isidentifier() for name in environ)
    return TASK_SHELL_BASH if odd and os.path.exists(TASK_SHELL_BASH[0]) else TASK_SHELL


def _resolve_program(line: CommandLine, environ: Mapping[str, str]) -> list[str]:
    """srun finds a program in the working directory, too, where PATH has none of its name; a shell does not."""
    import shutil

    program = line.operands[0]
    here = os.path.join(line.last_value("chdir") or os.getcwd(), program)
    if "/" not in program and shutil.which(program, path=environ.get("PATH")) is None and os.path.isfile(here):
        return [here]
    return [program]


def _task_script(launcher_script: str) -> str:
    """The text of the tasks' shell without its comments."""
    folder = Path(__file__).parent
    try:
        text = (folder / launcher_script).read_text() + (folder / "task.sh").read_text()
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", error.filename) from error
    return "\n".join(line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
