"""Files: atomic writes where others may write; trust by owner and mode, checked by processes of several users."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmdl import files
from slurmdl.errors import InputError
from slurmdl.train.library import checkpoint

#: uids that no host uses
OTHER, SITE = 64001, 64002

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be other users")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory that all users may enter and only root may write."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o055)
    (tmp_path / "scores.json").write_text(json.dumps({"nodes": {"n1": {"throughput": 1e9}}}))
    (tmp_path / "scores.json").chmod(0o644)
    return tmp_path


def run_as(user: int, function: Callable[[], object]) -> str:
    """Call a function in a fork of another user; return the text of its result, or of its error."""
    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            result = str(function())
        except (InputError, OSError) as error:
            result = str(error)
        os.write(sender, result.encode())
        os._exit(0)
    os.close(sender)
    with open(receiver) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return text


def read_as(user: int, path: Path, owner: str = "") -> str:
    """Read the file as another user; return "read" or the error."""
    return run_as(user, lambda: files.read_trusted_text(str(path), owner) and "read")


def can_write_as(user: int, path: Path) -> bool:
    return run_as(user, lambda: path.write_text("{}")) == "2"


@as_root
@pytest.mark.parametrize(("owner", "mode", "reader", "trusted_owner", "expected"), [
    (0, 0o644, OTHER, "", "read"), (SITE, 0o644, SITE, "", "read"), (SITE, 0o644, OTHER, "", f"user {SITE} owns it"),
    (SITE, 0o644, OTHER, str(SITE), "read"), (SITE, 0o644, 0, "", f"user {SITE} owns it"),
    (SITE, 0o644, 0, str(SITE), "read"), (SITE, 0o644, OTHER, "no-such-user", f"user {SITE} owns it"),
    *((0, mode, OTHER, "", "others may write") for mode in (0o666, 0o664, 0o646)),
])
def test_trust_in_owner_and_mode(directory: Path, owner: int, mode: int, reader: int, trusted_owner: str,
                                 expected: str) -> None:
    file = directory / "scores.json"
    os.chown(file, owner, OTHER)
    file.chmod(mode)
    result = read_as(reader, file, trusted_owner)
    assert result == expected if expected == "read" else expected in result and str(file) in result
    assert can_write_as(SITE + 1 if mode == 0o646 else OTHER, file) == bool(mode & 0o022)


@as_root
@pytest.mark.parametrize(("mode", "trusted"), [(0o664, False), (0o644, True)])
def test_file_that_an_acl_lets_others_write_is_not_trusted(directory: Path, mode: int, trusted: bool) -> None:
    """The group is root's own one, so that the mode alone is trusted; the bits of the group are the ACL's mask."""
    file = directory / "scores.json"
    nobody = 2**32 - 1
    # tag, permissions and ID of owner, named user, group, mask and others (acl(5))
    entries = [(1, 6, nobody), (2, 6, OTHER), (4, 4, nobody), (16, 6, nobody), (32, 4, nobody)]
    try:
        os.setxattr(file, "system.posix_acl_access",
                    struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries))
    except OSError:
        pytest.skip("a file system without ACLs")
    file.chmod(mode)
    assert (read_as(SITE, file) == "read") is trusted
    assert can_write_as(OTHER, file) is not trusted


@as_root
@pytest.mark.parametrize(("mates_group", "trusted"), [(OTHER, True), (SITE, False)])
def test_private_group_has_no_other_user(directory: Path, mates_group: int, trusted: bool) -> None:
    """Members of a group by their primary group are not in its list of members."""
    (directory / "passwd").write_text(f"root:x:0:0::/:/bin/sh\nsite:x:{SITE}:{SITE}::/:/bin/sh\n"
                                      f"mate:x:{OTHER}:{mates_group}::/:/bin/sh\n")
    (directory / "group").write_text(f"root:x:0:\nsite:x:{SITE}:\nmate:x:{OTHER}:\n")
    file = directory / "scores.json"
    os.chown(file, SITE, SITE)
    file.chmod(0o664)
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c",
         'mount --bind "$1/passwd" /etc/passwd && mount --bind "$1/group" /etc/group && '
         "exec setpriv --reuid=site --regid=site --clear-groups \"$2\" -c "
         '"from slurmdl import files as t; t.read_trusted_text(\'$1/scores.json\')"', "sh", str(directory),
         sys.executable], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode == 0) is trusted, done.stderr
    assert ("others may write it (mode 664)" in done.stderr) is not trusted


@as_root
@pytest.mark.parametrize(("mode", "trusted"), [(0o777, False), (0o1777, True), (0o755, True), (0o775, False)])
def test_file_replaceable_by_others_is_not_trusted(directory: Path, mode: int, trusted: bool) -> None:
    folder = directory / "open"
    folder.mkdir()
    file = folder / "scores.json"
    file.write_text("{}")
    file.chmod(0o644)
    os.chown(folder, 0, OTHER)
    folder.chmod(mode)
    assert (read_as(SITE, file) == "read") is trusted
    # an untrusted directory allows replacement, a trusted one does not
    assert (run_as(OTHER, lambda: file.rename(folder / "old")) != str(folder / "old")) is trusted


@as_root
def test_parent_directories_links_and_open_files_are_checked(directory: Path) -> None:
    folder, forged = directory / "his" / "mine", directory / "forged.json"
    folder.mkdir(parents=True)
    for file in (folder / "scores.json", forged):
        file.write_text("{}")
    for path in (directory / "his", forged):
        os.chown(path, OTHER, OTHER)
    assert f"user {OTHER} owns {directory / 'his'}" in read_as(0, folder / "scores.json")
    (directory / "link.json").symlink_to(forged)
    assert f"user {OTHER} owns it" in read_as(0, directory / "link.json")
    (directory / "other.json").symlink_to(directory / "scores.json")
    os.lchown(directory / "other.json", OTHER, OTHER)
    assert read_as(0, directory / "other.json") == "read"  # the target belongs to root
    with forged.open() as opened:
        os.replace(directory / "scores.json", forged)
        with pytest.raises(InputError, match=f"user {OTHER} owns it"):
            files.read_trusted_text(f"/proc/self/fd/{opened.fileno()}")


@as_root
@pytest.mark.parametrize(("maker", "owner", "trusted"), [
    (0, "", True), (OTHER, "", False), (OTHER, f"x,{OTHER}", True)])
@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_standard_input_is_checked_by_its_owner(directory: Path, kind: str, maker: int, owner: str,
                                                trusted: bool) -> None:
    text = (directory / "scores.json").read_text()
    if kind == "pipe":
        code = "import os; os.setgid({0}); os.setuid({0}); r, w = os.pipe(); os.write(w, {1!r})\n" \
               "print(os.getpid(), r, flush=True); input()"
        creator = subprocess.Popen([sys.executable, "-c", code.format(maker, text.encode())], text=True,
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert creator.stdout is not None
        pid, number = creator.stdout.readline().split()
        stdin = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY)
        creator.communicate("\n")
    else:
        (directory / "input").write_text(text)
        os.chown(directory / "input", maker, maker)
        (directory / "input").chmod(0o644)
        stdin = os.open(directory / "input", os.O_RDONLY)

    def read() -> str:
        os.dup2(stdin, 0)
        sys.stdin = open(0)  # noqa: SIM115
        return str(files.read_trusted_lines("-", owner))

    result = run_as(0, read)
    os.close(stdin)
    assert result == str([text]) if trusted else f"standard input: is ignored: user {OTHER} owns it" in result


def test_unreadable_file_is_rejected_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(files.MAX_TRUSTED_BYTES + 1)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("large", "binary"):
        (tmp_path / name).chmod(0o600)
    for path, message in ((tmp_path, "cannot be read"), (tmp_path / "pipe", "not a regular file"),
                          (tmp_path / "missing", "cannot be read"), (Path("/dev/zero"), "not a regular file"),
                          (tmp_path / "large", "is too large"), (tmp_path / "binary", "UTF-8"), ("a\0b", "NUL")):
        with pytest.raises(InputError, match=message):
            files.read_trusted_text(str(path))


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
