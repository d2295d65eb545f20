"""The --dl-* options: their table, and parsing from command line, `#DL` lines, environment and configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from slurmdl.errors import InputError, UsageError, sort_by_similarity
from slurmdl.mesh import parse_mesh
from slurmdl.plan import COMM_PATTERNS, ISLAND_LEVELS, ISLAND_STRATEGIES, STRATEGIES
from slurmdl.slurm import getopt
from slurmdl.slurm.sbatch_options import is_flag_set
from slurmdl.units import parse_bytes

PROBE_CHOICES = ("0", "0.5", "1", "2")
NODE_BINDING_CHOICES = ("auto", "nodelist", "zone", "late", "off")
RANK0_CHOICES = ("first", "any")
#: launchers that start the ranks of a node (launch.launchers), or how to find them
LAUNCHER_CHOICES = ("auto", "none", "torchrun", "accelerate", "deepspeed", "ray")
ON_BAD_NODES_CHOICES = ("stop", "wait", "run")
ON_SLOW_CHOICES = ("warn", "exclude")
#: valid seconds of --dl-preflight, besides 0 for none
PREFLIGHT_RANGE_S = (5, 3600)


@dataclass(frozen=True)
class DlOptions:
    """Values of the --dl-* options after precedence (script < environment < command line).

    Attributes:
        strategy, node_binding, rank0: one of plan.STRATEGIES, NODE_BINDING_CHOICES, RANK0_CHOICES.
        ps: number of parameter servers (0 unless the strategy is ps).
        zone: zones that the job may use; () for any.
        model_bytes: size of one replica of the parameters.
        comm_pattern: one of plan.COMM_PATTERNS[strategy], "" for the first of them, or a file of matrices.
        inside: what is an island of the strategy, one of plan.ISLAND_LEVELS; "" without islands.
        mesh: dimensions of a mesh of ranks (mesh.parse_mesh), "" for none.
        model, mesh_bytes: what its traffic is computed from (placement.mesh_traffic), "" if not given.
        groups: groups of nodes (groups.parse_groups), whose meshes `mesh` then holds; "" for none.
        group_bytes: their traffic (groups.parse_group_bytes), "" if not given.
        link_scores: "auto", "off", a file, or the URL of a Prometheus server.
        probe: seconds, one of PROBE_CHOICES.
        launcher: one of LAUNCHER_CHOICES.
        ranks_per_node: ranks that the program of a step starts on each node; 0 to read it from the command.
        preflight: seconds for the checks of the nodes at the start of the job (health.preflight), 0 for none.
        on_bad_nodes, on_slow: one of ON_BAD_NODES_CHOICES, ON_SLOW_CHOICES (docs/health.md).
        max_requeues: how often the job may be requeued because of bad nodes.
    """

    strategy: str = "allreduce"
    ps: int = 0
    node_binding: str = "auto"
    zone: tuple[str, ...] = ()
    rank0: str = "first"
    model_bytes: float = 100e6
    comm_pattern: str = ""
    inside: str = ""
    mesh: str = ""
    model: str = ""
    mesh_bytes: str = ""
    groups: str = ""
    group_bytes: str = ""
    link_scores: str = "auto"
    probe: str = "0"
    launcher: str = "auto"
    ranks_per_node: int = 0
    preflight: int = 0
    on_bad_nodes: str = "stop"
    on_slow: str = "warn"
    max_requeues: int = 3
    explain: bool = False
    dry_run: bool = False
    strict: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> DlOptions:
        """Inverse of `to_json`.

        Raises InputError if `data` is not an object, or has an unknown field or a value of the wrong type.
        """
        if not isinstance(data, dict):
            raise InputError(f"--dl-* options: expected an object, found {type(data).__name__}")
        names = [field.name for field in fields(cls)]
        values: dict[str, Any] = {}
        for name, value in data.items():
            if name not in names:
                raise InputError(f"--dl-* options: unknown field {name!r}; expected {', '.join(names)}")
            default = getattr(cls, name)
            value = tuple(map(str, value)) if isinstance(value, list) else value
            if not isinstance(value, (int, float) if isinstance(default, float) else type(default)):
                raise InputError(f"--dl-* options: {name}: invalid value {value!r}")
            values[name] = value
        return cls(**values)


@dataclass(frozen=True)
class DlOption:
    """One --dl-* option, as on the command line, in `#DL` lines, in SLURMDL_OPT_* and in slurmdl.yaml.

    Attributes:
        name: without the prefix, e.g. "model-bytes".
        kind: "choice", "count", "bytes", "names", "text" or "flag".
        values: value as shown in the help, "" for a flag; for a choice the valid values separated by |.
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
        """Convert to the value of `DlOptions.<field>`; UsageError names `source` and the expected values."""
        if self.kind == "flag":
            return is_flag_set(value)
        if self.kind == "bytes":
            return parse_bytes(value, source)
        if self.kind == "count" and re.fullmatch(r"[0-9]{1,9}", value):
            return int(value)
        if self.kind == "names" and value.strip(","):
            return tuple(dict.fromkeys(name for name in value.split(",") if name))
        if (self.kind == "text" and value) or (self.kind == "choice" and value in self.values.split("|")):
            return value
        expected = {"count": "a whole number, 0 or more", "names": "names separated by commas", "text": self.values,
                    "choice": ", ".join(sort_by_similarity(value, self.values.split("|")))}[self.kind]
        raise UsageError(f"{source}: invalid value {value!r}; expected {expected}")


