"""Work of a GPU beside the computation, on a CUDA stream of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class SideStream:
    """A stream of a GPU; for the CPU, whose work is done at once, nothing.

    Reference: PyTorch documentation, CUDA semantics, CUDA streams.
    """

    def __init__(self, device: Any) -> None:
        import torch

        self._cuda, self._device = torch.cuda, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def use(self) -> Iterator[None]:
        """Context for work that follows all that the current stream has queued so far, and runs beside the rest."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the current stream wait for the work so far."""
        if self._stream is not None:
            self._cuda.current_stream(self._device).wait_stream(self._stream)

    def waiter(self) -> Callable[[], None]:
        """Return a function that waits, on the host, for the work so far."""
        if self._stream is None:
            return lambda: None
        done = self._cuda.Event()
        done.record(self._stream)
        wait: Callable[[], None] = done.synchronize
        return wait
