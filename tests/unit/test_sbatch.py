"""The command that submits a job, its submission record, the prediction of its start, and sbatch as a child."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm

from slurmdl.dl_options import DlOptions
from slurmdl.errors import InputError, UnavailableError
from slurmdl.launch import sbatch, submission, submission_record


def parse(*argv: str, script: bytes = b"", program: str = "") -> submission.Submission:
    call = submission.SbatchCall.from_argv(argv, program, lambda: script)
    return submission.parse_submission(call, {})


class TestSubmissionRecord:
    DL = DlOptions("ps", 2, zone=("a", "b"), bytes="400M", strict=True)

    def test_round_trip(self):
        record = submission_record.new_record(self.DL, {"SLURM_JOB_ID": "12"})
        environ = {"SLURMDL_SUBMISSION": record.to_env_value(), "SLURM_SUBMIT_HOST": os.uname().nodename}
        assert submission_record.read_record(environ) == record
        assert record.submitter_job == "12"

    def test_record_of_another_host_is_ignored(self):
        text = submission_record.new_record(self.DL, {}).to_env_value()
        assert submission_record.read_record({"SLURMDL_SUBMISSION": text, "SLURM_SUBMIT_HOST": "another"}) is None
        assert submission_record.read_record({}) is None

    @pytest.mark.parametrize("text", ["{", "[]", "{}", '{"version":9}', '{"version":3,"options":{"ps":"x"}}'])
    def test_malformed_record_is_an_input_error(self, text):
        with pytest.raises(InputError, match=r"SLURMDL_SUBMISSION|--dl-"):
            submission_record.read_record({"SLURMDL_SUBMISSION": text})

    def test_unchanged_inputs_are_removed(self):
        record = submission_record.new_record(self.DL, {"SLURMDL_OPT_STRATEGY": "gossip", "SLURMDL_OPT_PS": "1",
                                                        "HOME": "/"})
        inside = {"SLURMDL_OPT_STRATEGY": "gossip", "SLURMDL_OPT_PS": "3", "SLURMDL_OPT_STRICT": "1", "HOME": "/x"}
        assert record.environ_without_inputs(inside) == {
            "SLURMDL_OPT_PS": "3", "SLURMDL_OPT_STRICT": "1", "HOME": "/x"}

    def test_submission_does_not_inherit_outputs(self):
        task = {"SLURMDL_PLAN": "x", "SLURMDL_ROLE": "ps", "RANK": "1", "SLURMDL_EXPORTED": " RANK"}
        own = {"SLURMDL_OPT_PS": "2", "SLURMDL_DEBUG": "1", "HOME": "/", "SLURM_JOB_ID": "3", "MASTER_ADDR": "mine"}
        assert submission_record.environ_without_inherited(task | own) == own
        users = {"RANK": "1", "MASTER_ADDR": "mine"}
        assert submission_record.environ_without_inherited(users) == users


OUTPUT = "sbatch: Job 250 to start at {} using 2 processors on nodes n[1-2] in partition main\n"
AT = "2026-11-21T15:57:42"


@pytest.mark.parametrize(("text", "nodes"), [
    ("sbatch: Warning: first\n" + OUTPUT.format(AT), ["n1", "n2"]),
    (OUTPUT.format(AT).replace("using", "a using"), ["n1", "n2"]),  # Slurm 26.05
    ("", None), ("allocation failure: Requested node configuration is not available", None),
    (OUTPUT.format("tomorrow"), None), (OUTPUT.format("9999999-01-01T00:00:00"), None),
    (f"Job 1 to start at {AT} using 2 processors on nodes n[1-", None)])
def test_parse_test_only(text, nodes):
    start = sbatch.parse_test_only(text)
    assert (start and start[1]) == nodes
    assert nodes is None or time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(start[0])) == AT


@pytest.mark.parametrize(("shell", "reason"), [
    ("echo '{now}' >&2", ""), ("echo '{other}' >&2", "Slurm would choose n[1,3]"),
    ("echo '{later}' >&2", r"Slurm would start it there in (89|90) s"),
    ("echo 'allocation failure: Invalid feature specification' >&2; exit 1",
     "Slurm rejects it: allocation failure: Invalid feature specification"),
    ("exit 1", "Slurm rejects it: no message")])
def test_predicted_start(fake_slurm, shell, reason):
    now, later = (OUTPUT.format(time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds)))
                  for seconds in (0, 90))
    answers = {"now": now, "other": now.replace("n[1-2]", "n[1,3]"), "later": later}
    program = fake_slurm.command("sbatch", f"cat > stdin\n{shell.format(**answers)}")
    command = submission.SubmitCommand((str(program), "-N2", "--nodelist=n[1-2]"), fake_slurm.environ,
                                       stdin=b"#!/bin/sh\n\xff")
    result = sbatch.predict_start(command).not_starting_reason(("n1", "n2"))
    assert result == reason or re.fullmatch(reason, result)
    assert fake_slurm.calls() == ["sbatch --test-only -N2 --nodelist=n[1-2]"]
    assert Path("stdin").read_bytes().startswith(b"#!/bin/sh\n")


@pytest.mark.parametrize(("export", "version", "added"), [
    (None, "", None), ("ALL", "", None), ("NONE", "", None), ("A,ALL", "", None),
    ("A,B=c", "", "--export=A,B=c,SLURMDL_SUBMISSION"), ("NIL", "22.05.8", "--export=NIL,SLURMDL_SUBMISSION"),
    ("NIL", "23.02.9", "--export=NIL,SLURMDL_SUBMISSION"), ("NIL", "23.11.0", None), ("NIL", "unknown", None),
    ("NIL", "24.05", None)])
def test_export_list_names_the_record(fake_slurm, export, version, added):
    program = str(fake_slurm.command("sbatch", f"echo slurm {version}"))
    job = parse(*([f"--export={export}"] if export else []), "--wrap=true", program=program)
    command = submission.build_submit_command(job, {})
    assert [word for word in command.argv if "SLURMDL_SUBMISSION" in word] == ([added] if added else [])
    assert bool(fake_slurm.calls()) == (export == "NIL")


@pytest.mark.parametrize(("export", "text", "path", "warns"), [
    ("A", "slurmdl srun true", "/opt/bin", True), ("A", "x\n  slurmdl srun true", "/opt/bin", True),
    ("A", "dlsrun true", "/opt/bin", True), ("NONE", "slurmdl srun true", "/opt/bin", True),
    (None, "slurmdl srun true", "/opt/bin", False), ("A,ALL", "slurmdl srun true", "/opt/bin", False),
    ("A,PATH", "slurmdl srun true", "/opt/bin", False), ("A,PATH=/x", "slurmdl srun true", "/opt/bin", False),
    ("A", "slurmdl srun true", "/usr/bin", False), ("A", "/opt/bin/slurmdl srun true", "/opt/bin", False),
    ("A", "# slurmdl srun\ntrue", "/opt/bin", False), ("A", "PATH=/x:$PATH\nslurmdl srun true", "/opt/bin", False),
    ("A", "module load slurmdl\nslurmdl srun true", "/opt/bin", False),
    ("A", "slurmdl srun true\nmodule load x", "/opt/bin", True)])
def test_warning_if_the_job_may_not_find_slurmdl(monkeypatch, export, text, path, warns):
    monkeypatch.setattr("shutil.which", lambda name: f"{path}/{name}")
    job = parse(*([f"--export={export}"] if export else []), "--wrap", text)
    message = job.missing_program_warning()
    assert message.endswith(f"write {path}/slurmdl in the script, or --export=PATH,...") if warns else not message


@pytest.mark.parametrize(("argv", "reads"), [
    ([], True), (["-N2"], True), (["job.sh"], False), (["--wrap=true"], False), (["--help"], False), (["-V"], False)])
def test_standard_input_is_read_if_it_is_the_script(argv, reads):
    call = submission.SbatchCall.from_argv(argv, read_stdin=lambda: b"script")
    assert call.stdin == (b"script" if reads else None)


@pytest.mark.parametrize(("text", "uses"), [
    ("slurmdl srun ./a", True), ("exec slurmdl   srun a", True), ("srun --dl-rank-map a", True), ("srun a", False),
    ("myslurmdl srun", False), ("slurmdl place", False),
])
def test_script_that_uses_slurmdl_srun(text, uses):
    assert parse("--wrap", text).uses_slurmdl_srun is uses
    assert parse(script=text.encode()).uses_slurmdl_srun is uses


def test_find_sbatch_skips_this_program(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sbatch").symlink_to(Path(sys.executable).parent / "dlsbatch")
    real = FakeSlurm(tmp_path / "slurm").command("sbatch")
    (tmp_path / "empty").mkdir()
    code = "import os, sys; sys.argv[0] = sys.argv[1]; from slurmdl.launch.sbatch import find_sbatch as f; " \
           "print(f(os.environ))"
    path = os.pathsep.join(str(tmp_path / name) for name in ("empty", "own", "slurm"))
    proc = subprocess.run([sys.executable, "-c", code, str(tmp_path / "own" / "sbatch")], text=True, timeout=120,
                          env={"PATH": path}, capture_output=True, check=True)
    assert proc.stdout.strip() == str(real)
    with pytest.raises(UnavailableError, match="not found on PATH"):
        sbatch.find_sbatch({"PATH": str(tmp_path / "empty")})


def slurmdl(*argv: str, **options):
    return subprocess.run([sys.executable, "-m", "slurmdl", "sbatch", *argv], capture_output=True, timeout=60,
                          check=False, **options)


def test_recursive_sbatch_is_an_error(fake_slurm):
    """An sbatch script that calls slurmdl causes one message instead of an endless loop."""
    fake_slurm.command("sbatch", f'exec {sys.executable} -m slurmdl sbatch "$@"')
    proc = slurmdl("--dl-node-binding=off", "--wrap=true")
    assert proc.returncode == 69
    assert b"calls slurmdl, which calls it again" in proc.stderr


def test_arguments_streams_and_status_pass_through(fake_slurm):
    fake_slurm.command("sbatch",
                       'for i; do printf "<%s>" "$i"; done; cat; printf "\\000\\377"; echo e >&2; exit 7')
    script = b"#!/bin/sh\nslurmdl srun\n\xff\x00 end"
    proc = slurmdl("--dl-node-binding=off", "-J", "a  b", input=script)
    assert proc.returncode == 7
    assert proc.stdout == b"<-J><a  b>" + script + b"\x00\xff"
    assert proc.stderr == b"e\n"


def test_quiet_suppresses_messages(fake_slurm):
    fake_slurm.command("scontrol", "exit 1")
    fake_slurm.command("sbatch")
    assert slurmdl("-N2", "-Q", "--wrap=true").stderr == b""
    messages = slurmdl("-N2", "--wrap=true").stderr.decode().splitlines()
    assert [line.split(":")[1] for line in messages] == [
        " submitted as written", " the script has no `slurmdl srun`, so its ranks will not be mapped"]


RUN_PASSTHROUGH = """
import sys
from slurmdl.slurm import process
sys.exit(process.run_passthrough(["/bin/sh", "-c", {script!r}], {{"PATH": "/usr/bin:/bin"}}, b"in\\n",
                       lambda line: print("first", line, file=sys.stderr, flush=True)))
"""


def test_run_passthrough_copies_bytes_and_calls_back_at_once():
    script = 'read x; echo "got $x"; sleep 1; printf "more\\377"; exit 3'
    child = subprocess.Popen([sys.executable, "-c", RUN_PASSTHROUGH.format(script=script)], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE)
    assert child.stderr.readline() == b"first b'got in'\n"
    assert child.poll() is None
    out, _ = child.communicate(timeout=120)
    assert (out, child.returncode) == (b"got in\nmore\xff", 3)


@pytest.mark.parametrize(("script", "status"), [
    ("trap 'echo bye; exit 5' TERM; echo up; while :; do sleep 0.05; done", 5),
    ("echo up; exec sleep 30", -signal.SIGTERM),
])
def test_run_passthrough_forwards_signals(script, status):
    child = subprocess.Popen([sys.executable, "-c", RUN_PASSTHROUGH.format(script=script)], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE)
    child.stderr.readline()
    begin = time.monotonic()
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=120)
    assert child.returncode == status
    assert time.monotonic() - begin < 10
