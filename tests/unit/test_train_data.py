"""Data sets: what readers find, what they refuse, and how images are dealt out."""

from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from slurmdl.errors import InputError, UsageError
from slurmdl.train.trainer.data import load_dataset
from slurmdl.train.trainer.data.dataset import LabeledImages, split_and_normalize
from slurmdl.train.trainer.data.partition import partition_indices

#: bytes of an image of CIFAR
IMAGE = 3 * 32 * 32


def test_digits_are_images() -> None:
    data = load_dataset("digits", 1)
    assert data.train_x.shape == (1437, 1, 8, 8)
    assert data.shape == (1, 8, 8)
    assert len(data.test_y) == 360


def test_cifar_shaped_is_standardised_by_channel_and_alike_for_every_seed() -> None:
    data = load_dataset("cifar-shaped", 1)
    assert data.train_x.shape == (1437, 3, 32, 32)
    assert data.train_x.dtype == np.float32
    assert np.abs(data.train_x.mean((0, 2, 3))).max() < 1e-3
    assert np.allclose(data.train_x.std((0, 2, 3)), 1, atol=1e-3)
    assert data.train_x.mean(0).std() > 1e-2, "not by the pixel"
    assert not np.array_equal(data.test_y, load_dataset("cifar-shaped", 2).test_y)


@pytest.mark.parametrize(("spec", "shape", "classes", "count"), [
    ("synthetic:3x8x8:4", (3, 8, 8), 4, 2000), ("synthetic:64:10:100", (64,), 10, 100)])
def test_synthetic(spec: str, shape: tuple[int, ...], classes: int, count: int) -> None:
    data = load_dataset(spec, 1)
    assert (data.shape, data.classes) == (shape, classes)
    assert len(data.train_y) + len(data.test_y) == count
    assert set(data.train_y) == set(range(classes))
    assert np.array_equal(data.train_x, load_dataset(spec, 1).train_x)
    assert not np.array_equal(data.train_x, load_dataset(spec, 2).train_x)


@pytest.mark.parametrize("spec", [
    "synthetic", "synthetic:8", "synthetic:8:1", "synthetic:8x8:2", "synthetic:8:10:5", "synthetic:8:2:x",
    "synthetic:0:2", "synthetic:1000000:10:1000000", "digits:3", "cifar-shaped:3", "mnist", "idx", "cifar:"])
def test_wrong_specifications(spec: str) -> None:
    with pytest.raises(UsageError) as raised:
        load_dataset(spec, 1)
    assert spec.partition(":")[0] in str(raised.value)


def idx(path: Path, array: np.ndarray, kind: int = 8) -> None:
    packed = gzip.compress if path.suffix == ".gz" else bytes
    path.write_bytes(packed(bytes([0, 0, kind, array.ndim]) + np.array(array.shape, ">u4").tobytes()
                            + array.astype(np.uint8).tobytes()))


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    random = np.random.default_rng(1)
    idx(tmp_path / "train-images-idx3-ubyte", random.integers(0, 256, (20, 5, 6)))
    idx(tmp_path / "train-labels-idx1-ubyte.gz", np.arange(20) % 4)
    return tmp_path


def test_idx_with_and_without_test_images(mnist: Path) -> None:
    data = load_dataset(f"idx:{mnist}", 1)
    assert (data.train_x.shape, len(data.test_y), data.classes) == ((16, 1, 5, 6), 4, 4)
    idx(mnist / "t10k-images.idx3-ubyte", np.full((3, 5, 6), 7))
    idx(mnist / "t10k-labels.idx1-ubyte", np.array([3, 1, 2]))
    data = load_dataset(f"idx:{mnist}", 1)
    assert data.train_x.shape == (20, 1, 5, 6)
    assert data.test_y.tolist() == [3, 1, 2]
    folded = load_dataset(f"idx:{mnist}", 1, fold=(2, 4))
    assert (len(folded.train_y), len(folded.test_y)) == (17, 6)


