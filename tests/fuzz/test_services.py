"""Fuzz the link services for SLURMDL_FUZZ_SECONDS seconds, 3 by default."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SECONDS = int(os.environ.get("SLURMDL_FUZZ_SECONDS", "3"))


def test_services_survive_invalid_peers() -> None:
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("services.py")), str(SECONDS)],
                          capture_output=True, text=True, timeout=SECONDS + 240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    report = json.loads(done.stdout)
    print(done.stdout)
    assert report["connections"] > 50
