"""Training runtime: MPI ranks that each hold a replica of the model, synchronized by a strategy.

It is independent of placement and launch, and imports few shared modules of slurmdl. Training scripts use
`from slurmdl.train import init`, see `slurmdl.train.library.startup`. For scripts on DistributedDataParallel there is
`watch_slow_ranks`, see `slurmdl.train.ddp_monitor`, and `hierarchical_hook`, see `slurmdl.train.ddp_hooks`; for those
and FSDP2 there is `outer`, see `slurmdl.train.outer_sync`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurmdl.train.ddp_hooks import HierarchicalState as HierarchicalState
    from slurmdl.train.ddp_hooks import hierarchical_hook as hierarchical_hook
    from slurmdl.train.ddp_monitor import watch_slow_ranks as watch_slow_ranks
    from slurmdl.train.library.startup import init as init
    from slurmdl.train.outer_sync import outer as outer


#: public name -> its module, which imports NumPy or torch
_LAZY = {"init": "library.startup", "watch_slow_ranks": "ddp_monitor", "outer": "outer_sync",
         "HierarchicalState": "ddp_hooks", "hierarchical_hook": "ddp_hooks"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
