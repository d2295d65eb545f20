"""Files in the IDX format of MNIST and its likes.

References
----------
Y. LeCun, C. Cortes, C. Burges: The MNIST database of handwritten digits, section "File formats".
http://yann.lecun.com/exdb/mnist/
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import InputError
from slurmdl.train.trainer.data.dataset import LabeledImages
from slurmdl.train.trainer.data.files import read_bytes, require_dir

#: an unpacked file is at most so many times as long as a packed one (deflate)
MAX_COMPRESSION_RATIO = 1032


def load_idx(arguments: str, seed: int) -> LabeledImages:
    """`train-images-idx3-ubyte` and `train-labels-idx1-ubyte` of a folder, and `t10k-...` where it has them.

    Each may be packed, as FILE.gz. A dot instead of the last hyphen is valid, too.

    Raises
    ------
    InputError : a file is missing, truncated or malformed, or images and labels do not match.
    """
    where = require_dir("idx", arguments)
    images, labels = _read_pair(where, "train")
    test = 0
    if any(name.startswith("t10k-") for name in os.listdir(where)):
        more, theirs = _read_pair(where, "t10k")
        if more.shape[1:] != images.shape[1:]:
            raise InputError(f"the test images have {more.shape[1:]} pixels, those for training {images.shape[1:]}",
                             file=where)
        images, labels, test = np.concatenate([images, more]), np.concatenate([labels, theirs]), len(theirs)
    return LabeledImages(images[:, None], labels.astype(np.int64), int(labels.max()) + 1, test)


def _read_pair(directory: str, part: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    images, labels = read_idx(_find_idx_file(
        directory, f"{part}-images", 3), 3), read_idx(_find_idx_file(directory, f"{part}-labels", 1), 1)
    if len(images) != len(labels) or not len(labels):
        raise InputError(f"{len(images)} images but {len(labels)} labels of {part}", file=directory)
    return images, labels


def _find_idx_file(directory: str, stem: str, dimensions: int) -> str:
    names = [f"{stem}{sign}idx{dimensions}-ubyte{packed}" for sign in "-." for packed in ("", ".gz")]
    for name in names:
        if os.path.exists(os.path.join(directory, name)):
            return os.path.join(directory, name)
    raise InputError(f"holds no {names[0]}[.gz]", file=directory)


def read_idx(path: str, dimensions: int) -> npt.NDArray[np.uint8]:
    """The array of unsigned bytes in a file.

    Raises
    ------
    InputError : it is no such file, has another number of dimensions, or is longer or shorter than its header says.
    """
    head = read_bytes(path, 4 + 4 * dimensions)
    magic = bytes([0, 0, 8, dimensions])
    if head[:4] != magic:
        raise InputError(f"begins with {head[:4].hex(' ') or 'nothing'}; IDX of bytes in {dimensions} dimensions "
                         f"begins with {magic.hex(' ')}", file=path)
    if len(head) < 4 + 4 * dimensions:
        raise InputError("ends within its header", file=path)
    shape = np.frombuffer(head, ">u4", dimensions, 4).tolist()
    size = math.prod(shape)
    if not size:
        raise InputError(f"its header says {' x '.join(map(str, shape))} bytes: nothing", file=path)
    room = os.path.getsize(path) * (MAX_COMPRESSION_RATIO if path.endswith(".gz") else 1)
    # a header may promise more than any memory holds: nothing is read before the file may keep its word
    found = len(head) + size <= room and read_bytes(path, len(head) + size + 1)
    if not found or len(found) != len(head) + size:
        raise InputError(f"its header says {' x '.join(map(str, shape))} bytes, it is "
                         f"{'longer' if found and len(found) > len(head) + size else 'shorter'}", file=path)
    return np.frombuffer(found, np.uint8, size, len(head)).reshape(shape)
