"""Tasks per node of a step. tests/cluster/test_steps.py compares with a real srun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmdl.errors import PlacementError
from slurmdl.slurm import getopt, step_layout
from slurmdl.slurm.jobs import Allocation
from slurmdl.slurm.step_layout import StepLayout, block_distribution, compute_step_layout, parse_step_request

EVEN = Allocation(1, ("n1", "n2", "n3", "n4"), (4, 4, 4, 4), (1, 1, 1, 1))
UNEVEN = Allocation(1, ("n1", "n2", "n3"), (4, 2, 1), (4, 2, 1))


def compute_layout(options: str, allocation: Allocation = EVEN, environ: dict[str, str] | None = None,
        cpus_per_task: int | None = None) -> StepLayout:
    line = getopt.parse_command_line([*options.split(), "program"],
                                     step_layout.SHORT_OPTIONS, step_layout.LONG_OPTIONS)
    # sbatch and salloc always set the number of nodes
    return compute_step_layout(allocation, parse_step_request(
        line, {"SLURM_NNODES": str(len(allocation.nodes)), **(environ or {})}, cpus_per_task))


def counts(*arguments, **keywords) -> list[int]:
    return [count for _, count in compute_layout(*arguments, **keywords).node_tasks]


@pytest.mark.parametrize(("options", "expected"), [
    ("", [1, 1, 1, 1]), ("-n 4", [1, 1, 1, 1]), ("-n 6", [2, 2, 1, 1]), ("-n 16", [4, 4, 4, 4]),
    ("-N 4 -n 5", [2, 1, 1, 1]), ("-N4-4", [1, 1, 1, 1]), ("--ntasks-per-node=3", [3, 3, 3, 3]),
    ("--tasks-per-node=2", [2, 2, 2, 2]), ("-c 2", [2, 2, 2, 2]), ("-c 3", [1, 1, 1, 1]), ("-c2 -n 5", [2, 1, 1, 1]),
    ("--label -u --exact -n 7 --mpi=pmix -K", [2, 2, 2, 1]), ("-m block -n 7 -p main --mail-type=END", [2, 2, 2, 1]),
    ("--mem-per-cpu=1", [1, 1, 1, 1]), ("-n 8 -G 8 --cpus-per-gpu=1", [2, 2, 2, 2]),
    # it contradicts the tasks, and changes nothing
    ("-n 6 --ntasks-per-node=4", [2, 2, 1, 1])])
def test_tasks_on_equal_nodes(options, expected):
    assert counts(options) == expected


@pytest.mark.parametrize(("tasks", "expected"), [
    ("", [1, 1, 1]), ("-n 4", [2, 1, 1]), ("-n 5", [2, 2, 1]), ("-n 6", [3, 2, 1]), ("-n 7", [4, 2, 1])])
def test_tasks_on_unequal_nodes(tasks, expected):
    assert counts(tasks, allocation=UNEVEN) == expected


@pytest.mark.parametrize(("options", "environ", "cpus_per_task", "expected"), [
    ("", {"SLURM_NTASKS": "6"}, None, [2, 2, 1, 1]), ("-n 5", {"SLURM_NTASKS": "6"}, None, [2, 1, 1, 1]),
    ("", {"SLURM_NTASKS_PER_NODE": "2"}, None, [2, 2, 2, 2]), ("", {}, 2, [2, 2, 2, 2]),
    ("-c 1 -n 6", {}, 4, [2, 2, 1, 1]), ("-n 4", {"SLURM_NNODES": "4"}, None, [1, 1, 1, 1])])
def test_environment_counts_like_options(options, environ, cpus_per_task, expected):
    assert counts(options, environ=environ, cpus_per_task=cpus_per_task) == expected


@pytest.mark.parametrize(("options", "nodes"), [
    ("-w n2,n4 -N 2", ["n2", "n4"]), ("-w n[2-3] -N2 -n 3", ["n2", "n3"]), ("-w n3", ["n1", "n2", "n3", "n4"]),
    ("-x n1 -N 3", ["n2", "n3", "n4"]), ("-r 1 -N 3", ["n2", "n3", "n4"]), ("-r 1 -N 2", ["n2", "n3"])])
def test_nodes_of_a_step(options, nodes):
    assert [node for node, _ in compute_layout(options).node_tasks] == nodes


@pytest.mark.parametrize(("options", "alone"), [
    ("-n 5", False), ("-n 5 --exact", True), ("-c 1 -n 5", True), ("-c 1 -n 4", False), ("-c 1 -n 16", False),
    ("-c 1 -n 5 --overlap", False), ("-r 1 -N 3", False), ("-r 1 -N 2", True)])
def test_layouts_that_depend_on_other_steps(options, alone):
    assert compute_layout(options).only_if_alone == alone


@pytest.mark.parametrize(("options", "message"), [
    ("-N 2", "Slurm chooses"), ("-n 3", "Slurm chooses"), ("-N 2-4", "fixed count"), ("-w n1 -N 2", "Slurm chooses"),
    ("-x n1", "Slurm chooses"), ("-x n1 -N 2", "Slurm chooses"), ("-w n9 -N1", "n9"), ("-w ./file -N 1", "file"),
    ("-w n[2-1] -N 1", "nodelist"), ("-w n1 -x n1", "same node"), ("-r 3 -N 2", "relative"), ("-r 2", "relative"),
    ("-n 17", "do not fit"), ("-c 5", "do not fit"), ("-n 4k", "fixed count"), ("-n 0", "fixed count"),
    ("-m cyclic", "cyclic"), ("--distribution=block:block", "block:block"), ("-O", "-O"),
    ("--het-group=1", "--het-group"), ("--bcast", "--bcast"), ("--no-such=1", "--no-such"), ("-F hosts", "-F"),
    ("-n 5 --mem-per-cpu=1", "--mem-per-cpu"), ("-n 5 --ntasks-per-core=1", "--ntasks-per-core"),
    ("-c 2 -N 2", "-c: .* expected also -n"), (": b", "heterogeneous")])
def test_options_that_are_not_mapped(options, message):
    with pytest.raises(PlacementError, match=message):
        compute_layout(options)


@pytest.mark.parametrize(("variable", "message"), [
    ("SLURM_HET_SIZE", "heterogeneous"),
    *((name, f"{name}: prevents rank mapping") for name in step_layout.UNSUPPORTED_ENV)])
def test_variables_that_are_not_mapped(variable, message):
    with pytest.raises(PlacementError, match=message):
        compute_layout("", environ={variable: "2"})


def test_options_that_prevent_mapping_are_one_list():
    page = (Path(__file__).parents[2] / "docs/launchers.md").read_text()
    text = page.partition("## What prevents mapping\n")[2].partition("| --- |")[2]
    listed = set(re.findall(r"`--([a-z0-9-]+)", "".join(line.partition(" | ")[0] for line in text.splitlines())))
    mapped = (step_layout.LAYOUT_NEUTRAL | step_layout.LAYOUT_OPTIONS | step_layout.LAYOUT_INPUTS
              | step_layout.PASSTHROUGH) - {"distribution", "exact"}
    assert listed - {"nnodes", "ntasks-per-node", "dl-ps"} == step_layout.LONG_OPTIONS.keys() - mapped


def test_option_without_its_value_is_not_mapped():
    with pytest.raises(PlacementError, match="-n"):
        parse_step_request(
            getopt.parse_command_line(["-n"], step_layout.SHORT_OPTIONS, step_layout.LONG_OPTIONS), {}, None)


def test_tasks_that_do_not_fit_a_node_or_contradict_its_number_are_not_mapped():
    with pytest.raises(PlacementError, match="do not fit"):
        counts("-c 2 -n 3", allocation=UNEVEN)
    with pytest.raises(PlacementError, match="contradicts"):
        counts("-n 6 --ntasks-per-node=2", allocation=Allocation(1, ("n1", "n2"), (8, 1)))


@pytest.mark.parametrize("options", ["--gpus-per-task=1", "--gres=gpu:1", "--hint=nomultithread"])
def test_task_limiting_options_are_mapped_for_known_layouts(options):
    assert counts(f"{options} -n 8") == [2, 2, 2, 2]
    assert counts(f"{options} -n 7", allocation=UNEVEN) == [4, 2, 1], "the layout of the job"
    for n, allocation in ((6, EVEN), (5, UNEVEN)):
        with pytest.raises(PlacementError, match=options.partition("=")[0]):
            counts(f"{options} -n {n}", allocation=allocation)


def test_gpus_on_unevenly_used_nodes_are_not_mapped():
    allocation = Allocation(1, ("n1", "n2"), (8, 8), (3, 1))
    assert counts("-n 4", allocation=allocation) == [2, 2]
    with pytest.raises(PlacementError, match="gpus-per-task"):
        counts("--gpus-per-task=1 -n 4", allocation=allocation)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 120))
def test_block_distribution_is_level(max_tasks, ntasks):
    tasks = block_distribution(max_tasks, ntasks)
    assert sum(tasks) == ntasks
    if ntasks <= sum(max_tasks):
        assert all(t <= r for t, r in zip(tasks, max_tasks, strict=True))
        # a node that is not full has at most one task less than the fullest node
        assert all(t >= max(tasks) - 1 for t, r in zip(tasks, max_tasks, strict=True) if t < r)
