"""Checkpoints as files: a part from each rank, and a manifest without which the parts are none.

    FOLDER/step-00000500/worker-0.pt, worker-1.pt, ..., manifest.json

Each file is written under another name in its place, brought to the disk, and renamed; the manifest, with size and
checksum of each part, comes last. So whatever ends a rank, or the machine, and whenever: what has a manifest is
whole, and the checkpoints before it are untouched.

References
----------
T. S. Pillai et al.: All file systems are not created equal: on the complexity of crafting crash-consistent
applications. OSDI 2014.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

from slurmdl import files
from slurmdl.errors import TrainError

#: checkpoints that stay
MAX_KEPT = 2
#: seconds for which a rank waits to see what another has written
VISIBILITY_TIMEOUT_SECONDS = 5.0
_MANIFEST = "manifest.json"
_FORMAT = 3


class CorruptCheckpointError(TrainError):
    """A checkpoint, or a part of one, that is half-written or corrupt."""


@dataclass(frozen=True)
class RankFile:
    """What a rank has written: its name in the checkpoint, bytes, and CRC-32 of them."""

    name: str
    size_bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """A whole checkpoint.

    Attributes
    ----------
    number : of the checkpoint: steps made, where all ranks make the same.
    run : what the run is, by name; another run cannot go on from it.
    layout : how many ranks of which role there are, and whatever else decides which part is whose.
    parts : by name.
    """

    number: int
    run_identity: Mapping[str, str]
    rank_layout: Mapping[str, Any]
    rank_files: Mapping[str, RankFile]


class CheckpointDir:
    """The checkpoints of a run, in a folder that all ranks share."""

    def __init__(self, path: str) -> None:
        self.path = path
        #: those known to be whole, the newest last: written or verified by this run
        self._valid: list[int] = []

    def path_of(self, number: int) -> str:
        """The folder of a checkpoint."""
        return os.path.join(self.path, f"step-{number:08d}")

    def create_probe(self) -> tuple[str, str]:
        """Make the folder and a file in it, for other ranks to see; its path, and why that cannot be."""
        try:
            os.makedirs(self.path, exist_ok=True)
            handle, mark = tempfile.mkstemp(prefix=".seen-", dir=self.path)
            os.close(handle)
        except OSError as error:
            return "", str(error.strerror)
        return mark, ""

    def sees_probe(self, probe: str) -> bool:
        """Whether this rank sees such a file and may write beside it; waits where a file system is slow to tell."""
        late = time.monotonic() + VISIBILITY_TIMEOUT_SECONDS
        while not os.path.exists(probe):
            if time.monotonic() > late:
                return False
            time.sleep(0.1)
        return os.access(self.path, os.W_OK)

    def write_rank_file(self, number: int, name: str, content: Any) -> RankFile:
        """Write a rank's part.

        Raises
        ------
        OSError : it cannot be written, as on a full disk; nothing is left of it.
        """
        import torch

        folder = self.path_of(number)
        os.makedirs(folder, exist_ok=True)
        checked = _write_atomic(os.path.join(folder, f"{name}.pt"), lambda file: torch.save(content, file))
        return RankFile(name, checked.size_bytes, checked.crc32)

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest, which makes a checkpoint of the parts, and remove all but the last KEPT checkpoints.

        Raises
        ------
        OSError : it cannot be written; no checkpoint is removed then.
        """
        folder = self.path_of(manifest.number)
        its = {"format": _FORMAT, "number": manifest.number, "run_identity": dict(manifest.run_identity),
               "rank_layout": dict(manifest.rank_layout),
               "rank_files": {part.name: [part.size_bytes, part.crc32] for part in manifest.rank_files.values()}}
        text = json.dumps({**its, "checksum": _json_crc32(its)}, indent=1).encode()
        _write_atomic(os.path.join(folder, _MANIFEST), lambda file: file.write(text))
        files.fsync_dir(self.path)
        self.mark_verified(manifest.number)
        for number in self.list_numbers():
            if number not in self._valid:
                self.remove(number)

    def mark_verified(self, number: int) -> None:
        """This checkpoint is whole, and the newest."""
        self._valid = [*(its for its in self._valid if its != number), number][-MAX_KEPT:]

    @property
    def newest_valid(self) -> int | None:
        """The newest that this run knows to be whole."""
        return self._valid[-1] if self._valid else None

    def remove(self, number: int) -> None:
        """Remove what there is of a checkpoint, unless it is known to be whole; the manifest first."""
        if number not in self._valid:
            with suppress(OSError):
                os.unlink(os.path.join(self.path_of(number), _MANIFEST))
            shutil.rmtree(self.path_of(number), ignore_errors=True)

    def list_numbers(self) -> Sequence[int]:
        """The checkpoints that are there, whole or not, the newest first."""
        with suppress(FileNotFoundError):
            found = [re.fullmatch(r"step-(\d+)", name) for name in os.listdir(self.path)]
            return sorted((int(match[1]) for match in found if match), reverse=True)
        return []

    def read_manifest(self, number: int) -> Manifest:
        """
        Raises
        ------
        Unusable : there is none, or it is corrupt.
        """
        path = os.path.join(self.path_of(number), _MANIFEST)
        try:
            with open(path, "rb") as file:
                its = json.load(file)
            if its.pop("checksum") != _json_crc32(its) or its["format"] != _FORMAT:
                raise ValueError
        except FileNotFoundError as error:
            raise CorruptCheckpointError(f"{self.path_of(number)}: half-written, without {_MANIFEST}") from error
        except OSError as error:
            raise CorruptCheckpointError(f"{path}: {error.strerror}") from error
        except (ValueError, KeyError, AttributeError) as error:
            raise CorruptCheckpointError(f"{path}: corrupt") from error
        return Manifest(number, its["run_identity"], its["rank_layout"],
                        {name: RankFile(name, *rest) for name, rest in its["rank_files"].items()})

    def read_rank_file(self, manifest: Manifest, name: str) -> Any:
        """A part, once its checksum is found to be right; tensors are on the host.

        Raises
        ------
        Unusable : it is not there, or not what was written.
        """
        import torch

        part, path = manifest.rank_files[name], os.path.join(self.path_of(manifest.number), f"{name}.pt")
        try:
            with open(path, "rb") as file:
                data = file.read()
        except OSError as error:
            raise CorruptCheckpointError(f"{path}: {error.strerror}") from error
        if len(data) != part.size_bytes or zlib.crc32(data) != part.crc32:
            raise CorruptCheckpointError(f"{path}: corrupt: {len(data)} bytes of checksum {zlib.crc32(data):08x} where the "
                           f"manifest has {part.size_bytes} of {part.crc32:08x}")
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def check_loadable(name: str, state: Any) -> None:
    """Refuse what could be written, but not read again without running code that it names.

    Raises
    ------
    TrainError
    """
    import torch

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except pickle.UnpicklingError as error:
        kind = re.search(r"GLOBAL (\S+)", str(error))
        raise TrainError(f"register_for_checkpointing({name!r}): its state holds {kind[1] if kind else 'an object'}; valid: numbers, "
                         "words, tensors, and lists, tuples and dicts of them") from error


class _ChecksumFile:
    """A file that counts and sums up what is written, and reports at the end what went wrong on the way.

    torch.save hides the reason where a write fails.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size_bytes = self.crc32 = 0
        self._failure: OSError | None = None

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        try:
            while left and self._failure is None:
                left = left[self._file.write(left):]
        except OSError as error:
            self._failure = error
        self.crc32 = zlib.crc32(data, self.crc32)
        self.size_bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Bring all to the disk."""
        if self._failure:
            raise self._failure
        self._file.flush()
        os.fsync(self._file.fileno())


def _write_atomic(path: str, write: Callable[[Any], Any]) -> _ChecksumFile:
    """Write a file anew, all of it or nothing."""
    there = f"{path}.tmp"
    try:
        with suppress(FileNotFoundError):
            os.unlink(there)  # of an attempt that was broken off
        with open(there, "xb", buffering=0) as file:  # new, so that no link at its place is followed
            checked = _ChecksumFile(file)
            write(checked)
            checked.flush()
        os.replace(there, path)
        files.fsync_dir(os.path.dirname(path))
    except OSError as error:
        with suppress(OSError):
            os.unlink(there)
        raise OSError(error.errno, error.strerror, path) from error
    return checked


def _json_crc32(value: Any) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
