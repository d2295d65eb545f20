"""Slots of models in shared memory: nobody sees halves of two versions, and what is waited for comes."""

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
def test_no_version_is_read_in_halves(ranks: int) -> None:
    done = mpirun(ranks, str(Path(__file__).with_name("window_ranks.py")))
    assert done.returncode == 0, done.stderr
    for rank, found in enumerate(json.loads(done.stdout)):
        assert found["in_step"]["wrong"] == 0
        assert found["free"]["torn"] == 0
        if rank % 2:
            assert found["free"]["seen"] > 10


def test_a_slot_that_is_being_written_is_left_for_the_whole_one() -> None:
    """The stamps are set as a writer leaves them in the middle of its work."""
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
        seen = []
        for version in range(3):
            transport.barrier()
            model = np.zeros(4, np.float32)
            taken = window.mix_newest(version, model, 0, 1.0)
            assert taken == (version < 2)
            assert (model == model[0]).all()
            seen.append(float(model[0]))
            transport.barrier()
        return seen
    assert run_virtual_ranks(2, program)[1] == [2.0, 2.0, 0.0]


def test_who_waits_goes_on_when_the_other_has_told() -> None:
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


def test_what_nobody_tells_is_a_deadlock_with_a_name() -> None:
    def program(transport: VirtualTransport) -> None:
        window = ModelWindow(transport.allocate_shared, transport.rank, (0, 1), 2)
        if transport.rank:
            window.wait_flag(0, "ready", 7)
    with pytest.raises(TrainError, match="rank 1 waits for rank 0 to be ready in step 7"):
        run_virtual_ranks(2, program)


@pytest.mark.parametrize("size", [0, 1, _MIX_BLOCK - 1, _MIX_BLOCK, 2 * _MIX_BLOCK + 3])
def test_mixing(size: int) -> None:
    random = np.random.default_rng(size)
    mine, theirs = random.standard_normal((2, size)).astype(np.float32)
    wanted = 0.75 * mine + 0.25 * theirs
    out = np.empty_like(mine)
    mix_into(mine, theirs, 0.25, out)
    assert out == pytest.approx(wanted, abs=1e-6)
    mix_into(mine, theirs, 0.25, mine)
    assert (mine == out).all()
    one, other = random.standard_normal((2, size)).astype(np.float32)
    wanted = 0.75 * one + 0.25 * other, 0.25 * one + 0.75 * other
    mix_pair(one, other, (0.25, 0.25))
    assert (one, other) == (pytest.approx(wanted[0], abs=1e-6), pytest.approx(wanted[1], abs=1e-6))
