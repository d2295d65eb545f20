"""Directories of sandboxes that start and end at the same time."""

from __future__ import annotations

import contextlib
import threading

from slurmdl.sandbox import lifecycle


def test_sandbox_starts_while_another_removes_the_empty_parent(tmp_path):
    root = tmp_path / "sandboxes" / "one"
    stop = threading.Event()

    def remove_parent() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                root.parent.rmdir()

    other = threading.Thread(target=remove_parent)
    other.start()
    try:
        for _ in range(500):
            lifecycle._create_root(root)
            root.rmdir()
    finally:
        stop.set()
        other.join()
