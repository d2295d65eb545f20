"""`slurmdl srun` starts the user's step whatever fails, and leaves no files.

Scripts play Slurm's commands, so that each of them can fail; real steps run in tests/cluster.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from types import CodeType, FrameType

import pytest
from fake_slurm import FakeSlurm

import slurmdl
from slurmdl import config, dl_options, plan
from slurmdl.errors import InputError
from slurmdl.launch import srun, step_command, step_inputs, submission_record
from slurmdl.placement import rank_orders
from slurmdl.slurm import process

PACKAGE = os.path.dirname(slurmdl.__file__)
NODES = 4
#: a fault in each call takes half a minute: outside of nightly runs, in every fourth one
CALL_STRIDE = 1 if os.environ.get("SLURMDL_NIGHTLY") == "1" else 4
CONFIG = """SLURM_VERSION = 22.05.8
SelectTypeParameters = CR_CORE
MpiDefault = none
PluginDir = /nowhere
TopologyPlugin = topology/tree
"""
ARGS = ["-n", str(NODES), "program", "a  b", ""]
SHELL = step_command.UNMAPPED_TASK_SHELL
#: the step in srun's own order, and how its tasks start
PLAIN = [*ARGS[:2], *SHELL, *ARGS[2:], "plan none"]
NAMED_PLAIN = ["--job-name=program", *PLAIN]


class Job:
    """The environment inside a job on n1 to n4 in two zones; srun prints its arguments and its plan."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.slurm = folder, FakeSlurm(folder)
        self.slurm.command("srun", """printf '%s\\n' "$@"
echo "plan ${SLURMDL_PLAN:-none}"
[ -z "$PLAN_COPY" ] || cp "${SLURMDL_PLAN#file:}" "$PLAN_COPY"
[ -z "$SRUN_WAITS" ] || { echo up; exec sleep 60; }
exit 3""")
        self.slurm.answer("scontrol", CONFIG)
        self.slurm.job(71, "n1,n2,n3,n4", NODES)
        (folder / "slurm.conf").touch()
        (folder / "topology.conf").write_text("SwitchName=zoneA Nodes=n[1,3]\nSwitchName=zoneB Nodes=n[2,4]\n"
                                              "SwitchName=core Switches=zoneA,zoneB\n")
        self.configuration = folder / "config/slurmdl/slurmdl.yaml"
        self.configuration.parent.mkdir(parents=True)
        self.environ = {
            **self.slurm.environ, "HOME": str(folder), "SLURM_JOB_ID": "71", "SLURM_JOB_NODELIST": "n1,n2,n3,n4",
            "SLURM_NNODES": str(NODES), "SLURM_JOB_CPUS_PER_NODE": f"1(x{NODES})",
            "SLURM_TASKS_PER_NODE": f"1(x{NODES})", "SLURM_JOB_NAME": "job"}
        for name in os.environ:
            if name.startswith(("SLURM", "XDG_", "HOME", "PATH")):
                monkeypatch.delenv(name)
        for name, value in self.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(folder)

    plans: Path  # set by `large_job`

    def start(self, *args: str, **variables: str | None) -> subprocess.CompletedProcess[str]:
        """Run `slurmdl srun`; a variable that is None is not set."""
        environ = {name: value for name, value in {**self.environ, **variables}.items() if value is not None}
        return subprocess.run([sys.executable, "-m", "slurmdl", "srun", *args], capture_output=True, text=True,
                              env=environ, cwd=self.folder, timeout=60, check=False)


@pytest.fixture
def job(tmp_path, monkeypatch) -> Job:
    return Job(tmp_path, monkeypatch)


class Started(Exception):
    """Raised in place of the start of srun."""


BROKEN_CONFIGURATIONS = ("plan_dir: 2024-13-01\n", "[" * 20_000, "a: " * 3, "planned: 1\n", "\x00",
                         "options: {strategy: gossip, ps: 2}\n", "options: {ps: 99}\n", "link_scores: {file: 7}\n")
#: what fails: text of a file, answer of scontrol, variables; text of the reason
FAILURES = [
    *(({"config/slurmdl/slurmdl.yaml": text}, {}, "") for text in BROKEN_CONFIGURATIONS),
    ({}, {"SLURMDL_SUBMISSION": "{"}, "SLURMDL_SUBMISSION is malformed"),
    ({}, {"SLURM_JOB_CPUS_PER_NODE": "1(x3)"}, "SLURM_JOB_CPUS_PER_NODE=1(x3) does not fit the job's 4 nodes"),
    ({}, {"SLURM_CONSTRAINT": "gpu"}, "SLURM_CONSTRAINT: prevents rank mapping"),
    ({"scontrol.answer": CONFIG.replace("CR_CORE", "CR_CORE,CR_PACK_NODES")}, {}, "CR_Pack_Nodes"),
    ({"scontrol": "#!/bin/sh\nexit 1\n"}, {}, "scontrol: exit status 1"),
    ({"numpy.py": "raise MemoryError"}, {"PYTHONPATH": "."}, "internal error: MemoryError"),
    ({"numpy.py": "import os; os.kill(os.getpid(), 9)"}, {"PYTHONPATH": "."},
     "the choice of the rank map ended by signal 9"),
]


