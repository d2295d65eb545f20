"""Start a module of slurmdl in a process of its own: `python -m`, but without the current directory in the path.

`python -m` and `python -c` look for every module in the current directory first, where other users may write. An
empty element of PYTHONPATH, as `PYTHONPATH=$PYTHONPATH:DIR` makes it, has the same effect. Python before 3.11 has no
-P, and -I would also ignore the user's packages and variables.
"""

from __future__ import annotations

import os
import sys

_PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def module_argv(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module of slurmdl, e.g. "slurmdl" or "slurmdl.health.node_checks"."""
    return [sys.executable, os.path.abspath(__file__), module, *arguments]


def _trusted_path() -> list[str]:
    """The path of imports without the directory of this file, and without the current one unless it was named."""
    try:
        current = os.getcwd()
    except OSError:  # removed
        current = ""
    named = {_PACKAGE_PARENT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    dropped = {"", os.path.dirname(os.path.abspath(__file__)), *({current} - named)}
    path = [entry for entry in sys.path if entry not in dropped]
    return path if _PACKAGE_PARENT in path else [_PACKAGE_PARENT, *path]


if __name__ == "__main__":
    sys.path[:] = _trusted_path()  # before any other import
    del sys.argv[0]
    import runpy

    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
