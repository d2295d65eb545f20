"""Requeue of a job without bad nodes, and what later jobs leave out, on a real Slurm."""

from __future__ import annotations

import re

import pytest
from jobs import SOON, Health, slurmdl_messages, started_on, wait_until

from slurmdl.health.site_checks import parse_bad_nodes

#: job that calls slurmdl in its first start, and ends at once in its second
REQUEUES_ITSELF = """\
#SBATCH -N2 --requeue --open-mode=append
echo "start ${{SLURM_RESTART_COUNT-0}} on $SLURM_JOB_NODELIST" with "$(scontrol show hostnames | tr '\\n' ' ')"
[ "${{SLURM_RESTART_COUNT-0}}" = 0 ] || exit 0
{command}
echo "status $?"
sleep 60
"""
#: job that waits, for calls from outside
WAITS = "#SBATCH -N2 --requeue\nsleep 60\n"


@pytest.fixture
def health(cluster):
    return Health(cluster)


@pytest.fixture
def quick(cluster_with):
    """The same on four nodes, where requeued jobs start again after seconds."""
    return Health(cluster_with(nodes=4, slurm_conf_lines=SOON))


def test_requeued_job_starts_without_the_node(quick):
    job = quick.submit(REQUEUES_ITSELF.format(
        command='slurmdl requeue --exclude "$(scontrol show hostnames | tail -n 1)" --reason "bad cable"'))
    record = quick.cluster.wait(job, 90)
    text = quick.cluster.text_of(record)
    first, second = started_on(text, 0), started_on(text, 1)
    bad = record["ExcNodeList"]
    assert bad in first and bad not in second, text
    assert (record["JobState"], record["Restarts"]) == ("COMPLETED", "1")
    assert "status" not in text
    assert re.match(rf"{bad} of \S+: excluded for another 23 h 59 min; found .* ago by job {job}: bad cable\n",
                    quick.history())


def test_script_does_not_go_on_until_slurm_ends_it(quick):
    """Slurm terminates the processes of the job seconds after scontrol has returned."""
    shim = quick.cluster.script('#!/bin/sh\nPATH=${PATH#*:}\n[ "$1" = requeue ] || exec scontrol "$@"\n'
                          '(sleep 3; exec scontrol "$@") >/dev/null 2>&1 &\n', name="scontrol")
    job = quick.submit(REQUEUES_ITSELF.format(command=f"PATH={shim.parent}:$PATH slurmdl requeue"))
    record = quick.cluster.wait(job, 90)
    text = quick.cluster.text_of(record)
    assert started_on(text, 0) and started_on(text, 1) and record["Restarts"] == "1"
    assert f"job {job} is requeued\n" in text and "status" not in text, text


def test_requeue_killed_half_way_leaves_no_job_held(quick):
    """scontrol requeue succeeds, then slurmdl is killed before it excludes the node."""
    job = quick.start(WAITS)
    shim = quick.cluster.script('#!/bin/sh\nPATH=${PATH#*:}\nscontrol "$@"\n[ "$1" != requeue ] || kill -9 $PPID\n',
                          name="scontrol")
    killed = quick.cluster.run(["sh", "-c", f"PATH={shim.parent}:$PATH; slurmdl requeue --exclude n1 {job}"],
                         env=quick.env)
    assert killed.returncode in (-9, 137), killed
    record = quick.cluster.wait_for(job, {"RUNNING"}, 90)
    assert (record["Restarts"], record["ExcNodeList"]) == ("1", "(null)")
    assert "n1 of" in quick.history()


