"""Mixing of two models over an edge of a gossip graph: whole models, or compressed differences; its weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slurmdl.errors import TrainError
from slurmdl.gossip_graphs import GRAPHS, Graph, MixingRound
from slurmdl.train.checkpointed_fields import CheckpointedFields
from slurmdl.train.compressors import COMPRESSORS, Compressor

FloatArray = npt.NDArray[np.float32]
#: exchange(send_to, send_buffer, recv_from, recv_buffer), which returns when both are complete
ExchangeFn = Callable[[int, npt.NDArray[np.generic], int, npt.NDArray[np.generic]], None]


@dataclass(frozen=True)
class GossipEdge:
    """This rank's exchange in one round: target and source rank, and weight of the received model."""

    send_to: int
    recv_from: int
    weight: float


class Mixer(CheckpointedFields):
    """Moves a model towards another one over an edge; the sum of all models is preserved.

    Attributes:
        message_bytes: that a rank sends in one exchange.
        max_weight: largest weight of an edge between models of equal weight.
    """

    max_weight = 1.0

    def __init__(self, parameters: FloatArray, compressor: Compressor, exchange: ExchangeFn) -> None:
        self._parameters, self._compressor, self._exchange = parameters, compressor, exchange
        self.message_bytes = compressor.packed_bytes(parameters.size)

    def mix(self, edge: GossipEdge, rng: np.random.Generator) -> None:
        """Send, receive, and change the parameters."""
        raise NotImplementedError


def make_mixer(compression: str, parameters: FloatArray, exchange: ExchangeFn) -> Mixer:
    """Make the mixer for a compressor, one of COMPRESSORS."""
    compressor = COMPRESSORS[compression]
    compressed = Fp16Mixer if compressor.applies_to_models else ChocoMixer
    return (Fp32Mixer if compression == "none" else compressed)(parameters, compressor, exchange)


class Fp32Mixer(Mixer):
    """Whole models: x_i += w (x_j - x_i)."""

    def __init__(self, parameters: FloatArray, compressor: Compressor, exchange: ExchangeFn) -> None:
        super().__init__(parameters, compressor, exchange)
        self._peer_model = np.empty_like(parameters)

    def mix(self, edge: GossipEdge, rng: np.random.Generator) -> None:
        self._exchange(edge.send_to, self._parameters, edge.recv_from, self._peer_model)
        self._peer_model -= self._parameters
        self._peer_model *= np.float32(edge.weight)
        self._parameters += self._peer_model


class Fp16Mixer(Mixer):
    """Whole models, compressed by C: x_i += w (C(x_j) - C(x_i))."""

    def __init__(self, parameters: FloatArray, compressor: Compressor, exchange: ExchangeFn) -> None:
        super().__init__(parameters, compressor, exchange)
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