#: every --dl-* option; the only list of them
OPTIONS = (
    DlOption("strategy", "choice", "|".join(STRATEGIES), "training strategy: how replicas are kept in sync"),
    DlOption("ps", "count", "N", "number of parameter servers among the tasks (default with strategy ps: 1)"),
    DlOption("node-binding", "choice", "|".join(NODE_BINDING_CHOICES), "how strictly the chosen nodes bind Slurm"),
    DlOption("zone", "names", "NAME,...", "restrict the job to the nodes of these zones"),
    DlOption("rank0", "choice", "|".join(RANK0_CHOICES), "keep rank 0 on the job's first node, where scripts "
             "expect it, or allow any node"),
    DlOption("model-bytes", "bytes", "N", "size of one replica of the parameters, e.g. 400M"),
    DlOption("comm-pattern", "text", "PATTERN|FILE", "communication pattern of the ranks: ring or hierarchical; "
             "random-matching, one-peer-exponential, base-2 or zone-aware (gossip); shards (ps); or a "
             "file of traffic matrices, .npz or CSV"),
    DlOption("inside", "choice", "|".join(ISLAND_LEVELS), "islands: allreduce inside each zone or node, and the "
             "strategy (local-sgd, gossip, adaptive-gossip) between them"),
    DlOption("mesh", "text", "DIM=N,...", "mesh of the ranks of a parallel model, slowest dimension first: dp, fsdp, "
             "pp, tp, cp, ep; e.g. dp=16,pp=4,tp=8"),
    DlOption("model", "text", "KEY=N,...", "model whose traffic the mesh carries, e.g. params=7B,hidden=4096,"
             "layers=32,seq=4096,micro-batch=1,dtype=bf16"),
    DlOption("mesh-bytes", "text", "DIM=N,...", "bytes per iteration of each of its dimensions, e.g. tp=2G,dp=14G"),
    DlOption("groups", "text", "NAME=NODES,...", "groups of nodes, the first ranks in the first one, e.g. "
             "trainer=8,rollout=24; their meshes: --dl-mesh=GROUP:DIM=N,.../GROUP:..."),
    DlOption("group-bytes", "text", "GROUP[:GROUP]=N,...", "bytes per iteration inside a group, and from one group "
             "to another, e.g. trainer:rollout=14G"),
    DlOption("link-scores", "text", "auto|off|FILE|URL", "source of link scores: JSON, CSV, or a Prometheus server"),
    DlOption("probe", "choice", "|".join(PROBE_CHOICES), "seconds to probe the links of the job's nodes before ranks "
             "are mapped"),
    DlOption("launcher", "choice", "|".join(LAUNCHER_CHOICES), "launcher that starts the ranks of each node: read "
             "from the command (auto), none, or by name"),
    DlOption("ranks-per-node", "count", "N", "ranks that the launcher starts on each node (default: read from the "
             "command, e.g. --nproc-per-node)"),
    DlOption("preflight", "count", "SECONDS", "check the job's nodes for this long before its first step starts, "
             "e.g. 30 (default: 0, no check)"),
    DlOption("on-bad-nodes", "choice", "|".join(ON_BAD_NODES_CHOICES), "if neither spare nodes nor a requeue replace "
             "bad nodes: stop the step, wait in the queue for other nodes, or run with them"),
    DlOption("on-slow", "choice", "|".join(ON_SLOW_CHOICES), "if a rank computes more slowly than the others: warn, "
             "or requeue the job without its node"),
    DlOption("max-requeues", "count", "N", "how often the job may requeue itself because of bad nodes (default: 3)"),
    DlOption("explain", "flag", "", "print the decision and its reasons on stderr"),
    DlOption("dry-run", "flag", "", "print the command instead of submitting"),
    DlOption("strict", "flag", "", "fail if no choice can be made, instead of submitting without one"),
)

