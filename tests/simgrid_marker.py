"""pytest marker of tests that need SimGrid."""

from __future__ import annotations

import subprocess

import pytest

from slurmdl.simulate.predict import SIMGRID_PYTHON


def _has_simgrid() -> bool:
    try:
        return not subprocess.run([SIMGRID_PYTHON, "-I", "-c", "import simgrid"], capture_output=True,
                                  check=False).returncode
    except OSError:
        return False


needs_simgrid = pytest.mark.skipif(not _has_simgrid(), reason="SimGrid is missing: apt install python3-simgrid")
