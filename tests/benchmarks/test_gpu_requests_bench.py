"""Evaluation of the benchmark of GPU requests, which runs on sandboxes (make bench-gpu-requests)."""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks import gpu_requests
from benchmarks.gpu_requests import Model
from slurmdl.cluster.snapshot import ClusterSnapshot, Node, Partition
from slurmdl.errors import SandboxError

CLUSTER = ClusterSnapshot.from_nodes(
    [Node(f"n{i}", ("IDLE",), cpus=gpu_requests.CPUS, cpus_unallocated=gpu_requests.CPUS,
          memory=gpu_requests.MEMORY, memory_unallocated=gpu_requests.MEMORY, partitions=("main",),
          gres={"gpu": gpu_requests.GPUS}) for i in range(gpu_requests.NODES)],
    (Partition("main", True, memory_per_cpu=100),))


def test_requests_are_different_and_repeatable():
    requests = list(islice(gpu_requests.random_requests(1), 300))
    assert len(set(requests)) == 300
    assert requests == list(islice(gpu_requests.random_requests(1), 300))
    words = " ".join(" ".join(request) for request in requests)
    assert all(option in words for option in ("-N", "-n", "-c", "--gpus=", "--gres=", "--ntasks-per-gpu=",
                                              "--cpus-per-gpu=", "--mem-per-gpu=", "--exclusive"))


@pytest.mark.parametrize(("line", "answer"), [
    ("2 6 5,1 5,1 1", (5, 1)), ("2 - 12(x2) 12(x2) 1", (1, 1)), ("2 3 2(x2) 2(x2) 1", (2, 1)), ("rejected", None),
    ("PartitionNodeLimit", None),
])
def test_answers_of_slurm(line, answer):
    assert gpu_requests._parse_answer(line, ("-N2",)) == answer


@pytest.mark.parametrize("line", ["broken", "lost", "2 x 1 1 1"])
def test_unexpected_answer_is_an_error(line):
    with pytest.raises(SandboxError, match="--gpus=4: unexpected answer"):
        gpu_requests._parse_answer(line, ("--gpus=4",))


def test_differing_answers_are_found():
    """The last request has no answer by the model."""
    answers = [(("-N2", "-n6", "--gpus-per-node=4"), (5, 1)), (("-N2", "--gpus=17"), None), (("--gpus=9",), (1, 1))]
    assert gpu_requests.differing(answers, Model(), CLUSTER) == [("--gpus=9",)]
    wrong = [(answers[0][0], (3, 3)), (answers[1][0], (1, 1))]
    assert gpu_requests.differing(wrong, Model(), CLUSTER) == [request for request, _ in wrong]


def test_model_without_gpus_differs():
    assert Model(ignores_gpus=True).answer(("-N2", "--gpus=17"), CLUSTER) == (1, 1)
    assert Model().answer(("-N2", "--gpus=17"), CLUSTER) is None
