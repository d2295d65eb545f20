"""The SPANK plugin in a real Slurm: task variables, rejected option values, and hosts without the plugin."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from jobs import rank_nodes

from slurmdl.dl_options import OPTIONS, WRAPPER_ONLY

PLUGIN = Path(__file__).parents[2] / "build/spank/slurmdl.so"
NAMES = ("SLURM_PROCID", "SLURMD_NODENAME", "SLURMDL_ROLE", "SLURMDL_ROLE_RANK", "SLURMDL_ZONE", "RANK", "WORLD_SIZE",
         "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURMDL_PLAN", "SLURM_DISTRIBUTION",
         "SLURM_HOSTFILE", "SLURMDL_EXPORTED")
#: shell command of a task that prints the values of NAMES in one line
TASK = "echo " + " ".join(f"${{{name}:--}}" for name in NAMES)
STEP = f"srun sh -c '{TASK}'"
#: script lines that export a rank map of six tasks on four nodes
MAP = """
export SLURMDL_RANKMAP_JOB=$SLURM_JOB_ID SLURMDL_RANKMAP_NODES='n3(x2),n1,n4,n2(x2)' SLURMDL_RANKMAP_PLAN=plan
export SLURMDL_RANKMAP_ROLE_RANKS='ps:0,3;worker:1-2,4-5;' SLURMDL_RANKMAP_ZONE_RANKS='zoneA:0-2;zoneB:3-5;'
"""
MAPPED = ["n3", "n3", "n1", "n4", "n2", "n2"]
PLAIN = ["n1", "n1", "n2", "n3", "n3", "n4"]


@pytest.fixture(scope="module")
def plugin() -> Path:
    if not Path("/usr/include/slurm/spank.h").exists():
        assert os.environ.get("SLURMDL_REQUIRE_CLUSTER") != "1", "libslurm-dev is missing"
        pytest.skip("libslurm-dev is missing")
    subprocess.run(["make", "-C", PLUGIN.parents[2] / "spank"], check=True, capture_output=True, timeout=120)
    return PLUGIN


@pytest.fixture
def plugged(cluster_with, plugin):
    """A cluster of four nodes with the plugin."""
    return cluster_with(nodes=4, plugstack=f"optional {plugin}\n")


def tasks(text: str) -> list[dict[str, str]]:
    """Return the variables of the tasks in a job's output, by rank."""
    rows = [line.split(maxsplit=len(NAMES) - 1) for line in text.splitlines() if line[:1].isdigit()]
    variables = [dict(zip(NAMES, row, strict=True)) for row in rows if len(row) == len(NAMES)]
    return sorted(variables, key=lambda task: int(task["SLURM_PROCID"]))


def column(text: str, name: str) -> list[str]:
    """Return a variable of all tasks, by rank."""
    return [task[name] for task in tasks(text)]


def sections(text: str) -> dict[str, str]:
    """Return title -> text below each line `@ title`."""
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in text.split("@ ")[1:]}


def slurmdl_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if "slurmdl:" in line]


def assert_nodes_are_up(cluster) -> None:
    assert set(cluster.sandbox.node_states().values()) <= {"idle", "mixed", "allocated", "completing"}


def assert_nothing_executed(cluster) -> None:
    for host in ("login", *cluster.topology.nodes):
        assert cluster.run(["test", "-e", "/tmp/executed"], host=host).returncode == 1


def run(cluster, text: str, *options: str) -> str:
    """Run a script by plain sbatch; return its output."""
    return cluster.job_output(text, *options, program="sbatch")


def roles(text: str) -> list[str]:
    """Return role and role rank of all tasks, by rank."""
    return [f"{task['SLURMDL_ROLE']}{task['SLURMDL_ROLE_RANK']}" for task in tasks(text)]


