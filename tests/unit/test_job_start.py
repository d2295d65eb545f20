"""Prediction of a start: unmodelled requests, and the output of `sbatch --test-only`."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm
from placing import cluster, node

from slurmdl.cluster.snapshot import Reservation
from slurmdl.job_request import JobRequest
from slurmdl.launch import binding, sbatch
from slurmdl.launch.submission import SubmitCommand

OUTPUT = "sbatch: Job 250 to start at {} using 2 processors on nodes n[1-2] in partition main\n"


@pytest.mark.parametrize("output", [OUTPUT, OUTPUT.replace("using", "a using")], ids=["22.05", "26.05"])
def test_parse_test_only(output: str) -> None:
    start = sbatch.parse_test_only("sbatch: Warning: first\n" + output.format("2026-11-21T15:57:42"))
    assert start is not None
    assert start[1] == ["n1", "n2"]
    assert time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(start[0])) == "2026-11-21T15:57:42"


@pytest.mark.parametrize("text", [
    "", "allocation failure: Requested node configuration is not available", OUTPUT.format("tomorrow"),
    OUTPUT.format("9999999-01-01T00:00:00"), "Job 1 to start at 2026-11-21T15:57:42 using 2 processors on nodes n[1-",
])
def test_parse_test_only_of_other_output_is_none(text: str) -> None:
    assert sbatch.parse_test_only(text) is None


@pytest.mark.parametrize(("request_", "reason"), [
    (JobRequest(), ""), (JobRequest(constraint="[a|b]"), ""), (JobRequest(reservation="later"), ""),
    (JobRequest(unmodelled_reason="--tmp is not modelled"), "--tmp"),
])
def test_unpredictable_start_reason(request_: JobRequest, reason: str) -> None:
    snapshot = replace(cluster(node("n1"), node("n2")),
                   reservations=(Reservation("now", ("n1",)), Reservation("later", ("n2",), active=False)))
    result = binding.unpredictable_start_reason(request_, snapshot, ("n1",))
    assert (reason in result) and bool(reason) == bool(result)
    if not request_.reservation:
        assert binding.unpredictable_start_reason(request_, snapshot, ("n1", "n2"))


def run_test_only(tmp_path: Path, shell: str) -> str:
    program = FakeSlurm(tmp_path).command("sbatch", f"cat > {tmp_path}/stdin\n{shell}")
    command = SubmitCommand((str(program), "-N2", "--nodelist=n[1-2]"), {"PATH": "/usr/bin:/bin"},
                            stdin=b"#!/bin/sh\n\xff")
    return sbatch.predict_start(command).not_starting_reason(("n1", "n2"))


@pytest.mark.parametrize(("seconds", "nodes", "reason"), [
    (0, "n[1-2]", ""), (0, "n[1,3]", "Slurm would choose n[1,3]"), (90, "n[1-2]", "Slurm would start it there in"),
])
def test_not_starting_reason_of_a_predicted_start(tmp_path: Path, seconds: int, nodes: str, reason: str) -> None:
    output = OUTPUT.replace("n[1-2]", nodes).format(f"$(date -d +{seconds}seconds +%Y-%m-%dT%H:%M:%S)")
    result = run_test_only(tmp_path, f'echo "{output}" >&2')
    assert result == reason or (reason and result.startswith(reason))
    assert FakeSlurm(tmp_path).calls() == ["sbatch --test-only -N2 --nodelist=n[1-2]"]
    assert (tmp_path / "stdin").read_bytes().startswith(b"#!/bin/sh\n")


def test_not_starting_reason_quotes_the_error(tmp_path: Path) -> None:
    assert run_test_only(tmp_path, "echo 'allocation failure: Invalid feature specification' >&2; exit 1") == \
        "Slurm rejects it: allocation failure: Invalid feature specification"
    assert run_test_only(tmp_path, "exit 1") == "Slurm rejects it: no message"
