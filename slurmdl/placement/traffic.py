"""What one iteration of each strategy sends from rank to rank, as a list of phases.

Ring allreduce: Patarasu and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
Parameter server: Li et al., Scaling distributed machine learning with the parameter server, OSDI 2014.
Gossip: Boyd et al., Randomized gossip algorithms, 2006.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slurmdl.errors import PlacementError

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Phase:
    """Messages that are under way at the same time.

    Attributes
    ----------
    source, target : ranks. Where `crossed` is false, source[i] sends to target[i]; where it is true, every
        source sends to every target other than itself: no n x n matrix is needed for dense traffic.
    size : bytes that each pair sends.
    rounds : how many times in the phase a message waits for the one before it.
    """

    source: IntArray
    target: IntArray
    size: float
    rounds: int = 1
    crossed: bool = False


@dataclass(frozen=True, eq=False)
class Traffic:
    """What the ranks of one job send, whatever their number.

    Attributes
    ----------
    strategy : one of plan.STRATEGIES.
    model_bytes : bytes of one replica of the parameters (and of its gradient).
    ps : with strategy `ps` the ranks below it are the parameter servers, else 0.
    """

    strategy: str
    model_bytes: float = 100e6
    ps: int = 0

    def phases(self, ranks: int) -> list[Phase]:
        """The traffic of one iteration of so many ranks.

        Raises
        ------
        PlacementError : strategy `ps` without a server or without a worker.
        """
        everyone = np.arange(ranks)
        if self.strategy == "ps":
            if not 0 < self.ps < ranks:
                raise PlacementError(
                    f"--dl-ps={self.ps}: {ranks} tasks can hold 1 to {ranks - 1} parameter servers"
                    if ranks > 1 else "a parameter server needs a worker beside it: 2 tasks at least")
            servers, workers = everyone[:self.ps], everyone[self.ps:]
            share = self.model_bytes / self.ps
            return [Phase(servers, workers, share, crossed=True), Phase(workers, servers, share, crossed=True)]
        if ranks < 2:
            return []
        if self.strategy == "allreduce":
            # reduce-scatter and allgather: n - 1 rounds of 1/n of the model each, to the next rank in the ring
            return [Phase(everyone, np.roll(everyone, -1), 2 * self.model_bytes * (ranks - 1) / ranks,
                          rounds=2 * (ranks - 1))]
        # each rank sends its model to a partner that is drawn evenly from the others
        return [Phase(everyone, everyone, self.model_bytes / (ranks - 1), crossed=True)]
