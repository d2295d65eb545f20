"""The binary version of CIFAR-10 and CIFAR-100.

References
----------
A. Krizhevsky: Learning multiple layers of features from tiny images. 2009.
https://www.cs.toronto.edu/~kriz/cifar.html, section "Binary version"
"""

from __future__ import annotations

import glob
import math
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import InputError
from slurmdl.train.trainer.data.dataset import LabeledImages
from slurmdl.train.trainer.data.files import read_bytes, require_dir

#: channels, height and width
IMAGE_SHAPE = (3, 32, 32)


def load_cifar(arguments: str, seed: int) -> LabeledImages:
    """`data_batch_*.bin` and `test_batch.bin` (CIFAR-10), or `train.bin` and `test.bin` (CIFAR-100) of a folder.

    Raises
    ------
    InputError : no such files, or one that is truncated or has a label that cannot be.
    """
    where = require_dir("cifar", arguments)
    batches = sorted(glob.glob(os.path.join(glob.escape(where), "data_batch_*.bin")))
    train, test, head, classes = ((batches, "test_batch.bin", 1, 10) if batches
                                  else ([os.path.join(where, "train.bin")], "test.bin", 2, 100))
    if not batches and not os.path.exists(train[0]):
        raise InputError("holds neither data_batch_*.bin (CIFAR-10) nor train.bin (CIFAR-100)", file=where)
    apart = os.path.join(where, test)
    parts = [read_cifar(path, head, classes) for path in [*train, *[apart] * os.path.exists(apart)]]
    labels, images = (np.concatenate(each) for each in zip(*parts, strict=True))
    return LabeledImages(images, labels, classes, len(parts[-1][0]) if os.path.exists(apart) else 0)


def read_cifar(path: str, header_bytes: int, classes: int,
         image_shape: tuple[int, ...] = IMAGE_SHAPE) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """Labels, shape (count,), and images, shape (count, *image), of a file.

    Parameters
    ----------
    head : bytes before each image, of which the last is its label.

    Raises
    ------
    InputError : the file is empty or does not end with a whole image, or a label is not below `classes`.
    """
    found = read_bytes(path, -1)
    length = header_bytes + math.prod(image_shape)
    if not found or len(found) % length:
        raise InputError(f"has {len(found)} bytes, which are no whole number of images of {length} bytes", file=path)
    table = np.frombuffer(found, np.uint8).reshape(-1, length)
    labels = table[:, header_bytes - 1].astype(np.int64)
    if labels.max() >= classes:
        wrong = int(np.argmax(labels >= classes))
        raise InputError(f"image {wrong + 1} has label {labels[wrong]}; valid are 0 to {classes - 1}", file=path)
    return labels, table[:, header_bytes:].reshape(-1, *image_shape)
