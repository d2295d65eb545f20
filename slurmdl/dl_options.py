"""The --dl-* options: one table, and how command line, `#DL` lines, environment and configuration fill it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from slurmdl.errors import InputError, UsageError, sort_by_similarity
from slurmdl.plan import COMM_PATTERNS, STRATEGIES
from slurmdl.slurm import getopt
from slurmdl.slurm.sbatch_options import is_flag_set

PLACE_CHOICES = ("pack", "balance", "spread")
PROBE_CHOICES = ("0", "0.5", "1", "2")
NODE_BINDING_CHOICES = ("auto", "pin", "zone", "late", "off")
RANK0_CHOICES = ("first", "any")


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
    node_binding: str = "auto"
    zone: tuple[str, ...] = ()
    rank0: str = "first"
    model_bytes: float = 100e6
    comm_pattern: str = ""
    link_scores: str = "auto"
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
    def env_variable(self) -> str:
        return f"SLURMDL_OPT_{self.field.upper()}"

    def parse(self, value: str, source: str) -> Any:
        """The value of `DlOptions.<field>`; UsageError names `source` and what is valid."""
        if self.kind == "flag":
            return is_flag_set(value)
        if self.kind == "choice":
            valid = self.values.split("|")
            if value not in valid:
                raise UsageError(
                    f"{source}: {value!r} is not valid; valid: {', '.join(sort_by_similarity(value, valid))}")
            return value
        if self.kind == "count":
            if not re.fullmatch(r"[0-9]{1,9}", value):
                raise UsageError(f"{source}: {value!r} is not valid; valid: a whole number, 0 or more")
            return int(value)
        if self.kind == "bytes":
            return parse_bytes(value, source)
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
    DlOption("place", "choice", "|".join(PLACE_CHOICES), "fill a zone after the other, level them, or spread wide"),
    DlOption("bind", "choice", "|".join(NODE_BINDING_CHOICES), "how hard the choice of nodes binds Slurm"),
    DlOption("zone", "names", "NAME,...", "the only zones whose nodes the job may use"),
    DlOption("rank0", "choice", "|".join(RANK0_CHOICES), "keep rank 0 on the first node of the job, where scripts look for "
             "it, or let it be on any"),
    DlOption("model-bytes", "bytes", "N", "bytes of one replica of the parameters, e.g. 400M"),
    DlOption("traffic", "text", "PATTERN|FILE", "what the ranks send: ring or hierarchical; random, "
             "exponential, base, zones or links (gossip); shards (ps); or a file of matrices, .npz or CSV"),
    DlOption("scores", "text", "auto|off|FILE|URL", "link scores: JSON, CSV, or a Prometheus server"),
    DlOption("probe", "choice", "|".join(PROBE_CHOICES), "seconds to probe the links of the job's own nodes before ranks "
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
LONG_OPTIONS: dict[str, getopt.HasArg] = {
    name: "no" if option.kind == "flag" else "yes" for name, option in _BY_NAME.items()}
#: those that sbatch, salloc and srun have by the plugin
SPANK_OPTIONS: dict[str, getopt.HasArg] = {
    name: takes for name, takes in LONG_OPTIONS.items() if _BY_NAME[name].name not in WRAPPER_ONLY}


def to_environ(settings: Mapping[str, str]) -> dict[str, str]:
    """Settings as the variables SLURMDL_OPT_* by which the plugin hands them to the job."""
    return {_BY_FIELD[field].env_variable: value for field, value in settings.items()
            if _BY_FIELD[field].name not in WRAPPER_ONLY}


def help_text() -> str:
    """The options with their values and what they do, as `slurmdl sbatch --help` shows them."""
    heads = [f"--dl-{option.name}{'=' * bool(option.values)}{option.values}" for option in OPTIONS]
    lines = [f"  {head}\n{'':30}{option.help}" if len(head) > 26 else f"  {head:28}{option.help}"
             for head, option in zip(heads, OPTIONS, strict=True)]
    return "\n".join(["Placement options, also in #DL lines of the script and as SLURMDL_OPT_* in the environment:",
                      *lines, ""])




def is_comm_pattern(name: str | None) -> bool:
    """Whether it is the name of a pattern of any strategy, and no file."""
    return any(name in patterns for patterns in COMM_PATTERNS.values())


def parse_bytes(value: str, source: str) -> float:
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


def collect_settings(options: Iterable[getopt.Option], location: str = "") -> dict[str, str]:
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
            found[known.field] = _checked_value(known, option, location)
        elif option.name.startswith("dl-"):
            written = option.args[0].partition("=")[0]
            raise UsageError(f"{location}unknown option {written}; valid: {_similar_options(written)}")
    return found


def _checked_value(dl_option: DlOption, option: getopt.Option, location: str) -> str:
    if dl_option.kind == "flag" and option.value is not None:
        raise UsageError(f"{location}--{option.name} takes no value")
    if dl_option.kind != "flag" and option.value is None:
        raise UsageError(f"{location}--{option.name} needs a value: {dl_option.values}")
    dl_option.parse(option.value or "", f"{location}--{option.name}")
    return option.value or ""


def misplaced_option_warning(operands: Sequence[str], operand_kind: str) -> str:
    """A remark on --dl-* options behind the first operand, which is a script or a program; "" if there are none.

    Parameters
    ----------
    what : "script" or "program".
    """
    behind = [word.partition("=")[0] for word in operands[1:] if word.startswith("--dl-")]
    return f"{behind[0]} is passed to the {operand_kind} {operands[0]}: it stands behind it" if behind else ""


def parse_directive(args: Sequence[str], location: str) -> dict[str, str]:
    """The settings of one `#DL` line. UsageError as in `settings`, or for a word that is no --dl-* option."""
    line = getopt.parse_command_line(args, {}, LONG_OPTIONS)
    strangers = [o.args[0] for o in line.options if not o.name.startswith("dl-")] + list(line.operands)
    if strangers:
        raise UsageError(
            f"{location}{strangers[0]!r} is not valid after #DL; valid: {_similar_options(strangers[0])}")
    return collect_settings(line.options, location)


def dl_settings_from_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings that SLURMDL_OPT_* make. UsageError for an unknown variable or a value that is not valid."""
    variables = {option.env_variable: option for option in OPTIONS}
    found = {}
    for name, value in environ.items():
        if name.startswith("SLURMDL_OPT_"):
            option = variables.get(name)
            if option is None:
                raise UsageError(
                    f"unknown variable {name}; valid: {', '.join(sort_by_similarity(name, list(variables)))}")
            if option.parse(value, name) is not False:
                found[option.field] = value
    return found


