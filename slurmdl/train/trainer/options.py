"""Options of `slurmdl train`."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from slurmdl.errors import UsageError
from slurmdl.train.p2p import LOCALITY_LEVELS
from slurmdl.train.strategy_config import StrategyConfig, add_strategy_options, float_parser, int_parser, resolve
from slurmdl.train.trainer import yaml_options
from slurmdl.train.trainer.data import DATASETS
from slurmdl.train.trainer.models import MODELS
from slurmdl.train.trainer.optimizers import LR_SCHEDULES, OPTIMIZERS
from slurmdl.train.transports.link_queues import Link


@dataclass(frozen=True)
class EmulatedCompute:
    """Computation that is slept instead of done.

    Attributes
    ----------
    seconds : of a step's computation.
    parameters : of the synthetic network that is trained; None to train the real one.
    """

    seconds: float
    parameters: int | None = None


@dataclass(frozen=True)
class Straggler:
    """A rank that computes `factor` times as long in the global steps from `begin` to before `end`."""

    rank: int
    factor: float
    begin: int = 0
    end: float = math.inf


@dataclass(frozen=True)
class Options:
    """The user's options; None if not given.

    Attributes
    ----------
    strategy_config : how the replicas are synchronized.
    steps, epochs : length of the run; steps takes precedence, the default is 200 steps.
    batch_size : images per worker and step.
    model, data : NAME:ARGUMENTS, see slurmdl.train.trainer.models and slurmdl.train.trainer.data.
    optimizer, lr, momentum, weight_decay, lr_schedule : see slurmdl.train.trainer.optimizers.
    seed : of all random numbers: first parameters, split and order of the data, gossip partners.
    dirichlet_alpha : label skew over the workers, see data.partition; None for none.
    fold : (i, k) to test on the i-th of k folds, i from 1; None for the set's own test images or a fifth.
    emulate_compute : computation to emulate; None to compute.
    straggler : ranks that compute for longer.
    virtual_ranks : number of virtual ranks in one process; None for MPI.
    virtual_zones : name, number of nodes, and ranks per node of each zone.
    virtual_links : locality level -> link between virtual ranks.
    evaluate_every : steps between two evaluations on the test images; 0 for one at the end.
    metrics, summary, plot : files to write, "" for none.
    tensorboard_dir, trace_dir : directories to write to, "" for none.
    checkpoint_dir, checkpoint_every, check_every : see library.run.init.
    log_every : steps between two log lines.
    """

    strategy_config: StrategyConfig = field(default_factory=StrategyConfig)
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
        """Options besides the strategy's that must be equal on all ranks."""
        return {name: value for name, value in vars(self).items()
                if name not in ("strategy_config", "metrics", "summary", "tensorboard_dir", "plot", "trace_dir",
                                "checkpoint_dir", "checkpoint_every", "check_every", "log_every")}

    def resume_must_match(self) -> dict[str, object]:
        """Options that must equal a checkpoint's; the optimizer's are compared in any case."""
        return {f"--{name.replace('_', '-')}": value for name, value in vars(self).items()
                if name in ("batch_size", "model", "data", "lr_schedule", "dirichlet_alpha", "fold")}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"train: {message} (slurmdl train --help lists the options)")


_positive_int, _nonnegative_int = int_parser(1), int_parser(0)
_nonnegative_float, _fraction = float_parser(0.0, math.inf), float_parser(0.0, 1.0)
_dirichlet_alpha = float_parser(1e-6, math.inf)


def _spec_of(names: Collection[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        name = text.partition(":")[0]
        if name not in names:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(names)}")
        return text
    return read


def _parse_fold(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]) or int(match[2]) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: expected I/K, the I-th of K folds, e.g. 1/5")
    return int(match[1]), int(match[2])


def _parse_emulated_compute(text: str) -> EmulatedCompute:
    seconds, *parameters = text.split(":")
    if len(parameters) > 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected SECONDS or SECONDS:PARAMETERS")
    return EmulatedCompute(_nonnegative_float(seconds), _positive_int(parameters[0]) if parameters else None)