def test_pending_job_keeps_its_place(health):
    health.start("#SBATCH -N8 --exclusive\nsleep 60\n")
    job = health.submit(WAITS)
    wait_until(lambda: health.cluster.job(job)["AccrueTime"] != "Unknown", "the job does not age")
    before = health.cluster.job(job)
    assert before["JobState"] == "PENDING"
    result = health.run("requeue", "--exclude", "n[2-3]", str(job))
    after = health.cluster.job(job)
    assert result.stdout == (f"job {job} is pending already; it will start without n[2-3], and keeps its place in "
                             "the queue\n")
    assert after["ExcNodeList"] == "n[2-3]"
    for field in ("SubmitTime", "AccrueTime", "EligibleTime", "Restarts"):
        assert after[field] == before[field]
    # a second call adds to the list
    assert health.run("requeue", "--exclude", "n5", str(job)).returncode == 0
    assert health.cluster.job(job)["ExcNodeList"] == "n[2-3,5]"


@pytest.mark.parametrize(("options", "argv", "status", "message"), [
    ((), ["--exclude=n9"], 64, "node n9: unknown to Slurm; expected one of n[1-8]"),
    ((), ["--exclude=n["], 65, "hostlist 'n[': brackets must close"),
    ((), ["--exclude=n[1-7]"], 75, "job {job} needs 2 nodes; without n[1-7] partition main has 1 in service"),
    (("--no-requeue",), ["--exclude=n1"], 64, "job {job} may not be requeued; expected a submission with --requeue"),
    (("-w", "n1"), ["--exclude=n1"], 64, "job {job} requires node n1 (--nodelist)"),
], ids=["unknown", "malformed", "too-few", "no-requeue", "required"])
def test_refused_requeue_leaves_the_job_alone(health, options, argv, status, message):
    job = health.start(WAITS, *options)
    result = health.run("requeue", *argv, str(job))
    assert result.returncode == status
    [line] = slurmdl_messages(result.stderr)
    assert line.startswith(f"slurmdl: {message.format(job=job)}"), line
    record = health.cluster.job(job)
    assert (record["JobState"], record["Restarts"], record["ExcNodeList"]) == ("RUNNING", "0", "(null)")
    assert health.history() == "no node was excluded\n"


def test_fields_in_the_name_of_a_job_are_not_its_fields(health):
    """The name, comment and command of a job are its owner's text, with line breaks."""
    victim = health.start(WAITS)
    name = f"x UserId=root(0) JobState=PENDING NumNodes=9\nJobId={victim} JobName=y\n   Requeue=1 ExcNodeList=n[1-8]"
    job = health.start(WAITS, "--no-requeue")
    health.cluster.run(["scontrol", "update", f"JobId={job}", f"JobName={name}",
                        f"Comment={name}"]).check_returncode()
    result = health.cluster.run(["slurmdl", "requeue", str(job)],
                                env={**health.env, "SQUEUE_USERS": "root", "SQUEUE_STATES": "PD"})
    assert slurmdl_messages(result.stderr) == [
        f"slurmdl: job {job} may not be requeued; expected a submission with --requeue"]
    assert health.cluster.run(["squeue", "-h", "-j", str(victim), "-O", "State,RestartCnt"]).stdout.split() == [
        "RUNNING", "0"]


def test_jobs_that_cannot_be_requeued(health):
    for job, message in (("99999", "unknown to Slurm"), ("x", "unknown to Slurm")):
        result = health.run("requeue", job)
        assert result.returncode == 64 and message in result.stderr, result
    assert "no job; expected its ID" in health.run("requeue").stderr
    other = health.cluster.submit(["sbatch", str(health.cluster.script(WAITS))], as_root=True)
    health.cluster.wait_for(other, {"RUNNING"})
    result = health.run("requeue", "--exclude=n1", str(other))
    assert result.returncode == 69
    assert "ccess/permission denied" in result.stderr, result.stderr
    assert health.cluster.job(other)["Restarts"] == "0"


