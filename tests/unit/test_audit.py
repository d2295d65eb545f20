"""Audit of jobs: leaf zones, costs and sums of small cases, computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from placing import SCORES, three_level, two_level

from slurmdl.errors import InputError, UsageError
from slurmdl.history.accounting import JobTable, read_job_records
from slurmdl.history.audit import Audit, AuditOptions, audit_jobs, count_broken_segments
from slurmdl.history.audit_report import audit_to_json, summarize_audit
from slurmdl.history.best_nodes import CommCosts
from slurmdl.history.leaves import Leaves
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.iteration_cost import network_links, predict_cost
from slurmdl.topology.source import block_topology, tree_topology
from slurmdl.topology.topology import Topology
from slurmdl.traffic import Traffic

TOPOLOGY = two_level(["a1", "a2", "a3", "a4"], ["b1", "b2", "b3", "b4"])
DAY = 1_714_521_600
#: a job on all nodes, later: all nodes are in use by the partition
ALL = ("99", 10_000, 10_001, "a[1-4],b[1-4]")


def table(*jobs: tuple[str, int, int, str], user: str = "ada", partition: str = "main") -> JobTable:
    """Records of (job ID, start, end, nodes); times in seconds after DAY, end -1 while the job runs."""
    lines = ["JobID|User|Partition|State|Start|End|NodeList"]
    for job_id, start, end, nodes in jobs:
        name, _, owner = job_id.partition("@")
        lines.append(f"{name}|{owner or user}|{partition}|COMPLETED|{DAY + start}|"
                     f"{DAY + end if end >= 0 else 'Unknown'}|{nodes}")
    return read_job_records(lines, "jobs.txt")


def audit(*jobs: tuple[str, int, int, str], topology: Topology = TOPOLOGY, scores: LinkScores = SCORES,
          **options: object) -> Audit:
    return audit_jobs(table(*jobs), topology, scores, AuditOptions(**options))  # type: ignore[arg-type]


def zones(result: Audit) -> dict[str, tuple[int, int]]:
    """Job ID -> leaf zones used and fewest possible."""
    return {result.table.job_ids[row]: (int(used), int(fewest)) for row, used, fewest in zip(
        result.jobs.row, result.jobs.used_zones, result.jobs.fewest_zones, strict=True)}


def test_fewest_zones_from_the_jobs_that_ran():
    result = audit(("11", 0, 100, "a[1-2]"), ("12", 5, 100, "b1"), ("5", 10, 3610, "a3,b2"), ALL)
    # when job 5 started, a3 and a4 were free, as were b2 to b4
    assert zones(result) == {"11": (1, 1), "5": (2, 1), "99": (2, 2)}
    assert result.one_node_jobs == 1
    assert audit(("11", 0, 100, "a[1-2,4]"), ("13", 0, 100, "b[1,3-4]"), ("5", 10, 20, "a3,b2"), ALL
                 ).jobs.fewest_zones.tolist() == [1, 1, 2, 2]


def test_memory_for_unknown_nodes_is_bounded():
    """A record of 80 bytes names 262,144 nodes."""
    result = audit(("1", 0, 9, "a1,x[1-60000]"), ("2", 0, 9, "y[1-60000],a2"), ("3", 0, 9, "a[1-2]"), ALL)
    assert any("at least 100,000 nodes in no zone of test: x1, x2" in str(problem) for problem in result.problems)
    assert zones(result) == {"3": (1, 1), "99": (2, 2)}


def test_times_at_which_nodes_are_free():
    def fewest(start: int, end: int) -> int:
        return zones(audit(("14", start, end, "a4,b[3-4],a[1-2]"), ("5", 100, 200, "a3,b1,b2"), ALL))["5"][1]

    # b3 and b4 must be free for three nodes in one zone
    assert fewest(0, 99) == fewest(0, 100) == fewest(101, 200) == 1
    assert fewest(0, 101) == fewest(100, 101) == fewest(99, 150) == 2


def test_only_nodes_that_the_partition_used_count_as_free():
    assert zones(audit(("5", 0, 10, "a1,b1"))) == {"5": (2, 2)}
    assert zones(audit(("5", 0, 10, "a1,b1"), ("15", 500, 600, "b2"))) == {"5": (2, 1)}
    records = read_job_records(["JobID|Partition|Start|End|NodeList", f"1|x|{DAY}|{DAY + 9}|a1,b1",
                                f"2|y|{DAY + 500}|{DAY + 600}|b2"], "jobs.txt")
    assert audit_jobs(records, TOPOLOGY, SCORES).jobs.fewest_zones.tolist() == [2]


def test_own_nodes_are_free_although_another_job_shares_them():
    assert zones(audit(("14", 0, 100, "a[1-2],b[1-4]"), ("5", 10, 20, "a[1-2],b1"), ALL))["5"] == (2, 1)


def test_a_running_job_holds_its_nodes_until_the_last_time():
    result = audit(("16", 0, -1, "a[1-2],b[3-4]"), ("5", 50, 60, "a[3-4],b1"), ("17", 7200, 7201, "b2"))
    # a1 and a2 are held, b1 and b2 are free, and b3 and b4 are held
    assert zones(result)["5"] == (2, 2)
    assert result.jobs.node_hours[0] == pytest.approx(4 * 7201 / 3600)
    assert "1 job without end" in " ".join(result.notes)


def test_factor_and_lost_node_hours():
    # two nodes exchange messages of the model's size over an uplink of 50 bytes/s instead of links of 1000 bytes/s
    result = audit(("5", 0, 3600, "a1,b1"), ("18", 4000, 7600, "a1,a2"), ALL, comm_share=0.5)
    spread, good = 0, 1
    for k in range(2):
        assert result.jobs.factor[k].tolist() == pytest.approx([20, 1, 1])
    assert result.jobs.node_hours[[spread, good]].tolist() == [2, 2]
    assert result.lost_node_hours[0].tolist() == pytest.approx([2 * 0.5 * 0.95, 0, 0])
    # half of the time was communication and would take a twentieth
    assert result.step_factor[0, spread] == pytest.approx(1 / (0.5 + 0.5 / 20))
    summary = summarize_audit(result)
    assert [job.job_id for job in summary.worst_jobs] == ["5"]
    assert summary.total.strategies["gossip"].lost_node_hours == pytest.approx(0.95)
    mean = (20 * 2 + 2 + 8 / 3600) / (4 + 8 / 3600)
    assert summary.total.strategies["allreduce"].mean_factor == pytest.approx(mean)


def test_order_of_the_node_list_counts_for_a_ring():
    # a1 b1 a2 b2: each uplink is crossed twice instead of once
    interleaved = two_level(["n1", "n3"], ["n2", "n4"])
    result = audit(("1", 0, 10, "n[1-4]"), topology=interleaved)
    assert result.jobs.factor[:, 0].tolist() == pytest.approx([2, 1])
    assert result.jobs.leaf_order_factor[:, 0].tolist() == pytest.approx([1, 1])
    assert zones(result) == {"1": (2, 2)}


def test_all_jobs_of_the_best_nodes_have_factor_one():
    result = audit(("1", 0, 10, "a[1-4]"), ("2", 5, 20, "b[1-3]"), ("3", 30, 40, "b[3-4]"), ALL)
    assert (result.jobs.factor == 1).all() and not result.improvable.any()
    assert summarize_audit(result).worst_jobs == ()


@pytest.mark.parametrize("leaf_bandwidth", [0.0, 500.0, 5000.0])
@pytest.mark.parametrize("strategy", ["allreduce", "gossip"])
def test_cached_costs_are_those_of_the_cost_model(strategy, leaf_bandwidth):
    topology = three_level(3, 3, 4)
    leaves = Leaves.from_topology(topology)
    scores = LinkScores(default_node_bandwidth=1000.0, default_zone_bandwidth=(2500.0, 4000.0), default_latency=1e-3,
                        default_leaf_bandwidth=leaf_bandwidth)
    costs = CommCosts(leaves, scores, [strategy], 5000.0)
    random = np.random.default_rng(3)
    for _ in range(300):
        numbers = random.permutation(36)[:random.integers(2, 12)].astype(np.int32)
        if random.random() < 0.5:
            numbers.sort()
        counts = np.bincount(leaves.leaf_of_node[numbers], minlength=len(leaves.size))
        in_order = costs.of_counts(counts)
        for seconds, order in ((in_order, np.sort(numbers)), (costs.of_nodes(numbers, in_order), numbers)):
            names = [leaves.node_names[number] for number in order]
            expected = predict_cost(Traffic(strategy, 5000.0).phases(len(names)),
                                    network_links(names, topology, scores), np.arange(len(names)))
            assert seconds[0] == pytest.approx(expected.seconds)
            if order is not numbers:
                messages = len(names) * (1 if strategy == "allreduce" or len(names) == 2 else len(names) - 1)
                bytes_per_message = expected.inter_node_bytes / messages
                assert costs.sort_key(counts)[:2] == pytest.approx(
                    (expected.seconds, expected.inter_zone_bytes / bytes_per_message))


def test_best_nodes_are_below_the_smallest_zone():
    # three_level(2, 2, 2): leaf zones z0, z1 in row 0 and z2, z3 in row 1, each with two nodes
    topology = three_level(2, 2, 2)
    names = {zone: [topology.nodes[i] for i in np.flatnonzero(topology.leaf == zone)] for zone in range(4)}
    job = names[0] + names[2][:1]
    others = ("17", 0, 5, ",".join(names[2][1:] + names[3][:1]))
    scores = LinkScores(default_node_bandwidth=1000.0, default_zone_bandwidth=(500.0, 10.0), default_latency=0.0)
    result = audit(others, ("1", 1, 10, ",".join(job)), ("99", 90, 99, ",".join(topology.nodes)), topology=topology,
                   scores=scores)
    # as many leaf zones, but both below row 0
    assert zones(result)["1"] == (2, 2)
    assert result.jobs.factor[0, 1] == pytest.approx(500 / 10)
    row = int(result.jobs.row[1])
    assert [result.leaves.zone_names[leaf] for leaf in np.flatnonzero(result.best[row])] == ["z0", "z1"]


def test_jobs_do_not_span_roots():
    topology = tree_topology((2, 8))  # two roots with four nodes each
    jobs = (("17", 0, 50, "n3,n[5-8]"), ("1", 10, 20, "n1,n2"), ("99", 90, 99, "n[1-8]"))
    result = audit(*jobs, topology=topology)
    assert zones(result)["1"] == (1, 1)


def test_broken_segments():
    cases = ([2, 2], [4, 4], [3, 3, 2], [4, 3, 1], [3], [1, 1, 1])
    assert [count_broken_segments(counts, 4) for counts in cases] == [1, 0, 2, 1, 0, 1]
    topology = block_topology((4, 16), (4, 8))
    result = audit(("1", 0, 10, "n[01-02,05-06]"), ("2", 20, 30, "n[01-08]"), ("3", 40, 50, "n[02-03,05-08,10,11]"),
                   ("99", 90, 99, "n[01-16]"), topology=topology)
    assert result.jobs.broken_segments.tolist() == [1, 0, 1, 0]
    assert summarize_audit(result).total.broken_segments == 2
    assert "records name no --segment" in " ".join(result.notes)


def test_unknown_nodes_and_unreadable_lists_are_named():
    result = audit(("1", 0, 10, "a1,gpu7"), ("2", 0, 10, "a[1-"), ("3", 0, 10, "a1,a2"), ("4", 5, 5, "a1,a2"))
    assert zones(result) == {"3": (1, 1)}
    text = "\n".join(map(str, result.problems))
    assert "1 node in no zone of test: gpu7" in text and "1 unreadable node list" in text and "'a[1-'" in text
    assert "2 jobs not audited" in text and "1 job with a run time of 0 s" in text


def test_names_with_and_without_domain_are_the_same_nodes():
    full = two_level(["a1.hpc.example", "a2.hpc.example"], ["b1.hpc.example", "b2.hpc.example"])
    short = two_level(["a1", "a2"], ["b1", "b2"])
    for topology, first, rest in ((short, "a1.hpc.example", ("b1.hpc.example", "a[1-2].hpc.example,b[1-2]")),
                                  (full, "a1", ("b1", "a[1-2],b[1-2].hpc.example")),
                                  (full, "a1.hpc.example", ("b1", "a[1-2],b[1-2]"))):
        result = audit(("1", 0, 100, f"{first},{rest[0]}"), ("2", 200, 300, rest[1]), topology=topology)
        assert zones(result) == {"1": (2, 1), "2": (2, 2)}
        assert result.problems == ()
    result = audit(("1", 0, 100, "a1.hpc.example,b1"), topology=short)
    assert ("1 node name with or without a domain, unlike in the topology: a1.hpc.example is taken as a1"
            in result.notes)


def test_two_domains_are_two_hosts():
    two_clusters = two_level(["n1.one", "n1.two"], ["n2.one", "n3"])
    result = audit(("1", 0, 100, "n1,n3"), ("2", 0, 100, "n2,n3"), ("3", 0, 100, "n2.two,n3"), topology=two_clusters)
    assert (list(zones(result)), result.lists.unknown) == (["2"], ("n1", "n2.two"))
    # two hosts of the records cannot both be n3
    result = audit(("1", 0, 100, "n3.one,n1.one"), ("2", 0, 100, "n3.two,n1.one"), topology=two_clusters)
    assert (list(zones(result)), result.lists.unknown) == (["1"], ("n3.two",))


@pytest.mark.parametrize(("jobs", "options", "message"), [
    ([("1", 0, 10, "m1,m2"), ("2", 0, 10, "m[1-2]")], {},
     "no job to audit: nodes of the records are in no zone of test: m1, m2; expected a1, a2, a3, a4, ..."),
    ([("1", 0, 10, "a[1-"), ("2", 0, 10, "a[")], {}, "no job to audit: 2 unreadable node lists, e.g. 'a[1-'"),
    ([("1", 0, 10, "a1,b1"), ALL], {"users": ("bob",), "since_s": 5},
     "no job to audit: 2 jobs in the records, none selected by --since, --user"),
    ([("1", 0, 10, "a1,b1")], {"partitions": ("gpu",), "until_s": DAY},
     "no job to audit: 1 job in the records, none selected by --until, --partition"),
    ([("1", 5, 5, "a1,b1"), ("2", 5, 5, "a1")], {}, "no job to audit: 2 records, none with a run time and nodes"),
])
def test_no_job_to_audit_is_an_error_that_says_why(jobs, options, message):
    with pytest.raises(InputError) as raised:
        audit(*jobs, **options)
    assert str(raised.value) == f"jobs.txt: {message}"


def test_period_users_and_partitions():
    jobs = (("1@ada", 0, 100, "a1,b1"), ("2@bob", 50, 150, "a2,b2"), ("3@ada", 200, 250, "a1,b1"), ALL)
    assert list(zones(audit(*jobs, since_s=DAY + 50, until_s=DAY + 200))) == ["2"]
    assert list(zones(audit(*jobs, users=("ada",)))) == ["1", "3", "99"]
    # jobs that are not audited hold their nodes
    assert zones(audit(*jobs, users=("bob",))) == zones(audit(*jobs, since_s=DAY + 50, until_s=DAY + 51))
    assert "started before the first recorded end" in " ".join(audit(*jobs).notes)
    assert "started before the first recorded end" not in " ".join(audit(*jobs, since_s=0).notes)


def test_groups_and_json_are_deterministic():
    jobs = [(f"{i}@{user}", 100 * i, 100 * i + 3600, nodes) for i, (user, nodes) in enumerate(
        [("ada", "a1,b1"), ("bob", "a2,b2"), ("ada", "a[1-3],b[1-3]"), ("eve", "a3,a4")])]
    summary = summarize_audit(audit(*jobs, ALL))
    assert [(group.name, group.jobs) for group in summary.sizes] == [("2", 3), ("5-8", 2)]
    assert {group.name: group.jobs for group in summary.users} == {"ada": 3, "bob": 1, "eve": 1}
    assert (summary.total.used_zones, summary.total.jobs_in_several_zones) == (9, 4)
    results = audit(*jobs, ALL), audit(*jobs, ALL)
    first, second = (audit_to_json(result, summarize_audit(result)) for result in results)
    assert first == second


def test_errors():
    with pytest.raises(InputError, match="no zones with nodes"):
        audit(ALL, topology=Topology.flat(["a1"]))
    with pytest.raises(UsageError, match="--strategy ps: expected allreduce or gossip"):
        audit(ALL, strategies=("ps",))
