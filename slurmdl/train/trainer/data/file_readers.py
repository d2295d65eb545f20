"""What the readers of data files share."""

from __future__ import annotations

import glob
import gzip
import math
import os
import re
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import InputError, UnavailableError, UsageError
from slurmdl.train.trainer.data.dataset import LabeledImages


def require_dir(name: str, path: str) -> str:
    """The folder that --data NAME:DIR names."""
    if not path:
        raise UsageError(f"train: --data {name}: a folder is needed: {name}:DIR")
    if not os.path.isdir(path):
        raise InputError("not a folder", file=path)
    return path


def read_bytes(path: str, max_bytes: int) -> bytes:
    """The bytes of a file, unpacked where it is named .gz; of them no more than `most`.

    Raises
    ------
    InputError : it cannot be read or unpacked.
    """
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            return bytes(file.read(max_bytes))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"cannot be unpacked: {error}", file=path) from error
    except OSError as error:
        raise InputError(f"cannot read: {error.strerror}", file=path) from error


# MERGED: The binary version of CIFAR-10 and CIFAR-100.

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


# MERGED: Files in the IDX format of MNIST and its likes.

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


# MERGED: Images in a folder for each class.

#: names of images end so
IMAGE_EXTENSIONS = (".png", ".jpg", ".jpeg", ".ppm", ".pgm", ".bmp", ".webp")

#: height and width to which images are brought, where nothing is said
DEFAULT_SIDE = 32


def load_image_folder(arguments: str, seed: int) -> LabeledImages:
    """DIR/CLASS/*.png and the like, or DIR/train/CLASS/* and DIR/test/CLASS/*; in three colours, of equal size.

    `arguments` are DIR or DIR:SIDE. Classes are counted in the order of their names.

    Raises
    ------
    InputError : no images, or one that cannot be read.
    UnavailableError : Pillow is not installed.
    """
    path, _, side = arguments.rpartition(":")
    if not path or not re.fullmatch("[1-9][0-9]{0,3}", side):
        path, side = arguments, str(DEFAULT_SIDE)
    where = require_dir("folder", path)
    train, test = os.path.join(where, "train"), os.path.join(where, "test")
    apart = os.path.isdir(train) and os.path.isdir(test)
    names = _class_names(train if apart else where)
    images, labels, own = [], [], 0
    for part in [train, test] if apart else [where]:
        for label, name in enumerate(names):
            found = _image_files(os.path.join(part, name))
            images += [_read_image(file, int(side)) for file in found]
            labels += [label] * len(found)
            own += len(found) * (part == test)
    if len(names) < 2 or not len(labels) - own:
        raise InputError(f"{len(labels)} images in {len(names)} folders; expected are two or more folders, one for "
                         f"each class, with images ({', '.join(IMAGE_EXTENSIONS)})", file=where)
    return LabeledImages(np.stack(images), np.array(labels), len(names), own)


def _class_names(directory: str) -> list[str]:
    return sorted(entry.name for entry in os.scandir(directory) if entry.is_dir() and not entry.name.startswith("."))


def _image_files(directory: str) -> list[str]:
    if not os.path.isdir(directory):
        return []
    return sorted(entry.path for entry in os.scandir(directory) if entry.name.lower().endswith(IMAGE_EXTENSIONS))


def _read_image(path: str, side: int) -> npt.NDArray[Any]:
    try:
        from PIL import Image
    except ImportError as error:
        raise UnavailableError("image folders need the package pillow: pip install 'slurmdl[images]'") from error
    try:
        with Image.open(path) as image:
            if image.width * image.height > (Image.MAX_IMAGE_PIXELS or 0):
                raise InputError(f"{image.width} x {image.height} pixels are too many", file=path)
            return np.asarray(image.convert("RGB").resize((side, side))).transpose(2, 0, 1)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(f"not an image that Pillow can read: {error}", file=path) from error
