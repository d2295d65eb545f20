"""The trainer's options."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from slurmdl.errors import UsageError
from slurmdl.train import method
from slurmdl.train.data import DATA


@dataclass(frozen=True)
class Options:
    """What the user asked for; None where nothing was asked.

    Attributes
    ----------
    method : how the replicas are kept together.
    steps, epochs : length of the run; steps wins, 200 steps where neither is given.
    batch : images per worker and step.
    model : NAME:ARGUMENTS, see slurmdl.train.models.
    lr, momentum : of SGD.
    seed : of everything random: first parameters, split and order of the data, partners.
    metrics, summary : files to write, "" for none.
    log_every : steps between two lines of the log.
    """

    method: method.Method = field(default_factory=method.Method)
    steps: int | None = None
    epochs: int | None = None
    batch: int = 32
    model: str = "mlp:256,128"
    lr: float = 0.05
    momentum: float = 0.9
    seed: int = 1
    data: str = "digits"
    metrics: str = ""
    summary: str = ""
    log_every: int = 50

    def shared(self) -> dict[str, object]:
        """The options that every rank must have alike."""
        return {**vars(self.method), **{name: value for name, value in vars(self).items()
                                        if name not in ("method", "metrics", "summary", "log_every")}}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"train: {message} (slurmdl train --help lists the options)")


def _count(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
    return value


def _positive(text: str) -> int:
    return _count(1, text)


def _natural(text: str) -> int:
    return _count(0, text)


def _number(low: float, high: float, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value < high:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low:g} to below {high:g}")
    return value


def _rate(text: str) -> float:
    return _number(0.0, float("inf"), text)


def _fraction(text: str) -> float:
    return _number(0.0, 1.0, text)


def parse(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Options:
    """Options from the command line, those of the method also from SLURMDL_TRAIN_* of the environment.

    Raises
    ------
    UsageError : an unknown option or a value that is not valid.
    """
    default = Options()
    parser = _Parser(prog="slurmdl train", allow_abbrev=False,
                     description="Train a network with MPI: one replica per rank, kept together by a strategy.")
    add = parser.add_argument
    method.add_options(add)
    add("--steps", type=_positive, metavar="N", help="steps to train (default: 200)")
    add("--epochs", type=_positive, metavar="N", help="passes over the data, where --steps is not given")
    add("--batch", type=_positive, metavar="N", help="images per worker and step (default: %(default)s)")
    add("--model", metavar="SPEC", help="network, e.g. mlp:256,128 = two hidden layers (default: %(default)s)")
    add("--lr", type=_rate, metavar="X", help="learning rate (default: %(default)s)")
    add("--momentum", type=_fraction, metavar="X", help="momentum of SGD (default: %(default)s)")
    add("--seed", type=_natural, metavar="N", help="seed of everything random (default: %(default)s)")
    add("--data", metavar="SPEC", help=f"data set: {', '.join(DATA)}, see docs/train.md (default: %(default)s)")
    add("--metrics", metavar="FILE", help="write one JSON object per step (the first worker's)")
    add("--summary", metavar="FILE", help="write the closing summary as JSON")
    add("--log-every", type=_positive, metavar="N", help="steps between two lines of the log (default: %(default)s)")
    parser.set_defaults(**{name: value for name, value in vars(default).items() if name != "method"})
    found = vars(parser.parse_args(argv))
    asked = method.of(found, environ)
    return Options(method=asked, **{name: value for name, value in found.items() if not hasattr(asked, name)})
