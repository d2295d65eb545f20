"""Data sets. A new one is one file here and one line in DATA."""

from __future__ import annotations

from collections.abc import Callable

from slurmdl.errors import UsageError
from slurmdl.train.trainer.data.cifar import cifar
from slurmdl.train.trainer.data.dataset import Data, Labelled, divide
from slurmdl.train.trainer.data.digits import cifar_shaped, digits
from slurmdl.train.trainer.data.folder import folder
from slurmdl.train.trainer.data.idx import idx
from slurmdl.train.trainer.data.synthetic import synthetic

__all__ = ["DATA", "Data", "read"]

#: name -> reader(arguments, seed); `arguments` is what follows the name, "" where nothing does
DATA: dict[str, Callable[[str, int], Labelled]] = {
    "digits": digits, "cifar-shaped": cifar_shaped, "synthetic": synthetic, "idx": idx, "cifar": cifar,
    "folder": folder}


def read(spec: str, seed: int, fold: tuple[int, int] | None = None, skew: float | None = None) -> Data:
    """The data set that NAME:ARGUMENTS stands for, divided by the seed as `dataset.divide` says.

    Raises
    ------
    UsageError : unknown name, or arguments that the reader does not know.
    InputError : a file that is not what it should be.
    """
    name, _, arguments = spec.partition(":")
    if name not in DATA:
        raise UsageError(f"train: --data {spec}: {name!r} is not one of {', '.join(DATA)}")
    return divide(DATA[name](arguments, seed), seed, fold, skew)
