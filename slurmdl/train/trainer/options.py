"""Options of `slurmdl train`."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from slurmdl import yaml_input
from slurmdl.errors import InputError, UsageError, sort_by_similarity
from slurmdl.options import Kind, Option, add_arguments, choice, count, number, option, options_of, text
from slurmdl.text import pluralize
from slurmdl.train.meters import LOCALITY_LEVELS
from slurmdl.train.strategy_config import RunOptions, StrategyConfig, resolve, values_from_environ
from slurmdl.train.trainer.data_readers import DATASETS
from slurmdl.train.trainer.models import LR_SCHEDULES, MODELS, OPTIMIZERS
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


def _list_of(values: str, expected: str, pattern: str, make_entry: Callable[[re.Match[str]], Any]) -> Kind:
    """Entries separated by commas, with different first groups; `make_entry` returns None if one is invalid."""
    def parse(text: str) -> tuple[Any, ...] | None:
        matches = [re.fullmatch(pattern, entry) for entry in text.split(",")]
        entries = [make_entry(match) for match in matches if match]
        first_groups = {match[1] for match in matches if match}
        return None if None in entries or len(first_groups) < len(matches) else tuple(entries)
    return Kind("text", values, parse, lambda _: expected)


def _parse_fold(text: str) -> tuple[int, int] | None:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    return (int(match[1]), int(match[2])) if match and 1 <= int(match[1]) <= int(match[2]) > 1 else None


def _parse_emulated_compute(text: str) -> EmulatedCompute | None:
    match = re.fullmatch(r"([^:]+)(?::([1-9]\d*))?", text)
    seconds = _SECONDS.parse(match[1]) if match else None
    return EmulatedCompute(seconds, int(match[2] or 0)) if match and seconds is not None else None


def _make_straggler(match: re.Match[str]) -> Straggler | None:
    factor, begin, end = float(match[2]), int(match[3] or 0), int(match[4]) if match[4] else math.inf
    return Straggler(int(match[1]), factor, begin, end) if 1e-3 <= factor < 1e6 and begin < end else None


def _make_zone(match: re.Match[str]) -> tuple[str, int, int] | None:
    zone = match[1], int(match[2] or match[3]), int(match[3] if match[2] else 1)
    return zone if min(zone[1:]) > 0 else None


def _make_link(match: re.Match[str]) -> tuple[str, Link] | None:
    rate, latency = _RATE.parse(match[2]), _SECONDS.parse(match[4] or "0")
    scale = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}[match[3]]
    return (match[1].replace("-", "_"), Link(rate * scale / 8, latency)) if rate and latency is not None else None


_SECONDS, _RATE = number("", 0, math.inf), number("", 1e-9, 1e15)
_LEVELS = [level.replace("_", "-") for level in LOCALITY_LEVELS]
_DECIMAL = r"(\d+\.?\d*|\.\d+)"
STRAGGLERS = _list_of("RANK=FACTOR[@STEP[-STEP]],...", "RANK=FACTOR[@STEP[-STEP]],..., the last step after the "
                      "first, e.g. 3=4 or 3=4@100-200", rf"(\d+)={_DECIMAL}(?:@(\d+)(?:-(\d+))?)?", _make_straggler)
ZONES = _list_of("ZONE:RANKS,...", "ZONE:RANKS or ZONE:NODESxRANKS,..., e.g. A:4,B:2x2", r"([\w-]+):(?:(\d+)x)?(\d+)",
                 _make_zone)
LINKS = _list_of("LEVEL=RATE[:LATENCY],...", "LEVEL=RATE or LEVEL=RATE:LATENCY,... in bit/s and s, LEVEL one of "
                 f"{', '.join(_LEVELS)}, e.g. inter-zone=100M:0.001",
                 rf"({'|'.join(_LEVELS)})={_DECIMAL}([kMG]?)(?::(.+))?", _make_link)


@dataclass(frozen=True)
class Options(RunOptions):
    """The options of `slurmdl train`; None, () or "" if not given."""

    strategy_config: StrategyConfig = field(default_factory=StrategyConfig)
    steps: int | None = option(None, count("N", 1), "number of training steps", "200")
    epochs: int | None = option(None, count("N", 1), "passes over the data, if --steps is not given", "none")
    batch_size: int = option(32, count("N", 1), "samples per worker and step, mean over the workers")
    model: str = option("mlp:256,128", choice(*MODELS, settings=True), "network, see docs/train.md")
    data: str = option("digits", choice(*DATASETS, settings=True), "data set, see docs/train.md")
    optimizer: str = option("sgd", choice(*OPTIMIZERS), "optimizer of torch.optim")
    lr: float = option(0.05, number("X", 0, math.inf), "learning rate")
    momentum: float = option(0.9, number("X", 0, 1), "momentum of sgd")
    weight_decay: float = option(0.0, number("X", 0, math.inf), "weight decay of the optimizer")
    lr_schedule: str = option("constant", choice(*sorted(LR_SCHEDULES)), "cosine: half a cosine down to 0; "
                              "cosine-restarts: four of them (SGDR); step: a tenth after each third")
    seed: int = option(1, count("N", max_digits=18), "seed of all random numbers: initial parameters, split and "
                       "order of the data, partners")
    dirichlet_alpha: float | None = option(
        None, number("ALPHA", 1e-6, math.inf), "skew of labels, or of sections of a text, over the workers: "
        "parameter of a Dirichlet distribution, e.g. 0.3", "no skew")
    #: (i, k) to test on the i-th of k folds, i from 1
    fold: tuple[int, int] | None = option(None, text("I/K", _parse_fold, "I/K, the I-th of K folds, e.g. 1/5"),
                                          "test on the I-th of K random folds, train on the others",
                                          "the set's own test samples, else a fifth")
    emulate_compute: EmulatedCompute | None = option(  # noqa: RUF009 - returns a field
        None, text("SECONDS[:PARAMETERS]", _parse_emulated_compute),
        "seconds to sleep instead of computing a step, and size of a synthetic network", "0.01 on virtual ranks")
    straggler: tuple[Straggler, ...] = option((), STRAGGLERS, "slow ranks: multiple of --emulate-compute, always, "
                                              "from a step on, or for a while", "none")
    virtual_ranks: int | None = option(None, count("N", 1), "virtual ranks in this process, without MPI", "none")
    device: str = option(
        "auto", text("NAME", lambda text: text if re.fullmatch(r"auto|cpu|cuda(:\d+)?", text) else None,
                     "auto, cpu, cuda or cuda:N"),
        "device of the model: cpu, cuda (a GPU for each rank of a node), cuda:N, or auto, cuda if PyTorch sees a GPU")
    #: name, number of nodes, and ranks per node of each zone
    virtual_zones: tuple[tuple[str, int, int], ...] = option(
        (), ZONES, "zones of virtual ranks, e.g. A:4,B:4, or A:2x4 for 4 ranks on each of 2 nodes", "one zone")
    #: locality level -> link between virtual ranks
    virtual_links: tuple[tuple[str, Link], ...] = option(
        (), LINKS, "links between virtual ranks in bit/s and s, e.g. inter-zone=100M:0.001,intra-zone=1G", "no cost")
    evaluate_every: int = option(0, count("N"), "steps between two evaluations (0: only at the end)")
    metrics: str = option("", text("FILE"), "file for one JSON object per step of the first worker", "none")
    summary: str = option("", text("FILE"), "file for the summary as JSON, written by rank 0", "none")
    log_every: int = option(50, count("N", 1), "steps between two log lines")

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


OPTIONS = (*options_of(StrategyConfig), *options_of(Options))


def parse_train_options(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Options:
    """Parse command line, file (--config), and SLURMDL_TRAIN_* variables, in this order of precedence.

    Raises UsageError if options are unknown, invalid or conflict, InputError if the file has an error.
    """
    parser = TrainParser(prog="slurmdl train", allow_abbrev=False,
                         description="Train a network: one replica per rank, synchronized by a strategy. "
                                     "`slurmdl train export DIR` writes the model of a checkpoint for plain PyTorch.")
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these options, e.g. lr: 0.1")
    add_arguments(parser, OPTIONS, "train: ")
    given = vars(parser.parse_args(argv))
    file = given.pop("config")
    values = {**values_from_environ(environ), **(_read_options_file(file) if file else {}), **given}
    strategy_config = resolve(values, {})
    values = {**TRAINER_PRESETS.get(strategy_config.preset or "", {}), **values}
    options = Options(strategy_config=strategy_config, **{
        entry.field: values[entry.field] for entry in options_of(Options) if entry.field in values})
    _check_conflicts(options)
    return options


def _read_options_file(path: str) -> dict[str, Any]:
    """Read field -> value from a file, whose keys are the names of options.

    A value is text as on the command line, a list, or for a flag `true` or `false`. Raises InputError if the file is
    unreadable or not YAML, or with the line if it has an unknown key or an invalid value.
    """
    import yaml

    options: dict[str, Option] = {entry.name: entry for entry in OPTIONS}
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
        entry, text = options[name], _scalar_text(value_node)
        if entry.field in values:
            raise InputError("given twice", path, line, name)
        if text is None:
            raise InputError("expected one value, or a list of values", path, line, name)
        values[entry.field] = entry.kind.parse(text)
        if values[entry.field] is None:
            raise InputError(entry.invalid_text(text), path, line, name)
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
