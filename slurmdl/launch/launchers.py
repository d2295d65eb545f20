"""Launchers in the command of a step: what they start, and the changes that make them keep the rank map. Pure.

A launcher is a program that Slurm starts once per node and that starts the ranks of its node: torchrun, accelerate,
deepspeed, ray. Its ranks follow a node rank. A mapped step with one task per node has the planned node rank in
SLURM_PROCID and SLURM_NODEID, which most launch lines use. Two things lose it:

- torchrun's `c10d` rendezvous numbers the nodes by the text of `--local-addr`, by default the host name (sorted
  participants in dynamic_rendezvous.py of PyTorch). Only rank 0's is used as an address, so the task shell gives the
  other nodes texts that sort behind it in the planned order (`PET_LOCAL_ADDR` in task.sh).
- a launch line without a node rank. torchrun reads `PET_NODE_RANK`, `PET_MASTER_ADDR` and `PET_MASTER_PORT` if the
  options are missing (argparse_util.env of PyTorch); accelerate has no such variables and gets `--machine_rank`.

The command is edited as shell text, so that one code reads `srun torchrun ...` and `srun bash -c "torchrun ..."`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from slurmdl.errors import PlacementError, SlurmdlError
from slurmdl.text import pluralize

_SHELLS = ("bash", "sh", "dash", "zsh", "ksh")
_SCRIPT_SUFFIXES = (".py", ".sh")
#: options that name the host of the rendezvous
_HOST_OPTIONS = ("rdzv-endpoint", "master-addr", "main-process-ip")
#: a word of a shell command; substitutions stay unread
_WORD = re.compile(r"""(?:[^\s'"\\;|&<>()$`]|\\.|'[^']*'|"(?:[^"\\]|\\.)*"|\$\w+|\$\{[^{}]*\}"""
                   r"""|\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`)+""")
_OPERATOR = re.compile(r"[;|&\n]+")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_SRUN = re.compile(r"\b(?:slurmdl\s+srun|dlsrun)\b")
#: quoted text, an escaped character, or a variable
_PART = re.compile(r"""'([^']*)'|"((?:[^"\\]|\\.)*)"|\\(.)|\$\w+|\$\{\w+\}""")


@dataclass(frozen=True)
class Word:
    """A word of the shell text: its value, with known variables expanded, and its position.

    `attached_at` is the position of the value of `--name=value`.
    """

    value: str
    start: int
    end: int
    attached_at: int = 0


@dataclass(frozen=True)
class LauncherCommand:
    """A launcher in the command of a step; a subclass states the facts of each launcher.

    Attributes:
        name: its name in --dl-launcher.
        starts: the words that start it, e.g. ("accelerate", "launch"); `modules`: those of `python -m`.
        names: its options with a value that matter here; `flags`: those without.
        node_count_option: the option with the number of nodes.
        is_checked: whether its ranks have RANK, by which the rank check finds them.
        before, after: arguments of the step's program around `text`, e.g. ("bash", "-c"); () if it is the program.
        text: shell text that starts the launcher.
        options: option of the launcher, with dashes -> the word of its value.
        insert_at: position in `text` after the launcher's own words.
        is_readable: False if only --dl-launcher says that the program starts this launcher.
    """

    name: ClassVar[str]
    starts: ClassVar[tuple[tuple[str, ...], ...]]
    modules: ClassVar[tuple[str, ...]] = ()
    names: ClassVar[tuple[str, ...]] = ()
    flags: ClassVar[tuple[str, ...]] = ()
    node_count_option: ClassVar[str] = "--nnodes"
    is_checked: ClassVar[bool] = True

    before: tuple[str, ...]
    text: str
    after: tuple[str, ...]
    options: Mapping[str, Word]
    insert_at: int = 0
    is_readable: bool = True

    @classmethod
    def unread(cls, operands: Sequence[str]) -> LauncherCommand:
        """A program that starts the launcher in a way that cannot be read, such as a script."""
        return cls((), shlex.join(operands), (), {}, is_readable=False)

    @classmethod
    def own_words(cls, words: Sequence[str]) -> int:
        """How many of the first words start this launcher; 0 if they do not."""
        for start in cls.starts:
            if (words[0].rpartition("/")[2], *words[1:len(start)]) == start:
                return len(start)
        return 2 if words[0] == "-m" and words[1:2] and words[1] in cls.modules else 0

    @classmethod
    def parse_options(cls, words: Sequence[Word], environ: Mapping[str, str]) -> dict[str, Word]:
        """The options `names` before the training script; those of launchers with too many options to list."""
        options: dict[str, Word] = {}
        for i, word in enumerate(words):
            if word.value.endswith(".py"):
                break
            name, equals, _ = word.value.replace("_", "-").partition("=")
            name = _full_name(name[2:], cls.names) if name.startswith("--") else ""
            if name in cls.names and (equals or i + 1 < len(words)):
                options[name] = _attached_value(word) if equals else words[i + 1]
        return options

    def option(self, name: str) -> str:
        """Value of an option, or ""."""
        return self.options[name].value if name in self.options else ""

    @property
    def is_multi_node(self) -> bool:
        """Whether the launchers of all nodes form one world; otherwise each node is a world of its own."""
        return True

    def hosts(self) -> tuple[str, ...]:
        """The hosts of the rendezvous in the command; unknown variables and $(...) stay as they are written."""
        return tuple(_split_endpoint(self.option(name))[0] for name in _HOST_OPTIONS if name in self.options)

    def node_count(self) -> tuple[int, int] | None:
        """Fewest and most nodes of the world; None if the command does not say."""
        text = self.option(self.node_count_option[2:].replace("_", "-"))
        match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
        return (int(match[1]), int(match[2] or match[1])) if match else None

    @property
    def is_elastic(self) -> bool:
        """Whether the number of nodes may vary."""
        counts = self.node_count()
        return counts is not None and counts[0] != counts[1]

    def ranks_per_node(self, gpus_per_node: str) -> int:
        """Ranks that it starts on each node; 0 if the command does not say.

        `gpus_per_node` is SLURM_GPUS_ON_NODE, which decides about `--nproc-per-node=gpu` and `auto`.
        """
        return 0

    def reason_map_not_kept(self) -> str:
        """Why it does not take the planned order of the nodes, with the option to change; "" if it does."""
        backend, address = self.option("rdzv-backend"), self.option("local-addr")
        if backend not in ("", "static", "c10d"):
            return f"--rdzv-backend={backend}: numbers the nodes itself, not by the rank map; expected c10d"
        if backend == "c10d" and address:
            return (f"--local-addr={address}: the c10d rendezvous numbers the nodes by this text, not by the rank "
                    "map; expected no --local-addr")
        return ""

    def added_option(self) -> str:
        """An option that gives the launcher its node rank, if the command lacks it; "" if none is needed."""
        return ""


