"""slurmdl: network-aware placement and MPI training of neural networks on Slurm.

Programs that number their ranks themselves use `from slurmdl import planned_rank`, see `slurmdl.plan.planned_rank`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurmdl.plan import planned_rank as planned_rank

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "planned_rank":
        from slurmdl.plan import planned_rank  # lazy: commands start without it

        return planned_rank
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
