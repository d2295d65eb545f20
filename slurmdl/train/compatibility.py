"""Valid combinations of strategies, communication patterns, compressors and modes: one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slurmdl.comm_layout import COMPRESSION_NAMES
from slurmdl.errors import InvalidOptionsError
from slurmdl.gossip_graphs import GRAPHS
from slurmdl.plan import ISLAND_LEVELS
from slurmdl.text import pluralize
from slurmdl.train.strategy_config import StrategyConfig

_GOSSIP = ("gossip", "adaptive-gossip")
_RANDOMIZED = tuple(name for name, graph in GRAPHS.items() if not graph.static_neighbors)
_STATIC = tuple(name for name, graph in GRAPHS.items() if graph.static_neighbors)
_PAIRWISE = tuple(name for name in _STATIC if GRAPHS[name].pairwise)
_WHOLE_MODEL = ("none", "fp16")
_OPTIONAL, _ANY_ISLANDS = (False, True), (None, *ISLAND_LEVELS)


@dataclass(frozen=True)
class Combination:
    """Choices that are valid together, each with each.

    Attributes:
        reasons: option -> why this row has no further choices of it.
        asynchronous, shared_memory: valid values of the switches --async and --shared-memory.
        islands: valid values of --islands.
    """

    strategies: tuple[str, ...]
    comm_patterns: tuple[str, ...]
    compressions: tuple[str, ...]
    reasons: Mapping[str, str] = field(default_factory=dict)
    asynchronous: tuple[bool, ...] = (False,)
    shared_memory: tuple[bool, ...] = (False,)
    islands: tuple[str | None, ...] = (None,)

    def conflicts(self, config: StrategyConfig) -> dict[str, str]:
        """Option of `config` that this row does not have -> the choices that it has."""
        valid_choices: dict[str, Sequence[object]] = {
            "--comm-pattern": self.comm_patterns, "--compression": self.compressions,
            "--async": self.asynchronous, "--shared-memory": self.shared_memory, "--islands": self.islands}
        return {option: _format_choice(option, *valid_choices[option])
                for option, choice in _choices(config).items() if choice not in valid_choices[option]}


_RANDOMIZED_REASON = {
    "--compression": "random partners keep no estimates of each other; only whole models can be sent"}
#: all valid combinations
COMBINATIONS = (
    Combination(("allreduce",), ("ring", "hierarchical"), _WHOLE_MODEL,
                {"--compression": "each partial sum would have to be compressed again"}),
    Combination(("gossip",), _RANDOMIZED, _WHOLE_MODEL, _RANDOMIZED_REASON, shared_memory=_OPTIONAL,
                islands=_ANY_ISLANDS),
    Combination(("gossip",), _STATIC, COMPRESSION_NAMES, shared_memory=_OPTIONAL, islands=_ANY_ISLANDS),
    Combination(("gossip",), tuple(GRAPHS), _WHOLE_MODEL,
                {"--compression": "push-sum sends whole models, since no rank keeps an estimate of another"},
                asynchronous=(True,), shared_memory=_OPTIONAL),
    Combination(("adaptive-gossip",), _RANDOMIZED, _WHOLE_MODEL, _RANDOMIZED_REASON, islands=_ANY_ISLANDS),
    Combination(("adaptive-gossip",), _PAIRWISE, COMPRESSION_NAMES,
                {"--comm-pattern": "a rank that sends to one rank and receives from another cannot agree on an "
                                   "exchange with both",
                 "--async": "the ranks of a pair agree on each exchange",
                 "--shared-memory": "only gossip with a period mixes models in shared memory"}, islands=_ANY_ISLANDS),
    Combination(("local-sgd",), ("ring",), COMPRESSION_NAMES, islands=_ANY_ISLANDS),
    Combination(("local-sgd",), ("hierarchical",), ("none",),
                {"--compression": "sums within and between zones would have to be compressed again at each step"},
                islands=_ANY_ISLANDS),
    Combination(("ps",), ("shards",), ("none",), asynchronous=_OPTIONAL),
)

#: option -> why a strategy lacks a choice, if the row gives no reason of its own
_REASONS = {"--comm-pattern": "the communication pattern depends on the strategy",
            "--compression": "gradients are sent uncompressed",
            "--async": "all ranks exchange together",
            "--shared-memory": "only gossip mixes models in shared memory",
            "--islands": "between islands models are exchanged by local-sgd or synchronous gossip"}


def _choices(config: StrategyConfig) -> dict[str, object]:
    return {"--comm-pattern": config.comm_pattern, "--compression": config.compression,
            "--async": config.asynchronous, "--shared-memory": config.shared_memory, "--islands": config.islands}


def _format_choice(option: str, *choices: object) -> str:
    """E.g. `--compression none, fp16`, `--async` or `no --async`."""
    if choices[0] in (False, None):
        return f"no {option}"
    if choices[0] is True:
        return option
    return f"{option} {', '.join(map(str, choices))}"


def check_compatibility(config: StrategyConfig) -> None:
    """Raise InvalidOptionsError for an invalid combination, with the option, the reason, and the valid choices.

    In `config`, `strategy` and `comm_pattern` are set.
    """
    for given, option, is_valid, expected in (
            (config.period, "--period", config.strategy in ("gossip", "local-sgd"), "gossip or local-sgd"),
            (config.comm_budget is not None, "--comm-budget", config.strategy == "adaptive-gossip",
             "adaptive-gossip"),
            *((value is not None, option, config.strategy == "local-sgd" or (
                config.strategy in _GOSSIP and not config.asynchronous and not config.shared_memory),
               "local-sgd, or gossip without --async and --shared-memory") for value, option in (
                (config.outer_lr, "--outer-lr"), (config.outer_momentum, "--outer-momentum")))):
        if given and not is_valid:
            raise InvalidOptionsError(
                f"{option}: not valid with strategy {config.strategy}{', --async' * config.asynchronous}; expected "
                f"{expected}")
    _check_fragments(config)
    if config.islands and config.shared_memory:
        raise InvalidOptionsError(f"--shared-memory: not valid with --islands {config.islands}, whose ranks average "
                                  "gradients instead of models; expected one of the two")
    rows = [row for row in COMBINATIONS if config.strategy in row.strategies]
    fewest = min(len(row.conflicts(config)) for row in rows)
    if fewest:
        closest = [row for row in rows if len(row.conflicts(config)) == fewest]
        raise InvalidOptionsError(_conflict_message(config, closest))


def _check_fragments(config: StrategyConfig) -> None:
    """Check --fragments and --overlap."""
    for count, option in ((config.fragments - 1, f"--fragments {config.fragments}"),
                          (config.overlap, f"--overlap {config.overlap}")):
        if count and config.strategy != "local-sgd":
            raise InvalidOptionsError(f"{option}: not valid with strategy {config.strategy}; expected local-sgd")
    period, fragments = config.exchange_period, config.fragments
    if config.strategy == "local-sgd" and period % fragments:
        raise InvalidOptionsError(f"--fragments {fragments}: does not divide --period, {pluralize(period, 'step')}; "
                                  f"expected a period of {fragments}, {2 * fragments}, {3 * fragments}, ... steps")
    if config.overlap and config.overlap >= period // fragments:
        raise InvalidOptionsError(f"--overlap {config.overlap}: exchanges are "
                                  f"{pluralize(period // fragments, 'step')} apart; "
                                  f"expected at most {period // fragments - 1}")


def _conflict_message(config: StrategyConfig, closest: Sequence[Combination]) -> str:
    """One line: the option, the reason, the other options, and the valid choices."""
    # a row's own reason is more specific than the general one
    row = next((row for row in closest if row.reasons.keys() & row.conflicts(config)), closest[0])
    conflicts = row.conflicts(config)
    option = next((name for name in conflicts if name in row.reasons), next(iter(conflicts)))
    choices = _choices(config)
    others = " ".join([str(config.strategy), *(_format_choice(name, choice) for name, choice in choices.items()
                                               if name != option and choice not in (False, None))])
    valid = "; or ".join(dict.fromkeys(", ".join(row.conflicts(config).values()) for row in [row, *closest]))
    reason = row.reasons.get(option, _REASONS[option])
    return f"{_format_choice(option, choices[option])}: {reason}; asked for with {others}; expected {valid}"
