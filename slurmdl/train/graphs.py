"""Who averages with whom in gossip, for any number of workers.

A graph names, for every step, to whom each worker sends its model: a permutation of the workers. Each then takes the
mean of its own model and of the one that it received, so that the matrix of the weights is doubly stochastic, and
the sum of all models stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def random(count: int, seed: int, step: int) -> IntArray:
    """A random permutation paired off; the one left over of an odd count rests.

    Every worker draws the same one, so that nothing need be agreed on.

    References
    ----------
    S. Boyd, A. Ghosh, B. Prabhakar, D. Shah: Randomized gossip algorithms. IEEE Trans. Inf. Theory 52 (2006).
    doi:10.1109/TIT.2006.874516
    """
    order = np.random.default_rng((seed, step)).permutation(count)
    pairs = order[:count // 2 * 2].reshape(-1, 2)
    target = np.arange(count)
    target[pairs] = pairs[:, ::-1]
    return target


def hypercube(count: int, seed: int, step: int) -> IntArray:
    """Partners at distance 1, 2, 4, ... by turns, both ways; `count` is a power of two, 2^k.

    k steps make all models the mean of those before.

    References
    ----------
    B. Ying et al.: Exponential graph is provably efficient for decentralized deep training. NeurIPS 2021.
    arXiv:2110.13363
    """
    return np.arange(count) ^ _distance(count, step)


def exponential(count: int, seed: int, step: int) -> IntArray:
    """Each sends to the one at distance 1, 2, 4, ... by turns, one way round the circle of workers.

    Where `count` is 2^k, k steps make all models the mean of those before; else they draw near to it.

    References
    ----------
    B. Ying et al.: Exponential graph is provably efficient for decentralized deep training. NeurIPS 2021.
    arXiv:2110.13363
    """
    return (np.arange(count) + _distance(count, step)) % count


def _distance(count: int, step: int) -> int:
    """The turn's distance, of those below `count`; 0 for a worker alone."""
    distances = (count - 1).bit_length()
    return 1 << step % distances if distances else 0


#: pattern -> graph(count, seed, step) -> shape (count,): entry i is the worker that worker i sends to, and where it
#: rests i itself
GRAPHS: dict[str, Callable[[int, int, int], IntArray]] = {
    "random": random, "hypercube": hypercube, "exponential": exponential}
