"""Made-up images of any shape."""

from __future__ import annotations

import math

import numpy as np

from slurmdl.errors import UsageError
from slurmdl.train.trainer.data.dataset import LabeledImages

#: images where their number is not said, and most elements of all of them (4 GiB of float32)
DEFAULT_COUNT, MAX_ELEMENTS = 2000, 1 << 30


def make_synthetic_images(arguments: str, seed: int) -> LabeledImages:
    """A random prototype for each class, and noise of four times its size on every image.

    `arguments` are SHAPE:CLASSES or SHAPE:CLASSES:COUNT, e.g. 3x32x32:10 or 64:10:5000.
    """
    shape, classes, count = parse_synthetic_arguments(arguments)
    random = np.random.default_rng((seed, 2))
    labels = random.permutation(np.arange(count) % classes)
    images = 4 * random.standard_normal((count, *shape), np.float32)
    images += random.standard_normal((classes, *shape), np.float32)[labels]
    return LabeledImages(images, labels, classes)


def parse_synthetic_arguments(arguments: str) -> tuple[tuple[int, ...], int, int]:
    """Shape of an image, number of classes and of images; UsageError where there can be no such data."""
    sizes, *numbers = arguments.split(":")
    try:
        shape = tuple(int(size) for size in sizes.split("x"))
        classes, count = [int(number) for number in [*numbers, str(DEFAULT_COUNT)]][:2]
        valid = len(numbers) in (1, 2) and len(shape) in (1, 3) and min(shape) > 0 and classes > 1
    except ValueError:
        valid = False
    if not valid:
        raise UsageError(f"train: --data synthetic:{arguments}: SHAPE:CLASSES[:COUNT] expected, e.g. "
                         "synthetic:3x32x32:10 or synthetic:64:10:5000")
    if count < classes:
        raise UsageError(f"train: --data synthetic:{arguments}: {count} images for {classes} classes; valid: one of "
                         "each class, or more")
    if count * math.prod(shape) > MAX_ELEMENTS:
        raise UsageError(f"train: --data synthetic:{arguments}: {count} images of this shape take more than "
                         f"{4 * MAX_ELEMENTS >> 30} GiB")
    return shape, classes, count
