"""Data sets in files: CIFAR-10 and CIFAR-100 (binary version), IDX (MNIST), and image folders."""

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

#: channels, height and width of CIFAR images
IMAGE_SHAPE = (3, 32, 32)
#: upper bound of the compression ratio of deflate
MAX_COMPRESSION_RATIO = 1032
#: suffixes of image files
IMAGE_EXTENSIONS = (".png", ".jpg", ".jpeg", ".ppm", ".pgm", ".bmp", ".webp")
#: default height and width to which images of a folder are scaled
DEFAULT_SIDE = 32


def require_dir(name: str, path: str) -> str:
    """The directory of --data NAME:DIR."""
    if not path:
        raise UsageError(f"train: --data {name}: expected {name}:DIR")
    if not os.path.isdir(path):
        raise InputError("not a directory", file=path)
    return path


def read_bytes(path: str, max_bytes: int) -> bytes:
    """Read at most `max_bytes` of a file (-1: all), decompressed if its name ends in .gz.

    Raises
    ------
    InputError : the file cannot be read or decompressed.
    """
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            return bytes(file.read(max_bytes))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"cannot be decompressed: {error}", file=path) from error
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=path) from error


def load_cifar(arguments: str, seed: int) -> LabeledImages:
    """Load `data_batch_*.bin` and `test_batch.bin` (CIFAR-10) or `train.bin` and `test.bin` (CIFAR-100).

    Raises
    ------
    InputError : missing files, or a truncated file, or an invalid label.
    """
    directory = require_dir("cifar", arguments)
    batches = sorted(glob.glob(os.path.join(glob.escape(directory), "data_batch_*.bin")))
    train, test_name, header_bytes, classes = ((batches, "test_batch.bin", 1, 10) if batches
                                               else ([os.path.join(directory, "train.bin")], "test.bin", 2, 100))
    if not batches and not os.path.exists(train[0]):
        raise InputError("neither data_batch_*.bin (CIFAR-10) nor train.bin (CIFAR-100) in it", file=directory)
    test = os.path.join(directory, test_name)
    parts = [read_cifar(path, header_bytes, classes) for path in [*train, *[test] * os.path.exists(test)]]
    labels, images = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return LabeledImages(images, labels, classes, len(parts[-1][0]) if os.path.exists(test) else 0)


def read_cifar(path: str, header_bytes: int, classes: int,
               image_shape: tuple[int, ...] = IMAGE_SHAPE) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """Read labels, shape (count,), and images, shape (count, *image_shape), of a file.

    Parameters
    ----------
    header_bytes : before each image; the last one is its label.

    Raises
    ------
    InputError : the file is empty or ends within an image, or a label is not below `classes`.
    """
    content = read_bytes(path, -1)
    length = header_bytes + math.prod(image_shape)
    if not content or len(content) % length:
        raise InputError(f"{len(content)} bytes; expected a multiple of {length} bytes, one image each", file=path)
    table = np.frombuffer(content, np.uint8).reshape(-1, length)
    labels = table[:, header_bytes - 1].astype(np.int64)
    if labels.max() >= classes:
        invalid = int(np.argmax(labels >= classes))
        raise InputError(f"image {invalid + 1} has label {labels[invalid]}; expected 0 to {classes - 1}", file=path)
    return labels, table[:, header_bytes:].reshape(-1, *image_shape)


def load_idx(arguments: str, seed: int) -> LabeledImages:
    """Load `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, and `t10k-...` if present.

    Each file may be compressed as FILE.gz, and may have a dot instead of the last hyphen.

    Raises
    ------
    InputError : a file is missing, truncated or malformed, or images and labels do not match.
    """
    directory = require_dir("idx", arguments)
    images, labels = _read_idx_pair(directory, "train")
    num_test = 0
    if any(name.startswith("t10k-") for name in os.listdir(directory)):
        test_images, test_labels = _read_idx_pair(directory, "t10k")
        if test_images.shape[1:] != images.shape[1:]:
            raise InputError(f"test images have {test_images.shape[1:]} pixels, training images {images.shape[1:]}",
                             file=directory)
        images, labels = np.concatenate([images, test_images]), np.concatenate([labels, test_labels])
        num_test = len(test_labels)
    return LabeledImages(images[:, None], labels.astype(np.int64), int(labels.max()) + 1, num_test)


