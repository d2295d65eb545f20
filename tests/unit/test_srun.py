"""Commands of steps, the task shell, and the inputs of a step. Real steps run in tests/cluster/test_steps.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm
from hypothesis import given
from hypothesis import strategies as st

from slurmdl import plan
from slurmdl.errors import InputError, PlacementError, UnavailableError, UsageError
from slurmdl.launch import srun, step_command, step_inputs
from slurmdl.launch.step_command import TASK_SHELL, UNMAPPED_TASK_SHELL, StepCommand
from slurmdl.plan import Plan
from slurmdl.slurm import hostlist, slurm_conf
from slurmdl.slurm.slurm_conf import SlurmConfig

PLAN = Plan("ps", ("n2", "n1", "n1", "n3", "n2", "n4"), ("ps", "worker", "worker", "worker", "ps", "worker"),
            {"n1": ("core", "zoneA"), "n3": ("core", "zoneA"), "n2": ("core", "zoneB"), "n4": ("core", "zoneB")})
VARIABLES = step_command.task_variables(PLAN, 12345)
SHELLS = [shell for shell in (("/bin/sh",), ("/bin/dash",), ("/bin/bash", "--posix")) if Path(shell[0]).exists()]


def mapped(*argv: str, environ: dict[str, str] | None = None, added: tuple[str, ...] = (),
           with_ulfm: bool = False) -> StepCommand:
    """The command of a step with PLAN, and the options `added` to srun."""
    args, environ = step_command.parse_srun_argv(argv), environ or {}
    task = step_inputs.build_task_command(args.line, args.step_starter, environ)
    if args.step_starter == "mpirun":
        return step_command.mpirun_command(args, PLAN, task, VARIABLES, environ, with_ulfm)
    return step_command.srun_command(args, PLAN, task, VARIABLES, environ, added)


# --- the command of a step ---

@pytest.mark.parametrize(("name", "argv"), [
    ("options", ["-lun", "6", "--dl-ps=2", "-N4", "--ntasks-per-node=2", "-c", "2", "-w", "n[1-4]", "--mem", "1G",
                 "--mpi=pmix", "program", "a  b", "-n", ""]),
    ("multi_prog", ["-n6", "--multi-prog", "programs", "more"]),
    ("mpirun", ["-n", "6", "--step-starter=mpirun", "program", "argument"])])
def test_command_of_a_mapped_step(golden, tmp_path, monkeypatch, name, argv):
    """Arguments (one per line), files and variable names; other tests run the values."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "programs").write_text(
        "# a comment\n0,2-3 first %t 'quoted  text'\n  4 second \\\n  * of the line before\n\n* third\n")
    added = ("--mpi=pmix",) if name == "multi_prog" else ()
    command = mapped(*argv, environ={"SLURM_JOB_NAME": "mine"}, added=added)
    golden(f"srun/{name}.txt", "\n".join([
        *command.argv_with_files(lambda file: file.name), "--- variables", *sorted(command.environ_set),
        *(f"--- {file.name}\n{file.text}" for file in command.inline_files())]))


def test_mpirun_with_ulfm_has_an_option_for_it_and_a_message_of_failure():
    argv = ("-n6", "--step-starter=mpirun", "program")
    plain, with_ulfm = mapped(*argv), mapped(*argv, with_ulfm=True)
    index = with_ulfm.argv.index("--with-ft")
    assert with_ulfm.argv[index + 1] == "ulfm" and plain.argv == with_ulfm.argv[:index] + with_ulfm.argv[index + 2:]
    assert (plain.failure_message, with_ulfm.failure_message) == ("", "has lost communication with a remote daemon")


@pytest.mark.parametrize(("argv", "message"), [
    (["--step-starter=mpirun", "--label", "p"], "--label: mpirun has no such option; .* --cpus-per-task, --distribu"),
    (["--multi-prog", "no-such-file"], "--multi-prog: no-such-file: No such file or directory")])
def test_step_that_cannot_be_mapped(argv, message):
    with pytest.raises(PlacementError, match=message):
        mapped(*argv)


