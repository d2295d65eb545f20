"""`slurmdl sbatch` compared with plain sbatch on a real cluster."""

from __future__ import annotations

import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import in_containers
from jobs import MAPPED, occupy, rank_nodes, slow_links, slurmdl_messages, zone, zone_changes

SHOW = 'for i; do echo "arg <$i>"; done\necho "mark $SLURMDL_SUBMISSION"\n'


def normalize(text: str) -> str:
    """Replace job IDs and times, which differ between submissions."""
    text = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", "TIME", text)
    return re.sub(r"\b\d+\b", "N", text)


def slurm_lines(stderr: str) -> list[str]:
    """Return the lines of Slurm in an error output, normalized."""
    return [normalize(line) for line in stderr.splitlines() if not line.startswith("slurmdl:")]


FORMS = {
    "script": (["-N2", "{script}"], ""),
    "script arguments": (["-N2", "{script}", "--dl-x", "a b", "$(id)", "-N9"], ""),
    "wrap": (["-N2", "--wrap", "hostname"], ""),
    "standard input": (["-N2"], "#!/bin/sh\n#SBATCH -J from-stdin\nhostname\n"),
    "parsable": (["-N2", "--parsable", "{script}"], ""),
    "quiet": (["-N2", "-Q", "{script}"], ""),
    "quiet and parsable": (["-N2", "--quiet", "--parsable", "{script}"], ""),
    "wait": (["-N2", "--wait", "{script}"], ""),
    "wait, the job fails": (["-N2", "-W", "--wrap", "exit 7"], ""),
    "test only": (["-N2", "--test-only", "{script}"], ""),
    "hold": (["-N2", "--hold", "{script}"], ""),
    "dependency": (["-N2", "--dependency=singleton", "{script}"], ""),
    "unknown dependency": (["-N2", "--dependency=afterok:99999", "{script}"], ""),
    "array": (["-N2", "--array=0-2%2", "{script}"], ""),
    "het job": (["-N1", ":", "-N2", "{script}"], ""),
    "one node": (["--wrap", "hostname"], ""),
    "too many nodes": (["-N99", "{script}"], ""),
    "unknown partition": (["-pnone", "{script}"], ""),
    "unknown option": (["--no-such-option", "{script}"], ""),
    "no such script": (["-N2", "/no/such/script"], ""),
    "not a script": (["-N2", "/etc/hostname"], ""),
    "a bad count": (["-N", "x", "{script}"], ""),
    "no requeue": (["-N2", "--no-requeue", "{script}"], ""),
    "version": (["--version"], ""),
    "usage": (["--usage"], ""),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_behaves_as_sbatch(cluster, form):
    argv, stdin = FORMS[form]
    script = cluster.script(SHOW)
    args = [word.format(script=script) if word == "{script}" else word for word in argv]
    plain = cluster.run(["sbatch", *args], stdin=stdin, directory=script.parent)
    mapped = cluster.run(["slurmdl", "sbatch", *args], stdin=stdin, directory=script.parent)
    assert mapped.returncode == plain.returncode
    assert normalize(mapped.stdout) == normalize(plain.stdout)
    assert slurm_lines(mapped.stderr) == slurm_lines(plain.stderr)
    if {"-Q", "--quiet"} & set(args):
        assert not slurmdl_messages(mapped.stderr)


def test_dlsbatch_is_slurmdl_sbatch(cluster):
    script = cluster.script(SHOW)
    done = cluster.run(["dlsbatch", "--parsable", "-N2", str(script), "x  y"], directory=script.parent)
    assert done.returncode == 0
    assert "arg <x  y>" in cluster.output(int(done.stdout))


def test_script_runs_as_written(cluster):
    script = cluster.script("#SBATCH -J named\n#DL --dl-strategy=gossip\ncat $0; echo $SLURM_JOB_NAME; pwd\n")
    assert cluster.job_output(script, "-N2") == script.read_text() + f"named\n{script.parent}\n"


def test_ranks_of_a_zone_are_consecutive(cluster):
    nodes = rank_nodes(cluster.job_output(MAPPED, "-N6", "--ntasks-per-node=2"))
    assert len(nodes) == 12 and zone_changes(nodes) == 1


def test_zone_is_preferred_unless_slurm_would_choose_it(cluster):
    """Slurm itself chooses zoneB, which has fewer free nodes left; there the links are slow."""
    occupy(cluster, "n2")
    script = cluster.script(MAPPED)
    args = ["slurmdl", "sbatch", "-N3", slow_links(cluster, "n4", "n6", "n8")]
    assert "--prefer=zoneA" in cluster.run([*args, "--dl-dry-run", str(script)]).stdout
    assert {zone(node) for node in rank_nodes(cluster.job_output(script, *args[2:]))} == {"zoneA"}
    occupy(cluster, "n1", "n3")  # only zoneB has three free nodes
    assert "Slurm itself would choose n[4,6,8]" in cluster.run([*args, "--dl-dry-run", str(script)]).stdout


def test_preference_keeps_the_users_constraint(cluster_with):
    cluster = cluster_with(features={"": "any", "n2": "big", "n4": "big", "n1": "big"})
    assert sorted(rank_nodes(cluster.job_output(MAPPED, "-N2", "-C", "big"))) == ["n2", "n4"]


def test_full_zone_does_not_delay_the_start(cluster):
    """No zone has five free nodes: the job starts immediately in both zones, as with plain sbatch."""
    occupy(cluster, "n1", "n2", "n3")
    nodes = rank_nodes(cluster.job_output(MAPPED, "-N5", timeout=20))
    assert sorted(nodes) == ["n4", "n5", "n6", "n7", "n8"] and zone_changes(nodes) == 1


def test_job_without_free_nodes_waits_as_with_sbatch(cluster):
    first = cluster.submit(["sbatch", "-N8", "--exclusive", "--wrap", "sleep 1000"])
    job = cluster.sbatch(MAPPED, "-N4")
    assert cluster.job(job)["JobState"] == "PENDING"
    cluster.run(["scancel", str(first)])
    assert len(rank_nodes(cluster.output(job))) == 4


def test_drained_node_is_not_chosen(cluster):
    script = cluster.script(MAPPED)
    with cluster.drained("n2"):
        done = cluster.run(["slurmdl", "place", "--json", "-N4", str(script)])
        assert json.loads(done.stdout)["placement"]["nodes"] == ["n1", "n3", "n5", "n7"]
        assert sorted(rank_nodes(cluster.job_output(script, "-N4"))) == ["n1", "n3", "n5", "n7"]


def test_tasks_get_the_parameter_server_role(cluster):
    roles = [line.split()[3] for line in cluster.job_output("#DL --dl-strategy=ps --dl-ps=2\n" + MAPPED,
                                                            "-N6").splitlines()]
    assert sorted(roles) == ["ps"] * 2 + ["worker"] * 4


def test_command_line_has_precedence_in_the_job(cluster):
    output = cluster.job_output("#DL --dl-ps=1\n" + MAPPED, "--dl-strategy=ps", "-N4",
                                env={"SLURMDL_OPT_STRATEGY": "gossip"})
    assert output.count(" ps") == 1


def test_array_tasks_are_mapped_but_not_bound(cluster):
    script = cluster.script("echo task $SLURM_ARRAY_TASK_ID\n" + MAPPED)
    done = cluster.run(["slurmdl", "sbatch", "--parsable", "--array=1-2", "-N4", "-o", "task-%a.log", str(script)],
                       directory=script.parent)
    message, = slurmdl_messages(done.stderr)
    assert "array" in message
    assert cluster.job(f"{done.stdout.strip()}_1").get("ReqNodeList", "(null)") == "(null)"
    for task in (1, 2):
        cluster.wait(f"{done.stdout.strip()}_{task}")
        text = (script.parent / f"task-{task}.log").read_text()
        assert f"task {task}\n" in text and zone_changes(rank_nodes(text)) <= 1


def test_steps_of_other_array_tasks_do_not_count(cluster):
    """One task has the array's ID, which squeue takes for all tasks; its step may not share its nodes."""
    script = cluster.script("""
if [ $SLURM_JOB_ID = $SLURM_ARRAY_JOB_ID ]; then
    until [ -e started ]; do sleep 0.1; done
    slurmdl srun --exact -n 6 sh -c 'echo rank $SLURM_PROCID $SLURMD_NODENAME' > mapped 2>&1
    touch done
else
    srun sh -c 'touch started; until [ -e done ]; do sleep 0.1; done'
fi
""")
    job = cluster.sbatch(script, "--array=1-2", "-N4", "--exclusive", program="sbatch")
    for task in (1, 2):
        cluster.wait(f"{job}_{task}")
    text = (script.parent / "mapped").read_text()
    assert slurmdl_messages(text) == [] and len(rank_nodes(text)) == 6


def test_heterogeneous_job_passes_through(cluster):
    script = cluster.script("env | grep ^SLURM_JOB_NUM_NODES_HET\nsrun hostname\n")
    done = cluster.run(["slurmdl", "sbatch", "--parsable", "-N1", ":", "-N2", str(script)], directory=script.parent)
    assert done.returncode == 0
    assert sum("heterogeneous" in line for line in slurmdl_messages(done.stderr)) == 1


def test_record_reaches_the_script_of_a_heterogeneous_job_with_a_list_of_variables(cluster):
    show = 'echo "mark $SLURMDL_SUBMISSION" >log\n'
    directives = "#SBATCH -N1 --export=HOME\n#SBATCH hetjob\n#SBATCH -N1 --export=PATH\n"
    jobs = {}
    for args, text in ((["--export=HOME", "-N1", ":", "--export=PATH", "-N1"], show),
                       (["-N1", ":", "--export=PATH", "-N1"], show), ([], directives + show)):
        script = cluster.script(text)
        jobs[script.with_name("log")] = cluster.sbatch(script, "--dl-ps=1", *args)
    for log, job in jobs.items():
        assert cluster.wait(job)["JobState"] == "COMPLETED" and '"ps":1' in log.read_text()


@pytest.mark.parametrize("export", ["NONE", "NIL", "ALL", "HOME,PATH", "FOO=bar", "ALL,FOO=bar"])
def test_record_reaches_the_job_with_any_export(cluster, export):
    script = cluster.script("#DL --dl-strategy=ps --dl-ps=1\nPATH=$1:$PATH\nenv | grep -c ^FOO=\n" + MAPPED)
    path = cluster.run(["sh", "-c", "dirname $(command -v slurmdl)"]).stdout.strip()
    text = cluster.output(cluster.submit(["slurmdl", "sbatch", f"--export={export}", "-N4", str(script), path],
                                         directory=script.parent))
    assert text.splitlines()[0] == ("1" if "FOO" in export else "0")
    assert text.count(" ps") == 1


def test_job_without_path_gets_a_message_whose_advice_works(cluster, request):
    if in_containers(request.config):
        pytest.skip("slurmdl is in a directory of every PATH there")

    def submit(program: str, option: str, directive: str = "", **variables: str) -> tuple[int, list[str]]:
        script = cluster.script(f"{directive}{program} srun sh -c 'echo rank $SLURM_PROCID $SLURMD_NODENAME'\n")
        done = cluster.run(["slurmdl", "sbatch", "--parsable", "-N2", option, str(script)], env=variables,
                           directory=script.parent)
        assert done.returncode == 0, done.stderr
        return int(done.stdout or 0) if option != "--dl-dry-run" else 0, \
            [line for line in slurmdl_messages(done.stderr) if "PATH" in line]

    for option in ("--export=NONE", "--export=FOO=1,HOME"):
        job, messages = submit("slurmdl", option)
        message, = messages
        assert cluster.wait(job)["ExitCode"] == "127:0", "not found"
    assert submit("slurmdl", "--dl-dry-run", SBATCH_EXPORT="NONE")[1]
    assert submit("slurmdl", "--dl-dry-run", directive="#SBATCH --export=NONE\n")[1]
    assert not submit("slurmdl", "--dl-dry-run")[1]
    job, messages = submit(re.search(r"write (/\S+/slurmdl) in the script", message)[1], "--export=NONE")
    assert not messages and rank_nodes(cluster.output(job))
    job, messages = submit("slurmdl", "--export=PATH,FOO=1,HOME")
    assert not messages and rank_nodes(cluster.output(job))


def test_submission_inside_a_job_ignores_the_options_of_that_job(cluster):
    inner = cluster.script('echo "inner $SLURMDL_SUBMISSION"\nslurmdl srun sh -c \'echo role $SLURMDL_ROLE\'\n')
    outer = cluster.script(
        "#DL --dl-strategy=ps --dl-ps=1\n"
        f"slurmdl sbatch --wait -N2 -o inner.log {inner} & sbatch --wait -N2 -o plain.log {inner}; wait\n")
    cluster.job_output(outer, "-N2", "-s")
    for log in ("inner.log", "plain.log"):
        text = (outer.parent / log).read_text()
        assert text.count("role worker") == 2 and "role ps" not in text, text


@pytest.mark.parametrize("option", ["--dl-strategi=ps", "--dl-rank0=near", "--dl-ps=many", "--dl-nothing"])
def test_invalid_dl_option_submits_nothing(cluster, option):
    done = cluster.run(["slurmdl", "sbatch", option, "--wrap", "hostname"])
    assert done.returncode == 64
    assert done.stdout == ""
    assert len(slurmdl_messages(done.stderr)) == len(done.stderr.splitlines()) == 1
    assert option.split("=")[0] in done.stderr
    assert cluster.run(["squeue", "-h"]).stdout == ""


def test_stopped_controller_gives_the_errors_of_sbatch(new_cluster):
    cluster = new_cluster(nodes=2, slurm_conf_lines=("MessageTimeout=3",))
    script = cluster.script(SHOW)
    cluster.stop_daemon("login")
    with ThreadPoolExecutor() as pool:
        plain, mapped, strict = pool.map(lambda command: cluster.run([*command.split(), "-N2", str(script)]), (
            "sbatch", "slurmdl sbatch", "slurmdl sbatch --dl-strict"))
    assert (mapped.returncode, mapped.stdout) == (plain.returncode, plain.stdout)
    assert slurm_lines(mapped.stderr) == slurm_lines(plain.stderr)
    assert any("submitted as written" in line for line in slurmdl_messages(mapped.stderr))
    assert (strict.returncode, strict.stderr.count("\n")) == (69, 1)


def test_hanging_controller_delays_the_submission_by_five_seconds(cluster):
    script = cluster.script(SHOW)
    cluster.freeze_daemon("login", True)
    resume = threading.Timer(11, cluster.freeze_daemon, ("login", False))
    resume.start()
    try:
        done = cluster.run(["slurmdl", "sbatch", "--parsable", "-N2", str(script)], directory=script.parent)
    finally:
        resume.join()
    assert done.returncode == 0, done.stderr
    assert any("no answer within 5 s" in line for line in slurmdl_messages(done.stderr))
    assert "mark" in cluster.output(int(done.stdout))


@pytest.mark.parametrize("settings", [
    ("PrivateData=jobs,nodes,partitions,reservations,usage,users", "SchedulerParameters=disable_job_shrink"),
    ("TopologyPlugin=topology/none",),
])
def test_job_runs_with_restrictive_site_settings(cluster_with, settings):
    cluster = cluster_with(slurm_conf_lines=settings)
    assert len(rank_nodes(cluster.job_output(MAPPED, "-N4"))) == 4


def test_damaged_or_missing_topology_file_does_not_prevent_the_job(new_cluster):
    """Without the file, the login node queries the controller."""
    cluster = new_cluster()
    script = cluster.script(MAPPED)
    for damage, fact in (("echo 'SwitchName=x Nodez=n1' >> topology.conf", "topology.conf:4"),
                         ("rm topology.conf", "")):
        cluster.root("sh", "-c", f"cd /etc/slurm && {damage}")
        done = cluster.run(["slurmdl", "sbatch", "--parsable", "-N3", str(script)], directory=script.parent)
        assert done.returncode == 0
        assert [fact in line for line in slurmdl_messages(done.stderr)] == ([True] if fact else [])
        assert len(rank_nodes(cluster.output(int(done.stdout)))) == 3
        if fact:
            strict = cluster.run(["slurmdl", "sbatch", "--dl-strict", "-N3", str(script)])
            assert strict.returncode == 65 and strict.stderr.count("\n") == 1 and "Nodez" in strict.stderr


def test_place_makes_the_choice_of_sbatch(cluster):
    # without n2, zoneB has exactly three free nodes and is the best zone; ties would be broken at random
    script = cluster.script("#SBATCH -N3 -x n2\n" + MAPPED)
    output = json.loads(cluster.run(["slurmdl", "place", "--json", str(script)]).stdout)
    nodes = rank_nodes(cluster.job_output(script))
    assert {zone(node) for node in nodes} == set(output["placement"]["nodes_per_zone"])
    assert "zone" in cluster.run(["slurmdl", "place", "--explain", str(script)]).stdout


def test_predictions_state_their_assumptions(cluster):
    """place, sbatch and srun print the assumptions with the prediction; uplinks of a sandbox have 50 Mbit/s."""
    assumptions = "(model 400 MB, links 10 Gbit/s (default), uplinks 50 Mbit/s)"
    script = cluster.script("#SBATCH -N3 --ntasks-per-node=1\n#DL --dl-bytes=400M\n"
                            "slurmdl srun --dl-explain true")
    placed = cluster.run(["slurmdl", "place", str(script)]).stdout
    assert f"considered {assumptions}\n" in placed
    assert f"cost of one iteration on these nodes, by order of the ranks {assumptions}\n" in placed
    assert assumptions in cluster.run(["slurmdl", "sbatch", "--dl-dry-run", "--dl-explain", str(script)]).stderr
    output = cluster.job_output(script)
    cost = r"[0-9.]+ [kMG]?B across zones, 1.6 GB across nodes, [0-9.]+ m?s, busiest: "
    assert re.search(re.escape(f"an iteration of allreduce {assumptions}: ") + cost, output), output


def test_missing_sbatch_causes_one_message(cluster):
    slurmdl = cluster.run(["sh", "-c", "command -v slurmdl"]).stdout.strip()
    done = cluster.run(["env", "PATH=/nowhere", slurmdl, "sbatch", "--wrap", "x"])
    assert (done.returncode, done.stderr.count("\n")) == (69, 1) and "sbatch" in done.stderr


@pytest.mark.parametrize("text", [
    "plan_dir: 2024-13-01", "options: {zone: nowhere}", *(pytest.param(text, marks=pytest.mark.nightly) for text in (
        "[" * 2000, "link_defaults: {node_bandwidth: \0}"))])
def test_broken_configuration_does_not_prevent_the_job(cluster, text):
    script = cluster.script(f"#SBATCH -N2\n{MAPPED}")
    config = script.parent / "slurmdl"
    config.mkdir()
    (config / "slurmdl.yaml").write_text(text)
    done = cluster.run(["slurmdl", "sbatch", "--parsable", str(script)], directory=script.parent,
                       env={"XDG_CONFIG_HOME": str(script.parent)})
    assert done.returncode == 0, done.stderr
    [line] = slurmdl_messages(done.stderr)
    assert line.startswith("slurmdl: submitted as written: ") and "slurmdl.yaml" in line
    assert len(rank_nodes(cluster.output(int(done.stdout)))) == 2


def test_zone_list_longer_than_a_variable_is_submitted(cluster):
    zones = ",".join(["zoneA", "zoneB"] * 30_000)
    text = cluster.job_output(f"#SBATCH -N2\n#DL --dl-strategy=ps --dl-zone={zones}\n{MAPPED}")
    assert len(rank_nodes(text)) == 2 and " ps" in text, text


def test_directives_beyond_the_read_limit_are_ignored(cluster):
    script = cluster.script("#SBATCH -N2\n" + "#DL --dl-ps=1\n" * 80_000 + MAPPED)
    done = cluster.run(["slurmdl", "sbatch", "--parsable", str(script)], directory=script.parent)
    assert done.returncode == 0, done.stderr
    [line] = slurmdl_messages(done.stderr)
    assert "beyond 1048576 bytes" in line
    assert len(rank_nodes(cluster.output(int(done.stdout)))) == 2


def environ_with_module(cluster, name: str, text: str) -> dict[str, str]:
    """Return variables with which Python finds a module in front of all others."""
    directory = cluster.directory("modules")
    (directory / f"{name}.py").write_text(text)
    return {"PYTHONPATH": os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])}


