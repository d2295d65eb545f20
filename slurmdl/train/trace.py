"""Traces of one rank's activities for chrome://tracing and Perfetto."""

from __future__ import annotations

import errno
import json
import os
import threading
from contextlib import suppress
from typing import Any

from slurmdl.errors import TrainError, warn

#: rows of the trace, one per thread
TRAINING_ROW, COMM_ROW = 0, 1
#: completes the JSON document after each event; the next event overwrites it
_JSON_END = b"\n]}\n"


class Trace:
    """Trace of one rank: `rank-N.json` in a directory, in the Trace Event Format (complete events, "X"). Thread-safe.

    Each event is written when it ends, so the trace of a killed rank is valid JSON. Raises TrainError if the
    directory cannot be created or written.
    """

    def __init__(self, trace_dir: str, rank: int, node: str) -> None:
        self._path, self._rank = os.path.join(trace_dir, f"rank-{rank}.json"), rank
        self._lock = threading.RLock()
        metadata: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}, {node}"}},
            *({"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}
              for row, name in ((TRAINING_ROW, "training"), (COMM_ROW, "communication")))]
        header = b'{"traceEvents": [\n' + b",\n".join(json.dumps(event).encode() for event in metadata)
        self._offset = len(header)  # of the next event
        try:
            os.makedirs(trace_dir, exist_ok=True)
            self._file: int | None = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.write(self._file, header + _JSON_END)
        except OSError as error:
            raise TrainError(f"trace {self._path}: {error.strerror}") from error

    def add(self, name: str, start: float, end: float, row: int = TRAINING_ROW) -> None:
        """Add an event from `start` to `end`, in s on the rank's clock; on a write error, warn and stop tracing."""
        event = b",\n" + json.dumps({"name": name, "ph": "X", "ts": start * 1e6, "dur": (end - start) * 1e6,
                                     "pid": self._rank, "tid": row}).encode()
        with self._lock:
            if self._file is None:
                return
            try:
                if os.pwrite(self._file, event + _JSON_END, self._offset) < len(event + _JSON_END):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._offset += len(event)
            except OSError as error:
                warn(f"train: trace {self._path}: {error.strerror}; it ends here")
                with suppress(OSError):
                    os.pwrite(self._file, _JSON_END, self._offset)
                    os.ftruncate(self._file, self._offset + len(_JSON_END))
                self.close()

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None
