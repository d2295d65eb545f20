"""Training runtime: MPI ranks that each hold a replica of the model, synchronized by a strategy.

It is independent of placement and launch, and imports few shared modules of slurmdl. Training scripts use
`from slurmdl.train import init`, see `slurmdl.train.library.startup`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurmdl.train.library.startup import init as init


def __getattr__(name: str) -> Any:
    if name == "init":
        from slurmdl.train.library.startup import init  # lazy: imports NumPy
        return init
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
