"""Data sets: readers, errors of invalid files, and partitions."""

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


def test_digits_shape() -> None:
    data = load_dataset("digits", 1)
    assert data.train_x.shape == (1437, 1, 8, 8)
    assert data.shape == (1, 8, 8)
    assert len(data.test_y) == 360


def test_digits_rgb32_is_normalized_per_channel() -> None:
    data = load_dataset("digits-rgb32", 1)
    assert data.train_x.shape == (1437, 3, 32, 32)
    assert data.train_x.dtype == np.float32
    assert np.abs(data.train_x.mean((0, 2, 3))).max() < 1e-3
    assert np.allclose(data.train_x.std((0, 2, 3)), 1, atol=1e-3)
    assert data.train_x.mean(0).std() > 1e-2, "normalized per pixel"
    assert not np.array_equal(data.test_y, load_dataset("digits-rgb32", 2).test_y)


@pytest.mark.parametrize(("spec", "shape", "classes", "count"), [
    ("synthetic:3x8x8:4", (3, 8, 8), 4, 2000), ("synthetic:64:10:100", (64,), 10, 100)])
def test_synthetic_is_reproducible(spec: str, shape: tuple[int, ...], classes: int, count: int) -> None:
    data = load_dataset(spec, 1)
    assert (data.shape, data.classes) == (shape, classes)
    assert len(data.train_y) + len(data.test_y) == count
    assert set(data.train_y) == set(range(classes))
    assert np.array_equal(data.train_x, load_dataset(spec, 1).train_x)
    assert not np.array_equal(data.train_x, load_dataset(spec, 2).train_x)


@pytest.mark.parametrize("spec", [
    "synthetic", "synthetic:8", "synthetic:8:1", "synthetic:8x8:2", "synthetic:8:10:5", "synthetic:8:2:x",
    "synthetic:0:2", "synthetic:1000000:10:1000000", "digits:3", "digits-rgb32:3", "mnist", "idx", "cifar:"])
def test_data_invalid_spec_raises(spec: str) -> None:
    with pytest.raises(UsageError) as raised:
        load_dataset(spec, 1)
    assert spec.partition(":")[0] in str(raised.value)


def write_idx(path: Path, array: np.ndarray, type_code: int = 8) -> None:
    compress = gzip.compress if path.suffix == ".gz" else bytes
    path.write_bytes(compress(bytes([0, 0, type_code, array.ndim]) + np.array(array.shape, ">u4").tobytes()
                            + array.astype(np.uint8).tobytes()))


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    random = np.random.default_rng(1)
    write_idx(tmp_path / "train-images-idx3-ubyte", random.integers(0, 256, (20, 5, 6)))
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", np.arange(20) % 4)
    return tmp_path


def test_idx_with_and_without_test_images(mnist: Path) -> None:
    data = load_dataset(f"idx:{mnist}", 1)
    assert (data.train_x.shape, len(data.test_y), data.classes) == ((16, 1, 5, 6), 4, 4)
    write_idx(mnist / "t10k-images.idx3-ubyte", np.full((3, 5, 6), 7))
    write_idx(mnist / "t10k-labels.idx1-ubyte", np.array([3, 1, 2]))
    data = load_dataset(f"idx:{mnist}", 1)
    assert data.train_x.shape == (20, 1, 5, 6)
    assert data.test_y.tolist() == [3, 1, 2]
    folded = load_dataset(f"idx:{mnist}", 1, fold=(2, 4))
    assert (len(folded.train_y), len(folded.test_y)) == (17, 6)


