"""A whole run in one process: virtual ranks, one at a time, with the strategies and the messages of a real run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from slurmdl.errors import Refused, TrainError
from slurmdl.train.trainer.options import Options
from slurmdl.train.transports import virtual
from slurmdl.train.transports.links import Links

Result = TypeVar("Result")

#: seconds of a step's computation, where nothing is said
STEP = 0.01


def places(options: Options) -> tuple[list[str], list[str]]:
    """Node and zone of each virtual rank, by --zones; else all are in one zone, each on a node of its own."""
    zones = options.zones or (("zone", options.simulate or 1, 1),)
    return ([f"{zone}{node}" for zone, nodes, each in zones for node in range(nodes) for _ in range(each)],
            [zone for zone, nodes, each in zones for _ in range(nodes * each)])


def environ(node: str, zone: str) -> dict[str, str]:
    """What Slurm would tell a task on a node in a zone."""
    return {"SLURMD_NODENAME": node, "SLURM_TOPOLOGY_ADDR": f"{zone}.{node}",
            "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}


def run(options: Options, program: Callable[[virtual.Virtual, dict[str, str]], Result]) -> Sequence[Result]:
    """What a program returns in each virtual rank, in rank order; it is given its transport and its environment.

    Raises
    ------
    SlurmdlError : what a rank has raised; a TrainError names the rank.
    """
    nodes, zones = places(options)

    def one(transport: virtual.Virtual) -> Result:
        try:
            return program(transport, environ(nodes[transport.rank], zones[transport.rank]))
        except Refused:
            raise  # found by all ranks
        except TrainError as error:
            raise TrainError(f"rank {transport.rank} on {nodes[transport.rank]}: {error}") from error

    return virtual.run(len(nodes), one, Links(nodes, zones, dict(options.links)))
