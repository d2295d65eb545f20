"""Options of `slurmdl train`."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from slurmdl import yaml_input
from slurmdl.errors import InputError, UsageError, sort_by_similarity
from slurmdl.text import pluralize
from slurmdl.train.p2p import LOCALITY_LEVELS
from slurmdl.train.strategy_config import (
    StrategyConfig,
    add_strategy_options,
    choice_parser,
    float_parser,
    int_parser,
    resolve,
)
from slurmdl.train.trainer.data_readers import DATASETS
from slurmdl.train.trainer.models import MODELS
from slurmdl.train.trainer.optimizers import LR_SCHEDULES, OPTIMIZERS
from slurmdl.train.transports.virtual import Link


@dataclass(frozen=True)
class EmulatedCompute:
    """Seconds of a step's computation that are slept; parameters of a synthetic network, 0 to train the real one."""

    seconds: float
    parameters: int = 0


@dataclass(frozen=True)
class Straggler:
    """A rank that computes `factor` times as long in the global steps from `begin` to before `end`."""

    rank: int
    factor: float
    begin: int = 0
    end: float = math.inf


#: preset of the strategy -> options of the trainer that belong to it
TRAINER_PRESETS = {"diloco": {"optimizer": "adamw"}, "noloco": {"optimizer": "adam"}}
_positive_int, _nonnegative_int = int_parser(1), int_parser(0)
_nonnegative_float, _fraction = float_parser(0.0, math.inf), float_parser(0.0, 1.0)


