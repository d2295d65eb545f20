"""GPU options: the counts that follow from them, as Slurm 22.05 counts them.

tests/cluster/test_gpu_requests.py and benchmarks/gpu_requests.py compare the model with a real Slurm.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from placing import cluster, node

from slurmdl.dl_options import DlOptions
from slurmdl.errors import PlacementError
from slurmdl.gpu_request import GpuRequest
from slurmdl.job_request import JobRequest, JobSize, build_request, resolve_job_size
from slurmdl.launch import submission
from slurmdl.placement.eligibility import eligible_tasks, split_tasks


def request(options: str) -> JobRequest:
    return submission.parse_submission(submission.SbatchCall.from_argv([*options.split(), "--wrap=true"]), {}).request


@pytest.mark.parametrize(("options", "size", "gpus"), [
    ("-N2 --gpus=10", (2, 2), GpuRequest(per_node=5)),
    ("-N2 --gpus=3", (2, 2), GpuRequest(per_node=2)),
    ("--gpus=16 --gpus-per-node=8", (2, 2), GpuRequest(per_node=8)),
    ("-N1-4 -G16 --gpus-per-node=8", (2, 2), GpuRequest(per_node=8)),
    ("-N2 --gpus-per-task=2", (2, 2), GpuRequest(per_node=2, per_task=2)),
    ("-N2 -n5 --gpus-per-task=a100:1", (2, 5), GpuRequest("gpu:a100", 1, 1)),
    ("-n8 --ntasks-per-node=4 --gpus-per-task=1", (2, 8), GpuRequest(per_node=1, per_task=1)),
    ("-N2 --ntasks-per-node=4 --gpus-per-task=1", (2, 8), GpuRequest(per_node=1, per_task=1)),
    ("-N2 --gpus-per-node=4 --gpus-per-task=2", (2, 4), GpuRequest(per_node=4, per_task=2)),
    ("-N2 --gpus=4 --ntasks-per-gpu=2", (2, 8), GpuRequest(per_node=2)),
    ("-N2 --gpus-per-node=4 --ntasks-per-gpu=2", (2, 16), GpuRequest(per_node=4)),
    ("--gpus-per-node=3 --ntasks-per-gpu=1", (1, 3), GpuRequest(per_node=3)),
    ("-N2 --ntasks-per-tres=2", (2, 4), GpuRequest(per_node=1)),
    ("-N2 -n8 --ntasks-per-gpu=2", (2, 8), GpuRequest(per_node=2)),
    ("-N2 --gres=gpu:4 --cpus-per-gpu=3", (2, 2), GpuRequest(per_node=4, cpus_per_gpu=3)),
    ("-N2 --gpus-per-node=4 --mem-per-gpu=2G", (2, 2), GpuRequest(per_node=4, memory_per_gpu_mb=2048)),
    ("-n1 --tres-per-task=cpu=3,gres/gpu=2", (1, 1), GpuRequest(per_node=2, per_task=2)),
    ("-N1 --gpus=2 --cpus-per-gpu=1", (1, 1), GpuRequest(per_node=2, cpus_per_gpu=1)),
])
def test_counts_that_follow_from_the_options(options: str, size: tuple[int, int], gpus: GpuRequest) -> None:
    parsed = request(options)
    assert parsed.gpus is not None
    assert (resolve_job_size(parsed), replace(parsed.gpus, unmodelled_reason="")) == (JobSize(*size), gpus)
    assert not parsed.unplaceable_reason


@pytest.mark.parametrize(("options", "is_refusable"), [
    ("-N2 --gpus=10", False), ("-N2 --gpus-per-node=4", False), ("-N2 --gpus-per-task=2", False),
    ("--gpus=16 --gpus-per-node=8", True), ("-N2 --gpus-per-node=4 --gpus-per-task=2", True),
    ("-N2 --gpus-per-task=2 --cpus-per-gpu=3", True), ("-N1 --gpus=4 --gpus-per-node=4", False),
])
def test_slurm_is_asked_where_it_may_refuse_a_node_list(options: str, is_refusable: bool) -> None:
    assert bool(request(options).unmodelled_reason) is is_refusable


@pytest.mark.parametrize(("options", "cpus"), [
    ("-N2 --gpus-per-task=2 --cpus-per-gpu=3", 6), ("-N2 -n2 --tres-per-task=cpu:4,gres/gpu:a100=1", 4),
    ("-N2 -c2 --tres-per-task=cpu=4", 4), ("-N2 --gpus-per-node=2 --cpus-per-gpu=3", None),
])
def test_cpus_per_task_that_follow_from_the_options(options: str, cpus: int | None) -> None:
    assert request(options).cpus_per_task == cpus


@pytest.mark.parametrize("options", [
    "-N2 --gpus=8 --gpus-per-task=2", "-N2 -n2 -G5 --gpus-per-task=2", "-N1 -n1 --gpus=4 --gpus-per-task=2",
    "--gpus-per-task=2", "-N3 --gpus=2",
    "-N2 --gpus=10 --gpus-per-node=4", "-N3 --gpus=8 --gpus-per-node=4", "-N2 --gpus-per-node=3 --gpus-per-task=2",
    "-N2 --ntasks-per-node=2 --ntasks-per-gpu=1", "-N2 --gpus-per-task=1 --ntasks-per-gpu=1", "--ntasks-per-gpu=1",
    "-N2 -c2 --gpus-per-node=2 --cpus-per-gpu=2", "-N2 --gpus=x:y", "-N2 --cpus-per-gpu=x --gpus=2",
])
def test_combinations_that_sbatch_rejects_cannot_be_placed(options: str) -> None:
    """The text names an option; sbatch reports the error."""
    parsed = request(options)
    assert "--" in parsed.unplaceable_reason or "GPUs" in parsed.unplaceable_reason
    assert parsed.unrestrictable_reason


@pytest.mark.parametrize(("options", "reason"), [
    ("--gpus=16", "node count is not certain"), ("-N2-4 --gpus=16", None), ("--gpus=8 --ntasks-per-gpu=1", "certain"),
    ("-N3 --gpus=10 --ntasks-per-gpu=1", "10 tasks of --ntasks-per-gpu=1 cannot be divided by 3 nodes"),
    ("-N2 -n6 --gpus-per-node=2 --ntasks-per-gpu=1", "--ntasks=6 contradicts 4 GPUs"),
    ("-N2 -n3 --ntasks-per-gpu=2", "--ntasks=3 contradicts 1 GPU with"),
    ("-N2 --gpus=a100:2 --gpus-per-node=1", "several GPU types are not modelled (gpu, gpu:a100)"),
    ("-N2 --gpus=a100:2,h100:1", "several GPU types"), ("-N2 --cpus-per-gpu=2", "without a number of GPUs"),
    ("-N2 --gpus-per-node=1 --ntasks-per-gpu=1 --cpus-per-gpu=2", "--ntasks-per-gpu with --cpus-per-gpu"),
    ("-N2 -n6 --gpus=2 --cpus-per-gpu=3", "--gpus with --cpus-per-gpu: the tasks per node are not certain"),
    ("-N2 -n6 --gpus-per-task=1 --mem-per-gpu=1G", "--gpus-per-task with --mem-per-gpu: the tasks per node are"),
    ("-N2 -n3 --ntasks-per-node=8 --gpus-per-task=1", "a node needs more GPUs than the 3 of 3 tasks"),
    ("-N2 --mem=1G --mem-per-gpu=1G --gpus=2", "--mem-per-gpu next to another limit"),
])
def test_slurm_chooses_nodes_if_the_counts_are_uncertain(options: str, reason: str | None) -> None:
    parsed = request(options)
    if reason is None:
        with pytest.raises(PlacementError, match="not certain"):
            resolve_job_size(parsed)
    else:
        assert reason in parsed.unplaceable_reason
    assert not parsed.unrestrictable_reason


def test_late_binding_is_refused_with_gpu_options() -> None:
    """It requests a range of node counts, for which the GPUs have other meanings."""
    late = build_request({"nodes": "2", "gpus": "4"}, DlOptions(node_binding="late"))
    with pytest.raises(PlacementError, match="--dl-node-binding=late"):
        resolve_job_size(late)


@pytest.mark.parametrize(("options", "expected"), [
    ("-N2 -n2 --gpus-per-task=1", [4, 2, 0]), ("-N2 -n2 --gpus-per-task=2", [2, 1, 0]), ("-N2 --gpus=5", [4, 0, 0]),
    ("-N2 --gpus=4", [4, 4, 0]), ("-N2 --gpus-per-node=2 --cpus-per-gpu=2", [4, 4, 0]),
    ("-N2 --gpus-per-node=2 --cpus-per-gpu=3", [0, 0, 0]), ("-N2 --gpus-per-node=1 --mem-per-gpu=500", [4, 4, 0]),
    ("-N2 --gpus-per-node=3 --mem-per-gpu=300", [4, 0, 0]), ("-N2 --gpus-per-node=3 --mem-per-gpu=400", [0, 0, 0]),
    ("-N2 -n2 --gpus-per-task=1 --mem-per-gpu=400", [2, 2, 0]),
    ("-N2 --gpus=h100:2", [0, 0, 0]),
    ("-N2 --gpus=a100:4", [4, 4, 0]), ("-N2 --gpus=4 --ntasks-per-gpu=2", [4, 4, 0]),
    ("-N2 --gpus=6 --ntasks-per-gpu=2", [0, 0, 0]), ("-N2 -G2 --exclusive --mem-per-gpu=300", [0, 4, 0]),
    ("-N2 -G2 --exclusive --mem-per-gpu=250", [4, 4, 0]),
    ("-N2 --gpus=4 --cpus-per-gpu=1 --mem-per-cpu=400", [2, 2, 0]),
    ("-N2 --gpus=6 --cpus-per-gpu=1 --mem-per-cpu=400", [0, 0, 0]),
    ("-N2 -G2 --exclusive --mem-per-cpu=250", [4, 4, 0]), ("-N2 -G2 --exclusive --mem-per-cpu=260", [0, 0, 0]),
])
def test_gpus_limit_the_tasks_of_a_node(options: str, expected: list[int]) -> None:
    """The first node has four GPUs, the second two, the third none; each has four CPUs and 1,000 MB."""
    snapshot = cluster(node("n1", gres={"gpu:a100": 4}), node("n2", gres={"gpu:a100": 2}), node("n3"))
    assert eligible_tasks(request(options), snapshot, "main").tasks_when_idle.tolist() == expected


def test_used_gpus_are_not_free() -> None:
    snapshot = cluster(node("n1", "MIXED", gres={"gpu": 4}, gres_used={"gpu": 3}))
    eligible = eligible_tasks(request("-N1 -n1 --gpus-per-task=1 --mem=1"), snapshot, "main")
    assert (eligible.tasks_now.tolist(), eligible.tasks_when_idle.tolist()) == ([1], [4])


# as Slurm 22.05.8 starts the jobs on nodes with 16 CPUs and 8 GPUs
@pytest.mark.parametrize(("options", "max_tasks", "expected"), [
    ("-N3 -n10", 16, [8, 1, 1]), ("-N2 -n6 -c2", 8, [5, 1]), ("-N4 -n8 -c4", 4, [3, 3, 1, 1]),
    ("-N2 -n6 --ntasks-per-node=3", 16, [3, 3]), ("-N2 -n6 --ntasks-per-node=4", 16, [3, 3]),
    ("-N2 -n6 --exclusive", 16, [3, 3]), ("-N2 -n4 --gpus-per-task=1", 8, [3, 1]),
    ("-N2 -n10 --gpus-per-task=1", 8, [8, 2]), ("-N2 --gpus=4 --ntasks-per-gpu=2", 16, [4, 4]),
    ("-N4 -n6 --gpus-per-node=1 --cpus-per-gpu=3", 16, [2, 2, 1, 1]),
])
def test_tasks_per_node_of_slurm(options: str, max_tasks: int, expected: list[int]) -> None:
    parsed = request(options)
    job = resolve_job_size(parsed)
    assert split_tasks(parsed, job, [max_tasks] * job.nodes) == expected
