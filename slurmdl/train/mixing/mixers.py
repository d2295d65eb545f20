"""How two workers mix their models over an edge of a gossip graph: with whole models, or with differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slurmdl.errors import TrainError
from slurmdl.train.compressors import COMPRESSORS, Compressor
from slurmdl.train.stateful import Stateful

FloatArray = npt.NDArray[np.float32]
#: sends one array to a rank and receives another from a rank, and waits for both
ExchangeFn = Callable[[int, npt.NDArray[np.generic], int, npt.NDArray[np.generic]], None]


@dataclass(frozen=True)
class GossipEdge:
    """What this rank does in one step of a graph: ranks `to` and `source`, and the weight of what comes in."""

    send_to: int
    recv_from: int
    weight: float


class Mixer(Protocol):
    """Moves a model towards another one over an edge; together all ranks keep the sum of their models.

    Attributes
    ----------
    size : bytes that a rank sends in one exchange.
    most : the largest weight of an edge between models of one weight.
    """

    message_bytes: int
    max_weight: float

    def mix(self, edge: GossipEdge, rng: np.random.Generator) -> None:
        """Send, receive, and change the parameters."""


def make_mixer(compression: str, parameters: FloatArray, exchange: ExchangeFn) -> Mixer:
    """What mixes models by a compressor, one of COMPRESSORS."""
    if compression == "none":
        return Fp32Mixer(parameters, exchange)
    its = COMPRESSORS[compression]
    return (Fp16Mixer if its.applies_to_models else ChocoMixer)(parameters, its, exchange)


class Fp32Mixer(Stateful, Mixer):
    """Whole models: x_i += w (x_j - x_i)."""

    max_weight = 1.0

    def __init__(self, parameters: FloatArray, exchange: ExchangeFn) -> None:
        self._parameters, self._exchange = parameters, exchange
        self._peer_model = np.empty_like(parameters)
        self.message_bytes = parameters.nbytes

    def mix(self, edge: GossipEdge, rng: np.random.Generator) -> None:
        self._exchange(edge.send_to, self._parameters, edge.recv_from, self._peer_model)
        self._peer_model -= self._parameters
        self._peer_model *= np.float32(edge.weight)
        self._parameters += self._peer_model


class Fp16Mixer(Stateful, Mixer):
    """Whole models, each as its receiver sees it: x_i += w (C(x_j) - C(x_i))."""

    max_weight = 1.0

    def __init__(self, parameters: FloatArray, compressor: Compressor, exchange: ExchangeFn) -> None:
        self._parameters, self._compressor, self._exchange = parameters, compressor, exchange
        self.message_bytes = compressor.packed_bytes(parameters.size)
        self._own_as_sent, self._peer_as_sent = np.empty_like(parameters), np.empty_like(parameters)
        self._recv_buffer = np.empty(self.message_bytes, np.uint8)

    def mix(self, edge: GossipEdge, rng: np.random.Generator) -> None:
        packed = self._compressor.compress(self._parameters, rng)
        self._exchange(edge.send_to, packed, edge.recv_from, self._recv_buffer)
        self._compressor.decompress(packed, self._own_as_sent)
        self._compressor.decompress(self._recv_buffer, self._peer_as_sent)
        self._peer_as_sent -= self._own_as_sent
        self._peer_as_sent *= np.float32(edge.weight)
        self._parameters += self._peer_as_sent


class ChocoMixer(Stateful, Mixer):
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

    state_fields = ("_start", "_mine", "_theirs", "_sent", "_received")
    _HEADER_BYTES = 4

    def __init__(self, parameters: FloatArray, compressor: Compressor, exchange: ExchangeFn) -> None:
        self._parameters, self._compressor, self._exchange = parameters, compressor, exchange
        self.message_bytes = self._HEADER_BYTES + compressor.packed_bytes(parameters.size)
        self.max_weight = compressor.consensus_step_size
        self._initial_estimate = parameters.copy()
        self._own_estimates: dict[int, FloatArray] = {}
        self._peer_estimates: dict[int, FloatArray] = {}
        self._sent_counts: dict[int, int] = {}
        self._received_counts: dict[int, int] = {}
        self._scratch = np.empty_like(parameters)
        self._send_buffer, self._recv_buffer = np.empty(
    self.message_bytes, np.uint8), np.empty(
        self.message_bytes, np.uint8)

    def mix(self, edge: GossipEdge, rng: np.random.Generator) -> None:
        mine = self._own_estimates.setdefault(edge.send_to, self._initial_estimate)
        theirs = self._peer_estimates.setdefault(edge.recv_from, self._initial_estimate)
        np.subtract(self._parameters, mine, out=self._scratch)
        number = self._sent_counts[edge.send_to] = self._sent_counts.get(edge.send_to, 0) + 1
        self._send_buffer[:self._HEADER_BYTES].view(np.uint32)[0] = number
        self._send_buffer[self._HEADER_BYTES:] = self._compressor.compress(self._scratch, rng)
        self._exchange(edge.send_to, self._send_buffer, edge.recv_from, self._recv_buffer)
        came, expected = int(self._recv_buffer[:self._HEADER_BYTES].view(np.uint32)[
                             0]), self._received_counts.get(edge.recv_from, 0) + 1
        if came != expected:
            raise TrainError(
                f"message {came} of rank {edge.recv_from} came where its message {expected} was expected")
        self._received_counts[edge.recv_from] = expected
        mine = self._own_estimates[edge.send_to] = self._add_difference(mine, self._send_buffer)
        theirs = self._peer_estimates[edge.recv_from] = self._add_difference(theirs, self._recv_buffer)
        np.subtract(theirs, mine, out=self._scratch)
        self._scratch *= np.float32(edge.weight)
        self._parameters += self._scratch

    def _add_difference(self, estimate: FloatArray, message: npt.NDArray[np.uint8]) -> FloatArray:
        """The copy with a message added, in place but for the one that all edges share at first."""
        self._compressor.decompress(message[self._HEADER_BYTES:], self._scratch)
        return np.add(estimate, self._scratch, out=None if estimate is self._initial_estimate else estimate)
