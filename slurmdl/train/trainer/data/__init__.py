"""Data sets. A new one is one file here and one line in DATA."""

from __future__ import annotations

from collections.abc import Callable

from slurmdl.errors import UsageError
from slurmdl.train.trainer.data.dataset import ImageDataset, LabeledImages, split_and_normalize
from slurmdl.train.trainer.data.file_readers import load_cifar, load_idx, load_image_folder
from slurmdl.train.trainer.data.generated import load_digit_images, make_digits_rgb32, make_synthetic_images

__all__ = ["DATASETS", "ImageDataset", "load_dataset"]

#: name -> reader(arguments, seed); `arguments` is what follows the name, "" where nothing does
DATASETS: dict[str, Callable[[str, int], LabeledImages]] = {
    "digits": load_digit_images, "cifar-shaped": make_digits_rgb32, "synthetic": make_synthetic_images, "idx": load_idx, "cifar": load_cifar,
    "folder": load_image_folder}


def load_dataset(spec: str, seed: int, fold: tuple[int, int] |
                 None = None, dirichlet_alpha: float | None = None) -> ImageDataset:
    """The data set that NAME:ARGUMENTS stands for, divided by the seed as `dataset.divide` says.

    Raises
    ------
    UsageError : unknown name, or arguments that the reader does not know.
    InputError : a file that is not what it should be.
    """
    name, _, arguments = spec.partition(":")
    if name not in DATASETS:
        raise UsageError(f"train: --data {spec}: {name!r} is not one of {', '.join(DATASETS)}")
    return split_and_normalize(DATASETS[name](arguments, seed), seed, fold, dirichlet_alpha)
