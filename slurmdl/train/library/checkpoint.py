"""Checkpoint files: one file per rank, and a manifest that makes them valid.

    DIR/step-00000500/worker-0.pt, worker-1.pt, ..., manifest.json

Each file is written to a temporary name, synced to disk, and renamed; the manifest, with size and checksum of each
rank file, comes last. Hence a checkpoint with a manifest is complete, whenever a rank or node fails.

Reference: T. S. Pillai et al.: All file systems are not created equal: on the complexity of crafting crash-consistent
applications. OSDI 2014.
"""

from __future__ import annotations

import copy
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

import numpy as np

from slurmdl import files
from slurmdl.errors import TrainError
from slurmdl.train.strategy_config import RunOptions

#: maximum delay until a file written by another rank is visible
VISIBILITY_TIMEOUT_SECONDS = 5.0
_MANIFEST = "manifest.json"
_FORMAT = 5


class CorruptCheckpointError(TrainError):
    """An incomplete or corrupt checkpoint."""


@dataclass(frozen=True)
class Manifest:
    """A complete checkpoint.

    Attributes:
        number: number of the checkpoint; the step, if all ranks make the same steps.
        run_identity: options and signature, by name, that a resuming run must have.
        rank_layout: number of ranks per role, and other properties that determine the owner of each rank file.
        rank_files: name -> size in bytes, and CRC-32.
    """

    number: int
    run_identity: Mapping[str, str]
    rank_layout: Mapping[str, Any]
    rank_files: Mapping[str, Sequence[int]]


