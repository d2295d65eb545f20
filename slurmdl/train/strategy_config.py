"""How replicas are kept together: every choice that a user has, in one table.

Each field is an option of `slurmdl train` (`--comm-budget`) and, for scripts of the user's own, a variable of the
environment (`SLURMDL_TRAIN_COMM_BUDGET`).
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from slurmdl.errors import UsageError
from slurmdl.plan import COMM_PATTERNS

ENV_PREFIX = "SLURMDL_TRAIN_"
#: variables of that prefix that are not part of the method
NON_STRATEGY_VARIABLES = (f"{ENV_PREFIX}TRACE", f"{ENV_PREFIX}PLOT", f"{ENV_PREFIX}CHECKPOINT", f"{ENV_PREFIX}CHECKPOINT_EVERY",
          f"{ENV_PREFIX}CHECK_EVERY")
COMPRESSION_NAMES = ("none", "fp16", "int8", "int4", "sign", "topk")
TRIGGER_NAMES = ("period", "drift")
LOAD_BALANCE_MODES = ("off", "batch", "steps")


def whole(least: int) -> Callable[[str], int]:
    """Make a reader of whole numbers for argparse."""
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
        return value
    return read


def number(low: float, high: float, percent: bool = False) -> Callable[[str], float]:
    """Make a reader of numbers from `low` to below `high` for argparse; with `percent`, 1% is read as 0.01."""
    def read(text: str) -> float:
        word, scale = (text[:-1], 100.0) if percent and text.endswith("%") else (text, 1.0)
        try:
            value = float(word) / scale
        except ValueError:
            value = float("nan")
        if not low <= value < high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low:g} to below {high:g}")
        return value
    return read


def _choice_parser(*valid: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in valid:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(valid)}")
        return text
    return read


def _parse_switch(text: str) -> bool:
    valid = {"1": True, "yes": True, "true": True, "0": False, "no": False, "false": False, "": False}
    if text.lower() not in valid:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of yes, no")
    return valid[text.lower()]


def _option(parse: Callable[[str], Any], default: Any, metavar: str,
            help_text: str, experimental: bool = False) -> Any:
    return field(default=default,
                 metadata={"read": parse, "metavar": metavar, "help": help_text, "experimental": experimental})


@dataclass(frozen=True)
class StrategyConfig:
    """One way of keeping replicas together; None where nothing was asked."""

    strategy: str | None = _option(_choice_parser(*COMM_PATTERNS), None, "NAME",
                                 f"{', '.join(COMM_PATTERNS)} (default: the plan's, else allreduce)")
    comm_pattern: str | None = _option(str, None, "NAME",
                                "who sends what to whom: " + "; ".join(f"{', '.join(names)} ({strategy})" for
                                strategy, names in COMM_PATTERNS.items()) + " (default: the plan's, else the first; of "
                                "allreduce between known zones hierarchical)")
    ps: int | None = _option(whole(0), None, "N", "parameter servers (default: the plan's, else 1 with ps)")
    uses_mpi_allreduce: bool = _option(_parse_switch, False, "", "allreduce by the MPI library's own call, which follows no zones",
                          experimental=True)
    compression: str = _option(_choice_parser(*COMPRESSION_NAMES), "none", "NAME",
                               f"of what is sent: {', '.join(COMPRESSION_NAMES)}")
    trigger: str | None = _option(_choice_parser(*TRIGGER_NAMES), None, "NAME",
                                "when to exchange: every --period steps, or when the model has drifted by "
                                "--threshold (default: period; with adaptive-gossip, --threshold or --comm-budget: "
                                "drift)")
    period: int | None = _option(whole(1), None, "STEPS",
                               "steps from exchange to exchange (default: 1; local-sgd: 32)")
    drift_threshold: float | None = _option(number(0, float("inf")), None, "X",
                                    "drift that makes a rank exchange, relative to its model, at the first learning "
                                    "rate; it is scaled with the rate (default: 0.05)")
    comm_budget: float | None = _option(number(0, 1, percent=True), None, "SHARE",
                                      "bytes, as a share of those of fp32 gossip at every step, e.g. 1%%; sets the "
                                      "threshold by itself")
    trigger_warmup: int | None = _option(whole(0), None, "STEPS",
                                "drift: first steps, with an exchange in each, however small it is (default: 30, "
                                "with --comm-budget as far as that pays for them)", experimental=True)
    max_interval: int | None = _option(whole(1), None, "STEPS",
                                "drift: longest time without an exchange (default: 64, with --comm-budget less where "
                                "exchanges are often)", experimental=True)
    asynchronous: bool = _option(_parse_switch, False, "", "wait for nobody (gossip, ps)")
    shared_memory: bool = _option(_parse_switch, False, "",
                                "gossip inside a node through shared memory, and one leader per node outside")
    global_average_every: int = _option(whole(0), 0, "STEPS", "gossip: an average over all ranks now and then (0: never)",
                              experimental=True)
    quasi_global_momentum: bool = _option(_parse_switch, False, "",
                               "gossip: the momentum of SGD is of the way that a model goes with the mixing, not of "
                               "its own gradients alone, against skewed data", experimental=True)
    max_staleness: int | None = _option(whole(0), None, "STEPS",
                                  "ps: how far the fastest worker may be ahead of the slowest (default: 0, in step)")
    load_balance: str = _option(_choice_parser(*LOAD_BALANCE_MODES), "off", "WHAT",
                         "what faster ranks get more of, as their speed is measured: samples in a batch, or steps; "
                         f"{', '.join(LOAD_BALANCE_MODES)}")
    outer_lr: float = _option(number(0, 10), 0.7, "X", "local-sgd: step along the mean change")
    outer_momentum: float = _option(number(0, 1), 0.5, "X", "local-sgd: momentum of the mean change")

    @property
    def trigger_name(self) -> str:
        """The trigger, one of TRIGGERS: the one asked for, else the one that the rest of the method speaks of."""
        drifts = self.strategy == "adaptive-gossip" or self.drift_threshold is not None or self.comm_budget is not None
        return self.trigger or ("drift" if drifts else "period")

    @property
    def exchange_period(self) -> int:
        """Steps from exchange to exchange with the trigger `period`."""
        return self.period or (32 if self.strategy == "local-sgd" else 1)


def add_strategy_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each field to a parser, experimental ones in their own group; absent ones stay None."""
    experimental = parser.add_argument_group(
        "Experimental", "These options, and --traffic links, may change or be removed in any release.")
    for knob in fields(StrategyConfig):
        add = (experimental if knob.metadata["experimental"] else parser).add_argument
        name = "--" + ("async" if knob.name == "asynchronous" else knob.name.replace("_", "-"))
        shown = "" if knob.default in (None, False) else f" (default: {knob.default})"
        if knob.metadata["read"] is _parse_switch:
            add(name, dest=knob.name, action="store_true", default=None, help=knob.metadata["help"])
        else:
            add(name, dest=knob.name, type=knob.metadata["read"], metavar=knob.metadata["metavar"],
                help=knob.metadata["help"] + shown)


def resolve(options: Mapping[str, Any], environ: Mapping[str, str]) -> StrategyConfig:
    """The method that options and variables ask for; an option wins.

    Parameters
    ----------
    given : field -> value, None where nothing was given; other keys are left aside.

    Raises
    ------
    UsageError : an unknown variable, or one whose value is not valid.
    """
    found: dict[str, Any] = {}
    valid = {ENV_PREFIX + ("ASYNC" if knob.name == "asynchronous" else knob.name.upper()): knob
             for knob in fields(StrategyConfig)}
    for name in sorted(environ.keys() - valid.keys() - set(NON_STRATEGY_VARIABLES)):
        if name.startswith(ENV_PREFIX):
            near = difflib.get_close_matches(name, valid, 1, 0) or list(valid)
            raise UsageError(f"{name}: no such variable; valid: {near[0]} (docs/reference.md lists all)")
    for variable, knob in valid.items():
        if options.get(knob.name) is not None:
            found[knob.name] = options[knob.name]
        elif environ.get(variable):
            try:
                found[knob.name] = knob.metadata["read"](environ[variable])
            except argparse.ArgumentTypeError as error:
                raise UsageError(f"{variable}: {error}") from error
    return StrategyConfig(**found)
