"""Model windows: sequence locks, flags, and mixing kernels."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from mpi import mpirun, needs_mpi

from slurmdl.errors import TrainError
from slurmdl.train.transports.virtual import VirtualTransport, run_virtual_ranks
from slurmdl.train.transports.window import _MIX_BLOCK, ModelWindow, mix_into, mix_pair


@needs_mpi
@pytest.mark.parametrize("ranks", [2, 4])
def test_window_has_no_torn_reads_over_mpi(ranks: int) -> None:
    proc = mpirun(ranks, str(Path(__file__).with_name("mpi_programs") / "model_window.py"))
    assert proc.returncode == 0, proc.stderr
    for rank, result in enumerate(json.loads(proc.stdout)):
        assert result["synchronous"]["wrong"] == 0
        assert result["asynchronous"]["torn"] == 0
        if rank % 2:
            assert result["asynchronous"]["read"] > 10


def test_mix_newest_skips_incomplete_versions() -> None:
    """Stamps are set as by an interrupted writer."""
    def program(transport: VirtualTransport) -> list[float]:
        window = ModelWindow(transport.allocate_shared, transport.rank, (0, 1), 4)
        if transport.rank == 0:
            window.publish(1, np.full(4, 1, np.float32))
            window.publish(2, np.full(4, 2, np.float32))
            transport.barrier()
            transport.barrier()
            stamps = window._control_words[0]
            stamps[1] = 2 * 3 + 1
            window._slots[0][1][:2] = 3
            transport.barrier()
            transport.barrier()
            stamps[0] = 2 * 4 + 1
            transport.barrier()
            transport.barrier()
            return []
        values_read = []
        for version in range(3):
            transport.barrier()
            model = np.zeros(4, np.float32)
            mixed = window.mix_newest(version, model, 0, 1.0)
            assert mixed == (version < 2)
            assert (model == model[0]).all()
            values_read.append(float(model[0]))
            transport.barrier()
        return values_read
    assert run_virtual_ranks(2, program)[1] == [2.0, 2.0, 0.0]


def test_wait_flag_returns_when_peer_sets_it() -> None:
    def program(transport: VirtualTransport) -> tuple[float, list[float]]:
        window = ModelWindow(transport.allocate_shared, transport.rank, (0, 1), 2)
        if transport.rank == 0:
            window.wait_flag(1, "ready", 3)
            return transport.clock, window.live_model(1).tolist()
        window.set_flag("ready", 2)
        transport.emulate_compute(5.0)
        window.live_model(1)[:] = 7
        window.set_flag("ready", 3)
        return transport.clock, []
    assert run_virtual_ranks(2, program)[0] == (5.0, [7.0, 7.0])


def test_wait_flag_never_set_is_a_named_deadlock() -> None:
    def program(transport: VirtualTransport) -> None:
        window = ModelWindow(transport.allocate_shared, transport.rank, (0, 1), 2)
        if transport.rank:
            window.wait_flag(0, "ready", 7)
    with pytest.raises(TrainError, match="rank 1 waits for rank 0 to be ready in step 7"):
        run_virtual_ranks(2, program)


@pytest.mark.parametrize("size", [0, 1, _MIX_BLOCK - 1, _MIX_BLOCK, 2 * _MIX_BLOCK + 3])
def test_mix_into_and_mix_pair(size: int) -> None:
    random = np.random.default_rng(size)
    local, remote = random.standard_normal((2, size)).astype(np.float32)
    expected = 0.75 * local + 0.25 * remote
    out = np.empty_like(local)
    mix_into(local, remote, 0.25, out)
    assert out == pytest.approx(expected, abs=1e-6)
    mix_into(local, remote, 0.25, local)
    assert (local == out).all()
    left, right = random.standard_normal((2, size)).astype(np.float32)
    expected_left, expected_right = 0.75 * left + 0.25 * right, 0.25 * left + 0.75 * right
    mix_pair(left, right, (0.25, 0.25))
    assert left == pytest.approx(expected_left, abs=1e-6)
    assert right == pytest.approx(expected_right, abs=1e-6)