def _parse_list(text: str, pattern: str, expected: str,
                make_entry: Callable[[re.Match[str]], Any]) -> tuple[Any, ...]:
    """Parse comma-separated entries with different first groups."""
    matches = [re.fullmatch(pattern, entry) for entry in text.split(",")]
    entries = [make_entry(match) for match in matches if match]
    if None in matches or len({match[1] for match in matches if match}) < len(matches):
        raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}")
    return tuple(entries)


def _parse_stragglers(text: str) -> tuple[Straggler, ...]:
    def make_straggler(match: re.Match[str]) -> Straggler:
        begin, end = int(match[3] or 0), int(match[4]) if match[4] else math.inf
        if end <= begin:
            raise argparse.ArgumentTypeError(f"{match[0]!r}: the last step must be after the first")
        return Straggler(int(match[1]), float_parser(1e-3, 1e6)(match[2]), begin, end)

    return _parse_list(text, r"(\d+)=([\d.]+)(?:@(\d+)(?:-(\d+))?)?",
                       "RANK=FACTOR[@STEP[-STEP]],..., e.g. 3=4 or 3=4@100-200", make_straggler)


def _parse_virtual_zones(text: str) -> tuple[tuple[str, int, int], ...]:
    return _parse_list(
        text, r"([\w-]+):(?:(\d+)x)?(\d+)", "ZONE:RANKS or ZONE:NODESxRANKS,..., e.g. A:4,B:2x2",
        lambda match: (match[1], _positive_int(match[2] or match[3]), _positive_int(match[3] if match[2] else "1")))


def _parse_virtual_links(text: str) -> tuple[tuple[str, Link], ...]:
    scale = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
    levels = [level.replace("_", "-") for level in LOCALITY_LEVELS]
    return _parse_list(text, rf"({'|'.join(levels)})=([\d.]+)([kMG]?)(?::(.+))?",
                       f"LEVEL=RATE or LEVEL=RATE:LATENCY,... in bit/s and s, LEVEL one of {', '.join(levels)}, "
                       "e.g. inter-zone=100M:0.001",
                       lambda match: (match[1].replace("-", "_"),
                                      Link(float_parser(1e-9, 1e15)(match[2]) * scale[match[3]] / 8,
                                           _nonnegative_float(match[4] or "0"))))


