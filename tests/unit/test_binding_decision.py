"""Binding of a job to nodes: options of each mode, zones, and the comparison with Slurm's own choice."""

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest

from slurmdl.cluster.snapshot import ClusterSnapshot, Node, Partition, Reservation
from slurmdl.dl_options import DlOptions
from slurmdl.job_request import JobRequest
from slurmdl.launch import binding, sbatch, submission, submission_record, zone_options
from slurmdl.launch.binding import Binding, PredictedStart
from slurmdl.launch.cluster_state import ClusterState
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.slurm.output import split_output
from slurmdl.topology import scontrol_topology
from slurmdl.topology.source import ZoneDecl, build_topology

NOT_QUERIED = PredictedStart(failure="Slurm is not queried")
PLAIN = b"#!/bin/sh\n"
SCRIPT = b"#!/bin/sh\n#SBATCH -N 2 --ntasks-per-node=2\nslurmdl srun true\n"


def cluster(zones: int = 3, busy: str = "", features: bool = True,
            extra: Mapping[str, str] = MappingProxyType({})) -> ClusterState:
    """Three nodes per zone, round robin: n1 in z1, n2 in z2, ..."""
    names = [f"n{i}" for i in range(1, 3 * zones + 1)]
    zone = {name: f"z{i % zones + 1}" for i, name in enumerate(names)}
    lines = [f"SwitchName={z} Nodes={','.join(n for n in names if zone[n] == z)}" for z in sorted(set(zone.values()))]
    nodes = tuple(Node(name, ("ALLOCATED",) if name in busy.split(",") else ("IDLE",), cpus=4,
                       cpus_unallocated=0 if name in busy.split(",") else 4, memory=1000, memory_unallocated=1000,
                       features=((zone[name],) if features else ()) + ("big", extra.get(name, "big")),
                       partitions=("main",))
                  for name in names)
    text = "\n".join([*lines, f"SwitchName=top Switches=z[1-{zones}]"])
    return ClusterState(ClusterSnapshot.from_nodes(nodes, (Partition("main", True),)),
                        scontrol_topology.read_topologies(split_output(text)).get(), LinkScores())


def parse(*argv: str, script: bytes = SCRIPT, program: str = "") -> submission.Submission:
    call = submission.SbatchCall.from_argv(argv, program, lambda: script)
    return submission.parse_submission(call, {})


def decide(argv: str, state: ClusterState, *, script: bytes = SCRIPT, start: PredictedStart = NOT_QUERIED,
           inside_job: bool = False, questions: list[tuple[str, ...]] | None = None) -> Binding:
    """Bind a job; Slurm's prediction is `start`, and `questions` gets the options of each."""
    def predict_start(options):
        if questions is not None:
            questions.append(tuple(options))
        return start

    job = parse(*argv.split(), script=script)
    return binding.decide_binding(job, state, job.request.options.traffic, inside_job=inside_job,
                                  predict_start=predict_start)


#: all but n9 run jobs
BUSY = "n1,n2,n3,n4,n5,n6,n7,n8"
MESH = "--dl-mesh=dp=2,tp=2"


