"""Node binding on a real cluster: it never delays the start of a job, despite races, lost nodes and requeues."""

from __future__ import annotations

import re

import pytest
from jobs import (
    DEFAULT_DELAY,
    MAPPED,
    NIGHTLY,
    SOON,
    occupy,
    rank_nodes,
    read_log,
    slow_links,
    slurm_release,
    slurmdl_messages,
    wait_until,
    zone,
)

from slurmdl.slurm.hostlist import expand_hostlist


def racing_submission(cluster, nodes: str, script, *args: str) -> list[str]:
    """Return a command that submits a script, and a job on `nodes` between the choice and the submission."""
    other_script = cluster.script("exec sleep 120\n")
    fake = cluster.script(
        'case "$1" in --test-only) exec /usr/bin/sbatch "$@" ;; esac\n'
        f"other=$(/usr/bin/sbatch --parsable --exclusive -w {nodes} -o /dev/null {other_script})\n"
        "until scontrol show job $other | grep -q JobState=RUNNING; do sleep 0.1; done\n"
        'exec /usr/bin/sbatch "$@"\n', "sbatch")
    return ["sh", "-c", 'PATH=$1:$PATH; shift; exec slurmdl sbatch --parsable "$@"', "sh", str(fake.parent), *args,
            str(script)]


def bound_nodes(cluster, job: int) -> list[str]:
    """Return the node list that a job is bound to."""
    return expand_hostlist(cluster.job(job)["ReqNodeList"].replace("(null)", ""))


def dry_run_command(cluster, *args: str) -> str:
    """Return the command line in the output of a dry run."""
    script = cluster.script(MAPPED)
    done = cluster.run(["slurmdl", "sbatch", "--dl-dry-run", *args, str(script)])
    return next(line for line in done.stdout.splitlines() if line.startswith("command:"))


def zones_of(text: str) -> set[str]:
    return {zone(node) for node in rank_nodes(text)}


def test_nodelist_is_bound_without_features_and_requeue(cluster_with):
    cluster = cluster_with(zone_features=False)
    occupy(cluster, "n2", "n4")
    requeued = cluster.sbatch(MAPPED, "-N3")
    assert cluster.job(requeued)["ReqNodeList"] == "(null)"
    cluster.wait(requeued)
    pinned = cluster.sbatch(MAPPED, "--no-requeue", "-N3", slow_links(cluster, "n1"))
    assert cluster.job(pinned)["ReqNodeList"] != "(null)"
    assert zones_of(cluster.output(pinned)) == {"zoneA"}


def test_missing_zone_features_are_said_once(cluster_with):
    cluster = cluster_with(zone_features=False)
    script, state = cluster.script("true\n"), cluster.directory("state")
    submit = f"slurmdl sbatch -N3 -o /dev/null {script} >&2"

    def times_said(command: str, directory: str = str(state)) -> int:
        done = cluster.run(["sh", "-c", command], env={"XDG_STATE_HOME": directory})
        assert done.returncode == 0 and "Submitted batch job" in done.stderr, done.stderr
        return done.stderr.count("slurmdl topology features")

    assert times_said(submit.replace("-N3", "-N3 --no-requeue")) == 0
    assert 1 <= times_said(f"for i in 1 2 3; do {submit} & done; wait") <= 3
    assert times_said(submit) == 0
    assert times_said(submit, "/dev/null/state") == 1


def test_bound_job_keeps_its_nodes_until_the_scheduling_pass(cluster_with):
    """With the default delay of the scheduler, the job is still pending when sbatch returns, and keeps its nodes."""
    cluster = cluster_with(zone_features=False, slurm_conf_lines=DEFAULT_DELAY)
    occupy(cluster, "n2", "n4")
    for _ in range(3 if NIGHTLY else 1):
        job = cluster.sbatch(MAPPED, "--no-requeue", "-N3", slow_links(cluster, "n1"))
        assert cluster.job(job)["ReqNodeList"] != "(null)"
        assert zones_of(cluster.output(job)) == {"zoneA"}


@pytest.mark.parametrize("features", [False, True])
def test_lost_race_does_not_delay_the_start(cluster_with, features):
    """Another job takes nodes of the chosen zone before the submission: the job starts on different nodes."""
    cluster = cluster_with(zone_features=features, slurm_conf_lines=DEFAULT_DELAY)
    occupy(cluster, "n2", "n4")
    script = cluster.script(MAPPED)
    args = racing_submission(cluster, "n1,n3", script, "--no-requeue", "-N3", slow_links(cluster, "n1"))
    done = cluster.run(args, directory=script.parent)
    assert done.returncode == 0, done.stderr
    job = int(done.stdout.split()[-1])
    record = cluster.job(job)
    # the binding is reverted before sbatch returns
    assert record["ReqNodeList"] == "(null)"
    assert record.get("Prefer", "(null)") in ("(null)", "")
    assert set(rank_nodes(cluster.output(job))) < {"n5", "n6", "n7", "n8"}