@pytest.mark.parametrize(("limit", "numpy", "reason"), [
    ("ulimit -v 90000", "", "ended with status 1"),  # OpenBLAS ends the process
    ("ulimit -v 45000", "", "failed to map segment from shared object|MemoryError"),
    ("true", "import os\nos.kill(os.getpid(), 9)\n", "ended by signal 9"),
    ("true", "import os\nos.abort()\n", "ended by signal 6"),
], ids=["openblas", "memory", "kill", "abort"])
def test_end_of_the_deciding_process_prevents_neither_job_nor_step(cluster, limit, numpy, reason, request):
    if limit != "true" and in_containers(request.config):
        pytest.skip("other versions of the libraries need another amount of memory")
    env = environ_with_module(cluster, "numpy", numpy) if numpy else {}
    script = cluster.script(f"echo \"mark $SLURMDL_SUBMISSION <$OPENBLAS_NUM_THREADS>\"\n{limit}\n"
                            "slurmdl srun -n2 sh -c 'ulimit -v unlimited; echo step $SLURM_PROCID'\n")
    options = "--propagate=NONE --parsable -N2 --dl-ps=1"
    done = cluster.run(["sh", "-c", f"{limit}; exec slurmdl sbatch {options} {script}"],
                       env={**env, "OPENBLAS_NUM_THREADS": "3"}, directory=script.parent)
    assert done.returncode == 0, done.stderr
    message, = slurmdl_messages(done.stderr)
    assert message.startswith("slurmdl: submitted as written: ") and re.search(reason, message) and len(message) < 250
    output = cluster.output(int(done.stdout))
    assert '"ps":1' in output and "<3>" in output, "the job has the options and variables of the user"
    assert {"step 0", "step 1"} <= set(output.splitlines())
    message, = slurmdl_messages(output)
    assert re.search(reason, message) and message.endswith("; the step runs in srun's own order")
    strict = cluster.run(["sh", "-c", f"{limit}; exec slurmdl sbatch --dl-strict -N2 {script}"], env=env)
    assert strict.returncode and not strict.stdout


@pytest.mark.parametrize(("signal", "to", "status"), [
    ("INT", "$pid", 130), ("INT", "-$pid", 130), ("TERM", "$pid", 143), ("TERM", "-$pid", 143), ("HUP", "$pid", 129)])
def test_signal_to_a_submission_stops_both_processes(cluster, signal, to, status):
    env = environ_with_module(cluster, "numpy", "import os, time\nopen('decider', 'w').write(str(os.getpid()))\n"
                                                "time.sleep(20)\n")
    script = cluster.script("true")
    done = cluster.run(["bash", "-c", "setsid env --default-signal=INT,HUP slurmdl sbatch -N2 job.sh & pid=$!\n"
                                    f"until [ -s decider ]; do sleep 0.05; done\nkill -{signal} {to}\n"
                                    "wait $pid\necho status $?\n"
                                    "while kill -0 $(cat decider) 2>/dev/null; do sleep 0.05; done\n"],
                       env=env, directory=script.parent)
    assert done.stdout == f"status {status}\n" and not slurmdl_messages(done.stderr)
    assert not cluster.run(["squeue", "-h"]).stdout
