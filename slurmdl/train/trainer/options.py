"""The trainer's options."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from slurmdl.errors import UsageError
from slurmdl.train import strategy_config as strategy_config_module
from slurmdl.train.p2p import LOCALITY_LEVELS
from slurmdl.train.trainer import yaml_options
from slurmdl.train.trainer.data import DATASETS
from slurmdl.train.trainer.models import MODELS
from slurmdl.train.trainer.optimizers import LR_SCHEDULES, OPTIMIZERS
from slurmdl.train.transports.link_queues import Link


@dataclass(frozen=True)
class EmulatedCompute:
    """Computation that is not done but waited for.

    Attributes
    ----------
    seconds : of a step's computation.
    size : parameters of the stand-in network that is trained then; None to train the real one all the same.
    """

    seconds: float
    parameters: int | None = None


@dataclass(frozen=True)
class Straggler:
    """A rank that computes `factor` times as long, in the run's steps from `begin` to before `end`."""

    rank: int
    factor: float
    begin: int = 0
    end: float = math.inf


@dataclass(frozen=True)
class Options:
    """What the user asked for; None where nothing was asked.

    Attributes
    ----------
    method : how the replicas are kept together.
    steps, epochs : length of the run; steps wins, 200 steps where neither is given.
    batch : images per worker and step.
    model, data : NAME:ARGUMENTS, see slurmdl.train.trainer.models and slurmdl.train.trainer.data.
    optimizer, lr, momentum, weight_decay, lr_schedule : see slurmdl.train.trainer.optimizers.
    seed : of everything random: first parameters, split and order of the data, partners.
    skew : of the labels over the workers, see data.shares; None for none.
    fold : (i, k): the i-th of k folds, from 1 on, is for the test; None for the set's own test images or a fifth.
    compute : computation to be waited for instead; None to compute.
    slow : ranks that compute for longer.
    simulate : virtual ranks in one process; None for MPI.
    zones : of virtual ranks: name, nodes, and ranks on each node.
    links : level -> link between virtual ranks.
    evaluate_every : steps from one evaluation on the test images to the next; 0 for one at the end.
    metrics, summary : files to write, "" for none.
    tensorboard : folder for TensorBoard's files, "" for none.
    plot, trace : file for a picture, and folder for traces, "" for none.
    checkpoint, checkpoint_every, check_every : see library.run.init.
    log_every : steps between two lines of the log.
    """

    strategy_config: strategy_config_module.StrategyConfig = field(default_factory=strategy_config_module.StrategyConfig)
    steps: int | None = None
    epochs: int | None = None
    batch_size: int = 32
    model: str = "mlp:256,128"
    data: str = "digits"
    optimizer: str = "sgd"
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 0.0
    lr_schedule: str = "constant"
    seed: int = 1
    dirichlet_alpha: float | None = None
    fold: tuple[int, int] | None = None
    emulate_compute: EmulatedCompute | None = None
    straggler: tuple[Straggler, ...] = ()
    virtual_ranks: int | None = None
    virtual_zones: tuple[tuple[str, int, int], ...] = ()
    virtual_links: tuple[tuple[str, Link], ...] = ()
    evaluate_every: int = 0
    metrics: str = ""
    summary: str = ""
    tensorboard_dir: str = ""
    plot: str = ""
    trace_dir: str = ""
    checkpoint_dir: str = ""
    checkpoint_every: int | None = None
    check_every: int | None = None
    log_every: int = 50

    def must_match(self) -> dict[str, object]:
        """The options, besides the method's, that every rank must have alike."""
        return {name: value for name, value in vars(self).items()
                if name not in ("method", "metrics", "summary", "tensorboard", "plot", "trace", "checkpoint",
                                "checkpoint_every", "check_every", "log_every")}

    def resume_must_match(self) -> dict[str, object]:
        """Those of them with which alone a checkpoint may be taken up; the optimizer's are compared in any case."""
        return {f"--{name.replace('_', '-')}": value for name, value in vars(self).items()
                if name in ("batch", "model", "data", "lr_schedule", "skew", "fold")}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"train: {message} (slurmdl train --help lists the options)")


_positive_int, _nonnegative_int = strategy_config_module.whole(1), strategy_config_module.whole(0)
_nonnegative_float, _fraction, _dirichlet_alpha = (strategy_config_module.number(
    *bounds) for bounds in ((0.0, math.inf), (0.0, 1.0), (1e-6, math.inf)))


