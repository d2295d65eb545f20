"""`python -m slurmdl` is the program `slurmdl`; run by its path with a module of slurmdl, this file runs that module.

`python -m` and `python -c` look for every module in the current directory first, where other users may write. An
empty element of PYTHONPATH, as `PYTHONPATH=$PYTHONPATH:DIR` makes it, has the same effect. Python before 3.11 has no
-P, and -I would also ignore the user's packages and variables. So slurmdl starts its own processes by this path.
"""

import os
import sys


def _trusted_path() -> list[str]:
    """The path of imports without the directory of this file, and without the current one unless it was named."""
    package = os.path.dirname(os.path.abspath(__file__))
    parent = os.path.dirname(package)
    try:
        current = os.getcwd()
    except OSError:  # removed
        current = ""
    named = {parent, *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    path = [entry for entry in sys.path if entry not in {"", package, *({current} - named)}]
    return path if parent in path else [parent, *path]


if __spec__ is None:
    sys.path[:] = _trusted_path()  # before any other import
    del sys.argv[0]
    import runpy

    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    from slurmdl.cli.main import main

    sys.exit(main())
