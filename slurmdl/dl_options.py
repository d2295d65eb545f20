"""The --dl-* options: one table, and how command line, `#DL` lines, environment and configuration fill it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from slurmdl import getopt
from slurmdl.errors import InputError, UsageError, nearest_first
from slurmdl.plan import PATTERNS, STRATEGIES

PLACES = ("pack", "balance", "spread")
PROBES = ("0", "0.5", "1", "2")
BINDS = ("auto", "pin", "zone", "late", "off")
RANK0 = ("first", "any")


@dataclass(frozen=True)
class DlOptions:
    """The --dl-* options after precedence (script < environment < command line).

    Attributes
    ----------
    strategy : one of plan.STRATEGIES.
    ps : number of parameter servers (0 unless the strategy is ps).
    place : one of PLACES.
    bind : one of BINDS.
    zone : zones that the job may use; () for any.
    rank0 : one of RANK0.
    model_bytes : bytes that one replica of the parameters takes.
    traffic : one of plan.PATTERNS[strategy], "" for the first of them, else a file of matrices.
    scores : "auto", "off", a file, or the URL of a Prometheus server.
    probe : seconds, one of PROBES.
    """

    strategy: str = "allreduce"
    ps: int = 0
    place: str = "pack"
    bind: str = "auto"
    zone: tuple[str, ...] = ()
    rank0: str = "first"
    model_bytes: float = 100e6
    traffic: str = ""
    scores: str = "auto"
    probe: str = "0"
    explain: bool = False
    dry_run: bool = False
    strict: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> DlOptions:
        """The inverse of `to_json`; fields that another version wrote are passed over.

        Raises
        ------
        InputError : it is no object, or a field has another type than here.
        """
        if not isinstance(data, dict):
            raise InputError(f"--dl-* options: expected an object, found {type(data).__name__}")
        values: dict[str, Any] = {}
        for known in fields(cls):
            if known.name in data:
                value = data[known.name]
                default = getattr(cls, known.name)
                value = tuple(map(str, value)) if isinstance(value, list) else value
                kinds = (int, float) if isinstance(default, float) else (type(default),)
                if not isinstance(value, kinds):
                    raise InputError(f"--dl-* options: {known.name}={value!r} is not valid")
                values[known.name] = value
        return cls(**values)


@dataclass(frozen=True)
class DlOption:
    """One --dl-* option: the same on the command line, in `#DL` lines, in SLURMDL_OPT_* and in slurmdl.yaml.

    Attributes
    ----------
    name : without the prefix, e.g. "model-bytes".
    kind : "choice", "count", "bytes", "names", "text" or "flag".
    values : how the help shows the value, "" for a flag; for a choice the valid ones with | between.
    """

    name: str
    kind: str
    values: str
    help: str

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        return f"SLURMDL_OPT_{self.field.upper()}"

    def read(self, value: str, source: str) -> Any:
        """The value of `DlOptions.<field>`; UsageError names `source` and what is valid."""
        if self.kind == "flag":
            return is_set(value)
        if self.kind == "choice":
            valid = self.values.split("|")
            if value not in valid:
                raise UsageError(f"{source}: {value!r} is not valid; valid: {', '.join(nearest_first(value, valid))}")
            return value
        if self.kind == "count":
            if not re.fullmatch(r"[0-9]{1,9}", value):
                raise UsageError(f"{source}: {value!r} is not valid; valid: a whole number, 0 or more")
            return int(value)
        if self.kind == "bytes":
            return bytes_of(value, source)
        if self.kind == "names":
            names = tuple(dict.fromkeys(name for name in value.split(",") if name))
            if not names:
                raise UsageError(f"{source}: {value!r} is not valid; valid: names with commas between")
            return names
        if not value:
            raise UsageError(f"{source}: an empty value is not valid; valid: {self.values}")
        return value


#: every --dl-* option; the only list of them
OPTIONS = (
    DlOption("strategy", "choice", "|".join(STRATEGIES), "how the replicas of the model are kept together"),
    DlOption("ps", "count", "N", "number of parameter servers among the tasks (strategy ps; 1 where not given)"),
    DlOption("place", "choice", "|".join(PLACES), "fill a zone after the other, level them, or spread wide"),
    DlOption("bind", "choice", "|".join(BINDS), "how hard the choice of nodes binds Slurm"),
    DlOption("zone", "names", "NAME,...", "the only zones whose nodes the job may use"),
    DlOption("rank0", "choice", "|".join(RANK0), "keep rank 0 on the first node of the job, where scripts look for "
             "it, or let it be on any"),
    DlOption("model-bytes", "bytes", "N", "bytes of one replica of the parameters, e.g. 400M"),
    DlOption("traffic", "text", "PATTERN|FILE", "what the ranks send: ring or hierarchical; random, "
             "exponential, base, zones or links (gossip); shards (ps); or a file of matrices, .npz or CSV"),
    DlOption("scores", "text", "auto|off|FILE|URL", "link scores: JSON, CSV, or a Prometheus server"),
    DlOption("probe", "choice", "|".join(PROBES), "seconds to probe the links of the job's own nodes before ranks "
             "are mapped"),
    DlOption("explain", "flag", "", "say on stderr what was chosen and why"),
    DlOption("dry-run", "flag", "", "print what would be submitted, submit nothing"),
    DlOption("strict", "flag", "", "fail where no choice can be made, instead of submitting without one"),
)

#: what the wrapper says or shows instead of submitting, and has no meaning to sbatch itself
WRAPPER_ONLY = ("explain", "dry-run")

_BY_NAME = {f"dl-{option.name}": option for option in OPTIONS}
_BY_FIELD = {option.field: option for option in OPTIONS}

#: long name -> whether it takes a value, for getopt.parse
LONG: dict[str, getopt.Takes] = {
    name: "no" if option.kind == "flag" else "yes" for name, option in _BY_NAME.items()}
#: those that sbatch, salloc and srun have by the plugin
PLUGIN: dict[str, getopt.Takes] = {
    name: takes for name, takes in LONG.items() if _BY_NAME[name].name not in WRAPPER_ONLY}


def variables(settings: Mapping[str, str]) -> dict[str, str]:
    """Settings as the variables SLURMDL_OPT_* by which the plugin hands them to the job."""
    return {_BY_FIELD[field].variable: value for field, value in settings.items()
            if _BY_FIELD[field].name not in WRAPPER_ONLY}


def help_text() -> str:
    """The options with their values and what they do, as `slurmdl sbatch --help` shows them."""
    heads = [f"--dl-{option.name}{'=' * bool(option.values)}{option.values}" for option in OPTIONS]
    lines = [f"  {head}\n{'':30}{option.help}" if len(head) > 26 else f"  {head:28}{option.help}"
             for head, option in zip(heads, OPTIONS, strict=True)]
    return "\n".join(["Placement options, also in #DL lines of the script and as SLURMDL_OPT_* in the environment:",
                      *lines, ""])


def is_set(value: str) -> bool:
    """Whether a variable switches a flag on: empty, "yes" or a number that is not 0 (sbatch(1))."""
    return value in ("", "yes") or re.fullmatch(r"[+-]?0*[1-9][0-9]*", value) is not None


def is_pattern(traffic: str | None) -> bool:
    """Whether it is the name of a pattern of any strategy, and no file."""
    return any(traffic in patterns for patterns in PATTERNS.values())


def bytes_of(value: str, source: str) -> float:
    """The number of bytes behind `400M` and the like; UsageError names `source`."""
    match = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([kKMGT]i?)?B?", value)
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    if not match or not 0 < number < float("inf"):
        raise UsageError(f"{source}: {value!r} is not valid; valid: bytes above 0, e.g. 1e8, 400M, 1.5Gi")
    prefix = match[2] or ""
    return float(number * (1024 if prefix.endswith("i") else 1000) ** " KMGT".index((prefix[:1] or " ").upper()))


def settings(options: Iterable[getopt.Option], where: str = "") -> dict[str, str]:
    """Check the --dl-* options among `options`: field -> value as text ("" for a flag).

    Parameters
    ----------
    where : put before each message, e.g. "job.sh:3: ".

    Raises
    ------
    UsageError : an unknown --dl-* option, or a value that is missing, not valid, or one too many.
    """
    found = {}
    for option in options:
        known = _BY_NAME.get(option.name)
        if known is not None:
            found[known.field] = _value(known, option, where)
        elif option.name.startswith("dl-"):
            written = option.words[0].partition("=")[0]
            raise UsageError(f"{where}unknown option {written}; valid: {_valid(written)}")
    return found


def _value(known: DlOption, option: getopt.Option, where: str) -> str:
    if known.kind == "flag" and option.value is not None:
        raise UsageError(f"{where}--{option.name} takes no value")
    if known.kind != "flag" and option.value is None:
        raise UsageError(f"{where}--{option.name} needs a value: {known.values}")
    known.read(option.value or "", f"{where}--{option.name}")
    return option.value or ""


def misplaced(operands: Sequence[str], what: str) -> str:
    """A remark on --dl-* options behind the first operand, which is a script or a program; "" if there are none.

    Parameters
    ----------
    what : "script" or "program".
    """
    behind = [word.partition("=")[0] for word in operands[1:] if word.startswith("--dl-")]
    return f"{behind[0]} is passed to the {what} {operands[0]}: it stands behind it" if behind else ""


def directive(words: Sequence[str], where: str) -> dict[str, str]:
    """The settings of one `#DL` line. UsageError as in `settings`, or for a word that is no --dl-* option."""
    line = getopt.parse(words, {}, LONG)
    strangers = [o.words[0] for o in line.options if not o.name.startswith("dl-")] + list(line.operands)
    if strangers:
        raise UsageError(f"{where}{strangers[0]!r} is not valid after #DL; valid: {_valid(strangers[0])}")
    return settings(line.options, where)


def from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings that SLURMDL_OPT_* make. UsageError for an unknown variable or a value that is not valid."""
    variables = {option.variable: option for option in OPTIONS}
    found = {}
    for name, value in environ.items():
        if name.startswith("SLURMDL_OPT_"):
            option = variables.get(name)
            if option is None:
                raise UsageError(f"unknown variable {name}; valid: {', '.join(nearest_first(name, list(variables)))}")
            if option.read(value, name) is not False:
                found[option.field] = value
    return found


