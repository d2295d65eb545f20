"""Atomic writes in directories that other users may write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurmdl import files
from slurmdl.train.library import checkpoint


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_write_atomic_does_not_follow_links_of_others(tmp_path: Path, link) -> None:
    """A hard link would keep the other user's file under the new name."""
    other = tmp_path / "other"
    other.write_text("text of the other user")
    link(other, tmp_path / f".scores.json.{os.getpid()}")
    link(other, tmp_path / "part.tmp")
    files.write_atomic(str(tmp_path / "scores.json"), "mine")
    checkpoint.write_checkpoint_file(str(tmp_path / "part"), lambda file: file.write(b"mine"))
    assert other.read_text() == "text of the other user"
    for name in ("scores.json", "part"):
        written = tmp_path / name
        assert written.read_text() == "mine"
        assert not written.is_symlink() and not written.samefile(other)


def test_failed_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "scores.json").mkdir()
    with pytest.raises(OSError):
        files.write_atomic(str(tmp_path / "scores.json"), "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["scores.json"]