@pytest.mark.parametrize(("files", "variables", "reason"), FAILURES)
def test_whatever_fails_the_step_starts(job, files, variables, reason):
    """With --dl-strict nothing starts."""
    for name, text in files.items():
        (job.folder / name).write_text(text)
    proc = job.start(*ARGS, **variables)
    # without an answer of the controller the order of srun's ranks is not known
    assert proc.stdout.splitlines() == ([*ARGS, "plan none"] if "scontrol" in files else NAMED_PLAIN)
    assert proc.returncode == 3
    assert proc.stderr.startswith("slurmdl: ") and reason in proc.stderr
    assert proc.stderr.endswith("; the step runs in srun's own order\n") and proc.stderr.count("\n") == 1
    strict = job.start("--dl-strict", *ARGS, **variables)
    assert (strict.stdout, strict.stderr.count("\n")) == ("", 1)
    assert strict.returncode >= 64


def test_options_of_the_submission_apply_despite_a_broken_configuration(job):
    job.configuration.write_text("planned: 1\n")
    strict = submission_record.new_record(dl_options.DlOptions(strict=True), {}).to_env_value()
    proc = job.start(*ARGS, SLURMDL_SUBMISSION=strict)
    assert (proc.returncode, proc.stdout) == (65, "")


def test_mpi_type_is_chosen_for_an_unmapped_step(job):
    (job.folder / "mpirun").symlink_to(job.slurm.command("orterun"))
    (job.folder / "mpi_pmix.so").touch()
    job.slurm.answer("scontrol", CONFIG.replace("/nowhere", str(job.folder)))
    job.configuration.write_text("planned: 1\n")
    for args, started in (
            (ARGS, ["--mpi=pmix", *NAMED_PLAIN]), (["-Jmine", *ARGS], ["--mpi=pmix", "-Jmine", *PLAIN]),
            (["-O", "--mpi=none", "-Jmine", *ARGS], ["-O", "--mpi=none", "-Jmine", *PLAIN]),
            (["-n4", "-O", "slurmdl", "train"], ["--mpi=pmix", "--kill-on-bad-exit=1", "--job-name=slurmdl", "-n4",
                                                 "-O", *SHELL, "slurmdl", "train", "plan none"])):
        assert job.start(*args).stdout.splitlines() == started


@pytest.mark.parametrize(("command", "variables"), [
    *((command, {}) for command in (
        "--pty -n2 -N2 bash", "--bcast=/tmp/p -n2 -N2 p", "--multi-prog -N2 f", "--container=/image -n2 p",
        "--no-such-option=1 -n2 p", "-m arbitrary p", "-w ./nodes p", "--jobid=8 p", "--het-group=0 p",
        "-n2 p : -n2 p", "-N2 torchrun --nnodes=4 train.py", "-N2 bash -c torchrun\t--nnodes=4\tt.py")),
    *(("-N2 p", variables) for variables in (
        {"SLURM_HOSTFILE": "f"}, {"SLURM_DISTRIBUTION": "arbitrary"}, {"SLURM_HET_SIZE": "2"},
        {"SLURMDL_OPT_LAUNCHER": "auto:2"}, {"SLURM_JOB_ID": None}, {"VERSION": "26.05.0"}))])
def test_step_that_srun_alone_can_start_stays_as_written(job, command, variables):
    """The tasks are not ranks, rank 0 may be on another node than the first, or a shell may not be at hand."""
    job.slurm.answer("scontrol", CONFIG.replace("22.05.8", variables.get("VERSION", "22.05.8")))
    args = command.split(" ")
    assert job.start(*args, **variables).stdout.splitlines() == [*args, "plan none"]