def _parse_device(text: str) -> str:
    """Check the form of a device name: auto, cpu, cuda or cuda:N."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected auto, cpu, cuda or cuda:N")
    return text


def _parse_fold(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]) or int(match[2]) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: expected I/K, the I-th of K folds, e.g. 1/5")
    return int(match[1]), int(match[2])


def _parse_emulated_compute(text: str) -> EmulatedCompute:
    seconds, *parameters = text.split(":")
    if len(parameters) > 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected SECONDS or SECONDS:PARAMETERS")
    return EmulatedCompute(_nonnegative_float(seconds), *map(_positive_int, parameters))


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


def _option(default: Any, help_text: str, **settings: Any) -> Any:
    """A field of Options; `settings` are those of argparse.add_argument."""
    return field(default=default, metadata={"help": help_text, **settings})


@dataclass(frozen=True)
class Options:
    """The options of `slurmdl train`; None, () or "" if not given."""

    strategy_config: StrategyConfig = field(default_factory=StrategyConfig)
    steps: int | None = _option(None, "number of training steps (default: 200)", type=_positive_int, metavar="N")
    epochs: int | None = _option(None, "passes over the data, if --steps is not given", type=_positive_int,
                                 metavar="N")
    batch_size: int = _option(32, "samples per worker and step (default: %(default)s)", type=_positive_int,
                              metavar="N")
    model: str = _option("mlp:256,128", f"network: {', '.join(MODELS)}, see docs/train.md (default: %(default)s)",
                         type=choice_parser(*MODELS, settings=True), metavar="SPEC")
    data: str = _option("digits", f"data set: {', '.join(DATASETS)}, see docs/train.md (default: %(default)s)",
                        type=choice_parser(*DATASETS, settings=True), metavar="SPEC")
    optimizer: str = _option("sgd", "default: %(default)s", choices=OPTIMIZERS)
    lr: float = _option(0.05, "learning rate (default: %(default)s)", type=_nonnegative_float, metavar="X")
    momentum: float = _option(0.9, "momentum of sgd (default: %(default)s)", type=_fraction, metavar="X")
    weight_decay: float = _option(0.0, "default: %(default)s", type=_nonnegative_float, metavar="X")
    lr_schedule: str = _option("constant", "default: %(default)s", choices=sorted(LR_SCHEDULES))
    seed: int = _option(1, "seed of all random numbers (default: %(default)s)", type=_nonnegative_int, metavar="N")
    dirichlet_alpha: float | None = _option(
        None, "skew of labels, or of sections of a text, over the workers: parameter of a Dirichlet distribution, "
              "e.g. 0.3",
        type=float_parser(1e-6, math.inf), metavar="ALPHA")
    #: (i, k) to test on the i-th of k folds, i from 1; None for the set's own test samples or a fifth
    fold: tuple[int, int] | None = _option(None, "test on the I-th of K folds, train on the others",
                                           type=_parse_fold, metavar="I/K")
    emulate_compute: EmulatedCompute | None = _option(  # noqa: RUF009 - returns a field
        None, "seconds to sleep instead of computing a step, and size of a synthetic network",
        type=_parse_emulated_compute, metavar="SECONDS[:PARAMETERS]")
    straggler: tuple[Straggler, ...] = _option(
        (), "slow ranks: multiple of --emulate-compute, always, from a step on, or for a while",
        type=_parse_stragglers, metavar="RANK=FACTOR[@STEP[-STEP]],...")
    virtual_ranks: int | None = _option(None, "virtual ranks in this process, without MPI", type=_positive_int,
                                        metavar="N")
    backend: str = _option("", "how ranks exchange messages: mpi, torch (torch.distributed with gloo), or auto, what "
                           "the launch offers (default)", metavar="NAME")
    device: str = _option("auto", "device of the model: cpu, cuda (a GPU for each rank of a node), cuda:N, or auto, "
                          "cuda if PyTorch sees a GPU (default: %(default)s)", type=_parse_device, metavar="NAME")
    #: name, number of nodes, and ranks per node of each zone
    virtual_zones: tuple[tuple[str, int, int], ...] = _option(
        (), "zones of virtual ranks, e.g. A:4,B:4, or A:2x4 for 4 ranks on each of 2 nodes",
        type=_parse_virtual_zones, metavar="ZONE:RANKS,...")
    #: locality level -> link between virtual ranks
    virtual_links: tuple[tuple[str, Link], ...] = _option(
        (), "links between virtual ranks in bit/s and s, e.g. inter-zone=100M:0.001,intra-zone=1G",
        type=_parse_virtual_links, metavar="LEVEL=RATE[:LATENCY],...")
    evaluate_every: int = _option(0, "steps between two evaluations (0: only at the end)", type=_nonnegative_int,
                                  metavar="N")
    metrics: str = _option("", "file for one JSON object per step of the first worker", metavar="FILE")
    summary: str = _option("", "file for the summary as JSON", metavar="FILE")
    trace_dir: str = _option("", "directory for one timeline per rank, for chrome://tracing or Perfetto",
                             metavar="DIR")
    checkpoint_dir: str = _option("", "shared directory for checkpoints; resumes from the latest. SIGTERM and "
                                  "SIGUSR1 write one and requeue the job", metavar="DIR")
    checkpoint_every: int | None = _option(None, "steps between two checkpoints (default: 500; 0: only on signals)",
                                           type=_nonnegative_int, metavar="STEPS")
    checkpoint_keep: int | None = _option(None, "newest checkpoints that are kept (default: 2; 0: all)",
                                          type=_nonnegative_int, metavar="N")
    check_every: int | None = _option(
        None, "steps between two comparisons of replicas that must be equal (default: 100; 0: never)",
        type=_nonnegative_int, metavar="STEPS")
    timeout: int | None = _option(
        None, "seconds after which a rank that waits for others ends the run (default: 1800; 0: never)",
        type=_nonnegative_int, metavar="SECONDS")
    log_every: int = _option(50, "steps between two log lines (default: %(default)s)", type=_positive_int,
                             metavar="N")

    def must_match(self) -> dict[str, object]:
        """Options besides the strategy's that must be equal on all ranks."""
        return {name: value for name, value in vars(self).items()
                if name not in ("strategy_config", "device", "metrics", "summary", "trace_dir", "checkpoint_dir",
                                "checkpoint_every", "checkpoint_keep", "check_every", "log_every")}

    def resume_must_match(self) -> dict[str, object]:
        """Options that must equal a checkpoint's; the optimizer's are compared in any case."""
        return {f"--{name.replace('_', '-')}": value for name, value in vars(self).items()
                if name in ("batch_size", "model", "data", "lr_schedule", "dirichlet_alpha", "fold")}


