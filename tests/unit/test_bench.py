"""The benchmark matrix of `slurmdl bench run`: spec, order of cells, metrics and report."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from slurmdl.bench import frameworks, host_meters, report, submit
from slurmdl.bench.spec import Cell, Spec, read_matrix_spec
from slurmdl.bench.submit import CellResult, Progress
from slurmdl.cli.main import main
from slurmdl.errors import InputError, UsageError


def read_spec(tmp_path: Path, text: str) -> Spec:
    file = tmp_path / "spec.yaml"
    file.write_text(text)
    return read_matrix_spec(str(file))


def test_spec_is_parsed_into_cells(tmp_path: Path) -> None:
    parsed = read_spec(tmp_path, "frameworks: [slurmdl, ddp]\nstrategies: [allreduce, gossip]\nmodels: [mlp:8, cnn]\n"
                       "nodes: 2\nplacements: [slurm, slurmdl]\nlr: 1\nrepeats: 2\n")
    assert parsed.models == {"mlp:8": "digits", "cnn": "digits"}
    assert (parsed.nodes, parsed.lr) == ((2,), 1.0)
    cells = parsed.cells()
    assert cells[:3] == [Cell(framework, strategy, "mlp:8", 2, "slurm") for framework, strategy in (
        ("slurmdl", "allreduce"), ("slurmdl", "gossip"), ("ddp", "allreduce"))]
    assert len(cells) == len({cell.name for cell in cells}) == 12
    order = [*parsed.order()]
    assert [cell for cell, repeat in order if repeat == 1] == cells[::-1]


@pytest.mark.parametrize("text, words", [
    ("framework: [ddp]", "unknown key framework; expected frameworks"), ("nodes: [0]", "nodes: 0 is invalid"),
    ("nodes: two", "nodes: 'two' is invalid; expected a whole number"),
    ("frameworks: [dpp]", "'dpp' is invalid; expected ddp"),
    ("models: [vgg]", "models: 'vgg' is invalid; expected vgg16"), ("placements: [near]", "placements: 'near'"),
    ("nodes: []", "nodes: nothing is in the list"), ("nodes: [2, 2]", "nodes: something is twice"),
    ("steps: true", "steps: True is invalid"),
    ("target_accuracy: 0.9", "target_accuracy: 0.9 with evaluate_every 0"),
    ("- nodes", "expected a mapping"), ("nodes: [1", "is not YAML"),
    ("models: {cnn: 3}", "models: {'cnn': 3}"),
    ("emulate_compute: -1", "expected 0 or more"), ("strategies: [gosip]", "'gosip' is invalid; expected gossip"),
    ("models: {cnn: digit}", "models: cnn: 'digit' is invalid; expected digits"),
    ("models: {cnn: 'synthetic:3x8x8:10:5'}", "5 images for 10 classes; expected one of each class"),
    ("step_starter: mpiexec", "step_starter: 'mpiexec' is invalid; expected ")])
def test_invalid_spec_is_rejected(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        read_spec(tmp_path, text)
    assert words in str(error.value)
    assert "spec.yaml" in str(error.value)


@pytest.mark.parametrize("launcher, plain, placed", [
    ("srun", "exec srun -K --mpi=pmi2 ", "__main__.py slurmdl srun -K --mpi=pmi2 "),
    ("mpirun", "exec mpirun ", "__main__.py slurmdl srun --step-starter=mpirun ")])
def test_cell_start_command_matches_launcher_and_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str,
                                                     plain: str, placed: str) -> None:
    (tmp_path / "mpiexec.hydra").touch(mode=0o755)
    (tmp_path / "mpirun").symlink_to("mpiexec.hydra")
    monkeypatch.setenv("PATH", str(tmp_path))
    spec = Spec(step_starter=launcher)
    scripts = [submit.script(spec, Cell("ddp", "ddp", "cnn", 2, placement), "/x")
               for placement in ("slurm", "slurmdl")]
    assert plain in scripts[0]
    assert placed in scripts[1]


def test_adapter_is_loaded_from_a_file(tmp_path: Path) -> None:
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
            warmup_steps=1, steps=2, target_accuracy=0.5, evaluate_every=1)
SLURMDL, DDP = (Cell(name, "allreduce", "cnn", 2, "slurm") for name in ("slurmdl", "ddp"))


def rank_result(number: int, forward: float = 1.0, metered: bool = True, **further: Any) -> dict[str, Any]:
    """Result of a rank whose steps take 4 s."""
    waiting = 0.5 if metered else 0.0
    step = {"data": 0.0, "forward": forward, "backward": 1.0, "communication": 2.5 - forward - waiting,
            "peer_wait": waiting, "optimizer": 0.5, "wall": 4.0}
    return {"rank": number, "node": f"n{number}", "parameters": 7, "steps": [step] * 2, "memory": 100 + number,
            "accuracy_curve": [[4.0, 0.4], [8.0, 0.6]], "communication": None if metered else 2.0, "cpu_idle": 0.5,
            "overlapped_comm": 0.25 if metered else None,
            "bytes_sent": {"intra_node": 0, "intra_zone": 30, "inter_zone": 60} if metered and not number else None,
            "zone": "A", "local_addresses": [f"10.0.0.{number}"], "sent": {"10.0.0.0": 40}
            if number else {"10.0.0.9": 6}, **further}


@pytest.mark.parametrize(("cell", "ranks", "expected"), [
    (SLURMDL, (rank_result(0), rank_result(1)), {
        "images": 2 * 10 / 4, "seconds": 4.0, "peer_wait": 0.5, "communication": 1.0, "overlapped_comm": 0.25,
        "memory": 101, "seconds_to_accuracy": 8.0, "bytes": {"intra_node": 0, "intra_zone": 10, "inter_zone": 20}}),
    # not metered: one rank computes for a second longer than the other, which is idle in that time
    (DDP, (rank_result(0, 1.0, False), rank_result(1, 2.0, False)), {
        "peer_wait": 0.5, "communication": (1.5 + 0.5) / 2 - 0.5, "overlapped_comm": 2.0 - 1.0,
        "bytes": {"intra_node": 0, "intra_zone": 20, "inter_zone": 3}}),
], ids=["metered", "estimated"])
def test_figures_of_a_job(cell: Cell, ranks: tuple[dict[str, Any], ...], expected: dict[str, object]) -> None:
    figures = report.job_figures(CellResult(cell, 0, "done", ranks=ranks), SPEC)
    found = {**vars(figures), **figures.phases}
    assert {name: found[name] for name in expected} == expected
    assert figures.phase_sum_ratio == pytest.approx(1.0)


def test_tcp_bytes_sent_are_counted_by_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            sender.sendall(b"x" * 1000)
            assert len(receiver.recv(1000, socket.MSG_WAITALL)) == 1000
            sent = host_meters.TcpBytesSent()
            sender.sendall(b"x" * 70_000)
            assert len(receiver.recv(70_000, socket.MSG_WAITALL)) == 70_000
            limit = time.monotonic() + 10
            while sent.bytes() != {"127.0.0.1": 70_000} and time.monotonic() < limit:
                time.sleep(0.01)  # acknowledgments arrive later than the data
            assert sent.bytes() == {"127.0.0.1": 70_000}
            assert sent.local_addresses == {"127.0.0.1"}
            descriptors = os.listdir("/proc/self/fd")
            sent.bytes()
            assert len(os.listdir("/proc/self/fd")) == len(descriptors), "no descriptor stays open"
    ranks = [{"node": "n0", "zone": "A", "local_addresses": ["127.0.0.1", "10.0.0.1"],
              "sent": {"127.0.0.1": 1, "10.0.0.1": 2, "10.0.0.2": 4, "10.0.0.3": 8}},
             {"node": "n1", "zone": "A", "local_addresses": ["127.0.0.1", "10.0.0.2"], "sent": {"10.0.0.1": 16}},
             {"node": "n2", "zone": "B", "local_addresses": ["10.0.0.3"], "sent": {}}]
    assert host_meters.bytes_by_locality(ranks) == {"intra_node": 3, "intra_zone": 20, "inter_zone": 8}


def write_results(folder: Path, *outcomes: CellResult) -> None:
    submit.prepare(SPEC, folder)
    for outcome in outcomes:
        (folder / f"{outcome.cell.name}.{outcome.repeat}.result").write_text(json.dumps(asdict(outcome)))


def test_report_has_status_of_all_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Failed, unfinished and CPU-bound cells are marked; efficiency is per node."""
    one_node = Cell("slurmdl", "allreduce", "cnn", 1, "slurm")
    write_results(tmp_path, CellResult(one_node, 0, "done", ranks=(rank_result(0),)),
                  CellResult(SLURMDL, 0, "done", ranks=(rank_result(0), rank_result(1, cpu_idle=0.1))),
                  CellResult(SLURMDL, 1, "time limit"),
                  CellResult(DDP, 0, "failed", "slurmdl: a | b"))
    (tmp_path / "half.0.result").write_text('{"cell": ')
    assert main(["bench", "report", str(tmp_path)]) == 0
    table_text = capsys.readouterr().out
    table = [line for line in table_text.splitlines() if line.startswith("| ")]
    assert len(table) == 2 + 4
    assert "failed: slurmdl: a \\| b" in table_text
    assert "not run yet" in table_text
    assert "1 of 2 time limit; CPU-bound" in table_text
    assert "100%" in next(line for line in table if "| 2 | slurm |" in line)
    values = (tmp_path / "report.csv").read_text().splitlines()
    assert values[0].startswith("framework,strategy,model,nodes,placement,status")
    assert len(values) == 5
    assert {file.stem for file in tmp_path.glob("*.svg")} == {"phases", "bytes", "accuracy", "scaling"}


