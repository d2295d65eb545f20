"""The training runtime: MPI ranks that each hold a replica and keep it together with the others by a strategy.

It reads its environment and knows nothing of placement or launch: of slurmdl it imports few shared modules only.
For scripts of the user's own: `from slurmdl.train import init`, see `slurmdl.train.library.run`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurmdl.train.library.run import init as init


def __getattr__(name: str) -> Any:
    if name == "init":
        from slurmdl.train.library.run import init  # only now: NumPy and, when it runs, torch and MPI
        return init
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
