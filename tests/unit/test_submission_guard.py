"""No fault between the user's arguments and sbatch prevents the submission of a job."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm

from slurmdl import config
from slurmdl.cli.main import main
from slurmdl.health import exclusions
from slurmdl.launch import sbatch, submission_record
from slurmdl.slurm import process

PACKAGE = str(Path(sbatch.__file__).parents[1])
SCRIPT = "#!/bin/sh\n#SBATCH -N 2\n#DL --dl-strategy=gossip\nslurmdl srun true\n"
CONFIG = Path("config/slurmdl/slurmdl.yaml")
#: a fault in each call takes half a minute: outside of nightly runs, in every fourth one
CALL_STRIDE = 1 if os.environ.get("SLURMDL_NIGHTLY") == "1" else 4


class SubmitCalled(BaseException):
    """Raised instead of the start of sbatch, which would replace this process."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], stdin: bytes | None) -> None:
        super().__init__(argv)
        self.argv, self.env, self.stdin = list(argv), dict(env), stdin


class Fault(Exception):
    """An injected fault."""


@pytest.fixture
def site(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, one_process: None) -> FakeSlurm:
    """A cluster of two zones, a job script, and a configuration file of the user."""
    fake_slurm.cluster()
    fake_slurm.command("sbatch")
    fake_slurm.answer("squeue", "PENDING|Resources\n")
    Path("job.sh").write_text(SCRIPT)
    CONFIG.parent.mkdir(parents=True)
    CONFIG.write_text("options: {rank0: any}\nlink_defaults: {node_bandwidth: 1e9}\n")

    def start(argv: Sequence[str], env: Mapping[str, str], stdin: bytes | None = None, *_: object,
              **__: object) -> None:
        raise SubmitCalled(argv, env, stdin)

    monkeypatch.setattr(process, "exec_program", start)
    monkeypatch.setattr(process, "run_passthrough", start)
    return fake_slurm


def submit(*words: str) -> SubmitCalled:
    with pytest.raises(SubmitCalled) as call:
        main(["sbatch", *words])
    return call.value


@contextlib.contextmanager
def fault_at(number: int, calls: list[str]) -> Iterator[None]:
    """Raise a Fault in the `number`-th call of a slurmdl function from a new call site.

    `calls` collects the called functions. Tracing begins after the arguments are split, which every submission needs,
    and ends when sbatch is about to start.
    """
    is_finished = False
    known_sites: set[tuple[object, object, int]] = set()

    def trace(frame, event, argument):
        nonlocal is_finished
        code, caller = frame.f_code, frame.f_back
        is_finished = is_finished or code is sbatch.SubmissionAttempt.submit.__code__
        if is_finished or event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        if not calls and code is not sbatch.SubmissionAttempt.read_submission.__code__:
            return
        call_site = (code, caller.f_code, caller.f_lineno)
        if call_site not in known_sites:
            known_sites.add(call_site)
            calls.append(f"{code.co_filename}:{code.co_name}")
            if len(calls) == number:
                raise Fault(f"in {calls[-1]}")
        return

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a generator that is closed
def test_fault_in_any_call_submits_the_unchanged_arguments(site, capsys, monkeypatch):
    monkeypatch.setattr("time.time_ns", lambda: 0)  # determines the zone, and thereby the calls
    words = ["-J", "a  b", "--dl-explain", "--dl-rank0=first", "job.sh", "--dl-x", "1"]
    expected_argv = [f"{site.directory}/sbatch", "-J", "a  b", "job.sh", "--dl-x", "1"]
    submit(*words)  # imports the modules
    calls: list[str] = []
    with fault_at(0, calls):
        bound = submit(*words).argv
    assert [word[:8] for word in bound if word not in expected_argv] == ["--prefer"]
    assert len(calls) > 300, "from the script to the explanation"
    capsys.readouterr()
    for number in range(1, len(calls) + 1, CALL_STRIDE):
        reached: list[str] = []
        with fault_at(number, reached):
            call = submit(*words)
        stderr = capsys.readouterr().err
        assert len(reached) >= number, "fault not raised"
        no_scores = "slurmdl: scores: " in stderr
        if not no_scores and (f"Fault: in {reached[number - 1]}" in stderr or "the choice of nodes ended" in stderr):
            assert call.argv == expected_argv, reached[number - 1]
        else:  # a fault while scores are loaded costs only the scores
            assert call.argv == bound, (reached[number - 1], stderr)
        assert "Traceback" not in stderr


