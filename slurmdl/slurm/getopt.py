"""Command lines of sbatch and srun, read as getopt_long(3) does; variables and directives that set sbatch's options.

Nothing is rejected: unknown arguments stay in place, for sbatch and srun to judge. The tables hold the options of the
man page sbatch(1) of Slurm 22.05 to 26.05 and of `sbatch --help`. They serve to find the end of the options and the
settings that placement depends on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from slurmdl.errors import UnavailableError, UsageError
from slurmdl.slurm import process

HasArg = Literal["no", "required", "optional"]


@dataclass(frozen=True)
class Option:
    """One given option.

    Attributes:
        name: the full long name; as written (without dashes) if unknown.
        value: None if the option has none, or a required value is missing.
        args: the option spelled alone, e.g. ("-n", "4"); an option in a cluster `-lun4` gives ("-n4",).
        index: index in argv of the argument in which it begins.
        is_known: False for an option in no table and for an ambiguous abbreviation, which are read as if they took no
            value from the next argument.
        is_complete: False if a required value is missing at the end of argv.
    """

    name: str
    value: str | None
    args: tuple[str, ...]
    index: int
    is_known: bool = True
    is_complete: bool = True


@dataclass(frozen=True)
class CommandLine:
    """Options in their order, and the operands: the program or script with its arguments."""

    options: tuple[Option, ...]
    operands: tuple[str, ...]

    def last_value(self, name: str) -> str | None:
        """Value of the last `--name`; None if it is not given or has no value (see `has_option`)."""
        return next((option.value for option in reversed(self.options) if option.name == name), None)

    def has_option(self, name: str) -> bool:
        return any(option.name == name for option in self.options)

    def args_except(self, names: Iterable[str]) -> tuple[str, ...]:
        """Arguments of all options but `names`, in their order, without operands and `--`."""
        excluded = frozenset(names)
        return tuple(arg for option in self.options if option.name not in excluded for arg in option.args)


def parse_command_line(argv: Sequence[str], short_options: Mapping[str, str], long_options: Mapping[str, HasArg],
                       plugin_options: Callable[[], Mapping[str, HasArg]] = dict) -> CommandLine:
    """Split `argv` (without the program's name) into options and operands.

    Follows getopt_long with a leading `+`, as sbatch and srun call it: clusters (`-lun4`), `-n4`, `-n 4`,
    `--name=value`, `--name value`, unique abbreviations of long names, optional values only if attached. `--` and the
    first argument that is not an option (including `-`) end the options.

    Args:
        short_options: letter -> long name.
        long_options: long name -> whether it takes a value.
        plugin_options: as `long_options`, of the plugins of Slurm; called only if an option is in no table.
    """
    line = _parse(argv, short_options, long_options)
    if all(option.is_known for option in line.options):
        return line
    more_options = plugin_options()
    return _parse(argv, short_options, {**more_options, **long_options}) if more_options else line


def _parse(argv: Sequence[str], short_options: Mapping[str, str], long_options: Mapping[str, HasArg]) -> CommandLine:
    options: list[Option] = []
    index = 0
    while index < len(argv):
        arg = argv[index]
        if arg == "--":
            index += 1
            break
        if not arg.startswith("-") or arg == "-":
            break
        next_arg = argv[index + 1] if index + 1 < len(argv) else None
        parsed = [_long_option(arg, next_arg, index, long_options)] if arg.startswith("--") else \
            list(_short_options(arg, next_arg, index, short_options, long_options))
        options += parsed
        index += 1 + (len(parsed[-1].args) == 2)
    return CommandLine(tuple(options), tuple(argv[index:]))


def _long_option(arg: str, next_arg: str | None, index: int, long_options: Mapping[str, HasArg]) -> Option:
    written, equals, attached = arg[2:].partition("=")
    name = _full_name(written, long_options)
    value = attached if equals else None
    if name is None:
        return Option(written, value, (arg,), index, is_known=False)
    if long_options[name] != "required" or equals:
        return Option(name, value, (arg,), index)
    if next_arg is None:
        return Option(name, None, (arg,), index, is_complete=False)
    return Option(name, next_arg, (arg, next_arg), index)


def _full_name(written: str, long_options: Mapping[str, HasArg]) -> str | None:
    if written in long_options:
        return written
    candidates = [name for name in long_options if name.startswith(written)]
    return candidates[0] if len(candidates) == 1 and written else None


def _short_options(arg: str, next_arg: str | None, index: int, short_options: Mapping[str, str],
                   long_options: Mapping[str, HasArg]) -> Iterator[Option]:
    for i, letter in enumerate(arg[1:], start=1):
        name, attached = short_options.get(letter), arg[i + 1:]
        if name is None:
            yield Option(letter, None, (f"-{letter}",), index, is_known=False)
        elif long_options[name] == "no":
            yield Option(name, None, (f"-{letter}",), index)
        elif attached or long_options[name] == "optional":
            yield Option(name, attached or None, (f"-{letter}{attached}",), index)
            return
        elif next_arg is None:
            yield Option(name, None, (f"-{letter}",), index, is_complete=False)
        else:
            yield Option(name, next_arg, (f"-{letter}", next_arg), index)


_REQUIRED_ARG = """account acctg-freq array autocomplete batch bb bbf begin chdir cluster cluster-constraint clusters
    comment constraint container container-id context core-spec cores-per-socket cpu-freq cpus-per-gpu
    cpus-per-task deadline delay-boot dependency distribution error exclude export export-file extra
    extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint
    input job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu
    mem-per-gpu mem-update mincpus network nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu
    ntasks-per-node ntasks-per-socket ntasks-per-tres open-mode output partition power prefer priority profile
    qos reservation resources runtime segment signal sockets-per-node switches tasks-per-node thread-spec
    threads-per-core time time-min tmp tres-bind tres-per-task uid wait-all-nodes wckey wrap"""
_OPTIONAL_ARG = "exclusive get-user-env nice no-kill oom-kill-step propagate requeue resv-ports"
_NO_ARG = """consolidate-segments contiguous external help hold ignore-pbs no-requeue overcommit oversubscribe
    parsable quiet reboot spread-job spread-segments stepmgr test-only usage use-min-nodes verbose version wait"""

#: options of sbatch: long name -> whether it takes a value
SBATCH_LONG_OPTIONS: dict[str, HasArg] = {
    **dict.fromkeys(_REQUIRED_ARG.split(), "required"),
    **dict.fromkeys(_OPTIONAL_ARG.split(), "optional"),
    **dict.fromkeys(_NO_ARG.split(), "no"),
}

#: options of sbatch: letter -> long name
SBATCH_SHORT_OPTIONS = {
    "A": "account", "a": "array", "b": "begin", "B": "extra-node-info", "C": "constraint", "c": "cpus-per-task",
    "D": "chdir", "d": "dependency", "e": "error", "F": "nodefile", "G": "gpus", "H": "hold", "h": "help",
    "i": "input", "J": "job-name", "k": "no-kill", "L": "licenses", "M": "clusters", "m": "distribution",
    "N": "nodes", "n": "ntasks", "O": "overcommit", "o": "output", "p": "partition", "Q": "quiet", "q": "qos",
    "S": "core-spec", "s": "oversubscribe", "t": "time", "V": "version", "v": "verbose", "W": "wait",
    "w": "nodelist", "x": "exclude",
}

#: other name of an option -> its name
SYNONYMS = {"tasks-per-node": "ntasks-per-node", "cluster": "clusters"}

#: variables of sbatch that placement depends on; the later of two for one option counts
ENV_VARIABLES = {
    "SBATCH_IGNORE_PBS": "ignore-pbs", "SBATCH_ARRAY_INX": "array", "SBATCH_BATCH": "batch",
    "SBATCH_BURST_BUFFER": "bb", "SBATCH_CLUSTERS": "clusters", "SLURM_CLUSTERS": "clusters",
    "SBATCH_CLUSTER_CONSTRAINT": "cluster-constraint", "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_CORE_SPEC": "core-spec", "SBATCH_CPUS_PER_GPU": "cpus-per-gpu", "SBATCH_DISTRIBUTION": "distribution",
    "SBATCH_EXCLUSIVE": "exclusive", "SBATCH_EXPORT": "export", "SBATCH_GRES": "gres", "SBATCH_GPUS": "gpus",
    "SBATCH_GPUS_PER_NODE": "gpus-per-node", "SBATCH_GPUS_PER_SOCKET": "gpus-per-socket",
    "SBATCH_GPUS_PER_TASK": "gpus-per-task", "SLURM_HINT": "hint", "SBATCH_HINT": "hint",
    "SBATCH_MEM_PER_CPU": "mem-per-cpu", "SBATCH_MEM_PER_GPU": "mem-per-gpu", "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_NETWORK": "network", "SBATCH_NO_REQUEUE": "no-requeue", "SBATCH_OVERCOMMIT": "overcommit",
    "SBATCH_PARTITION": "partition", "SBATCH_REQ_SWITCH": "switches", "SBATCH_REQUEUE": "requeue",
    "SBATCH_RESERVATION": "reservation", "SBATCH_SEGMENT_SIZE": "segment", "SBATCH_SPREAD_JOB": "spread-job",
    "SBATCH_SPREAD_SEGMENTS": "spread-segments", "SBATCH_THREAD_SPEC": "thread-spec",
    "SBATCH_THREADS_PER_CORE": "threads-per-core", "SBATCH_TRES_PER_TASK": "tres-per-task",
}


@cache
def plugin_options(program: str) -> Mapping[str, HasArg]:
    """Options of Slurm's plugins but slurmdl's own, from the help of sbatch or srun; none if it does not answer."""
    try:
        text = process.check_output([program, "--help"])
    except UnavailableError:
        return {}
    described = text.partition("Options provided by plugins:")[2]
    # spank(8) has no form for an optional value; plugins write it in brackets
    return {name: "no" if not argument else "optional" if re.fullmatch(r"=\[[^][]*\]", argument) else "required"
            for name, argument in re.findall(r"^ +--([\w-]+)(=\S*)?", described, re.M) if not name.startswith("dl-")}


def is_flag_set(value: str) -> bool:
    """Whether a variable sets a flag: empty, "yes" or a number other than 0 (sbatch(1))."""
    return value in ("", "yes") or re.fullmatch(r"[+-]?0*[1-9][0-9]*", value) is not None


def sbatch_settings_from_environ(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Settings of the environment: long name -> value, "" for a flag, None for a flag that is unset."""
    settings: dict[str, str | None] = {}
    for variable, name in ENV_VARIABLES.items():
        value = environ.get(variable)
        if value is not None:
            is_flag = SBATCH_LONG_OPTIONS[name] == "no" or name == "requeue"
            settings.pop(name, None)  # the last variable of an option decides its position
            settings[name] = value if not is_flag else "" if is_flag_set(value) else None
    return settings


@dataclass(frozen=True)
class Directive:
    """The arguments of one `#SBATCH` or `#DL` line; `line` counts from 1.

    A line for another scheduler (`#PBS`, `#BSUB`), which sbatch translates, has a keyword and no arguments.
    """

    keyword: str
    args: tuple[str, ...]
    line: int


def script_header(body: bytes) -> tuple[list[str], bool]:
    """The lines of a batch script before its first command, and whether there is a command."""
    lines = body.decode(errors="surrogateescape").split("\n")
    commands = (i for i, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#"))
    end = next(commands, None)
    return lines[:end], end is not None


def script_directives(body: bytes, file: str) -> Iterator[Directive]:
    """Yield the directives of a batch script before its first command.

    As in sbatch, no blank is needed after `#SBATCH`. `#DL` needs one, so that `#DLang` stays a comment. Raises
    UsageError if a quote in a `#DL` line is not closed.
    """
    for number, line in enumerate(script_header(body)[0], start=1):
        if line.startswith(("#SBATCH", "#SLURM")):
            keyword = "#SBATCH" if line.startswith("#SBATCH") else "#SLURM"
            yield Directive("#SBATCH", tuple(_split_directive(line[len(keyword):])), number)
        elif line.startswith("#DL") and line[3:4] in ("", " ", "\t", "\r"):
            try:
                yield Directive("#DL", tuple(_split_directive(line[3:], strict=True)), number)
            except ValueError as error:
                raise UsageError(f"{file}:{number}: {line[:100]!r}: {error}") from error
        elif line.startswith(("#PBS", "#BSUB")):
            yield Directive(line.split(maxsplit=1)[0], (), number)


def _split_directive(text: str, strict: bool = False) -> Iterator[str]:
    """Split a directive as sbatch does: at blanks; with quotes, backslash before any character, `#` for the end."""
    if not any(special in text for special in "\\\"'#"):
        yield from text.split()
        return
    arg: list[str] = []
    quote, is_escaped, has_arg = "", False, False
    for char in text:
        if is_escaped:
            arg.append(char)
            is_escaped = False
        elif char == "\\":
            is_escaped = has_arg = True
        elif quote:
            if char == quote:
                quote = ""
            else:
                arg.append(char)
        elif char in "\"'":
            quote, has_arg = char, True
        elif char == "#":
            break
        elif char.isspace():
            if has_arg and not arg:  # for sbatch an empty argument ends the line
                return
            if has_arg:
                yield "".join(arg)
            arg, has_arg = [], False
        else:
            arg.append(char)
            has_arg = True
    if quote and strict:
        raise ValueError(f"the quote {quote} is not closed")
    if arg:
        yield "".join(arg)
