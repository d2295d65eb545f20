"""slurmdl: network-aware placement of training jobs on Slurm, and a PyTorch training runtime.

Programs that number their ranks themselves use `slurmdl.planned_rank`, programs of a mesh of ranks
`slurmdl.planned_mesh`, programs of groups of nodes `slurmdl.planned_group`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurmdl.groups import planned_mesh as planned_mesh
    from slurmdl.plan import planned_group as planned_group
    from slurmdl.plan import planned_rank as planned_rank

__version__ = "1.0.0"


def __getattr__(name: str) -> Any:
    if name in ("planned_group", "planned_rank"):
        from slurmdl import plan  # lazy: commands start without it

        return getattr(plan, name)
    if name == "planned_mesh":
        from slurmdl import groups

        return groups.planned_mesh
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
