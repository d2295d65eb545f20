"""The step as a value, and the shell that stands before each task. Real steps run in tests/cluster/test_steps.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placing import SCORES, two_level

from slurmdl import dl_options, plan
from slurmdl.dl_options import DlOptions
from slurmdl.errors import InputError, PlacementError, UnavailableError, UsageError
from slurmdl.launch import plan_builder, srun, srun_args, step_command, step_context, task_command, traffic_file
from slurmdl.plan import Plan
from slurmdl.slurm import getopt, pmi, srun_options, step_layout
from slurmdl.slurm.slurm_conf import SlurmConfig

PLAN = Plan("ps", ("n2", "n1", "n1", "n3", "n2", "n4"), ("ps", "worker", "worker", "worker", "ps", "worker"),
            {"n1": ("core", "zoneA"), "n3": ("core", "zoneA"), "n2": ("core", "zoneB"), "n4": ("core", "zoneB")})


def parse(*words: str) -> getopt.CommandLine:
    return getopt.parse_command_line(words, srun_options.SHORT_OPTIONS, {
                                     **srun_options.LONG_OPTIONS, **dl_options.LONG_OPTIONS, "launcher": "required"})


def srun_command(line: getopt.CommandLine, options: Sequence[str] = (), variables: Mapping[str, str] | None = None,
                 environ: Mapping[str, str] | None = None) -> step_command.StepCommand:
    task = task_command.build_task_command(line, "srun", environ or {})
    return step_command.srun_command(line, PLAN, task, options, variables or {}, environ or {})


def mpirun_command(line: getopt.CommandLine, variables: Mapping[str, str], **options: bool) -> step_command.StepCommand:
    task = task_command.build_task_command(line, "mpirun", {})
    return step_command.mpirun_command(line, PLAN, task, variables, {}, **options)


def format_command(command: step_command.StepCommand) -> str:
    """Command line, one argument per line, files, and the names of the variables; other tests run their values."""
    lines = command.argv_with_files(lambda file: file.name)
    files = [f"--- {file.name}\n{file.text}" for file in command.inline_files()]
    return "\n".join([*lines, "--- variables", *sorted(command.environ_set), *files])


def test_command_line_of_srun(golden):
    line = parse("-lun", "6", "--dl-ps=2", "-N4", "--ntasks-per-node=2", "-c", "2", "-w", "n[1-4]", "--mem", "1G",
                 "--mpi=pmix", "program", "a  b", "-n", "")
    command = srun_command(line, [], step_command.task_variables(PLAN, 12345), {"SLURM_JOB_NAME": "mine"})
    golden("srun/options.txt", format_command(command))


def test_command_line_of_several_programs(golden, tmp_path):
    path = tmp_path / "programs"
    path.write_text("# a comment\n0,2-3 first %t 'quoted  text'\n  4 second \\\n  * of the line before\n\n* third\n")
    command = srun_command(parse("-n6", "--multi-prog", str(path), "more"), ["--mpi=pmix"])
    golden("srun/multi_prog.txt", format_command(command))


def test_command_line_of_mpirun(golden):
    line = parse("-n", "6", "--launcher=mpirun", "program", "argument")
    golden("srun/mpirun.txt", format_command(mpirun_command(line, step_command.task_variables(PLAN, 12345))))


def test_command_line_of_an_mpirun_with_ulfm():
    line = parse("-n", "6", "--launcher=mpirun", "program", "argument")
    plain, with_ulfm = (list(mpirun_command(line, {}, with_ulfm=ulfm).argv) for ulfm in (False, True))
    index = with_ulfm.index("--with-ft")
    assert with_ulfm[index:index + 2] == ["--with-ft", "ulfm"]
    assert with_ulfm[:index] + with_ulfm[index + 2:] == plain


@pytest.mark.parametrize(("version", "has"), [
    ("mpirun (Open MPI) 4.1.4", False), ("mpirun (Open MPI) 5.0.10", True), ("HYDRA build details:", False)])
def test_which_mpirun_has_ulfm(tmp_path, version, has):
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\necho '{version}'\n")
    (tmp_path / "mpirun").chmod(0o755)
    assert pmi.mpirun_has_ulfm({"PATH": f"{tmp_path}:/usr/bin:/bin"}) == has


def program(path: Path, text: str) -> None:
    """A shell script that can be executed."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_options_that_mpirun_has_not():
    with pytest.raises(PlacementError, match="--label"):
        mpirun_command(parse("--label", "program"), {})


