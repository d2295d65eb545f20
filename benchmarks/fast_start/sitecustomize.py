"""Starts PyTorch programs of tests and of the demo without torch._dynamo, unless they use it: half of a rank's start.

The optimizers of torch import torch._dynamo at their first call, to exclude their methods from compilation. In a
program that compiles nothing, there is nothing to exclude. Python imports this module at its start, since
tests/conftest.py and the demo add the directory to PYTHONPATH. Nightly tests, and programs in containers, run without
it.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_NAME = "torch._dynamo"


class _LazyDynamo(ModuleType):
    """The two functions that optimizers call, without an effect; any other attribute imports the real module."""

    @staticmethod
    def graph_break(msg: str = "") -> None:
        pass

    @staticmethod
    def disable(fn: Callable[..., Any], recursive: bool = True, **options: Any) -> Callable[..., Any]:
        return fn

    def __getattr__(self, name: str) -> Any:
        # Python asks for attributes while it creates a module, and inspect.getmodule for __file__ of all modules
        if _NAME not in sys.modules or (name.startswith("__") and name != "__path__"):
            raise AttributeError(name)
        if sys.modules[_NAME] is self:
            del sys.modules[_NAME]
            sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _DynamoFinder)]
            importlib.import_module(_NAME)
        return getattr(sys.modules[_NAME], name)


class _DynamoFinder:
    """Finds _LazyDynamo instead of torch._dynamo."""

    def find_spec(self, name: str, path: Sequence[str] | None,
                  target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name == _NAME else None  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _LazyDynamo(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, _DynamoFinder())
