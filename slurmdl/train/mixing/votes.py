"""What every rank gives, told to all by messages of a few bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slurmdl.train.messages import MeteredP2P


def bruck_allgather(p2p: MeteredP2P, ranks: Sequence[int], value: float) -> npt.NDArray[np.float32]:
    """The value of each of these ranks, in their order; a call of all of them.

    Each sends 4 (n - 1) bytes in log2 n messages.

    References
    ----------
    J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal, D. Weathersby: Efficient algorithms for all-to-all communications in
    multiport message-passing systems. IEEE Trans. Parallel Distrib. Syst. 8 (1997). doi:10.1109/71.642949
    """
    count, place = len(ranks), ranks.index(p2p.rank)
    values = np.empty(count, np.float32)
    values[0] = value
    known = 1
    while known < count:
        more = min(known, count - known)
        p2p.exchange([(ranks[place - known], values[:more])],
                          [(ranks[(place + known) % count], values[known:known + more])])
        known += more
    return np.roll(values, place)
