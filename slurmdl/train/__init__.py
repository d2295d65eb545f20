"""Training runtime: MPI ranks that each hold a replica of the model, synchronized by a strategy.

It is independent of placement and launch, and imports few shared modules of slurmdl. Training scripts use
`from slurmdl.train import init`, see `slurmdl.train.library.startup`. Scripts on DistributedDataParallel have
`watch_slow_ranks`, see `slurmdl.train.slow_ranks`, and `hierarchical_hook`; these and scripts on FSDP2 have
`sync_islands`, see `slurmdl.train.islands`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurmdl.train.islands import HierarchicalState as HierarchicalState
    from slurmdl.train.islands import hierarchical_hook as hierarchical_hook
    from slurmdl.train.islands import sync_islands as sync_islands
    from slurmdl.train.library.startup import init as init
    from slurmdl.train.slow_ranks import watch_slow_ranks as watch_slow_ranks


#: public name -> its module, which imports NumPy or torch
_LAZY = {"init": "library.startup", "watch_slow_ranks": "slow_ranks", "sync_islands": "islands",
         "HierarchicalState": "islands", "hierarchical_hook": "islands"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
