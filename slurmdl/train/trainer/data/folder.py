"""Images in a folder for each class."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import InputError, UnavailableError
from slurmdl.train.trainer.data import files
from slurmdl.train.trainer.data.dataset import LabeledImages

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
    where = files.require_dir("folder", path)
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