def test_options_of_all_commands_reach_the_tasks(plugged):
    one, two = ["ps0", "worker0", "worker1", "worker2"], ["ps0", "ps1", "worker0", "worker1"]
    three, none = ["ps0", "ps1", "ps2", "worker0"], ["worker0", "worker1", "worker2", "worker3"]
    # options of sbatch, a #SBATCH line, SLURMDL_OPT_PS, command of the step, expected roles
    cases: list[tuple[str, str, str, str, list[str]]] = [
        ("--dl-strategy=ps", "", "", "srun", one), ("", "--dl-ps=2", "", "srun", two), ("", "", "2", "srun", two),
        # precedence: command line, environment, script
        ("", "--dl-ps=1", "2", "srun", two), ("--dl-ps=3", "--dl-ps=1", "2", "srun", three),
        ("--dl-strategy=gossip", "--dl-ps=1", "", "srun", none),
        # with --export=NAMES Slurm also passes SLURM_* variables
        ("--export=PATH --dl-ps=2", "", "", "srun", two),
        ("--export=PATH --dl-strategy=gossip", "--dl-ps=1", "", "srun", none),
        ("--dl-ps=2", "", "", "SLURMDL_OPT_PS=1 srun", one), ("--dl-ps=2", "", "", "srun --dl-ps=3", three)]
    jobs = []
    for words, line, server_count, start, _ in cases:
        script = plugged.script(f"#SBATCH {line}\n{STEP.replace('srun', start)}")
        jobs.append(plugged.submit(["sbatch", "-n4", *words.split(), str(script)],
                                   env={"SLURMDL_OPT_PS": server_count} if server_count else None))
    for job, case in zip(jobs, cases, strict=True):
        assert roles(plugged.output(job)) == case[-1], case
    for words in (["salloc", "-N4", "--dl-ps=2", "srun"], ["srun", "-N4", "--dl-ps=2"],
                  ["salloc", "-N4", "srun", "--dl-ps=2"]):
        done = plugged.run([*words, "sh", "-c", TASK])
        assert roles(done.stdout) == two, done.stderr
    words = ["--dl-rank0=any", "--dl-zone=zoneA", "--dl-bytes=1M", "--dl-strict"]
    assert plugged.output(plugged.submit(["sbatch", *words, "--wrap=env | grep SLURMDL_OPT | sort"])).split() == [
        "SLURMDL_OPT_BYTES=1M", "SLURMDL_OPT_RANK0=any", "SLURMDL_OPT_STRICT=", "SLURMDL_OPT_ZONE=zoneA"]


def test_tasks_have_their_variables(plugged):
    text = run(plugged, STEP, "-N4", "-n6", "--dl-ps=1")
    for rank, task in enumerate(tasks(text)):
        assert task["SLURMDL_ZONE"] == plugged.topology.leaf_of(task["SLURMD_NODENAME"])
        assert (task["RANK"], task["WORLD_SIZE"]) == (str(rank), "6")
        assert task["LOCAL_WORLD_SIZE"] == str(PLAIN.count(PLAIN[rank]))
        assert task["LOCAL_RANK"] == str(PLAIN[:rank].count(PLAIN[rank]))
        assert {task[name] for name in ("MASTER_ADDR", "MASTER_PORT", "SLURMDL_PLAN")} == {"-"}
    assert len(tasks(text)) == 6
    # values of the user are kept; steps without options and batch scripts have no variables
    outputs = sections(run(plugged, f"""
echo "@ mine"; RANK=mine srun --dl-ps=1 sh -c '{TASK}'
echo "@ nothing"; env -u SLURMDL_OPT_PS srun sh -c '{TASK}'
echo "@ batch"; env | grep -c -e ^RANK= -e ^SLURMDL_ROLE -e ^SLURMDL_EXPORTED= || true
""", "-N4"))
    assert set(column(outputs["mine"], "RANK")) == {"mine"}
    assert set(column(outputs["mine"], "SLURMDL_EXPORTED")) == {"WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"}
    plugin_variables = ("SLURMDL_ROLE", "RANK", "SLURMDL_EXPORTED")
    assert {task[name] for task in tasks(outputs["nothing"]) for name in plugin_variables} == {"-"}
    assert outputs["batch"].split() == ["0"]


def test_nested_step_has_its_own_variables(plugged):
    inner = plugged.script(f"srun --overlap --mem=0 -n4 sh -c '{TASK}'", "inner.sh")
    text = run(plugged, f"{MAP}\nsrun --mem=0 --dl-rank-map sh -c '[ $SLURM_PROCID != 2 ] || {inner}'", "-N4", "-n6",
               "--dl-ps=1")
    assert column(text, "RANK") == ["0", "1", "2", "3"] and set(column(text, "WORLD_SIZE")) == {"4"}
    assert roles(text) == ["ps0", "worker0", "worker1", "worker2"]
    assert {task[name] for task in tasks(text) for name in ("MASTER_ADDR", "MASTER_PORT", "SLURMDL_PLAN")} == {"-"}