class Torchrun(LauncherCommand):
    """torchrun, and NVRx's launcher, a torchrun with further options."""

    name = "torchrun"
    starts = (("torchrun",), ("ft_launcher",))
    modules = ("torch.distributed.run", "torch.distributed.launch")
    names = ("nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts",
             "monitor-interval", "start-method", "event-log-handler", "role", "log-dir", "redirects", "tee",
             "local-ranks-filter", "duplicate-stdout-filters", "duplicate-stderr-filters", "node-rank", "master-addr",
             "master-port", "local-addr", "logs-specs", "numa-binding", "signals-to-handle", "shutdown-timeout")
    flags = ("standalone", "module", "no-python", "run-path", "virtual-local-rank", "help",
             "ignore-missing-fault-tol-cfg")

    @classmethod
    def parse_options(cls, words: Sequence[Word], environ: Mapping[str, str]) -> dict[str, Word]:
        """Options before the training script; those of PET_* variables have no position in the text."""
        options = {name: Word(value, -1, -1) for name in cls.names
                   if (value := environ.get(f"PET_{name.replace('-', '_').upper()}"))}
        i = 0
        while i < len(words) and words[i].value.startswith("-"):
            name, equals, _ = words[i].value.lstrip("-").replace("_", "-").partition("=")
            name = _full_name(name, (*cls.flags, *cls.names))
            if name == "m" or name in cls.flags:
                options[name] = words[i]
            elif equals:
                options[name] = _attached_value(words[i])
            elif i + 1 < len(words):
                i += 1
                options[name] = words[i]
            i += 1
        return options

    @property
    def is_multi_node(self) -> bool:
        return not self.is_readable or (
            "standalone" not in self.options and self.option("nnodes") not in ("", "1", "1:1"))

    def ranks_per_node(self, gpus_per_node: str) -> int:
        text = self.option("nproc-per-node") or ("1" if self.is_readable else "")
        text = gpus_per_node if text in ("gpu", "auto") else text
        return int(text) if text.isdigit() else 0


class Accelerate(LauncherCommand):
    name = "accelerate"
    starts = (("accelerate", "launch"),)
    modules = ("accelerate.commands.launch", "accelerate.commands.accelerate_cli")
    names = ("num-machines", "num-processes", "machine-rank", "main-process-ip", "rdzv-backend", "rdzv-conf")
    node_count_option = "--num_machines"

    @property
    def is_multi_node(self) -> bool:
        return not self.is_readable or self.option("num-machines") not in ("", "1")

    def ranks_per_node(self, gpus_per_node: str) -> int:
        total, machines = self.option("num-processes"), self.option("num-machines") or "1"
        return int(total) // int(machines) if total.isdigit() and machines.isdigit() and int(machines) else 0

    def added_option(self) -> str:
        return "" if "machine-rank" in self.options or not self.is_readable else "--machine_rank"


