"""Data sets: readers, errors, partitions; networks: sizes, shapes, initial parameters, errors."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from slurmdl.errors import InputError, UnavailableError, UsageError
from slurmdl.train.trainer.data_readers import LabeledSamples, load_dataset, partition_indices, split_and_normalize
from slurmdl.train.trainer.models import MODELS, TEXT_MODELS, build_model


def test_digits_shape() -> None:
    data = load_dataset("digits", 1)
    assert data.train_x.shape == (1437, 1, 8, 8) and data.train_x.dtype == np.float32
    assert (data.shape, data.classes, len(data.train_y), len(data.test_y)) == ((1, 8, 8), 10, 1437, 360)
    assert np.abs(data.train_x.mean(0)).max() < 1e-4
    varying = data.train_x.std(0) > 0
    assert np.allclose(data.train_x.std(0)[varying], 1, atol=1e-3)
    assert not np.array_equal(data.test_y, load_dataset("digits", 2).test_y)
    assert np.array_equal(data.test_x, load_dataset("digits", 1).test_x)


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


def test_text_is_split_into_bytes_and_next_bytes(tmp_path: Path) -> None:
    file = tmp_path / "a:b.txt"
    file.write_bytes(bytes(range(250)) * 4 + b"end")
    data = load_dataset(f"text:{file}:16", 1)
    assert data.is_text and (data.shape, data.classes) == ((16,), 256)
    assert (len(data.train_x), len(data.test_x)) == (49, 13)  # 62 samples of 16 bytes
    for samples, labels in ((data.train_x, data.train_y), (data.test_x, data.test_y)):
        assert np.array_equal(samples[:, 1:], labels[:, :-1])
    assert data.train_sections is not None and set(data.train_sections) == set(range(10))
    assert len(np.unique([*data.train_x[:, 0], *data.test_x[:, 0]])) == 62
    assert load_dataset(f"text:{file}", 1).shape == (64,)
    help_text = load_dataset("text::32", 1)
    assert help_text.shape == (32,) and help_text.train_x.size > 200_000


def test_text_can_be_skewed_by_section() -> None:
    data = load_dataset("text", 1, dirichlet_alpha=0.1)
    assert data.label_skew(4, 1) > 0.5
    assert load_dataset("text", 1).label_skew(4, 1) == 0


def test_invalid_text_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"a" * 640)
    with pytest.raises(InputError, match="640 bytes; expected at least 641"):
        load_dataset(f"text:{tmp_path}/short", 1)
    with pytest.raises(InputError, match="unreadable text: No such file"):
        load_dataset(f"text:{tmp_path}/missing", 1)
    with pytest.raises(UsageError, match="expected at most 4096"):
        load_dataset("text::9999", 1)


@pytest.mark.parametrize("spec", [
    "synthetic", "synthetic:8", "synthetic:8:1", "synthetic:8x8:2", "synthetic:8:10:5", "synthetic:8:2:x",
    "synthetic:0:2", "synthetic:1000000:10:1000000", "digits:3", "digits-rgb32:3", "mnist", "folder", "folder:"])
def test_data_invalid_spec_raises(spec: str) -> None:
    with pytest.raises(UsageError) as error:
        load_dataset(spec, 1)
    assert spec.partition(":")[0] in str(error.value)


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    for label, name in enumerate(["cat", "dog"]):
        (tmp_path / name).mkdir()
        for count, kind in enumerate(("png", "jpg", "ppm", "pgm", "png")):
            sample = image.new("L" if kind == "pgm" else "RGB", (20, 10 + count))
            sample.paste(200 * label, (0, 0, 20, 10))
            sample.save(tmp_path / name / f"{count}.{kind}")
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
    labeled = LabeledSamples(np.arange(count, dtype=np.float64)[:, None], np.arange(count), count)
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


def test_digits_equal_scikit_learn() -> None:
    from sklearn.datasets import load_digits
    bunch = load_digits()
    data = load_dataset("digits", 1)
    assert np.array_equal(np.bincount(np.concatenate([data.train_y, data.test_y])), np.bincount(bunch.target))
    test_indices = np.random.default_rng(1).permutation(1797)[:360]
    assert np.array_equal(data.test_y, bunch.target[test_indices])


def test_digits_without_scikit_learn_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "sklearn", raising=False)
    with pytest.raises(UnavailableError, match="scikit-learn"):
        load_dataset("digits", 1)


def test_worker_partitions_are_disjoint_and_used_once_per_epoch() -> None:
    data = load_dataset("digits", 1)
    workers, batch = 4, 16
    steps = data.steps_per_epoch(workers, batch)
    images = []
    for worker in range(workers):
        batches = data.batches(worker, workers, batch, 1)
        images += [image.tobytes() for _ in range(steps) for image in next(batches)[0]]
    assert len(images) == workers * batch * steps
    assert len(set(images)) == len(images)


def test_batch_larger_than_partition() -> None:
    with pytest.raises(UsageError, match="only 359 samples"):
        load_dataset("digits", 1).steps_per_epoch(4, 360)


def parameters(module: torch.nn.Module) -> int:
    return sum(tensor.numel() for tensor in module.parameters())


@pytest.mark.parametrize(("spec", "shape", "classes", "count"), [
    ("resnet18", (3, 224, 224), 1000, 11_689_512), ("resnet50", (3, 224, 224), 1000, 25_557_032),
    ("vgg16", (3, 224, 224), 1000, 138_357_544), ("vgg16", (3, 32, 32), 10, 33_638_218),
    ("mlp:256,128", (1, 8, 8), 10, 50_826), ("mlp", (64,), 10, 650),
    ("cnn:16,32", (3, 32, 32), 10, 3 * 9 * 16 + 16 + 16 * 9 * 32 + 32 + 4 * 32 * 10 + 10)])
def test_model_parameter_count(spec: str, shape: tuple[int, ...], classes: int, count: int) -> None:
    with torch.device("meta"):
        assert parameters(build_model(spec, shape, classes, 1)) == count


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (1, 28, 28), (3, 5, 7), (3, 64, 64)])
@pytest.mark.parametrize("spec", ["mlp:16", "cnn:4,8", "resnet18", "transformer:16,1,2"])
def test_model_accepts_any_image_size(spec: str, shape: tuple[int, ...]) -> None:
    module = build_model(spec, shape, 3, 1)
    scores = module(torch.randn(2, *shape))
    assert scores.shape == (2, 3)
    scores.sum().backward()
    assert all(tensor.grad is not None for tensor in module.parameters())


def test_gpt_predicts_from_earlier_tokens_only() -> None:
    module = build_model("gpt:16,2,4", (12,), 256, 1, text=True).eval()
    tokens = torch.randint(256, (3, 12))
    scores = module(tokens)
    assert scores.shape == (3, 256, 12)
    changed = tokens.clone()
    changed[:, 7] += 1
    difference = (module(changed % 256) - scores).abs().amax((0, 1))
    assert torch.all(difference[:7] == 0) and torch.all(difference[7:] > 0)
    scores.sum().backward()
    assert all(tensor.grad is not None for tensor in module.parameters())


@pytest.mark.parametrize("spec, text, fact", [
    ("mlp:8", True, "the data are texts; expected gpt, or no --data text"),
    ("gpt", False, "the data are images; expected mlp, cnn"), ("gpt:10,1,4", True, "a multiple of HEADS")])
def test_model_that_does_not_fit_the_data_is_rejected(spec: str, text: bool, fact: str) -> None:
    with pytest.raises(UsageError, match=fact):
        build_model(spec, (16,), 256, 1, text)


@pytest.mark.parametrize("spec, side", [("resnet50", 8), ("vgg16", 32), ("vgg16", 70)])
def test_large_model_runs(spec: str, side: int) -> None:
    with torch.no_grad():
        assert build_model(spec, (3, side, side), 10, 1).eval()(torch.randn(1, 3, side, side)).shape == (1, 10)


@pytest.mark.parametrize("spec", ["mlp:8", "cnn:4", "resnet18", "transformer:8,2,2"])
def test_model_initial_parameters_depend_on_seed(spec: str) -> None:
    first, same_seed, other_seed = (
        torch.nn.utils.parameters_to_vector(build_model(spec, (1, 8, 8), 10, seed).parameters())
        for seed in (1, 1, 2))
    assert torch.equal(first, same_seed)
    assert not torch.equal(first, other_seed)


def test_transformer_layers_differ_initially() -> None:
    module = build_model("transformer:8,2,2", (1, 8, 8), 10, 1)
    first, second = (layer for layer in module if isinstance(layer, torch.nn.TransformerEncoderLayer))
    assert not torch.equal(first.linear1.weight, second.linear1.weight)


@pytest.mark.parametrize("spec", ["vgg", "mlp:a", "mlp:0", "mlp:16,-2", "mlp:2000000", "mlp:" + 5000 * "9",
                                  "cnn:1,,2", "resnet18:3", "vgg16", "vgg16:2", "transformer:8,2",
                                  "transformer:9,2,2"])
def test_model_invalid_spec_raises(spec: str) -> None:
    with pytest.raises(UsageError) as error:
        build_model(spec, (1, 8, 8), 10, 1)
    assert spec in str(error.value)


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"mlp", *TEXT_MODELS}))
def test_image_model_rejects_flat_features(name: str) -> None:
    with pytest.raises(UsageError, match=f"--model {name}: expected images.*64"):
        build_model(name, (64,), 10, 1)