def _valid(written: str) -> str:
    return ", ".join(nearest_first(written, [f"--{name}" for name in LONG]))


def overlay(below: Mapping[str, str], layer: Mapping[str, str]) -> dict[str, str]:
    """The settings of a layer over those below it.

    A layer that names a strategy sets aside what layers below say of another one, its parameter servers and the
    pattern of its traffic, and one that asks for parameter servers alone asks for the strategy ps.

    Raises
    ------
    UsageError : the layer asks for parameter servers beside another strategy.
    """
    merged = dict(below)
    strategy, servers = layer.get("strategy"), layer.get("ps")
    if servers not in (None, "0") and strategy not in (None, "ps"):
        raise UsageError(f"--dl-ps={servers}: the strategy {strategy} has no parameter servers; "
                         "valid: --dl-strategy=ps")
    if strategy not in (None, "ps"):
        merged.pop("ps", None)
    merged.update(layer)
    if servers not in (None, "0"):
        merged["strategy"] = "ps"
    valid = PATTERNS[merged.get("strategy", DlOptions.strategy)]
    if "traffic" not in layer and merged.get("traffic") not in valid and is_pattern(merged.get("traffic")):
        del merged["traffic"]
    return merged


def merge(*layers: Mapping[str, str]) -> DlOptions:
    """The options from layers of settings, the weakest first (see `overlay`).

    Raises
    ------
    UsageError : a value is not valid, or one layer asks for parameter servers beside another strategy.
    """
    merged: dict[str, str] = {}
    for layer in layers:
        merged = overlay(merged, layer)
    if merged.get("strategy") == "ps":
        merged.setdefault("ps", "1")
    return DlOptions(**{field: _BY_FIELD[field].read(value, f"--dl-{_BY_FIELD[field].name}")
                        for field, value in merged.items()})
