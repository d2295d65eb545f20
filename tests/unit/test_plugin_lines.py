"""`#SBATCH --dl-*` lines under `slurmdl sbatch`: what they mean where Slurm has the plugin, and where it has not."""

from __future__ import annotations

import pytest

from slurmdl.errors import UsageError
from slurmdl.launch import sbatch, submission, submission_record


def read(text: str, *argv: str, plugin: bool = True, **environ: str) -> submission.Submission:
    return submission.parse_submission(
        argv, environ, {}, stdin=f"#!/bin/sh\n{text}\n".encode(), has_plugin=lambda: plugin)


def test_script_then_environment_then_command_line():
    job = read("#SBATCH -N2 --dl-ps 2 --dl-model-bytes=1M\n#DL --dl-model-bytes=2M")
    assert (job.request.dl.strategy, job.request.dl.ps, job.request.nodes) == ("ps", 2, (2, 2))
    assert job.request.dl.model_bytes == 2e6
    assert read("#SBATCH --dl-ps=2", SLURMDL_OPT_PS="3").request.dl.ps == 3
    assert read("#SBATCH --dl-ps=2", "--dl-ps=4", SLURMDL_OPT_PS="3").request.dl.ps == 4
    assert read("#SBATCH --job-name --dl-ps=2").request.dl.ps == 0


@pytest.mark.parametrize(("line", "plugin", "message"), [
    ("#SBATCH -N2 --dl-ps=2", False, r"2: '--dl-ps=2' in a #SBATCH line needs the plugin .* valid: #DL --dl-ps=2"),
    ("#SBATCH --dl-explain", True, r"2: '--dl-explain' is no option of sbatch; valid: #DL --dl-explain"),
    ("#SBATCH --dl-pss=2", True, "'--dl-pss=2' is no option of sbatch"),
    ("#SBATCH --dl-ps=two", True, "whole number")])
def test_what_sbatch_would_refuse(line, plugin, message):
    with pytest.raises(UsageError, match=message):
        read(line, plugin=plugin)


def test_sbatch_is_not_asked_for_scripts_without_such_lines():
    assert read("#SBATCH -N2 -J --dl-ps\n#DL --dl-ps=1", plugin=False).request.dl.ps == 1


def test_the_job_finds_what_was_typed_and_not_what_the_plugin_reads_in_the_script():
    """The plugin sees no typed options of the wrapper, which takes them away: it is told in the environment."""
    job = read("#SBATCH --dl-ps=2 --dl-place=spread", "--dl-ps=3", "--dl-explain")
    command = sbatch.build_submit_command("/bin/sbatch", job, sbatch.Decision(), {})
    given = {name: value for name, value in command.env.items() if name.startswith("SLURMDL_OPT_")}
    assert given == {"SLURMDL_OPT_PS": "3"}
    marked = submission_record.parse_record(command.env[submission_record.ENV_VARIABLE])
    in_job = {**given, "SLURMDL_OPT_PLACE": "spread", "SLURMDL_OPT_STRATEGY": "gossip"}
    assert marked.options.ps == 3 and marked.options.place == "spread"
    assert marked.environ_without_inputs(in_job) == {"SLURMDL_OPT_STRATEGY": "gossip"}


def test_without_such_lines_the_environment_stays():
    command = sbatch.build_submit_command("/bin/sbatch", read("#DL --dl-ps=2", "--dl-ps=3"), sbatch.Decision(), {})
    assert set(command.env) == {submission_record.ENV_VARIABLE}
