"""Which nodes the preflight calls bad."""

import numpy as np
import pytest

from slurmdl.health.faults import Fault, NodeReport, find_faults
from slurmdl.health.node_checks import CHECKS, matrix_product_rate, parse_nvidia_smi
from slurmdl.health.preflight import confirmed_link_faults
from slurmdl.links.samples import LinkSample

ALL = tuple(CHECKS)


def report(node: str = "n1", **changes) -> NodeReport:
    values = {"cpu": {"cpus": 4, "rate": 4e7, "speed": 1e7},
              "memory": {"available": 64e9, "total": 128e9, "bandwidth": 20e9},
              "disk": {"directory": "/tmp", "free": 50e9, "write_seconds": 0.01},
              "clock": {"time": 0.0}, "gpu": {}}
    link = {"throughput": 1e9, "rtt": 2e-5, "loss": 0.0}
    offset = changes.pop("clock_offset", 0.0)
    for name, value in changes.items():
        if name in link:
            link[name] = value
        else:
            check, _, key = name.partition("_")
            values[check] = {**values[check], key: value}
    return NodeReport(values, {}, offset, LinkSample("node", node, 1e9, "probe", **link))


def faults(*bad: NodeReport, good: int = 7, checks=ALL, with_links=True) -> list[Fault]:
    reports = {f"good{i}": report() for i in range(good)} | {f"bad{i}": item for i, item in enumerate(bad)}
    return find_faults(reports, checks, with_links)


def test_equal_nodes_are_good():
    assert faults() == []
    assert faults(good=1) == []


@pytest.mark.parametrize(("changes", "check", "text"), [
    ({"cpu_rate": 1e7}, "cpu", "its CPUs do 25% of the work of the others"),
    ({"cpu_withheld": 0.7}, "cpu", "a CPU quota of its control groups withholds 70% of the CPU time"),
    ({"cpu_speed": 6e6}, "cpu", "its slowest CPU runs at 60% of the others' speed"),
    ({"memory_available": 9e9}, "memory", "9 GB of memory are free, 64 GB on the median node"),
    ({"memory_bandwidth": 4e9}, "memory", "its memory has 20% of the others' bandwidth"),
    ({"disk_free": 1e6}, "disk", "1 MB are free in /tmp"),
    ({"disk_write_seconds": 4.0}, "disk", "a write of 1 MB to /tmp took 4 s"),
    ({"clock_offset": 3600.0}, "clock", "its clock is 1 h ahead of the others"),
    ({"clock_offset": -90.0}, "clock", "its clock is 1 min 30 s behind the others"),
    ({"gpu_gpus": 3, "gpu_allocated": 4}, "gpu", "3 GPUs answered; Slurm allocated 4"),
    ({"gpu_errors": ["GPU 1: 2 uncorrected ECC errors"]}, "gpu", "GPU 1: 2 uncorrected ECC errors"),
    ({"throughput": 1e8}, "link", "its link carries 800 Mbit/s, 10% of the median link"),
    ({"loss": 0.02}, "link", "its link loses 2.0% of the packets"),
    ({"rtt": 0.01}, "link", "its link adds 10 ms to a round trip, the median link 20 us"),
])
def test_fault_is_found_on_its_node_only(changes, check, text):
    assert faults(report(**changes)) == [Fault("bad0", check, text)]
    assert faults(report(**changes), good=2) == [Fault("bad0", check, text)]


@pytest.mark.parametrize("changes", [{"cpu_rate": 2.6e7}, {"cpu_speed": 7.5e6}, {"memory_available": 20e9},
                                     {"memory_bandwidth": 11e9}, {"disk_write_seconds": 1.0}, {"clock_offset": 3.0},
                                     {"throughput": 6e8}, {"loss": 0.004}, {"rtt": 1e-3}])
def test_small_difference_is_no_fault(changes):
    assert faults(report(**changes)) == []


@pytest.mark.parametrize(("usual", "changes"), [
    ({"disk_write_seconds": 1.0}, {"disk_write_seconds": 4.5}), ({"cpu_withheld": 0.5}, {"cpu_withheld": 0.59}),
    ({"loss": 0.01}, {"loss": 0.03}), ({"rtt": 5e-3}, {"rtt": 1.5e-2}),
    ({"clock_offset": 60.0}, {"clock_offset": 64.0})])
def test_what_all_nodes_have_is_no_fault(usual, changes):
    reports = {f"n{i}": report(**usual) for i in range(5)} | {"n5": report(**changes)}
    assert find_faults(reports, ALL, True) == []


@pytest.mark.parametrize(("rates", "bad"), [
    ((9e8, 8e8, 2e8), ["n2"]),  # three nodes are too few to estimate the noise
    ((9e8, 1e9, 3e8, 2.9e8), []), ((9e8, 1e9, 3e8, 2e7), ["n3"])])
def test_noise_of_few_nodes(rates, bad):
    reports = {f"n{i}": report(throughput=rate) for i, rate in enumerate(rates)}
    assert [fault.node for fault in find_faults(reports, ALL, True)] == bad


def test_node_that_does_not_answer_is_bad():
    silent, broken = NodeReport(), report()
    broken.values.pop("disk")
    broken.errors["disk"] = "check disk: no answer within 5 s"
    broken.link = None
    assert faults(silent, broken) == [
        *(Fault("bad0", check, "no answer") for check in ALL), Fault("bad0", "link", "no node reaches it"),
        Fault("bad1", "disk", "check disk: no answer within 5 s"), Fault("bad1", "link", "no node reaches it")]
    assert {fault.check for fault in faults(silent, with_links=False, checks=("cpu",))} == {"cpu"}


