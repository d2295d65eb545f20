"""Training runtime: MPI ranks that each hold a replica of the model, synchronized by a strategy.

It is independent of placement and launch, and imports few shared modules of slurmdl. Training scripts use
`from slurmdl.train import init`, see `slurmdl.train.library.startup`. For scripts on DistributedDataParallel there is
`from slurmdl.train import watch_slow_ranks`, see `slurmdl.train.ddp_monitor`; for those and FSDP2 there is
`from slurmdl.train import outer`, see `slurmdl.train.outer_sync`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurmdl.train.ddp_monitor import watch_slow_ranks as watch_slow_ranks
    from slurmdl.train.library.startup import init as init
    from slurmdl.train.outer_sync import outer as outer


def __getattr__(name: str) -> Any:
    if name == "init":
        from slurmdl.train.library.startup import init  # lazy: imports NumPy
        return init
    if name == "watch_slow_ranks":
        from slurmdl.train.ddp_monitor import watch_slow_ranks
        return watch_slow_ranks
    if name == "outer":
        from slurmdl.train.outer_sync import outer
        return outer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
