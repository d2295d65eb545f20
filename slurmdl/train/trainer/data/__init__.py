"""Data sets. A new one is one reader and one line in DATASETS."""

from __future__ import annotations

from collections.abc import Callable

from slurmdl.errors import UsageError
from slurmdl.train.trainer.data.dataset import ImageDataset, LabeledImages, split_and_normalize
from slurmdl.train.trainer.data.file_readers import load_cifar, load_idx, load_image_folder
from slurmdl.train.trainer.data.generated import load_digit_images, make_digits_rgb32, make_synthetic_images

__all__ = ["DATASETS", "ImageDataset", "load_dataset"]

#: name -> reader(arguments, seed); `arguments` is the text after NAME:, or ""
DATASETS: dict[str, Callable[[str, int], LabeledImages]] = {
    "digits": load_digit_images, "digits-rgb32": make_digits_rgb32, "synthetic": make_synthetic_images,
    "idx": load_idx, "cifar": load_cifar, "folder": load_image_folder}


def load_dataset(spec: str, seed: int, fold: tuple[int, int] | None = None,
                 dirichlet_alpha: float | None = None) -> ImageDataset:
    """Load the data set NAME:ARGUMENTS and split it, see `dataset.split_and_normalize`.

    Raises
    ------
    UsageError : unknown name, or invalid arguments.
    InputError : an invalid file.
    """
    name, _, arguments = spec.partition(":")
    if name not in DATASETS:
        raise UsageError(f"train: --data {spec}: {name!r} is not one of {', '.join(DATASETS)}")
    return split_and_normalize(DATASETS[name](arguments, seed), seed, fold, dirichlet_alpha)
