"""The matrix of `slurmdl bench run`: its spec, its order, its figures and its report."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from slurmdl.bench import frameworks, tcp_bytes
from slurmdl.bench.matrix import report, submit
from slurmdl.bench.matrix.progress import Progress
from slurmdl.bench.matrix.spec import Cell, Spec, read_matrix_spec
from slurmdl.bench.matrix.submit import CellResult
from slurmdl.cli.main import main
from slurmdl.errors import InputError, UsageError


def spec(tmp_path: Path, text: str) -> Spec:
    file = tmp_path / "spec.yaml"
    file.write_text(text)
    return read_matrix_spec(str(file))


def test_a_spec_and_its_cells(tmp_path: Path) -> None:
    found = spec(tmp_path, "frameworks: [slurmdl, ddp]\nstrategies: [allreduce, gossip]\nmodels: [mlp:8, cnn]\n"
                 "nodes: 2\nplacements: [slurm, spread]\nlr: 1\nrepeats: 2\n")
    assert found.models == {"mlp:8": "digits", "cnn": "digits"}
    assert (found.nodes, found.lr) == ((2,), 1.0)
    cells = found.cells()
    assert cells[:3] == [Cell(framework, strategy, "mlp:8", 2, "slurm") for framework, strategy in (
        ("slurmdl", "allreduce"), ("slurmdl", "gossip"), ("ddp", "allreduce"))]
    assert len(cells) == len({cell.name for cell in cells}) == 12
    order = [*found.order()]
    assert [cell for cell, repeat in order if repeat == 1] == cells[::-1]
    assert Spec(**{key: tuple(value) if isinstance(value, list) else value
                   for key, value in found.to_json().items()}) == found


@pytest.mark.parametrize("text, words", [
    ("framework: [ddp]", "unknown key framework; expected frameworks"), ("nodes: [0]", "nodes: 0 is not valid"),
    ("nodes: two", "nodes: 'two' is not valid; valid: a whole number"),
    ("frameworks: [dpp]", "'dpp' is not valid; valid: ddp"),
    ("models: [vgg]", "models: 'vgg' is not valid; valid: vgg16"), ("placements: [near]", "placements: 'near'"),
    ("nodes: []", "nodes: nothing is in the list"), ("nodes: [2, 2]", "nodes: something is twice"),
    ("steps: true", "steps: True is not valid"),
    ("target_accuracy: 0.9", "target_accuracy: 0.9 with evaluate_every 0"),
    ("- nodes", "expected a mapping"), ("nodes: [1", "is not YAML"),
    ("models: {cnn: 3}", "models: {'cnn': 3}"),
    ("emulate_compute: -1", "expected 0 or more"), ("strategies: [gosip]", "'gosip' is not valid; valid: gossip"),
    ("models: {cnn: digit}", "models: cnn: 'digit' is not valid; valid: digits"),
    ("models: {cnn: 'synthetic:3x8x8:10:5'}", "5 images for 10 classes; expected one of each class"),
    ("launcher: mpiexec", "launcher: 'mpiexec' is not valid; valid: ")])
def test_wrong_specs(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError) as raised:
        spec(tmp_path, text)
    assert words in str(raised.value)
    assert "spec.yaml" in str(raised.value)


@pytest.mark.parametrize("launcher, plain, placed", [
    ("srun", "exec srun -K --mpi=pmi2 ", " -m slurmdl srun -K --mpi=pmi2 "),
    ("mpirun", "exec mpirun ", " -m slurmdl srun --launcher=mpirun ")])
def test_cells_start_by_what_fits_the_mpi_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str,
                                                  plain: str, placed: str) -> None:
    (tmp_path / "mpiexec.hydra").touch(mode=0o755)
    (tmp_path / "mpirun").symlink_to("mpiexec.hydra")
    monkeypatch.setenv("PATH", str(tmp_path))
    spec = Spec(launcher=launcher)
    starts = [submit.script(spec, Cell("ddp", "ddp", "cnn", 2, placement), "/x")
              for placement in ("slurm", "slurmdl")]
    assert plain in starts[0]
    assert placed in starts[1]


def test_adapters_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "alone.py"
    file.write_text("STRATEGIES = ('alone',)\ndef unavailable_reason(): return 'not today'\n"
                    "def setup(*given): return None\n")
    assert frameworks.load(str(file)).unavailable_reason() == "not today"
    assert [str(cell) for cell in Spec(frameworks=(str(file),), nodes=(1,), placements=("slurm",)).cells()] == [
        f"{file} alone, cnn, 1 node, slurm"]
    file.write_text("STRATEGIES = ('alone',)\n")
    with pytest.raises(UsageError, match="has no unavailable_reason"):
        frameworks.load(str(file))
    file.write_text("1 / 0\n")
    with pytest.raises(UsageError, match="ZeroDivisionError"):
        frameworks.load(str(file))
    for name in frameworks.FRAMEWORKS:
        assert frameworks.load(name).STRATEGIES


SPEC = Spec(frameworks=("slurmdl", "ddp"), nodes=(1, 2), placements=("slurm",), repeats=2, batch_size=10,
            warmup_steps=1,
            steps=2, target_accuracy=0.5, evaluate_every=1)
OURS, DDP = (Cell(name, "allreduce", "cnn", 2, "slurm") for name in ("slurmdl", "ddp"))


def rank(number: int, forward: float = 1.0, metered: bool = True, **more: Any) -> dict[str, Any]:
    """A rank whose steps take 4 s."""
    waiting = 0.5 if metered else 0.0
    step = {"data": 0.0, "forward": forward, "backward": 1.0, "communication": 2.5 - forward - waiting,
            "peer_wait": waiting, "optimizer": 0.5, "wall": 4.0}
    return {"rank": number, "node": f"n{number}", "parameters": 7, "steps": [step] * 2, "memory": 100 + number,
            "accuracy_curve": [[4.0, 0.4], [8.0, 0.6]], "communication": None if metered else 2.0, "cpu_idle": 0.5,
            "overlapped_comm": 0.25 if metered else None,
            "bytes_sent": {"intra_node": 0, "intra_zone": 30, "inter_zone": 60} if metered and not number else None,
            "zone": "A", "local_addresses": [f"10.0.0.{number}"], "sent": {"10.0.0.0": 40}
            if number else {"10.0.0.9": 6}, **more}


def test_figures_of_a_runtime_that_meters_itself() -> None:
    its = report.job_figures(CellResult(OURS, 0, "done", ranks=(rank(0), rank(1))), SPEC)
    assert (its.images, its.seconds) == (2 * 10 / 4, 4.0)
    assert its.phases["peer_wait"] == 0.5
    assert (its.overlapped_comm, its.memory, its.seconds_to_accuracy) == (0.25, 101, 8.0)
    assert its.bytes == {"intra_node": 0, "intra_zone": 10, "inter_zone": 20}
    assert its.phase_sum_ratio == pytest.approx(4 / 4)


def test_figures_of_others_tell_waiting_for_the_slowest_and_what_was_hidden() -> None:
    """One computes for a second longer than the other, which stands still meanwhile."""
    its = report.job_figures(CellResult(DDP, 0, "done", ranks=(rank(0, 1.0, False), rank(1, 2.0, False))), SPEC)
    assert its.phases["peer_wait"] == pytest.approx((1.0 + 0.0) / 2)
    assert its.phases["communication"] == pytest.approx((1.5 + 0.5) / 2 - 0.5)
    assert its.overlapped_comm == pytest.approx(2.0 - 1.0)
    assert its.bytes == {"intra_node": 0, "intra_zone": 20, "inter_zone": 3}


def test_what_is_sent_over_tcp_is_counted_by_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            sender.sendall(b"x" * 1000)
            assert len(receiver.recv(1000, socket.MSG_WAITALL)) == 1000
            sent = tcp_bytes.TcpBytesSent()
            sender.sendall(b"x" * 70_000)
            assert len(receiver.recv(70_000, socket.MSG_WAITALL)) == 70_000
            limit = time.monotonic() + 10
            while sent.bytes() != {"127.0.0.1": 70_000} and time.monotonic() < limit:
                time.sleep(0.01)  # what has arrived is confirmed a little later
            assert sent.bytes() == {"127.0.0.1": 70_000}
            assert sent.local_addresses == {"127.0.0.1"}
            there = os.listdir("/proc/self/fd")
            sent.bytes()
            assert len(os.listdir("/proc/self/fd")) == len(there), "no descriptor stays open"
    ranks = [{"node": "n0", "zone": "A", "local_addresses": ["127.0.0.1", "10.0.0.1"],
              "sent": {"127.0.0.1": 1, "10.0.0.1": 2, "10.0.0.2": 4, "10.0.0.3": 8}},
             {"node": "n1", "zone": "A", "local_addresses": ["127.0.0.1", "10.0.0.2"], "sent": {"10.0.0.1": 16}},
             {"node": "n2", "zone": "B", "local_addresses": ["10.0.0.3"], "sent": {}}]
    assert tcp_bytes.by_locality(ranks) == {"intra_node": 3, "intra_zone": 20, "inter_zone": 8}


def keep(folder: Path, *outcomes: CellResult) -> None:
    submit.prepare(SPEC, folder)
    for its in outcomes:
        (folder / f"{its.cell.name}.{its.repeat}.result").write_text(json.dumps(asdict(its)))


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cells that failed or were not run say so; efficiency is per node; bad marks are there."""
    alone = Cell("slurmdl", "allreduce", "cnn", 1, "slurm")
    keep(tmp_path, CellResult(alone, 0, "done", ranks=(rank(0),)),
         CellResult(OURS, 0, "done", ranks=(rank(0), rank(1, cpu_idle=0.1))), CellResult(OURS, 1, "time limit"),
         CellResult(DDP, 0, "failed", "slurmdl: a | b"))
    (tmp_path / "half.0.result").write_text('{"cell": ')
    assert main(["bench", "report", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    table = [line for line in told.splitlines() if line.startswith("| ")]
    assert len(table) == 2 + 4
    assert "failed: slurmdl: a \\| b" in told
    assert "not run yet" in told
    assert "1 of 2 time limit; CPU-bound" in told
    assert "100%" in next(line for line in table if "| 2 | slurm |" in line)
    values = (tmp_path / "report.csv").read_text().splitlines()
    assert values[0].startswith("framework,strategy,model,nodes,placement,status")
    assert len(values) == 5
    assert {file.stem for file in tmp_path.glob("*.svg")} == {"phases", "bytes", "accuracy", "scaling"}


def test_a_folder_belongs_to_one_spec(tmp_path: Path) -> None:
    keep(tmp_path)
    with pytest.raises(InputError, match=r"results of another spec \(different steps\)"):
        submit.prepare(Spec(**{**vars(SPEC), "steps": 3}), tmp_path)
    (tmp_path / "spec.json").write_text("[]")
    with pytest.raises(InputError, match=r"spec\.json"):
        report.report_rows(tmp_path)
    with pytest.raises(InputError, match="no results"):
        report.report_rows(tmp_path / "nowhere")
    assert main(["bench", "run", str(tmp_path / "no-such-spec.yaml")]) == InputError.exit_status


def test_what_is_done_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A framework that is not installed is asked for once; what failed is left, unless it is wanted again."""
    ran: list[tuple[str, int]] = []

    def one(spec: Spec, cell: Cell, repeat: int, folder: Path, watch: object) -> CellResult:
        ran.append((cell.name, repeat))
        status = {"horovod": "missing", "ddp": "failed"}.get(cell.framework, "done")
        return CellResult(cell, repeat, status, ranks=(rank(0),))

    monkeypatch.setattr(submit, "_run_cell", one)
    asked = Spec(frameworks=("slurmdl", "ddp", "horovod"), nodes=(1,), placements=("slurm",), repeats=2)
    said: list[str] = []
    submit.run(asked, tmp_path, report_progress=said.append)
    assert (len(ran), len(said)) == (5, 7)
    assert said[0] == "6 of 6 cells to run, at most 1 h left (10 min per job) and the time in the queue"
    assert said[1].startswith("1 of 6: slurmdl allreduce, cnn, 1 node, slurm: done; about ")
    assert said[-1] == "6 of 6: slurmdl allreduce, cnn, 1 node, slurm: done"
    submit.run(asked, tmp_path, report_progress=said.append)
    assert len(ran) == 5
    submit.run(asked, tmp_path, retry_failed=True, report_progress=said.append)
    assert len(ran) == 5 + 3


def test_progress_tells_the_time_left_from_the_first_minute() -> None:
    clock, said = [0.0], list[str]()
    progress = Progress(3, 2, 600.0, said.append, now=lambda: clock[0])
    assert said.pop() == "2 of 3 cells to run, at most 20 min left (10 min per job) and the time in the queue"
    progress.start(2)
    for clock[0] in (1.0, 29.0, 31.0, 60.0):
        progress.job("7", "PENDING", "Resources")
    assert said == ["2 of 3: job 7 is PENDING (Resources), 31 s since its submission; at most 20 min left "
                    "(10 min per job) and the time in the queue"]
    clock[0] = 90.0
    progress.end(2, "cell", "done", "", 1)
    assert said[-1] == "2 of 3: cell: done; about 1 min 30 s left"
    progress.start(3)
    clock[0] = 120.0
    progress.job("8", "RUNNING", "None")
    assert said[-1] == "3 of 3: job 8 is RUNNING, 30 s since its submission; about 1 min left"
    clock[0] = 500.0
    progress.end(3, "cell", "failed", "why", 0)
    assert said[-1] == "3 of 3: cell: failed: why"


def test_the_job_number_is_found_among_the_lines_of_a_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter of the site may print to stdout before sbatch does."""
    watched: list[str] = []

    def end(number: str, watch: object) -> tuple[str, str]:
        watched.append(number)
        return "CANCELLED", ""

    site = "echo Quota: 3 jobs pending; echo '12;east'"
    monkeypatch.setattr(submit, "submit_command", lambda cell: ["sh", "-c", site])
    monkeypatch.setattr(submit, "_wait_for_end", end)
    asked = Spec(nodes=(1,), placements=("slurm",), repeats=1, frameworks=("ddp",))
    submit.run(asked, tmp_path, report_progress=lambda line: None)
    assert watched == ["12"]
