"""What one rank does when, as a trace that chrome://tracing and Perfetto show."""

from __future__ import annotations

import errno
import json
import os
import threading
from contextlib import suppress
from typing import Any

from slurmdl.errors import TrainError, warn

#: rows of the trace: the training thread, and the communication thread's errands
TRAINING_ROW, COMM_ROW = 0, 1
#: what makes the file a whole JSON document after each event; the next event is written over it
_JSON_END = b"\n]}\n"


class Trace:
    """The trace of one rank: `rank-N.json` in a folder, in the Trace Event Format (complete events, "X").

    Each event is written when it is over, so that a rank that is killed leaves its trace, and no event is held in
    memory. Both threads add events.

    Raises
    ------
    TrainError : the folder cannot be made or written to.
    """

    def __init__(self, trace_dir: str, rank: int, node: str) -> None:
        self._path, self._rank = os.path.join(trace_dir, f"rank-{rank}.json"), rank
        self._lock = threading.Lock()
        about: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}, {node}"}},
            *({"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}
              for row, name in ((TRAINING_ROW, "training"), (COMM_ROW, "communication")))]
        begin = b'{"traceEvents": [\n' + b",\n".join(json.dumps(event).encode() for event in about)
        #: where the next event is written
        self._offset = len(begin)
        try:
            os.makedirs(trace_dir, exist_ok=True)
            self._file: int | None = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.write(self._file, begin + _JSON_END)
        except OSError as error:
            raise TrainError(f"trace {self._path}: {error.strerror}") from error

    def add(self, name: str, start: float, end: float, row: int = TRAINING_ROW) -> None:
        """Something that went on from `start` to `end`, in s on the rank's clock.

        Where it cannot be written, as on a full disk, one line says so, and the training goes on without a trace.
        """
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
                self._close()

    def close(self) -> None:
        """No event follows."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