def test_directory_of_another_spec_is_rejected(tmp_path: Path) -> None:
    write_results(tmp_path)
    with pytest.raises(InputError, match=r"results of another spec \(different steps\)"):
        submit.prepare(Spec(**{**vars(SPEC), "steps": 3}), tmp_path)
    (tmp_path / "spec.json").write_text("[]")
    with pytest.raises(InputError, match=r"spec\.json"):
        report.report_rows(tmp_path)
    with pytest.raises(InputError, match="no results"):
        report.report_rows(tmp_path / "nowhere")
    assert main(["bench", "run", str(tmp_path / "no-such-spec.yaml")]) == InputError.exit_status


def test_finished_cells_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing framework is tried once; failed cells are run again only with `retry_failed`."""
    ran: list[tuple[str, int]] = []

    def run_cell(spec: Spec, cell: Cell, repeat: int, folder: Path, watch: object) -> CellResult:
        ran.append((cell.name, repeat))
        status = {"post-local": "missing", "ddp": "failed"}.get(cell.framework, "done")
        return CellResult(cell, repeat, status, ranks=(rank_result(0),))

    monkeypatch.setattr(submit, "_run_cell", run_cell)
    requested = Spec(frameworks=("slurmdl", "ddp", "post-local"), nodes=(1,), placements=("slurm",), repeats=2)
    messages: list[str] = []
    submit.run(requested, tmp_path, report_progress=messages.append)
    assert (len(ran), len(messages)) == (5, 7)
    assert messages[0] == "6 of 6 cells to run, at most 1 h left (10 min per job) and the time in the queue"
    assert messages[1].startswith("1 of 6: slurmdl allreduce, cnn, 1 node, slurm: done; about ")
    assert messages[-1] == "6 of 6: slurmdl allreduce, cnn, 1 node, slurm: done"
    submit.run(requested, tmp_path, report_progress=messages.append)
    assert len(ran) == 5
    submit.run(requested, tmp_path, retry_failed=True, report_progress=messages.append)
    assert len(ran) == 5 + 3


def test_progress_reports_remaining_time() -> None:
    clock, messages = [0.0], list[str]()
    progress = Progress(3, 2, 600.0, messages.append, now=lambda: clock[0])
    assert messages.pop() == "2 of 3 cells to run, at most 20 min left (10 min per job) and the time in the queue"
    progress.start(2)
    for clock[0] in (1.0, 29.0, 31.0, 60.0):
        progress.job("7", "PENDING", "Resources")
    assert messages == ["2 of 3: job 7 is PENDING (Resources), 31 s since its submission; at most 20 min left "
                        "(10 min per job) and the time in the queue"]
    clock[0] = 90.0
    progress.end(2, CellResult(DDP, 0, "done"), 1)
    assert messages[-1] == f"2 of 3: {DDP}: done; about 1 min 30 s left"
    progress.start(3)
    clock[0] = 120.0
    progress.job("8", "RUNNING", "None")
    assert messages[-1] == "3 of 3: job 8 is RUNNING, 30 s since its submission; about 1 min left"
    clock[0] = 500.0
    progress.end(3, CellResult(DDP, 0, "failed", "why"), 0)
    assert messages[-1] == f"3 of 3: {DDP}: failed: why"


def test_job_id_is_parsed_from_output_with_other_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A submit filter of the site may print to stdout before sbatch does."""
    job_ids: list[str] = []

    def wait_for_end(number: str, watch: object) -> tuple[str, str]:
        job_ids.append(number)
        return "CANCELLED", ""

    command = "echo Quota: 3 jobs pending; echo '12;east'"
    monkeypatch.setattr(submit, "submit_command", lambda cell: ["sh", "-c", command])
    monkeypatch.setattr(submit, "_wait_for_end", wait_for_end)
    requested = Spec(nodes=(1,), placements=("slurm",), repeats=1, frameworks=("ddp",))
    submit.run(requested, tmp_path, report_progress=lambda line: None)
    assert job_ids == ["12"]
