"""The task of a preflight on one node: `python -m slurmdl.health.node_task CHECK...`.

It runs each check in a process with a time limit, and prints one line per check: a JSON object with `node`, `check`,
and either `values` or `error`.
"""

from __future__ import annotations

import json
import os
import socket
import sys

from slurmdl.errors import SlurmdlError
from slurmdl.health.node_checks import CHECKS
from slurmdl.slurm import process
from slurmdl.slurm.run_module import module_argv


def run_check(name: str) -> dict[str, object]:
    """The result of one check: `values`, or `error` if it fails or does not end in time."""
    try:
        text = process.run_command(module_argv("slurmdl.health.node_checks", name),
                                   timeout=CHECKS[name][1], name=f"check {name}").checked_stdout()
        return {"values": json.loads(text)}
    except (SlurmdlError, ValueError) as error:
        return {"error": str(error)}


def main() -> int:
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    for name in sys.argv[1:] or CHECKS:
        print(json.dumps({"node": node, "check": name, **run_check(name)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