@pytest.mark.parametrize("case", [
    ("", cluster(), "--prefer=z1", ""),
    ("", cluster(busy="n1,n4"), "--prefer=z2", ""),
    ("-C big", cluster(), "--prefer=big&z1", ""),
    ("-C [small|big] --no-requeue", cluster(), "--nodelist=n[1,4]", ""),
    ("--hint=nomultithread --no-requeue", cluster(), "", "--hint is not modelled, and Slurm is not queried"),
    ("-C (big)&z2", cluster(), "", "a preference cannot include --constraint=(big)&z2"),
    ("-N 5", cluster(), "--prefer=[z1*3&z2*2]", "", PLAIN),
    ("-N 5 -C big", cluster(), "--prefer=[(big&z1)*3&(big&z2)*2]", "", PLAIN),
    ("-N 7", cluster(), "--prefer=[z1*3&z2*3&z3*1]", "", PLAIN),
    ("-N 4 -c3", cluster(), "--prefer=[z1*3&z2*1]", "", PLAIN),
    # Slurm may ignore numbers of nodes per zone: any division is as good, or there is only one
    ("-N 5", cluster(), "--prefer=z1|z2", ""),
    ("-N 5 -n 5", cluster(), "--prefer=z1|z2", "", PLAIN),
    (f"-N 4 -n 4 {MESH}", cluster(busy="n1,n2,n3,n6,n9"), "--prefer=z1|z2", "", PLAIN),
    (f"-N 4 -n 4 {MESH}", cluster(), "", "with -n and no --ntasks-per-node", PLAIN),
    (f"-N 4 -c4 {MESH}", cluster(), "", "because z1 alone could not hold the job", PLAIN),
    ("-N 4 --dl-mesh=dp=4,tp=2", cluster(), "", "because z1 alone could not hold the job"),
    ("-N 7", cluster(), "", "because z1 alone could not hold the job"),
    ("", cluster(busy=BUSY), "", "would fit, but not now"),
    ("--hold", cluster(), "", "--hold decides when the job starts"),
    ("--tmp=1G", cluster(), "", "--tmp is not modelled"),
    ("", cluster(features=False), "", "no node list is bound because the job may be requeued; add --no-requeue to"),
    ("--no-requeue", cluster(features=False), "--nodelist=n[1,4]", ""),
    ("--no-requeue -Q", cluster(features=False), "", "-Q hides the job ID"),
    ("--dl-node-binding=nodelist", cluster(), "--nodelist=n[1,4]", ""),
    ("--dl-node-binding=nodelist", cluster(busy=BUSY), "--nodelist=n[1,4]", ""),
    ("--dl-node-binding=zone", cluster(), "--constraint=z1", ""),
    ("--dl-node-binding=zone -C big", cluster(), "--constraint=big&z1", ""),
    ("--dl-node-binding=zone -C (big)", cluster(), "--switches=1", ""),
    ("--dl-node-binding=zone --dl-zone=z2,z3 -C big", cluster(), "--exclude=n[1,4,7] --switches=1", ""),
    ("--dl-node-binding=zone --dl-zone=z2,z3", cluster(), "--exclude=n[1,4,7] --constraint=z2|z3", ""),
    ("--dl-node-binding=zone", cluster(features=False), "--switches=1", ""),
    # one of the nodes has features of two zones: by these, Slurm could choose other nodes
    ("", cluster(extra={"n2": "z1"}), "", "no node feature identifies it"),
    # a node more for each eight or part of eight; the script has --ntasks-per-node=2
    ("--dl-node-binding=late", cluster(), "--nodes=2-3", ""),
    ("--dl-node-binding=late -n 4", cluster(), "--nodes=2-3 --ntasks=4 --ntasks-per-node=2", ""),
    ("--dl-node-binding=late -n 2", cluster(), "--nodes=2-3 --ntasks=3 --ntasks-per-node=2", ""),
    ("--dl-node-binding=late -N 8", cluster(), "--nodes=8-9", ""),
    ("--dl-node-binding=late -N 9", cluster(), "--nodes=9-11", ""),
    ("--dl-node-binding=late --hold", cluster(), "--nodes=2-3", ""),
    ("--dl-node-binding=late -N 2-3", cluster(), "", "not certain"),
    ("--dl-node-binding=late --wrap=srun", cluster(), "", "no `slurmdl srun`"),
    ("--dl-node-binding=late --tmp=1G", cluster(), "", "--tmp"),
    ("--dl-node-binding=late --array=1-2", cluster(), "", "array"),
])
def test_binding_options_of_each_mode(case):
    argv, state, options, reason, *script = case
    bound = decide(argv, state, script=script[0] if script else SCRIPT)
    assert " ".join(bound.options) == options
    assert reason in bound.reason
    assert bool(bound.reason) != bool(options)


