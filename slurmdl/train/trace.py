"""What one rank does when, as a trace that chrome://tracing and Perfetto show."""

from __future__ import annotations

import json
import os
from typing import Any

from slurmdl.errors import TrainError

#: rows of the trace: the training thread, and the communication thread's errands
TRAINING, MESSAGES = 0, 1


class Trace:
    """The trace of one rank: `rank-N.json` in a folder, in the Trace Event Format (complete events, "X").

    Raises
    ------
    TrainError : the folder cannot be made or written to.
    """

    def __init__(self, folder: str, rank: int, place: str) -> None:
        self._path, self._rank = os.path.join(folder, f"rank-{rank}.json"), rank
        self._events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}, {place}"}},
            *({"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}
              for row, name in ((TRAINING, "training"), (MESSAGES, "messages")))]
        try:
            os.makedirs(folder, exist_ok=True)
            self.write()
        except OSError as error:
            raise TrainError(f"trace {self._path}: {error.strerror}") from error

    def add(self, name: str, start: float, end: float, row: int = TRAINING) -> None:
        """Something that went on from `start` to `end`, in s on the rank's clock."""
        self._events.append({"name": name, "ph": "X", "ts": start * 1e6, "dur": (end - start) * 1e6,
                             "pid": self._rank, "tid": row})

    def write(self) -> None:
        """Write the file anew."""
        with open(self._path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": self._events}, file)
