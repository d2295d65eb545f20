"""One call of sbatch as it was typed: its words, its script, and the request that both make."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurmdl import dl_options, job_request
from slurmdl.dl_options import DlOptions
from slurmdl.errors import UsageError
from slurmdl.job_request import JobRequest
from slurmdl.slurm import getopt, sbatch_options

_LONG_OPTIONS = {**sbatch_options.LONG_OPTIONS, **dl_options.LONG_OPTIONS}
#: what a #SBATCH line may have where Slurm has the plugin
_SCRIPT_OPTIONS = {**sbatch_options.LONG_OPTIONS, **dl_options.SPANK_OPTIONS}

#: of two options that set the same, the later one counts, and to take one back takes back both
_COUNTERPART = {"nodelist": "nodefile", "nodefile": "nodelist", "requeue": "no-requeue", "no-requeue": "requeue",
             "exclusive": "oversubscribe", "oversubscribe": "exclusive"}

#: ways to ask for memory: what stands in the script or on the command line sets aside what the environment asks for
_MEMORY_OPTIONS = frozenset(("mem", "mem-per-cpu", "mem-per-gpu"))

#: bytes of a script that are read for its directives; sbatch takes scripts of 4 MB (slurm.conf(5), max_script_size)
MAX_SCRIPT_HEAD_BYTES = 1 << 20

#: how messages call a script without a name
STDIN_NAME = "standard input"

_HETEROGENEOUS_REASON = "a heterogeneous job chooses nodes per component"


@dataclass(frozen=True)
class Script:
    """A batch script: its name for messages, its bytes, and whether they came from standard input.

    Of a file that is longer than MAX_HEAD, `body` holds the beginning.
    """

    name: str
    body: bytes
    from_stdin: bool = False

    @property
    def is_long(self) -> bool:
        """Whether it goes on behind its `head`."""
        return len(self.body) > MAX_SCRIPT_HEAD_BYTES

    @property
    def head(self) -> bytes:
        """Its first lines, up to MAX_HEAD bytes."""
        return self.body[:MAX_SCRIPT_HEAD_BYTES].rpartition(b"\n")[0] if self.is_long else self.body


@dataclass(frozen=True)
class Submission:
    """What is to be submitted.

    Attributes
    ----------
    argv : the user's words without the --dl-* options.
    end : index in argv where sbatch's options end and further ones can be put.
    settings : long name of an option of sbatch -> its value, "" for a flag, after precedence.
    script : None with --wrap, and where the script cannot be read.
    request : what placement needs of all this.
    layers : the user's own --dl-* settings by source, the weakest first.
    told : the variables SLURMDL_OPT_* that tell the plugin of what was typed, where it reads the script, too.
    plugged : those that it makes of the #SBATCH lines.
    """

    argv: tuple[str, ...]
    options_end: int
    settings: Mapping[str, str]
    script: Script | None
    request: JobRequest
    layers: tuple[Mapping[str, str], ...] = ()
    plugin_environ: Mapping[str, str] = field(default_factory=dict)
    directive_environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def quiet(self) -> bool:
        return "quiet" in self.settings

    @property
    def names_zones(self) -> bool:
        """Whether the user has named zones, and not only the site."""
        return any("zone" in layer for layer in self.layers)

    @property
    def maps_ranks(self) -> bool | None:
        """Whether the job starts its tasks so that a rank map is applied; None where that is not known."""
        program = self.settings.get("wrap", "")
        if self.script:
            program += self.script.head.decode(errors="replace")
        if applies_rank_map(program):
            return True
        return None if not program or (self.script and self.script.is_long) else False

    def with_defaults(self, defaults: Mapping[str, str]) -> Submission:
        """The same with settings of --dl-* options that are weaker than the user's own.

        Raises
        ------
        UsageError : a default is not valid.
        """
        dl = dl_options.merge_layers(defaults, *self.layers)
        return replace(self, request=replace(self.request, dl=dl))


@dataclass(frozen=True)
class ParsedArgv:
    """argv, split. `line` holds no `:` of heterogeneous jobs, but its indexes count in argv.

    `operands` is the index in argv of the script, or the length of argv.
    """

    argv: tuple[str, ...]
    command_line: getopt.CommandLine
    operand_index: int
    is_heterogeneous: bool

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> ParsedArgv:
        places = [i for i, word in enumerate(argv) if word != ":"]
        line = getopt.parse_command_line([argv[i] for i in places], sbatch_options.SHORT_OPTIONS, _LONG_OPTIONS)
        moved = tuple(getopt.Option(o.name, o.value, o.args, places[o.index], o.is_known, o.is_complete)
                      for o in line.options)
        operands = places[-len(line.operands)] if line.operands else len(argv)
        return cls(tuple(argv), getopt.CommandLine(moved, line.operands), operands, len(places) < len(argv))

    @property
    def reads_stdin(self) -> bool:
        """Whether the script comes from standard input."""
        return not self.command_line.operands and not self.command_line.has_option("wrap")

    @property
    def requests_help(self) -> bool:
        return any(self.command_line.has_option(name) for name in ("help", "usage", "version"))

    def sbatch_args(self) -> tuple[tuple[str, ...], int]:
        """The words for sbatch, and the index among them where the options end."""
        ours = {i for option in self.command_line.options if option.name.startswith("dl-")
                for i in range(option.index, option.index + len(option.args))}
        last = self.command_line.options[-1] if self.command_line.options else None
        end = last.index + len(last.args) if last else 0
        if self.argv[end:end + 1] != ("--",):
            end = self.operand_index
        return (tuple(word for i, word in enumerate(self.argv) if i not in ours),
                sum(i not in ours for i in range(end)))


@dataclass(frozen=True)
class SubmitCommand:
    """The one command that submits: what a dry run prints, and what is run otherwise."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    removed_variables: tuple[str, ...] = ()
    stdin: bytes | None = field(default=None, repr=False)


