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
    return 1 << step % _distances(count) if count > 1 else 0


def _distances(count: int) -> int:
    return (count - 1).bit_length()


#: pattern -> graph(count, seed, step) -> shape (count,): entry i is the worker that worker i sends to, and where it
#: rests i itself
GRAPHS: dict[str, Callable[[int, int, int], IntArray]] = {
    "random": random, "hypercube": hypercube, "exponential": exponential}


def spectral_gap(pattern: str, count: int) -> float:
    """The share of the models' distance from their mean that a step of a graph takes away, 0 to 1.

    For graphs with turns it is 1 - s^(1/k), s the largest singular value of the product of a period's k mixing
    matrices besides that of the mean. For random partners it is 1 - s^(1/2), s the second eigenvalue of the mean
    mixing matrix, whose steps shrink the squared distance by s in the mean (Boyd et al. 2006).
    """
    if pattern == "random" and count > 1:
        # two workers are partners with probability 1 / (count - 1 + count % 2)
        return float(1 - (1 - count / (count - 1 + count % 2) / 2) ** 0.5)
    period = max(_distances(count), 1)
    product = np.eye(count)
    for step in range(period):
        source = np.argsort(GRAPHS[pattern](count, 0, step))
        product = (product + product[source]) / 2
    return float(1 - np.linalg.norm(product - 1 / count, 2) ** (1 / period))
