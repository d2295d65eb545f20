"""A whole run in one process: virtual ranks, one at a time, with the strategies and the messages of a real run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from slurmdl.errors import InvalidRunError, TrainError
from slurmdl.train.trainer.options import Options
from slurmdl.train.transports import virtual
from slurmdl.train.transports.link_queues import QueueingNetwork

Result = TypeVar("Result")

#: seconds of a step's computation, where nothing is said
DEFAULT_COMPUTE_SECONDS = 0.01


def rank_places(options: Options) -> tuple[list[str], list[str]]:
    """Node and zone of each virtual rank, by --zones; else all are in one zone, each on a node of its own."""
    zones = options.virtual_zones or (("zone", options.virtual_ranks or 1, 1),)
    return ([f"{zone}{node}" for zone, nodes, each in zones for node in range(nodes) for _ in range(each)],
            [zone for zone, nodes, each in zones for _ in range(nodes * each)])


def rank_environ(node: str, zone: str) -> dict[str, str]:
    """What Slurm would tell a task on a node in a zone."""
    return {"SLURMD_NODENAME": node, "SLURM_TOPOLOGY_ADDR": f"{zone}.{node}",
            "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}


def run_virtual(options: Options, program: Callable[[
                virtual.VirtualTransport, dict[str, str]], Result]) -> Sequence[Result]:
    """What a program returns in each virtual rank, in rank order; it is given its transport and its environment.

    Raises
    ------
    SlurmdlError : what a rank has raised; a TrainError names the rank.
    """
    nodes, zones = rank_places(options)

    def one(transport: virtual.VirtualTransport) -> Result:
        try:
            return program(transport, rank_environ(nodes[transport.rank], zones[transport.rank]))
        except InvalidRunError:
            raise  # found by all ranks
        except TrainError as error:
            raise TrainError(f"rank {transport.rank} on {nodes[transport.rank]}: {error}") from error

    return virtual.run_virtual_ranks(len(nodes), one, QueueingNetwork(nodes, zones, dict(options.virtual_links)))
