"""Files that are put in their place at once, in folders to which others may write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurmdl import files
from slurmdl.train.library import checkpoint


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_no_file_that_another_has_put_beside_it_is_written_to(tmp_path: Path, link) -> None:
    """A hard link would stay another user's file under the new name."""
    other = tmp_path / "other"
    other.write_text("theirs")
    link(other, tmp_path / f".scores.json.{os.getpid()}")
    link(other, tmp_path / "part.tmp")
    files.write_atomic(str(tmp_path / "scores.json"), "mine")
    checkpoint._write_atomic(str(tmp_path / "part"), lambda file: file.write(b"mine"))
    assert other.read_text() == "theirs"
    for name in ("scores.json", "part"):
        found = tmp_path / name
        assert found.read_text() == "mine"
        assert not found.is_symlink() and not found.samefile(other)


def test_nothing_is_left_of_an_attempt_that_fails(tmp_path: Path) -> None:
    (tmp_path / "scores.json").mkdir()
    with pytest.raises(OSError):
        files.write_atomic(str(tmp_path / "scores.json"), "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["scores.json"]