def broken(mnist: Path, fault: str) -> None:
    images, labels = mnist / "train-images-idx3-ubyte", mnist / "train-labels-idx1-ubyte.gz"
    whole = images.read_bytes()
    if fault == "nothing":
        idx(images, np.zeros((0, 5, 6)))
    elif fault == "truncated":
        images.write_bytes(whole[:-1])
    elif fault == "longer":
        images.write_bytes(whole + b"x")
    elif fault == "header":
        images.write_bytes(whole[:9])
    elif fault == "empty":
        images.write_bytes(b"")
    elif fault == "type":
        idx(images, np.zeros((20, 5, 6)), kind=13)
    elif fault == "count":
        idx(labels, np.zeros(19))
    elif fault == "gzip":
        labels.write_bytes(labels.read_bytes()[:-9])
    elif fault == "missing":
        images.unlink()
    elif fault == "folder":
        images.unlink()
        images.mkdir()
    elif fault == "test":
        idx(mnist / "t10k-images-idx3-ubyte", np.zeros((3, 6, 6)))
        idx(mnist / "t10k-labels-idx1-ubyte", np.zeros(3))


@pytest.mark.parametrize(("fault", "message"), [
    ("nothing", "0 x 5 x 6 bytes: nothing"),
    ("truncated", "its header says 20 x 5 x 6 bytes, it is shorter"), ("longer", "it is longer"),
    ("header", "ends within its header"), ("empty", "begins with nothing"), ("type", "begins with 00 00 0d 03"),
    ("count", "20 images but 19 labels"), ("gzip", "cannot be unpacked"), ("missing", "holds no train-images"),
    ("folder", "Is a directory"), ("test", "(6, 6) pixels")])
def test_broken_idx(mnist: Path, fault: str, message: str) -> None:
    broken(mnist, fault)
    with pytest.raises(InputError) as raised:
        load_dataset(f"idx:{mnist}", 1)
    assert message in str(raised.value)
    assert str(mnist) in str(raised.value)