def test_other_job_ids_on_stdout_are_ignored(cluster):
    """A site's sbatch prints another job ID of the user before and after Slurm's line."""
    held_job = cluster.submit(["sbatch", "--hold", "--prefer=zoneB", "-N2", "-o", "/dev/null", "--wrap", "true"])
    fake = cluster.script(f'echo "Quota: {held_job} jobs pending"\n'
                          f'/usr/bin/sbatch "$@" || exit\necho "{held_job} jobs"\n', "sbatch")
    script = cluster.script(MAPPED)
    for args, job_id_line in (["-N3"], r"Submitted batch job \d+"), (["-N3", "--parsable"], r"\d+"):
        done = cluster.run(["sh", "-c", f'PATH={fake.parent}:$PATH; exec slurmdl sbatch "$@"', "sh", *args,
                            str(script)], directory=script.parent)
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(rf"Quota: {held_job} jobs pending\n{job_id_line}\n{held_job} jobs\n", done.stdout)
        assert slurmdl_messages(done.stderr) == []
    # the background processes that revert bindings have ended
    wait_until(lambda: cluster.run(["pgrep", "-f", 'sleep "[$]0"']).returncode, "a process reverts a binding")
    assert cluster.job(held_job)["Prefer"] == "zoneB"


def test_node_lost_after_the_submission_does_not_delay_the_start(new_cluster):
    """A node is drained before the scheduling pass, which comes later than by default."""
    cluster = new_cluster(zone_features=False, slurm_conf_lines=("SchedulerParameters=batch_sched_delay=8",))
    cluster.wait(cluster.submit(["sbatch", "-o", "/dev/null", "--wrap", "true"]))  # a scheduling pass has just ended
    job = cluster.sbatch(MAPPED, "--no-requeue", "-N3", slow_links(cluster, "n1"))
    lost_node = bound_nodes(cluster, job)[1]
    cluster.root("scontrol", "update", f"NodeName={lost_node}", "State=DRAIN", "Reason=test")
    assert lost_node not in rank_nodes(cluster.output(job))


def test_nodelist_binding_waits_for_its_nodes(cluster):
    occupy(cluster, "n2", "n4")
    script = cluster.script(MAPPED)
    submission = racing_submission(cluster, "n1,n3", script, "--dl-node-binding=nodelist", "-N3")
    job = int(cluster.run(submission, directory=script.parent).stdout.split()[-1])
    bound = bound_nodes(cluster, job)
    assert set(bound) & {"n1", "n3"}
    assert cluster.job(job)["JobState"] == "PENDING"
    cluster.run(["scancel", "--state=RUNNING", f"--user={cluster.user}"])
    assert sorted(rank_nodes(cluster.output(job))) == bound


@pytest.mark.parametrize(("features", "option"), [(False, "--switches=1"), (True, "--constraint=zoneB")])
def test_zone_binding_keeps_the_job_in_the_zone(cluster_with, features, option):
    cluster = cluster_with(zone_features=features)
    occupy(cluster, "n1", "n3")
    assert option in dry_run_command(cluster, "--dl-node-binding=zone", "-N3")
    assert zones_of(cluster.job_output(MAPPED, "--dl-node-binding=zone", "-N3")) == {"zoneB"}