#: options of the wrapper alone: they replace the submission or change messages
WRAPPER_ONLY = ("explain", "dry-run")

_BY_NAME = {f"dl-{option.name}": option for option in OPTIONS}
_BY_FIELD = {option.field: option for option in OPTIONS}

#: long name -> whether it takes an argument, for getopt.parse_command_line
LONG_OPTIONS: dict[str, getopt.HasArg] = {
    name: "no" if option.kind == "flag" else "required" for name, option in _BY_NAME.items()}
#: options that the SPANK plugin adds to sbatch, salloc and srun
SPANK_OPTIONS: dict[str, getopt.HasArg] = {
    name: has_arg for name, has_arg in LONG_OPTIONS.items() if _BY_NAME[name].name not in WRAPPER_ONLY}


def to_environ(settings: Mapping[str, str]) -> dict[str, str]:
    """Settings as SLURMDL_OPT_* variables, in which the plugin passes them to the job."""
    return {_BY_FIELD[field].env_variable: value for field, value in settings.items()
            if _BY_FIELD[field].name not in WRAPPER_ONLY}


def help_text() -> str:
    """Help on the options, as in `slurmdl sbatch --help`."""
    heads = [f"--dl-{option.name}{'=' * bool(option.values)}{option.values}" for option in OPTIONS]
    lines = [f"  {head}\n{'':30}{option.help}" if len(head) > 26 else f"  {head:28}{option.help}"
             for head, option in zip(heads, OPTIONS, strict=True)]
    return "\n".join(["Placement options, also in #DL lines of the script and as SLURMDL_OPT_* in the environment:",
                      *lines, ""])


def is_comm_pattern(name: str | None) -> bool:
    """Whether `name` is a pattern of any strategy, not a file."""
    return any(name in patterns for patterns in COMM_PATTERNS.values())


def collect_settings(options: Iterable[getopt.Option], location: str = "") -> dict[str, str]:
    """Check the --dl-* options among `options` and return field -> value as text ("" for a flag).

    Raises UsageError for an unknown --dl-* option, or a missing, invalid or superfluous value. `location` is a prefix
    of messages, e.g. "job.sh:3: ".
    """
    settings = {}
    for option in options:
        dl_option = _BY_NAME.get(option.name)
        if dl_option is not None:
            settings[dl_option.field] = _checked_value(dl_option, option, location)
        elif option.name.startswith("dl-"):
            written = option.args[0].partition("=")[0]
            raise UsageError(f"{location}unknown option {written}; expected {_similar_options(written)}")
    return settings


def _checked_value(dl_option: DlOption, option: getopt.Option, location: str) -> str:
    if dl_option.kind == "flag" and option.value is not None:
        raise UsageError(f"{location}--{option.name} takes no value")
    if dl_option.kind != "flag" and option.value is None:
        raise UsageError(f"{location}--{option.name} needs a value: {dl_option.values}")
    dl_option.parse(option.value or "", f"{location}--{option.name}")
    return option.value or ""


def misplaced_option_warning(operands: Sequence[str], operand_kind: str) -> str:
    """A warning about the first --dl-* option after the script or program; "" if there is none.

    `operand_kind` is "script" or "program".
    """
    misplaced = [arg.partition("=")[0] for arg in operands[1:] if arg.startswith("--dl-")]
    return (f"{misplaced[0]} follows the {operand_kind} {operands[0]} and is passed to it; "
            f"expected before the {operand_kind}") if misplaced else ""


def parse_directive(args: Sequence[str], location: str) -> dict[str, str]:
    """Settings of one `#DL` line. UsageError as in `collect_settings`, or if an argument is not a --dl-* option."""
    line = getopt.parse_command_line(args, {}, LONG_OPTIONS)
    unknown = [o.args[0] for o in line.options if not o.name.startswith("dl-")] + list(line.operands)
    if unknown:
        raise UsageError(f"{location}{unknown[0]!r} is invalid after #DL; expected {_similar_options(unknown[0])}")
    return collect_settings(line.options, location)