@pytest.mark.parametrize("packed", [False, True])
def test_a_header_that_promises_terabytes_costs_no_memory(mnist: Path, packed: bool) -> None:
    (mnist / "train-images-idx3-ubyte").unlink()
    head = bytes([0, 0, 8, 3]) + b"\xff" * 12 + bytes(100)
    name = "train-images-idx3-ubyte" + ".gz" * packed
    (mnist / name).write_bytes(gzip.compress(head) if packed else head)
    tracemalloc.start()
    with pytest.raises(InputError, match="4294967295 x 4294967295 x 4294967295 bytes, it is shorter"):
        load_dataset(f"idx:{mnist}", 1)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_cifar(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    for name, count in (("data_batch_1.bin", 30), ("data_batch_2.bin", 20), ("test_batch.bin", 10)):
        table = random.integers(0, 256, (count, 1 + IMAGE)).astype(np.uint8)
        table[:, 0] %= 10
        (tmp_path / name).write_bytes(table.tobytes())
    data = load_dataset(f"cifar:{tmp_path}", 1)
    assert (data.train_x.shape, data.test_x.shape, data.classes) == ((50, 3, 32, 32), (10, 3, 32, 32), 10)
    assert np.array_equal(data.test_y, table[:, 0])
    channel = table[:, 1:].reshape(-1, 3, 32, 32).astype(np.float64)
    assert np.corrcoef(data.test_x[:, 1].ravel(), channel[:, 1].ravel())[0, 1] > 0.999
    (tmp_path / "data_batch_2.bin").write_bytes(b"\0" * 5000)
    with pytest.raises(InputError, match=r"data_batch_2.bin: has 5000 bytes.* of 3073 bytes"):
        load_dataset(f"cifar:{tmp_path}", 1)
    (tmp_path / "data_batch_2.bin").write_bytes(b"\0" * (1 + IMAGE) + b"\x0b" * (1 + IMAGE))
    with pytest.raises(InputError, match="image 2 has label 11; valid are 0 to 9"):
        load_dataset(f"cifar:{tmp_path}", 1)


def test_cifar_100_has_fine_labels(tmp_path: Path) -> None:
    table = np.zeros((50, 2 + IMAGE), np.uint8)
    table[:, 0], table[:, 1] = 3, np.arange(50) + 50
    (tmp_path / "train.bin").write_bytes(table.tobytes())
    data = load_dataset(f"cifar:{tmp_path}", 1)
    assert data.classes == 100
    assert sorted([*data.train_y, *data.test_y]) == list(range(50, 100))
    with pytest.raises(InputError, match="holds neither"):
        load_dataset(f"cifar:{tmp_path.parent}", 1)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    for number, name in enumerate(["cat", "dog"]):
        (tmp_path / name).mkdir()
        for count, kind in enumerate(("png", "jpg", "ppm", "pgm", "png")):
            shade = image.new("L" if kind == "pgm" else "RGB", (20, 10 + count))
            shade.paste(200 * number, (0, 0, 20, 10))
            shade.save(tmp_path / name / f"{count}.{kind}")
        (tmp_path / name / "notes.txt").write_text("no image")
    return tmp_path


def test_folders(pictures: Path) -> None:
    data = load_dataset(f"folder:{pictures}", 1)
    assert (data.train_x.shape, data.test_x.shape, data.classes) == ((8, 3, 32, 32), (2, 3, 32, 32), 2)
    assert data.train_x[data.train_y == 1].mean() > data.train_x[data.train_y == 0].mean() + 0.5
    assert load_dataset(f"folder:{pictures}:16", 1).shape == (3, 16, 16)
    for part, names in (("train", ("0.png", "1.jpg", "2.ppm")), ("test", ("3.pgm",))):
        for name in ("cat", "dog"):
            (pictures / "own" / part / name).mkdir(parents=True)
            for file in names:
                (pictures / "own" / part / name / file).write_bytes((pictures / name / file).read_bytes())
    data = load_dataset(f"folder:{pictures / 'own'}", 1)
    assert (data.train_y.tolist(), data.test_y.tolist()) == ([0, 0, 0, 1, 1, 1], [0, 1])


def test_broken_folders(pictures: Path) -> None:
    (pictures / "cat" / "0.png").write_bytes((pictures / "cat" / "0.png").read_bytes()[:40])
    with pytest.raises(InputError, match=r"cat/0.png: not an image that Pillow can read"):
        load_dataset(f"folder:{pictures}", 1)
    with pytest.raises(InputError, match="0 images in 0 folders"):
        load_dataset(f"folder:{pictures / 'dog'}", 1)
    with pytest.raises(InputError, match="not a folder"):
        load_dataset(f"folder:{pictures / 'none'}", 1)
    (pictures / "cat" / "0.png").write_bytes(b"P6 99999 99999 255\n")
    with pytest.raises(InputError, match=r"cat/0.png"):
        load_dataset(f"folder:{pictures}", 1)


@pytest.mark.parametrize(("count", "parts"), [(10, 3), (1797, 5), (7, 7)])
def test_folds_hold_every_image_once(count: int, parts: int) -> None:
    found = LabeledImages(np.arange(count, dtype=np.float64)[:, None], np.arange(count), count)
    tests = []
    for part in range(1, parts + 1):
        data = split_and_normalize(found, 3, (part, parts))
        assert sorted([*data.train_y, *data.test_y]) == list(range(count))
        tests += data.test_y.tolist()
        assert abs(len(data.test_y) - count / parts) < 1
    assert sorted(tests) == list(range(count))
    assert np.array_equal(split_and_normalize(found, 3).test_y, split_and_normalize(found, 3, (1, 5)).test_y)


@pytest.mark.parametrize("workers", [1, 3, 8])
@pytest.mark.parametrize("skew", [None, 0.01, 0.3, 100.0])
def test_shares_are_disjoint_and_of_equal_size(workers: int, skew: float | None) -> None:
    labels = np.random.default_rng(1).permutation(np.repeat([0, 1, 2, 4], [500, 60, 300, 140]))
    found = partition_indices(labels, workers, skew, 5)
    assert {len(share) for share in found} == {1000 // workers}
    assert len(np.unique(np.concatenate(found))) == 1000 // workers * workers
    assert all(map(np.array_equal, found, partition_indices(labels, workers, skew, 5)))
    assert skew is None or workers == 1 or not np.array_equal(
        found[0], partition_indices(labels, workers, skew, 6)[0])


def test_the_smaller_alpha_the_fewer_labels_has_a_worker() -> None:
    labels = np.random.default_rng(1).permutation(np.arange(8000) % 10)

    def most(skew: float | None) -> float:
        """The share of its commonest label in a worker's images, mean over the workers."""
        return float(np.mean([np.bincount(labels[share]).max() / len(share)
                     for share in partition_indices(labels, 8, skew, 1)]))
    assert most(0.05) > 0.5 > most(0.3) > 0.25 > most(100) > most(None) > 0.1