def test_heterogeneous_step_has_global_ranks(plugged):
    component = f"sh -c '{TASK}'"
    text = run(plugged, f"srun --mem=0 -N2 -n2 {component} : -N1 -n1 {component}", "-N4", "-n4", "--dl-ps=2")
    assert roles(text) == ["ps0", "ps1", "worker0"] and column(text, "RANK") == ["0", "1", "2"]
    assert set(column(text, "WORLD_SIZE")) == {"3"} and slurmdl_lines(text) == []


def test_slurmdl_srun_with_the_plugin(plugged):
    """The plugin does not change steps of `slurmdl srun`."""
    text = plugged.job_output(f"#DL --dl-ps=2\nslurmdl srun sh -c '{TASK}'", "-N4")
    assert roles(text) == ["ps0", "ps1", "worker0", "worker1"] and column(text, "RANK") == ["0", "1", "2", "3"]
    assert all("RANK" in task["SLURMDL_EXPORTED"].split() and task["MASTER_ADDR"] != "-" for task in tasks(text))
    # with the plugin, #SBATCH lines are valid for slurmdl sbatch, too; the command line overrides both
    text = plugged.job_output(f"#SBATCH --dl-ps=1 --dl-bytes=1M\n{STEP}\necho '@ mapped'\n"
                              f"slurmdl srun sh -c '{TASK}'", "-N4", "--dl-ps=2")
    mapped = sections(text)["mapped"]
    assert roles(text.replace(mapped, "")) == roles(mapped) == ["ps0", "ps1", "worker0", "worker1"]
    rejected = plugged.run(["slurmdl", "sbatch", "-N4", str(plugged.script("#SBATCH --dl-explain\ntrue"))])
    assert rejected.returncode == 64 and "#DL --dl-explain" in slurmdl_lines(rejected.stderr)[0]
    text = run(plugged, "#SBATCH --dl-ps=2\nslurmdl srun sh -c 'echo $SLURMDL_ROLE'", "-N4")
    assert sorted(text.split()) == ["ps"] * 2 + ["worker"] * 2


#: option, value, and expected part of the message
INVALID_VALUES = [
    ("strategy", "gosip", "adaptive-gossip"), ("ps", "two", "whole number"), ("ps", "-1", "whole number"),
    ("rank0", "", "any"), ("node-binding", "hard", "late"), ("zone", ",", "names separated by commas"),
    ("bytes", "", "NAME=N"), ("link-scores", "", "FILE"), ("comm-pattern", "", "PATTERN")]


def test_invalid_values_fail_the_submission(plugged):
    def assert_rejected(done: subprocess.CompletedProcess[str], valid: str, option: str) -> None:
        assert done.returncode != 0 and done.stdout == "", option
        assert len(slurmdl_lines(done.stderr)) == 1 and valid in slurmdl_lines(done.stderr)[0], done.stderr
        assert f"--dl-{option}" in slurmdl_lines(done.stderr)[0]

    for option, value, valid in INVALID_VALUES:
        assert_rejected(plugged.run(["sbatch", f"--dl-{option}={value}", "--wrap=true"]), valid, option)
    option, value, valid = INVALID_VALUES[0]
    word = f"--dl-{option}={value}"
    for argv in (["sbatch", str(plugged.script(f"#SBATCH {word}\ntrue"))],
                 ["env", f"SLURMDL_OPT_STRATEGY={value}", "sbatch", "--wrap=true"], ["srun", word, "hostname"],
                 ["salloc", word, "hostname"]):
        assert_rejected(plugged.run(argv), valid, option)
    # a rank map belongs to a step, so sbatch and salloc have no --dl-rank-map
    for argv in (["sbatch", "--dl-rank-map", "--wrap=true"], ["salloc", "--dl-rank-map", "true"],
                 ["sbatch", str(plugged.script("#SBATCH --dl-rank-map\ntrue"))]):
        assert plugged.run(argv).returncode != 0, argv
    assert plugged.run(["squeue", "-h"]).stdout == ""


def test_help(plugged):
    options = len(OPTIONS) - len(WRAPPER_ONLY)
    for command, maps in (("sbatch", 0), ("salloc", 0), ("srun", 1)):
        text = plugged.run([command, "--help"]).stdout
        assert text.count("[slurmdl]") == options + maps and ("--dl-rank-map" in text) == bool(maps)


