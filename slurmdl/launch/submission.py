"""One call of sbatch: its arguments, its script, the resulting job request, and the command that submits it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from slurmdl import dl_options, job_request
from slurmdl.errors import UnavailableError, UsageError
from slurmdl.job_request import JobRequest
from slurmdl.launch import submission_record
from slurmdl.launch.submission_record import Promise, RequestedSize
from slurmdl.slurm import getopt, process
from slurmdl.text import truncate

_LONG_OPTIONS = {**getopt.SBATCH_LONG_OPTIONS, **dl_options.LONG_OPTIONS}
#: options of a #SBATCH line if Slurm has the plugin
_SCRIPT_OPTIONS = {**getopt.SBATCH_LONG_OPTIONS, **dl_options.SPANK_OPTIONS}

PluginOptions = Callable[[], Mapping[str, getopt.HasArg]]

#: pairs of options for the same setting: the later one counts, and unsetting one unsets both
_COUNTERPART = {"nodelist": "nodefile", "nodefile": "nodelist", "requeue": "no-requeue", "no-requeue": "requeue",
                "exclusive": "oversubscribe", "oversubscribe": "exclusive"}

#: memory options: one in the script or on the command line overrides all of the environment
_MEMORY_OPTIONS = frozenset(("mem", "mem-per-cpu", "mem-per-gpu"))

#: bytes of a script that are read for directives; sbatch accepts scripts of 4 MB (slurm.conf(5), max_script_size)
MAX_SCRIPT_HEAD_BYTES = 1 << 20

#: name of a script from standard input in messages
STDIN_NAME = "standard input"

#: what may start ranks of its own, see launchers.find_launcher
_LAUNCHER = re.compile(r"torchrun|torch\.distributed|ft_launcher|accelerate|deepspeed")

#: a call of slurmdl by its name, at the start of a command of the shell
_CALL_BY_NAME = re.compile(r"^[^#\n]*(?<![\w./$}\"'-])(?:slurmdl[ \t]+\w|dlsrun\b)", re.MULTILINE)
#: what may set PATH in a script: an assignment, a login shell, modules, environments, files that the shell reads
_SETS_PATH = re.compile(r"\bPATH=|^#!.*sh -\w*l|\b(?:activate|module|ml|spack|eval)\b|^\s*(?:\.|source)\s",
                        re.MULTILINE)
#: directories that are in PATH without a login
_DEFAULT_DIRECTORIES = ("/usr/local/bin", "/usr/bin", "/bin")

_HETEROGENEOUS_REASON = "a heterogeneous job chooses nodes per component"


@dataclass(frozen=True)
class Script:
    """A batch script: its name in messages, its bytes, and whether they came from standard input.

    If the script is longer than MAX_SCRIPT_HEAD_BYTES, `body` holds its beginning.
    """

    name: str
    body: bytes
    from_stdin: bool = False

    @property
    def is_long(self) -> bool:
        """Whether the script continues after `head`."""
        return len(self.body) > MAX_SCRIPT_HEAD_BYTES

    @property
    def head(self) -> bytes:
        """The first complete lines, up to MAX_SCRIPT_HEAD_BYTES."""
        return self.body[:MAX_SCRIPT_HEAD_BYTES].rpartition(b"\n")[0] if self.is_long else self.body


@dataclass(frozen=True)
class Submission:
    """A parsed call of sbatch.

    Attributes:
        argv: the user's arguments without the --dl-* options.
        option_ends: long name of an option with a value -> index in argv after the last one of that name.
        settings: long name of an sbatch option -> value, "" for a flag, after precedence.
        script: None with --wrap, and if the script cannot be read.
        layers: the user's --dl-* settings by source, the weakest first.
        plugin_environ: SLURMDL_OPT_* variables that pass command-line options to the plugin, if the plugin reads the
            script.
        directive_environ: SLURMDL_OPT_* variables that the plugin makes of #SBATCH lines.
        extra_options: options for sbatch that the user did not give, whatever the binding.
    """

    argv: tuple[str, ...]
    option_ends: Mapping[str, int]
    settings: Mapping[str, str]
    script: Script | None
    request: JobRequest
    layers: tuple[Mapping[str, str], ...] = ()
    plugin_environ: Mapping[str, str] = field(default_factory=dict)
    directive_environ: Mapping[str, str] = field(default_factory=dict)
    extra_options: tuple[str, ...] = ()

    @property
    def quiet(self) -> bool:
        return "quiet" in self.settings

    @property
    def names_zones(self) -> bool:
        """Whether the user has named zones, not only the site."""
        return any("zone" in layer for layer in self.layers)

    @property
    def maps_ranks(self) -> bool | None:
        """Whether the job starts its tasks by a rank map; None if unknown."""
        text = self.settings.get("wrap", "")
        if self.script:
            text += self.script.head.decode(errors="replace")
        if applies_rank_map(text):
            return True
        return None if not text or (self.script and self.script.is_long) else False

    def missing_program_warning(self, program: str) -> str:
        """What to write if the job may not find slurmdl because --export passes no PATH, or "".

        Args:
            program: absolute path of slurmdl.
        """
        export = self.settings.get("export", "ALL")
        names = export.split(",")
        if os.path.dirname(program) in _DEFAULT_DIRECTORIES or "ALL" in export.upper().split(",") \
                or any(name.partition("=")[0] == "PATH" for name in names):
            return ""
        text = self.script.head.decode(errors="replace") if self.script else self.settings.get("wrap", "")
        call = _CALL_BY_NAME.search(text)
        if not call or _SETS_PATH.search(text[:call.end()]):
            return ""
        return (f"with --export={truncate(export, 100)} the job does not get this PATH and may not find slurmdl; "
                f"write {program} in the script, or --export=PATH,...")


@dataclass(frozen=True)
class ParsedArgv:
    """Arguments split into options and operands.

    Attributes:
        command_line: without the `:` of heterogeneous jobs; its indexes refer to argv.
        is_heterogeneous: argv has a `:`.
    """

    argv: tuple[str, ...]
    command_line: getopt.CommandLine
    is_heterogeneous: bool

    @classmethod
    def from_argv(cls, argv: Sequence[str], plugin_options: PluginOptions = dict) -> ParsedArgv:
        indexes = [i for i, arg in enumerate(argv) if arg != ":"]
        line = getopt.parse_command_line([argv[i] for i in indexes], getopt.SBATCH_SHORT_OPTIONS, _LONG_OPTIONS,
                                         plugin_options)
        options = tuple(replace(option, index=indexes[option.index]) for option in line.options)
        return cls(tuple(argv), getopt.CommandLine(options, line.operands), len(indexes) < len(argv))

    @property
    def options(self) -> list[getopt.Option]:
        """The options; of --export only those of the first component that has it: they count for the script."""
        starts = [i for i, arg in enumerate(self.argv) if arg == ":"]
        first = min((option.index for option in self.command_line.options if option.name == "export"), default=0)
        end = next((start for start in starts if start > first), len(self.argv))
        return [option for option in self.command_line.options if option.name != "export" or option.index < end]

    @property
    def reads_stdin(self) -> bool:
        """Whether the script comes from standard input."""
        return not self.command_line.operands and not self.command_line.has_option("wrap")

    @property
    def requests_help(self) -> bool:
        return any(self.command_line.has_option(name) for name in ("help", "usage", "version"))

    def sbatch_args(self) -> tuple[tuple[str, ...], dict[str, int]]:
        """The arguments for sbatch, and the index after the last option of each name with a value."""
        removed = {i for option in self.command_line.options if option.name.startswith("dl-")
                   for i in range(option.index, option.index + len(option.args))}
        ends = {getopt.SYNONYMS.get(option.name, option.name): option.index + len(option.args)
                for option in self.options
                if option.is_known and option.value is not None and option.index not in removed}
        return (tuple(arg for i, arg in enumerate(self.argv) if i not in removed),
                {name: sum(i not in removed for i in range(end)) for name, end in ends.items()})


@dataclass(frozen=True)
class SubmitCommand:
    """The command that submits a job; a dry run prints it."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    removed_variables: tuple[str, ...] = ()
    stdin: bytes | None = field(default=None, repr=False)


