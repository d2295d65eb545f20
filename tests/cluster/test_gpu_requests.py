"""GPU requests on a real Slurm: nodes and tasks of each node as the model predicts them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from conftest import skipped_without_cluster
from jobs import NIGHTLY

from benchmarks import gpu_requests
from benchmarks.gpu_requests import Model
from slurmdl.errors import PlacementError
from slurmdl.sandbox.lifecycle import Sandbox

#: each option, and the common combinations
_REQUEST_LINES = """\
-N2 --gpus=10
-N3 --gpus=3
-N2 -n6 --gpus=10
-N2 -n6 -c2 --gpus=4
-N2 --gpus=20
-N3 --gpus=2
--gpus=1
--gpus=16 --gpus-per-node=8
-N1-4 --gpus=8 --gpus-per-node=4
-N3 --gpus=16 --gpus-per-node=8
-N2 --gpus=6 --gpus-per-node=4
-N4 -n6 --gpus-per-node=8
-N2 --gpus-per-node=9
-N4 -c4 --gpus-per-node=9 --ntasks-per-gpu=1
-N2 --gpus-per-node=2 --gres=gpu:4
-N2 --gpus-per-task=4
-N2 -n5 --gpus-per-task=1
-N2 -n10 --gpus-per-task=1
-N2 -n3 --gpus-per-task=5
-N4 -c3 --gpus-per-task=1
-N4 -n4 -c3 --gpus-per-task=2
-n8 --ntasks-per-node=4 --gpus-per-task=2
-N2 --ntasks-per-node=8 --gpus-per-task=1
-N2 --gpus-per-node=4 --gpus-per-task=2
-N2 --gpus-per-node=4 --gpus-per-task=3
-N2 --gpus=8 --gpus-per-task=2
-N2 -n4 --gpus=8 --gpus-per-task=2
-N2 --gpus=6 --ntasks-per-gpu=1
-N2 --gpus-per-node=4 --ntasks-per-gpu=2
-N2 -c3 --gpus-per-node=3 --ntasks-per-gpu=2
-N3 -n12 --ntasks-per-gpu=2
--gpus-per-node=3 --ntasks-per-gpu=1
-N2 --ntasks-per-node=4 --ntasks-per-gpu=1
-N2 --gpus-per-node=4 --cpus-per-gpu=4
-N2 --gpus-per-node=4 --cpus-per-gpu=5
-N2 --gpus-per-task=2 --cpus-per-gpu=3
-N2 --gpus=4 -c2 --cpus-per-gpu=1
-N2 --gpus-per-node=4 --mem-per-gpu=4000
-N2 --gpus-per-node=5 --mem-per-gpu=4000
-N2 --ntasks-per-node=3 --gpus-per-task=1 --mem-per-gpu=4000
-N2 -n6 --gpus-per-node=2 --exclusive
"""
REQUESTS = [tuple(line.split()) for line in _REQUEST_LINES.splitlines()][::1 if NIGHTLY else 2]
#: requests that the model leaves to Slurm
UNCERTAIN = [("--gpus=16",), ("-n8", "--gpus-per-task=1"), ("-N2", "-n6", "--gpus-per-task=1", "--mem-per-gpu=2000")]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with skipped_without_cluster(), gpu_requests.gpu_sandbox(f"gpus-{os.getpid()}") as sandbox:
        yield sandbox


def test_requests_get_the_predicted_nodes_and_tasks(sandbox: Sandbox) -> None:
    cluster, model = gpu_requests.read_cluster(sandbox), Model()
    predicted = {" ".join(request): model.answer(request, cluster) for request in REQUESTS}
    answers = dict(zip(predicted, gpu_requests.ask_slurm(sandbox, REQUESTS), strict=True))
    assert predicted == answers
    assert 0.2 < sum(answer is None for answer in answers.values()) / len(answers) < 0.45


@pytest.mark.parametrize("request_", UNCERTAIN, ids=" ".join)
def test_uncertain_requests_are_left_to_slurm(sandbox: Sandbox, request_: tuple[str, ...]) -> None:
    with pytest.raises(PlacementError):
        Model().answer(request_, gpu_requests.read_cluster(sandbox))


def test_jobs_start_on_nodes_that_fit_among_nodes_in_use(sandbox: Sandbox) -> None:
    rows = list(gpu_requests.busy_rows(sandbox, seed=2, count=6))
    assert [row.met for row in rows] == [True, True]
    assert [row.baseline for row in rows] == [6, 6]