class TrainParser(argparse.ArgumentParser):
    """Raises UsageError; `prog` is `slurmdl train` or a command of it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog.removeprefix('slurmdl ')}: {message} ({self.prog} --help lists the options)")


def parse_train_options(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Options:
    """Parse command line, file (--config), and the strategy's SLURMDL_TRAIN_* variables, in this order of precedence.

    Raises UsageError if options are unknown, invalid or conflict, InputError if the file has an error.
    """
    parser = TrainParser(prog="slurmdl train", allow_abbrev=False,
                         description="Train a network: one replica per rank, synchronized by a strategy. "
                                     "`slurmdl train export DIR` writes the model of a checkpoint for plain PyTorch.")
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these options, e.g. lr: 0.1")
    add_strategy_options(parser)
    for entry in fields(Options):
        if entry.metadata:
            parser.add_argument(f"--{entry.name.replace('_', '-')}", default=entry.default, **entry.metadata)
    defaults = {name: parser.get_default(name) for preset in TRAINER_PRESETS.values() for name in preset}
    file = parser.parse_args(argv).config
    if file:
        parser.set_defaults(**_read_options_file(file, parser))
    strategy_config = resolve(vars(parser.parse_args(argv)), environ)
    if strategy_config.preset:
        parser.set_defaults(**{name: value for name, value in TRAINER_PRESETS[strategy_config.preset].items()
                               if parser.get_default(name) == defaults[name]})
    values = vars(parser.parse_args(argv))
    del values["config"]
    options = Options(strategy_config=strategy_config,
                      **{name: value for name, value in values.items() if not hasattr(strategy_config, name)})
    _check_conflicts(options)
    return options


def _read_options_file(path: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Read values of a parser's options from a file; keys are the options' destinations.

    A value is text as on the command line, a list, or for a flag `true` or `false`. Raises InputError if the file is
    unreadable or not YAML, or with the line if it has an unknown key or an invalid value.
    """
    import yaml

    options = {name.removeprefix("--"): action for action in parser._actions for name in action.option_strings
               if name.startswith("--") and name not in ("--help", "--config")}
    top = yaml_input.load_yaml_file(path, yaml.compose)
    if top is None:
        return {}
    if not isinstance(top, yaml.MappingNode):
        raise InputError("expected OPTION: VALUE, e.g. lr: 0.1", path, top.start_mark.line + 1)
    values: dict[str, Any] = {}
    for key_node, value_node in top.value:
        line, name = key_node.start_mark.line + 1, str(key_node.value)
        if name not in options:
            raise InputError(f"unknown option; expected {', '.join(sort_by_similarity(name, sorted(options)))}", path,
                             line, name)
        action = options[name]
        if action.dest in values:
            raise InputError("given twice", path, line, name)
        text = _scalar_text(value_node)
        if text is None:
            raise InputError("expected one value, or a list of values", path, line, name)
        if action.nargs == 0:
            switches = yaml.SafeLoader.bool_values  # true, yes, on and their opposites
            if text.lower() not in switches:
                raise InputError(f"{text!r} is not one of true, false", path, line, name)
            values[action.dest] = switches[text.lower()]
            continue
        try:
            values[action.dest] = getattr(parser.parse_args([f"--{name}={text}"]), action.dest)
        except UsageError as error:
            # the message of argparse, without the names of command and option
            raise InputError(str(error).partition(f"--{name}: ")[2].partition(" (slurmdl train")[0] or str(error),
                             path, line, name) from error
    return values


def _scalar_text(node: Any) -> str | None:
    """The text of a scalar, or of a list of scalars joined with commas; None for other nodes."""
    items = node.value if node.id == "sequence" else [node]
    if not all(isinstance(item.value, str) and item.tag != "tag:yaml.org,2002:null" for item in items):
        return None
    return ",".join(item.value for item in items)


def _check_conflicts(options: Options) -> None:
    if not options.virtual_ranks and (options.virtual_zones or options.virtual_links):
        raise UsageError(f"train: --virtual-{'zones' if options.virtual_zones else 'links'}: only valid with "
                         "--virtual-ranks")
    ranks = sum(nodes * ranks_per_node for _, nodes, ranks_per_node in options.virtual_zones)
    if options.virtual_ranks and options.virtual_zones and ranks != options.virtual_ranks:
        raise UsageError(f"train: --virtual-zones: {pluralize(ranks, 'rank')}; expected --virtual-ranks "
                         f"{options.virtual_ranks}")
    if options.dirichlet_alpha is not None and options.strategy_config.load_balance:
        raise UsageError("train: --load-balance: not valid with --dirichlet-alpha, which gives each worker its own "
                         "images; expected one of the two")
    if options.virtual_ranks and options.device not in ("auto", "cpu"):
        raise UsageError(f"train: --device {options.device}: not valid with --virtual-ranks, which share the CPU; "
                         "use --device cpu")
    if options.straggler and not (options.emulate_compute or options.virtual_ranks):
        raise UsageError("train: --straggler: only valid with --emulate-compute or --virtual-ranks")
