"""The rate of a link: a token bucket (tc-tbf(8))."""

from __future__ import annotations

#: bytes of the longest packet: jumbo frames, as fabrics for HPC have; headers are then under 1 % of what is sent
MTU = 9000
#: a bucket holds what the rate brings in this time, its queue at most so much
_BURST_S, _QUEUE_S = 0.002, 0.2


def tbf_args(rate: float, single_segments: bool = False) -> str:
    """What tc is to put at an end of a link.

    Parameters
    ----------
    rate : bits/s.
    single : whether segments come one by one, as on a link with losses.
    """
    # A bucket smaller than one 64 KB super-packet would make the kernel cut it up, which costs CPU time only. Where
    # segments come one by one, two of them do: a sender that pauses after a loss finds the bucket full, and what a
    # large one lets through at once no real link would
    burst = max(2 * MTU + 100 if single_segments else 70_000, int(rate / 8 * _BURST_S))
    return f"tbf rate {rate:.0f}bit burst {burst} limit {max(4 * burst, int(rate / 8 * _QUEUE_S))}"