#: content of slurmdl.yaml -> part of the message
BROKEN = {
    "plan_dir: 2024-13-01": ":1: is not YAML ('2024-13-01': month must be in 1..12)", "[" * 5000: "nested too deeply",
    "link_defaults: {node_bandwidth: !!int ''}": ":1: is not YAML", "a: !!bool perhaps": ":1: is not YAML",
    "link_defaults: {node_bandwidth: " + "9" * 5000 + "}": ":1: is not YAML",
    "options: {zone: nowhere}": "no such zone",
    "options: {strategy: gossip, ps: 2}": "has no parameter servers", "options: {ps: [[1]]}": "expected N",
    "link_scores: {file: \"/a\\0b\"}": "expected an absolute path", "plan_dir: [a]": "plan_dir: invalid value ['a']",
    "x" * 100_000: "is too large", "\0": "is not YAML", "a: &a [*a]": "unknown key a",
    "plan_dir: /a\nlink_defaults: [x]": "link_defaults: expected a mapping",
    "link_defaults: {node_bandwidth: 0x" + "f" * 9000 + "}": "expected a number",
    "&a0 [x]\n": "expected a mapping"}
#: 9 to the power of 30 values, by aliases
BROKEN["\n".join(["plan_dir:", "- &a0 [x]", *(f"- &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]" for i in range(30))])] = \
    "expected an absolute path"


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_broken_configuration_file_does_not_prevent_submission(text, site, capsys):
    CONFIG.write_text(text)
    call = submit("-J", "x", "--dl-ps=1", "job.sh")
    assert call.argv == [f"{site.directory}/sbatch", "-J", "x", "job.sh"]
    record = submission_record.parse_record(call.env[submission_record.ENV_VARIABLE])
    assert (record.options.strategy, record.options.ps) == ("ps", 1), "the job receives the user's options"
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1 and len(stderr) < 1000
    assert stderr.startswith("slurmdl: submitted as written: ")
    assert BROKEN[text] in stderr and "slurmdl.yaml" in stderr
    assert main(["sbatch", "--dl-strict", "job.sh"]) in (65, 75)
    assert BROKEN[text] in capsys.readouterr().err


def test_configuration_that_is_no_regular_file_is_ignored(site, capsys):
    CONFIG.unlink()
    os.mkfifo(CONFIG)
    assert submit("job.sh").argv == [f"{site.directory}/sbatch", "job.sh"]
    assert f"{site.directory / CONFIG}: is not a regular file" in capsys.readouterr().err


def test_unknown_zone_of_the_user_is_a_usage_error(site, capsys):
    assert main(["sbatch", "--dl-zone=nowhere", "job.sh"]) == 64
    assert "--dl-zone=nowhere: no such zone; expected one of z1, z2, top" in capsys.readouterr().err


def test_later_configuration_overrides_conflicting_options(site):
    Path("first").write_text("options: {ps: 2}\n")
    Path("second").write_text("options: {strategy: gossip}\n")
    assert config.load_config(["first", "second"]).options == {"strategy": "gossip"}


@pytest.mark.parametrize(("name", "value", "words"), [
    (submission_record.ENV_VARIABLE, "[" * 100_000, []),
    (submission_record.ENV_VARIABLE, '{"version":3,"pid":Infinity,"options":{},"submitter_job":"","host":""}', []),
    ("SBATCH_REQUEUE", "+-5", []), ("SBATCH_SPREAD_JOB", "\u00b2", []), ("A", "", [f"-N{'9' * 9000}"])],
    ids=["nested", "infinite", "flag", "digit", "count"])