def parse_submission(argv: Sequence[str], environ: Mapping[str, str], *,
                     stdin: bytes | None = b"", has_plugin: Callable[[], bool] = lambda: True,
                     plugin_options: PluginOptions = dict,
                     defaults: Mapping[str, str] | None = None) -> Submission:
    """Parse a call of sbatch; precedence: script < environment < command line.

    Raises UsageError for an unknown --dl-* option, an invalid value, or a `#DL` line with an open quote.

    Args:
        stdin: content of a script without a name, or None if it cannot be read.
        has_plugin: whether sbatch has --dl-* in #SBATCH lines; called only if there are such lines.
        plugin_options: see `getopt.parse_command_line`.
        defaults: --dl-* settings that are weaker than the user's own.
    """
    parsed_argv = ParsedArgv.from_argv(argv, plugin_options)
    line = parsed_argv.command_line
    cli_dl = dl_options.collect_settings(line.options)
    script = _read_script(line, stdin)
    directives = _parse_directives(script, has_plugin, plugin_options) if script else _Directives()
    cli_settings = _collect_sbatch_settings(parsed_argv.options)
    env_settings = getopt.sbatch_settings_from_environ(environ)
    settings = _overlay_sbatch_settings(_overlay_sbatch_settings(directives.sbatch, env_settings), cli_settings)
    memory = _MEMORY_OPTIONS & settings.keys()
    env_memory = memory & (env_settings.keys() - cli_settings.keys())
    if env_memory != memory:
        settings = {name: value for name, value in settings.items() if name not in env_memory}
    layers = (directives.plugin, directives.dl, dl_options.dl_settings_from_environ(environ), cli_dl)
    reason = _unplaceable_reason(parsed_argv, settings, script, environ) or directives.unknown_reason
    sbatch_args, option_ends = parsed_argv.sbatch_args()
    request = job_request.build_request(settings, dl_options.merge_layers(defaults or {}, *layers), reason)
    text = script.head.decode(errors="replace") if script else settings.get("wrap", "")
    if _LAUNCHER.search(text) and request.dl.launcher != "none":
        from slurmdl.launch.launchers import script_ranks_per_node

        request = replace(request, script_ranks_per_node=script_ranks_per_node(text, str(request.gpus_per_node)))
    return Submission(sbatch_args, option_ends, settings, script, request, layers,
                      dl_options.to_environ(cli_dl) if directives.plugin else {},
                      dl_options.to_environ(directives.plugin))