def _similar_options(written: str) -> str:
    return ", ".join(sort_by_similarity(written, [f"--{name}" for name in LONG_OPTIONS]))


def overlay_settings(base: Mapping[str, str], layer: Mapping[str, str]) -> dict[str, str]:
    """The settings of a layer over those below it.

    A layer that names a strategy sets aside what layers below say of another one, its parameter servers and the
    pattern of its traffic, and one that asks for parameter servers alone asks for the strategy ps.

    Raises
    ------
    UsageError : the layer asks for parameter servers beside another strategy.
    """
    merged = dict(base)
    strategy, servers = layer.get("strategy"), layer.get("ps")
    if servers not in (None, "0") and strategy not in (None, "ps"):
        raise UsageError(f"--dl-ps={servers}: the strategy {strategy} has no parameter servers; "
                         "valid: --dl-strategy=ps")
    if strategy not in (None, "ps"):
        merged.pop("ps", None)
    merged.update(layer)
    if servers not in (None, "0"):
        merged["strategy"] = "ps"
    valid = COMM_PATTERNS[merged.get("strategy", DlOptions.strategy)]
    if "traffic" not in layer and merged.get("traffic") not in valid and is_comm_pattern(merged.get("traffic")):
        del merged["traffic"]
    return merged


def merge_layers(*layers: Mapping[str, str]) -> DlOptions:
    """The options from layers of settings, the weakest first (see `overlay`).

    Raises
    ------
    UsageError : a value is not valid, or one layer asks for parameter servers beside another strategy.
    """
    merged: dict[str, str] = {}
    for layer in layers:
        merged = overlay_settings(merged, layer)
    if merged.get("strategy") == "ps":
        merged.setdefault("ps", "1")
    return DlOptions(**{field: _BY_FIELD[field].parse(value, f"--dl-{_BY_FIELD[field].name}")
                        for field, value in merged.items()})