def test_the_step_is_named_for_the_program_unless_the_user_names_it():
    assert "--job-name=program" in srun_command(parse("/bin/program")).argv
    assert srun_command(parse("-J", "mine", "program")).argv[:3] == ("srun", "-J", "mine")


def test_a_missing_file_of_programs():
    with pytest.raises(PlacementError, match="no-such-file"):
        srun_command(parse("--multi-prog", "no-such-file"))


def test_a_program_of_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "program").touch()
    monkeypatch.chdir(tmp_path)
    assert srun_command(parse("program"), environ={"PATH": "/nowhere"}).argv[-1] == str(tmp_path / "program")
    assert srun_command(parse("sh"), environ={"PATH": "/bin"}).argv[-1] == "sh"


def test_a_long_plan_is_a_file(tmp_path):
    nodes = tuple(f"{os.urandom(6).hex()}" for _ in range(12_000))
    large = Plan("gossip", nodes, ("worker",) * len(nodes), dict.fromkeys(nodes, ("leaf",)))
    long = step_command.StepCommand(("srun",), step_command.task_variables(large, 12345))
    assert long.environ_set["SLURMDL_ZONE_RANKS"] == "leaf:0-11999;"
    kept = srun.with_plan_file(long, str(tmp_path / "plans"))
    assert kept.environ_set["SLURMDL_PLAN"] == f"file:{kept.plan_file}"
    assert plan.plan_from_environ(kept.environ_set) == large
    assert srun.with_plan_file(kept, "/nowhere") == kept
    (tmp_path / "file").touch()
    with pytest.raises(PlacementError, match="plan_dir"):
        srun.with_plan_file(long, str(tmp_path / "file"))


@given(st.sets(st.integers(0, 60)))
def test_fold(ranks):
    text = step_command.fold_ranks(sorted(ranks))
    back = [i for part in text.split(",") if part
            for i in range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1)]
    assert back == sorted(ranks)
    assert text.count(",") + 1 <= max(1, len(ranks))


SHELLS = [shell for shell in (("/bin/sh",), ("/bin/dash",), ("/bin/bash", "--posix")) if Path(shell[0]).exists()]