def test_map_applies_to_its_step_only(plugged):
    outputs = sections(run(plugged, f"""{MAP}
echo "@ before"; {STEP}
echo "@ mapped"; srun --dl-rank-map sh -c '{TASK}'
echo "@ after"; {STEP}
echo "@ counted"; srun --dl-rank-map -n6 sh -c '{TASK}'
echo "@ few"; srun --export=SLURMDL_RANKMAP_JOB --dl-rank-map /bin/sh -c '{TASK}'
echo "@ inherited"
SLURM_SPANK__SLURM_SPANK_OPTION_slurmdl_dl_rank_map= _SLURM_SPANK_OPTION_slurmdl_dl_rank_map= {STEP}
""", "-N4", "-n6", "--dl-ps=2"))
    for title in ("before", "after", "inherited"):
        assert column(outputs[title], "SLURMD_NODENAME") == PLAIN
        assert roles(outputs[title]) == ["ps0", "ps1", "worker0", "worker1", "worker2", "worker3"]
        assert {task[name] for task in tasks(outputs[title]) for name in ("MASTER_ADDR", "SLURMDL_PLAN")} == {"-"}
    ports = set()
    for title in ("mapped", "counted", "few"):
        step_tasks = tasks(outputs[title])
        assert [task["SLURMD_NODENAME"] for task in step_tasks] == MAPPED
        assert roles(outputs[title]) == ["ps0", "worker0", "worker1", "ps1", "worker2", "worker3"]
        assert [task["SLURMDL_ZONE"] for task in step_tasks] == ["zoneA"] * 3 + ["zoneB"] * 3
        assert {task["MASTER_ADDR"] for task in step_tasks} == {"n3"}
        port, = {task["MASTER_PORT"] for task in step_tasks}
        assert 10_000 <= int(port) < 32_000
        ports.add(port)
        assert {task["SLURMDL_PLAN"] for task in step_tasks} == {"plan"}
        # unset, because nested steps would inherit them
        assert {task[name] for task in step_tasks for name in ("SLURM_DISTRIBUTION", "SLURM_HOSTFILE")} == {"-"}
        assert slurmdl_lines(outputs[title]) == []
    assert len(ports) > 1, "all steps have the same port"


def test_printed_map_matches_slurmdl_srun(plugged):
    """The order, roles, address of rank 0 and plan match."""
    step = f"sh -c '{TASK}'"
    outputs = sections(run(plugged, f"""
echo "@ plugin 0"; eval "$(slurmdl srun --print-rank-map=shell -n 6 true)"; srun --dl-rank-map -n 6 {step}
echo "@ slurmdl 1"; slurmdl srun -n 6 {step}
echo "@ plugin 2"; eval "$(slurmdl srun --print-rank-map=shell --dl-strategy=gossip)"; srun --dl-rank-map {step}
echo "@ slurmdl 3"; slurmdl srun --dl-strategy=gossip {step}
unset SLURMDL_RANKMAP_NODES; eval "$(slurmdl srun --print-rank-map=shell -n 99 2>&-)"
echo "@ none"; srun --dl-rank-map {step} 2>&1
""", "-N4", "-n6", "--dl-ps=2"))
    compared = set(NAMES) - {"MASTER_PORT", "SLURMDL_EXPORTED"}
    for with_plugin, with_wrapper in (("plugin 0", "slurmdl 1"), ("plugin 2", "slurmdl 3")):
        for name in sorted(compared):
            assert column(outputs[with_plugin], name) == column(outputs[with_wrapper], name), name
        for title in (with_plugin, with_wrapper):
            assert len(set(column(outputs[title], "MASTER_PORT"))) == 1, "tasks of a step have different ports"
        assert {len(tasks(outputs[with_plugin])), len(tasks(outputs[with_wrapper]))} == {6}
        assert slurmdl_lines(outputs[with_plugin]) == []
    assert column(outputs["plugin 0"], "SLURMD_NODENAME") != PLAIN and "ps1" in roles(outputs["plugin 0"])
    assert set(column(outputs["plugin 2"], "SLURMDL_ROLE")) == {"worker"}
    assert column(outputs["none"], "SLURMD_NODENAME") == PLAIN and "no map" in slurmdl_lines(outputs["none"])[0]