def dl_settings_from_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Settings of the SLURMDL_OPT_* variables. UsageError for an unknown variable or an invalid value."""
    variables = {option.env_variable: option for option in OPTIONS}
    settings = {}
    for name, value in environ.items():
        if name.startswith("SLURMDL_OPT_"):
            option = variables.get(name)
            if option is None:
                similar = ", ".join(sort_by_similarity(name, list(variables)))
                raise UsageError(f"unknown variable {name}; expected {similar}")
            if option.parse(value, name) is not False:
                settings[option.field] = value
    return settings


def _similar_options(written: str) -> str:
    return ", ".join(sort_by_similarity(written, [f"--{name}" for name in LONG_OPTIONS]))


def overlay_settings(base: Mapping[str, str], layer: Mapping[str, str]) -> dict[str, str]:
    """Settings of `base` overridden by those of `layer`.

    A layer that names a strategy drops parameter servers, islands, mesh and pattern of another strategy from `base`.
    A layer that sets parameter servers without a strategy selects the strategy ps, one that sets a mesh or groups the
    strategy allreduce without a pattern, one that sets islands local-sgd unless the strategy of `base` has them.
    Raises UsageError if the layer itself sets a strategy or pattern that excludes them.
    """
    merged = dict(base)
    strategy, servers, inside = layer.get("strategy"), layer.get("ps"), layer.get("inside")
    if inside:
        if strategy not in (None, *ISLAND_STRATEGIES) or servers not in (None, "0"):
            other = f"the strategy {strategy}" if strategy else f"--dl-ps={servers}"
            raise UsageError(f"--dl-inside={inside}: not valid with {other}; expected --dl-strategy="
                             f"{', '.join(ISLAND_STRATEGIES)}")
        if not strategy and base.get("strategy") not in ISLAND_STRATEGIES:
            layer, strategy = {**layer, "strategy": "local-sgd"}, "local-sgd"
    pattern: str | None
    if servers not in (None, "0") and strategy not in (None, "ps"):
        raise UsageError(f"--dl-ps={servers}: the strategy {strategy} has no parameter servers; "
                         "expected --dl-strategy=ps")
    mapped = next((name for name in ("groups", "mesh") if name in layer), None)
    if mapped:
        layer = {"strategy": "allreduce", **layer}
        pattern = layer.get("comm_pattern", "ring")
        if strategy not in (None, "allreduce") or servers not in (None, "0") or pattern != "ring":
            other = f"--dl-comm-pattern={pattern}" if pattern != "ring" else f"--dl-strategy={strategy or 'ps'}"
            raise UsageError(f"--dl-{mapped}={layer[mapped]}: not valid with {other}; expected allreduce and ring")
        merged.pop("comm_pattern", None)
        if mapped == "groups":
            merged.pop("mesh", None)
        elif ":" not in layer["mesh"].removeprefix("megatron:"):
            merged.pop("groups", None)
    if layer.get("strategy") not in (None, "allreduce") or servers not in (None, "0"):
        merged.pop("mesh", None)
        merged.pop("groups", None)
    if layer.get("strategy") not in (None, "ps"):
        merged.pop("ps", None)
    if layer.get("strategy") not in (None, *ISLAND_STRATEGIES) or servers not in (None, "0"):
        merged.pop("inside", None)
    merged.update(layer)
    if servers not in (None, "0"):
        merged["strategy"] = "ps"
    pattern = merged.get("comm_pattern")
    if "comm_pattern" not in layer and is_comm_pattern(pattern) \
            and pattern not in COMM_PATTERNS[merged.get("strategy", DlOptions.strategy)]:
        del merged["comm_pattern"]
    return merged


def merge_layers(*layers: Mapping[str, str]) -> DlOptions:
    """Options from layers of settings, the weakest first (see `overlay_settings`).

    Raises UsageError if a value is invalid, or as `overlay_settings`. A model and bytes without a mesh, or without
    groups, are ignored.
    """
    merged: dict[str, str] = {}
    for layer in layers:
        merged = overlay_settings(merged, layer)
    if merged.get("strategy") == "ps":
        merged.setdefault("ps", "1")
    if "groups" in merged:
        from slurmdl.groups import parse_group_bytes, parse_groups

        groups = parse_groups(merged["groups"], "--dl-groups", merged.get("mesh", ""))
        if "group_bytes" in merged:
            parse_group_bytes(merged["group_bytes"], groups, "--dl-group-bytes")
    elif "mesh" in merged:
        parse_mesh(merged["mesh"], "--dl-mesh")
    preflight = merged.get("preflight", "0")
    if preflight.isdigit() and int(preflight) and not PREFLIGHT_RANGE_S[0] <= int(preflight) <= PREFLIGHT_RANGE_S[1]:
        raise UsageError(f"--dl-preflight={preflight}: expected 0, or {PREFLIGHT_RANGE_S[0]} to "
                         f"{PREFLIGHT_RANGE_S[1]} seconds")
    for unused in ("model", "mesh_bytes") * ("mesh" not in merged) + ("group_bytes",) * ("groups" not in merged):
        merged.pop(unused, None)
    return DlOptions(**{field: _BY_FIELD[field].parse(value, f"--dl-{_BY_FIELD[field].name}")
                        for field, value in merged.items()})
