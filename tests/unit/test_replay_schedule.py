"""EASY backfill: schedules computed by hand, a naive reference, and invariants on small clusters."""

import heapq

import numpy as np
import pytest
from placing import three_level, two_level

from slurmdl.history.best_nodes import CommCosts
from slurmdl.history.leaves import Leaves
from slurmdl.history.replay import ReplaySettings, jobs_with_slurmdl, replay_policies, summarize_values, usable_trace
from slurmdl.history.scheduler import Communication, Machine, SchedulerTiming, Simulation
from slurmdl.history.traces import JobTrace
from slurmdl.links.link_scores import LinkScores
from slurmdl.topology.source import block_topology

TREE = two_level(("a1", "a2"), ("b1", "b2"))
FIXED = Communication(0.0, 0.0, True)


def trace(*jobs):
    """Jobs as (submit, nodes, run, limit)."""
    submit, nodes, run, limit = (np.array(column, float) for column in zip(*jobs, strict=True))
    return JobTrace(submit - submit[0], run, limit, nodes.astype(np.int64), np.arange(len(jobs)), "test")


def machine(topology, strategy="gossip", **scores):
    leaves = Leaves.from_topology(topology)
    return Machine(CommCosts(leaves, LinkScores(**scores), [strategy], 1e8))


def simulate(jobs, topology=TREE, placed=False, communication=FIXED, kind=Simulation, timing=None, bound=False):
    cluster = machine(topology)
    simulation = kind(jobs, cluster, cluster.rule.choose, np.full(len(jobs), placed), np.full(len(jobs), bound),
                      communication, timing, keep_nodes=True)
    return simulation, simulation.run()


def random_trace(seed, nodes, jobs=60):
    generator = np.random.default_rng(seed)
    run = generator.integers(1, 40, jobs).astype(float)
    return JobTrace(np.sort(generator.integers(0, 300, jobs)).astype(float), run,
                    run * generator.integers(1, 4, jobs), generator.integers(1, nodes + 1, jobs),
                    np.arange(jobs) % 5, "random")


@pytest.mark.parametrize(("jobs", "starts"), [
    # the second job needs all nodes at 10; the third ends by then, the fourth would not
    ([(0, 3, 10, 10), (1, 4, 5, 5), (2, 1, 8, 8), (3, 1, 9, 9)], [0, 10, 2, 15]),
    # the second job leaves a node free, which the third may keep beyond the reservation
    ([(0, 3, 10, 10), (1, 3, 5, 5), (2, 1, 50, 50), (3, 1, 50, 50)], [0, 10, 2, 15]),
    # a job that ends before its limit lets the first waiting job start early
    ([(0, 4, 3, 100), (1, 4, 5, 5), (2, 1, 1, 1)], [0, 3, 8]),
    # first come, first served among jobs that fit
    ([(0, 2, 10, 10), (0, 2, 10, 10), (5, 1, 1, 1), (6, 1, 1, 1)], [0, 0, 10, 10]),
])
def test_schedule_computed_by_hand(jobs, starts):
    assert simulate(trace(*jobs))[1].start_s.tolist() == starts


def test_backfill_takes_other_nodes_than_those_of_the_reservation():
    # blocks of 6 nodes: the third job needs the whole block of the first at 10; the last fits best beside it
    jobs = trace((0, 4, 10, 10), (0, 3, 100, 100), (1, 6, 5, 5), (2, 2, 50, 50))
    _, schedule = simulate(jobs, block_topology((2, 12), (6,)))
    assert schedule.start_s.tolist() == [0, 0, 10, 2]


def test_summary_of_values():
    assert summarize_values(np.arange(101) ** 2.0) == {"median": 2500, "mean": 3350, "p95": 9025}


def test_utilization_and_largest_startable_job_are_averages_over_time():
    # until 10: 2 of 4 nodes busy in one leaf; from 10 to 20: all free
    _, schedule = simulate(trace((0, 2, 10, 10), (20, 1, 1, 1)))
    assert (schedule.utilization, schedule.useful) == (0.25, 0.25)
    assert (schedule.leaf_nodes, schedule.startable_nodes) == (0.5, 0.75)


def naive_easy(jobs, nodes):
    """Starts by the definition of EASY with counts of nodes only."""
    start, running, waiting, arrived = {}, [], [], 0
    while len(start) < len(jobs):
        now = min([*jobs.submit_s[arrived:arrived + 1], *(end for end, _ in running[:1])])
        while running and running[0][0] <= now:
            heapq.heappop(running)
        while arrived < len(jobs) and jobs.submit_s[arrived] <= now:
            waiting.append(arrived)
            arrived += 1

        def free(running=running):
            return nodes - sum(jobs.nodes[job] for _, job in running)

        def begin(job, now=now, running=running):
            start[job] = now
            heapq.heappush(running, (now + jobs.run_s[job], job))

        while waiting and jobs.nodes[waiting[0]] <= free():
            begin(waiting.pop(0))
        if not waiting:
            continue
        left = free()
        for end, job in sorted((start[job] + jobs.limit_s[job], job) for _, job in running):
            left += jobs.nodes[job]
            if left >= jobs.nodes[waiting[0]]:
                # all that end at the same time
                left = free() + sum(jobs.nodes[job] for _, job in running if start[job] + jobs.limit_s[job] <= end)
                shadow, spare = end, left - jobs.nodes[waiting[0]]
                break
        for job in waiting[1:]:
            is_short = now + jobs.limit_s[job] <= shadow
            if jobs.nodes[job] <= free() and (is_short or jobs.nodes[job] <= spare):
                spare -= 0 if is_short else jobs.nodes[job]
                waiting.remove(job)
                begin(job)
    return [start[job] for job in range(len(jobs))]


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_starts_equal_those_of_a_naive_easy_whatever_the_choice_of_nodes(seed, placed):
    topology = three_level(2, 3, 4)
    jobs = random_trace(seed, len(topology.nodes))
    assert simulate(jobs, topology, placed)[1].start_s.tolist() == naive_easy(jobs, len(topology.nodes))


