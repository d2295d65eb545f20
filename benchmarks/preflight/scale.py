"""Duration of a preflight of 1,000 nodes; a program in the place of srun answers for all of them.

The times of the checks and of the probes on the nodes are simulated; the rest is the code of a real preflight.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.preflight import simulated_nodes
from benchmarks.results import Row, make_row
from slurmdl.health import preflight
from slurmdl.topology.topology import Topology
from slurmdl.topology.topology_conf import parse_topology_conf

NODES, REPEATS, GOAL_S = 1000, 5, 60.0
ZONES = 25
#: the nodes' part of a step, by the module that it runs; the answers come when the real ones would
_SRUN = """\
#!{python}
import sys
from benchmarks.preflight import simulated_nodes
simulated_nodes.run_step(sys.argv, {seed})
"""


def rows(seed: int, quick: bool = False) -> Iterator[Row]:
    """Rows of the time and of the verdict: one node is slow, one has a slow link, and one pair cannot communicate."""
    names = [f"n{number}" for number in range(1, NODES + 1)]
    seconds, right, path = [], [], os.environ["PATH"]
    with tempfile.TemporaryDirectory() as directory:
        topology = _zones_of_equal_size(Path(directory) / "topology.conf")
        for repeat in range(1 if quick else REPEATS):
            program = Path(directory) / "srun"
            program.write_text(_SRUN.format(python=sys.executable, seed=seed + repeat))
            program.chmod(0o755)
            os.environ["PATH"] = f"{directory}:{path}"
            try:
                environ = {**os.environ, "SLURM_JOB_ID": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
                start = time.monotonic()
                result = preflight.run_preflight(names, topology, environ, lambda text: print(text, file=sys.stderr))
                seconds.append(time.monotonic() - start)
            finally:
                os.environ["PATH"] = path
            print(f"{NODES} simulated nodes: {result.reasons}, {seconds[-1]:.1f} s", file=sys.stderr)
            right.append(float(set(result.reasons) == {simulated_nodes.CPU_FAULT, simulated_nodes.LINK_FAULT,
                                                         simulated_nodes.BROKEN_PAIR[1]}))
    yield make_row(f"preflight of {NODES} simulated nodes in {ZONES} zones", seconds, "s",
                   target=f"at most {GOAL_S:g} s", met=max(seconds) <= GOAL_S)
    yield make_row("  exactly the three bad nodes found", right, "share", target="1", met=min(right) == 1.0)


def _zones_of_equal_size(path: Path) -> Topology:
    size = NODES // ZONES
    lines = [f"SwitchName=leaf{zone} Nodes=n[{zone * size + 1}-{(zone + 1) * size}]" for zone in range(ZONES)]
    path.write_text("\n".join([*lines, f"SwitchName=core Switches=leaf[0-{ZONES - 1}]\n"]))
    return parse_topology_conf(str(path)).to_topology()
