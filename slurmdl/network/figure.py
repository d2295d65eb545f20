"""What loss, delay and throughput of a link do to a transfer: one figure in bytes/s, one in seconds per message.

A message of n bytes over a link takes n / `carried` + the link's delay + `stall`. Three measured figures become
seconds by what TCP does, so that none of them needs a weight.

References
----------
Padhye, Firoiu, Towsley, Kurose: Modeling TCP throughput, SIGCOMM 1998, doi:10.1145/285237.285291.
RFC 6298 (retransmission timer), RFC 8985 (RACK-TLP loss detection).
Lee et al., Electronics 2023, 12(14):3021 (the weighted sum).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slurmdl.network.model import MetricWeights

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

#: bytes of payload in a segment, on Ethernet with 1500 bytes
MSS_BYTES = 1448.0
#: segments that one acknowledgement answers
SEGMENTS_PER_ACK = 2.0
#: least retransmission timeout in seconds, Linux's TCP_RTO_MIN; RFC 6298 would have 1 s
MIN_RTO_S = 0.2
#: seconds beyond two round trips after which the loss of a flight's end is probed, two ticks of Linux's timer
TLP_SLACK_S = 4e-3
#: loss above which no formula holds; so much stands for a link that carries hardly anything
MAX_LOSS = 0.9


def usable_throughput(throughput: FloatArray, loss: FloatArray, rtt: FloatArray, rdma: BoolArray) -> FloatArray:
    """Bytes/s that a link carries: what was measured, or less where TCP cannot fill it at that loss.

    Parameters
    ----------
    throughput : bytes/s, measured.
    loss : fraction of packets lost.
    round_trip : seconds, above 0.
    rdma : links without TCP: their losses are repaired by the adapter and show in the throughput alone.
    """
    return np.asarray(np.where(rdma, throughput, np.minimum(throughput, padhye_throughput(loss, rtt))))


def padhye_throughput(loss: FloatArray, rtt: FloatArray) -> FloatArray:
    """Bytes/s of one TCP connection that only losses bound; infinity without loss. Padhye et al., equation 32.

    Their T0 is the time that passes where no duplicate acknowledgements tell of a loss. Inside a bulk transfer
    that is a tail loss probe's (RFC 8985), not the retransmission timeout's; what the latter does to the end of a
    message is in `stall`.
    """
    p = np.minimum(loss, MAX_LOSS)
    timeout = 2 * rtt + TLP_SLACK_S
    by_acks = rtt * np.sqrt(2 * SEGMENTS_PER_ACK * p / 3)
    by_timeouts = timeout * np.minimum(1.0, 3 * np.sqrt(3 * SEGMENTS_PER_ACK * p / 8)) * p * (1 + 32 * p**2)
    with np.errstate(divide="ignore"):
        return np.asarray(MSS_BYTES / (by_acks + by_timeouts))


def expected_rto_stall(loss: FloatArray, rtt: FloatArray, rdma: BoolArray) -> FloatArray:
    """Seconds that a message is expected to wait for a retransmission timeout, since its last packet was lost.

    A lost timeout's retransmission doubles the timeout (RFC 6298), which adds up to p / (1 - 2p), here bounded.
    """
    p = np.minimum(loss, MAX_LOSS / 2)
    return np.asarray(np.where(rdma, 0.0, p / (1 - 2 * p) * np.maximum(MIN_RTO_S, 2 * rtt)))


def weighted_score(throughput: FloatArray, loss: FloatArray, rtt: FloatArray, good_throughput: FloatArray, good_rtt: FloatArray,
             weights: MetricWeights) -> FloatArray:
    """Score of a link from above 0 to 1 by a weighted sum of its figures, each beside that of a good link.

    Parameters
    ----------
    throughput, loss, round_trip : as in `carried`.
    best : bytes/s of a good link.
    least : seconds, round trip of a good link.
    """
    total = weights.throughput + weights.rtt + weights.loss
    score = (weights.throughput * np.minimum(throughput / good_throughput, 1.0)
             + weights.rtt * np.minimum(good_rtt / rtt, 1.0) + weights.loss * (1 - loss))
    return np.asarray(np.maximum(score / total if total else np.ones_like(score), 1e-6))


def quantize(value: FloatArray, baseline: FloatArray, tolerance: float) -> FloatArray:
    """The value, in steps of so many times the usual one that noise below the margin makes no difference.

    What lies within the margin of the usual value is the usual value.

    Parameters
    ----------
    value, usual : above 0.
    margin : a fraction of the value, 0 for none.
    """
    if tolerance <= 0:
        return value
    step = 2 * np.log1p(tolerance)
    return np.asarray(baseline * np.exp(step * np.round(np.log(value / baseline) / step)))