class Recording(Simulation):
    """Records the first reservation of each job."""

    def _reserve(self, job):
        super()._reserve(job)
        self.__dict__.setdefault("reserved_s", {}).setdefault(job, self.shadow_s)


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("kind", ["tree", "block"])
@pytest.mark.parametrize("seed", range(4))
def test_no_node_is_used_twice_and_reservations_hold(seed, kind, placed):
    topology = three_level(2, 3, 4) if kind == "tree" else block_topology((6, 24), (4, 8, 16))
    cluster = machine(topology)
    jobs = usable_trace(random_trace(seed, len(topology.nodes)), cluster)
    simulation, schedule = simulate(jobs, topology, placed, kind=Recording)
    assert np.isfinite(schedule.start_s).all()
    assert (schedule.start_s >= jobs.submit_s).all()
    assert [len(set(nodes.tolist())) for nodes in schedule.nodes] == jobs.nodes.tolist()
    for first in range(len(jobs)):
        for second in range(first):
            if set(schedule.nodes[first].tolist()) & set(schedule.nodes[second].tolist()):
                end = schedule.start_s + schedule.run_s
                assert end[first] <= schedule.start_s[second] or end[second] <= schedule.start_s[first]
    assert simulation.reserved_s
    assert all(schedule.start_s[job] <= reserved for job, reserved in simulation.reserved_s.items())


def test_resulting_run_time_follows_the_factor_of_communication():
    communication = Communication(1.0, 0.5)
    # two nodes of different leaves with thin uplinks: slower than in one leaf
    jobs = trace((0, 1, 100, 100), (0, 1, 10, 10), (0, 1, 100, 100), (20, 2, 60, 60))
    cluster = machine(TREE, default_zone_bandwidth=(6.25e8,))
    simulation = Simulation(jobs, cluster, cluster.rule.choose, np.zeros(4, bool), np.array([False] * 3 + [True]),
                            communication)
    schedule = simulation.run()
    assert schedule.zones[3] == 2
    # uplinks with half of the bandwidth of node links
    assert schedule.factor[3] == pytest.approx(2, rel=1e-3)
    assert schedule.run_s[3] == pytest.approx(60 * (0.5 + 0.5 * schedule.factor[3]))


def test_delays_of_a_controller():
    jobs = trace((0, 4, 10, 10), (1, 4, 10, 10), (2, 1, 1, 1))
    _, schedule = simulate(jobs, timing=SchedulerTiming(completing_s=2, start_s=1))
    assert schedule.start_s[:2].tolist() == [1, 14]
    # the last job fits before the reservation, but backfill runs at 0, 30, 60 ...
    jobs = trace((0, 3, 100, 100), (1, 4, 10, 10), (2, 1, 1, 1))
    assert simulate(jobs, timing=SchedulerTiming(backfill_interval_s=30))[1].start_s[2] == 30


def test_users_with_slurmdl_are_drawn_by_the_seed():
    jobs = random_trace(0, 4)
    placed = jobs_with_slurmdl(jobs, "mixed", 0.4, 1)
    assert {*jobs.user[placed].tolist()}.isdisjoint(jobs.user[~placed].tolist())
    assert len({*jobs.user[placed].tolist()}) == 2
    assert (placed == jobs_with_slurmdl(jobs, "mixed", 0.4, 1)).all()
    assert jobs_with_slurmdl(jobs, "slurmdl", 0.4, 1).all()
    assert not jobs_with_slurmdl(jobs, "slurm", 0.4, 1).any()


def test_random_nodes_use_more_zones_and_policies_are_deterministic():
    topology = three_level(2, 4, 8)
    settings = ReplaySettings(topology, ("slurm", "slurmdl", "mixed", "random"), strategy="gossip")
    cluster = settings.machine()
    jobs = random_trace(3, 16, 120)
    first = {outcome.policy: outcome for outcome in replay_policies(jobs, cluster, settings, 5)}
    again = {outcome.policy: outcome for outcome in replay_policies(jobs, settings.machine(), settings, 5)}
    assert all((first[policy].response_s == again[policy].response_s).all() for policy in first)
    assert first["random"].spread.mean() > 1.3 * first["slurm"].spread.mean()
    assert first["slurmdl"].factor.mean() <= first["slurm"].factor.mean()
