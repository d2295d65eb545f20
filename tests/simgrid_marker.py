"""Marker of tests that need SimGrid."""

from __future__ import annotations

import pytest

from slurmdl.errors import UnavailableError
from slurmdl.simulate import predict


def _has_simgrid() -> bool:
    try:
        return bool(predict.simgrid_version())
    except UnavailableError:
        return False


needs_simgrid = pytest.mark.skipif(not _has_simgrid(), reason=f"SimGrid is missing: {predict.INSTALL_COMMAND}")