@pytest.mark.parametrize(("argv", "summary"), [
    ("-N1", "Slurm chooses the nodes: the job has only one"),
    ("-N2 --dl-node-binding=off", "Slurm chooses the nodes: --dl-node-binding=off"),
    ("-N2 --hold", "Slurm chooses the nodes: --hold decides when the job starts, so no nodes are bound"),
    # the state of the cluster decides, or the user wants to see it; placement checks the traffic
    *((argv, None) for argv in ("-N2", "-N1 --dl-zone=z1", "-N1 --dl-node-binding=nodelist", "-N1 --dl-explain",
                                "-N1 --dl-strict", "-N1 --dl-mesh=dp=1", "-N1 --dl-groups=a=1,b=1",
                                "-N1 --dl-comm-pattern=hierarchical"))])
def test_binding_without_the_cluster(argv, summary):
    request = parse(*argv.split(), script=PLAIN).request
    bound = binding.decide_without_cluster(request)
    assert (bound and bound.summary(request.options)) == summary


@pytest.mark.parametrize(("argv", "features", "field"), [
    ("--no-requeue", False, "ReqNodeList"), ("", True, "Prefer"), ("--no-requeue --test-only", False, ""),
    ("-Q", True, ""), ("--dl-node-binding=nodelist", False, "")])
def test_only_automatic_binding_is_reverted(argv, features, field):
    assert decide(argv, cluster(features=features)).revert_field == field


def test_no_nodelist_is_bound_inside_a_job():
    bound = decide("--no-requeue", cluster(features=False), inside_job=True)
    assert not bound.options and "runs in a job" in bound.reason


@pytest.mark.parametrize(("argv", "tasks"), [("", None), ("-n 4", 4)])
def test_late_binding_passes_the_requested_size_to_the_job(argv, tasks):
    job = parse("--dl-node-binding=late", *argv.split())
    command = decide(f"--dl-node-binding=late {argv}", cluster()).submit_command(job, {})
    record = submission_record.parse_record(command.env[submission_record.ENV_VARIABLE])
    assert record.requested_size == submission_record.RequestedSize(2, tasks, 2)


Z3 = "--exclude=n[1-2,4-5,7-8]"


@pytest.mark.parametrize(("argv", "state", "options", "reason"), [
    ("--dl-zone=z3", cluster(), Z3, ""),
    ("--dl-zone=z3 --no-requeue", cluster(features=False), Z3, ""),
    ("--dl-zone=z2,z3", cluster(), "--exclude=n[1,4,7] --prefer=z2", ""),
    ("--dl-zone=z2,z3 -C [big|small]", cluster(), "--exclude=n[1,4,7]", "a preference cannot include"),
    ("--dl-zone=z3 -x n3,n1", cluster(), "--exclude=n[1-5,7-8]", ""),
    ("--dl-zone=top", cluster(), "--prefer=z1", ""),
    ("--dl-zone=z3 -N 4", cluster(), Z3, "no zone has 4 fitting nodes"),
    ("--dl-zone=z3", cluster(busy="n3,n6"), Z3, "would fit, but not now"),
    ("--dl-zone=z3 --array=1-2", cluster(), Z3, "job array"),
    ("--dl-zone=z3 --contiguous", cluster(), Z3, "--contiguous"),
    ("--dl-zone=z3 --hold", cluster(), Z3, "--hold"),
    ("--dl-zone=z3 --dl-node-binding=nodelist", cluster(), f"{Z3} --nodelist=n[3,6]", ""),
    ("--dl-zone=z3 --dl-node-binding=zone", cluster(features=False), f"{Z3} --switches=1", ""),
    ("--dl-zone=z3 --dl-node-binding=late", cluster(), f"{Z3} --nodes=2-3", ""),
    ("--dl-zone=z3 -w n1", cluster(), "", "--dl-zone=z3 is not applied: -w is given"),
    ("--dl-zone=z3 -M other", cluster(), "", "--dl-zone=z3 is not applied: -M is given"),
    ("--dl-zone=z3 -m arbitrary", cluster(), "", "is not applied: --distribution=arbitrary"),
    ("--dl-zone=z3 -x ./nodes", cluster(), "", "is not applied: the node list file ./nodes is not supported"),
    ("--dl-zone=z3 -N1 : -N1", cluster(), "", "is not applied: a heterogeneous job"),
])
def test_named_zone_excludes_all_other_nodes(argv, state, options, reason):
    bound = decide(argv, state)
    assert " ".join(bound.options) == options
    assert reason in bound.reason and bool(reason) == bool(bound.reason)


