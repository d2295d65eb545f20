"""How two workers mix their models over an edge of a gossip graph: with whole models, or with differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slurmdl.errors import TrainError
from slurmdl.train.compressors import COMPRESSORS, Compressor
from slurmdl.train.kept import Kept

FloatArray = npt.NDArray[np.float32]
#: sends one array to a rank and receives another from a rank, and waits for both
Exchange = Callable[[int, npt.NDArray[np.generic], int, npt.NDArray[np.generic]], None]


@dataclass(frozen=True)
class Edge:
    """What this rank does in one step of a graph: ranks `to` and `source`, and the weight of what comes in."""

    to: int
    source: int
    weight: float


class Mixer(Protocol):
    """Moves a model towards another one over an edge; together all ranks keep the sum of their models.

    Attributes
    ----------
    size : bytes that a rank sends in one exchange.
    most : the largest weight of an edge between models of one weight.
    """

    size: int
    most: float

    def mix(self, edge: Edge, random: np.random.Generator) -> None:
        """Send, receive, and change the parameters."""


def mixer(compressor: str, parameters: FloatArray, exchange: Exchange) -> Mixer:
    """What mixes models by a compressor, one of COMPRESSORS."""
    if compressor == "none":
        return Plain(parameters, exchange)
    its = COMPRESSORS[compressor]
    return (Models if its.whole else Copies)(parameters, its, exchange)


class Plain(Kept, Mixer):
    """Whole models: x_i += w (x_j - x_i)."""

    most = 1.0

    def __init__(self, parameters: FloatArray, exchange: Exchange) -> None:
        self._parameters, self._exchange = parameters, exchange
        self._theirs = np.empty_like(parameters)
        self.size = parameters.nbytes

    def mix(self, edge: Edge, random: np.random.Generator) -> None:
        self._exchange(edge.to, self._parameters, edge.source, self._theirs)
        self._theirs -= self._parameters
        self._theirs *= np.float32(edge.weight)
        self._parameters += self._theirs


class Models(Kept, Mixer):
    """Whole models, each as its receiver sees it: x_i += w (C(x_j) - C(x_i))."""

    most = 1.0

    def __init__(self, parameters: FloatArray, compressor: Compressor, exchange: Exchange) -> None:
        self._parameters, self._compressor, self._exchange = parameters, compressor, exchange
        self.size = compressor.size(parameters.size)
        self._mine, self._theirs = np.empty_like(parameters), np.empty_like(parameters)
        self._came = np.empty(self.size, np.uint8)

    def mix(self, edge: Edge, random: np.random.Generator) -> None:
        packed = self._compressor.pack(self._parameters, random)
        self._exchange(edge.to, packed, edge.source, self._came)
        self._compressor.unpack(packed, self._mine)
        self._compressor.unpack(self._came, self._theirs)
        self._theirs -= self._mine
        self._theirs *= np.float32(edge.weight)
        self._parameters += self._theirs


class Copies(Kept, Mixer):
    """Differences between a model and a public copy of it, which both ends of an edge keep.

    q = C(x_i - y_ij), and both ends add q to the copy y_ij of x_i; then x_i += w (y_ji - y_ij), w the edge's weight,
    which is to be at most the compressor's `mixing`. What C leaves out stays in the next difference. Messages carry
    their number on the edge: if the ends mixed different versions, the sum would be lost.

    Parameters
    ----------
    parameters : alike on all ranks when this is made: all copies begin with them.

    References
    ----------
    A. Koloskova, S. Stich, M. Jaggi: Decentralized stochastic optimization and gossip algorithms with compressed
    communication. ICML 2019. arXiv:1902.00340
    """

    kept = ("_start", "_mine", "_theirs", "_sent", "_received")
    _HEADER = 4

    def __init__(self, parameters: FloatArray, compressor: Compressor, exchange: Exchange) -> None:
        self._parameters, self._compressor, self._exchange = parameters, compressor, exchange
        self.size = self._HEADER + compressor.size(parameters.size)
        self.most = compressor.mixing
        self._start = parameters.copy()
        self._mine: dict[int, FloatArray] = {}
        self._theirs: dict[int, FloatArray] = {}
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}
        self._spare = np.empty_like(parameters)
        self._goes, self._came = np.empty(self.size, np.uint8), np.empty(self.size, np.uint8)

    def mix(self, edge: Edge, random: np.random.Generator) -> None:
        mine = self._mine.setdefault(edge.to, self._start)
        theirs = self._theirs.setdefault(edge.source, self._start)
        np.subtract(self._parameters, mine, out=self._spare)
        number = self._sent[edge.to] = self._sent.get(edge.to, 0) + 1
        self._goes[:self._HEADER].view(np.uint32)[0] = number
        self._goes[self._HEADER:] = self._compressor.pack(self._spare, random)
        self._exchange(edge.to, self._goes, edge.source, self._came)
        came, expected = int(self._came[:self._HEADER].view(np.uint32)[0]), self._received.get(edge.source, 0) + 1
        if came != expected:
            raise TrainError(f"message {came} of rank {edge.source} came where its message {expected} was expected")
        self._received[edge.source] = expected
        mine = self._mine[edge.to] = self._added(mine, self._goes)
        theirs = self._theirs[edge.source] = self._added(theirs, self._came)
        np.subtract(theirs, mine, out=self._spare)
        self._spare *= np.float32(edge.weight)
        self._parameters += self._spare

    def _added(self, copy: FloatArray, message: npt.NDArray[np.uint8]) -> FloatArray:
        """The copy with a message added, in place but for the one that all edges share at first."""
        self._compressor.unpack(message[self._HEADER:], self._spare)
        return np.add(copy, self._spare, out=None if copy is self._start else copy)