def _read_idx_pair(directory: str, split: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    images = read_idx(_find_idx_file(directory, f"{split}-images", 3), 3)
    labels = read_idx(_find_idx_file(directory, f"{split}-labels", 1), 1)
    if len(images) != len(labels) or not len(labels):
        raise InputError(f"{len(images)} images but {len(labels)} labels of {split}", file=directory)
    return images, labels


def _find_idx_file(directory: str, stem: str, dimensions: int) -> str:
    names = [f"{stem}{separator}idx{dimensions}-ubyte{suffix}" for separator in "-." for suffix in ("", ".gz")]
    for name in names:
        if os.path.exists(os.path.join(directory, name)):
            return os.path.join(directory, name)
    raise InputError(f"no {names[0]}[.gz] in it", file=directory)


def read_idx(path: str, dimensions: int) -> npt.NDArray[np.uint8]:
    """Read an array of unsigned bytes.

    Raises
    ------
    InputError : not an IDX file, or one with other dimensions, or its length does not match its header.
    """
    header_bytes = 4 + 4 * dimensions
    header = read_bytes(path, header_bytes)
    magic = bytes([0, 0, 8, dimensions])
    if header[:4] != magic:
        raise InputError(f"starts with {header[:4].hex(' ') or 'nothing'}; expected {magic.hex(' ')}, IDX of bytes "
                         f"in {dimensions} dimensions", file=path)
    if len(header) < header_bytes:
        raise InputError("ends within its header", file=path)
    shape = np.frombuffer(header, ">u4", dimensions, 4).tolist()
    size = math.prod(shape)
    if not size:
        raise InputError(f"its header says {' x '.join(map(str, shape))} bytes; expected 1 or more", file=path)
    max_size = os.path.getsize(path) * (MAX_COMPRESSION_RATIO if path.endswith(".gz") else 1)
    # a header may announce more than fits into memory: check it against the file size before reading
    content = header_bytes + size <= max_size and read_bytes(path, header_bytes + size + 1)
    if not content or len(content) != header_bytes + size:
        raise InputError(f"its header says {' x '.join(map(str, shape))} bytes, it is "
                         f"{'longer' if content and len(content) > header_bytes + size else 'shorter'}", file=path)
    return np.frombuffer(content, np.uint8, size, header_bytes).reshape(shape)


def load_image_folder(arguments: str, seed: int) -> LabeledImages:
    """Load DIR/CLASS/*.png and the like, or DIR/train/CLASS/* and DIR/test/CLASS/*, as RGB of equal size.

    `arguments` are DIR or DIR:SIDE. Classes are numbered in the order of their names.

    Raises
    ------
    InputError : no images, or an unreadable one.
    UnavailableError : Pillow is not installed.
    """
    path, _, side = arguments.rpartition(":")
    if not path or not re.fullmatch("[1-9][0-9]{0,3}", side):
        path, side = arguments, str(DEFAULT_SIDE)
    directory = require_dir("folder", path)
    train, test = os.path.join(directory, "train"), os.path.join(directory, "test")
    is_split = os.path.isdir(train) and os.path.isdir(test)
    names = _class_names(train if is_split else directory)
    images, labels, num_test = [], [], 0
    for split in [train, test] if is_split else [directory]:
        for label, name in enumerate(names):
            paths = _image_files(os.path.join(split, name))
            images += [_read_image(image_path, int(side)) for image_path in paths]
            labels += [label] * len(paths)
            num_test += len(paths) * (split == test)
    if len(names) < 2 or not len(labels) - num_test:
        raise InputError(f"{len(labels)} images in {len(names)} directories; expected two or more directories, one "
                         f"per class, with images ({', '.join(IMAGE_EXTENSIONS)})", file=directory)
    return LabeledImages(np.stack(images), np.array(labels), len(names), num_test)


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
        raise UnavailableError("--data folder: needs the package pillow: pip install 'slurmdl[images]'") from error
    try:
        with Image.open(path) as image:
            if image.width * image.height > (Image.MAX_IMAGE_PIXELS or 0):
                raise InputError(f"{image.width} x {image.height} pixels are too many", file=path)
            return np.asarray(image.convert("RGB").resize((side, side))).transpose(2, 0, 1)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(f"unreadable image: {error}", file=path) from error