@pytest.mark.parametrize(("argv", "environ", "words"), [
    (["/bin/program"], {}, ("srun", "--job-name=program", "--ntasks=6")),
    (["-J", "mine", "p"], {}, ("srun", "-J", "mine", "--ntasks=6")),
    (["local"], {"PATH": "/nowhere"}, (*TASK_SHELL, "{}/local")), (["sh"], {"PATH": "/bin"}, (*TASK_SHELL, "sh")),
    (["--chdir=other", "local"], {"PATH": "/nowhere"}, (*TASK_SHELL, "local")),
    (["p"], {"PLAIN_1": ""}, (*TASK_SHELL, "p")),
    (["p"], {"BASH_FUNC_f%%": "() { :; }"}, ("/bin/bash", "--posix", *TASK_SHELL[1:], "p"))])
def test_name_shell_and_program_of_a_step(tmp_path, monkeypatch, argv, environ, words):
    """A program in the working directory is found, as by srun; bash keeps variables that are not identifiers."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local").touch()
    started, words = mapped(*argv, environ=environ).argv, tuple(word.format(tmp_path) for word in words)
    assert words in (started[:len(words)], started[-len(words):])


def test_long_plan_is_written_to_a_file(tmp_path):
    nodes = tuple(f"{os.urandom(6).hex()}" for _ in range(12_000))
    large = Plan("gossip", nodes, ("worker",) * len(nodes), dict.fromkeys(nodes, ("leaf",)))
    long = StepCommand(("srun",), step_command.task_variables(large, 12345))
    assert long.environ_set["SLURMDL_ZONE_RANKS"] == "leaf:0-11999;"
    command = srun.with_plan_file(long, str(tmp_path / "plans"))
    assert command.environ_set["SLURMDL_PLAN"] == f"file:{command.plan_file}"
    assert plan.plan_from_environ(command.environ_set) == large
    assert srun.with_plan_file(command, "/nowhere") == command
    (tmp_path / "file").touch()
    with pytest.raises(PlacementError, match="plan_dir"):
        srun.with_plan_file(long, str(tmp_path / "file"))


@given(st.sets(st.integers(0, 60)))
def test_fold_ranks_can_be_expanded(ranks):
    text = step_command.fold_ranks(sorted(ranks))
    back = [i for part in text.split(",") if part
            for i in range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1)]
    assert back == sorted(ranks)
    assert text.count(",") + 1 <= max(1, len(ranks))


# --- the task shell ---

def run_task(shell, argv: list[str], rank: int, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Run the task shell as srun would for one rank of PLAN."""
    command = mapped("-n6", *argv, environ={"SLURM_JOB_NAME": "mine"})
    task_environ = {
        "PATH": os.environ["PATH"], "SLURM_PROCID": str(rank), "SLURM_STEP_ID": "3", "SLURM_JOB_NAME": "sh",
        "SLURM_NODEID": str(sorted(set(PLAN.nodes)).index(PLAN.nodes[rank])),
        "SLURM_LOCALID": str(PLAN.nodes[:rank].count(PLAN.nodes[rank])),
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1(x2)", "SLURM_DISTRIBUTION": "arbitrary"}
    return subprocess.run([*shell, *TASK_SHELL[1:], *argv], capture_output=True, text=True, check=False, timeout=120,
                          env={**task_environ, **command.environ_set, **(environ or {})})


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("rank", range(len(PLAN)))
def test_task_shell_sets_the_variables_of_each_task(shell, rank):
    proc = run_task(shell, ["env", "-0"], rank, {"at": "mine"})
    variables = dict(pair.split("=", 1) for pair in proc.stdout.split("\0") if pair)
    node, role = PLAN.nodes[rank], PLAN.roles[rank]
    assert variables.items() >= {
        "SLURMDL_ROLE": role, "SLURMDL_ROLE_RANK": str(PLAN.roles[:rank].count(role)), "at": "mine",
        "SLURMDL_ZONE": PLAN.leaf_zone(rank), "RANK": str(rank), "WORLD_SIZE": "6", "SLURM_JOB_NAME": "mine",
        "LOCAL_RANK": str(PLAN.nodes[:rank].count(node)), "LOCAL_WORLD_SIZE": str(PLAN.nodes.count(node)),
        "MASTER_ADDR": "n2", "MASTER_PORT": "12345"}.items()
    assert plan.decode_plan(variables["SLURMDL_PLAN"]) == PLAN
    assert not [name for name in variables if name.startswith("_dl")]
    assert not variables.keys() & {"SLURMDL_TASK_SCRIPT", "SLURM_DISTRIBUTION"}
    assert proc.stderr == ""


def test_task_shell_keeps_user_variables_and_lists_added_ones():
    proc = run_task(("/bin/sh",), ["env"], 3, {"RANK": "7", "MASTER_ADDR": ""})
    variables = dict(line.split("=", 1) for line in proc.stdout.splitlines())
    assert (variables["RANK"], variables["MASTER_ADDR"], variables["WORLD_SIZE"]) == ("7", "", "6")
    inherited = step_command.inherited_variables(variables)
    assert "WORLD_SIZE" in inherited and "RANK" not in inherited and "MASTER_ADDR" not in inherited
    inner = StepCommand((), environ_unset=inherited).apply_to_environ(variables)
    assert not [name for name in inner if name.startswith("SLURMDL_")] and inner["RANK"] == "7"


@pytest.mark.parametrize("shell", SHELLS)
def test_task_shell_of_an_unmapped_step_takes_the_first_node_as_that_of_rank_0(shell):
    args = step_command.parse_srun_argv(["-N2", "env"])
    task = step_inputs.build_task_command(args.line, "srun", {}, is_mapped=False)
    command = step_command.unmapped_command(args, task, {"SLURM_JOB_NAME": "mine"}, [], 12345)
    assert command.argv == ("srun", "--job-name=env", "-N2", *UNMAPPED_TASK_SHELL, "env")
    for nodes in ("n3", "n3,m1", "n[03-05,7]", "n[7,9]-ib,m1", "a1-[2-3]b[007]x[1-2]-y", "a-b.c,d[1-2]"):
        environ = {"PATH": os.environ["PATH"], "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
                   "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
                   "SLURM_STEP_NODELIST": nodes, "SLURM_DISTRIBUTION": "cyclic", "SLURM_JOB_NAME": "env"}
        proc = subprocess.run([*shell, *UNMAPPED_TASK_SHELL[1:], "env"], capture_output=True, text=True,
                              check=True, env={**environ, **command.environ_set}, timeout=120)
        variables = dict(line.split("=", 1) for line in proc.stdout.splitlines())
        added = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
                 "MASTER_ADDR": hostlist.expand_hostlist(nodes)[0], "MASTER_PORT": "12345"}
        assert {name: value for name, value in variables.items() if name not in ("PWD", "_", "SHLVL", "OLDPWD")} == {
            **environ, **added, "SLURMDL_EXPORTED": "".join(f" {name}" for name in added), "SLURM_JOB_NAME": "mine"}