@pytest.mark.parametrize(("free", "nodes", "segment", "divisions"), [
    ({"a": 2, "b": 3}, 4, 1, [(1, 3), (2, 2)]), ({"a": 4, "b": 5}, 6, 2, [(2, 4), (4, 2)]),
    ({"a": 1, "b": 5}, 6, 2, []), ({"a": 1, "b": 1}, 3, 1, []), ({"a": 9}, 3, 1, [(3,)]),
    ({"a": 2, "b": 2, "c": 2}, 4, 2, [(0, 2, 2), (2, 0, 2), (2, 2, 0)])])
def test_divisions_of_a_job_among_zones(free, nodes, segment, divisions):
    found = [tuple(division.values()) for division in zone_options._divisions(free, nodes, segment)]
    assert found == divisions


def test_job_on_many_zones_is_bound_without_a_list_of_all_divisions():
    """There are 10 to the power of 12."""
    nodes = [f"n{i}" for i in range(32 * 18)]
    lines = [f"SwitchName=z{z} Nodes={','.join(nodes[18 * z:18 * z + 18])}" for z in range(32)]
    state = ClusterState(
        ClusterSnapshot.from_nodes([Node(name, ("IDLE",), cpus=4, cpus_unallocated=4, memory=1, memory_unallocated=1,
                                         features=(f"z{i // 18}",)) for i, name in enumerate(nodes)]),
        scontrol_topology.read_topologies(split_output("\n".join([*lines, "SwitchName=top Switches=z[0-31]"]))).get(),
        LinkScores())
    assert "-n and no --ntasks-per-node" in decide("-N 560 -n 560", state, script=PLAIN).reason


def blocks_state(*sizes: int, base: int = 4) -> ClusterState:
    """Blocks of idle nodes without features."""
    zones = [ZoneDecl(f"b{i}", nodes=tuple(f"b{i}n{j}" for j in range(size))) for i, size in enumerate(sizes)]
    topology = replace(build_topology(zones, kind="block", source="test"), block_sizes=(base,))
    nodes = [Node(name, ("IDLE",), cpus=4, cpus_unallocated=4, memory=1000, memory_unallocated=1000)
             for name in topology.nodes]
    return ClusterState(ClusterSnapshot.from_nodes(nodes), topology, LinkScores())


@pytest.mark.parametrize(("argv", "sizes", "answer", "options"), [
    ("-N8 --dl-mesh=dp=2,tp=4", (4, 4), "", "--segment=4"),
    ("-N12 --dl-mesh=dp=3,tp=4 --dl-bytes=tp=1G,dp=1M", (6, 5, 4), "", "--segment=4"),
    ("-N6", (6, 5), "", "--segment=3"),  # one block, whose base size is 4
    ("-N2", (1, 1), "", ""),  # of single nodes
    ("-N8 --segment=2", (4, 4), "", ""),  # the user's own
    ("-N8", (4, 4), "Slurm rejects it: unrecognized option '--segment'", ""),
    ("-N8", (4, 4), "sbatch: error", "--segment=4")])