def test_step_without_a_map_starts_if_the_environment_is_too_long_with_it(job, monkeypatch):
    """The kernel rejects variables of more than 128 KiB."""
    monkeypatch.setattr(step_command, "task_variables", lambda *_: {"SLURMDL_ZONE_RANKS": "x" * 2**18})
    exec_program = process.exec_program

    def record(argv: list[str], environ: dict[str, str]) -> None:
        if "--distribution=arbitrary" in argv:
            exec_program(argv, environ)
        raise Started(argv, environ)

    monkeypatch.setattr(process, "exec_program", record)
    with pytest.raises(Started) as started:
        srun.run_srun(ARGS, dict(os.environ))
    assert started.value.args[0] == [str(job.folder / "srun"), *ARGS]


# --- plans that exceed the size limit of a variable ---

@pytest.fixture
def large_job(tmp_path, monkeypatch) -> Job:
    """A job of many nodes in random zones; all users may write to its directory of plans."""
    job, nodes = Job(tmp_path, monkeypatch), 16_000
    rng = random.Random(1)
    zones: dict[int, list[str]] = {}
    for i in range(1, nodes + 1):
        zones.setdefault(rng.randrange(64), []).append(f"n{i}")
    leaves = [f"SwitchName=z{zone} Nodes={','.join(names)}\n" for zone, names in zones.items()]
    (tmp_path / "topology.conf").write_text("".join([*leaves, "SwitchName=core Switches=z[0-63]\n"]))
    job.environ |= {"SLURM_JOB_NODELIST": f"n[1-{nodes}]", "SLURM_NNODES": str(nodes),
                    "SLURM_JOB_CPUS_PER_NODE": f"1(x{nodes})", "SLURM_TASKS_PER_NODE": f"1(x{nodes})"}
    job.plans = tmp_path / "plans"
    job.plans.mkdir()
    job.plans.chmod(0o1777)
    job.configuration.write_text(f"plan_dir: {job.plans}\n")
    return job


def test_plan_file_is_removed_with_the_step(large_job):
    copy = large_job.folder / "copy"
    proc = large_job.start("program", PLAN_COPY=str(copy))
    assert (proc.returncode, proc.stderr) == (3, "")
    path = Path(proc.stdout.splitlines()[-1].removeprefix("plan file:"))
    assert path.parent == large_job.plans and not list(large_job.plans.iterdir())
    assert len(plan.decode_plan(f"file:{copy}")) == 16_000
    dry_run = large_job.start("--dl-dry-run", "program")
    assert "export SLURMDL_PLAN=file:PLAN\n" in dry_run.stdout and not list(large_job.plans.iterdir())


def test_link_at_the_path_of_a_plan_file_is_not_followed(tmp_path, monkeypatch):
    """Another user with write access to the directory may guess the name."""
    monkeypatch.setattr(os, "urandom", bytes)
    (tmp_path / "precious").write_text("mine")
    (tmp_path / f"plan-{bytes(8).hex()}").symlink_to("precious")
    with pytest.raises(FileExistsError):
        plan.write_plan_file("text", str(tmp_path))
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_plan_file_is_removed_when_a_signal_ends_the_step(large_job, number):
    child = subprocess.Popen([sys.executable, "-m", "slurmdl", "srun", "program"], stdout=subprocess.PIPE, text=True,
                             env={**large_job.environ, "SRUN_WAITS": "1"})
    args = list(iter(child.stdout.readline, "up\n"))
    path, = large_job.plans.iterdir()
    assert f"plan file:{path}\n" in args
    status = path.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o600, os.geteuid())
    child.send_signal(number)
    child.communicate(timeout=120)
    assert child.returncode == -number
    assert not list(large_job.plans.iterdir())


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other users")


@needs_root
def test_plan_dir_that_is_a_link_of_another_user_is_rejected(large_job):
    link = large_job.folder / "link"
    link.symlink_to(large_job.plans)
    os.lchown(link, 12345, 12345)
    large_job.configuration.write_text(f"plan_dir: {link}\n")
    proc = large_job.start("program")
    assert proc.stdout.splitlines()[-1] == "plan none"
    assert proc.stderr.startswith(f"slurmdl: {link}: the plan cannot be written (a symbolic link of another user)")
    assert proc.stderr.endswith("; the step runs in srun's own order\n")


@pytest.mark.parametrize("make", [
    os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir, lambda path: None,
    pytest.param(lambda path: path.write_text("text") and os.chown(path, 12345, 12345), marks=needs_root)])
def test_plan_that_is_not_a_regular_file_of_this_user_is_rejected(tmp_path, make):
    make(tmp_path / "plan")
    with pytest.raises(InputError, match=r"cannot read the plan|the plan is not a regular file of this user"):
        plan.decode_plan(f"file:{tmp_path}/plan")


# --- the port of rank 0 ---

@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET, "127.0.0.1"),
                                                 (socket.AF_INET6, "::1")])
