"""The --dl-* options: their table, and parsing from command line, `#DL` lines, environment and configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import TYPE_CHECKING

from slurmdl.errors import UsageError, sort_by_similarity
from slurmdl.options import Kind, Option, choice, count, names, option, options_of, settings_from_environ, text
from slurmdl.plan import COMM_PATTERNS, ISLAND_LEVELS, ISLAND_STRATEGIES, STRATEGIES
from slurmdl.slurm import getopt
from slurmdl.units import parse_bytes

if TYPE_CHECKING:
    from slurmdl.traffic import Traffic

ENV_PREFIX = "SLURMDL_OPT_"
#: set by "", "yes" or a number other than 0, as Slurm's own flags; anything else unsets it
FLAG = Kind("flag", "", getopt.is_flag_set, lambda _: "")
#: valid seconds of --dl-preflight, besides 0 for none
PREFLIGHT_RANGE_S = (5, 3600)
#: launchers that start the ranks of a node (launch.launchers), or how to find them
LAUNCHERS = ("auto", "none", "torchrun", "accelerate", "deepspeed", "ray")
#: assumed size of one replica of the parameters
DEFAULT_MODEL_BYTES = 100e6


@dataclass(frozen=True)
class DlOptions:
    """Values of the --dl-* options after precedence (script < environment < command line), and their descriptions.

    The options of the group `traffic` are one value: a strategy, a mesh or groups, with what belongs to it.
    """

    strategy: str = option("allreduce", choice(*STRATEGIES), "training strategy: how replicas are kept in sync",
                           group="traffic")
    ps: int = option(0, count("N"), "number of parameter servers among the tasks (default with strategy ps: 1)",
                     "0; 1 with strategy ps", "traffic")
    node_binding: str = option("auto", choice("auto", "nodelist", "zone", "late", "off"),
                               "how strictly the chosen nodes bind Slurm")
    zone: tuple[str, ...] = option((), names("NAME,..."), "restrict the job to the nodes of these zones", "any zone")
    rank0: str = option("first", choice("first", "any"), "keep rank 0 on the job's first node, where scripts "
                        "expect it, or allow any node")
    comm_pattern: str = option(
        "", text("PATTERN|FILE"), "communication pattern of the ranks: ring or hierarchical; random-matching, "
        "one-peer-exponential, base-2 or zone-aware (gossip); shards (ps); or a file of traffic matrices (.npz, CSV)",
        "the first of the strategy", "traffic")
    islands: str = option("", choice(*ISLAND_LEVELS), "islands: allreduce inside each zone or node, and the strategy "
                          "(local-sgd, gossip, adaptive-gossip) between them", "none", "traffic")
    mesh: str = option("", text("DIM=N,..."), "mesh of the ranks of a parallel model, slowest dimension first: dp, "
                       "fsdp, pp, tp, cp, ep; e.g. dp=16,pp=4,tp=8", "none", "traffic")
    groups: str = option("", text("NAME=NODES,..."), "groups of nodes, the first ranks in the first one, e.g. "
                         "trainer=8,rollout=24; their meshes: --dl-mesh=GROUP:DIM=N,.../GROUP:...", "none", "traffic")
    model: str = option("", text("KEY=N,..."), "model whose traffic the mesh carries, e.g. params=7B,hidden=4096,"
                        "layers=32,seq=4096,micro-batch=1,dtype=bf16", "none", "traffic")
    bytes: str = option("", text("N|NAME=N,..."), "bytes per iteration: size of one replica of the parameters, e.g. "
                        "400M; of the dimensions of a mesh, e.g. tp=2G,dp=14G; inside a group and from one to "
                        "another, e.g. trainer=1G,trainer:rollout=14G", "100M, or from --dl-model", "traffic")
    link_scores: str = option("auto", text("auto|off|FILE|URL"), "source of link scores: JSON, CSV, or a Prometheus "
                              "server")
    launcher: str = option(
        "auto", text("|".join(LAUNCHERS) + "[:N]"),
        "launcher that starts the ranks of each node: read from the command (auto), none, or by name; with :N it "
        "starts N ranks on each node, else their number is read from the command, too, e.g. torchrun:4")
    preflight: int = option(0, count("SECONDS"), "check the job's nodes for this long before its "
                            "first step starts, e.g. 30 (default: 0, no check)", "0: no check")
    on_bad_nodes: str = option("stop", choice("stop", "wait", "run"), "if neither spare nodes nor a requeue replace "
                               "bad nodes: stop the step, wait in the queue for other nodes, or run with them")
    on_slow: str = option("warn", choice("warn", "exclude"), "if a rank computes more slowly than the others: warn, "
                          "or requeue the job without its node")
    explain: bool = option(False, FLAG, "print the decision and its reasons on stderr")
    dry_run: bool = option(False, FLAG, "print the command instead of submitting")
    strict: bool = option(False, FLAG, "fail if no choice can be made, instead of submitting without one")

    @property
    def model_bytes(self) -> float:
        """Size of one replica of the parameters."""
        return parse_bytes(self.bytes, "--dl-bytes") if self.bytes and "=" not in self.bytes else DEFAULT_MODEL_BYTES

    @cached_property
    def traffic(self) -> Traffic:
        """The traffic of the ranks, without the matrices of a file. UsageError if its options are invalid."""
        if self.groups:
            from slurmdl.groups import GroupTraffic, parse_groups

            groups = parse_groups(self.groups, "--dl-groups", self.mesh)
            return GroupTraffic.of_groups(groups, self.model, self.bytes, self.model_bytes)
        if self.mesh:
            from slurmdl.mesh import MeshTraffic, parse_mesh

            return MeshTraffic.of_mesh(parse_mesh(self.mesh, "--dl-mesh"), self.model, self.bytes)
        from slurmdl.traffic import Traffic

        return Traffic(self.strategy, self.model_bytes, self.ps, self.comm_pattern, islands=self.islands)

    @property
    def launcher_name(self) -> str:
        return self.launcher.partition(":")[0]

    @property
    def ranks_per_node(self) -> int:
        """Ranks that the program of a step starts on each node; 0 to read it from the command."""
        return int(self.launcher.partition(":")[2] or 0)

    def with_ranks_per_node(self, ranks: int) -> DlOptions:
        return replace(self, launcher=f"{self.launcher_name}:{ranks}")

    def step_settings(self) -> dict[str, str]:
        """The settings of a submission that also apply to its steps, as text."""
        values = {entry.field: getattr(self, entry.field) for entry in OPTIONS if entry.name not in SUBMISSION_ONLY}
        return {field: "" if value is True else str(value) for field, value in values.items()
                if value is not False and value != ""}


#: every --dl-* option
OPTIONS = options_of(DlOptions)

#: options of the wrapper alone: they replace the submission or change messages
WRAPPER_ONLY = ("explain", "dry-run")

#: options that say what the ranks send; the others of the group `traffic` describe it further
TRAFFIC_SELECTORS = ("strategy", "ps", "mesh", "groups")

#: options that decide the submission, not its steps
SUBMISSION_ONLY = ("node-binding", "zone", "dry-run")

_BY_NAME = {f"dl-{entry.name}": entry for entry in OPTIONS}
_BY_FIELD = {entry.field: entry for entry in OPTIONS}

#: long name -> whether it takes an argument, for getopt.parse_command_line
LONG_OPTIONS: dict[str, getopt.HasArg] = {
    name: "no" if entry.is_flag else "required" for name, entry in _BY_NAME.items()}
#: options that the SPANK plugin adds to sbatch, salloc and srun
SPANK_OPTIONS: dict[str, getopt.HasArg] = {
    name: has_arg for name, has_arg in LONG_OPTIONS.items() if _BY_NAME[name].name not in WRAPPER_ONLY}


def to_environ(settings: Mapping[str, str]) -> dict[str, str]:
    """Settings as SLURMDL_OPT_* variables, in which the plugin passes them to the job."""
    return {env_variable(field): value for field, value in settings.items()
            if _BY_FIELD[field].name not in WRAPPER_ONLY}


def env_variable(field: str) -> str:
    return f"{ENV_PREFIX}{field.upper()}"


def help_text() -> str:
    """Help on the options, as in `slurmdl sbatch --help`."""
    heads = [f"--dl-{entry.name}{'=' * bool(entry.kind.values)}{entry.kind.values}" for entry in OPTIONS]
    lines = [f"  {head}\n{'':30}{entry.help}" if len(head) > 26 else f"  {head:28}{entry.help}"
             for head, entry in zip(heads, OPTIONS, strict=True)]
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
    for given in options:
        entry = _BY_NAME.get(given.name)
        if entry is not None:
            settings[entry.field] = _checked_value(entry, given, location)
        elif given.name.startswith("dl-"):
            written = given.args[0].partition("=")[0]
            raise UsageError(f"{location}unknown option {written}; expected {_similar_options(written)}")
    return settings


def _checked_value(entry: Option, given: getopt.Option, location: str) -> str:
    if entry.is_flag and given.value is not None:
        raise UsageError(f"{location}--{given.name} takes no value")
    if not entry.is_flag and given.value is None:
        raise UsageError(f"{location}--{given.name} needs a value: {entry.kind.values}")
    entry.parse(given.value or "", f"{location}--{given.name}")
    return given.value or ""


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
    settings = settings_from_environ(OPTIONS, ENV_PREFIX, environ)
    return {field: value for field, value in settings.items() if _BY_FIELD[field].kind.parse(value) is not False}


def _similar_options(written: str) -> str:
    return ", ".join(sort_by_similarity(written, [f"--{name}" for name in LONG_OPTIONS]))


def overlay_settings(base: dict[str, str], layer: Mapping[str, str]) -> dict[str, str]:
    """Settings of `base` overridden by those of `layer`.

    A layer with one of TRAFFIC_SELECTORS replaces the traffic as a whole: a mesh on the command line does not keep
    the parameter servers of the script. Only the size of a replica stays, which does not depend on the strategy.
    """
    if not layer.keys().isdisjoint(TRAFFIC_SELECTORS):
        base = {field: value for field, value in base.items() if _BY_FIELD[field].group != "traffic"
                or (field == "bytes" and "=" not in value and "mesh" not in layer)}
    return base | dict(layer)


def merge_layers(*layers: Mapping[str, str]) -> DlOptions:
    """Options from layers of settings, the weakest first.

    Raises UsageError if a value is invalid, or the traffic contradicts itself.
    """
    nothing: dict[str, str] = {}
    merged = reduce(overlay_settings, layers, nothing)
    options = DlOptions(**{field: _BY_FIELD[field].parse(value, f"--dl-{_BY_FIELD[field].name}")
                           for field, value in merged.items()})
    if options.preflight and not PREFLIGHT_RANGE_S[0] <= options.preflight <= PREFLIGHT_RANGE_S[1]:
        raise UsageError(f"--dl-preflight={options.preflight}: expected 0, or {PREFLIGHT_RANGE_S[0]} to "
                         f"{PREFLIGHT_RANGE_S[1]} seconds")
    if not re.fullmatch(rf"none|(?!none)({'|'.join(LAUNCHERS)})(:[1-9][0-9]{{0,5}})?", options.launcher):
        raise UsageError(f"--dl-launcher: invalid value {options.launcher!r}; expected {', '.join(LAUNCHERS)}, or "
                         "NAME:N with the number of ranks per node")
    return _with_checked_traffic(options, set(merged))


def _with_checked_traffic(options: DlOptions, given: set[str]) -> DlOptions:
    """Complete the strategy; UsageError if options contradict each other."""
    strategy, ps = options.strategy, options.ps
    if ps and "strategy" not in given:
        strategy = "ps"
    if options.islands and "strategy" not in given and not ps:
        strategy = "local-sgd"
    if strategy == "ps" and "ps" not in given:
        ps = 1
    options = replace(options, strategy=strategy, ps=ps)
    if ps and strategy != "ps":
        raise UsageError(f"--dl-ps={ps}: the strategy {strategy} has no parameter servers; expected --dl-strategy=ps")
    if options.islands and strategy not in ISLAND_STRATEGIES:
        raise UsageError(f"--dl-islands={options.islands}: not valid with the strategy {strategy}; expected "
                         f"--dl-strategy={', '.join(ISLAND_STRATEGIES)}")
    patterns = COMM_PATTERNS[strategy]
    if is_comm_pattern(options.comm_pattern) and options.comm_pattern not in patterns:
        raise UsageError(f"--dl-comm-pattern={options.comm_pattern}: not valid with the strategy {strategy}; "
                         f"expected {', '.join(patterns)}, a file, or also another --dl-strategy")
    mapped, pattern = "groups" if options.groups else "mesh" if options.mesh else "", options.comm_pattern
    if mapped and (strategy, pattern or "ring") != ("allreduce", "ring"):
        other = f"--dl-strategy={strategy}" if strategy != "allreduce" else f"--dl-comm-pattern={pattern}"
        raise UsageError(f"--dl-{mapped}={getattr(options, mapped)}: not valid with {other}; "
                         "expected allreduce and ring")
    if options.model and not options.mesh:
        raise UsageError(f"--dl-model={options.model}: expected also --dl-mesh, the mesh of its ranks")
    if mapped:
        _ = options.traffic  # its errors are errors of the options
    elif options.bytes:
        parse_bytes(options.bytes, "--dl-bytes")
    return options