def parse_train_options(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Options:
    """Parse the command line, a file (--config), and the strategy's SLURMDL_TRAIN_* variables, in this order of
    precedence.

    Raises
    ------
    UsageError : an unknown option, an invalid value, or options that conflict.
    InputError : an error in the file.
    """
    default = Options()
    parser = _Parser(prog="slurmdl train", allow_abbrev=False,
                     description="Train a network with MPI: one replica per rank, synchronized by a strategy.")
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML file with any of these options, e.g. lr: 0.1")
    add_strategy_options(parser)
    add("--steps", type=_positive_int, metavar="N", help="number of training steps (default: 200)")
    add("--epochs", type=_positive_int, metavar="N", help="passes over the data, if --steps is not given")
    add("--batch-size", type=_positive_int, metavar="N", help="images per worker and step (default: %(default)s)")
    add("--model", type=_spec_of(MODELS), metavar="SPEC",
        help=f"network: {', '.join(MODELS)}, see docs/train.md (default: %(default)s)")
    add("--data", type=_spec_of(DATASETS), metavar="SPEC",
        help=f"data set: {', '.join(DATASETS)}, see docs/train.md (default: %(default)s)")
    add("--optimizer", choices=OPTIMIZERS, help="default: %(default)s")
    add("--lr", type=_nonnegative_float, metavar="X", help="learning rate (default: %(default)s)")
    add("--momentum", type=_fraction, metavar="X", help="momentum of sgd (default: %(default)s)")
    add("--weight-decay", type=_nonnegative_float, metavar="X", help="default: %(default)s")
    add("--lr-schedule", choices=sorted(LR_SCHEDULES), help="default: %(default)s")
    add("--seed", type=_nonnegative_int, metavar="N", help="seed of all random numbers (default: %(default)s)")
    add("--dirichlet-alpha", type=_dirichlet_alpha, metavar="ALPHA",
        help="label skew over the workers: parameter of a Dirichlet distribution, e.g. 0.3")
    add("--fold", type=_parse_fold, metavar="I/K", help="test on the I-th of K folds, train on the others")
    add("--emulate-compute", type=_parse_emulated_compute, metavar="SECONDS[:PARAMETERS]",
        help="seconds to sleep instead of computing a step, and size of a synthetic network")
    add("--straggler", type=_parse_stragglers, metavar="RANK=FACTOR[@STEP[-STEP]],...",
        help="slow ranks: multiple of --emulate-compute, always, from a step on, or for a while")
    add("--virtual-ranks", type=_positive_int, metavar="N", help="virtual ranks in this process, without MPI")
    add("--virtual-zones", type=_parse_virtual_zones, metavar="ZONE:RANKS,...",
        help="zones of virtual ranks, e.g. A:4,B:4, or A:2x4 for 4 ranks on each of 2 nodes")
    add("--virtual-links", type=_parse_virtual_links, metavar="LEVEL=RATE[:LATENCY],...",
        help="links between virtual ranks in bit/s and s, e.g. inter-zone=100M:0.001,intra-zone=1G")
    add("--evaluate-every", type=_nonnegative_int, metavar="N",
        help="steps between two evaluations (0: only at the end)")
    add("--metrics", metavar="FILE", help="file for one JSON object per step of the first worker")
    add("--summary", metavar="FILE", help="file for the summary as JSON")
    add("--tensorboard-dir", metavar="DIR", help="directory for TensorBoard files of the first worker")
    add("--plot", metavar="FILE", help="file for a plot of the first worker's loss and drift")
    add("--trace-dir", metavar="DIR", help="directory for one timeline per rank, for chrome://tracing or Perfetto")
    add("--checkpoint-dir", metavar="DIR",
        help="shared directory for checkpoints; resumes from the latest. SIGTERM and SIGUSR1 write one and requeue "
             "the job")
    add("--checkpoint-every", type=_nonnegative_int, metavar="STEPS",
        help="steps between two checkpoints (default: 500; 0: only on signals)")
    add("--check-every", type=_nonnegative_int, metavar="STEPS",
        help="steps between two comparisons of replicas that must be equal (default: 100; 0: never)")
    add("--log-every", type=_positive_int, metavar="N", help="steps between two log lines (default: %(default)s)")
    parser.set_defaults(**{name: value for name, value in vars(default).items() if name != "strategy_config"})
    file = parser.parse_args(argv).config
    if file:
        parser.set_defaults(**yaml_options.read_options(file, parser))
    values = vars(parser.parse_args(argv))
    del values["config"]
    strategy_config = resolve(values, environ)
    options = Options(strategy_config=strategy_config,
                      **{name: value for name, value in values.items() if not hasattr(strategy_config, name)})
    _check_conflicts(options)
    return options


def _check_conflicts(options: Options) -> None:
    if not options.virtual_ranks and (options.virtual_zones or options.virtual_links):
        raise UsageError(f"train: --virtual-{'zones' if options.virtual_zones else 'links'}: only valid with "
                         "--virtual-ranks")
    ranks = sum(nodes * ranks_per_node for _, nodes, ranks_per_node in options.virtual_zones)
    if options.virtual_ranks and options.virtual_zones and ranks != options.virtual_ranks:
        raise UsageError(f"train: --virtual-zones: {ranks} ranks; expected --virtual-ranks {options.virtual_ranks}")
    load_balance = options.strategy_config.load_balance
    if options.dirichlet_alpha is not None and load_balance != "off":
        raise UsageError(f"train: --load-balance {load_balance}: not valid with --dirichlet-alpha, which gives each "
                         "worker its own images; use --load-balance off, or omit --dirichlet-alpha")
    if options.straggler and not (options.emulate_compute or options.virtual_ranks):
        raise UsageError("train: --straggler: only valid with --emulate-compute or --virtual-ranks")