class ChocoMixer(Mixer):
    """CHOCO-SGD: compressed differences to estimates of the models, which both ends of an edge keep.

    q = C(x_i - y_ij); both ends add q to the estimate y_ij of x_i; then x_i += w (y_ji - y_ij), with a weight w of at
    most the compressor's `consensus_step_size`. The compression error stays in the next difference. Messages are
    numbered per edge, because different estimates at both ends would change the sum of the models.

    Args:
        parameters: equal on all ranks at construction, as the initial estimate.

    Reference: A. Koloskova, S. Stich, M. Jaggi: Decentralized stochastic optimization and gossip algorithms with
    compressed communication. ICML 2019. arXiv:1902.00340
    """

    state_fields = ("_initial_estimate", "_own_estimates", "_peer_estimates", "_sent_counts", "_received_counts")
    _HEADER_BYTES = 4

    def __init__(self, parameters: FloatArray, compressor: Compressor, exchange: ExchangeFn) -> None:
        super().__init__(parameters, compressor, exchange)
        self.message_bytes += self._HEADER_BYTES
        self.max_weight = compressor.consensus_step_size
        self._initial_estimate = parameters.copy()
        self._own_estimates: dict[int, FloatArray] = {}
        self._peer_estimates: dict[int, FloatArray] = {}
        self._sent_counts: dict[int, int] = {}
        self._received_counts: dict[int, int] = {}
        self._scratch = np.empty_like(parameters)
        self._send_buffer = np.empty(self.message_bytes, np.uint8)
        self._recv_buffer = np.empty(self.message_bytes, np.uint8)

    def mix(self, edge: GossipEdge, rng: np.random.Generator) -> None:
        own_estimate = self._own_estimates.setdefault(edge.send_to, self._initial_estimate)
        peer_estimate = self._peer_estimates.setdefault(edge.recv_from, self._initial_estimate)
        np.subtract(self._parameters, own_estimate, out=self._scratch)
        sent_count = self._sent_counts[edge.send_to] = self._sent_counts.get(edge.send_to, 0) + 1
        self._send_buffer[:self._HEADER_BYTES].view(np.uint32)[0] = sent_count
        self._send_buffer[self._HEADER_BYTES:] = self._compressor.compress(self._scratch, rng)
        self._exchange(edge.send_to, self._send_buffer, edge.recv_from, self._recv_buffer)
        number = int(self._recv_buffer[:self._HEADER_BYTES].view(np.uint32)[0])
        expected = self._received_counts.get(edge.recv_from, 0) + 1
        if number != expected:
            raise TrainError(f"message {number} of rank {edge.recv_from}: expected message {expected}")
        self._received_counts[edge.recv_from] = expected
        own_estimate = self._own_estimates[edge.send_to] = self._add_difference(own_estimate, self._send_buffer)
        peer_estimate = self._peer_estimates[edge.recv_from] = self._add_difference(peer_estimate, self._recv_buffer)
        np.subtract(peer_estimate, own_estimate, out=self._scratch)
        self._scratch *= np.float32(edge.weight)
        self._parameters += self._scratch

    def _add_difference(self, estimate: FloatArray, message: npt.NDArray[np.uint8]) -> FloatArray:
        """Add a message to an estimate, in place unless it is the shared initial one."""
        self._compressor.decompress(message[self._HEADER_BYTES:], self._scratch)
        return np.add(estimate, self._scratch, out=None if estimate is self._initial_estimate else estimate)


class WeightedGraph:
    """A graph for models with weights, which preserves the weighted sum of the models.

    In each round a worker receives as much weight as it sends. A pair with share 1/2 goes to its weighted mean; a
    longer cycle exchanges that share of the smallest weight.

    Args:
        weights: of the workers' models, above 0.
        max_share: upper bound for shares of the graph, for models of equal weight.
    """

    def __init__(self, graph: Graph, weights: Sequence[float], max_share: float = 1.0) -> None:
        self._graph, self._max_share = graph, max_share
        self._weights: tuple[float, ...] = ()
        self.set_weights(weights)

    def set_weights(self, weights: Sequence[float]) -> None:
        """Recompute the rounds if the weights have changed."""
        if self._weights != tuple(weights):
            self._weights = tuple(weights)
            self._rounds = [self._weighted_round(self._graph.round(step)) for step in range(self._graph.period)]

    def round(self, step: int) -> MixingRound:
        """Like Graph.round; weights along a cycle are equal only if those of the models are."""
        return self._rounds[step % len(self._rounds)] if self._rounds else self._weighted_round(
            self._graph.round(step))

    def _weighted_round(self, mixing_round: MixingRound) -> MixingRound:
        own = np.array(self._weights, float)
        share, other = np.minimum(mixing_round.weight, self._max_share), own[mixing_round.target]
        pairs = mixing_round.target[mixing_round.target] == np.arange(len(own))
        flow = np.where(pairs, np.minimum(2 * share * own * other / (own + other), np.minimum(own, other)),
                        share * own.min())
        return MixingRound(mixing_round.target, flow / own)


def spectral_gap(pattern: str, zones: Sequence[str]) -> float:
    """Share of the models' distance from their mean that a round removes, 0 to 1.

    For graphs of period k it is 1 - s^(1/k), s the second singular value of the product of the k mixing matrices. For
    random matching it is 1 - s^(1/2), s the second eigenvalue of the mean mixing matrix, by which rounds shrink the
    squared distance on average (Boyd et al. 2006).
    """
    count = len(zones)
    graph = GRAPHS[pattern](zones)
    if count == 1:
        return 1.0
    if not graph.period:
        # two workers are matched with probability 1 / (count - 1 + count % 2)
        return float(1 - (1 - count / (count - 1 + count % 2) / 2) ** 0.5)
    product = np.eye(count)
    for step in range(graph.period):
        product = graph.round(step).mix(product)
    return float(1 - np.linalg.norm(product - 1 / count, 2) ** (1 / graph.period))