class DeepSpeed(LauncherCommand):
    name = "deepspeed"
    starts = (("deepspeed",),)
    modules = ("deepspeed.launcher.runner",)
    names = ("num-nodes", "num-gpus", "node-rank", "master-addr")
    node_count_option = "--num_nodes"

    @classmethod
    def own_words(cls, words: Sequence[str]) -> int:
        """The program's name is that of a module, too, so an option must follow."""
        is_argument = words[0] != "-m" and not (words[1:2] and words[1].startswith("-"))
        return 0 if is_argument else super().own_words(words)

    def ranks_per_node(self, gpus_per_node: str) -> int:
        text = self.option("num-gpus")
        return int(text) if text.isdigit() else 0


class Ray(LauncherCommand):
    name = "ray"
    starts = (("ray", "start"), ("ray", "symmetric-run"))
    is_checked = False

    def reason_map_not_kept(self) -> str:
        return "ray numbers its workers itself, not by the rank map"


#: the launchers by their names in --dl-launcher
LAUNCHERS: Mapping[str, type[LauncherCommand]] = {cls.name: cls for cls in (Torchrun, Accelerate, DeepSpeed, Ray)}


def find_launcher(operands: Sequence[str], environ: Mapping[str, str]) -> LauncherCommand | None:
    """Find the launcher in a program with its arguments, also behind `bash -c`; None if there is none.

    Other programs may precede it, e.g. `env A=1 bash -c "..."`. `environ` holds the variables that the text of
    `bash -c` may use.
    """
    text, before, after = shlex.join(operands), operands[:0], operands[:0]
    shell = next((i for i, arg in enumerate(operands) if arg.rpartition("/")[2] in _SHELLS), len(operands))
    is_argument = any(arg.endswith(_SCRIPT_SUFFIXES) for arg in operands[:shell]) \
        or _launcher_in([Word(arg, 0, 0) for arg in operands[:shell]])
    if shell < len(operands) and not is_argument:
        index = next((i for i in range(shell, len(operands)) if re.fullmatch(r"-[a-z]*c", operands[i])), None)
        if index is None or index + 1 >= len(operands):
            return None
        text, before, after = operands[index + 1], operands[:index + 1], operands[index + 2:]
        assigned = (re.fullmatch(r"([A-Za-z_]\w*)=(.*)", arg, re.DOTALL) for arg in operands[:shell])
        environ = {**environ, **{match[1]: match[2] for match in assigned if match}}
    for words in _commands(text, environ):
        found = _launcher_in(words)
        if found:
            launcher, first = found
            options = launcher.parse_options(words[first:], environ)
            return launcher(tuple(before), text, tuple(after), options, words[first - 1].end)
    return None


def script_ranks_per_node(script: str, gpus_per_node: str) -> int:
    """Ranks per node of the launchers that a job script starts by `slurmdl srun`.

    0 if it starts none on several nodes, says no number, or several numbers. `gpus_per_node` as for
    `LauncherCommand.ranks_per_node`.
    """
    from slurmdl.launch.step_command import parse_srun_argv

    found = set()
    for line in script.replace("\\\n", " ").splitlines():
        srun = _SRUN.search(line.partition("#")[0])
        if srun is None:
            continue
        words = _commands(line[srun.end():], {})[0]
        try:
            operands = parse_srun_argv([word.value for word in words]).line.operands
        except SlurmdlError:
            continue
        launcher = find_launcher(operands, {})
        if launcher and launcher.is_multi_node:
            found.add(launcher.ranks_per_node(gpus_per_node))
    return found.pop() if len(found) == 1 else 0


def _commands(text: str, environ: Mapping[str, str]) -> list[list[Word]]:
    """The words of each simple command in a shell text."""
    commands: list[list[Word]] = [[]]
    position = 0
    while position < len(text):
        if word := _WORD.match(text, position):
            commands[-1].append(Word(_expand(word[0], environ), position, word.end(),
                                     position + word[0].find("=") + 1))
            position = word.end()
        elif operator := _OPERATOR.match(text, position):
            commands.append([])
            position = operator.end()
        else:
            position += 1
    return commands


