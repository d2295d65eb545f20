"""One call of sbatch: its arguments, its script, the resulting job request, and the command that submits it."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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

    @property
    def text(self) -> str:
        return self.head.decode(errors="replace")


@dataclass(frozen=True)
class SbatchCall:
    """One call of sbatch, with its arguments split into options and operands.

    Attributes:
        argv: the user's arguments.
        line: without the `:` of heterogeneous jobs; its indexes refer to argv.
        program: sbatch; "" if it cannot be queried.
        stdin: content of standard input if it is the script; None if it cannot be read.
    """

    argv: tuple[str, ...]
    line: getopt.CommandLine
    program: str = ""
    stdin: bytes | None = None

    @classmethod
    def from_argv(cls, argv: Sequence[str], program: str = "",
                  read_stdin: Callable[[], bytes | None] = bytes) -> SbatchCall:
        """Parse the arguments. `read_stdin` is called if standard input is the script."""
        indexes = [i for i, arg in enumerate(argv) if arg != ":"]
        line = getopt.parse_command_line([argv[i] for i in indexes], getopt.SBATCH_SHORT_OPTIONS, _LONG_OPTIONS,
                                         _plugin_options(program))
        options = tuple(replace(option, index=indexes[option.index]) for option in line.options)
        call = cls(tuple(argv), getopt.CommandLine(options, line.operands), program)
        reads_stdin = not (line.operands or line.has_option("wrap") or call.requests_help)
        return replace(call, stdin=read_stdin()) if reads_stdin else call

    @property
    def is_heterogeneous(self) -> bool:
        return ":" in self.argv

    @property
    def requests_help(self) -> bool:
        return any(self.line.has_option(name) for name in ("help", "usage", "version"))

    @property
    def script_options(self) -> list[getopt.Option]:
        """The options; of --export only those of the first component that has it: they count for the script."""
        starts = [i for i, arg in enumerate(self.argv) if arg == ":"]
        first = min((option.index for option in self.line.options if option.name == "export"), default=0)
        end = next((start for start in starts if start > first), len(self.argv))
        return [option for option in self.line.options if option.name != "export" or option.index < end]

    def sbatch_args(self, added: Sequence[str] = ()) -> list[str]:
        """The arguments without the --dl-* options, with further `--name=value` that override the user's own.

        An option of a plugin that slurmdl does not know may take its value from the next argument, so the end of the
        user's options is unknown. So an option goes before all others, or directly after the user's option of the
        same name.
        """
        removed = {i for option in self.line.options if option.name.startswith("dl-")
                   for i in range(option.index, option.index + len(option.args))}
        ends = {getopt.SYNONYMS.get(option.name, option.name): option.index + len(option.args)
                for option in self.script_options
                if option.is_known and option.value is not None and option.index not in removed}
        inserted: dict[int, list[str]] = {}
        for text in added:
            inserted.setdefault(ends.get(text[2:].partition("=")[0], 0), []).append(text)
        return [arg for i in range(len(self.argv) + 1)
                for arg in (*inserted.get(i, ()), *(() if i in removed else self.argv[i:i + 1]))]


@dataclass(frozen=True)
class Submission:
    """A call of sbatch with its script, its environment and the defaults of the site.

    Attributes:
        settings: long name of an sbatch option -> value, "" for a flag, after precedence.
        script: None with --wrap, and if the script cannot be read.
        names_zones: whether the user has named zones, not only the site.
        plugin_environ: SLURMDL_OPT_* variables that pass command-line options to the plugin, if the plugin reads the
            script.
        directive_environ: SLURMDL_OPT_* variables that the plugin makes of #SBATCH lines.
        extra_options: options for sbatch that the user did not give, whatever the binding.
    """

    call: SbatchCall
    settings: Mapping[str, str]
    script: Script | None
    request: JobRequest
    names_zones: bool = False
    plugin_environ: Mapping[str, str] = field(default_factory=dict)
    directive_environ: Mapping[str, str] = field(default_factory=dict)
    extra_options: tuple[str, ...] = ()

    @property
    def quiet(self) -> bool:
        return "quiet" in self.settings

    @property
    def uses_slurmdl_srun(self) -> bool | None:
        """Whether the job starts its tasks by a rank map; None if unknown."""
        text = self.settings.get("wrap", "") + (self.script.text if self.script else "")
        if re.search(r"\bslurmdl(\s+|['\"],?\s*['\"])srun\b|--dl-rank-map\b", text):
            return True
        return None if not text or (self.script and self.script.is_long) else False

    def missing_program_warning(self) -> str:
        """What to write if the job may not find slurmdl because --export passes no PATH, or ""."""
        export = self.settings.get("export", "ALL")
        names = export.split(",")
        if "ALL" in export.upper().split(",") or any(name.partition("=")[0] == "PATH" for name in names):
            return ""
        import shutil

        program = os.path.abspath(shutil.which("slurmdl") or os.path.join(os.path.dirname(sys.argv[0]), "slurmdl"))
        if os.path.dirname(program) in _DEFAULT_DIRECTORIES:
            return ""
        text = self.script.text if self.script else self.settings.get("wrap", "")
        found = _CALL_BY_NAME.search(text)
        if not found or _SETS_PATH.search(text[:found.end()]):
            return ""
        return (f"with --export={truncate(export, 100)} the job does not get this PATH and may not find slurmdl; "
                f"write {program} in the script, or --export=PATH,...")


@dataclass(frozen=True)
class SubmitCommand:
    """The command that submits a job; a dry run prints it."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    removed_variables: tuple[str, ...] = ()
    stdin: bytes | None = field(default=None, repr=False)