#: kind of invalid rank map -> change to the script, expected part of the message
INVALID_MAPS = {
    "another job": ("SLURMDL_RANKMAP_JOB=99", "another job"),
    "no map": ("unset SLURMDL_RANKMAP_NODES", "no map"),
    "foreign host": ("SLURMDL_RANKMAP_NODES='n9(x2),n1,n4,n2(x2)'", "outside the job"),
    "host list": ("SLURMDL_RANKMAP_NODES='n[1-4],n1,n2'", "malformed"),
    "line end": ("SLURMDL_RANKMAP_NODES=\"n1\n/etc/passwd\"", "malformed"),
    "substitution": ("SLURMDL_RANKMAP_NODES='$(touch /tmp/executed)'", "malformed"),
    "too long": ("SLURMDL_RANKMAP_NODES=$(printf 'n1,%.0s' $(seq 30000))", "malformed"),
    "empty": ("SLURMDL_RANKMAP_NODES=", "malformed"),
}


def test_invalid_map_is_not_applied(plugged):
    lines = [f"echo '@ {title}'; ( {change}; srun --dl-rank-map sh -c '{TASK}' ) 2>&1"
             for title, (change, _) in INVALID_MAPS.items()]
    strict = [f"echo '@ {words}'; ( SLURMDL_RANKMAP_JOB=99; srun {words} sh -c '{TASK}'; echo status $? ) 2>&1"
              for words in ("--dl-strict --dl-rank-map", "--dl-rank-map --dl-strict")]
    outputs = sections(run(plugged, "\n".join([MAP, *lines, *strict]), "-N4", "-n6"))
    for title, (_, message) in INVALID_MAPS.items():
        assert column(outputs[title], "SLURMD_NODENAME") == PLAIN, title
        assert set(column(outputs[title], "MASTER_ADDR")) == {"-"}
        lines = slurmdl_lines(outputs[title])
        assert len(lines) == 1 and message in lines[0], (title, lines)
    for words in ("--dl-strict --dl-rank-map", "--dl-rank-map --dl-strict"):
        assert tasks(outputs[words]) == [] and "status 0" not in outputs[words] and "status " in outputs[words]
        assert "another job" in slurmdl_lines(outputs[words])[0]
    assert_nodes_are_up(plugged)


def test_mismatched_map_warns_once(plugged):
    outputs = sections(run(plugged, f"""{MAP}
echo "@ fewer"; srun --dl-rank-map -n5 sh -c '{TASK}' 2>&1
echo "@ nodelist"; srun --dl-rank-map -w n[1-4] sh -c '{TASK}' 2>&1
echo "@ more"; srun --dl-rank-map -O -n7 sh -c '{TASK}' 2>&1 || true
echo "@ servers"; SLURMDL_RANKMAP_ROLE_RANKS='ps:0,x;' srun --dl-rank-map sh -c '{TASK}' 2>&1
echo "@ zones"; SLURMDL_RANKMAP_ZONE_RANKS='zoneB:0-1;zoneA:2;zoneB:3-5' srun --dl-rank-map sh -c '{TASK}' 2>&1
echo "@ after"; {STEP}
""", "-N4", "-n6", "--dl-ps=1"))
    for title, message in (("fewer", "has 6 tasks, the step 5"), ("nodelist", "did not apply the map"),
                        ("servers", "ROLE_RANKS")):
        assert len(slurmdl_lines(outputs[title])) == 1 and message in slurmdl_lines(outputs[title])[0], outputs[title]
        assert set(column(outputs[title], "MASTER_ADDR")) == {"-"}
        assert roles(outputs[title])[:2] == ["ps0", "worker0"]
    assert slurmdl_lines(outputs["zones"]) == ["slurmdl: rank 0 is in core.zoneA, but in zone zoneB in the map"]
    assert set(column(outputs["zones"], "MASTER_ADDR")) == {"n3"}
    assert tasks(outputs["more"]) == [] and "Too few NodeNames" in outputs["more"]
    assert len(tasks(outputs["after"])) == 6


@contextlib.contextmanager
def hidden_plugin(cluster, host: str):
    cluster.root("mount", "-t", "tmpfs", "none", str(PLUGIN.parent), host=host)
    try:
        yield
    finally:
        cluster.root("umount", str(PLUGIN.parent), host=host)