@pytest.mark.parametrize("features", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_named_zone_is_a_limit(cluster_with, features):
    """Jobs and array tasks wait for zoneA, although zoneB has enough free nodes."""
    cluster = cluster_with(zone_features=features, features={"": "any", "n8": "rare"})
    occupy(cluster, "n1", "n3")
    script = cluster.script(MAPPED)
    submitted = [cluster.run(["slurmdl", "sbatch", "--parsable", "--dl-zone=zoneA", "-N3", "-o", "job-%j-%a.log",
                              *args, str(script)], directory=script.parent)
                 for args in ((), ("--array=1",), ("--no-requeue", "-C", "any"), ("-C", "[any|rare]", "-x", "n8"))]
    for done in submitted:
        assert done.returncode == 0, done.stderr
        assert len([line for line in slurmdl_messages(done.stderr) if "this is said once" not in line]) <= 1
        record = cluster.job(done.stdout.strip())
        assert record["JobState"] == "PENDING"
        assert set(expand_hostlist(record["ExcNodeList"])) == {"n2", "n4", "n6", "n8"}
    assert cluster.job(submitted[2].stdout.strip())["Features"] == "any"
    cluster.run(["scancel", "--state=RUNNING", f"--user={cluster.user}"])
    for done in submitted:
        assert cluster.wait(done.stdout.strip())["JobState"] == "COMPLETED"
    for log in script.parent.glob("job-*.log"):
        assert zones_of(log.read_text()) == {"zoneA"}, log
    assert len(list(script.parent.glob("job-*.log"))) == len(submitted)


def test_named_zone_is_not_applied_with_a_nodelist(cluster):
    """The user's node list has precedence, with a warning; with --dl-strict nothing is submitted."""
    script = cluster.script(MAPPED)
    args = ["--dl-zone=zoneA", "-w", "n2", "-N1", str(script)]
    done = cluster.run(["slurmdl", "sbatch", "--parsable", *args], directory=script.parent)
    assert slurmdl_messages(done.stderr) == [
        "slurmdl: submitted as written: --dl-zone=zoneA is not applied: -w is given"]
    assert rank_nodes(cluster.output(int(done.stdout))) == ["n2"]
    strict = cluster.run(["slurmdl", "sbatch", "--dl-strict", *args])
    assert (strict.returncode, strict.stdout) == (75, "")


def test_binding_off_adds_no_options(cluster):
    assert dry_run_command(cluster, "--dl-node-binding=off", "-N3").split()[1:3] == ["/usr/bin/sbatch", "-N3"]
    assert "--" not in dry_run_command(cluster, "--dl-node-binding=off", "-N3")


@pytest.mark.parametrize(("args", "binding"), [
    pytest.param(args, binding, marks=() if binding == "auto" or args == ["-N2-3"] else pytest.mark.nightly)
    for binding in ("auto", "nodelist", "late")
    for args in (["-n4"], ["-N2-3"], ["-N2-"], ["-N2", "--array=1-2"], ["-N1", ":", "-N1"])])
def test_uncertain_node_counts_are_not_bound(cluster, args, binding):
    line = dry_run_command(cluster, f"--dl-node-binding={binding}", "--no-requeue", *args)
    assert not [option for option in ("--nodelist", "--prefer", "--nodes") if option in line]


PRINT_RANKS = "slurmdl srun sh -c 'echo rank $SLURM_PROCID $SLURMD_NODENAME n $SLURM_NTASKS'\n"
WAIT_AND_PRINT_NODES = 'while [ ! -e go ]; do sleep 0.1; done\n' \
                       'slurmdl srun sh -c \'echo again $SLURMD_NODENAME\' | sort\n'


@pytest.mark.parametrize(("args", "tasks"), [
    (["-N3"], 3), (["-N3", "-n5"], 5), *(pytest.param(args, tasks, marks=pytest.mark.nightly) for args, tasks in (
        (["-N3", "-n3"], 3), (["-N3", "--ntasks-per-node=2"], 6)))])
def test_late_binding_releases_the_worst_node(cluster, args, tasks):
    """n3 has a slow link and is released; each step has the requested number of tasks."""
    script = cluster.script(PRINT_RANKS + WAIT_AND_PRINT_NODES)
    done = cluster.run(["slurmdl", "sbatch", "--parsable", "--dl-node-binding=late", slow_links(cluster, "n3"),
                        *args, "-o", "log", str(script)], directory=script.parent)
    assert done.stderr == ""
    job, log = int(done.stdout), script.parent / "log"
    wait_until(lambda: read_log(log).count("rank ") >= tasks, lambda: read_log(log) or cluster.job(job))
    kept = expand_hostlist(cluster.job(job)["NodeList"])
    # for 5 tasks Slurm 24.11 allocates 5 CPUs on 4 nodes of 2 CPUs; no 3 of them have 5 allocated CPUs
    has_shortfall = tasks % 3 > 0 and slurm_release(cluster) == (24, 11)
    assert has_shortfall == ("5 tasks do not fit" in log.read_text())
    assert len(kept) == 4 if has_shortfall else kept == ["n1", "n5", "n7"]
    (script.parent / "go").touch()
    text = cluster.output(job)
    assert len(rank_nodes(text)) == tasks and set(rank_nodes(text)) == set(kept)
    assert {line.split()[-1] for line in text.splitlines() if line.startswith("rank ")} == {str(tasks)}
    assert sorted({line.split()[1] for line in text.splitlines() if line.startswith("again ")}) == kept
    assert "resize" not in text and ("slurmdl:" in text) == has_shortfall


def test_late_binding_does_not_delay_the_start(cluster):
    """Only the requested number of nodes is free: the job starts on them."""
    occupy(cluster, "n2", "n4", "n6", "n7", "n8")
    assert sorted(rank_nodes(cluster.job_output(MAPPED, "--dl-node-binding=late", "-N3"))) == ["n1", "n3", "n5"]


@pytest.mark.parametrize(("settings", "preamble"), [
    (("SchedulerParameters=disable_job_shrink",), ""),
    ((), "srun -N1 -n1 --overlap sleep 20 &\nsleep 1\n"),
])
def test_late_bound_job_that_cannot_shrink_keeps_its_nodes(cluster_with, settings, preamble):
    """The site disables shrinking, or another step runs: the job keeps all nodes; steps run on the best nodes."""
    text = cluster_with(slurm_conf_lines=settings).job_output(
        preamble + MAPPED + "scontrol show job $SLURM_JOB_ID | grep NumNodes\nkill %1 2>/dev/null; exit 0\n",
        "--dl-node-binding=late", "-N3")
    assert sorted(rank_nodes(text)) == ["n1", "n3", "n5"]
    assert "NumNodes=4" in text
    (line,) = slurmdl_messages(text)
    assert "keeps its 4 nodes" in line


@pytest.mark.nightly
@pytest.mark.parametrize("binding", ["auto", "late"])
def test_requeued_job_avoids_the_dead_node(new_cluster, binding):
    cluster = new_cluster(slurm_conf_lines=SOON)
    script = cluster.script("echo run $SLURM_RESTART_COUNT\n" + MAPPED + '[ "$SLURM_RESTART_COUNT" ] || sleep 300\n')
    job = cluster.sbatch(script, f"--dl-node-binding={binding}", "--open-mode=append", "--requeue", "-N3", "-olog")
    log = script.parent / "log"
    wait_until(lambda: read_log(log).count("rank ") >= 3, "the job does not start")
    dead_node = rank_nodes(log.read_text())[1]
    cluster.power_off(dead_node)
    cluster.root("scontrol", "update", f"NodeName={dead_node}", "State=DOWN", "Reason=died")
    assert cluster.wait(job, timeout=120)["JobState"] == "COMPLETED"
    restarted = rank_nodes(log.read_text().split("run 1\n")[1])
    assert dead_node not in restarted and len(restarted) == 3


def test_powered_down_nodes_are_not_chosen_while_others_are_up(new_cluster):
    """Zone A has the faster links, but is powered down: zone B starts the job at once, by Slurm's own choice."""
    cluster = new_cluster(slurm_conf_lines=("SuspendProgram=/bin/true", "ResumeProgram=/bin/true",
                                            "SuspendTime=100000", "SuspendTimeout=1"))
    cluster.root("scontrol", "update", "NodeName=n[1,3,5,7]", "State=POWER_DOWN")
    wait_until(lambda: cluster.run(["sinfo", "-h", "-N", "-o", "%T"]).stdout.split().count("idle~") >= 4, "no idle~")
    # --test-only knows which nodes are up since the last job
    cluster.wait(cluster.submit(["sbatch", "-o", "/dev/null", "--wrap", "true"]))
    assert "zoneA" not in dry_run_command(cluster, "-N3", slow_links(cluster, "n2", "n4"))


#: pairs of ranks with heavy traffic: two nodes of each zone are better than three and one
PAIRS = ("-N4", "--dl-mesh=dp=2,tp=2")


def test_preference_gives_the_promised_numbers_of_nodes_per_zone(cluster):
    occupy(cluster, "n1", "n2")
    script = cluster.script(MAPPED)
    done = cluster.run(["slurmdl", "sbatch", "--parsable", "--dl-explain", *PAIRS, str(script)],
                       directory=script.parent)
    assert "--prefer=[zoneA*2&zoneB*2]: " in done.stderr or "--prefer=[zoneB*2&zoneA*2]: " in done.stderr
    output = cluster.output(int(done.stdout))
    assert sorted(zone(node) for node in rank_nodes(output)) == ["zoneA", "zoneA", "zoneB", "zoneB"]
    assert "promised" not in output


def test_nodes_worse_than_promised_are_reported_by_the_step(cluster_with):
    """Another job takes nodes between the choice and the submission."""
    cluster = cluster_with(slurm_conf_lines=DEFAULT_DELAY)
    occupy(cluster, "n1", "n2")
    script = cluster.script(MAPPED)
    done = cluster.run(racing_submission(cluster, "n3,n5", script, *PAIRS), directory=script.parent)
    output = cluster.output(int(done.stdout.split()[-1]))
    (line,) = slurmdl_messages(output)
    assert re.fullmatch("slurmdl: Slurm gave the job other nodes than the submission promised: zoneB x3 [+] zoneA x1 "
                        r"instead of zone. x2 [+] zone. x2, \d+\.\d\d times the promised time", line)
