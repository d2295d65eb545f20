"""What goes together: one table of strategies, graphs, triggers, compressors and ways to run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slurmdl.errors import InvalidOptionsError
from slurmdl.gossip_graphs import GRAPHS
from slurmdl.train.strategy_config import COMPRESSION_NAMES, LOAD_BALANCE_MODES, TRIGGER_NAMES, StrategyConfig

_GOSSIP = ("gossip", "adaptive-gossip")
_RANDOMIZED = tuple(name for name, graph in GRAPHS.items() if not graph.static_neighbors)
_PAIRWISE = tuple(name for name, graph in GRAPHS.items() if graph.static_neighbors and graph.pairwise)
_WHOLE_MODEL = ("none", "fp16")
#: what can be shared out where each step takes all workers
_SYNCHRONOUS_LOAD_BALANCE = ("off", "batch")


@dataclass(frozen=True)
class Combination:
    """Choices that go together, each with each.

    Attributes
    ----------
    asynchronous, shared_memory, library : with --async, --shared-memory, --library or without; None for both.
    balance : what is shared out by speed.
    because : option -> why there are no more choices of it, where that is this row's own.
    """

    strategies: tuple[str, ...]
    comm_patterns: tuple[str, ...]
    triggers: tuple[str, ...]
    compressions: tuple[str, ...]
    reasons: Mapping[str, str] = field(default_factory=dict)
    asynchronous: bool | None = False
    shared_memory: bool | None = False
    uses_mpi_allreduce: bool | None = False
    load_balance_modes: tuple[str, ...] = LOAD_BALANCE_MODES

    def conflicts(self, config: StrategyConfig) -> dict[str, str]:
        """Options that the method asks for and this row does not have -> what it has instead."""
        words = {"--traffic": (config.comm_pattern, self.comm_patterns), "--trigger": (config.trigger_name, self.triggers),
                 "--compress": (config.compression, self.compressions), "--balance": (config.load_balance, self.load_balance_modes)}
        found = {option: f"{option} {', '.join(valid)}" for option, (asked, valid) in words.items()
                 if asked not in valid}
        switches = {"--async": (config.asynchronous, self.asynchronous), "--library": (config.uses_mpi_allreduce, self.uses_mpi_allreduce),
                    "--shared-memory": (config.shared_memory, self.shared_memory)}
        return found | {option: f"{'' if valid else 'no '}{option}" for option, (asked, valid) in switches.items()
                        if valid not in (None, asked)}


#: all that is legal
COMBINATIONS = (
    Combination(("allreduce",), ("ring",), ("period",), ("none",), {"--compress": "a library's own sum is one of fp32"},
        uses_mpi_allreduce=True, load_balance_modes=_SYNCHRONOUS_LOAD_BALANCE),
    Combination(("allreduce",), ("ring", "hierarchical"), ("period",), _WHOLE_MODEL,
        {"--compress": "each sum on the way would have to be compressed again",
         "--library": "a library's own sum follows no zones, and is one of fp32"}, load_balance_modes=_SYNCHRONOUS_LOAD_BALANCE),
    Combination(_GOSSIP, _RANDOMIZED, TRIGGER_NAMES, _WHOLE_MODEL,
        {"--compress": "partners that are drawn keep no copies of each other, so that only whole models can be sent"},
        shared_memory=None),
    Combination(_GOSSIP, ("exponential",), ("period",), COMPRESSION_NAMES,
        {"--trigger": "who sends to one and receives from another cannot agree with both on an exchange"},
        shared_memory=None),
    Combination(_GOSSIP, _PAIRWISE, TRIGGER_NAMES, COMPRESSION_NAMES, shared_memory=None),
    Combination(_GOSSIP, tuple(GRAPHS), TRIGGER_NAMES, _WHOLE_MODEL,
        {"--compress": "a model that is pushed goes whole, since nobody keeps a copy of it"},
        asynchronous=True, shared_memory=None),
    Combination(("local-sgd",), ("ring",), TRIGGER_NAMES, COMPRESSION_NAMES),
    Combination(("local-sgd",), ("hierarchical",), TRIGGER_NAMES, ("none",),
        {"--compress": "sums in and between zones would have to be compressed again at each of their steps"}),
    Combination(("ps",), ("shards",), ("period",), ("none",), load_balance_modes=_SYNCHRONOUS_LOAD_BALANCE),
    Combination(("ps",), ("shards",), ("period",), ("none",), asynchronous=True),
)

#: option -> why a strategy does not have a choice, where no row knows better
_REASONS = {"--traffic": "who sends what to whom belongs to the strategy",
            "--trigger": "all gradients are used in every step",
            "--compress": "gradients are sent as they are",
            "--async": "all ranks exchange together",
            "--shared-memory": "only gossip mixes models in the memory of a node",
            "--library": "only allreduce is a single call of a library",
            "--balance": "each step takes all workers, so that none can make more of them"}


def check_compatibility(config: StrategyConfig) -> None:
    """Refuse a method that cannot be.

    Parameters
    ----------
    method : with its strategy and traffic set.

    Raises
    ------
    BadOptions : names the option, what is valid in its place, and the reason.
    """
    for given, asked, fit, valid in (
            (config.global_average_every, "--global-every", config.strategy in _GOSSIP and not config.asynchronous,
             "gossip, adaptive-gossip without --async"),
            (config.quasi_global_momentum, "--quasi-global", config.strategy in _GOSSIP, "gossip, adaptive-gossip"),
            (config.max_staleness, "--staleness", config.strategy == "ps", "strategy ps"),
            (config.period, "--period", config.trigger_name == "period" and config.strategy not in ("allreduce", "ps"),
             "gossip, adaptive-gossip, local-sgd and trigger period"),
            (config.drift_threshold is not None, "--threshold", config.trigger_name == "drift", "trigger drift"),
            (config.comm_budget is not None, "--comm-budget", config.trigger_name == "drift", "trigger drift"),
            (config.trigger_warmup is not None, "--warm-up", config.trigger_name == "drift", "trigger drift"),
            (config.max_interval is not None, "--silence", config.trigger_name == "drift", "trigger drift")):
        if given and not fit:
            raise InvalidOptionsError(f"{asked}: not valid with strategy {config.strategy}, trigger {config.trigger_name}"
                          f"{', --async' * config.asynchronous}; valid with {valid}")
    if config.load_balance == "steps" and config.strategy in _GOSSIP and not config.asynchronous:
        # others may end a round with any number of steps, but pairs that meet after each step need as many
        if config.shared_memory:
            raise InvalidOptionsError("--balance steps: with --shared-memory the ranks of a node meet after every step; "
                             "valid: --balance batch, or --async")
        if config.trigger_name == "period" and config.exchange_period == 1:
            raise InvalidOptionsError("--balance steps: with an exchange after every step there are none to shift between "
                             "two; valid: --period 2 or more, as many as the quickest is times as quick as the "
                             "slowest; --balance batch; or --async")
    rows = [row for row in COMBINATIONS if config.strategy in row.strategies]
    least = min(len(row.conflicts(config)) for row in rows)
    if least:
        raise InvalidOptionsError(
    _conflict_message(
        config, [
            row for row in rows if len(
                row.conflicts(config)) == least]))


def _conflict_message(config: StrategyConfig, closest: Sequence[Combination]) -> str:
    """What does not go with what, why, and what is valid instead: one line."""
    # a reason of a row's own says more than that of the strategy
    known = [row for row in closest if row.reasons.keys() & row.conflicts(config)] or closest
    misfits = known[0].conflicts(config)
    option = next((its for its in misfits if its in known[0].reasons), next(iter(misfits)))
    choices = {"--traffic": config.comm_pattern, "--trigger": config.trigger_name, "--compress": config.compression,
               "--balance": config.load_balance}
    switches = {"--async": config.asynchronous,
    "--shared-memory": config.shared_memory,
     "--library": config.uses_mpi_allreduce}
    shown = {**{its: f"{its} {choice}" for its, choice in choices.items()
                if choice != "off"},
             **{its: its for its, given in switches.items() if given}}
    rest = " ".join([str(config.strategy), *(text for its, text in shown.items() if its != option)])
    valid = "; or ".join(dict.fromkeys(", ".join(row.conflicts(config).values()) for row in [known[0], *closest]))
    return f"{shown.get(option, f'no {option}')}: {known[0].reasons.get(option, _REASONS[option])}; asked for with " \
           f"{rest}; valid: {valid}"


def to_markdown() -> str:
    """ROWS in Markdown, as docs/train.md has them."""
    def words(names: tuple[str, ...]) -> str:
        return ", ".join(f"`{name}`" for name in names)
    lines = ["| strategy | `--traffic` | `--trigger` | `--compress` | `--balance` | and |",
             "| --- | --- | --- | --- | --- | --- |"]
    for row in COMBINATIONS:
        switches = {
    "--async": row.asynchronous,
    "--shared-memory": row.shared_memory,
     "--library": row.uses_mpi_allreduce}
        further = [f"`{option}`{'' if its else ' or not'}" for option, its in switches.items() if its is not False]
        lines.append(f"| {words(row.strategies)} | {words(row.comm_patterns)} | {words(row.triggers)} | "
                     f"{words(row.compressions)} | {words(row.load_balance_modes)} | {', '.join(further)} |")
    return "\n".join(lines)
