"""The environment that `slurmdl sbatch` and `slurmdl srun` pass on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("command", ["sbatch", "srun"])
@pytest.mark.parametrize("variable", [{}, {"LC_CTYPE": "C"}, {"LC_CTYPE": "C.UTF-8"}], ids=str)
def test_lc_ctype_of_python_is_not_passed_on(command: str, variable: dict[str, str], tmp_path: Path) -> None:
    """In the C locale Python sets LC_CTYPE in its own environment (PEP 538)."""
    program = tmp_path / command
    program.write_text("#!/bin/sh\necho ${LC_CTYPE-unset}\n")
    program.chmod(0o755)
    done = subprocess.run([sys.executable, "-m", "slurmdl", command, "--version"], capture_output=True, text=True,
                          env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "1", **variable}, check=False)
    assert (done.returncode, done.stdout) == (0, f"{variable.get('LC_CTYPE', 'unset')}\n"), done.stderr
