"""Start the ranks of a benchmark on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from benchmarks.open_mpi import OVERSUBSCRIBE_ENV


def run_ranks(backend: str, ranks: int, module: str, *arguments: str, environ: Mapping[str, str],
              timeout_s: float) -> str:
    """Run a module on some ranks, by mpirun for the backend mpi, else by torchrun; return their standard output.

    Raises RuntimeError if a rank fails.
    """
    launcher = ["mpirun", "-n", str(ranks), sys.executable] if backend == "mpi" else [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    argv = [*launcher, "-m", module, *arguments]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    result = subprocess.run(argv, env={**clean, **OVERSUBSCRIBE_ENV, **environ}, capture_output=True, text=True,
                            timeout=timeout_s, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {result.stderr.strip()[-500:]}")
    return result.stdout