def _expand(word: str, environ: Mapping[str, str]) -> str:
    """Value of a word without its quotes; unknown variables stay as they are written."""
    def expand_variables(text: str) -> str:
        return _VARIABLE.sub(lambda match: environ.get(match[1] or match[2], match[0]), text)

    def value(match: re.Match[str]) -> str:
        single, double, escaped = match.groups()
        if single is None and double is None:
            return escaped or expand_variables(match[0])
        return single if double is None else expand_variables(double.replace('\\"', '"'))

    return _PART.sub(value, word)


def _launcher_in(words: Sequence[Word]) -> tuple[type[LauncherCommand], int] | None:
    """The launcher, and the index of its first argument; other programs may precede it (env, numactl)."""
    values = [word.value for word in words]
    for i, value in enumerate(values):
        for launcher in LAUNCHERS.values():
            if count := launcher.own_words(values[i:]):
                return launcher, i + count
        if value.endswith(_SCRIPT_SUFFIXES):
            return None
    return None


def _full_name(written: str, names: Sequence[str]) -> str:
    """The option that argparse takes `written` for: unique abbreviations are allowed."""
    matches = [name for name in names if name.startswith(written)]
    return matches[0] if len(matches) == 1 and written not in names else written


def _attached_value(word: Word) -> Word:
    """The value of `--name=value` as a word of its own."""
    return Word(word.value.partition("=")[2], word.attached_at, word.end)


@dataclass(frozen=True)
class AdaptedCommand:
    """The command of a step whose launcher keeps the rank map.

    Attributes:
        program: the program with its arguments.
        environ: variables for the tasks.
        changes: changes of the command, for --dl-explain.
        reason_map_not_kept: why the launcher numbers the nodes otherwise, or "".
    """

    program: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    reason_map_not_kept: str = ""


def check_launcher(command: LauncherCommand, tasks_per_node: Sequence[int]) -> None:
    """Check that the launcher fits the step. Raises PlacementError with the option to change."""
    counts, size = command.node_count(), len(tasks_per_node)
    if max(tasks_per_node) > 1:
        raise PlacementError(f"{command.name}: {max(tasks_per_node)} tasks on a node, each of which would start it; "
                             "expected --ntasks-per-node=1")
    if counts and not counts[0] <= size <= counts[1]:
        option = command.node_count_option
        raise PlacementError(f"{option}: the launcher expects {pluralize(counts[0], 'node')} and the step has "
                             f"{size}; expected {option}={size}")


def keep_map(command: LauncherCommand, rank0_node: str, is_rank0_host: Callable[[str], bool]) -> AdaptedCommand:
    """Change the command so that the launcher numbers the nodes as planned.

    `is_rank0_host` tells whether a host name or address in the command belongs to the node of rank 0.
    """
    edits: list[tuple[int, int, str]] = []
    changes: list[str] = []
    variables = {"SLURMDL_LAUNCHER": command.name}

    def replace_value(name: str, word: Word, value: str) -> None:
        if word.start < 0:
            variables[f"PET_{name.replace('-', '_').upper()}"] = value
        else:
            edits.append((word.start, word.end, shlex.quote(value)))

    reason = command.reason_map_not_kept()
    if reason:
        variables = {}
    else:
        if command.option("rdzv-backend") == "c10d":
            changes.append("PET_LOCAL_ADDR set, by which the c10d rendezvous numbers the nodes as planned")
        for name in _HOST_OPTIONS:
            if word := command.options.get(name):
                host, colon, port = _split_endpoint(word.value)
                if not is_rank0_host(host):
                    replace_value(name, word, rank0_node + colon + port)
                    changes.append(f"--{name} {word.value} -> {rank0_node}{colon}{port}, the node of rank 0")
        if option := command.added_option():
            edits.append((command.insert_at, command.insert_at, f' {option}="$SLURM_PROCID"'))
            changes.append(f"{option}=$SLURM_PROCID added")
    return AdaptedCommand(_edited_program(command, edits), variables, tuple(changes), reason)


def _split_endpoint(text: str) -> tuple[str, str, str]:
    """HOST:PORT -> (HOST, ":", PORT), or (text, "", "") without a port. HOST may be $(...) or an IPv6 address."""
    match = re.fullmatch(r"(.*\]|.*\)|[^:]*)(:)(\d+|\$\{?\w+\}?)", text)
    return (match[1], match[2], match[3]) if match else (text, "", "")


def _edited_program(command: LauncherCommand, edits: Sequence[tuple[int, int, str]]) -> tuple[str, ...]:
    text = command.text
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    if command.before:
        return (*command.before, text, *command.after)
    if "$SLURM_PROCID" in "".join(new for *_, new in edits):
        return ("/bin/sh", "-c", f"exec {text}")
    return tuple(shlex.split(text))