def test_zone_binding_adds_segments(argv, sizes, answer, options):
    def bind():
        return decide(f"--dl-node-binding=zone {argv}", blocks_state(*sizes), script=PLAIN,
                      start=PredictedStart(failure=answer))

    if options:
        assert " ".join(bind().options) == options
    else:
        assert bind().reason.startswith("--dl-node-binding=zone: no node features identify the zones")


@pytest.mark.parametrize(("failure", "options"), [
    ("", ["--nodelist=b0n[0-3],b1n[0-3]"]), ("Slurm rejects it: x", [])])
def test_node_list_with_several_segments_needs_the_answer_of_slurm(failure, options):
    job = parse("-N8", "--segment=4", "--no-requeue", script=b"#!/bin/sh\n")

    def predict_start(options):
        if not options:
            return PredictedStart(("b2n0",))
        return PredictedStart(tuple(f"b{block}n{node}" for block in (0, 1) for node in range(4)), 0.0, failure)

    bound = binding.decide_binding(job, blocks_state(4, 4, 4), job.request.options.traffic, inside_job=False,
                                   predict_start=predict_start)
    assert list(bound.options) == options
    assert ("several segments and a node list exclude each other" in bound.reason) == bool(failure)


@pytest.mark.parametrize(("start", "options"), [
    (PredictedStart(("n1", "n4")), []),  # the chosen nodes
    (PredictedStart(("n2", "n8")), []),  # as good
    (PredictedStart(("n1", "n2")), ["--prefer=z1"]),
    (PredictedStart(("n2", "n8"), 3600.0), ["--prefer=z1"]),  # later
    (PredictedStart(("n2", "n5", "n8")), ["--prefer=z1"]),  # more nodes
    (PredictedStart(("n2", "n99")), ["--prefer=z1"]),  # unknown to placement
    (PredictedStart(failure="sbatch does not answer"), ["--prefer=z1"])])
def test_automatic_binding_needs_nodes_better_than_those_of_slurm(start, options):
    bound = decide("", cluster(), start=start)
    assert list(bound.options) == options
    assert not bound.reason  # --dl-strict accepts both
    assert bound.placement.nodes == (("n1", "n4") if options else start.nodes)
    summary = bound.summary(DlOptions())
    assert ("no binding is needed" in summary) == (not options)
    assert ("Slurm itself would choose n[1-2], which " in summary) == (start.nodes == ("n1", "n2"))


@pytest.mark.parametrize(("argv", "start", "options", "text"), [
    ("", ("n1", "n4"), [], "Slurm may choose slower nodes of z1; no node list is bound because the job may be"),
    ("--no-requeue", ("n1", "n4"), ["--nodelist=n[4,7]"], "which takes 6.24 times"),
    ("", ("n2", "n3"), ["--prefer=z1"], "(Slurm may choose nodes of these zones on which the job takes")])
def test_a_preference_promises_no_more_than_its_worst_nodes(argv, start, options, text):
    """One node of each zone has a slow link, those of z2 and z3 a slower one."""
    slow = {name: LinkScore(throughput=throughput) for name, throughput in (("n1", 2e8), ("n2", 1e8), ("n3", 1e8))}
    state = replace(cluster(), scores=LinkScores(nodes=slow))
    bound = decide(argv, state, start=PredictedStart(start))
    assert list(bound.options) == options
    assert text in bound.summary(DlOptions())
    if options[:1] == ["--prefer=z1"]:
        chosen = bound.placement.rank_map.cost.seconds
        assert bound.promise.seconds > 2 * chosen
        assert (bound.promise.ranks, bound.promise.zones) == (4, "z1 x2")


@pytest.mark.parametrize(("argv", "count"), [
    ("--dl-zone=z2,z3", 1),  # the choice of Slurm
    ("--dl-zone=z2,z3 --no-requeue --tmp=1G", 2),  # and whether the job starts on the chosen nodes
    ("--dl-zone=z2,z3 --dl-node-binding=nodelist", 0)])
