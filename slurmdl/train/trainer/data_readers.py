"""Data sets: scikit-learn's digits, digits drawn as 3 x 32 x 32, synthetic images, image folders, and texts.

Their samples are split into training and test samples, normalized, and partitioned among the workers.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import InputError, UnavailableError, UsageError
from slurmdl.text import pluralize

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LabeledSamples:
    """Samples of a reader.

    Attributes:
        samples: images of shape (count, channels, height, width) or (count, features) and any type; or texts, as
            tokens of shape (count, length).
        labels: shape (count,), of images, or (count, length), of tokens; 0 to classes - 1.
        num_test: number of test samples, at the end; 0 if the set has none.
        normalize_per_pixel: whether to normalize each pixel instead of each channel.
        sections: shape (count,): the part of the text that a sample is from; None for images.
    """

    samples: npt.NDArray[Any]
    labels: IntArray
    classes: int
    num_test: int = 0
    normalize_per_pixel: bool = False
    sections: IntArray | None = None


@dataclass(frozen=True)
class LabeledDataset:
    """Training and test samples with labels.

    Attributes:
        train_x, test_x: shape (count, *shape): images as float32, normalized by the training images; or int64 tokens.
        train_y, test_y: int64 labels, 0 to classes - 1, shape (count,), or of tokens (count, *shape).
        dirichlet_alpha: label skew of the partitions, see `partition_indices`; None for none.
        train_sections: shape (count,): as LabeledSamples.sections, of the training samples.
    """

    train_x: FloatArray | IntArray
    train_y: IntArray
    test_x: FloatArray | IntArray
    test_y: IntArray
    classes: int
    dirichlet_alpha: float | None = None
    train_sections: IntArray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.train_x.shape[1:]

    @property
    def is_text(self) -> bool:
        return self.train_sections is not None

    @property
    def _skewed_labels(self) -> IntArray:
        """What differs between workers if the partitions are skewed: labels of images, sections of a text."""
        return self.train_y if self.train_sections is None else self.train_sections

    def label_skew(self, worker_count: int, seed: int) -> float:
        """Mean total variation distance between a worker's label distribution and the overall one, 0 to below 1.

        0 if samples are assigned round-robin. A text has sections instead of labels.
        """
        if not self.dirichlet_alpha:
            return 0.0
        labels = self._skewed_labels
        partitions = [labels[indices] for indices in self._partitions(worker_count, seed)]
        counts = np.array([np.bincount(part, minlength=int(labels.max()) + 1) for part in partitions])
        overall = counts.sum(0) / counts.sum()
        return float(np.mean(np.abs(counts / counts.sum(1, keepdims=True) - overall).sum(1) / 2))

    def steps_per_epoch(self, worker_count: int, batch_size: int) -> int:
        """Whole batches in a worker's partition; UsageError if it is smaller than one batch."""
        size = len(self.train_y) // worker_count
        if size < batch_size:
            raise UsageError(f"train: --batch-size {batch_size}: each worker has only {pluralize(size, 'sample')} "
                             f"({len(self.train_y)} over {pluralize(worker_count, 'worker')})")
        return size // batch_size

    def batches(self, worker_rank: int, worker_count: int, batch_size: int, seed: int,
                completed_batches: int = 0) -> Iterator[tuple[FloatArray | IntArray, IntArray]]:
        """Yield endless batches of a worker's partition, shuffled in each epoch, after the completed ones.

        All partitions have the same size, so all workers make the same number of steps per epoch.
        """
        steps = self.steps_per_epoch(worker_count, batch_size)
        own = self._partitions(worker_count, seed)[worker_rank]
        random = np.random.default_rng((seed, worker_rank))
        for _ in range(completed_batches // steps):
            random.permutation(own)
        for first in chain([completed_batches % steps], repeat(0)):
            order = random.permutation(own)
            for step in range(first, steps):
                indices = order[step * batch_size:(step + 1) * batch_size]
                yield self.train_x[indices], self.train_y[indices]

    def _partitions(self, worker_count: int, seed: int) -> list[IntArray]:
        return partition_indices(self._skewed_labels, worker_count, self.dirichlet_alpha, seed)


def split_and_normalize(labeled: LabeledSamples, seed: int, fold: tuple[int, int] | None = None,
                        dirichlet_alpha: float | None = None) -> LabeledDataset:
    """Split off the test samples, and normalize images by mean and deviation of the training images.

    `fold` (i, k) tests on the i-th of k random folds of all samples, i from 1; None on the set's own test samples, or
    else on a random fifth.
    """
    count = len(labeled.labels)
    if fold or not labeled.num_test:
        index, folds = fold or (1, 5)
        order = np.random.default_rng(seed).permutation(count)
        # fold sizes differ by one at most, larger folds first
        begin, end = -(-count * np.arange(index - 1, index + 1) // folds)
        train, test = np.delete(order, np.s_[begin:end]), order[begin:end]
    else:
        train, test = np.split(np.arange(count), [count - labeled.num_test])
    samples, labels = labeled.samples, labeled.labels
    if labeled.sections is not None:
        return LabeledDataset(samples[train], labels[train], samples[test], labels[test], labeled.classes,
                              dirichlet_alpha, labeled.sections[train])
    images = samples.astype(np.float32)
    axes = (0,) if labeled.normalize_per_pixel or images.ndim == 2 else (0, 2, 3)
    mean = images[train].mean(axes, keepdims=True)
    deviation = images[train].std(axes, keepdims=True)
    deviation[deviation == 0] = 1  # constant pixels at the border
    images -= mean
    images /= deviation
    return LabeledDataset(images[train], labels[train], images[test], labels[test], labeled.classes, dirichlet_alpha)


def partition_indices(labels: IntArray, worker_count: int, dirichlet_alpha: float | None,
                      seed: int) -> list[IntArray]:
    """Indices of each worker's samples: disjoint partitions of equal size.

    Args:
        dirichlet_alpha: None assigns the samples round-robin. A number alpha draws each worker's label distribution
            from a Dirichlet distribution, with parameter alpha for each label if all are equally frequent; a smaller
            alpha gives a worker fewer labels. If a label is exhausted, the others replace it.

    Reference: T. Hsu, H. Qi, M. Brown: Measuring the effects of non-identical data distribution for federated visual
    classification. 2019. arXiv:1909.06335
    """
    size = len(labels) // worker_count
    if dirichlet_alpha is None:
        return [np.arange(worker, size * worker_count, worker_count) for worker in range(worker_count)]
    random = np.random.default_rng((seed, 1))
    remaining = [random.permutation(np.flatnonzero(labels == label)) for label in range(int(labels.max()) + 1)]
    frequency = np.bincount(labels) / len(labels)
    partitions = []
    for _ in range(worker_count):
        available = np.array([len(indices) for indices in remaining])
        counts = np.zeros(len(remaining), np.int64)
        # a label may have frequency 0; a tiny parameter never draws it
        preference = random.dirichlet(np.maximum(dirichlet_alpha * len(remaining) * frequency, 1e-9))
        while counts.sum() < size:
            weights = np.where(available > counts, np.maximum(preference, 1e-12), 0)
            counts += random.multinomial(size - counts.sum(), weights / weights.sum())
            counts = np.minimum(counts, available)
        partitions.append(np.concatenate([indices[:count] for indices, count in zip(remaining, counts, strict=True)]))
        remaining = [indices[count:] for indices, count in zip(remaining, counts, strict=True)]
    return partitions


#: of `digits-rgb32`: deviation of the background noise, and maximum offset of a digit from the center in pixels
NOISE_STD, MAX_SHIFT = 0.3, 2
#: default number of synthetic images, and most elements of all of them (4 GiB of float32)
DEFAULT_COUNT, MAX_ELEMENTS = 2000, 1 << 30
#: suffixes of image files
IMAGE_EXTENSIONS = (".png", ".jpg", ".jpeg", ".ppm", ".pgm", ".bmp", ".webp")
#: default height and width to which images of a folder are scaled
DEFAULT_SIDE = 32
#: bytes of a sample of text, by default and at most; sections that a text is divided into
DEFAULT_TEXT_LENGTH, MAX_TEXT_LENGTH, TEXT_SECTIONS = 64, 4096, 10


def load_digit_images(arguments: str = "", seed: int = 1) -> LabeledSamples:
    """Handwritten digits, 1,797 images of 8 x 8; UnavailableError if scikit-learn is not installed.

    The file is read directly, because importing scikit-learn takes seconds on every rank.

    Reference: E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits. UCI, 1998. doi:10.24432/C50P49
    """
    _require_no_arguments("digits", arguments)
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise UnavailableError("--data digits: needs the package scikit-learn: pip install 'slurmdl[train]'")
    file = Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    if file.exists():
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    else:
        from sklearn.datasets import load_digits
        bunch = load_digits()
        table = np.column_stack([bunch.data, bunch.target]).astype(np.float32)
    return LabeledSamples(table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1].astype(np.int64), 10,
                         normalize_per_pixel=True)


def make_digits_rgb32(arguments: str = "", seed: int = 1) -> LabeledSamples:
    """The digits as 3 x 32 x 32: at twice the size, in a random color and position, on a noisy background.

    The images are the same for every seed; only their split depends on it.
    """
    _require_no_arguments("digits-rgb32", arguments)
    digits = load_digit_images()
    random = np.random.default_rng(0)
    count = len(digits.labels)
    images = NOISE_STD * random.standard_normal((count, 3, 32, 32)).astype(np.float32)
    enlarged = digits.samples.repeat(2, 2).repeat(2, 3) / 16
    colors = random.uniform(0.3, 1.0, (count, 3, 1, 1)) * random.choice([-1, 1], (count, 1, 1, 1))
    offsets = random.integers(0, 2 * MAX_SHIFT + 1, (count, 2)) + 8 - MAX_SHIFT
    for image, digit, color, (top, left) in zip(images, enlarged, colors, offsets, strict=True):
        image[:, top:top + 16, left:left + 16] += digit * color
    return LabeledSamples(images, digits.labels, 10)


def _require_no_arguments(name: str, arguments: str) -> None:
    if arguments:
        raise UsageError(f"train: --data {name}:{arguments}: {name} takes no arguments")


def make_synthetic_images(arguments: str, seed: int) -> LabeledSamples:
    """A random prototype for each class, plus noise of four times its deviation.

    `arguments` are SHAPE:CLASSES or SHAPE:CLASSES:COUNT, e.g. 3x32x32:10 or 64:10:5000.
    """
    shape, classes, count = parse_synthetic_arguments(arguments)
    random = np.random.default_rng((seed, 2))
    labels = random.permutation(np.arange(count) % classes)
    images = 4 * random.standard_normal((count, *shape), np.float32)
    images += random.standard_normal((classes, *shape), np.float32)[labels]
    return LabeledSamples(images, labels, classes)


def parse_synthetic_arguments(arguments: str) -> tuple[tuple[int, ...], int, int]:
    """Parse image shape, number of classes and number of images; UsageError if they are invalid."""
    sizes, *numbers = arguments.split(":")
    try:
        shape = tuple(int(size) for size in sizes.split("x"))
        classes, count = [int(number) for number in [*numbers, str(DEFAULT_COUNT)]][:2]
        valid = len(numbers) in (1, 2) and len(shape) in (1, 3) and min(shape) > 0 and classes > 1
    except ValueError:
        valid = False
    if not valid:
        raise UsageError(f"train: --data synthetic:{arguments}: expected SHAPE:CLASSES[:COUNT], e.g. "
                         "synthetic:3x32x32:10 or synthetic:64:10:5000")
    if count < classes:
        raise UsageError(f"train: --data synthetic:{arguments}: {count} images for {classes} classes; expected one "
                         "of each class or more")
    if count * math.prod(shape) > MAX_ELEMENTS:
        raise UsageError(f"train: --data synthetic:{arguments}: {count} images of this shape take more than "
                         f"{4 * MAX_ELEMENTS >> 30} GiB")
    return shape, classes, count


def load_image_folder(arguments: str, seed: int) -> LabeledSamples:
    """Load DIR/CLASS/*.png and the like, or DIR/train/CLASS/* and DIR/test/CLASS/*, as RGB of equal size.

    `arguments` are DIR or DIR:SIDE. Classes are numbered in the order of their names. Raises InputError if there are
    no images or an unreadable one, UnavailableError if Pillow is not installed.
    """
    path, _, side = arguments.rpartition(":")
    if not path or not re.fullmatch("[1-9][0-9]{0,3}", side):
        path, side = arguments, str(DEFAULT_SIDE)
    if not path:
        raise UsageError("train: --data folder: expected folder:DIR")
    directory = Path(path)
    if not directory.is_dir():
        raise InputError("not a directory", file=path)
    train, test = directory / "train", directory / "test"
    splits = [train, test] if train.is_dir() and test.is_dir() else [directory]
    names = sorted(entry.name for entry in splits[0].iterdir() if entry.is_dir() and not entry.name.startswith("."))
    images, labels, num_test = [], [], 0
    for split in splits:
        for label, name in enumerate(names):
            folder = split / name
            files = sorted(file for file in (folder.iterdir() if folder.is_dir() else ())
                           if file.name.lower().endswith(IMAGE_EXTENSIONS))
            images += [_read_image(file, int(side)) for file in files]
            labels += [label] * len(files)
            num_test += len(files) * (split == test)
    if len(names) < 2 or not len(labels) - num_test:
        raise InputError(f"{len(labels)} images in {len(names)} directories; expected two or more directories, one "
                         f"per class, with images ({', '.join(IMAGE_EXTENSIONS)})", file=path)
    return LabeledSamples(np.stack(images), np.array(labels), len(names), num_test)


def _read_image(file: Path, side: int) -> npt.NDArray[Any]:
    try:
        from PIL import Image
    except ImportError as error:
        raise UnavailableError("--data folder: needs the package pillow: pip install 'slurmdl[images]'") from error
    try:
        with Image.open(file) as image:
            if image.width * image.height > (Image.MAX_IMAGE_PIXELS or math.inf):
                raise InputError(f"{image.width} x {image.height} pixels; expected at most "
                                 f"{Image.MAX_IMAGE_PIXELS:,}", file=str(file))
            return np.asarray(image.convert("RGB").resize((side, side))).transpose(2, 0, 1)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(f"unreadable image: {error}", file=str(file)) from error


def load_text(arguments: str, seed: int) -> LabeledSamples:
    """Bytes of a text in samples that do not overlap; the label of a byte is the next one.

    `arguments` are FILE, FILE:LENGTH, or :LENGTH; without a file, the text is the help of this Python (pydoc_data,
    0.7 MB of English), which is the same for equal versions of Python. The text is also divided into TEXT_SECTIONS
    parts of equal size.
    """
    path, _, digits = arguments.rpartition(":")
    if not (":" in arguments and re.fullmatch("[1-9][0-9]{0,3}", digits)):
        path, digits = arguments, str(DEFAULT_TEXT_LENGTH)
    length = int(digits)
    if length > MAX_TEXT_LENGTH:
        raise UsageError(f"train: --data text:{arguments}: samples of {length} bytes; expected at most "
                         f"{MAX_TEXT_LENGTH}")
    content = np.frombuffer(_read_file(path) if path else _python_help(), np.uint8).astype(np.int64)
    count = (len(content) - 1) // length
    if count < TEXT_SECTIONS:
        raise InputError(f"{len(content)} bytes; expected at least {TEXT_SECTIONS * length + 1}, for {TEXT_SECTIONS} "
                         f"samples of {length} bytes", file=path)
    samples, labels = (content[start:start + count * length].reshape(count, length) for start in (0, 1))
    return LabeledSamples(samples, labels, 256, sections=np.arange(count) * TEXT_SECTIONS // count)


def _read_file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"unreadable text: {error.strerror}", file=path) from error


def _python_help() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UnavailableError("--data text: this Python has no pydoc_data; expected text:FILE") from error
    return "\n".join(topics[name] for name in sorted(topics)).encode()


#: name -> reader(arguments, seed); `arguments` is the text after NAME:, or ""
DATASETS: dict[str, Callable[[str, int], LabeledSamples]] = {
    "digits": load_digit_images, "digits-rgb32": make_digits_rgb32, "synthetic": make_synthetic_images,
    "folder": load_image_folder, "text": load_text}


def load_dataset(spec: str, seed: int, fold: tuple[int, int] | None = None,
                 dirichlet_alpha: float | None = None) -> LabeledDataset:
    """Load the data set NAME:ARGUMENTS and split it, see `split_and_normalize`.

    Raises UsageError if name or arguments are invalid, InputError if a file is.
    """
    name, _, arguments = spec.partition(":")
    if name not in DATASETS:
        raise UsageError(f"train: --data {spec}: {name!r} is not one of {', '.join(DATASETS)}")
    return split_and_normalize(DATASETS[name](arguments, seed), seed, fold, dirichlet_alpha)
