"""Which nodes are bad, by the results of their checks: against fixed limits, and against the other nodes. Pure.

A value is an outlier only by two rules at once: its ratio to the median of the nodes, and its distance from it in
median absolute deviations (MAD). The first keeps small differences between good nodes from counting, the second the
noise of a busy cluster. With fewer than four nodes a MAD means nothing, and the ratio alone decides.

Nodes are judged twice. Screening has narrow limits and suspects too many nodes rather than too few; its suspects are
measured again, together with few others, and the final limits decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

from slurmdl.links.samples import LinkSample
from slurmdl.slurm.hostlist import fold_hostlist
from slurmdl.text import pluralize
from slurmdl.units import format_bit_rate, format_bytes, format_coarse_duration, format_duration

Key = TypeVar("Key")

#: number of nodes from which on the MAD decides, too
_MIN_NODES_FOR_MAD = 4
#: 1 standard deviation of normal noise in MADs
_MAD_TO_DEVIATION = 1.4826
#: share of the median below which a value is an outlier whatever the MAD, which two bad nodes of four make large
_FAR_SHARE = 0.25


@dataclass(frozen=True)
class Limits:
    """Lowest good shares of the median, and the distance from it in standard deviations that an outlier has.

    Attributes:
        rate: work of the CPUs per CPU.
        speed: speed of the slowest CPU.
        bandwidth, available: of the memory.
        throughput: of the link.
        products: rate of a GPU's matrix products.
    """

    rate: float
    speed: float
    bandwidth: float
    available: float
    throughput: float
    products: float
    deviations: float


FINAL = Limits(rate=0.6, speed=0.7, bandwidth=0.5, available=0.25, throughput=0.5, products=0.7,
               deviations=5.0)
SCREENING = Limits(rate=0.85, speed=0.85, bandwidth=0.6, available=0.25, throughput=0.7, products=0.85,
                   deviations=2.0)
#: highest good share of the CPU time that a quota withholds, above the median
MAX_WITHHELD = 0.1
#: bytes that must be free
MIN_FREE_MEMORY, MIN_FREE_DISK = 256 * 2**20, 100e6
#: seconds by which a clock may differ from the median, and that a small write may take
MAX_CLOCK_OFFSET_S, MAX_WRITE_S = 5.0, 2.0
#: highest good loss of packets, and the highest good RTT: this multiple of the median and as many seconds more
MAX_LOSS, MAX_RTT_FACTOR, MAX_EXTRA_RTT_S = 0.005, 3.0, 0.001


@dataclass
class NodeReport:
    """What one node reported.

    Attributes:
        values: check -> its values (see node_checks).
        errors: check -> why it has none.
        clock_offset: seconds by which the node's clock is ahead of the reader's, about; None if unknown.
        link: the link of the node, or None.
        is_alone_in_zone: whether no other of the nodes is in its leaf zone; its link then includes the zone's uplink.
        unreachable: other nodes with which it cannot exchange data.
    """

    values: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    clock_offset: float | None = None
    link: LinkSample | None = None
    is_alone_in_zone: bool = False
    unreachable: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Fault:
    """One reason why a node is bad; `check` is the name of a check, "link", or "site"."""

    node: str
    check: str
    text: str


def find_faults(reports: Mapping[str, NodeReport], checks: Sequence[str], with_links: bool,
                limits: Limits = FINAL) -> list[Fault]:
    """The faults of the nodes, in the order of the nodes.

    Args:
        checks: those that each node was to run; a node without a result is bad.
        with_links: whether links were measured; a node without a measured link is bad.
    """
    faults = [Fault(node, check, report.errors.get(check, "no answer")) for node, report in reports.items()
              for check in checks if check not in report.values]
    faults += [*_cpu_faults(reports, limits), *_memory_faults(reports, limits), *_disk_faults(reports),
               *_clock_faults(reports), *_gpu_faults(reports, limits)]
    for is_alone in (False, True) if with_links else ():
        faults += _link_faults({node: report for node, report in reports.items()
                                if report.is_alone_in_zone == is_alone}, limits)
    faults += _pair_faults(reports) if with_links else ()
    order = {node: number for number, node in enumerate(reports)}
    return sorted(faults, key=lambda fault: order[fault.node])


def _cpu_faults(reports: Mapping[str, NodeReport], limits: Limits) -> Iterable[Fault]:
    cpu = _values(reports, "cpu")
    rates = {node: values["rate"] / values["cpus"] for node, values in cpu.items()}
    for node, share in _low_outliers(rates, limits.rate, limits):
        yield Fault(node, "cpu", f"its CPUs do {share:.0%} of the work of the others")
    withheld = {node: values.get("withheld", 0.0) for node, values in cpu.items()}
    typical = _median_or_zero(withheld.values())
    for node, share in withheld.items():
        if share > MAX_WITHHELD + typical:
            yield Fault(node, "cpu", f"a CPU quota of its control groups withholds {share:.0%} of the CPU time")
    speeds = {node: values["speed"] for node, values in cpu.items()}
    for node, share in _low_outliers(speeds, limits.speed, limits):
        yield Fault(node, "cpu", f"its slowest CPU runs at {share:.0%} of the others' speed")


def _memory_faults(reports: Mapping[str, NodeReport], limits: Limits) -> Iterable[Fault]:
    memory = _values(reports, "memory")
    available = {node: values["available"] for node, values in memory.items()}
    low = dict(_low_outliers(available, limits.available, limits))
    for node, free in available.items():
        if free < MIN_FREE_MEMORY or node in low:
            typical = format_bytes(median(available.values()))
            yield Fault(node, "memory", f"{format_bytes(free)} of memory are free, {typical} on the median node")
    bandwidths = {node: values["bandwidth"] for node, values in memory.items() if "bandwidth" in values}
    for node, share in _low_outliers(bandwidths, limits.bandwidth, limits):
        yield Fault(node, "memory", f"its memory has {share:.0%} of the others' bandwidth")


def _disk_faults(reports: Mapping[str, NodeReport]) -> Iterable[Fault]:
    disk = _values(reports, "disk")
    typical = _median_or_zero(values["write_seconds"] for values in disk.values())
    for node, values in disk.items():
        if values["free"] < MIN_FREE_DISK:
            yield Fault(node, "disk", f"{format_bytes(values['free'])} are free in {values['directory']}")
        elif values["write_seconds"] > MAX_WRITE_S + 3 * typical:
            yield Fault(node, "disk", f"a write of 1 MB to {values['directory']} took "
                                      f"{format_duration(values['write_seconds'])}")


def _clock_faults(reports: Mapping[str, NodeReport]) -> Iterable[Fault]:
    offsets = {node: report.clock_offset for node, report in reports.items() if report.clock_offset is not None}
    center = _median_or_zero(offsets.values())
    for node, offset in offsets.items():
        if abs(offset - center) > MAX_CLOCK_OFFSET_S:
            direction = "ahead of" if offset > center else "behind"
            yield Fault(node, "clock", f"its clock is {format_coarse_duration(abs(offset - center))} {direction} "
                                       "the others")


def _gpu_faults(reports: Mapping[str, NodeReport], limits: Limits) -> Iterable[Fault]:
    rates: dict[str, dict[tuple[str, int], float]] = {}
    for node, values in _values(reports, "gpu").items():
        if values.get("gpus", 0) < values.get("allocated", 0):
            yield Fault(node, "gpu", f"{pluralize(values['gpus'], 'GPU')} answered; Slurm allocated "
                                     f"{values['allocated']}")
        for error in values.get("errors", ()):
            yield Fault(node, "gpu", error)
        for number, product in enumerate(values.get("products", ())):
            rates.setdefault(product["name"], {})[node, number] = product["rate"]
    for name, rate_by_gpu in rates.items():
        for (node, number), share in _low_outliers(rate_by_gpu, limits.products, limits):
            yield Fault(node, "gpu", f"GPU {number} multiplies matrices at {share:.0%} of the rate of the others "
                                     f"({name})")


def _link_faults(reports: Mapping[str, NodeReport], limits: Limits) -> Iterable[Fault]:
    links = {node: report.link for node, report in reports.items() if report.link is not None}
    for node in reports:
        if node not in links:
            yield Fault(node, "link", "no node reaches it")
    throughputs = {node: link.throughput for node, link in links.items() if link.throughput is not None}
    for node, share in _low_outliers(throughputs, limits.throughput, limits):
        yield Fault(node, "link", f"its link carries {format_bit_rate(throughputs[node])}, {share:.0%} of the median "
                                  "link")
    losses = {node: link.loss for node, link in links.items() if link.loss is not None}
    typical_loss = _median_or_zero(losses.values())
    for node, loss in losses.items():
        if loss > MAX_LOSS + 3 * typical_loss:
            yield Fault(node, "link", f"its link loses {loss:.1%} of the packets")
    rtts = {node: link.rtt for node, link in links.items() if link.rtt is not None}
    typical_rtt = _median_or_zero(rtts.values())
    for node, rtt in rtts.items():
        if rtt > MAX_RTT_FACTOR * typical_rtt + MAX_EXTRA_RTT_S:
            yield Fault(node, "link", f"its link adds {format_duration(rtt)} to a round trip, the median link "
                                      f"{format_duration(typical_rtt)}")


def _pair_faults(reports: Mapping[str, NodeReport]) -> Iterable[Fault]:
    """The fewest nodes, about, without which all pairs exchange data: again and again the one in most broken pairs.

    Of several the last one counts, as the first node of a job often runs its batch script.
    """
    # no node reaches a node without a link, which is a fault already
    linked = {node for node, report in reports.items() if report.link is not None}
    broken = {node: linked & report.unreachable for node, report in reports.items() if node in linked}
    while any(broken.values()):
        node = max(reversed(broken), key=lambda node: len(broken[node]))
        yield Fault(node, "link", f"it cannot exchange data with {fold_hostlist(sorted(broken.pop(node)))}")
        for peers in broken.values():
            peers.discard(node)


def _values(reports: Mapping[str, NodeReport], check: str) -> dict[str, Mapping[str, Any]]:
    return {node: report.values[check] for node, report in reports.items() if report.values.get(check)}


def _median_or_zero(values: Iterable[float]) -> float:
    known = list(values)
    return median(known) if known else 0.0


def _low_outliers(values: Mapping[Key, float], min_share: float, limits: Limits) -> list[tuple[Key, float]]:
    """Nodes or GPUs whose value is below `min_share` of the median, and far from it in MADs; each with its share."""
    if len(values) < 2:
        return []
    center = median(values.values())
    deviation = _MAD_TO_DEVIATION * median(abs(value - center) for value in values.values())
    margin = limits.deviations * deviation if len(values) >= _MIN_NODES_FOR_MAD else 0.0
    return [(node, value / center) for node, value in values.items()
            if value < min_share * center and value < max(center - margin, _FAR_SHARE * center)]