def corrupt(mnist: Path, fault: str) -> None:
    images, labels = mnist / "train-images-idx3-ubyte", mnist / "train-labels-idx1-ubyte.gz"
    content = images.read_bytes()
    if fault == "nothing":
        write_idx(images, np.zeros((0, 5, 6)))
    elif fault == "truncated":
        images.write_bytes(content[:-1])
    elif fault == "longer":
        images.write_bytes(content + b"x")
    elif fault == "header":
        images.write_bytes(content[:9])
    elif fault == "empty":
        images.write_bytes(b"")
    elif fault == "type":
        write_idx(images, np.zeros((20, 5, 6)), type_code=13)
    elif fault == "count":
        write_idx(labels, np.zeros(19))
    elif fault == "gzip":
        labels.write_bytes(labels.read_bytes()[:-9])
    elif fault == "missing":
        images.unlink()
    elif fault == "folder":
        images.unlink()
        images.mkdir()
    elif fault == "test":
        write_idx(mnist / "t10k-images-idx3-ubyte", np.zeros((3, 6, 6)))
        write_idx(mnist / "t10k-labels-idx1-ubyte", np.zeros(3))


@pytest.mark.parametrize(("fault", "message"), [
    ("nothing", "0 x 5 x 6 bytes"),
    ("truncated", "its header says 20 x 5 x 6 bytes, it is shorter"), ("longer", "it is longer"),
    ("header", "ends within its header"), ("empty", "starts with nothing"), ("type", "starts with 00 00 0d 03"),
    ("count", "20 images but 19 labels"), ("gzip", "cannot be decompressed"), ("missing", "no train-images"),
    ("folder", "Is a directory"), ("test", "(6, 6) pixels")])
def test_idx_invalid_file_raises(mnist: Path, fault: str, message: str) -> None:
    corrupt(mnist, fault)
    with pytest.raises(InputError) as raised:
        load_dataset(f"idx:{mnist}", 1)
    assert message in str(raised.value)
    assert str(mnist) in str(raised.value)


@pytest.mark.parametrize("compressed", [False, True])
def test_idx_header_of_terabytes_allocates_no_memory(mnist: Path, compressed: bool) -> None:
    (mnist / "train-images-idx3-ubyte").unlink()
    head = bytes([0, 0, 8, 3]) + b"\xff" * 12 + bytes(100)
    name = "train-images-idx3-ubyte" + ".gz" * compressed
    (mnist / name).write_bytes(gzip.compress(head) if compressed else head)
    tracemalloc.start()
    with pytest.raises(InputError, match="4294967295 x 4294967295 x 4294967295 bytes, it is shorter"):
        load_dataset(f"idx:{mnist}", 1)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_cifar_10_reads_images_and_rejects_invalid_files(tmp_path: Path) -> None:
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
    with pytest.raises(InputError, match=r"data_batch_2.bin: 5000 bytes.* of 3073 bytes"):
        load_dataset(f"cifar:{tmp_path}", 1)
    (tmp_path / "data_batch_2.bin").write_bytes(b"\0" * (1 + IMAGE) + b"\x0b" * (1 + IMAGE))
    with pytest.raises(InputError, match=r"image 2 has label 11.*0 to 9"):
        load_dataset(f"cifar:{tmp_path}", 1)


def test_cifar_100_uses_fine_labels(tmp_path: Path) -> None:
    table = np.zeros((50, 2 + IMAGE), np.uint8)
    table[:, 0], table[:, 1] = 3, np.arange(50) + 50
    (tmp_path / "train.bin").write_bytes(table.tobytes())
    data = load_dataset(f"cifar:{tmp_path}", 1)
    assert data.classes == 100
    assert sorted([*data.train_y, *data.test_y]) == list(range(50, 100))
    with pytest.raises(InputError, match=r"data_batch_\*.bin.*train.bin"):
        load_dataset(f"cifar:{tmp_path.parent}", 1)


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    for label, name in enumerate(["cat", "dog"]):
        (tmp_path / name).mkdir()
        for count, kind in enumerate(("png", "jpg", "ppm", "pgm", "png")):
            picture = image.new("L" if kind == "pgm" else "RGB", (20, 10 + count))
            picture.paste(200 * label, (0, 0, 20, 10))
            picture.save(tmp_path / name / f"{count}.{kind}")
        (tmp_path / name / "notes.txt").write_text("no image")
    return tmp_path