def test_plugin_missing_on_a_node(plugged):
    with hidden_plugin(plugged, "n2"):
        text = run(plugged, f"{STEP}\n{MAP}\necho '@ mapped'\n"
                            f"srun --dl-rank-map -n6 --overcommit sh -c '{TASK}' 2>&1", "-N4", "--dl-ps=1")
    mapped = sections(text)["mapped"]
    assert column(text.replace(mapped, ""), "SLURMDL_ROLE") == ["ps", "-", "worker", "worker"]
    # srun applies the order; only the tasks on that node have no variables
    assert column(mapped, "SLURMD_NODENAME") == MAPPED and slurmdl_lines(mapped) == []
    assert column(mapped, "SLURMDL_ROLE") == ["ps", "worker", "worker", "ps", "-", "-"]
    assert_nodes_are_up(plugged)


def test_plugin_missing_on_the_login_node(plugged):
    with hidden_plugin(plugged, "login"):
        done = plugged.run(["sbatch", "-N4", "--dl-ps=1", "--wrap=true"])
        assert done.returncode != 0 and "unrecognized option" in done.stderr
        assert roles(run(plugged, STEP, "-N4")) == ["--"] * 4
        text = plugged.job_output("slurmdl srun sh -c 'echo $SLURMDL_ROLE'", "-N4", "--dl-ps=1")
        assert sorted(text.split()) == ["ps", "worker", "worker", "worker"]
        # sbatch would also reject the line, but without suggesting #DL
        done = plugged.run(["slurmdl", "sbatch", str(plugged.script("#SBATCH --dl-ps=1\ntrue"))])
        assert done.returncode == 64 and "#DL --dl-ps=1" in slurmdl_lines(done.stderr)[0]
    assert_nodes_are_up(plugged)


def test_hostile_node_names_and_unreadable_plugstack(plugged):
    hostile = ["n1,$(touch /tmp/executed)", "n[1-", "n[0-99999999]", "'; touch /tmp/executed #", "%s%n%s", "x" * 5000]
    lines = [f"export SLURM_JOB_NODELIST={shlex.quote(value)}; srun --dl-rank-map true 2>&1 || true"
             for value in hostile]
    lines += [f"export SLURM_TOPOLOGY_ADDR={shlex.quote(value)}; srun --dl-ps=1 true || true" for value in hostile]
    names = [f"export SLURMDL_RANKMAP_NODES={shlex.quote(value)}; srun --dl-rank-map true 2>&1" for value in hostile]
    text = run(plugged, "\n".join([MAP, *(f"( {line} )" for line in lines + names), "echo @ last", STEP]),
               "-N4", "-n6", "--dl-ps=1")
    assert roles(sections(text)["last"])[:2] == ["ps0", "worker0"] and len(tasks(text)) == 6
    assert_nothing_executed(plugged)

    waiting_job = plugged.submit(["sbatch", "-N4", "--dl-ps=1", f"--wrap=sleep 2; {STEP}"])
    plugged.root("chmod", "000", "/etc/slurm/plugstack.conf")
    rejected = plugged.run(["sbatch", "-N4", "--wrap=true"])
    plugged.root("chmod", "644", "/etc/slurm/plugstack.conf")
    assert rejected.returncode != 0 and "plugstack.conf" in rejected.stderr and rejected.stdout == ""
    # the running job and all nodes survive
    for job in (waiting_job, plugged.sbatch(STEP, "-N4", "--dl-ps=1", program="sbatch")):
        assert roles(plugged.output(job)) == ["ps0", "worker0", "worker1", "worker2"]
    assert_nodes_are_up(plugged)


@pytest.mark.parametrize("broken", ["another release", "no plugin"])
def test_plugin_that_slurm_cannot_load(new_cluster, plugin, broken):
    """Jobs run, because the plugin is `optional` in plugstack.conf."""
    directory = PLUGIN.parents[1] / f"spank-{os.getpid()}"
    directory.mkdir(exist_ok=True)
    path = directory / "slurmdl.so"
    try:
        data = bytearray(plugin.read_bytes())
        if broken == "another release":
            symbols = subprocess.run(["nm", "-D", plugin], capture_output=True, text=True, check=True).stdout
            symbol = next(line for line in symbols.splitlines() if line.endswith(" plugin_version"))
            offset = int(symbol.split()[0], 16)
            release = int.from_bytes(data[offset:offset + 4], "little")
            assert 22 <= release >> 16 < 40, "plugin_version is elsewhere in the file"
            data[offset:offset + 4] = (release + 0x20000).to_bytes(4, "little")
        path.write_bytes(b"no plugin" if broken == "no plugin" else bytes(data))
        cluster = new_cluster(nodes=2, plugstack=f"optional {path}\n")
        done = cluster.run(["srun", "-N2", "hostname"])
        assert sorted(done.stdout.split()) == ["n1", "n2"] and done.returncode == 0
        assert "slurmdl.so" in done.stderr
        cluster.output(cluster.submit(["sbatch", "-N2", "--wrap=srun -N2 true"]))
        assert_nodes_are_up(cluster)
    finally:
        path.unlink(missing_ok=True)
        directory.rmdir()


