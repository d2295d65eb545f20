"""Starts PyTorch programs of tests and of the demo in half of the time, without two modules for compilation.

Python imports this module at its start, since tests/conftest.py and the demo add the directory to PYTHONPATH. Nightly
tests, and programs in containers, run without it. The modules are imported when a program uses them:

- torch._dynamo: the optimizers of torch import it at their first call, to exclude their methods from compilation. In
  a program that compiles nothing, there is nothing to exclude.
- torch._meta_registrations: what operators do with tensors that have no data. torch.compile and DTensor need it.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_DYNAMO, _META = "torch._dynamo", "torch._meta_registrations"
#: module -> lazy ones that are imported before it
_USES = {"torch.distributed.tensor": (_META,), _DYNAMO: (_META,)}


class _LazyModule(ModuleType):
    """Any attribute imports the real module."""

    def __getattr__(self, name: str) -> Any:
        # Python asks for attributes while it creates a module, and inspect.getmodule for __file__ of all modules
        if self.__name__ not in sys.modules or (name.startswith("__") and name != "__path__"):
            raise AttributeError(name)
        _import_real_module(self.__name__)
        return getattr(sys.modules[self.__name__], name)


class _LazyDynamo(_LazyModule):
    """The two functions that optimizers call, without an effect."""

    @staticmethod
    def graph_break(msg: str = "") -> None:
        pass

    @staticmethod
    def disable(fn: Callable[..., Any], recursive: bool = True, **options: Any) -> Callable[..., Any]:
        return fn


class _LazyFinder:
    """Finds lazy modules instead of those of torch."""

    def __init__(self) -> None:
        self.modules: dict[str, type[_LazyModule]] = {_DYNAMO: _LazyDynamo, _META: _LazyModule}

    def find_spec(self, name: str, path: Sequence[str] | None,
                  target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name in self.modules:
            return importlib.machinery.ModuleSpec(name, self)  # type: ignore[arg-type]
        for used in _USES.get(name, ()):
            _import_real_module(used)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self.modules[spec.name](spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _import_real_module(name: str) -> None:
    if _finder.modules.pop(name, None):
        sys.modules.pop(name, None)
        importlib.import_module(name)


_finder = _LazyFinder()
sys.meta_path.insert(0, _finder)
