"""Files of traffic matrices, and messages for malformed files."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from slurmdl.dl_options import DlOptions
from slurmdl.errors import InputError
from slurmdl.launch import traffic_file

EYE = np.array([[0.0, 3], [1, 0]])


def load(path: Path) -> list[list[list[float]]]:
    return [matrix.tolist() for matrix in traffic_file.load_traffic(DlOptions(comm_pattern=str(path))).matrices]


def npz(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def test_npz_arrays_are_sorted_by_name(tmp_path):
    path = npz(tmp_path / "any.name.npz", b=EYE, a=np.array([[0, 2], [5, 0]], np.int16))
    assert load(path) == [[[0, 2], [5, 0]], EYE.tolist()]
    np.savez_compressed(path, b=np.asfortranarray(EYE))
    assert load(path) == [EYE.tolist()]


def test_csv_matrices_are_separated_by_blank_lines(tmp_path):
    path = tmp_path / "matrices"
    path.write_text("\n0, 1e3\r\n2.5,0\n\n  \n0,0\n7,0")
    assert load(path) == [[[0, 1000], [2.5, 0]], [[0, 0], [7, 0]]]


def test_pattern_name_has_precedence_over_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ring").write_text("0,1\n1,0\n")
    assert traffic_file.load_traffic(DlOptions(comm_pattern="ring")).matrices == ()
    assert traffic_file.load_traffic(DlOptions()).matrices == ()
    assert len(traffic_file.load_traffic(DlOptions(comm_pattern="./ring")).matrices) == 1


def header(shape: str) -> bytes:
    """A .npy file with this shape in its header and little data."""
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + b"\0" * 16


def archive(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return path


def pickled() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([[print, None], [None, None]], object), allow_pickle=True)
    return buffer.getvalue()


BAD = {
    "empty": (lambda p: p.write_text(""), "holds no matrix"),
    "blank": (lambda p: p.write_text("\n \n"), "holds no matrix"),
    "not square": (lambda p: p.write_text("1,2\n"), r"matrix 1 is not square \(1 x 2\)"),
    "ragged": (lambda p: p.write_text("0,2\n1\n"), ":2: 1 numbers, the first row of the matrix has 2"),
    "words": (lambda p: p.write_text("0,2\nx,0\n"), ":2: 'x,0': is not a row of numbers"),
    "binary": (lambda p: p.write_bytes(b"\xff\xfe\0\1"), "is not a row of numbers"),
    "nan": (lambda p: p.write_text("0,1\nnan,0\n"), r"entry \[1, 0\] is nan; expected bytes, 0 or more"),
    "infinite": (lambda p: p.write_text("0,1e999\n1,0\n"), r"entry \[0, 1\] is inf"),
    "negative": (lambda p: p.write_text("0,-1\n1,0\n"), r"entry \[0, 1\] is -1"),
    "two sizes": (lambda p: p.write_text("0,1\n1,0\n\n0\n"), "matrix 2 is 1 x 1, the first one 2 x 2"),
    "no traffic": (lambda p: p.write_text("0,0\n0,0\n\n5,0\n0,6\n"),
                   "holds no traffic between different ranks: all entries are 0"),
    "vector": (lambda p: npz(p, a=np.zeros(4)), r"a has the shape \(4,\)"),
    "no numbers": (lambda p: npz(p, a=np.array([["a"]])), "a holds <U1, not numbers"),
    "complex": (lambda p: npz(p, a=np.zeros((2, 2), complex)), "a holds complex128, not numbers"),
    "pickle": (lambda p: archive(p, a=pickled()), "a holds object, not numbers"),
    "no arrays": (lambda p: archive(p), "holds no matrix"),
    "no npy": (lambda p: archive(p, a=b"text"), "is not .npz"),
    "cut off": (lambda p: archive(p, a=header("(9, 9)")), "is not .npz"),
    "too large": (lambda p: archive(p, a=header("(99999, 99999)")), "holds more than 268435456 bytes"),
    "broken": (lambda p: p.write_bytes(npz(p, a=EYE).read_bytes().replace(b"\0\x08@", b"\1\x08@")), "is not .npz"),
    "missing": (lambda p: None, "cannot be read .*; expected with allreduce: ring, hierarchical, .*or a file"),
    "directory": (lambda p: p.mkdir(), "is not a regular file"),
    "pipe": (lambda p: os.mkfifo(p), "is not a regular file"),
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_file_is_an_input_error(name, tmp_path):
    path = tmp_path / "traffic.npz"
    make, message = BAD[name]
    make(path)
    with pytest.raises(InputError, match=message) as error:
        load(path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


def test_text_file_above_the_limit_is_rejected(tmp_path, monkeypatch):
    path = tmp_path / "matrix.csv"
    path.write_text("0,1\n1,0\n")
    monkeypatch.setattr(traffic_file, "MAX_TRAFFIC_BYTES", 7)
    with pytest.raises(InputError, match="has 8 bytes; expected at most 7"):
        load(path)


def test_damaged_archives_are_input_errors(tmp_path):
    """An archive with any changed bytes is read, or rejected in one line."""
    path = tmp_path / "damaged.npz"
    generator = np.random.default_rng(1)
    rejected = 0
    for number in range(240):
        (np.savez if number % 2 else np.savez_compressed)(path, a=EYE, b=np.ones((2, 2), np.float32))
        content = bytearray(path.read_bytes())
        for position in generator.integers(0, len(content), 1 + number % 4):
            content[position] = generator.integers(0, 256)
        path.write_bytes(content)
        try:
            assert {np.shape(matrix) for matrix in load(path)} <= {(2, 2), (1, 1)}
        except InputError as error:
            rejected += 1
            assert "\n" not in str(error)
    assert 40 < rejected < 240
