"""Trainings of the small language model on virtual ranks: two zones of four nodes, several seeds at a time."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from unittest import mock

import numpy as np

from slurmdl.train.trainer import data_readers

RANKS = 8
#: options of `slurmdl train`: the model, its data and optimizer
TRAINING = ("--model", "gpt:128,2,4", "--data", "text", "--fold", "1/20", "--batch-size", "8", "--optimizer", "adamw",
            "--lr", "0.003")
COMMON = ("--virtual-ranks", str(RANKS), "--virtual-zones", "A:4,B:4", *TRAINING, "--evaluate-every", "16")


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        options: of `slurmdl train`, besides COMMON.
        zone_alpha: Dirichlet parameter of the skew between the two zones; None for the same data in both.
    """

    options: tuple[str, ...]
    zone_alpha: float | None = None


@dataclass(frozen=True)
class Course:
    """Course of a training.

    Attributes:
        losses: evaluated step -> test loss of the averaged model in nats.
        step_s: emulated seconds of a step of the slowest rank, on average.
        inter_zone_bytes: sent by all ranks.
    """

    losses: Mapping[int, float]
    step_s: float
    inter_zone_bytes: float

    def steps_to(self, loss: float) -> float:
        """The first evaluated step with at most this loss; infinity without one."""
        return min((step for step, value in self.losses.items() if value <= loss), default=math.inf)

    def seconds_to(self, loss: float) -> float:
        return self.steps_to(loss) * self.step_s


def train_all(cases: Mapping[str, Case], seeds: Sequence[int]) -> dict[tuple[str, int], Course]:
    """Train each case with each seed; (name, seed) -> course."""
    keys = [*product(cases, seeds)]
    # spawn, because torch's threads do not survive a fork
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        courses = {}
        for key, course in zip(keys, pool.map(_train, [(cases[name], seed) for name, seed in keys]), strict=True):
            courses[key] = course
            print(f"{key[0]}, seed {key[1]}: trained", file=sys.stderr, flush=True)
        return courses


def _train(work: tuple[Case, int]) -> Course:
    from slurmdl.train.trainer.options import parse_train_options
    from slurmdl.train.trainer.trainer import train

    case, seed = work
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with tempfile.TemporaryDirectory() as folder, skewed_zones(case.zone_alpha):
        file = os.path.join(folder, "metrics")
        # any alpha gives each worker samples of its own; `skewed_zones` replaces the partition
        skew = ("--dirichlet-alpha", "1") if case.zone_alpha else ()
        summary = train(parse_train_options([*COMMON, *case.options, *skew, "--seed", str(seed), "--metrics", file],
                                            {}))
        with open(file, encoding="utf-8") as lines:
            records = [json.loads(line) for line in lines]
    assert summary is not None
    return Course({record["step"]: record["test_loss_averaged_model"] for record in records if "test_loss" in record},
                  max(summary["seconds_per_worker"]) / summary["steps"], summary["bytes_sent"]["inter_zone"])


@contextmanager
def skewed_zones(alpha: float | None) -> Iterator[None]:
    """Partition the sections of the text over the two zones, and the samples of a zone evenly over its ranks."""
    original = data_readers.partition_indices

    def partition(labels: data_readers.IntArray, worker_count: int, _: float | None,
                  seed: int) -> list[data_readers.IntArray]:
        zones = original(labels, 2, alpha, seed)
        per_zone = worker_count // 2
        return [np.random.default_rng((seed, zone)).permutation(samples)[rank::per_zone][:len(labels) // worker_count]
                for zone, samples in enumerate(zones) for rank in range(per_zone)]

    with mock.patch.object(data_readers, "partition_indices", partition if alpha else original):
        yield
