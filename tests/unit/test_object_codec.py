"""Objects that ranks exchange: they arrive as they were, and run no code of whoever has sent them."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi import free_port, python

from slurmdl.errors import TrainError
from slurmdl.plan import Plan
from slurmdl.train.library.checkpoint import Manifest
from slurmdl.train.meters import RankReport, StepTotals
from slurmdl.train.transports.transport import decode_object, encode_object

#: rank 0 of two, by another user: it takes the port first, and answers the first collective call with a pickle
ATTACKER = r"""
import os, sys
from datetime import timedelta
import torch.distributed as dist

class Evil:
    def __reduce__(self):
        return exec, (f"import os\nif os.getpid() != {os.getpid()}: open({sys.argv[2]!r}, 'w')",)

dist.init_process_group("gloo", init_method=f"tcp://localhost:{sys.argv[1]}", rank=0, world_size=2,
                        timeout=timedelta(seconds=60))
try:
    dist.all_gather_object([None, None], Evil())
except Exception:
    pass
os._exit(0)
"""


@pytest.mark.parametrize("value", [
    None, True, 7, -2**80, 0.1, float("inf"), "\ud800 Zürich\0", b"\0\xff", 2j, (), [1, (2, [None])],
    {"a": {1: (2.5,)}, (1, "b"): set(), 3: frozenset({"x"})}, {"list": ["list", "dict"]},
    Plan("allreduce", ("n1", "n2"), ("worker",) * 2, {"n1": ("root", "a"), "n2": ()}, {"a|a": 1e-9}),
    Manifest(3, {"seed": "1"}, {"ps": 0}, {"rank0": (12, 3)}),
    RankReport(StepTotals(1, 0.1, 0.2, 0.0, None, 8, {"forward": 0.1}, 0.0, 0.0, 0.0), {"intra_node": 5},
               score=(0.5, 0.9), slow_ranks=({"rank": 1},))], ids=lambda value: type(value).__name__)
def test_values_arrive_as_they_were(value: Any) -> None:
    arrived = decode_object(encode_object(value))
    assert arrived == value and type(arrived) is type(value)


@pytest.mark.parametrize("array", [
    np.arange(6, dtype=np.float16).reshape(2, 3), np.zeros((0, 4)), np.array(5), np.array(["ab", "c"]),
    np.arange(12)[::3], np.array([True, False]), np.float32(0.1), np.int64(7)])
def test_arrays_and_numpy_scalars_arrive_as_they_were(array: Any) -> None:
    arrived = decode_object(encode_object([array]))[0]
    assert type(arrived) is type(array) and arrived.dtype == array.dtype and arrived.shape == array.shape
    assert np.array_equal(arrived, array)


def test_tensors_arrive_as_they_were() -> None:
    torch = pytest.importorskip("torch")
    weights = torch.arange(6.0).reshape(2, 3).to(torch.bfloat16).requires_grad_()
    for tensor in (weights, torch.tensor(3), torch.ones(4)[::2], torch.zeros(0)):
        arrived = decode_object(encode_object({"w": tensor}))["w"]
        assert torch.equal(arrived, tensor) and arrived.dtype == tensor.dtype and arrived.shape == tensor.shape


def test_subclasses_arrive_as_the_plain_type() -> None:
    assert type(decode_object(encode_object(OrderedDict(a=1)))) is dict


@pytest.mark.parametrize("value", [object(), {"a": [Path("/")]}, np.array([object()]), print, TrainError])
def test_other_objects_are_named(value: Any) -> None:
    with pytest.raises(TrainError, match="not an object that ranks can exchange; expected"):
        encode_object(value)


@pytest.mark.parametrize("data", [
    pickle.dumps(1), b"", b"\xff", b"[]", b'["open", "/f", "w"]', b'["Plan", 1]', b'["Plan", "x", [], [], []]',
    b'["array", "O", [1], "AAAAAAAAAAA="]', b'["array", "i8", [9], ""]', b'["array", "i8,O", [0], ""]',
    b'["tensor", "load", [1], ""]', b'["dict", 1]', b'["set", ["list"]]', b"[" * 100_000, b'[["list"]]'])
def test_malformed_messages_are_one_error(data: bytes) -> None:
    with pytest.raises(TrainError, match="malformed message from another rank"):
        decode_object(data)


def step_environ(port: int) -> dict[str, str]:
    """The variables of srun --mpi=none, and a port that another user knows."""
    return {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(port)}


def test_program_on_the_port_of_rank_0_runs_no_code_in_the_others(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    port = free_port()
    attacker = subprocess.Popen([sys.executable, "-c", ATTACKER, str(port), str(tmp_path / "evil")])
    proc = python("-m", "slurmdl.train", "--backend", "torch", "--steps", "1", "--model", "mlp:4",
                  environ={**step_environ(port), "SLURM_PROCID": "1"})
    attacker.wait(60)
    assert not (tmp_path / "evil").exists()
    assert proc.returncode == 76 and "Traceback" not in proc.stderr
    [line] = [line for line in proc.stderr.splitlines() if line.startswith("slurmdl: ")]
    assert "malformed message from another rank" in line and "no other program on their ports" in line


def test_rank_0_names_the_port_that_another_program_has() -> None:
    pytest.importorskip("torch")
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        proc = python("-m", "slurmdl.train", "--backend", "torch", "--steps", "1", "--model", "mlp:4",
                      environ={**step_environ(port), "SLURM_PROCID": "0"})
    assert proc.returncode == 76
    assert proc.stderr == (f"slurmdl: rank 0: another program, perhaps of another user, listens on port {port} of "
                           "localhost; expected a free MASTER_PORT, or `slurmdl srun`\n")