def test_malformed_input_of_sbatch_does_not_prevent_submission(name, value, words, site, monkeypatch):
    monkeypatch.setenv(name, value)
    argv = submit("--dl-rank0=first", *words, "job.sh").argv[1:]
    assert [word for word in argv if not word.startswith("--prefer")] == [*words, "job.sh"]
    assert argv[0].startswith("--prefer") != bool(words)


def run(site: FakeSlurm, *words: str, shell: str = 'exec "$@"',
        output: str = "") -> subprocess.CompletedProcess[str]:
    """Run the whole command with an sbatch that writes its arguments and the record into files."""
    site.command("sbatch", f"""printf "<%s>" "$@" >args; printf "%s" "$SLURMDL_SUBMISSION" >record
printf '{output}'""")
    argv = ["sh", "-c", shell, "sh", sys.executable, "-m", "slurmdl", "sbatch", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(("lines", "added", "stderr", "strategy"), [
    ("#DL --dl-zone=" + ",".join(["z1"] * 100_000), "<--exclude=n[4-6]>", "", "gossip"),
    (f"#DL --dl-comm-pattern=/{'x' * 320_000}", "", "File name too long", None),
    (f"#DL --dl-link-scores=/{'x' * 320_000}", "", "Argument list too long", None),
    ("#DL --dl-ps=1 --dl-strategy=ps\n" * 1_400_000, "", "beyond 1048576 bytes", "allreduce"),
    (f"#SBATCH --comment={'x' * 2_000_000}", "", "beyond 1048576 bytes", "allreduce"),
], ids=["zones", "traffic", "scores", "lines", "line"])
def test_directives_of_any_length_are_submitted(lines, added, stderr, strategy, site):
    CONFIG.unlink()
    Path("job.sh").write_text(SCRIPT.replace("slurmdl srun", f"{lines}\nslurmdl srun"))
    proc = run(site, "-J", "x", "job.sh")
    assert (proc.returncode, proc.stdout) == (0, "")
    words = Path("args").read_text()
    assert words == f"{added}<-J><x><job.sh>"
    assert stderr in proc.stderr and bool(proc.stderr) == bool(stderr) and len(proc.stderr) < 10_000
    text = Path("record").read_text()
    assert (submission_record.parse_record(text).options.strategy if text else None) == strategy


@pytest.mark.parametrize("shell", ['"$@" <&-', '"$@" >&-', '"$@" 2>&-', '"$@" 2>/dev/full', '"$@" <&- >&- 2>&-'])
@pytest.mark.parametrize("words", [["-n9", "--wrap=true"], ["--dl-rank0=any", "--dl-explain", "-N2", "--wrap=true"]])
def test_closed_or_full_streams_do_not_prevent_submission(shell, words, site):
    proc = run(site, *words, shell=shell)
    assert (proc.returncode, proc.stdout) == (0, "")
    assert "<--wrap=true>" in Path("args").read_text()
    assert ("--prefer=z" in Path("args").read_text()) == ("-N2" in words)


@pytest.mark.parametrize("words", [["-N9"], ["--dl-rank0=first", "-N2"]], ids=["exec", "child"])
def test_sbatch_ignores_sigpipe(words, site):
    """So it survives that munged closes a connection, which it does under load."""
    proc = run(site, *words, "--wrap=true", shell='exec env --default-signal=PIPE "$@"',
               output="'; grep SigIgn /proc/self/status; printf '")
    assert proc.returncode == 0
    assert int(proc.stdout.split()[1], 16) & 1 << signal.SIGPIPE - 1
    assert ("--prefer" in Path("args").read_text()) == ("-N2" in words)


def test_unreadable_script_is_left_to_sbatch(site):
    proc = run(site, "-N2", shell='"$@" <&-')
    assert (proc.returncode, Path("args").read_text()) == (0, "<-N2>")
    assert "Slurm chooses the nodes: the script standard input cannot be read" in proc.stderr


@pytest.mark.parametrize(("output", "options"), [
    ("Quota: 3 jobs pending\\nSubmitted batch job 71\\nJob 4 is next\\n", []),
    ("3\\nSubmitted batch job 71 on cluster one\\n5\\n", []),
    ("Quota: 3 jobs pending\\nsubmitted 4 of 5\\n71\\nQuota: 6\\n", ["--parsable"]),
    ("Quota: 3 jobs pending; 4\\n71;one\\n", ["--parsable"]),
    ("Submitted batch job 3 of 9\\n not Submitted batch job 4\\n%05000d\\nSubmitted batch job 71\\n", []),
])
def test_only_the_submitted_job_is_updated(output, options, site):
    proc = run(site, "--dl-rank0=first", "-N2", *options, "--wrap=slurmdl srun true", output=output)
    assert proc.returncode == 0
    assert proc.stdout == output.replace("\\n", "\n") % (0 if "%" in output else ())
    query, update = site.calls("squeue", "scontrol")[1:]
    assert query.startswith("squeue ") and " --jobs=71 " in query and update == "scontrol update JobId=71 Prefer="


@pytest.mark.parametrize("output", ["Quota: 3 jobs pending\\n", "3\\n", "Submitted batch job 3 jobs\\n", "3"])
def test_without_a_job_id_no_job_is_updated(output, site):
    assert run(site, "--dl-rank0=first", "-N2", "--wrap=true", output=output).stdout == output.replace("\\n", "\n")
    assert site.calls("squeue", "scontrol") == ["scontrol -o -d"]


def test_option_after_the_script_is_passed_to_it_with_a_warning(site, capsys):
    CONFIG.unlink()
    words = ["--dl-node-binding=off", "job.sh", "--dl-explain", "--dl-ps=1", "-N9"]
    assert submit(*words).argv[1:] == words[1:]
    message = capsys.readouterr().err
    assert re.match("slurmdl: --dl-explain .*script job.sh", message) and message.count("\n") == 1
    assert submit("-Q", *words).argv[1:] == ["-Q", *words[1:]]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("words", "count"), [
    (["-N1"], 0), (["-n1", "--dl-link-scores=none"], 0), (["-N2", "--dl-node-binding=off"], 0),
    (["-N2", "--array=1-3"], 0), (["-N2", "--begin=now+1hour"], 0), (["-n4"], 0), (["-N2", "-w", "n1,n2"], 0),
    # the user wants to see the state, requires nodes, or has options that only placement checks
    (["-N1", "--dl-explain"], 1), (["-N1", "--dl-strict"], 1), (["-N1", "--dl-node-binding=nodelist"], 1),
    (["-N1", "--dl-mesh=dp=1"], 1), (["-N1", "--dl-zone=z1"], 1), (["-N2"], 1),
])
def test_cluster_is_queried_only_if_its_state_can_decide(site, words, count):
    submit(*words, "--wrap=true")
    assert len(site.calls("scontrol")) == count