def _collect_sbatch_settings(options: Iterable[getopt.Option]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for option in options:
        if option.is_known and not option.name.startswith("dl-"):
            name = getopt.SYNONYMS.get(option.name, option.name)
            settings = _overlay_sbatch_settings(settings, {name: option.value or ""})
    return settings


def _overlay_sbatch_settings(base: Mapping[str, str], layer: Mapping[str, str | None]) -> dict[str, str]:
    merged = dict(base)
    for name, value in layer.items():
        merged.pop(_COUNTERPART.get(name, ""), None)
        merged.pop(name, None)
        if value is not None:
            merged[name] = value
    return merged


class _Directives(NamedTuple):
    """The settings in the directives of a script.

    `sbatch` and `plugin` come from #SBATCH lines, `dl` from #DL lines; `unknown_reason` says which directive is not
    understood, or is "".
    """

    sbatch: Mapping[str, str] = {}
    dl: Mapping[str, str] = {}
    plugin: Mapping[str, str] = {}
    unknown_reason: str = ""


def _parse_directives(script: Script, has_plugin: Callable[[], bool], plugin_options: PluginOptions) -> _Directives:
    """Parse the directives of a script. UsageError as `parse_submission`."""
    if script.is_long and not getopt.script_header(script.head)[1]:
        return _Directives(unknown_reason=f"the directives of {script.name} are not read: they go on beyond "
                                          f"{MAX_SCRIPT_HEAD_BYTES} bytes")
    args: list[str] = []
    component_args: list[list[str]] = [[]]
    dl: dict[str, str] = {}
    translated_reason, first_dl_location = "", ""
    for directive in getopt.script_directives(script.head, script.name):
        location = f"{script.name}:{directive.line}: "
        if directive.keyword == "#DL":
            dl.update(dl_options.parse_directive(directive.args, location))
        elif directive.keyword != "#SBATCH":
            translated_reason = translated_reason or f"{location}{directive.keyword} lines are translated by sbatch"
        else:
            if any(arg.startswith("--dl-") for arg in directive.args):
                first_dl_location = first_dl_location or location
            if directive.args[:1] in (("hetjob",), ("packjob",)):
                component_args.append([])
            args += directive.args
            component_args[-1] += directive.args
    line = getopt.parse_command_line(args, getopt.SBATCH_SHORT_OPTIONS, _SCRIPT_OPTIONS, plugin_options)
    dl_opts = [option for option in line.options if option.name.startswith("dl-")]
    unknown = next((option for option in dl_opts if option.name not in dl_options.SPANK_OPTIONS), None)
    if unknown or (dl_opts and not has_plugin()):
        arg = (unknown or dl_opts[0]).args[0]
        problem = "is no option of sbatch" if unknown else "in a #SBATCH line needs the plugin of slurmdl in Slurm"
        raise UsageError(f"{first_dl_location}{arg!r} {problem}; expected #DL {arg}")
    plugin = dl_options.collect_settings(dl_opts, first_dl_location)
    if len(component_args) > 1:
        exports = (getopt.parse_command_line(args, getopt.SBATCH_SHORT_OPTIONS, _SCRIPT_OPTIONS,
                                             plugin_options).last_value("export") for args in component_args)
        export = next(filter(None, exports), "")
        return _Directives({"export": export} if export else {}, dl, plugin, _HETEROGENEOUS_REASON)
    settings = _collect_sbatch_settings(line.options)
    if "ignore-pbs" in settings:
        translated_reason = ""
    return _Directives(settings, dl, plugin, translated_reason or _unknown_option_reason(line))


def _unplaceable_reason(parsed_argv: ParsedArgv, settings: Mapping[str, str], script: Script | None,
                        environ: Mapping[str, str]) -> str:
    if parsed_argv.is_heterogeneous:
        return _HETEROGENEOUS_REASON
    if "SLURM_HOSTFILE" in environ and not {"nodelist", "nodefile"} & settings.keys():
        return "SLURM_HOSTFILE brings its own node list"
    reason = _unknown_option_reason(parsed_argv.command_line)
    if not reason and script is None and "wrap" not in settings:
        operands = parsed_argv.command_line.operands
        reason = f"the script {operands[0] if operands else STDIN_NAME} cannot be read"
    return reason


def _unknown_option_reason(line: getopt.CommandLine) -> str:
    return next((f"the option {option.args[0]} is not understood" for option in line.options
                 if not option.is_known and option.value is None), "")


def _read_script(line: getopt.CommandLine, stdin: bytes | None) -> Script | None:
    if line.has_option("wrap"):
        return None
    if not line.operands:
        return None if stdin is None else Script(STDIN_NAME, stdin, from_stdin=True)
    name = line.operands[0]
    path = _resolve_script_path(name, line.last_value("chdir"))
    try:
        # a pipe can be read only once, and sbatch must read it
        if not stat.S_ISREG(os.stat(path).st_mode):
            return None
        with open(path, "rb") as file:
            return Script(name, file.read(MAX_SCRIPT_HEAD_BYTES + 1))
    except OSError:
        return None


def _resolve_script_path(name: str, chdir: str | None) -> str:
    """The path at which sbatch finds a script (sbatch(1), SCRIPT PATH RESOLUTION)."""
    local = os.path.join(chdir or "", name)
    if name.startswith((".", "/")) or os.path.exists(local):
        return local
    import shutil

    return shutil.which(name, mode=os.R_OK) or local


def applies_rank_map(text: str) -> bool:
    """Whether a script starts its tasks by a rank map."""
    return re.search(r"\bslurmdl(\s+|['\"],?\s*['\"])srun\b|--dl-rank-map\b", text) is not None


def build_submit_command(program: str, job: Submission, environ: Mapping[str, str],
                         binding_options: Sequence[str] = (), requested_size: RequestedSize | None = None,
                         promise: Promise | None = None) -> SubmitCommand:
    """Build the command that submits: the user's arguments, the options of the binding, and the record."""
    added = [*job.extra_options, *binding_options]
    if not _export_keeps_record(program, job.settings.get("export", "ALL")):
        added.append(f"--export={job.settings['export']},{submission_record.ENV_VARIABLE}")
    # for the plugin the environment has precedence over the script, as the command line has
    env = {**submission_record.environ_without_inherited(environ), **job.plugin_environ}
    removed = tuple(sorted(set(environ) - set(env) - {submission_record.ENV_VARIABLE}))
    inputs = {**job.directive_environ, **environ, **job.plugin_environ}
    env[submission_record.ENV_VARIABLE] = submission_record.new_record(
        job.request.dl, inputs, requested_size, promise).to_env_value()
    stdin = job.script.body if job.script and job.script.from_stdin else None
    return SubmitCommand((program, *_insert_options(job, added)), env, removed, stdin)


def _insert_options(job: Submission, added: Sequence[str]) -> list[str]:
    """The user's arguments with further `--name=value`, which override the user's own.

    An option of a plugin that slurmdl does not know may take its value from the next argument, so the end of the
    user's options is unknown. So an option goes before all others, or directly after the user's option of the same
    name.
    """
    inserted: dict[int, list[str]] = {}
    for option in added:
        inserted.setdefault(job.option_ends.get(option[2:].partition("=")[0], 0), []).append(option)
    return [arg for i in range(len(job.argv) + 1) for arg in (*inserted.get(i, ()), *job.argv[i:i + 1])]


def _export_keeps_record(program: str, export: str) -> bool:
    """Whether the job receives the submission record with this value of --export (see submission_record)."""
    names = export.upper().split(",")
    if names == ["NIL"]:
        # with a name after NIL newer releases would load the user's login environment, which NIL avoids
        try:
            version = re.search(r"([0-9]+)\.([0-9]+)", process.check_output([program, "--version"]))
        except UnavailableError:
            return True
        return version is None or (int(version[1]), int(version[2])) >= (23, 11)
    return "ALL" in names or names == ["NONE"]