def test_hostile_job_name_and_huge_environment(plugged):
    name = "a'b\"c;$(touch /tmp/executed)`touch /tmp/executed`\nd"
    huge_environment = {"SLURMDL_RANKMAP_NODES": "n" * 120_000, "SLURMDL_ROLE_RANKS": "9" * 120_000,
                        "SLURMDL_EXPORTED": " RANK" * 20_000}
    text = plugged.job_output(STEP, "-N4", "-J", name, "--dl-ps=1", program="sbatch", env=huge_environment)
    assert roles(text) == ["ps0", "worker0", "worker1", "worker2"]
    assert_nothing_executed(plugged)
    assert_nodes_are_up(plugged)


#: a plugin of another project: an option with a value, and one without
OTHER_PLUGIN = """
#include <slurm/spank.h>
SPANK_PLUGIN(other, 1)
static int ignore(int value, const char *arg, int remote) { return 0; }
static struct spank_option image = {"container-image", "IMAGE", "start in a container", 1, 0, ignore};
static struct spank_option writable = {"container-writable", 0, "writable", 0, 0, ignore};
int slurm_spank_init(spank_t sp, int count, char **args)
{
	return spank_option_register(sp, &image) || spank_option_register(sp, &writable) ? -1 : 0;
}
"""


@pytest.fixture
def other_plugin(plugin) -> Path:
    source = plugin.with_name("other.c")
    source.write_text(OTHER_PLUGIN)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", source.with_suffix(".so"), source], check=True)
    return source.with_suffix(".so")


def test_options_of_another_plugin_keep_their_values(cluster_with, other_plugin):
    """Neither the record nor the list of excluded nodes separates an option from its value."""
    cluster = cluster_with(nodes=4, plugstack=f"optional {other_plugin}\n")
    config = cluster.directory("config")
    (config / "slurmdl").mkdir()
    (config / "slurmdl/slurmdl.yaml").write_text(f"bad_nodes: {{file: {config}/bad}}\n")
    (config / "bad").write_text("n1 no fan\n")
    script = cluster.script('echo "$1"; echo "$SLURMDL_SUBMISSION"')
    jobs = {}
    for options in ("--container-image ubuntu", "--container-image=ubuntu", "--container-writable",
                    "-x n2 --container-image ubuntu", "--container-writable --exclude n2 -Jx"):
        argv = ["slurmdl", "sbatch", "--export=PATH,A", "--dl-ps=1", *options.split(), "-N2", str(script), "--dl-ps"]
        jobs[options] = cluster.submit(argv, env={"XDG_CONFIG_HOME": str(config)})
    for options, job in jobs.items():
        argument, record = cluster.output(job).splitlines()
        assert (argument, '"ps":1' in record) == ("--dl-ps", True), options
        assert cluster.job(job)["ExcNodeList"] == ("n[1-2]" if "n2" in options else "n1"), options


@pytest.mark.parametrize("option", ["--container-image ubuntu", "--container-image=ubuntu --container-writable"])
def test_nodes_and_ranks_are_chosen_with_options_of_another_plugin(cluster_with, other_plugin, option):
    """A separate value is not taken for the script or the program."""
    cluster = cluster_with(nodes=4, plugstack=f"optional {other_plugin}\n")
    script = cluster.script(f"#SBATCH {option}\nslurmdl srun {option} sh -c 'echo rank $RANK $SLURMD_NODENAME'\n")
    dry_run = cluster.run(["slurmdl", "sbatch", "--dl-dry-run", *option.split(), "-N2", str(script)])
    assert "not understood" not in dry_run.stdout + dry_run.stderr, dry_run
    text = cluster.job_output(script, *option.split(), "-N4")
    assert rank_nodes(text) == ["n1", "n3", "n2", "n4"] and slurmdl_lines(text) == []