def test_waiting_jobs_share_an_answer_as_long_as_slurm_confirms_that_they_wait(site, capsys):
    site.cluster(busy="123456")
    site.predict("n[1-2]", 3600)
    for expected in (1, 0, 0):
        submit("-N2", "--wrap=true")
        assert len(site.calls("scontrol")) == expected
        assert "would fit, but not now" in capsys.readouterr().err
    submit("-N2", "--dl-explain", "--wrap=true")
    assert re.search(r"^note +the nodes were read \d s ago \(nodes_max_age of slurmdl.yaml\)$",
                     capsys.readouterr().err, re.MULTILINE)
    site.cluster()
    site.predict("n[1-2]", 0)
    submit("-N2", "--wrap=true")
    assert len(site.calls("scontrol")) == 1, "Slurm would start it now"
    assert "not now" not in capsys.readouterr().err
    submit("-N2", "--wrap=true")
    assert len(site.calls("scontrol")) == 1, "the job before took nodes"


def test_nodes_that_an_old_answer_calls_free_are_bound_only_if_slurm_confirms_it(site, capsys):
    site.cluster(busy="123")
    site.predict("n[1-4]", 3600)
    submit("-N4", "--wrap=true")
    assert "not now" in capsys.readouterr().err and len(site.calls("scontrol")) == 1
    site.predict("n[4-5]", 3600)  # n4 to n6 are not free any more
    site.cluster(busy="123456")
    assert not [word for word in submit("-N2", "--wrap=true").argv if word.startswith("--prefer")]
    assert "not now" in capsys.readouterr().err and len(site.calls("scontrol")) == 1