class CheckpointDir:
    """Checkpoints of a run, in a directory shared by all ranks; `max_kept` of them are kept, 0 for all."""

    def __init__(self, path: str, max_kept: int = RunOptions.checkpoint_keep) -> None:
        self.path, self._max_kept = path, max_kept
        #: numbers written or verified by this run, the newest last
        self._valid: list[int] = []

    def path_of(self, number: int) -> str:
        """Directory of a checkpoint."""
        return os.path.join(self.path, f"step-{number:08d}")

    def create_probe(self) -> tuple[str, str]:
        """Create the directory and a probe file for other ranks; return its path, or "" and the error."""
        try:
            os.makedirs(self.path, exist_ok=True)
            handle, probe = tempfile.mkstemp(prefix=".seen-", dir=self.path)
            os.close(handle)
        except OSError as error:
            return "", str(error.strerror)
        return probe, ""

    def sees_probe(self, probe: str) -> bool:
        """Whether this rank sees the probe within VISIBILITY_TIMEOUT_SECONDS and may write to the directory."""
        deadline = time.monotonic() + VISIBILITY_TIMEOUT_SECONDS
        while not os.path.exists(probe):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return os.access(self.path, os.W_OK)

    def write_rank_file(self, number: int, name: str, content: Any) -> Sequence[int]:
        """Write the file of a rank, and return its size in bytes and CRC-32; an OSError leaves nothing of it.

        Raises TrainError if a part of the content could not be read back.
        """
        folder = self.path_of(number)
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"{name}.pt")
        written = write_checkpoint_file(path, lambda file: save_state(f"{name}.pt", content, file))
        return written.size_bytes, written.crc32

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest, and remove incomplete and surplus checkpoints; on OSError remove none."""
        folder = self.path_of(manifest.number)
        content = {"format": _FORMAT, **vars(manifest)}
        text = json.dumps({**content, "checksum": _json_crc32(content)}, indent=1).encode()
        write_checkpoint_file(os.path.join(folder, _MANIFEST), lambda file: file.write(text))
        files.fsync_dir(self.path)
        self.mark_verified(manifest.number)
        kept_count = len(self._valid)
        for number in self.list_numbers():
            if number in self._valid:
                continue
            # of an earlier start of the run; a newer one was found to be damaged
            is_complete = number < manifest.number and os.path.exists(os.path.join(self.path_of(number), _MANIFEST))
            if is_complete and (not self._max_kept or kept_count < self._max_kept):
                kept_count += 1
            else:
                self.remove(number)

    def mark_verified(self, number: int) -> None:
        """Note that a checkpoint is complete and the newest."""
        self._valid = [*(valid for valid in self._valid if valid != number), number][-self._max_kept:]

    @property
    def newest_valid(self) -> int | None:
        """Newest checkpoint written or verified by this run."""
        return self._valid[-1] if self._valid else None

    def remove(self, number: int) -> None:
        """Remove an incomplete checkpoint, the manifest first; do nothing if it is known to be valid."""
        if number not in self._valid:
            with suppress(OSError):
                os.unlink(os.path.join(self.path_of(number), _MANIFEST))
            shutil.rmtree(self.path_of(number), ignore_errors=True)

    def list_numbers(self) -> Sequence[int]:
        """All checkpoints, complete or not, the newest first."""
        with suppress(FileNotFoundError):
            matches = [re.fullmatch(r"step-(\d+)", name) for name in os.listdir(self.path)]
            return sorted((int(match[1]) for match in matches if match), reverse=True)
        return []

    def read_manifest(self, number: int) -> Manifest:
        """Read and check a manifest; raise CorruptCheckpointError if it is missing or corrupt."""
        path = os.path.join(self.path_of(number), _MANIFEST)
        try:
            with open(path, "rb") as file:
                content = json.load(file)
            if content.pop("checksum") != _json_crc32(content) or content["format"] != _FORMAT:
                raise ValueError
        except FileNotFoundError as error:
            raise CorruptCheckpointError(f"{self.path_of(number)}: incomplete, without {_MANIFEST}") from error
        except OSError as error:
            raise CorruptCheckpointError(f"{path}: {error.strerror}") from error
        except (ValueError, KeyError, AttributeError) as error:
            raise CorruptCheckpointError(f"{path}: corrupt") from error
        return Manifest(number, content["run_identity"], content["rank_layout"], content["rank_files"])

    def read_rank_file(self, manifest: Manifest, name: str) -> Any:
        """Read a rank file, with tensors on the host; raise CorruptCheckpointError if it is missing or corrupt."""
        import torch

        size_bytes, crc32 = manifest.rank_files[name]
        path = os.path.join(self.path_of(manifest.number), f"{name}.pt")
        try:
            with open(path, "rb") as file:
                data = file.read()
        except OSError as error:
            raise CorruptCheckpointError(f"{path}: {error.strerror}") from error
        if len(data) != size_bytes or zlib.crc32(data) != crc32:
            raise CorruptCheckpointError(f"{path}: corrupt: {len(data)} bytes with CRC {zlib.crc32(data):08x}; the "
                                         f"manifest has {size_bytes} with CRC {crc32:08x}")
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CorruptCheckpointError(f"{path}: {str(error).splitlines()[0]}") from error


def check_loadable(owner: str, state: Any) -> None:
    """Raise TrainError for a state that torch.load(weights_only=True) would reject; `owner` begins the message."""
    import torch

    file = io.BytesIO()
    kind = ""
    try:
        torch.save(_replace_items(state, lambda item: None if type(item) is torch.Tensor else _to_number(item)), file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        kind = found[1] if found else "an object"
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        kind = f"an object that cannot be pickled ({error})"
    if kind:
        for name, value in state.items() if isinstance(state, dict) else ():
            check_loadable(f"{owner}: {name}", value)
        raise TrainError(f"{owner}: its state holds {kind}; "
                         "expected numbers, strings, tensors, and lists, tuples and dicts of them")


def save_state(owner: str, state: Any, file: Any) -> None:
    """Write a state so that torch.load(weights_only=True) reads it, with NumPy scalars as numbers.

    If it cannot be read back, raise TrainError, whose message begins with `owner`.
    """
    import torch

    check_loadable(owner, state)
    torch.save(_replace_items(state, _to_number), file)


def _to_number(item: Any) -> Any:
    return item.item() if isinstance(item, np.generic) else item


def _replace_items(state: Any, replace: Callable[[Any], Any]) -> Any:
    """A copy of nested dicts, lists and tuples, in which `replace` gives each item that is none of them."""
    if isinstance(state, dict):
        copied = copy.copy(state)  # keeps its attributes, e.g. those of Module.state_dict()
        copied.clear()
        copied.update((replace(key), _replace_items(value, replace)) for key, value in state.items())
        return copied
    if type(state) in (list, tuple):
        return type(state)(_replace_items(item, replace) for item in state)
    return replace(state)


class _ChecksumFile:
    """File wrapper with size and CRC-32; `flush` raises errors of earlier writes, whose reason torch.save hides."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size_bytes = self.crc32 = 0
        self._failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            if self._failure is None:
                self._file.write(data)
        except OSError as error:
            self._failure = error
        self.crc32 = zlib.crc32(data, self.crc32)
        self.size_bytes += len(data)
        return len(data)

    def flush(self) -> None:
        if self._failure:
            raise self._failure
        self._file.flush()
        os.fsync(self._file.fileno())


def write_checkpoint_file(path: str, write: Callable[[Any], Any]) -> _ChecksumFile:
    """Replace a file atomically; an OSError has its name and leaves the previous one."""
    temporary = f"{path}.tmp"
    try:
        with suppress(FileNotFoundError):
            os.unlink(temporary)  # of an interrupted attempt
        with open(temporary, "xb") as file:  # "x": follow no link
            written = _ChecksumFile(file)
            write(written)
            written.flush()
        os.replace(temporary, path)
        files.fsync_dir(os.path.dirname(path))
    except TrainError:
        os.unlink(temporary)
        raise
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)
        raise OSError(error.errno, error.strerror, path) from error
    return written


def _json_crc32(value: Any) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