def test_job_requeues_itself_at_most_as_often_as_allowed(quick):
    """Two marks of earlier starts are the job's own, so that it reaches the limit of three at the second start."""
    script = "#SBATCH -N1 --requeue --open-mode=append\n" \
             "for i in a b; do install -D /dev/null $XDG_STATE_HOME/slurmdl/requeues/" \
             "$SLURM_CLUSTER_NAME-$SLURM_JOB_ID-$i; done\n" \
             "slurmdl requeue\necho status $?\n[ $? = 0 ] || sleep 60\n"
    record = quick.cluster.wait(quick.submit(script, program="slurmdl sbatch"), 120)
    text = quick.cluster.text_of(record)
    assert record["Restarts"] == "1"
    assert text.rstrip().endswith("has requeued itself 3 times, the limit\nstatus 78"), text


ARRAY = """\
#SBATCH -N1 -a 1-2 --requeue --open-mode=append
echo "start ${SLURM_RESTART_COUNT-0}" of task $SLURM_ARRAY_TASK_ID
[ "$SLURM_RESTART_COUNT" ] || [ "$SLURM_JOB_ID" != "$SLURM_ARRAY_JOB_ID" ] || slurmdl requeue
[ "$SLURM_RESTART_COUNT" ] || sleep 20
"""


@pytest.mark.nightly
def test_only_the_task_of_an_array_is_requeued(quick):
    """The task whose job ID is that of the array requeues itself."""
    job = quick.submit(ARRAY)
    quick.cluster.wait_for(job, {"COMPLETED"}, 90)
    lines = quick.cluster.run(["scontrol", "-o", "show", "job", str(job)]).stdout.splitlines()
    restarts = {re.search(r"JobId=(\d+)", line)[1]: re.search(r" Restarts=(\d)", line)[1] for line in lines}
    assert (restarts.pop(str(job)), list(restarts.values())) == ("1", ["0"]), lines


def test_new_jobs_leave_out_a_remembered_node(health):
    job = health.start(WAITS)
    assert health.run("requeue", "--exclude=n3", "--reason=bad cable", str(job)).returncode == 0

    def decision(*options: str) -> tuple[str, str]:
        result = health.run("sbatch", "--dl-dry-run", *options, "--wrap", "slurmdl srun true")
        assert result.returncode == 0
        return result.stdout.splitlines()[0], result.stderr

    command, message = decision("-N2")
    assert "--exclude=n3" in command
    assert re.search(r"slurmdl: left out: n3 \(bad cable, \d+ s ago\); `slurmdl preflight --forget NODES` ends that",
                     message)
    assert "'--exclude=n[3,5]'" in decision("-N2", "-x", "n5")[0]
    assert "--exclude=n3" in decision("-N2", "--dl-node-binding=off")[0]
    for options, reason in ((("-N8",), "it needs 8 nodes, and 7 others are in service"),
                            (("-N2", "--mem=900G"), "Slurm rejects it")):
        command, message = decision(*options)
        assert "--exclude" not in command and f"though bad: {reason}" in message
    assert "--exclude" not in decision("-w", "n3")[0]
    assert not any("n3" in text for text in decision("-N2", "-M", "other")), "a node of this cluster"
    new = health.submit("#SBATCH -N7\ntrue\n", program="slurmdl sbatch")
    assert health.cluster.wait(new)["ExcNodeList"] == "n3"
    file = health.cluster.directory("lists") / "bad_nodes"
    assert health.run("preflight", "--history", "--output", str(file)).returncode == 0
    assert list(parse_bad_nodes(file.read_text(), "f", pytest.fail)) == [("n3", "bad cable (f)")]
    assert health.run("preflight", "--forget", "n3").returncode == 0
    assert "--exclude" not in decision("-N2")[0]
    again = health.run("preflight", "--forget", "n3")
    assert again.returncode == 64 and "expected none: no node is excluded" in again.stderr


def test_damaged_list_does_not_cost_a_submission(health):
    path = health.state / "slurmdl/exclusions.jsonl"
    health.cluster.run(["sh", "-c", f"mkdir {path.parent}; head -c 3000 /dev/urandom > {path}"]).check_returncode()
    result = health.run("sbatch", "--wrap", "true")
    assert result.returncode == 0
    assert ": not an exclusion; expected a JSON object" in result.stderr
