"""Duration of a preflight of 1,000 nodes; a program in the place of srun answers for all of them."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.results import Row, make_row
from slurmdl.health import preflight
from slurmdl.topology.topology import Topology

NODES, REPEATS, GOAL_S = 1000, 5, 60.0
#: prints the results of the checks of all nodes, as their tasks would; the checks of a node last 2 s
_SRUN = '''\
#!{python}
import json, random, sys, time
source = random.Random({seed})
time.sleep(2.0)
values = {{"clock": lambda: {{"time": time.time()}},
          "disk": lambda: {{"directory": "/tmp", "free": 1e11, "write_seconds": 0.01}},
          "memory": lambda: {{"available": 2e11, "total": 2.5e11, "bandwidth": source.gauss(1e10, 2e8)}},
          "gpu": dict,
          "cpu": lambda: {{"cpus": 64, "rate": source.gauss(3e9, 3e7), "speed": source.gauss(5e7, 5e5),
                          "stopped": 0.0}}}}
checks = sys.argv[sys.argv.index("slurmdl.health.node_task") + 1:]
nodelist = next(arg for arg in sys.argv if arg.startswith("--nodelist=")).partition("=")[2]
from slurmdl.slurm.hostlist import expand_hostlist
for node in expand_hostlist(nodelist):
    for check in checks:
        result = values[check]()
        if node == "n500" and check == "cpu":
            result["rate"] /= 3
        print(json.dumps({{"node": node, "check": check, "values": result}}), flush=True)
'''


def rows(seed: int, quick: bool = False) -> Iterator[Row]:
    """Rows of the time and of the verdict: one of the nodes has a third of the CPU work."""
    names = [f"n{number}" for number in range(1, NODES + 1)]
    topology = Topology.flat(names)
    seconds, right = [], []
    path = os.environ["PATH"]
    with tempfile.TemporaryDirectory() as directory:
        for repeat in range(1 if quick else REPEATS):
            program = Path(directory) / "srun"
            program.write_text(_SRUN.format(python=sys.executable, seed=random.Random(seed + repeat).random()))
            program.chmod(0o755)
            os.environ["PATH"] = f"{directory}:{path}"
            try:
                start = time.monotonic()
                result = preflight.run_preflight(names, topology, {**os.environ, "SLURM_JOB_ID": "1"}, print,
                                                 with_links=False)
                seconds.append(time.monotonic() - start)
            finally:
                os.environ["PATH"] = path
            right.append(float(list(result.reasons) == ["n500"]))
    yield make_row(f"preflight of {NODES} simulated nodes without links", seconds, "s",
                   target=f"at most {GOAL_S:g} s", met=max(seconds) <= GOAL_S)
    yield make_row("  exactly the bad node found", right, "share", target="1", met=min(right) == 1.0)