def parse_submission(argv: Sequence[str], environ: Mapping[str, str], defaults: Mapping[str, str], *,
         stdin: bytes | None = b"", has_plugin: Callable[[], bool] = lambda: True) -> Submission:
    """Read one call of sbatch: script before environment before command line, the last counts.

    Parameters
    ----------
    argv : the words after `sbatch`.
    defaults : settings of --dl-* options that are weaker than all others.
    stdin : what a script without a name holds, None where it could not be read.
    has_plugin : whether sbatch knows --dl-* in #SBATCH lines; asked only where there are some.

    Raises
    ------
    UsageError : an unknown --dl-* option, a value that is not valid, or a `#DL` line with an open quote.
    """
    words = ParsedArgv.from_argv(argv)
    typed = dl_options.collect_settings(words.command_line.options)
    script = _read_script(words.command_line, stdin)
    given, directed, plugged, doubt = _parse_directives(script, has_plugin) if script else ({}, {}, {}, "")
    typed_settings = _collect_sbatch_settings(words.command_line.options)
    exported = sbatch_options.sbatch_settings_from_environ(environ)
    settings = _overlay_sbatch_settings(_overlay_sbatch_settings(given, exported), typed_settings)
    memory = _MEMORY_OPTIONS & settings.keys()
    from_outside = memory & (exported.keys() - typed_settings.keys())
    if from_outside != memory:
        settings = {name: value for name, value in settings.items() if name not in from_outside}
    layers = (plugged, directed, dl_options.dl_settings_from_environ(environ), typed)
    unpinnable = _unplaceable_reason(words, settings, script, environ) or doubt
    passed, end = words.sbatch_args()
    return Submission(passed, end, settings, script, job_request.build_request(settings, DlOptions(), unpinnable), layers,
                      dl_options.to_environ(typed) if plugged else {}, dl_options.to_environ(plugged)).with_defaults(defaults)


def _collect_sbatch_settings(options: Iterable[getopt.Option]) -> dict[str, str]:
    found: dict[str, str] = {}
    for option in options:
        if option.is_known and not option.name.startswith("dl-"):
            name = sbatch_options.SYNONYMS.get(option.name, option.name)
            found = _overlay_sbatch_settings(found, {name: option.value or ""})
    return found