def test_noise_of_a_busy_cluster_is_no_fault():
    """Rates spread by a factor of 2 to 3: an outlier must stand out of the noise, not only of the median."""
    rng, alarms = np.random.default_rng(5), 0
    for _ in range(1000):
        reports = {f"n{i}": report(cpu_rate=4e7 * rng.uniform(0.35, 1.0), throughput=1e9 * rng.uniform(0.4, 1.0))
                   for i in range(12)}
        alarms += bool(find_faults(reports, ALL, True))
    assert alarms <= 10, alarms  # 1 %, before the failed checks are repeated


def test_two_bad_nodes_of_four_are_found():
    """In a zone of two nodes the probes cannot show which of the two links is bad."""
    slow = report(throughput=5e7)
    assert [fault.node for fault in faults(slow, slow, good=2)] == ["bad0", "bad1"]


def test_link_over_the_uplink_is_not_compared_with_links_inside_a_zone():
    alone = report(throughput=5e7)
    alone.is_alone_in_zone = True
    assert faults(alone, good=3) == []
    assert [fault.node for fault in faults(alone, report(throughput=5e7), good=3)] == ["bad1"]


def test_nodes_of_two_sizes_are_compared_per_cpu():
    assert faults(report(cpu_cpus=64, cpu_rate=64e7)) == []


def test_nvidia_smi_output():
    good = "GPU-1, 81559, 81000, 0, Not Active, Not Active\n"
    assert parse_nvidia_smi(good * 2) == (2, [])
    text = good + "GPU-2, 81559, 81000, 3, Active, Not Active\nGPU-3, 81559, 81000, [N/A], Not Active, Active\n" \
                  "Unable to determine the device handle for GPU2: Unknown Error\n"
    assert parse_nvidia_smi(text) == (4, [
        "GPU 1: 3 uncorrected ECC errors", "GPU 1: clock throttled by the hardware",
        "GPU 2: clock throttled by the hardware (heat)",
        "GPU 3: Unable to determine the device handle for GPU2: Unknown Error"])


@pytest.mark.parametrize(("second", "is_bad"), [
    (report(throughput=5e7), True), (report(throughput=9e8), False),
    (report(throughput=None), True), (NodeReport(), True)])
def test_second_measurement_of_a_link_decides(second, is_bad):
    """Without one, or beside another node that only the suspected one has reached, the first one counts."""
    reports = {f"good{i}": report() for i in range(5)} | {"bad": report(throughput=5e7)}
    again = {"bad": second, "good0": report(throughput=5e7), "good1": NodeReport()}
    assert [fault.node for fault in confirmed_link_faults(["bad"], reports, again)] == ["bad"] * is_bad


def test_link_reached_only_in_the_second_measurement():
    reports = {f"good{i}": report() for i in range(5)} | {"bad": NodeReport(report().values)}
    assert not confirmed_link_faults(["bad"], reports, {"bad": report(throughput=9e8)})
    assert [fault.text for fault in confirmed_link_faults(["bad"], reports, {"bad": NodeReport()})] == [
        "no node reaches it"]


def gpu_report(*rates: float, name: str = "H100") -> NodeReport:
    return report(gpu_gpus=len(rates), gpu_allocated=len(rates),
                  gpu_products=[{"name": name, "rate": rate} for rate in rates])


def test_slow_gpu_is_bad_among_those_of_its_name():
    reports = {"n1": gpu_report(6e14, 6.1e14), "n2": gpu_report(6e14, 3e14),
               "n3": gpu_report(2e14, 2e14, name="A100")}
    [fault] = find_faults(reports, ALL, True)
    assert (fault.node, fault.check) == ("n2", "gpu")
    assert fault.text.startswith("GPU 1 ") and "50%" in fault.text


def test_rate_of_matrix_products_on_a_cpu():
    pytest.importorskip("torch")
    assert 1e6 < matrix_product_rate("cpu", 64) < 1e15


def broken_pairs(*pairs: str, nodes: str = "abcdef", without_link: str = "") -> dict[str, NodeReport]:
    reports = {node: report(node) for node in nodes}
    for first, second in pairs:
        reports[first].unreachable |= {second}
        reports[second].unreachable |= {first}
    for node in without_link:
        reports[node].link = None
    return reports


@pytest.mark.parametrize(("reports", "texts"), [
    (broken_pairs("ab"), {"b": "it cannot exchange data with a"}),
    (broken_pairs("ab", "ac", "ad"), {"a": "it cannot exchange data with b,c,d"}),
    (broken_pairs("ab", "cd"), {"b": "it cannot exchange data with a", "d": "it cannot exchange data with c"}),
    (broken_pairs("ab", "ac", without_link="a"), {"a": "no node reaches it"}),
])
def test_fewest_nodes_that_break_all_pairs(reports, texts):
    assert {fault.node: fault.text for fault in find_faults(reports, ALL, True)} == texts
    assert not find_faults(reports, ALL, False)


def test_broken_pair_must_be_found_twice():
    first, again = broken_pairs("ab", "ac"), broken_pairs("ac")
    assert [fault.node for fault in confirmed_link_faults(["a", "c"], first, again)] == ["c"]
    assert not confirmed_link_faults(["a"], first, broken_pairs())
    # b does not reach the leader of the second run, c is not in it
    missing = confirmed_link_faults(["b"], broken_pairs("ab", "bc"), broken_pairs(nodes="ab", without_link="b"))
    assert [fault.text for fault in missing] == ["it cannot exchange data with a,c"]
    # f leads the second run and reaches the reference nodes, but not b
    led = confirmed_link_faults(["f"], broken_pairs("bf"), broken_pairs(nodes="abf", without_link="b"))
    assert [(fault.node, fault.text) for fault in led] == [("f", "it cannot exchange data with b")]
