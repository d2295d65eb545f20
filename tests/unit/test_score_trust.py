"""Which files of scores are believed: tried by other users, as processes of theirs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmdl import file_trust
from slurmdl.errors import InputError

#: a user of no machine, and one more
OTHER, SITE = 64001, 64002

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be other users")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory that others may enter, and none but root may write."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o055)
    (tmp_path / "scores.json").write_text(json.dumps({"nodes": {"n1": {"throughput": 1e9}}}))
    (tmp_path / "scores.json").chmod(0o644)
    return tmp_path


def seen_by(user: int, path: Path, owner: str = "") -> str:
    """What a process of another user says of the file: "read", or the error."""
    code = ("import os, sys; from slurmdl.file_trust import read_trusted_text; from slurmdl.errors import InputError\n"
            "os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))\n"
            "try:\n    read_trusted_text(sys.argv[2], sys.argv[3]); print('read')\n"
            "except InputError as error:\n    print(error)")
    done = subprocess.run([sys.executable, "-c", code, str(user), str(path), owner], capture_output=True, text=True,
                          check=True, timeout=60)
    return done.stdout.strip()


def written_by(user: int, path: Path, text: str) -> bool:
    """Whether another user can put a text there."""
    code = ("import os, sys\nos.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))\n"
            "try:\n    open(sys.argv[2], 'w').write(sys.argv[3])\nexcept OSError:\n    sys.exit(1)")
    return subprocess.run([sys.executable, "-c", code, str(user), str(path), text], check=False,
                          timeout=60).returncode == 0


@as_root
def test_root_is_believed_by_everybody(place: Path) -> None:
    assert seen_by(OTHER, place / "scores.json") == "read"
    assert not written_by(OTHER, place / "scores.json", "{}")


@as_root
@pytest.mark.parametrize(("reader", "owner", "believed"), [
    (SITE, "", True), (OTHER, "", False), (OTHER, str(SITE), True), (0, "", False), (0, str(SITE), True),
    (OTHER, "no-such-user", False)])
def test_a_file_of_another_user_is_believed_by_himself_and_where_he_is_named(place: Path, reader: int, owner: str,
                                                                              believed: bool) -> None:
    os.chown(place / "scores.json", SITE, SITE)
    told = seen_by(reader, place / "scores.json", owner)
    assert told == "read" if believed else f"user {SITE} owns it" in told
    assert str(place) in told or believed


@as_root
@pytest.mark.parametrize("mode", [0o666, 0o664, 0o646])
def test_a_file_that_others_may_write_is_not_believed(place: Path, mode: int) -> None:
    os.chown(place / "scores.json", 0, OTHER)
    (place / "scores.json").chmod(mode)
    assert "others may write" in seen_by(OTHER, place / "scores.json")
    assert written_by(SITE if mode == 0o646 else OTHER, place / "scores.json", "{}")


@as_root
@pytest.mark.parametrize(("mode", "believed"), [(0o777, False), (0o1777, True), (0o755, True), (0o775, False)])
def test_nor_one_that_others_may_replace(place: Path, mode: int, believed: bool) -> None:
    folder = place / "open"
    folder.mkdir()
    file = folder / "scores.json"
    file.write_text("{}")
    file.chmod(0o644)
    os.chown(folder, 0, OTHER)
    folder.chmod(mode)
    assert (seen_by(SITE, file) == "read") is believed
    # what is told to be replaceable can be replaced, and the other way round
    code = ("import os, sys; os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))\n"
            "os.rename(sys.argv[2], sys.argv[2] + '.old')")
    moved = subprocess.run([sys.executable, "-c", code, str(OTHER), str(file)], capture_output=True, check=False,
                           timeout=60)
    assert (moved.returncode != 0) is believed


@as_root
def test_a_directory_of_another_user_on_the_way_is_enough(place: Path) -> None:
    folder = place / "his" / "mine"
    folder.mkdir(parents=True)
    (folder / "scores.json").write_text("{}")
    os.chown(place / "his", OTHER, OTHER)
    assert f"user {OTHER} owns {place / 'his'}" in seen_by(0, folder / "scores.json")


@as_root
def test_a_link_is_judged_by_where_it_leads(place: Path) -> None:
    (place / "forged.json").write_text("{}")
    os.chown(place / "forged.json", OTHER, OTHER)
    link = place / "link.json"
    link.symlink_to(place / "forged.json")
    assert f"user {OTHER} owns it" in seen_by(0, link)
    shared = place / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "mine.json").symlink_to(place / "scores.json")
    os.lchown(shared / "mine.json", OTHER, OTHER)
    assert seen_by(0, shared / "mine.json") == "read"  # it is what root wrote


@as_root
def test_a_file_that_was_replaced_after_it_was_opened_is_the_one_that_is_judged(place: Path) -> None:
    forged = place / "forged.json"
    forged.write_text("{}")
    os.chown(forged, OTHER, OTHER)
    opened = os.open(forged, os.O_RDONLY)
    os.replace(place / "scores.json", forged)
    with pytest.raises(InputError, match=f"user {OTHER} owns it"):
        file_trust.read_trusted_text(f"/proc/self/fd/{opened}")
    os.close(opened)


@as_root
@pytest.mark.parametrize(("maker", "owner", "believed"), [
    (0, "", True), (OTHER, "", False), (OTHER, f"x,{OTHER}", True)])
@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_samples_on_standard_input_are_those_of_whoever_made_the_pipe(place: Path, kind: str, maker: int, owner: str,
                                                                      believed: bool) -> None:
    text = (place / "scores.json").read_text()
    if kind == "pipe":
        code = "import os; os.setgid({0}); os.setuid({0}); r, w = os.pipe(); os.write(w, {1!r})\n" \
               "print(os.getpid(), r, flush=True); input()"
        made = subprocess.Popen([sys.executable, "-c", code.format(maker, text.encode())], text=True,
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert made.stdout is not None
        pid, number = made.stdout.readline().split()
        stdin = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY)
        made.communicate("\n")
    else:
        (place / "input").write_text(text)
        os.chown(place / "input", maker, maker)
        (place / "input").chmod(0o644)
        stdin = os.open(place / "input", os.O_RDONLY)
    code = "import sys; from slurmdl import file_trust; print(file_trust.read_trusted_lines('-', sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, owner], stdin=stdin, capture_output=True, text=True,
                          check=False, timeout=60)
    os.close(stdin)
    if believed:
        assert done.stdout == f"{[text]}\n", done.stderr
    else:
        assert f"standard input: is ignored: user {OTHER} owns it" in done.stderr


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, says in ((tmp_path, "cannot be read"), (tmp_path / "pipe", "not a regular file"),
                       (tmp_path / "missing", "cannot be read"), (Path("/dev/zero"), "not a regular file")):
        with pytest.raises(InputError, match=says):
            file_trust.read_trusted_text(str(path))
    with pytest.raises(InputError, match="NUL"):
        file_trust.read_trusted_text("a\0b")


def test_what_is_too_large_or_no_text_is_refused(tmp_path: Path) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(file_trust.MAX_FILE_BYTES + 1)
    large.chmod(0o600)
    with pytest.raises(InputError, match="is larger than"):
        file_trust.read_trusted_text(str(large))
    large.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="UTF-8"):
        file_trust.read_trusted_text(str(large))
