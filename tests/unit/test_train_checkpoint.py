"""Checkpoint files, and resumed runs, on virtual ranks in this process."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from strategy_harness import even_slices
from virtual_ranks import train_summary

from slurmdl import files
from slurmdl.errors import InvalidRunError, Preempted, TrainError
from slurmdl.train import init
from slurmdl.train.library import checkpoint, checkpointer
from slurmdl.train.library.checkpoint import CheckpointDir, CorruptCheckpointError, Manifest
from slurmdl.train.library.run import Run
from slurmdl.train.library.sampling import GlobalBatches
from slurmdl.train.strategies.parameter_server import assemble_shard
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.transports import virtual

SYNCHRONOUS = {
    "allreduce": "--strategy allreduce --optimizer adam --lr 0.003",
    "random": "--strategy gossip", "base": "--strategy gossip --comm-pattern base-2",
    "copies": "--strategy adaptive-gossip --comm-pattern base-2 --compression int4",
    "budget": "--strategy adaptive-gossip --comm-budget 5% --compression sign "
              "--comm-pattern base-2",
    "shared": "--strategy gossip --shared-memory --virtual-zones A:1x2,B:1x2",
    "one-peer": "--strategy gossip --comm-pattern one-peer-exponential",
    "local-sgd": "--strategy local-sgd --compression int8 --period 8",
    "islands": "--strategy local-sgd --compression int8 --period 8 --islands zone --virtual-zones A:2,B:1,C:1",
    "overlap": "--strategy local-sgd --compression int4 --period 8 --fragments 2 --overlap 2 --islands zone "
               "--virtual-zones A:2,B:2",
    "gossip-islands": "--strategy adaptive-gossip --comm-pattern base-2 --compression int4 "
                      "--islands zone --virtual-zones A:2,B:2",
    "ps": "--strategy ps --ps 2 --optimizer adam --lr 0.003"}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def short_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the warm-up so that the drift trigger decides in most steps of a short run."""
    monkeypatch.setattr("slurmdl.train.triggers.MAX_WARMUP_STEPS", 5)


def run_summary(words: str, ranks: int = 4, steps: int = 40, **options: object) -> dict[str, Any]:
    """Return the summary of a run on virtual ranks; `options` are further trainer options."""
    return train_summary(words, "--model mlp:16 --batch-size 16 --dirichlet-alpha 0.3", virtual_ranks=ranks,
                         steps=steps, **options)


def outcome(summary: dict[str, Any]) -> dict[str, Any]:
    names = ("parameters_crc32", "test_loss", "test_accuracy", "exchanges", "exchanges_skipped", "steps",
             "train_loss", "consensus_distance")
    return {name: summary[name] for name in names}


@pytest.mark.parametrize("case", SYNCHRONOUS)
def test_resumed_run_is_bitwise_equal_to_uninterrupted_run(case: str, tmp_path: Path) -> None:
    """From a step in the middle of the strategy's cycle, with a pending decision."""
    words, directory = SYNCHRONOUS[case], tmp_path / "kept"
    uninterrupted = run_summary(words, lr_schedule="cosine")
    run_summary(words, lr_schedule="cosine", checkpoint_dir=directory, checkpoint_every=19)
    (directory / "step-00000038/manifest.json").unlink()
    resumed = run_summary(words, lr_schedule="cosine", checkpoint_dir=directory, checkpoint_every=19)
    assert outcome(resumed) == outcome(uninterrupted)
    # a checkpoint request to a server is a separate header
    assert case == "ps" or resumed["bytes_sent"] == uninterrupted["bytes_sent"]


@pytest.mark.parametrize("words", [
    "--strategy gossip --async", "--strategy ps --ps 2 --async",
    "--strategy gossip --async --shared-memory --virtual-zones A:1x2,B:1x2"])
