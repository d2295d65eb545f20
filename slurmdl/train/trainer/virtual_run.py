"""Run all ranks as virtual ranks in one process, with the strategies and messages of a real run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from slurmdl.errors import InvalidRunError, TrainError
from slurmdl.train.trainer.options import Options
from slurmdl.train.transports import virtual
from slurmdl.train.transports.link_queues import QueueingNetwork

Result = TypeVar("Result")

#: seconds of a step's computation without --emulate-compute
DEFAULT_COMPUTE_SECONDS = 0.01


def rank_places(options: Options) -> tuple[list[str], list[str]]:
    """Nodes and zones of the virtual ranks, from --virtual-zones; default: one zone, one node per rank."""
    zones = options.virtual_zones or (("zone", options.virtual_ranks or 1, 1),)
    return ([f"{zone}{node}" for zone, nodes, ranks in zones for node in range(nodes) for _ in range(ranks)],
            [zone for zone, nodes, ranks in zones for _ in range(nodes * ranks)])


def rank_environ(node: str, zone: str) -> dict[str, str]:
    """Slurm's environment variables of a task on a node in a zone."""
    return {"SLURMD_NODENAME": node, "SLURM_TOPOLOGY_ADDR": f"{zone}.{node}",
            "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}


def run_virtual(options: Options,
                program: Callable[[virtual.VirtualTransport, dict[str, str]], Result]) -> Sequence[Result]:
    """Run `program(transport, environ)` in each virtual rank; return the results in rank order.

    Raises
    ------
    SlurmdlError : the error of a rank; a TrainError names the rank.
    """
    nodes, zones = rank_places(options)

    def run_rank(transport: virtual.VirtualTransport) -> Result:
        try:
            return program(transport, rank_environ(nodes[transport.rank], zones[transport.rank]))
        except InvalidRunError:
            raise  # raised by all ranks
        except TrainError as error:
            raise TrainError(f"rank {transport.rank} on {nodes[transport.rank]}: {error}") from error

    return virtual.run_virtual_ranks(len(nodes), run_rank, QueueingNetwork(nodes, zones, dict(options.virtual_links)))