def _spec_of(names: Collection[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        name = text.partition(":")[0]
        if name not in names:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(names)}")
        return text
    return read


def _parse_fold(text: str) -> tuple[int, int]:
    words = re.fullmatch(r"(\d+)/(\d+)", text)
    if not words or not 1 <= int(words[1]) <= int(words[2]) or int(words[2]) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not I/K, the I-th of K folds, e.g. 1/5")
    return int(words[1]), int(words[2])


def _parse_emulated_compute(text: str) -> EmulatedCompute:
    word, *numbers = text.split(":")
    if word != "replay" or len(numbers) not in (1, 2):
        raise argparse.ArgumentTypeError(f"{text!r} is not replay:SECONDS or replay:SECONDS:PARAMETERS")
    return EmulatedCompute(_nonnegative_float(numbers[0]), _positive_int(numbers[1]) if numbers[1:] else None)


def _parse_list(text: str, pattern: str, expected: str,
                make_entry: Callable[[re.Match[str]], Any]) -> tuple[Any, ...]:
    found = [re.fullmatch(pattern, word) for word in text.split(",")]
    entries = [make_entry(words) for words in found if words]
    if None in found or len({words[1] for words in found if words}) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return tuple(entries)


def _parse_stragglers(text: str) -> tuple[Straggler, ...]:
    def one(words: re.Match[str]) -> Straggler:
        begin, end = int(words[3] or 0), int(words[4]) if words[4] else math.inf
        if end <= begin:
            raise argparse.ArgumentTypeError(f"{words[0]!r} ends before it begins")
        return Straggler(int(words[1]), strategy_config_module.number(1e-3, 1e6)(words[2]), begin, end)

    return _parse_list(text, r"(\d+)=([\d.]+)(?:@(\d+)(?:-(\d+))?)?",
                 "RANK=FACTOR[@STEP[-STEP]],..., e.g. 3=4 or 3=4@100-200", one)


def _parse_virtual_zones(text: str) -> tuple[tuple[str, int, int], ...]:
    return _parse_list(text, r"([\w-]+):(?:(\d+)x)?(\d+)", "ZONE:RANKS or ZONE:NODESxRANKS,..., e.g. A:4,B:2x2",
                 lambda words: (words[1], _positive_int(words[2] or words[3]), _positive_int(words[3] if words[2] else "1")))


def _parse_virtual_links(text: str) -> tuple[tuple[str, Link], ...]:
    scale = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
    return _parse_list(text, rf"({'|'.join(LOCALITY_LEVELS)})=([\d.]+)([kMG]?)(?::(.+))?",
                 f"LEVEL=RATE or LEVEL=RATE:DELAY,... in bit/s and s, LEVEL one of {', '.join(LOCALITY_LEVELS)}, e.g. "
                 "across=100M:0.001",
                 lambda words: (words[1], Link(strategy_config_module.number(1e-9, 1e15)(words[2]) * scale[words[3]] / 8,
                                               _nonnegative_float(words[4] or "0"))))


def parse_train_options(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Options:
    """Options from the command line, from a file (--config), and those of the method also from SLURMDL_TRAIN_*.

    The command line wins over the file, and the file over the environment.

    Raises
    ------
    UsageError : an unknown option, a value that is not valid, or options that do not go together.
    InputError : a fault in the file.
    """
    default = Options()
    parser = _Parser(prog="slurmdl train", allow_abbrev=False,
                     description="Train a network with MPI: one replica per rank, kept together by a strategy.")
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML file with any of these options, e.g. lr: 0.1")
    strategy_config_module.add_strategy_options(parser)
    add("--steps", type=_positive_int, metavar="N", help="steps to train (default: 200)")
    add("--epochs", type=_positive_int, metavar="N", help="passes over the data, where --steps is not given")
    add("--batch", type=_positive_int, metavar="N", help="images per worker and step (default: %(default)s)")
    add("--model", type=_spec_of(MODELS), metavar="SPEC",
        help=f"network: {', '.join(MODELS)}, see docs/train.md (default: %(default)s)")
    add("--data", type=_spec_of(DATASETS), metavar="SPEC",
        help=f"data set: {', '.join(DATASETS)}, see docs/train.md (default: %(default)s)")
    add("--optimizer", choices=OPTIMIZERS, help="default: %(default)s")
    add("--lr", type=_nonnegative_float, metavar="X", help="learning rate (default: %(default)s)")
    add("--momentum", type=_fraction, metavar="X", help="momentum of sgd (default: %(default)s)")
    add("--weight-decay", type=_nonnegative_float, metavar="X", help="default: %(default)s")
    add("--lr-schedule", choices=sorted(LR_SCHEDULES), help="default: %(default)s")
    add("--seed", type=_nonnegative_int, metavar="N", help="seed of everything random (default: %(default)s)")
    add("--skew", type=_dirichlet_alpha, metavar="ALPHA", help="labels of the workers differ: parameter of the Dirichlet "
                                                     "distribution from which their shares are drawn, e.g. 0.3")
    add("--fold", type=_parse_fold, metavar="I/K", help="test with the I-th of K folds, train with the others")
    add("--compute", type=_parse_emulated_compute, metavar="replay:SECONDS[:PARAMETERS]",
        help="wait for so long instead of computing a step, with a stand-in of so many parameters where given")
    add("--slow", type=_parse_stragglers, metavar="RANK=FACTOR[@STEP[-STEP]],...",
        help="ranks that compute so many times as long as --compute: always, from a step on, or for a while")
    add("--simulate", type=_positive_int, metavar="N", help="N virtual ranks in this process, without MPI")
    add("--zones", type=_parse_virtual_zones, metavar="ZONE:RANKS,...", help="zones of virtual ranks, e.g. A:4,B:4, or A:2x4 for 4 "
                                                               "ranks on each of 2 nodes")
    add("--links", type=_parse_virtual_links, metavar="LEVEL=RATE[:DELAY],...",
        help="links between virtual ranks in bit/s and s, e.g. across=100M:0.001,zone=1G")
    add("--evaluate-every", type=_nonnegative_int, metavar="N",
        help="steps between two evaluations (0: at the end alone)")
    add("--metrics", metavar="FILE", help="write one JSON object per step (the first worker's)")
    add("--summary", metavar="FILE", help="write the closing summary as JSON")
    add("--tensorboard", metavar="FOLDER", help="write the first worker's figures for TensorBoard")
    add("--plot", metavar="FILE", help="draw the first worker's loss and drift against step and time")
    add("--trace", metavar="FOLDER", help="write what each rank does when, for chrome://tracing or Perfetto")
    add("--checkpoint", metavar="FOLDER", help="make checkpoints here, where all ranks see them, and go on from the "
                                              "last one; SIGTERM and SIGUSR1 make one, stop, and requeue the job")
    add("--checkpoint-every", type=_nonnegative_int, metavar="STEPS",
        help="steps from one to the next (default: 500; 0: at signals alone)")
    add("--check-every", type=_nonnegative_int, metavar="STEPS",
        help="steps from one comparison of replicas that must be equal to the next (default: 100; 0: never)")
    add("--log-every", type=_positive_int, metavar="N", help="steps between two lines of the log (default: %(default)s)")
    parser.set_defaults(**{name: value for name, value in vars(default).items() if name != "method"})
    file = parser.parse_args(argv).config
    if file:
        parser.set_defaults(**yaml_options.read_options(file, parser))
    found = vars(parser.parse_args(argv))
    del found["config"]
    asked = strategy_config_module.resolve(found, environ)
    return _check_combination(Options(strategy_config=asked, **
                              {name: value for name, value in found.items() if not hasattr(asked, name)}))


def _check_combination(options: Options) -> Options:
    """Options that go together."""
    if not options.virtual_ranks and (options.virtual_zones or options.virtual_links):
        raise UsageError(
            f"train: --{'zones' if options.virtual_zones else 'links'} is of virtual ranks: --simulate N needed")
    ranks = sum(nodes * each for _, nodes, each in options.virtual_zones)
    if options.virtual_ranks and options.virtual_zones and ranks != options.virtual_ranks:
        raise UsageError(f"train: --zones has {ranks} ranks, --simulate {options.virtual_ranks}")
    if options.dirichlet_alpha is not None and options.strategy_config.load_balance != "off":
        raise UsageError(f"train: --balance {options.strategy_config.load_balance}: with --skew each worker has images of its own, "
                         "which no other may take; valid: --balance off, or no --skew")
    if options.straggler and not (options.emulate_compute or options.virtual_ranks):
        raise UsageError("train: --slow needs --compute or --simulate: a real computation takes as long as it takes")
    return options