def test_asynchronous_run_resumes(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    further = {"straggler": "3=3", "checkpoint_dir": tmp_path, "checkpoint_every": 4, "emulate_compute": "0.2"}
    run_summary(words, **further)
    newest = CheckpointDir(str(tmp_path)).list_numbers()[0]
    (tmp_path / f"step-{newest:08d}/manifest.json").unlink()
    resumed = run_summary(words, **further)
    assert "resumed after step" in capsys.readouterr().err
    assert resumed["steps"] == 40
    assert resumed["test_accuracy"] > 0.4


@pytest.mark.parametrize("words", [
    SYNCHRONOUS["base"], SYNCHRONOUS["copies"], SYNCHRONOUS["shared"], SYNCHRONOUS["ps"],
    "--strategy gossip --async", "--strategy ps --async"])
@pytest.mark.parametrize("every", [0, 1])
def test_signal_in_any_step_stops_all_ranks(every: int, words: str, tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of unequal speed are in different steps when the signal arrives, and agree on one step.

    With `every` 1 each step ends with a checkpoint, and the signal may arrive during a checkpoint.
    """
    further = {"emulate_compute": "0.2", "straggler": "3=4", "checkpoint_every": every}
    uninterrupted = run_summary(words, **further)
    record = Run.log_loss

    def log_loss_and_signal(run: Run, loss: float) -> None:
        record(run, loss)
        if run.step == 17 and run.rank == 2:
            checkpointer._on_signal(signal.SIGTERM, None)

    monkeypatch.setattr(checkpointer, "_signals_received", 0)
    monkeypatch.setattr(Run, "log_loss", log_loss_and_signal)
    with pytest.raises(Preempted, match=rf"checkpoint of step \d+ in {tmp_path}; the same command resumes from it$"):
        run_summary(words, checkpoint_dir=tmp_path, **further)
    monkeypatch.setattr(Run, "log_loss", record)
    monkeypatch.setattr(checkpointer, "_signals_received", 0)
    assert 17 <= CheckpointDir(str(tmp_path)).list_numbers()[0] < 40
    resumed = run_summary(words, checkpoint_dir=tmp_path, **further)
    if words in SYNCHRONOUS.values():
        assert outcome(resumed) == outcome(uninterrupted)
    else:
        assert resumed["steps"] == 40


@pytest.mark.parametrize("words", [
    SYNCHRONOUS["base"], SYNCHRONOUS["ps"], "--strategy gossip --async", "--strategy ps --async"])
def test_repeated_signals_start_no_second_query(words: str, tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals to every rank, as from scancel: a pending query is not repeated."""
    write, repeated = CheckpointDir.write_rank_file, list[bool]()
    start_query = checkpointer.CheckpointCoordinator._start_query

    def signal_and_write(folder: CheckpointDir, number: int, *state: Any) -> Any:
        if number >= 17:
            checkpointer._on_signal(signal.SIGTERM, None)
        return write(folder, number, *state)

    def record_and_start(coordinator: checkpointer.CheckpointCoordinator, *under_way: int) -> None:
        # a promise without a decision belongs to a pending query
        repeated.append(not coordinator._query_open and bool(coordinator._replies)
                        and coordinator._promised_step is not None)
        start_query(coordinator, *under_way)

    monkeypatch.setattr(checkpointer, "_signals_received", 0)
    monkeypatch.setattr(CheckpointDir, "write_rank_file", signal_and_write)
    monkeypatch.setattr(checkpointer.CheckpointCoordinator, "_start_query", record_and_start)
    with pytest.raises(Preempted, match=rf"checkpoint of step \d+ in {tmp_path}; the same command resumes from it$"):
        run_summary(words, emulate_compute="0.2", straggler="3=4", checkpoint_dir=tmp_path, checkpoint_every=1)
    assert repeated
    assert not any(repeated)


@pytest.mark.parametrize("words", ["--strategy gossip --async", "--strategy ps --async"])
def test_signal_after_decision_stops_at_next_checkpoint(words: str, tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is too late for the decided checkpoint."""
    decide, decided = checkpointer.CheckpointCoordinator._decide, list[int]()

    def decide_and_request(coordinator: checkpointer.CheckpointCoordinator) -> None:
        decide(coordinator)
        decided.append(max(coordinator._replies.values()))
        if len(decided) == 2:
            coordinator._on_message(coordinator._workers[-1], checkpointer._STOP_REQUEST, 0, False)

    monkeypatch.setattr(checkpointer.CheckpointCoordinator, "_decide", decide_and_request)
    with pytest.raises(Preempted, match=rf"checkpoint of step \d+ in {tmp_path}; the same command resumes from it$"):
        run_summary(words, emulate_compute="0.2", straggler="3=4", checkpoint_dir=tmp_path, checkpoint_every=8)
    assert len(decided) == 3
    assert CheckpointDir(str(tmp_path)).list_numbers()[0] == decided[-1]


@pytest.mark.parametrize("words, before, after", [
    ("--strategy allreduce", 4, 3), ("--strategy gossip", 4, 3),
    ("--strategy local-sgd --period 5", 3, 5), ("--strategy ps --ps 1", 3, 4),
    ("--strategy gossip --shared-memory --virtual-zones A:1x2,B:1x2", 4, 4)])
def test_other_number_of_ranks_resumes_from_mean(words: str, before: int, after: int, tmp_path: Path) -> None:
    """Without a further step the result is the previous run's mean; then training continues."""
    previous = run_summary(words, before, 20, checkpoint_dir=tmp_path / "kept", checkpoint_every=20)
    words = words.replace("A:1x2,B:1x2", "A:1x3,B:1x1")
    resumed = run_summary(words, after, 20, checkpoint_dir=tmp_path / "kept")
    assert resumed["test_loss"] == pytest.approx(previous["test_loss"], rel=1e-5)
    further = run_summary(words, after, 60, checkpoint_dir=tmp_path / "kept")
    assert further["test_loss"] < 0.8 * previous["test_loss"]


def test_push_sum_resumes_from_weighted_mean(tmp_path: Path) -> None:
    further = {"checkpoint_dir": tmp_path, "checkpoint_every": 10, "emulate_compute": "0.2"}
    before = run_summary("--strategy gossip --async", 3, **further)
    after = run_summary("--strategy gossip --async", 4, 80, **further)
    assert after["test_loss"] < 0.9 * before["test_loss"]


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_shards_are_reassigned_to_other_number_of_servers(servers: int, tmp_path: Path) -> None:
    """Parameters and optimizer state equal those of the uninterrupted run."""
    words = "--strategy ps --optimizer adam --lr 0.003 --ps"
    uninterrupted = run_summary(f"{words} 3", 7)
    run_summary(f"{words} 3", 7, 20, checkpoint_dir=tmp_path / "kept", checkpoint_every=20)
    resumed = run_summary(f"{words} {servers}", 4 + servers, checkpoint_dir=tmp_path / "kept")
    assert resumed["test_loss"] == pytest.approx(uninterrupted["test_loss"], rel=1e-5)


@pytest.mark.parametrize("words, ranks, further, reason", [
    ("--strategy gossip", 2, {}, "--strategy allreduce, this run has gossip; use the same, or a new directory"),
    ("--strategy allreduce", 2, {"lr": 0.01}, "lr of parameter group 0 0.05, this run has 0.01; use"),
    ("--strategy allreduce", 2, {"batch_size": 8}, "--batch-size 16, this run has 8; use"),
    ("--strategy allreduce", 2, {"model": "mlp:8"}, "--model mlp:16, this run has mlp:8; use")])
def test_checkpoint_of_another_run_is_rejected(words: str, ranks: int, further: dict[str, Any], reason: str,
                                                tmp_path: Path) -> None:
    run_summary("--strategy allreduce", 2, 5, checkpoint_dir=tmp_path, checkpoint_every=5)
    with pytest.raises(InvalidRunError, match=f"^--checkpoint-dir {tmp_path}: written with {reason}"):
        run_summary(words, ranks, 5, **{"checkpoint_dir": tmp_path, **further})


def test_async_ps_rejects_other_number_of_ranks(tmp_path: Path) -> None:
    words = "--strategy ps --async"
    reason = "written by 2 workers and 1 server, this run has 1 worker and 1 server: each worker has"
    run_summary(words, 3, 20, checkpoint_dir=tmp_path, checkpoint_every=5, emulate_compute="0.2")
    with pytest.raises(InvalidRunError, match=f"^--checkpoint-dir {tmp_path}: {reason}"):
        run_summary(words, 2, 20, checkpoint_dir=tmp_path)


def write_checkpoint(folder: CheckpointDir, number: int, ranks: int = 2) -> None:
    parts = {name: folder.write_rank_file(number, name, {"its": torch.full((1000,), float(number))})
             for name in (f"worker-{rank}" for rank in range(ranks))}
    folder.commit(Manifest(number, {"--strategy": "gossip"}, {"workers": ranks}, parts))


def test_commit_keeps_two_newest_and_removes_incomplete(tmp_path: Path) -> None:
    folder = CheckpointDir(str(tmp_path))
    folder.write_rank_file(5, "worker-0", {"its": 1})
    for number in (10, 20, 30):
        write_checkpoint(folder, number)
    assert folder.list_numbers() == [30, 20]
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("damage", ["cut", "flipped", "lost", "manifest", "half a manifest"])
def test_corrupt_checkpoint_is_detected(damage: str, tmp_path: Path) -> None:
    folder = CheckpointDir(str(tmp_path))
    write_checkpoint(folder, 10)
    part, manifest = (tmp_path / "step-00000010" / name for name in ("worker-1.pt", "manifest.json"))
    data = part.read_bytes()
    if damage == "cut":
        part.write_bytes(data[:-1])
    elif damage == "flipped":
        part.write_bytes(data[:2000] + bytes([data[2000] ^ 1]) + data[2001:])
    elif damage == "lost":
        part.unlink()
    elif damage == "manifest":
        manifest.write_text(manifest.read_text().replace('"workers": 2', '"workers": 3'))
    else:
        manifest.write_text(manifest.read_text()[:50])
    with pytest.raises(CorruptCheckpointError, match=str(tmp_path)):
        folder.read_rank_file(folder.read_manifest(10), "worker-1")


def test_resume_skips_corrupt_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uninterrupted = run_summary("--strategy gossip")
    run_summary("--strategy gossip", checkpoint_dir=tmp_path, checkpoint_every=15)
    part = tmp_path / "step-00000030/worker-2.pt"
    part.write_bytes(part.read_bytes()[:-100])
    capsys.readouterr()
    resumed = run_summary("--strategy gossip", checkpoint_dir=tmp_path, checkpoint_every=15)
    messages = capsys.readouterr().err.splitlines()
    assert messages[0].startswith(f"slurmdl: train: a checkpoint is skipped: {part}: corrupt: ")
    assert messages[1:2] == [f"slurmdl: train: resumed after step 15 from {tmp_path}/step-00000015"]
    assert resumed["parameters_crc32"] == uninterrupted["parameters_crc32"]
    assert CheckpointDir(str(tmp_path)).list_numbers() == [30, 15], "the corrupt one was replaced"


def test_checkpoint_time_is_metered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = files.fsync_dir

    def slow_fsync_dir(folder: str) -> None:
        sync(folder)
        virtual_ranks[0].clock += 1.0

    virtual_ranks: list[Any] = []
    make = virtual.VirtualTransport.__init__
    monkeypatch.setattr(virtual.VirtualTransport, "__init__", lambda self, *words: (virtual_ranks.append(self),
                                                                           make(self, *words))[1])
    monkeypatch.setattr(files, "fsync_dir", slow_fsync_dir)
    summary = run_summary("--strategy allreduce", 1, 20, checkpoint_dir=tmp_path, checkpoint_every=10)
    # three directories are synced per checkpoint: of the rank file, of the manifest, and the parent
    assert summary["checkpoint_seconds"] == pytest.approx(6.0)
    assert summary["between_steps_seconds"] < 0.1


def test_metrics_file_has_each_step_once_after_resume(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics"
    run_summary("--strategy allreduce", 2, 20, checkpoint_dir=tmp_path / "kept", checkpoint_every=8, metrics=metrics)
    run_summary("--strategy allreduce", 2, 30, checkpoint_dir=tmp_path / "kept", checkpoint_every=8, metrics=metrics)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(1, 31))


@pytest.mark.parametrize("count, cursor", [(100, 42), (100, 84), (45, 42), (100, 99)])
@pytest.mark.parametrize("workers", [2, 3])
def test_remaining_samples_of_epoch_are_assigned_once(count: int, cursor: int, workers: int) -> None:
    batches = GlobalBatches(count, workers, 7, True, 1)
    assert np.array_equal(batches.order(4), GlobalBatches(count, 3, 7, True, 1).order(4))
    indices = [index for worker in range(workers) for part in even_slices(batches, worker, cursor)
               for index in range(part.start, part.stop)]
    assert sorted(indices) == (list(range(cursor, count)) if count - cursor >= workers else [])


def test_assemble_shard_cuts_and_joins() -> None:
    pieces = [(0, 3, {"a": torch.arange(3), "n": 5}), (3, 10, {"a": torch.arange(3, 10), "n": 5})]
    shard = assemble_shard(pieces, slice(2, 8))
    assert shard["a"].tolist() == [2, 3, 4, 5, 6, 7]
    assert shard["n"] == 5


def script(folder: Path, program: Any, ranks: int = 2) -> Sequence[Any]:
    def rank(transport: virtual.VirtualTransport) -> Any:
        run = init(StrategyConfig("allreduce"), environ={}, transport=transport, checkpoint_dir=str(folder),
                   checkpoint_every=2)
        model = torch.nn.Linear(3, 1)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        return program(run, model, opt)
    return virtual.run_virtual_ranks(ranks, rank)


@pytest.mark.parametrize("stop", [3, 5])
def test_loader_made_before_wrap_resumes_and_epochs_may_end_by_count(stop: int, tmp_path: Path) -> None:
    """As with Lightning, which gets the loader first, and requests no batch beyond the length of the loader."""
    def program(run: Run, model: Any, opt: Any, stops: bool = True) -> list[int]:
        loader = run.loader(np.arange(16), batch_size=2)  # four steps per epoch
        run.wrap(model, opt)
        samples: list[int] = []
        while run.step < 8:
            batches = iter(loader)
            for _ in range(4 - run.step % 4):
                samples += next(batches).tolist()
                model(torch.ones(1, 3)).sum().backward()
                opt.step()
                if stops and run.step == stop and len(samples) == 2 * stop:
                    run.state.closed = True  # ends without the checkpoint of a regular end
                    return samples
        run.finish()
        return samples

    whole = script(tmp_path / "whole", lambda *args: program(*args, stops=False))[0]
    first, second = (script(tmp_path / "stopped", program)[0] for _ in range(2))
    assert first[:stop // 2 * 4] + second == whole


def test_step_without_checkpoint_opportunity_is_rejected(tmp_path: Path) -> None:
    def program(run: Run, model: Any, opt: Any) -> None:
        run.wrap(model, opt)
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            opt.step()
    with pytest.raises(TrainError,
                       match=r"^step 2: checkpoints are written when a batch is requested; expected batches"):
        script(tmp_path, program)


@pytest.mark.parametrize("state, reason", [
    ({"a": Path("x")}, r"its state holds pathlib.*; expected numbers"), (None, "has no")])
def test_register_rejects_unsupported_objects(state: Any, reason: str, tmp_path: Path) -> None:
    class StatefulObject:
        def state_dict(self) -> Any:
            return state

        def load_state_dict(self, state_dict: Any) -> None:
            raise AssertionError

    def program(run: Run, model: Any, opt: Any) -> None:
        run.wrap(model, opt)
        run.register_for_checkpointing("thing", StatefulObject() if state else object())
    with pytest.raises(TrainError, match=rf"^register_for_checkpointing\('thing'\): .*{reason}"):
        script(tmp_path, program)


def test_directory_invisible_to_a_rank_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "VISIBILITY_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(CheckpointDir, "create_probe", lambda self: (str(tmp_path / "elsewhere"), ""))
    monkeypatch.setattr("os.unlink", lambda path: None)
    with pytest.raises(InvalidRunError,
                       match=r"rank 0 on .* cannot see or write files of rank 0 .*; expected a "
                       "writable directory that all ranks share"):
        script(tmp_path / "kept", lambda run, model, opt: run.wrap(model, opt))


def test_directory_that_cannot_be_created_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRunError,
                       match=r"^--checkpoint-dir .*/file/kept: Not a directory; expected a "
                       "writable directory"):
        script(tmp_path / "file" / "kept", lambda run, model, opt: run.wrap(model, opt))