def test_image_folder_with_and_without_split(image_folder: Path) -> None:
    data = load_dataset(f"folder:{image_folder}", 1)
    assert (data.train_x.shape, data.test_x.shape, data.classes) == ((8, 3, 32, 32), (2, 3, 32, 32), 2)
    assert data.train_x[data.train_y == 1].mean() > data.train_x[data.train_y == 0].mean() + 0.5
    assert load_dataset(f"folder:{image_folder}:16", 1).shape == (3, 16, 16)
    for part, names in (("train", ("0.png", "1.jpg", "2.ppm")), ("test", ("3.pgm",))):
        for name in ("cat", "dog"):
            (image_folder / "own" / part / name).mkdir(parents=True)
            for file in names:
                (image_folder / "own" / part / name / file).write_bytes((image_folder / name / file).read_bytes())
    data = load_dataset(f"folder:{image_folder / 'own'}", 1)
    assert (data.train_y.tolist(), data.test_y.tolist()) == ([0, 0, 0, 1, 1, 1], [0, 1])


def test_image_folder_invalid_raises(image_folder: Path) -> None:
    (image_folder / "cat" / "0.png").write_bytes((image_folder / "cat" / "0.png").read_bytes()[:40])
    with pytest.raises(InputError, match=r"cat/0.png: unreadable image"):
        load_dataset(f"folder:{image_folder}", 1)
    with pytest.raises(InputError, match="0 images in 0 directories"):
        load_dataset(f"folder:{image_folder / 'dog'}", 1)
    with pytest.raises(InputError, match="not a directory"):
        load_dataset(f"folder:{image_folder / 'none'}", 1)
    (image_folder / "cat" / "0.png").write_bytes(b"P6 99999 99999 255\n")
    with pytest.raises(InputError, match=r"cat/0.png"):
        load_dataset(f"folder:{image_folder}", 1)


@pytest.mark.parametrize(("count", "parts"), [(10, 3), (1797, 5), (7, 7)])
def test_folds_partition_the_images(count: int, parts: int) -> None:
    labeled = LabeledImages(np.arange(count, dtype=np.float64)[:, None], np.arange(count), count)
    tests = []
    for part in range(1, parts + 1):
        data = split_and_normalize(labeled, 3, (part, parts))
        assert sorted([*data.train_y, *data.test_y]) == list(range(count))
        tests += data.test_y.tolist()
        assert abs(len(data.test_y) - count / parts) < 1
    assert sorted(tests) == list(range(count))
    assert np.array_equal(split_and_normalize(labeled, 3).test_y, split_and_normalize(labeled, 3, (1, 5)).test_y)


@pytest.mark.parametrize("workers", [1, 3, 8])
@pytest.mark.parametrize("alpha", [None, 0.01, 0.3, 100.0])
def test_partitions_are_disjoint_and_of_equal_size(workers: int, alpha: float | None) -> None:
    labels = np.random.default_rng(1).permutation(np.repeat([0, 1, 2, 4], [500, 60, 300, 140]))
    partitions = partition_indices(labels, workers, alpha, 5)
    assert {len(indices) for indices in partitions} == {1000 // workers}
    assert len(np.unique(np.concatenate(partitions))) == 1000 // workers * workers
    assert all(map(np.array_equal, partitions, partition_indices(labels, workers, alpha, 5)))
    assert alpha is None or workers == 1 or not np.array_equal(
        partitions[0], partition_indices(labels, workers, alpha, 6)[0])


def test_partitions_smaller_alpha_gives_fewer_labels() -> None:
    labels = np.random.default_rng(1).permutation(np.arange(8000) % 10)

    def largest_share(alpha: float | None) -> float:
        """Share of a worker's most frequent label, mean over the workers."""
        return float(np.mean([np.bincount(labels[indices]).max() / len(indices)
                              for indices in partition_indices(labels, 8, alpha, 1)]))

    assert largest_share(0.05) > 0.5 > largest_share(0.3) > 0.25 > largest_share(100) > largest_share(None) > 0.1
