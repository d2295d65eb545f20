"""`#SBATCH --dl-*` lines in scripts submitted by `slurmdl sbatch`, with and without the plugin."""

from __future__ import annotations

import pytest

from slurmdl.errors import UsageError
from slurmdl.launch import submission, submission_record


def read(text: str, *argv: str, program: str = "", **environ: str) -> submission.Submission:
    """Parse a script; sbatch has the plugin unless `program` is one without it."""
    call = submission.SbatchCall.from_argv(argv, program, f"#!/bin/sh\n{text}\n".encode)
    return submission.parse_submission(call, environ)


def test_precedence_script_environment_command_line():
    job = read("#SBATCH -N2 --dl-ps 2 --dl-bytes=1M\n#DL --dl-bytes=2M")
    assert (job.request.dl.strategy, job.request.dl.ps, job.request.nodes) == ("ps", 2, (2, 2))
    assert job.request.dl.model_bytes == 2e6
    assert read("#SBATCH --dl-ps=2", SLURMDL_OPT_PS="3").request.dl.ps == 3
    assert read("#SBATCH --dl-ps=2", "--dl-ps=4", SLURMDL_OPT_PS="3").request.dl.ps == 4
    assert read("#SBATCH --job-name --dl-ps=2").request.dl.ps == 0


@pytest.mark.parametrize(("line", "plugin", "message"), [
    ("#SBATCH -N2 --dl-ps=2", False, r"2: '--dl-ps=2' in a #SBATCH line needs the plugin .* expected #DL --dl-ps=2"),
    ("#SBATCH --dl-explain", True, r"2: '--dl-explain' is not an option of sbatch; expected #DL --dl-explain"),
    ("#SBATCH --dl-pss=2", True, "'--dl-pss=2' is not an option of sbatch"),
    ("#SBATCH --dl-ps=two", True, "whole number")])
def test_lines_that_sbatch_rejects_raise_usage_error(line, plugin, message, fake_slurm):
    with pytest.raises(UsageError, match=message):
        read(line, program=str(fake_slurm.command("sbatch", "echo --dl-ps" if plugin else "")))
    assert fake_slurm.calls() in ([], ["sbatch --help"])


def test_plugin_is_not_queried_without_plugin_lines(fake_slurm):
    job = read("#SBATCH -N2 -J --dl-ps\n#DL --dl-ps=1", program=str(fake_slurm.command("sbatch")))
    assert job.request.dl.ps == 1 and not fake_slurm.calls()


def test_environment_has_typed_options_only():
    """The wrapper removes typed options from the command line and passes them to the plugin in the environment."""
    job = read("#SBATCH --dl-ps=2 --dl-rank0=any", "--dl-ps=3", "--dl-explain")
    command = submission.build_submit_command(job, {})
    exported = {name: value for name, value in command.env.items() if name.startswith("SLURMDL_OPT_")}
    assert exported == {"SLURMDL_OPT_PS": "3"}
    record = submission_record.parse_record(command.env[submission_record.ENV_VARIABLE])
    in_job = {**exported, "SLURMDL_OPT_RANK0": "any", "SLURMDL_OPT_STRATEGY": "gossip"}
    assert record.options.ps == 3 and record.options.rank0 == "any"
    assert record.environ_without_inputs(in_job) == {"SLURMDL_OPT_STRATEGY": "gossip"}


def test_without_plugin_lines_the_environment_has_only_the_record():
    command = submission.build_submit_command(read("#DL --dl-ps=2", "--dl-ps=3"), {})
    assert set(command.env) == {submission_record.ENV_VARIABLE}