@pytest.mark.parametrize("words", [["--dl-node-binding=zone"], ["--dl-node-binding=nodelist"]])
def test_requested_bindings_use_the_present_state(site, words):
    site.cluster(busy="123456")
    site.predict("n[1-2]", 3600)
    for options in ([], words):
        submit("-N2", *options, "--wrap=true")
        assert len(site.calls("scontrol")) == 1


def test_bad_nodes_are_left_out_by_one_query_and_then_by_its_answer(site):
    Path("slurm.conf").write_text("ClusterName=c\n")
    exclusions.add_exclusions(config.exclusions_file(os.environ), [
        exclusions.Exclusion("n3", "slow", time.time(), time.time() + 60, "c"),
        exclusions.Exclusion("n2", "slow", time.time(), time.time() + 60, "other")], time.time())
    site.predict("n1", 0)
    for count, words in ((1, ["-N1"]), (0, ["-N2", "--dl-node-binding=off"]), (0, ["-N1"])):
        assert "--exclude=n3" in submit(*words, "--wrap=true").argv
        assert len(site.calls("scontrol")) == count


@pytest.mark.parametrize(("settings", "reason"), [
    ("features: [z2]", "n4 (has the node feature z2)"),  # at most a tenth of the nodes, and one
    ("comment: bad", "n5 (its comment in Slurm is 'a bad fan')")])
def test_nodes_that_slurm_calls_bad_are_left_out_by_the_same_query(site, capsys, settings, reason):
    CONFIG.write_text(f"bad_nodes: {{{settings}}}\n")
    answer = Path("scontrol.answer")
    answer.write_text(re.sub("(?m)^(NodeName=n5 .*)$", r"\1 Comment=a bad fan", answer.read_text()))
    site.predict("n[1-2]", 0)
    assert any(word.startswith("--exclude=n") for word in submit("-N2", "--wrap=true").argv)
    assert f"slurmdl: left out: {reason}\n" in capsys.readouterr().err
    assert site.calls("scontrol") == ["scontrol -o -d"]


def test_debug_log_says_what_the_decision_is_based_on(site, capsys, monkeypatch):
    monkeypatch.setenv("SLURMDL_DEBUG", "1")
    site.predict("n[1-2]", 3600)
    submit("-N2", "--dl-node-binding=nodelist", "-J", "x", "job.sh")
    site.predict("n[1-2]", 0)
    submit("-N2", "job.sh")
    lines = [re.sub(r"\d+ (ms|bytes)", r"N \1", line.removeprefix("slurmdl: debug: "))
             for line in capsys.readouterr().err.splitlines() if "kept" not in line]
    inputs = [f"configuration: {site.directory / CONFIG}",
              "query: scontrol -o -d (show nodes, show partitions, show reservations, show config): N ms, N bytes, "
              "status 0",
              "link scores: 0 links", f"cluster without a name: 6 nodes; {site.directory}/topology.conf: 3 zones"]
    assert lines[:4] == inputs and lines[5:9] == inputs
    assert lines[4].startswith("decision: --nodelist=n[")
    assert lines[9].startswith(f"query: {site.directory}/sbatch --test-only -N2 job.sh: N ms, N bytes, status 0, "
                               "sbatch: Job 1")
    assert re.fullmatch(r"prediction with no binding: n\[1-2\] in -?\d s", lines[10])
    assert lines[11].startswith("decision: no binding is needed: Slurm itself would choose n[1-2]")
