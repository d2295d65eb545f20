"""The SPEC.yaml of `slurmdl bench run`, its cells (combinations), and their running order; see docs/bench.md."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

from slurmdl import yaml_input
from slurmdl.bench.frameworks import FRAMEWORKS, load
from slurmdl.errors import InputError, UsageError, sort_by_similarity
from slurmdl.launch.step_command import STEP_STARTERS
from slurmdl.plan import STRATEGIES

PLACEMENTS = ("slurm", "slurmdl")  # sbatch and srun, `slurmdl sbatch` and `slurmdl srun`


@dataclass(frozen=True)
class Cell:
    """One training job of the matrix."""

    framework: str
    strategy: str
    model: str
    nodes: int
    placement: str

    @property
    def name(self) -> str:
        """A readable file name, unique for each cell."""
        words = [self.framework, self.strategy, self.model, str(self.nodes), self.placement]
        plain = re.sub(r"[^A-Za-z0-9.-]+", "_", "-".join(words))
        return f"{plain}-{hashlib.sha256(json.dumps(words).encode()).hexdigest()[:6]}"

    def __str__(self) -> str:
        own = "" if self.strategy == self.framework else f" {self.strategy}"
        return f"{self.framework}{own}, {self.model}, {self.nodes} node{'s' * (self.nodes > 1)}, {self.placement}"


@dataclass(frozen=True)
class Spec:
    """The keys of SPEC.yaml, all optional."""

    frameworks: tuple[str, ...] = ("slurmdl", "ddp")  # names of FRAMEWORKS, and files of other adapters
    strategies: tuple[str, ...] = ("allreduce",)  # of slurmdl; the other frameworks have one each
    models: dict[str, str] = field(default_factory=lambda: {"cnn": "digits"})  # model: data, as in `slurmdl train`
    nodes: tuple[int, ...] = (1, 2)
    placements: tuple[str, ...] = PLACEMENTS  # or one of them
    step_starter: str = "srun"  # or mpirun (Open MPI), if Slurm has no matching PMI
    tasks_per_node: int = 1
    ps: int = 1  # parameter servers of the strategy ps, among the tasks
    batch_size: int = 32  # samples of a worker in a step
    lr: float = 0.05
    emulate_compute: float = 0.0  # seconds that each step sleeps in place of its computation; 0: compute
    warmup_steps: int = 3  # untimed steps before the timed ones
    steps: int = 20
    target_accuracy: float = 0.0  # report when the accuracy reaches this; 0: do not evaluate
    evaluate_every: int = 0  # steps between two evaluations
    repeats: int = 3
    seed: int = 1
    time_limit_minutes: int = 10  # of a job
    sbatch: tuple[str, ...] = ()  # further options of every job, e.g. --partition=short

    def cells(self) -> list[Cell]:
        """All combinations; those with the same model, nodes and placement are adjacent."""
        variants = [(framework, strategy) for framework in self.frameworks
                    for strategy in (self.strategies if framework == "slurmdl" else load(framework).STRATEGIES[:1])]
        return [Cell(framework, strategy, model, nodes, placement)
                for model, nodes, placement, (framework, strategy) in product(
                    self.models, self.nodes, self.placements, variants)]

    def order(self) -> Iterator[tuple[Cell, int]]:
        """Yield all cells once for each repeat, in alternating directions, so that drift affects all cells alike."""
        for repeat in range(self.repeats):
            for cell in self.cells()[::-1 if repeat % 2 else 1]:
                yield cell, repeat


def read_matrix_spec(path: str) -> Spec:
    """Read a spec; InputError if the file is unreadable or not YAML, or has an unknown key or an invalid value."""
    keys = [entry.name for entry in fields(Spec)]
    data = yaml_input.check_keys(yaml_input.load_yaml_file(path) or {}, keys, path, "")
    default = Spec()
    try:
        spec = Spec(**{key: _value(key, value, getattr(default, key)) for key, value in data.items()})
        _check(spec)
    except UsageError as error:
        raise InputError(str(error), path) from error
    return spec


def _value(key: str, value: Any, default: Any) -> Any:
    """Convert a value to the type of the default; a single value becomes a list."""
    if isinstance(default, tuple):
        kind = int if key == "nodes" else str
        values = value if isinstance(value, list) else [value]
        return tuple(_value(key, entry, kind()) for entry in values)
    if isinstance(default, dict):
        models = [value] if isinstance(value, str) else value
        names = dict.fromkeys(models, "digits") \
            if isinstance(models, list) and all(isinstance(model, str) for model in models) else value
        if not isinstance(names, dict) or not all(isinstance(word, str) for pair in names.items() for word in pair):
            raise UsageError(f"{key}: {yaml_input.short_repr(value)} is invalid; expected MODEL: DATA, or a list of "
                             "models")
        return names
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not type(default):
        words = {int: "a whole number", float: "a number", str: "a text"}[type(default)]
        raise UsageError(f"{key}: {yaml_input.short_repr(value)} is invalid; expected {words}")
    return value


def _check(spec: Spec) -> None:
    from slurmdl.train.trainer.data_readers import DATASETS, parse_synthetic_arguments
    from slurmdl.train.trainer.models import MODELS

    def one_of(key: str, given: Sequence[str], valid: Sequence[str]) -> None:
        for word in given:
            if word not in valid:
                raise UsageError(f"{key}: {word!r} is invalid; expected {', '.join(sort_by_similarity(word, valid))}")

    one_of("frameworks", [name for name in spec.frameworks if not name.endswith(".py")], list(FRAMEWORKS))
    one_of("strategies", spec.strategies, STRATEGIES)
    one_of("models", [model.partition(":")[0] for model in spec.models], list(MODELS))
    for model, data in spec.models.items():
        name, _, arguments = data.partition(":")
        one_of(f"models: {model}", [name], list(DATASETS))
        if name == "synthetic":
            parse_synthetic_arguments(arguments)
    one_of("placements", spec.placements, PLACEMENTS)
    one_of("step_starter", [spec.step_starter], STEP_STARTERS)
    for key in ("frameworks", "strategies", "models", "nodes", "placements"):
        given = list(getattr(spec, key))
        if not given or len(set(given)) < len(given):
            raise UsageError(f"{key}: {'nothing is' if not given else 'something is twice'} in the list")
    for key, least in (("nodes", 1), ("tasks_per_node", 1), ("ps", 1), ("batch_size", 1), ("warmup_steps", 1),
                       ("steps", 1), ("repeats", 1), ("time_limit_minutes", 1), ("evaluate_every", 0),
                       ("emulate_compute", 0), ("lr", 0), ("seed", 0)):
        value = min(spec.nodes) if key == "nodes" else getattr(spec, key)
        if value < least:
            raise UsageError(f"{key}: {value} is invalid; expected {least} or more")
    if not 0 <= spec.target_accuracy <= 1 or bool(spec.target_accuracy) != bool(spec.evaluate_every):
        raise UsageError(f"target_accuracy: {spec.target_accuracy} with evaluate_every {spec.evaluate_every} is "
                         "invalid; expected both, target_accuracy as a share of 1, or neither")
