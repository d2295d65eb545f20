"""Options of a run: its strategy, and their valid combinations; one table of each.

Each field is an option of `slurmdl train` (`--comm-budget`) and an environment variable for training scripts
(`SLURMDL_TRAIN_COMM_BUDGET`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmdl.comm_layout import COMPRESSION_NAMES, default_period
from slurmdl.errors import InvalidOptionsError, UsageError
from slurmdl.gossip_graphs import GRAPHS
from slurmdl.options import SWITCH, choice, count, number, option, options_of, settings_from_environ, text
from slurmdl.plan import COMM_PATTERNS, ISLAND_LEVELS, ISLAND_STRATEGIES
from slurmdl.text import pluralize

ENV_PREFIX = "SLURMDL_TRAIN_"
#: how ranks exchange messages
BACKENDS = ("auto", "mpi", "torch")
#: published method -> its settings. A. Douillard et al.: DiLoCo: distributed low-communication training of language
#: models. 2023. arXiv:2311.08105. There, models are exchanged every 500 steps, in runs of 64,000.
#: J. Kolehmainen et al.: NoLoCo: no-all-reduce low communication training method for large models. 2025.
#: arXiv:2506.10911
PRESETS: dict[str, dict[str, Any]] = {
    "diloco": {"strategy": "local-sgd", "period": 100, "outer_lr": 0.7, "outer_momentum": 0.9},
    "noloco": {"strategy": "gossip", "period": 50, "outer_lr": 0.7, "outer_momentum": 0.5}}
DEFAULT_OUTER_LR, DEFAULT_OUTER_MOMENTUM = 0.7, 0.5
#: 92 % fewer bytes than gossip, as published by Ho et al.: Adaptive communication for gossip SGD. 2018
DEFAULT_COMM_BUDGET = 0.08
_GOSSIP = ("gossip", "adaptive-gossip")


@dataclass(frozen=True)
class StrategyConfig:
    """A synchronization strategy and its settings; None for settings that were not given."""

    strategy: str | None = option(None, choice(*COMM_PATTERNS), "how replicas are kept in sync",
                                  "the plan's, else allreduce")
    comm_pattern: str | None = option(
        None, text("NAME"), "communication pattern: " + "; ".join(
            f"{', '.join(patterns)} ({strategy})" for strategy, patterns in COMM_PATTERNS.items()),
        "the plan's, else the first; for allreduce across known zones hierarchical")
    ps: int | None = option(None, count("N"), "parameter servers", "the plan's, else 1 with ps")
    compression: str = option("none", choice(*COMPRESSION_NAMES), "compression of messages")
    period: int | None = option(None, count("STEPS", 1), "steps between exchanges", "1; local-sgd: 32",
                                valid_with=("gossip", "local-sgd"))
    comm_budget: float | None = option(
        None, number("SHARE", 0, 1, percent=True), "bytes as a share of the bytes of fp32 gossip at every step, e.g. "
        "1%; sets the drift that triggers an exchange", f"{100 * DEFAULT_COMM_BUDGET:g}%",
        valid_with=("adaptive-gossip",))
    asynchronous: bool = option(False, SWITCH, "asynchronous exchanges (gossip, ps)", name="async")
    shared_memory: bool = option(False, SWITCH,
                                 "gossip through shared memory inside a node, one leader per node outside")
    islands: str | None = option(
        None, choice(*ISLAND_LEVELS), "islands: allreduce at every step inside each zone or node, and the strategy "
        f"({', '.join(ISLAND_STRATEGIES)}) only between them", "the plan's, else none")
    preset: str | None = option(
        None, choice(*PRESETS), "defaults of a published method; diloco (Douillard et al. 2023): local-sgd "
        "--period 100 --outer-lr 0.7 --outer-momentum 0.9, in slurmdl train with --optimizer adamw; noloco "
        "(Kolehmainen et al. 2025): gossip --period 50 --outer-lr 0.7 --outer-momentum 0.5, with --optimizer adam",
        "none")
    load_balance: bool = option(False, SWITCH,
                                "larger batches for faster ranks; with --async more steps of equal batches")
    outer_lr: float | None = option(
        None, number("X", 0, 10), "learning rate of the outer optimizer, which gossip has if this or "
        "--outer-momentum is given", f"{DEFAULT_OUTER_LR}", valid_with=("local-sgd", *_GOSSIP))
    outer_momentum: float | None = option(None, number("X", 0, 1), "momentum of the outer optimizer",
                                          f"{DEFAULT_OUTER_MOMENTUM}", valid_with=("local-sgd", *_GOSSIP))
    fragments: int = option(1, count("N", 1), "parts of the model that are exchanged in turn, each once in --period "
                            "steps", valid_with=("local-sgd",))
    overlap: int = option(0, count("STEPS"), "steps during which an exchange runs in the background",
                          valid_with=("local-sgd",))

    @property
    def has_outer_optimizer(self) -> bool:
        """Whether an outer optimizer moves the model after an exchange; gossip has one on request."""
        return self.strategy == "local-sgd" or (self.outer_lr, self.outer_momentum) != (None, None)

    @property
    def outer_step(self) -> tuple[float, float]:
        """Learning rate and momentum of the outer optimizer."""
        return (DEFAULT_OUTER_LR if self.outer_lr is None else self.outer_lr,
                DEFAULT_OUTER_MOMENTUM if self.outer_momentum is None else self.outer_momentum)

    @property
    def sends_gradients(self) -> bool:
        """Whether ranks send gradients; otherwise they send only parameters."""
        return self.strategy in ("allreduce", "ps") or self.islands is not None

    @property
    def exchange_period(self) -> int:
        """Steps between exchanges of the same fragment of the model, except with adaptive-gossip."""
        return self.period or default_period(self.strategy or "")


@dataclass(frozen=True)
class RunOptions:
    """Options of a run besides its strategy, of `slurmdl train` and the library alike."""

    backend: str = option("auto", choice(*BACKENDS), "how ranks exchange messages: mpi, torch "
                          "(torch.distributed with gloo), or auto, what the launch offers")
    timeout: int = option(1800, count("SECONDS"),
                          "longest wait for other ranks, after which a rank ends the run (0: no limit)")
    check_every: int = option(100, count("STEPS"),
                              "steps between two comparisons of replicas that must be equal (0: never)")
    checkpoint_dir: str = option("", text("DIR"), "shared directory for checkpoints; resumes from the latest. "
                                 "SIGTERM and SIGUSR1 write one and requeue the job", "none")
    checkpoint_every: int = option(500, count("STEPS"), "steps between two checkpoints (0: only on signals)")
    checkpoint_keep: int = option(2, count("N"), "newest checkpoints that are kept (0: all)")
    trace_dir: str = option("", text("DIR"), "directory for one timeline per rank, for chrome://tracing or Perfetto",
                            "none")


_STRATEGY_OPTIONS, _RUN_OPTIONS = options_of(StrategyConfig), options_of(RunOptions)


def option_name(field_name: str) -> str:
    """Option of a field, e.g. `--comm-pattern`."""
    return "--" + ("async" if field_name == "asynchronous" else field_name.replace("_", "-"))


def values_from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    """Field -> value of the variables that are not empty. UsageError for an unknown variable or invalid value."""
    options = {entry.field: entry for entry in (*_STRATEGY_OPTIONS, *_RUN_OPTIONS)}
    settings = settings_from_environ(options.values(), ENV_PREFIX, {
        name: value for name, value in environ.items() if value})
    return {name: options[name].kind.parse(value) for name, value in settings.items()}


def resolve(options: Mapping[str, Any], environ: Mapping[str, str]) -> StrategyConfig:
    """Build the configuration from options and environment variables; options win.

    Raises UsageError for an unknown variable, or an invalid value.

    Args:
        options: field -> value, None if not given; other keys are ignored.
    """
    given = values_from_environ(environ) | {name: value for name, value in options.items() if value is not None}
    values = {entry.field: given[entry.field] for entry in _STRATEGY_OPTIONS if entry.field in given}
    preset = PRESETS.get(values.get("preset", ""), {})
    if values.get("strategy", preset.get("strategy")) != preset.get("strategy", values.get("strategy")):
        raise UsageError(f"--preset {values['preset']}: not valid with --strategy {values['strategy']}; expected "
                         f"{preset['strategy']}")
    return StrategyConfig(**{**preset, **values})


def run_options(environ: Mapping[str, str], **given: Any) -> RunOptions:
    """Options of a run from arguments, "" or None if not given, and variables; UsageError as of `resolve`."""
    values = values_from_environ(environ) | {name: value for name, value in given.items() if value not in ("", None)}
    return RunOptions(**{entry.field: values[entry.field] for entry in _RUN_OPTIONS if entry.field in values})


_RANDOMIZED = tuple(name for name, graph in GRAPHS.items() if not graph.static_neighbors)
_STATIC = tuple(name for name, graph in GRAPHS.items() if graph.static_neighbors)
_PAIRWISE = tuple(name for name in _STATIC if GRAPHS[name].pairwise)
_WHOLE_MODEL = ("none", "fp16")
_OPTIONAL, _ANY_ISLANDS = (False, True), (None, *ISLAND_LEVELS)


@dataclass(frozen=True)
class Combination:
    """Values of options that are valid together, each with each.

    Attributes:
        reasons: option -> why this row has no further values of it.
    """

    strategies: tuple[str, ...]
    comm_pattern: tuple[str, ...]
    compression: tuple[str, ...]
    reasons: Mapping[str, str] = field(default_factory=dict)
    asynchronous: tuple[bool, ...] = (False,)
    shared_memory: tuple[bool, ...] = (False,)
    islands: tuple[str | None, ...] = (None,)

    def conflicts(self, config: StrategyConfig) -> dict[str, str]:
        """Option of `config` whose value this row does not have -> the values that it has."""
        return {name: _format_choice(name, *getattr(self, name)) for name in _REASONS
                if getattr(config, name) not in getattr(self, name)}


_RANDOMIZED_REASON = {
    "compression": "random partners keep no estimates of each other; only whole models can be sent"}
#: all valid combinations
COMBINATIONS = (
    Combination(("allreduce",), ("ring", "hierarchical"), _WHOLE_MODEL,
                {"compression": "each partial sum would have to be compressed again"}),
    Combination(("gossip",), _RANDOMIZED, _WHOLE_MODEL, _RANDOMIZED_REASON, shared_memory=_OPTIONAL,
                islands=_ANY_ISLANDS),
    Combination(("gossip",), _STATIC, COMPRESSION_NAMES, shared_memory=_OPTIONAL, islands=_ANY_ISLANDS),
    Combination(("gossip",), tuple(GRAPHS), _WHOLE_MODEL,
                {"compression": "push-sum sends whole models, since no rank keeps an estimate of another"},
                asynchronous=(True,), shared_memory=_OPTIONAL),
    Combination(("adaptive-gossip",), _RANDOMIZED, _WHOLE_MODEL, _RANDOMIZED_REASON, islands=_ANY_ISLANDS),
    Combination(("adaptive-gossip",), _PAIRWISE, COMPRESSION_NAMES,
                {"comm_pattern": "a rank that sends to one rank and receives from another cannot agree on an "
                                 "exchange with both",
                 "asynchronous": "the ranks of a pair agree on each exchange",
                 "shared_memory": "only gossip with a period mixes models in shared memory"}, islands=_ANY_ISLANDS),
    Combination(("local-sgd",), ("ring",), COMPRESSION_NAMES, islands=_ANY_ISLANDS),
    Combination(("local-sgd",), ("hierarchical",), ("none",),
                {"compression": "sums within and between zones would have to be compressed again at each step"},
                islands=_ANY_ISLANDS),
    Combination(("ps",), ("shards",), ("none",), asynchronous=_OPTIONAL),
)

#: option of the table -> why a strategy lacks a value, if the row gives no reason of its own
_REASONS = {"comm_pattern": "the communication pattern depends on the strategy",
            "compression": "gradients are sent uncompressed",
            "asynchronous": "all ranks exchange together",
            "shared_memory": "only gossip mixes models in shared memory",
            "islands": "between islands models are exchanged by local-sgd or synchronous gossip"}


def _format_choice(name: str, *choices: object) -> str:
    """E.g. `--compression none, fp16`, `--async` or `no --async`."""
    if choices[0] in (False, None):
        return f"no {option_name(name)}"
    return option_name(name) if choices[0] is True else f"{option_name(name)} {', '.join(map(str, choices))}"


def check_compatibility(config: StrategyConfig) -> None:
    """Raise InvalidOptionsError for an invalid combination, with the option, the reason, and the valid choices.

    In `config`, `strategy` and `comm_pattern` are set.
    """
    for entry in _STRATEGY_OPTIONS:
        is_given = getattr(config, entry.field) != entry.default
        if is_given and entry.valid_with and config.strategy not in entry.valid_with:
            raise InvalidOptionsError(f"--{entry.name}: not valid with strategy {config.strategy}; expected "
                                      f"{' or '.join(entry.valid_with)}")
        if is_given and entry.name.startswith("outer-") and (config.asynchronous or config.shared_memory):
            raise InvalidOptionsError(f"--{entry.name}: not valid with strategy {config.strategy} and --async or "
                                      "--shared-memory; expected it without --async and --shared-memory")
    period, fragments = config.exchange_period, config.fragments
    if fragments > 1 and period % fragments:
        raise InvalidOptionsError(f"--fragments {fragments}: does not divide --period, {pluralize(period, 'step')}; "
                                  f"expected a period of {fragments}, {2 * fragments}, {3 * fragments}, ... steps")
    if config.overlap and config.overlap >= period // fragments:
        raise InvalidOptionsError(f"--overlap {config.overlap}: exchanges are "
                                  f"{pluralize(period // fragments, 'step')} apart; "
                                  f"expected at most {period // fragments - 1}")
    if config.islands and config.shared_memory:
        raise InvalidOptionsError(f"--shared-memory: not valid with --islands {config.islands}, whose ranks average "
                                  "gradients instead of models; expected one of the two")
    rows = [row for row in COMBINATIONS if config.strategy in row.strategies]
    fewest = min(len(row.conflicts(config)) for row in rows)
    if fewest:
        raise InvalidOptionsError(_conflict_message(config, [row for row in rows
                                                             if len(row.conflicts(config)) == fewest]))


def _conflict_message(config: StrategyConfig, closest: Sequence[Combination]) -> str:
    """One line: the option, the reason, the other options, and the valid choices."""
    # a row's own reason is more specific than the general one
    row = next((row for row in closest if row.reasons.keys() & row.conflicts(config)), closest[0])
    conflicts = row.conflicts(config)
    culprit = next((name for name in conflicts if name in row.reasons), next(iter(conflicts)))
    others = " ".join([str(config.strategy), *(_format_choice(name, getattr(config, name)) for name in _REASONS
                                               if name != culprit and getattr(config, name) not in (False, None))])
    valid = "; or ".join(dict.fromkeys(", ".join(row.conflicts(config).values()) for row in [row, *closest]))
    reason = row.reasons.get(culprit, _REASONS[culprit])
    return f"{_format_choice(culprit, getattr(config, culprit))}: {reason}; asked for with {others}; expected {valid}"
