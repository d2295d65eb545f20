"""The plan of a step: zone costs, calculated by hand, its pattern, and the promise of its submission."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from placing import SCORES, two_level

from slurmdl.config import Config
from slurmdl.dl_options import DlOptions
from slurmdl.errors import PlacementError
from slurmdl.launch.step_command import TASK_SHELL, TaskCommand, parse_srun_argv
from slurmdl.launch.step_inputs import StepCall, StepInputs, verify_variables, with_launcher
from slurmdl.launch.step_plan import MAX_ZONES, broken_promise, build_plan, compute_zone_costs, plan_step
from slurmdl.launch.submission_record import Promise, SubmissionRecord
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.placement.iteration_cost import network_links
from slurmdl.placement.result import Cost, RankMap
from slurmdl.plan import Plan
from slurmdl.slurm.jobs import Allocation
from slurmdl.slurm.step_layout import StepLayout
from slurmdl.topology.source import ZoneDecl, build_topology
from slurmdl.topology.topology import Topology
from slurmdl.traffic import Traffic


def test_slowest_link_of_the_path_decides() -> None:
    zones = [ZoneDecl("a", nodes=("a1", "a2", "a3")), ZoneDecl("b", nodes=("b1",)), ZoneDecl("c", nodes=("c1",)),
             ZoneDecl("m", children=("a", "b")), ZoneDecl("r", children=("m", "c"))]
    topology = build_topology(zones, kind="tree", source="")
    scores = LinkScores(nodes={"a2": LinkScore(1.0), "c1": LinkScore(80.0)}, default_node_bandwidth=100.0,
                        zones={"b": LinkScore(10.0)}, default_zone_bandwidth=(50.0, 20.0))
    # a: its median node; a-b: b's uplink; a-c: the uplink of m, above a; b-c: b's
    assert compute_zone_costs(network_links(topology.nodes, topology, scores)) == {
        "a|a": 1 / 100, "a|b": 1 / 10, "a|c": 1 / 20, "b|b": 1 / 100, "b|c": 1 / 10, "c|c": 1 / 80}
    # a measured inter-leaf path counts if it is slower than its links
    measured = LinkScores(inter_leaf={"a|c": LinkScore(5.0), "a|b": LinkScore(90.0)}, default_node_bandwidth=100.0,
                          default_zone_bandwidth=(50.0, 20.0))
    assert compute_zone_costs(network_links(topology.nodes, topology, measured)) == {
        "a|a": 1 / 100, "a|b": 1 / 50, "a|c": 1 / 5, "b|b": 1 / 100, "b|c": 1 / 20, "c|c": 1 / 100}


def test_no_costs_without_zones_or_with_too_many() -> None:
    assert compute_zone_costs(network_links(["a", "b"], Topology.flat(["a", "b"]), LinkScores())) == {}
    many = two_level(*((f"n{i}",) for i in range(MAX_ZONES + 1)))
    assert compute_zone_costs(network_links(many.nodes, many, LinkScores())) == {}
    costs = compute_zone_costs(network_links(many.nodes[1:], many, LinkScores()))
    assert len(costs) == MAX_ZONES * (MAX_ZONES + 1) / 2


@pytest.mark.parametrize(("traffic", "pattern"), [
    (None, ""), (Traffic("gossip", pattern="one-peer-exponential"), "one-peer-exponential"),
    (Traffic("gossip", pattern="flow.csv", matrices=(np.roll(np.eye(3), 1, axis=1),)), "")])
def test_plan_has_zone_costs_and_the_requested_pattern(traffic: Traffic | None, pattern: str) -> None:
    layout = StepLayout((("n1", 2), ("n2", 1)))
    plan, _ = build_plan(layout, two_level(["n1"], ["n2"]), SCORES, DlOptions(), traffic)
    assert plan.costs == {"z0|z0": 1e-3, "z0|z1": 0.02, "z1|z1": 1e-3}
    assert plan.comm_pattern == pattern


def step_inputs_of(command: str, nodes: Sequence[str] = ("n1", "n2"), tasks: int = 1, record: object = None,
                   **environ: str) -> StepInputs:
    """The inputs of a step with `tasks` on each node; every second node is in the other zone."""
    args = parse_srun_argv(command.split())
    call = StepCall(args, args.merge_options({}), environ, record, Config(), pytest.fail,  # type: ignore[arg-type]
                    pytest.fail)
    task = TaskCommand("script", TASK_SHELL, args.line.operands)
    return with_launcher(StepInputs(
        call, Allocation(7, tuple(nodes), (8,) * len(nodes)), StepLayout(tuple((node, tasks) for node in nodes)), 1,
        two_level(nodes[::2], nodes[1::2]), "", SCORES, call.options.traffic, 12345, task,
        rank_check_variables=verify_variables(False, environ)))


TORCHRUN = "torchrun --nnodes=2 --nproc-per-node=4 t.py"


@pytest.mark.parametrize(("command", "tasks", "launcher", "ranks", "checked_ranks"), [
    ("program", 1, None, 1, "0"), ("program", 2, None, 1, None), ("--dl-launcher=none program", 1, None, 1, None),
    ("--dl-launcher=auto:4 program", 1, None, 4, "4"), ("--dl-launcher=auto:4 program", 2, None, 1, None),
    ("--step-starter=mpirun --dl-launcher=auto:4 program", 1, None, 1, None),
    ("--dl-mesh=dp=2,tp=4 program", 1, None, 4, "4"), (f"--dl-launcher=none {TORCHRUN}", 1, None, 1, None),
    (TORCHRUN, 1, "torchrun", 4, "4"), (f"--dl-launcher=auto:2 {TORCHRUN}", 1, "torchrun", 2, "2"),
    ("--dl-launcher=torchrun:3 run.sh", 1, "torchrun", 3, "3"), ("torchrun --nnodes=1:2 p", 1, "torchrun", 1, None),
    ("torchrun --standalone --nproc-per-node=4 t.py", 1, None, 1, None)])
def test_launcher_and_its_ranks(command: str, tasks: int, launcher: str | None, ranks: int,
                                checked_ranks: str | None) -> None:
    inputs = step_inputs_of(command, tasks=tasks)
    assert (inputs.launcher.name if inputs.launcher else None, inputs.ranks_per_task) == (launcher, ranks)
    assert inputs.rank_check_variables.get("SLURMDL_VERIFY_RANKS") == checked_ranks
    assert bool(inputs.resolve_nodes) == (checked_ranks is not None and launcher is None)
    assert len(plan_step(inputs).plan) == tasks * ranks * 2


@pytest.mark.parametrize(("command", "error", "message"), [
    (f"--step-starter=mpirun {TORCHRUN}", PlacementError, "--step-starter=mpirun: does not start torchrun once per"),
    ("--dl-launcher=ray p", pytest.fail.Exception, "ray: the number of ranks per node is unknown and 1 is assumed")])
def test_launcher_that_does_not_fit_is_an_error_or_a_warning(command: str, error: type[Exception],
                                                             message: str) -> None:
    with pytest.raises(error, match=message):
        step_inputs_of(command)


@pytest.mark.parametrize(("inputs", "warnings", "variables"), [
    (step_inputs_of("p"), [], {}), (step_inputs_of("--step-starter=mpirun -n2 p"), [], {}),
    (step_inputs_of("p", MASTER_ADDR="n1"), [], {}), (step_inputs_of("p", MASTER_ADDR="login"), [], {}),
    (step_inputs_of("p", MASTER_ADDR="n2.x"), ["MASTER_ADDR=n2.x: expected the node of rank 0, n1"], {}),
    (step_inputs_of("p", MASTER_ADDR="n2", SLURMDL_EXPORTED="RANK MASTER_ADDR"), [], {}),
    (replace(step_inputs_of("p"), no_zones_reason="no file"), ["no file; ranks in the order of the node names"], {}),
    (step_inputs_of("--dl-on-slow=exclude p"), [], {"SLURMDL_ON_SLOW": "exclude"}),
    (step_inputs_of("p", SLURMDL_VERIFY="0"), [], {"SLURMDL_VERIFY": None}),
    (step_inputs_of("--dl-launcher=auto:4 p"), [], {"SLURMDL_RANKS_PER_TASK": "4", "SLURMDL_LAUNCHER": None}),
    (step_inputs_of(TORCHRUN), [], {"SLURMDL_RANKS_PER_TASK": "4", "SLURMDL_LAUNCHER": "torchrun"}),
    (step_inputs_of("--dl-launcher=ray:2 p"), ["ray numbers its workers itself, not by the rank map"],
     {"SLURMDL_RANKS_PER_TASK": "2", "SLURMDL_LAUNCHER": None})])
def test_warnings_and_variables_of_a_step(inputs: StepInputs, warnings: list[str],
                                          variables: dict[str, str | None]) -> None:
    step = plan_step(inputs)
    assert list(step.warnings) == warnings and not step.explanation
    assert step.command.argv[0] == inputs.call.args.step_starter
    expected = {"SLURMDL_MASTER_ADDR": "n1", "SLURMDL_MASTER_PORT": "12345", "SLURMDL_ON_SLOW": None, **variables}
    assert {name: step.command.environ_set.get(name) for name in expected} == expected


@pytest.mark.parametrize(("host", "this_node", "node_of_rank0"), [
    ("n1", "", True), ("n1.cluster", "", True), ("n2", "n1", False), ("n2", "", False), ("$head", "", True),
    ("login", "", True), ("localhost", "n1", True), ("no-such-host.invalid", "n1", False)])
def test_host_of_the_rendezvous_is_that_of_rank_0(host: str, this_node: str, node_of_rank0: bool) -> None:
    command = f"torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint={host}:1 t.py"
    step = plan_step(step_inputs_of(command, SLURMD_NODENAME=this_node))
    assert (f"--rdzv-endpoint={host}:1" in step.command.argv) == node_of_rank0


def test_explanation_of_a_step() -> None:
    inputs = replace(step_inputs_of("--dl-explain p", ("n1", "n2", "n3", "n10")),
                     resolve_nodes=lambda nodes: [f"ip-{node}" for node in nodes])
    step = plan_step(inputs)
    assert step.plan.nodes == ("n1", "n3", "n2", "n10")
    assert step.command.environ_set["SLURMDL_TASK_SCRIPT"] == "_dl_addresses='ip-n1 ip-n3 ip-n2 ip-n10'\nscript"
    assert step.explanation[0] == "4 tasks on 4 nodes, order depth-first, zones from test"
    assert [line for line in step.explanation if line.startswith(("rank", "launcher"))] == [
        "rank 0: n1, zone z0, worker", "rank 1: n3, zone z0, worker", "rank 2: n2, zone z1, worker",
        "rank 3: n10, zone z1, worker",
        "launcher: PET_LOCAL_ADDR set: if the program starts a c10d rendezvous, this numbers the nodes as planned"]
    sorted_nodes = replace(step_inputs_of("p"), resolve_nodes=pytest.fail)  # no addresses are needed
    assert plan_step(sorted_nodes).command.environ_set["SLURMDL_TASK_SCRIPT"] == "script"


@pytest.mark.parametrize(("promise", "options", "text"), [
    (Promise(2.0, 4, "a x2 + b x2"), DlOptions(), "Slurm gave the job other nodes than the submission promised: "
                                                  "a x3 + b x1 instead of a x2 + b x2, 1.50 times the promised time"),
    (Promise(1.0, 4, "a x3 + b x1"), DlOptions(),
     "links have become slower since the submission, 3.00 times the promised time"),
    (Promise(2.95, 4, "a x2 + b x2"), DlOptions(), ""),
    (Promise(1.0, 8, "a x2 + b x2"), DlOptions(), ""),
    (Promise(1.0, 4, "a x2 + b x2"), DlOptions(bytes="1G"), ""),
    (None, DlOptions(), ""),
])
def test_nodes_worse_than_promised_are_reported(promise: Promise | None, options: DlOptions, text: str) -> None:
    nodes = ("a1", "a2", "a3", "b1")
    plan = Plan("allreduce", nodes, ("worker",) * 4, {node: ("r", node[0]) for node in nodes}, {})
    rank_map = RankMap(nodes, plan.roles, Cost(3.0, 0.0, 0.0))
    record = SubmissionRecord(DlOptions(), "", 1, "login", promise=promise)
    assert broken_promise(record, plan, rank_map, options) == text
