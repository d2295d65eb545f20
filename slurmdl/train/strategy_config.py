"""How replicas are synchronized: one table of all choices.

Each field is an option of `slurmdl train` (`--comm-budget`) and an environment variable for training scripts
(`SLURMDL_TRAIN_COMM_BUDGET`).
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

from slurmdl.comm_layout import COMPRESSION_NAMES, default_period
from slurmdl.errors import UsageError
from slurmdl.plan import COMM_PATTERNS, ISLAND_LEVELS, ISLAND_STRATEGIES

ENV_PREFIX = "SLURMDL_TRAIN_"
TRACE_DIR_VARIABLE = f"{ENV_PREFIX}TRACE_DIR"
CHECKPOINT_DIR_VARIABLE = f"{ENV_PREFIX}CHECKPOINT_DIR"
CHECKPOINT_EVERY_VARIABLE = f"{ENV_PREFIX}CHECKPOINT_EVERY"
CHECKPOINT_KEEP_VARIABLE = f"{ENV_PREFIX}CHECKPOINT_KEEP"
CHECK_EVERY_VARIABLE = f"{ENV_PREFIX}CHECK_EVERY"
TIMEOUT_VARIABLE = f"{ENV_PREFIX}TIMEOUT"
BACKEND_VARIABLE = f"{ENV_PREFIX}BACKEND"
#: variables with the prefix that are no fields of StrategyConfig
NON_STRATEGY_VARIABLES = (TRACE_DIR_VARIABLE, CHECKPOINT_DIR_VARIABLE, CHECKPOINT_EVERY_VARIABLE,
                          CHECKPOINT_KEEP_VARIABLE, CHECK_EVERY_VARIABLE, TIMEOUT_VARIABLE, BACKEND_VARIABLE)
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


def int_parser(minimum: int) -> Callable[[str], int]:
    """Make an argparse type for integers of at least `minimum`."""
    def parse(text: str) -> int:
        with suppress(ValueError):
            if int(text) >= minimum:
                return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {minimum} or more")
    return parse


def float_parser(low: float, high: float, percent: bool = False) -> Callable[[str], float]:
    """Make an argparse type for numbers in [low, high); with `percent`, 1% is read as 0.01."""
    def parse(text: str) -> float:
        digits, scale = (text[:-1], 100.0) if percent and text.endswith("%") else (text, 1.0)
        with suppress(ValueError):
            value = float(digits) / scale
            if low <= value < high:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low:g} to below {high:g}")
    return parse


def choice_parser(*valid: str, settings: bool = False) -> Callable[[str], str]:
    """Make an argparse type for valid names, with `settings` also for NAME:SETTINGS."""
    def parse(text: str) -> str:
        name = text.partition(":")[0] if settings else text
        if name not in valid:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(valid)}")
        return text
    return parse


def _parse_switch(text: str) -> bool:
    valid = {"1": True, "yes": True, "true": True, "0": False, "no": False, "false": False, "": False}
    if text.lower() not in valid:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of yes, no")
    return valid[text.lower()]


def _option(parse: Callable[[str], Any], default: Any, metavar: str, help_text: str) -> Any:
    return field(default=default, metadata={"parse": parse, "metavar": metavar, "help": help_text})


@dataclass(frozen=True)
class StrategyConfig:
    """A synchronization strategy and its settings; None for settings that were not given."""

    strategy: str | None = _option(choice_parser(*COMM_PATTERNS), None, "NAME",
                                   f"{', '.join(COMM_PATTERNS)} (default: the plan's, else allreduce)")
    comm_pattern: str | None = _option(
        str, None, "NAME", "communication pattern: " + "; ".join(
            f"{', '.join(names)} ({strategy})" for strategy, names in COMM_PATTERNS.items())
        + " (default: the plan's, else the first; for allreduce across known zones hierarchical)")
    ps: int | None = _option(int_parser(0), None, "N", "parameter servers (default: the plan's, else 1 with ps)")
    compression: str = _option(choice_parser(*COMPRESSION_NAMES), "none", "NAME",
                               f"compression of messages: {', '.join(COMPRESSION_NAMES)}")
    period: int | None = _option(int_parser(1), None, "STEPS",
                                 "gossip, local-sgd: steps between exchanges (default: 1; local-sgd: 32)")
    comm_budget: float | None = _option(
        float_parser(0, 1, percent=True), None, "SHARE",
        "adaptive-gossip: bytes as a share of the bytes of fp32 gossip at every step, e.g. 1%%; sets the drift that "
        f"triggers an exchange (default: {100 * DEFAULT_COMM_BUDGET:g}%%)")
    asynchronous: bool = _option(_parse_switch, False, "", "asynchronous exchanges (gossip, ps)")
    shared_memory: bool = _option(_parse_switch, False, "",
                                  "gossip through shared memory inside a node, one leader per node outside")
    islands: str | None = _option(
        choice_parser(*ISLAND_LEVELS), None, "LEVEL",
        "islands: allreduce at every step inside each zone or node, and the strategy only between them: "
        f"{', '.join(ISLAND_LEVELS)} (with {', '.join(ISLAND_STRATEGIES)}; default: the plan's, else none)")
    preset: str | None = _option(choice_parser(*PRESETS), None, "NAME",
                                 "defaults of a published method; diloco: local-sgd --period 100 --outer-lr 0.7 "
                                 "--outer-momentum 0.9, in slurmdl train with --optimizer adamw; noloco: gossip "
                                 "--period 50 --outer-lr 0.7 --outer-momentum 0.5, with --optimizer adam")
    load_balance: bool = _option(_parse_switch, False, "",
                                 "larger batches for faster ranks; with --async more steps of equal batches")
    outer_lr: float | None = _option(float_parser(0, 10), None, "X", "local-sgd: outer learning rate (default: "
                                     f"{DEFAULT_OUTER_LR}); gossip: outer optimizer with this rate (default: none)")
    outer_momentum: float | None = _option(
        float_parser(0, 1), None, "X", f"local-sgd: outer momentum (default: {DEFAULT_OUTER_MOMENTUM}); gossip: "
        "outer optimizer with this momentum (default: none)")
    fragments: int = _option(int_parser(1), 1, "N", "local-sgd: parts of the model that are exchanged in turn, each "
                             "once in --period steps")
    overlap: int = _option(int_parser(0), 0, "STEPS", "local-sgd: steps during which an exchange runs in the "
                           "background")

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
    def exchange_period(self) -> int:
        """Steps between exchanges of the same fragment of the model, except with adaptive-gossip."""
        return self.period or default_period(self.strategy or "")


def option_name(field_name: str) -> str:
    """Option of a field, e.g. `--comm-pattern`."""
    return "--" + ("async" if field_name == "asynchronous" else field_name.replace("_", "-"))


def add_strategy_options(parser: argparse.ArgumentParser) -> None:
    """Add all strategy options to a parser; absent ones stay None."""
    for entry in fields(StrategyConfig):
        settings = entry.metadata
        default = "" if entry.default in (None, False) else f" (default: {entry.default})"
        if settings["parse"] is _parse_switch:
            parser.add_argument(option_name(entry.name), dest=entry.name, action="store_true", default=None,
                                help=settings["help"])
        else:
            parser.add_argument(option_name(entry.name), dest=entry.name, type=settings["parse"],
                                metavar=settings["metavar"], help=settings["help"] + default)


def resolve(options: Mapping[str, Any], environ: Mapping[str, str]) -> StrategyConfig:
    """Build the configuration from options and environment variables; options win.

    Raises UsageError for an unknown variable, or an invalid value.

    Args:
        options: field -> value, None if not given; other keys are ignored.
    """
    values: dict[str, Any] = {}
    variables = {ENV_PREFIX + option_name(entry.name)[2:].replace("-", "_").upper(): entry
                 for entry in fields(StrategyConfig)}
    for name in sorted(environ.keys() - variables.keys() - set(NON_STRATEGY_VARIABLES)):
        if name.startswith(ENV_PREFIX):
            closest = difflib.get_close_matches(name, variables, 1, 0) or list(variables)
            raise UsageError(f"{name}: no such variable; expected {closest[0]} (docs/reference.md lists all)")
    for variable, entry in variables.items():
        if options.get(entry.name) is not None:
            values[entry.name] = options[entry.name]
        elif environ.get(variable):
            try:
                values[entry.name] = entry.metadata["parse"](environ[variable])
            except argparse.ArgumentTypeError as error:
                raise UsageError(f"{variable}: {error}") from error
    preset = PRESETS.get(values.get("preset", ""), {})
    if values.get("strategy", preset.get("strategy")) != preset.get("strategy", values.get("strategy")):
        raise UsageError(f"--preset {values['preset']}: not valid with --strategy {values['strategy']}; expected "
                         f"{preset['strategy']}")
    return StrategyConfig(**{**preset, **values})