def task(shell, words: list[str], rank: int, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Run the tasks' shell as srun would run it for one rank of PLAN."""
    node = sorted(set(PLAN.nodes)).index(PLAN.nodes[rank])
    command = srun_command(parse("-n6", *words), [], step_command.task_variables(PLAN, 12345),
                           {"SLURM_JOB_NAME": "mine"})
    task_environ = {"PATH": os.environ["PATH"], "SLURM_PROCID": str(rank), "SLURM_NODEID": str(node),
            "SLURM_LOCALID": str(PLAN.nodes[:rank].count(PLAN.nodes[rank])), "SLURM_STEP_ID": "3",
            "SLURM_STEP_TASKS_PER_NODE": "2(x2),1(x2)", "SLURM_DISTRIBUTION": "arbitrary", "SLURM_JOB_NAME": "sh"}
    return subprocess.run([*shell, *task_command.TASK_SHELL[1:], *words], capture_output=True, text=True, check=False,
                          env={**task_environ, **command.environ_set, **(environ or {})}, timeout=20)


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("rank", range(len(PLAN)))
def test_variables_of_each_task(shell, rank):
    done = task(shell, ["env", "-0"], rank, {"at": "mine"})
    found = dict(pair.split("=", 1) for pair in done.stdout.split("\0") if pair)
    node = PLAN.nodes[rank]
    role = PLAN.roles[rank]
    assert found["SLURMDL_ROLE"] == role and found["SLURMDL_ROLE_RANK"] == str(PLAN.roles[:rank].count(role))
    assert found["SLURMDL_ZONE"] == PLAN.leaf_zone(rank)
    assert (found["RANK"], found["WORLD_SIZE"]) == (str(rank), "6")
    assert found["LOCAL_RANK"] == str(PLAN.nodes[:rank].count(node))
    assert found["LOCAL_WORLD_SIZE"] == str(PLAN.nodes.count(node))
    assert found["MASTER_ADDR"] == "n2" and found["MASTER_PORT"] == found["SLURMDL_MASTER_PORT"]
    assert found["SLURM_JOB_NAME"] == "mine" and found["at"] == "mine"
    assert plan.decode_plan(found["SLURMDL_PLAN"]) == PLAN
    left = [name for name in found if name.startswith("_dl") or name in ("SLURMDL_TASK_SCRIPT", "SLURM_DISTRIBUTION")]
    assert not left
    assert done.stderr == ""


def test_variables_of_the_user_stay_and_ours_are_known():
    done = task(("/bin/sh",), ["env"], 3, {"RANK": "7", "MASTER_ADDR": ""})
    found = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert (found["RANK"], found["MASTER_ADDR"], found["WORLD_SIZE"]) == ("7", "", "6")
    ours = step_command.inherited_variables(found)
    assert "WORLD_SIZE" in ours and "RANK" not in ours and "MASTER_ADDR" not in ours
    inner = step_command.StepCommand((), environ_unset=ours).apply_to_environ(found)
    assert not [name for name in inner if name.startswith("SLURMDL_")] and inner["RANK"] == "7"


@pytest.mark.parametrize("shell", SHELLS)
def test_the_program_gets_its_words_and_gives_its_status(shell):
    words = ["a  b", "it's", '"$(ls)"', "*", "", "two\nlines", "-n", "\\"]
    done = task(shell, [sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(7)", *words], 0)
    assert done.stdout == f"{words!r}\n" and done.returncode == 7
    assert task(shell, ["sh", "-c", "kill -9 $$"], 0).returncode == -9
    missing = task(shell, ["no-such-program"], 0)
    assert missing.returncode == 2 and missing.stderr == "slurmdl: no-such-program: No such file or directory\n"
    assert task(shell, ["/etc/passwd"], 0).returncode == 13


def test_bash_where_names_are_none_for_the_shell():
    odd = {"BASH_FUNC_f%%": "() { :; }"}
    assert task_command.TASK_SHELL[0] in srun_command(parse("p"), environ={"PLAIN_1": ""}).argv
    assert ("/bin/bash" in srun_command(parse("p"), environ=odd).argv) == Path("/bin/bash").exists()


CONFIG = """Configuration data as of 2026-01-05T10:00:00
MpiDefault              = none
PluginDir               = {plugins}
SelectTypeParameters    = CR_CORE_MEMORY{packs}
SLURM_VERSION           = {version}
TopologyPlugin          = topology/tree
Slurmctld(primary) at login is UP
"""


def controller(version: str = "22.05.8", packs: str = "", plugins: str = "/lib/slurm") -> SlurmConfig:
    return SlurmConfig.from_scontrol(CONFIG.format(version=version, packs=packs, plugins=plugins))


def test_controller():
    assert controller() == SlurmConfig((22, 5), False, "none", ("/lib/slurm",), True)
    assert controller(packs=",CR_PACK_NODES").pack_nodes
    with pytest.raises(InputError, match="SLURM_VERSION"):
        SlurmConfig.from_scontrol("slurm_load_ctl_conf error")


@pytest.mark.parametrize(("version", "environ", "expected"), [
    ("22.05.8", {"SLURM_CPUS_PER_TASK": "4"}, None), ("22.05.8", {"SRUN_CPUS_PER_TASK": "2"}, 2),
    ("23.02.1", {"SLURM_CPUS_PER_TASK": "4"}, None), ("23.11.0", {"SLURM_CPUS_PER_TASK": "4"}, 4),
    ("24.11.5", {"SRUN_CPUS_PER_TASK": "2"}, None), ("26.05.0-rc1", {}, None)])
def test_cpus_per_task_of_the_environment(version, environ, expected):
    assert controller(version).srun_cpus_per_task(environ) == expected


@pytest.mark.parametrize(("launcher", "option"), [("orterun", "--mpi=pmix"), ("mpiexec.hydra", "--mpi=pmi2"),
                                                  ("mpirun.of.another", None)])
def test_mpi_of_the_mpi_in_path(tmp_path, launcher, option):
    (tmp_path / launcher).write_text("")
    (tmp_path / launcher).chmod(0o755)
    (tmp_path / "mpirun").symlink_to(launcher)
    for name in ("pmix", "pmi2"):
        (tmp_path / f"mpi_{name}.so").touch()
    here, environ = controller(plugins=f"/nowhere:{tmp_path}"), {"PATH": str(tmp_path)}
    assert pmi.mpi_type_option(parse("p"), lambda: here, environ) == ([option] if option else [])
    assert pmi.mpi_type_option(parse("--mpi=none", "p"), lambda: here, environ) == []
    assert pmi.mpi_type_option(parse("p"), lambda: here, {**environ, "SLURM_MPI_TYPE": "pmi2"}) == []
    assert pmi.mpi_type_option(parse("p"), controller, environ) == [], "no such plugin"


@pytest.mark.parametrize(("listed", "options"), [("none\n\tpmix\n", ["--mpi=pmix"]), ("none\n\tpmi2", [])])
def test_mpi_where_the_controller_does_not_answer(tmp_path, listed, options):
    def no_answer() -> SlurmConfig:
        raise UnavailableError("scontrol: no answer within 5 s")

    program(tmp_path / "orterun", "")
    (tmp_path / "mpirun").symlink_to("orterun")
    program(tmp_path / "srun", f"[ $* = --mpi=list ] && printf 'MPI plugin types are...\\n\t{listed}' >&2")
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert pmi.mpi_type_option(parse("p"), no_answer, environ) == options


@pytest.mark.parametrize(("words", "ends"), [
    ("slurmdl train --steps 9", True), ("python -m slurmdl.train", True), ("/x/python3.11 -u -m slurmdl.train", True),
    ("python3 -m slurmdl train", True), ("python3 -m slurmdl bench", False),
    ("python3 train.py -m slurmdl.train", False),
    ("python3 -m torch.distributed.run", False), ("slurmdl", False), ("./mpi_program", False), ("python3", False),
    ("-K0 slurmdl train", False), ("--kill-on-bad-exit slurmdl train", False)])
def test_srun_ends_all_tasks_with_one_in_the_trainer_only(words, ends):
    args = srun_args.parse_srun_argv(words.split())
    assert args.kill_on_bad_exit_option({}) == (["--kill-on-bad-exit=1"] if ends else [])
    assert args.kill_on_bad_exit_option({"SLURM_KILL_BAD_EXIT": "0"}) == []


@pytest.mark.parametrize(("text", "status"), [("has lost communication with a remote daemon.", 76), ("", 0)])
def test_an_mpirun_that_has_lost_a_node_has_failed(tmp_path, text, status):
    program(tmp_path / "mpirun", f"echo out; echo 'PRTE {text}' >&2; cat $1")
    call = "from slurmdl.launch import srun, step_command as c; import os; srun._exec_step(c.StepCommand(('mpirun', " \
           "c.InlineFile('', 'HOSTFILE', 'n1\\n')), {}, (), c.NODE_LOST_MESSAGE), os.environ)"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=False, timeout=30,
                          env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert (done.returncode, done.stdout) == (status, "out\nn1\n")
    first, *more = done.stderr.splitlines()
    assert first == f"PRTE {text}"
    assert len(more) == (status == 76)
    assert all(line.startswith("slurmdl: mpirun has lost") for line in more)


LAYOUT = step_layout.StepLayout((("n1", 2), ("n2", 1)))


def test_the_plan_tells_what_a_byte_costs_between_zones():
    plan, _ = plan_builder.build_plan(LAYOUT, two_level(["n1"], ["n2"]), SCORES, DlOptions())
    assert plan.costs == {"z0|z0": 1e-3, "z0|z1": 0.02, "z1|z1": 1e-3}


def test_the_plan_tells_the_pattern_but_no_file():
    laid, topology = step_layout.StepLayout((("n1", 2), ("n2", 1))), two_level(["n1"], ["n2"])
    asked = DlOptions("gossip", comm_pattern="one-peer-exponential")
    assert srun._build_plan(laid, topology, SCORES, asked)[0].comm_pattern == "one-peer-exponential"
    assert srun._build_plan(laid, topology, SCORES, DlOptions())[0].comm_pattern == ""


def test_the_plan_of_matrices_names_no_pattern(tmp_path):
    file = tmp_path / "flow.csv"
    file.write_text("0,1,0\n0,0,1\n1,0,0\n")
    dl = DlOptions("gossip", comm_pattern=str(file))
    plan, _ = plan_builder.build_plan(LAYOUT, two_level(["n1"], ["n2"]), SCORES, dl,
                                      traffic_file.load_traffic_matrices(dl))
    assert plan.comm_pattern == ""


def test_outside_a_job():
    with pytest.raises(UsageError, match="not inside a job"):
        srun.run_srun(["hostname"], {})


@pytest.mark.parametrize("words", [["--dl-strategy=best", "p"], ["--dl-sort", "p"], ["--launcher=ssh", "p"]])
def test_wrong_options_of_ours(words):
    with pytest.raises(UsageError, match="valid"):
        srun.run_srun(words, {"SLURM_JOB_ID": "1"})


@pytest.mark.skipif(shutil.which("srun") is None, reason="no srun")
@pytest.mark.parametrize("words", [["--version"], ["-V", "--dl-explain"]])
def test_srun_answers_for_itself(words):
    call = "import sys; from slurmdl.cli.main import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", call, "srun", *words], capture_output=True, text=True,
                          env={**os.environ, "SLURM_JOB_ID": "1"}, check=False, timeout=30)
    plain = subprocess.run(["srun", "--version"], capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_an_option_behind_the_program_is_the_programs_and_one_line_says_so(tmp_path, monkeypatch, capsys):
    (tmp_path / "srun").write_text("")
    (tmp_path / "srun").chmod(0o755)
    started = []
    monkeypatch.setattr(srun, "_exec_step",
                        lambda command, _: started.extend(command.argv_with_files(lambda file: file.name)))
    environ = {"SLURM_JOB_ID": "7", "PATH": str(tmp_path), "HOME": str(tmp_path)}
    monkeypatch.setenv("PATH", str(tmp_path))
    srun.run_srun(["-n1", "program", "--dl-explain", "--dl-ps=1"], environ)
    assert started[-3:] == ["program", "--dl-explain", "--dl-ps=1"]
    said = capsys.readouterr().err
    assert "slurmdl: --dl-explain is passed to the program program: it stands behind it\n" in said


def test_a_topology_yaml_holds_whatever_topology_plugin_says(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    flat = SlurmConfig((26, 5), False, "none", (), False)
    tree = "tree:\n    switches: [{switch: zoneA, nodes: n1}]\n"
    (tmp_path / "topology.yaml").write_text(f"- topology: fabric\n  cluster_default: true\n  {tree}")
    assert step_context.load_job_topology(flat, ["n1"], "", True)[0].zones == ("zoneA",)
    (tmp_path / "topology.yaml").rename(tmp_path / "topology.conf")
    with pytest.raises(UnavailableError, match="no zones"):
        step_context.load_job_topology(flat, ["n1"], "", True)