def _overlay_sbatch_settings(base: Mapping[str, str], layer: Mapping[str, str | None]) -> dict[str, str]:
    merged = dict(base)
    for name, value in layer.items():
        merged.pop(_COUNTERPART.get(name, ""), None)
        merged.pop(name, None)
        if value is not None:
            merged[name] = value
    return merged


def _parse_directives(script: Script, has_plugin: Callable[[], bool]) -> tuple[dict[str, str], dict[str, str],
                                                                          dict[str, str], str]:
    """sbatch's settings, the --dl-* settings of #DL lines and those of #SBATCH lines, and what of the directives is
    not understood ("" for nothing)."""
    words: list[str] = []
    directed: dict[str, str] = {}
    components, translated, first = 1, "", ""
    if script.is_long and not sbatch_options.script_header(script.head)[1]:
        return {}, {}, {}, f"the directives of {script.name} are not read: they go on beyond {MAX_SCRIPT_HEAD_BYTES} bytes"
    for directive in sbatch_options.script_directives(script.head, script.name):
        where = f"{script.name}:{directive.line}: "
        if directive.keyword == "#DL":
            directed.update(dl_options.parse_directive(directive.args, where))
        elif directive.keyword != "#SBATCH":
            translated = translated or f"{where}{directive.keyword} lines are translated by sbatch"
        else:
            if any(word.startswith("--dl-") for word in directive.args):
                first = first or where
            components += directive.args[:1] in (("hetjob",), ("packjob",))
            words += directive.args
    line = getopt.parse_command_line(words, sbatch_options.SHORT_OPTIONS, _SCRIPT_OPTIONS)
    ours = [option for option in line.options if option.name.startswith("dl-")]
    stranger = next((option for option in ours if option.name not in dl_options.SPANK_OPTIONS), None)
    if stranger or (ours and not has_plugin()):
        word = (stranger or ours[0]).args[0]
        why = "is no option of sbatch" if stranger else "in a #SBATCH line needs the plugin of slurmdl in Slurm"
        raise UsageError(f"{first}{word!r} {why}; valid: #DL {word}")
    plugged = dl_options.collect_settings(ours, first)
    if components > 1:
        return {}, directed, plugged, _HETEROGENEOUS_REASON
    settings = _collect_sbatch_settings(line.options)
    if "ignore-pbs" in settings:
        translated = ""
    return settings, directed, plugged, translated or _unknown_option_reason(line)


def _unplaceable_reason(parsed_argv: ParsedArgv,
                        settings: Mapping[str, str], script: Script | None, environ: Mapping[str, str]) -> str:
    if parsed_argv.is_heterogeneous:
        return _HETEROGENEOUS_REASON
    if "SLURM_HOSTFILE" in environ and not {"nodelist", "nodefile"} & settings.keys():
        return "SLURM_HOSTFILE brings its own node list"
    doubt = _unknown_option_reason(parsed_argv.command_line)
    if not doubt and script is None and "wrap" not in settings:
        doubt = f"the script {parsed_argv.command_line.operands[0] if parsed_argv.command_line.operands else STDIN_NAME} cannot be read"
    return doubt


def _unknown_option_reason(line: getopt.CommandLine) -> str:
    for option in line.options:
        if not option.is_known and option.value is None:
            return f"the option {option.args[0]} is not understood"
    return ""


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
    """Where sbatch finds a script (sbatch(1), SCRIPT PATH RESOLUTION)."""
    here = os.path.join(chdir or "", name)
    if name.startswith((".", "/")) or os.path.exists(here):
        return here
    import shutil

    return shutil.which(name, mode=os.R_OK) or here


def applies_rank_map(text: str) -> bool:
    """Whether a script starts its tasks so that a rank map is applied."""
    return re.search(r"\bslurmdl(\s+|['\"],?\s*['\"])srun\b|--dl-rank-map\b", text) is not None