def test_port_in_use_is_not_picked(monkeypatch, family, address):
    with socket.socket(family) as server:
        used_port = step_inputs.pick_free_port()
        server.bind((address, used_port))
        server.listen()
        drawn = [used_port - 10_000, used_port - 10_000, 21_999]
        monkeypatch.setattr(os, "urandom", lambda count: drawn.pop(0).to_bytes(count, "little"))
        assert step_inputs.pick_free_port() == 31_999


def test_ports_are_random():
    ports = {int(step_inputs.pick_free_port()) for _ in range(50)}
    assert len(ports) > 40
    assert all(10_000 <= port < 32_768 for port in ports)


# --- a failure at every call ---

FAULTS = (ValueError("fault"), RecursionError("fault"), MemoryError("fault"), KeyError("fault"))
Site = tuple[CodeType, int, CodeType]


class Calls:
    """Calls within the package, from reading the submission record to the start of the step."""

    def __init__(self, fault: Exception | None = None, site: Site | None = None) -> None:
        self.sites: dict[Site, None] = {}
        self.fault, self.site, self.inside = fault, site, False

    def trace(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        if frame.f_code is submission_record.read_record.__code__:
            self.inside = True
        elif frame.f_code is srun._finish.__code__:
            self.inside = False
        if not self.inside or frame.f_back is None:
            return
        site = frame.f_back.f_code, frame.f_back.f_lineno, frame.f_code
        self.sites[site] = None
        if self.fault and site == self.site:
            fault, self.fault = self.fault, None
            raise fault


def run(calls: Calls, args: list[str]) -> Exception | int:
    """The exception with which `srun.run_srun` ends, or the exit status that it returns."""
    sys.settrace(calls.trace)
    try:
        return srun.run_srun(args, dict(os.environ))
    except Exception as error:
        return error
    finally:
        sys.settrace(None)


LATE = submission_record.SubmissionRecord(dl_options.DlOptions(), "", 1, os.uname().nodename.partition(".")[0], {},
                                          submission_record.RequestedSize(NODES - 1))
JOBS = {"mapped": {}, "shrunk": {"SLURMDL_SUBMISSION": LATE.to_env_value(), "SLURM_NTASKS": "3"}}


@pytest.mark.parametrize("variables", [
    JOBS["mapped"], pytest.param(JOBS["shrunk"], marks=pytest.mark.nightly)], ids=JOBS)
@pytest.mark.usefixtures("one_process")
def test_fault_in_any_call_starts_the_step_without_a_map(job, capfd, monkeypatch, variables):
    """With --dl-strict the fault is an error."""
    def raise_started(argv: list[str], environ: dict[str, str]) -> None:
        raise Started(argv, environ)

    monkeypatch.setattr(process, "exec_program", raise_started)
    job.configuration.write_text("options: {strategy: gossip, explain: true}\nlink_scores: {max_age: 60}\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    args = ARGS[2:] if variables else ARGS
    srun_path = str(job.folder / "srun")
    words = args.index("program")
    plain = ([srun_path, *args], [srun_path, "--job-name=program", *args[:words], *SHELL, *args[words:]])
    run(Calls(), args)  # imports modules
    calls = Calls()
    result = run(calls, args)
    assert isinstance(result, Started), result
    assert "--distribution=arbitrary" in result.args[0]
    assert len(calls.sites) > 100
    expected = (submission_record.read_record, config.load_config, rank_orders.best_rank_map,
                step_command.srun_command)
    assert {function.__code__ for function in expected} <= {code for _, _, code in calls.sites}
    capfd.readouterr()
    stderr_file = sys.stderr
    for fault, site in zip(itertools.cycle(FAULTS), list(calls.sites)[::CALL_STRIDE], strict=False):
        function = site[2].co_qualname if sys.version_info >= (3, 11) else site[2].co_name
        location = f"{function}, called in line {site[1]}"
        faulty_calls = Calls(fault, site)
        result = run(faulty_calls, args)
        sys.stderr = stderr_file  # a ValueError while a warning is printed has replaced it
        assert faulty_calls.fault is None, f"{location}: not reached again"
        assert isinstance(result, Started), f"{location}: {result!r}"
        stderr = capfd.readouterr().err
        if result.args[0] not in plain:
            assert "--distribution=arbitrary" in result.args[0], location
            continue
        assert "SLURMDL_PLAN" not in result.args[1]
        assert "; the step runs in srun's own order" in stderr or site[2].co_name == "warn", location
        strict_calls = Calls(fault, site)
        strict = run(strict_calls, ["--dl-strict", *args])
        assert not isinstance(strict, Started) or strict_calls.fault, location
        capfd.readouterr()
