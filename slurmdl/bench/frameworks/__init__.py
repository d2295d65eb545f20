"""Frameworks that can train side by side. A new one is one file here, or anywhere, with what `Framework` lists."""

from __future__ import annotations

import importlib.util
from importlib import import_module
from pathlib import Path
from typing import cast

from slurmdl.bench.frameworks.framework import Framework
from slurmdl.errors import UsageError

#: name -> module
FRAMEWORKS = {name: f"slurmdl.bench.frameworks.{module}" for name, module in (
    ("slurmdl", "ours"), ("ddp", "ddp"), ("ddp-mpi", "ddp_mpi"), ("post-local", "post_local"),
    ("horovod", "horovod"), ("bluefog", "bluefog"))}


def load(name: str) -> Framework:
    """The framework of that name, or of a Python file of one's own.

    Raises
    ------
    UsageError : unknown name, or a file that is no framework.
    """
    if name in FRAMEWORKS:
        return cast(Framework, import_module(FRAMEWORKS[name]))
    if not name.endswith(".py"):
        raise UsageError(f"framework {name!r} is not one of {', '.join(FRAMEWORKS)}, nor a file that ends in .py")
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    assert spec and spec.loader, "a name that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"framework {name}: cannot be loaded ({type(error).__name__}: {error})") from error
    lacking = [part for part in ("STRATEGIES", "missing", "start") if not hasattr(module, part)]
    if lacking:
        raise UsageError(f"framework {name}: has no {lacking[0]}; needed: STRATEGIES, missing(), start()")
    return cast(Framework, module)