@pytest.mark.parametrize("shell", SHELLS)
def test_task_shell_passes_arguments_and_exit_status(shell):
    args = ["a  b", "it's", '"$(ls)"', "*", "", "two\nlines", "-n", "\\"]
    proc = run_task(shell, [sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(7)", *args], 0)
    assert proc.stdout == f"{args!r}\n" and proc.returncode == 7
    assert run_task(shell, ["sh", "-c", "kill -9 $$"], 0).returncode == -9
    missing = run_task(shell, ["no-such-program"], 0)
    assert missing.returncode == 2 and missing.stderr == "slurmdl: no-such-program: No such file or directory\n"
    assert run_task(shell, ["/etc/passwd"], 0).returncode == 13


# --- the controller's configuration, and the MPI in PATH ---

def slurm_config(version: str = "22.05.8", packs: str = "", plugins: str = "/lib/slurm") -> SlurmConfig:
    return SlurmConfig.from_scontrol(f"""Configuration data as of 2026-01-05T10:00:00
MpiDefault              = none
PluginDir               = {plugins}
SelectTypeParameters    = CR_CORE_MEMORY{packs}
SLURM_VERSION           = {version}
TopologyPlugin          = topology/tree
Slurmctld(primary) at login is UP
""")


def test_slurm_config_from_scontrol():
    assert slurm_config() == SlurmConfig((22, 5), False, "none", ("/lib/slurm",), True)
    assert slurm_config(packs=",CR_PACK_NODES").pack_nodes
    with pytest.raises(InputError, match="SLURM_VERSION"):
        SlurmConfig.from_scontrol("slurm_load_ctl_conf error")


@pytest.mark.parametrize(("version", "environ", "expected"), [
    ("22.05.8", {"SLURM_CPUS_PER_TASK": "4"}, None), ("22.05.8", {"SRUN_CPUS_PER_TASK": "2"}, 2),
    ("23.02.1", {"SLURM_CPUS_PER_TASK": "4"}, None), ("23.11.0", {"SLURM_CPUS_PER_TASK": "4"}, 4),
    ("24.11.5", {"SRUN_CPUS_PER_TASK": "2"}, None), ("26.05.0-rc1", {}, None)])
def test_srun_cpus_per_task_depends_on_the_release(version, environ, expected):
    assert slurm_config(version).srun_cpus_per_task(environ) == expected


@pytest.mark.parametrize(("launcher", "option"), [("orterun", "--mpi=pmix"), ("mpiexec.hydra", "--mpi=pmi2"),
                                                  ("mpirun.of.another", None)])
def test_mpi_type_option_matches_the_mpi_in_path(tmp_path, launcher, option):
    slurm = FakeSlurm(tmp_path)
    (tmp_path / "mpirun").symlink_to(slurm.command(launcher))
    for name in ("pmix", "pmi2"):
        (tmp_path / f"mpi_{name}.so").touch()
    config = slurm_config(plugins=f"/nowhere:{tmp_path}")
    for argv, variables, answer, expected in (
            ("p", {}, config, [option] if option else []), ("--mpi=none p", {}, config, []),
            ("p", {"SLURM_MPI_TYPE": "pmi2"}, config, []), ("p", {}, slurm_config(), [])):
        line, environ = step_command.parse_srun_argv(argv.split()).line, {"PATH": str(tmp_path), **variables}
        assert slurm_conf.mpi_type_option(line, lambda answer=answer: answer, environ) == expected


@pytest.mark.parametrize(("listed", "options"), [("none\n\tpmix\n", ["--mpi=pmix"]), ("none\n\tpmi2", [])])
def test_mpi_type_option_without_the_controller_uses_the_list_of_srun(tmp_path, listed, options):
    def no_answer() -> SlurmConfig:
        raise UnavailableError("scontrol: no answer within 5 s")

    slurm = FakeSlurm(tmp_path)
    (tmp_path / "mpirun").symlink_to(slurm.command("orterun"))
    slurm.command("srun", f"[ $* = --mpi=list ] && printf 'MPI plugin types are...\\n\t{listed}' >&2")
    line = step_command.parse_srun_argv(["p"]).line
    assert slurm_conf.mpi_type_option(line, no_answer, slurm.environ) == options


@pytest.mark.parametrize(("version", "has_ulfm"), [
    ("mpirun (Open MPI) 4.1.4", False), ("mpirun (Open MPI) 5.0.10", True), ("HYDRA build details:", False)])
def test_mpirun_has_ulfm_from_open_mpi_5_on(tmp_path, version, has_ulfm):
    slurm = FakeSlurm(tmp_path)
    slurm.command("mpirun", f"echo '{version}'")
    assert slurm_conf.mpirun_has_ulfm(slurm.environ) == has_ulfm


@pytest.mark.parametrize(("text", "status"), [("has lost communication with a remote daemon.", 76), ("", 0)])
def test_mpirun_that_lost_a_node_exits_with_76(tmp_path, text, status):
    FakeSlurm(tmp_path).command("mpirun", f"echo out; echo 'PRTE {text}' >&2; cat $1")
    call = "import os; from slurmdl.launch import srun, step_command as c; " \
           "file = c.InlineFile('', 'HOSTFILE', 'n1\\n'); " \
           "srun._exec_step(c.StepCommand(('mpirun', file), {}, (), c.NODE_LOST_MESSAGE), os.environ)"
    proc = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=False, timeout=120,
                          env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert (proc.returncode, proc.stdout) == (status, "out\nn1\n")
    first, *messages = proc.stderr.splitlines()
    assert first == f"PRTE {text}"
    assert [line[:28] for line in messages] == ["slurmdl: mpirun has lost com"] * (status == 76)


# --- the call ---

@pytest.mark.parametrize(("command", "spans"), [
    ("--het-group=0,1 program", True), ("--het-group=0-1 program", True), ("--het-group=1 program", False),
    ("program : --het-group=1 program", True), ("-n 2 program", False)])
def test_step_over_components_is_recognized(command, spans):
    assert step_command.parse_srun_argv(command.split()).spans_components == spans


@pytest.mark.parametrize(("command", "is_added"), [
    ("slurmdl train --steps 9", True), ("python -m slurmdl.train", True), ("/x/python3.11 -u -m slurmdl.train", True),
    ("python3 -m slurmdl train", True), ("python3 -m slurmdl bench", False),
    ("python3 train.py -m slurmdl.train", False), ("python3 -m torch.distributed.run", False), ("slurmdl", False),
    ("./mpi_program", False), ("python3", False), ("-K0 slurmdl train", False),
    ("--kill-on-bad-exit slurmdl train", False)])
def test_kill_on_bad_exit_is_added_for_the_trainer_only(command, is_added):
    args = step_command.parse_srun_argv(command.split())
    assert args.kill_on_bad_exit_option({}) == (["--kill-on-bad-exit=1"] if is_added else [])
    assert args.kill_on_bad_exit_option({"SLURM_KILL_BAD_EXIT": "0"}) == []


@pytest.mark.parametrize(("argv", "message"), [
    (["--dl-strategy=best", "p"], "--dl-strategy.*'best'.*allreduce"), (["--dl-sort", "p"], "--dl-sort.*--dl-strict"),
    (["--step-starter=ssh", "p"], "--step-starter.*'ssh'.*srun, mpirun"),
    *((argv, r"--print-rank-map: .*openmpi-rankfile") for argv in (
        ["--print-rank-map=rankfile"], ["--print-rank-map"], ["--print-rank-map="]))])
def test_invalid_option_is_a_usage_error(argv, message):
    with pytest.raises(UsageError, match=message):
        srun.run_srun(argv, {"SLURM_JOB_ID": "1"})


def test_strict_srun_outside_a_job_is_a_usage_error(capfd):
    assert srun.run_srun(["--dl-strict", "hostname"], {}) == 64
    assert "not inside a job" in capfd.readouterr().err


@pytest.mark.parametrize(("argv", "call", "message"), [
    ("--version", "--version", ""), ("-V --dl-explain", "-V", ""), ("--mpi=list p", "--mpi=list p", ""),
    ("-n1", "-n1", ""),
    ("-n1 p --dl-explain", "-n1 p --dl-explain", "--dl-explain follows the program p and is passed to it; expected"),
    ("-Q -n1 p --dl-explain", "-Q -n1 p --dl-explain", "")])
def test_srun_starts_what_is_no_step_and_gets_options_after_the_program(tmp_path, argv, call, message):
    slurm = FakeSlurm(tmp_path)
    slurm.command("srun")
    proc = subprocess.run([sys.executable, "-m", "slurmdl", "srun", *argv.split()], capture_output=True, text=True,
                          env={**slurm.environ, "SLURM_JOB_ID": "7"}, check=True)
    assert slurm.calls("srun")[-1] == f"srun {call}"
    first = proc.stderr.partition("\n")[0]
    assert first.startswith(f"slurmdl: {message}") if message else first == ""


# --- inputs ---

def test_topology_yaml_applies_regardless_of_topology_plugin(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    flat = SlurmConfig((26, 5), False, "none", (), False)
    tree = "tree:\n    switches: [{switch: zoneA, nodes: n1}]\n"
    (tmp_path / "topology.yaml").write_text(f"- topology: fabric\n  cluster_default: true\n  {tree}")
    assert step_inputs.load_job_topology(flat, ["n1"], "", True)[0].zones == ("zoneA",)
    (tmp_path / "topology.yaml").rename(tmp_path / "topology.conf")
    with pytest.raises(UnavailableError, match="no zones"):
        step_inputs.load_job_topology(flat, ["n1"], "", True)
