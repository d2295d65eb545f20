"""Cost of `slurmdl links counters` on a node: paired starts of the collector and of an idle interpreter.

The previous reading has 2,000 fewer segments, so that each run writes a sample to the spool, as on a node whose jobs
communicate. It starts like the installed program: without the finder of an editable install, and with compiled
bytecode. The metric is user and system CPU time, which hardly depends on the load of the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import slurmdl
from benchmarks.results import Row, make_row
from slurmdl.errors import UnavailableError
from slurmdl.links import counters

REPEATS = 31
#: maximum CPU milliseconds of a run beyond the interpreter's own, and maximum memory in bytes
MILLISECONDS, BYTES = 20.0, 20e6
#: segments sent since the previous reading
_SENT = 2000


def rows(seed: int = 0, repeats: int = REPEATS) -> Iterator[Row]:
    """Yield CPU time beyond that of an idle interpreter, and peak memory; `seed` has no effect."""
    with tempfile.TemporaryDirectory(prefix="slurmdl-counters-") as folder:
        program = _PROGRAM.format(root=str(Path(slurmdl.__file__).parents[1]), state=folder)
        interpreter_runs, collector_runs = [], []
        for repeat in range(-1, repeats):
            before = counters.read_counters()
            Path(folder, "counters.json").write_text(
                json.dumps(before._replace(segments_sent=max(0, before.segments_sent - _SENT)).to_json()))
            first, second = _start("status = 0", folder), _start(program, folder)
            if repeat >= 0:  # the first run compiles
                interpreter_runs.append(first)
                collector_runs.append(second)
        samples = len(list(Path(folder, "spool").glob("*")))
    interpreter_ms = median(1e3 * seconds for seconds, _ in interpreter_runs)
    extra = [1e3 * (seconds - base) for (seconds, _), (base, _) in zip(collector_runs, interpreter_runs, strict=True)]
    memory = [size / 1e6 for _, size in collector_runs]
    yield make_row("CPU time of links counters beyond the interpreter's start", extra, "ms",
                   baseline=interpreter_ms, target=f"median at most {MILLISECONDS:g} ms",
                   met=median(extra) <= MILLISECONDS)
    yield make_row("peak memory of links counters", memory, "MB",
                   baseline=median(size / 1e6 for _, size in interpreter_runs), target=f"at most {BYTES / 1e6:g} MB",
                   met=max(memory) <= BYTES / 1e6)
    yield make_row("samples in the spool after all runs", [samples], "", target="at least one", met=samples > 0)


#: the entry point `slurmdl` as pip installs it
_PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from slurmdl.cli.main import main
status = main(["links", "counters", "--strict", "--state-dir={state}"])
"""

#: the end of each program: its peak memory; ru_maxrss includes the memory before exec(2), see getrusage(2)
_PRINT_PEAK = """
for line in open("/proc/self/status"):
    if line.startswith("VmHWM:"):
        print(line.split()[1])
raise SystemExit(status)
"""


def _start(program: str, folder: str) -> tuple[float, float]:
    """Return CPU seconds and peak bytes of a Python program that sets `status`; UnavailableError if it fails.

    The program runs in the base interpreter of the virtual environment, without site packages.
    """
    plain = getattr(sys, "_base_executable", sys.executable)
    process = subprocess.Popen([plain, "-I", f"-Xpycache_prefix={folder}/bytecode", "-c", program + _PRINT_PEAK],
                               stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise UnavailableError(f"python: exit status {process.returncode}")
    return usage.ru_utime + usage.ru_stime, float(output.split()[-1]) * 1024