def parse_submission(call: SbatchCall, environ: Mapping[str, str],
                     defaults: Mapping[str, str] | None = None) -> Submission:
    """Read the script, and apply the precedence script < environment < command line.

    Raises UsageError for an unknown --dl-* option, an invalid value, or a `#DL` line with an open quote.

    Args:
        defaults: --dl-* settings that are weaker than the user's own.
    """
    cli_dl = dl_options.collect_settings(call.line.options)
    script = _read_script(call)
    directives = _parse_directives(script, call.program) if script else _Directives()
    cli_settings = _collect_sbatch_settings(call.script_options)
    env_settings = getopt.sbatch_settings_from_environ(environ)
    settings = _overlay_sbatch_settings(_overlay_sbatch_settings(directives.sbatch, env_settings), cli_settings)
    memory = _MEMORY_OPTIONS & settings.keys()
    env_memory = memory & (env_settings.keys() - cli_settings.keys())
    if env_memory != memory:
        settings = {name: value for name, value in settings.items() if name not in env_memory}
    layers = (directives.plugin, directives.dl, dl_options.dl_settings_from_environ(environ), cli_dl)
    reason = _unplaceable_reason(call, settings, script, environ) or directives.unknown_reason
    request = job_request.build_request(settings, dl_options.merge_layers(defaults or {}, *layers), reason)
    text = script.text if script else settings.get("wrap", "")
    if _LAUNCHER.search(text) and request.options.launcher != "none":
        from slurmdl.launch.launchers import script_ranks_per_node

        request = replace(request, script_ranks_per_node=script_ranks_per_node(text, str(request.gpus_per_node)))
    return Submission(call, settings, script, request, any("zone" in layer for layer in layers),
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


def _parse_directives(script: Script, program: str) -> _Directives:
    """Parse the directives of a script. UsageError as `parse_submission`."""
    if script.is_long and not getopt.script_header(script.head)[1]:
        return _Directives(unknown_reason=f"the directives of {script.name} are not read: they go on beyond "
                                          f"{MAX_SCRIPT_HEAD_BYTES} bytes")
    components: list[list[str]] = [[]]
    dl: dict[str, str] = {}
    translated_reason, first_dl_location = "", ""
    for directive in getopt.script_directives(script.head, script.name):
        location = f"{script.name}:{directive.line}: "
        if directive.keyword == "#DL":
            dl.update(dl_options.parse_directive(directive.args, location))
        elif directive.keyword != "#SBATCH":
            translated_reason = translated_reason or f"{location}{directive.keyword} lines are translated by sbatch"
        elif directive.args[:1] in (("hetjob",), ("packjob",)):
            components.append([])
        else:
            if any(arg.startswith("--dl-") for arg in directive.args):
                first_dl_location = first_dl_location or location
            components[-1] += directive.args
    line, *others = (getopt.parse_command_line(args, getopt.SBATCH_SHORT_OPTIONS, _SCRIPT_OPTIONS,
                                               _plugin_options(program)) for args in components)
    dl_opts = [option for option in line.options if option.name.startswith("dl-")]
    unknown = next((option for option in dl_opts if option.name not in dl_options.SPANK_OPTIONS), None)
    if unknown or (dl_opts and not _sbatch_has_plugin(program)):
        arg = (unknown or dl_opts[0]).args[0]
        problem = "is not an option of sbatch" if unknown else \
            "in a #SBATCH line needs the plugin of slurmdl in Slurm"
        raise UsageError(f"{first_dl_location}{arg!r} {problem}; expected #DL {arg}")
    plugin = dl_options.collect_settings(dl_opts, first_dl_location)
    if others:
        export = next(filter(None, (each.last_value("export") for each in (line, *others))), "")
        return _Directives({"export": export} if export else {}, dl, plugin, _HETEROGENEOUS_REASON)
    settings = _collect_sbatch_settings(line.options)
    if "ignore-pbs" in settings:
        translated_reason = ""
    return _Directives(settings, dl, plugin, translated_reason or _unknown_option_reason(line))


def _plugin_options(program: str) -> Callable[[], Mapping[str, getopt.HasArg]]:
    return partial(getopt.plugin_options, program) if program else dict


def _sbatch_has_plugin(program: str) -> bool:
    """Whether sbatch has the plugin's options; True if unknown, so that sbatch itself rejects them."""
    try:
        return not program or "--dl-" in process.check_output([program, "--help"])
    except UnavailableError:
        return True


def _unplaceable_reason(call: SbatchCall, settings: Mapping[str, str], script: Script | None,
                        environ: Mapping[str, str]) -> str:
    if call.is_heterogeneous:
        return _HETEROGENEOUS_REASON
    if "SLURM_HOSTFILE" in environ and not {"nodelist", "nodefile"} & settings.keys():
        return "SLURM_HOSTFILE brings its own node list"
    reason = _unknown_option_reason(call.line)
    if not reason and script is None and "wrap" not in settings:
        reason = f"the script {call.line.operands[0] if call.line.operands else STDIN_NAME} cannot be read"
    return reason


def _unknown_option_reason(line: getopt.CommandLine) -> str:
    return next((f"the option {option.args[0]} is not understood" for option in line.options
                 if not option.is_known and option.value is None), "")


def _read_script(call: SbatchCall) -> Script | None:
    line = call.line
    if line.has_option("wrap"):
        return None
    if not line.operands:
        return None if call.stdin is None else Script(STDIN_NAME, call.stdin, from_stdin=True)
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


def build_submit_command(submission: Submission, environ: Mapping[str, str], binding_options: Sequence[str] = (),
                         requested_size: RequestedSize | None = None,
                         promise: Promise | None = None) -> SubmitCommand:
    """Build the command that submits: the user's arguments, the options of the binding, and the record."""
    call, added = submission.call, [*submission.extra_options, *binding_options]
    export = submission.settings.get("export", "ALL")
    if not _export_keeps_record(call.program, export):
        added.append(f"--export={export},{submission_record.ENV_VARIABLE}")
    # for the plugin the environment has precedence over the script, as the command line has
    env = {**submission_record.environ_without_inherited(environ), **submission.plugin_environ}
    removed = tuple(sorted(set(environ) - set(env) - {submission_record.ENV_VARIABLE}))
    inputs = {**submission.directive_environ, **environ, **submission.plugin_environ}
    env[submission_record.ENV_VARIABLE] = submission_record.new_record(
        submission.request.options, inputs, requested_size, promise).to_env_value()
    script = submission.script
    return SubmitCommand((call.program, *call.sbatch_args(added)), env, removed,
                         script.body if script and script.from_stdin else None)


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