def test_every_question_to_slurm_excludes_the_nodes_outside_the_zones(argv, count):
    questions: list[tuple[str, ...]] = []
    decide(argv, cluster(), start=PredictedStart(("n2", "n3")), questions=questions)
    assert len(questions) == count
    assert all(options[0] == "--exclude=n[1,4,7]" for options in questions)


@pytest.mark.parametrize("seed", range(20))
def test_zone_features_are_features_of_exactly_the_nodes(seed):
    random = np.random.default_rng(seed)
    names = [f"n{i}" for i in range(8)]
    # the snapshot lacks a node of the topology, has an additional node, and a different order
    snapshot_nodes = [*names[:7], "alien"]
    nodes = [Node(str(name), ("IDLE",), features=tuple(f for f in "abcd" if random.random() < 0.5) + ("z0",) * (
        str(name) in names[:4])) for name in random.permutation(snapshot_nodes)]
    lines = ("SwitchName=z0 Nodes=n[0-3]", "SwitchName=z1 Nodes=n[4-7]", "SwitchName=top Switches=z[0-1]")
    topology = scontrol_topology.read_topologies(split_output("\n".join(lines))).get()
    state = ClusterState(ClusterSnapshot.from_nodes(nodes), topology, LinkScores())
    for zone, members in (("z0", names[:4]), ("z1", names[4:7]), ("top", names[:7])):
        exact = [f for f in ("a", "b", "c", "d", "z0") if {n.name for n in nodes if f in n.features} == set(members)]
        expected = ("z0",) if zone == "z0" else tuple(exact[:1])
        assert zone_options.exact_zone_features(state, [zone]) == expected


@pytest.mark.parametrize("name", ["script", "wrap", "stdin", "export", "ps"])
def test_dry_run_output(name, golden, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.sh").write_bytes(SCRIPT)
    argv = {"script": ["-vJ", "a b", "--dl-explain", "job.sh", "x  y", "--dl-ps=1"],
            "wrap": ["-N2", "--wrap=slurmdl srun true"],
            "stdin": ["--parsable"],
            "export": ["--export=A,B=c d", "--", "job.sh"],
            "ps": ["--dl-strategy=ps", "--dl-ps=2", "--dl-bytes=400M", "-N3", "job.sh"]}[name]
    job = parse(*argv, program="/usr/bin/sbatch")
    environ = {"HOME": "/home/me", "SLURM_JOB_ID": "7", "SLURMDL_SUBMISSION": "{}", "SLURMDL_PLAN": "x",
               "RANK": "3", "SLURMDL_EXPORTED": " RANK", "SLURMDL_OPT_RANK0": "first", "MASTER_ADDR": "n9"}
    bound = sbatch.decide_with_slurm(job, cluster())
    command = bound.submit_command(job, environ)
    text = sbatch.format_dry_run(job, bound, command)
    text = re.sub(r'"pid":\d+,"host":"[^"]*"', '"pid":PID,"host":"HOST"', text)
    golden(f"sbatch/{name}.txt", text + "\n")


@pytest.mark.parametrize(("request_", "nodes", "reason"), [
    (JobRequest(), ("n1",), ""), (JobRequest(constraint="[a|b]"), ("n1",), ""),
    (JobRequest(reservation="later"), ("n1", "n2"), ""), (JobRequest(), ("n1", "n2"), "the reservation later"),
    (JobRequest(segment=2), ("n1", "n2"), "the reservation later"), (JobRequest(segment=1), ("n1", "n2"), "segments"),
    (JobRequest(unmodelled_reason="--tmp is not modelled"), ("n1",), "--tmp")])
def test_unpredictable_start_reason(request_, nodes, reason):
    snapshot = replace(cluster().cluster, reservations=(Reservation("now", ("n1",)),
                                                        Reservation("later", ("n2",), active=False)))
    result = binding.unpredictable_start_reason(request_, snapshot, nodes)
    assert reason in result and bool(reason) == bool(result)
