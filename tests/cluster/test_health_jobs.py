"""Bad nodes on a real Slurm: the preflight, the requeue without a node, and what later jobs leave out."""

from __future__ import annotations

import json
import re
import time

import pytest
from conftest import Cluster
from jobs import slurmdl_messages, wait_for_pattern

from slurmdl.health.site_verdicts import parse_bad_nodes
from slurmdl.sandbox import namespaces
from slurmdl.slurm import hostlist

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
#: Slurm starts a requeued job again after 6 s instead of 121 s
SOON = ("AuthInfo=cred_expire=5",)


class Health:
    """A user's calls, with a list of exclusions of their own."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.state = cluster, cluster.directory("state")
        self.env = {"XDG_STATE_HOME": str(self.state)}

    def run(self, *argv: str):
        return self.cluster.run(["slurmdl", *argv], env=self.env)

    def submit(self, script: str, *options: str, name: str = "sbatch") -> int:
        argv = ["slurmdl", "sbatch"] if name == "slurmdl" else ["sbatch"]
        path = self.cluster.script(script)
        return self.cluster.submit([*argv, *options, str(path)], env=self.env, directory=path.parent)

    def history(self) -> str:
        return self.run("preflight", "--history").stdout


@pytest.fixture
def health(cluster):
    return Health(cluster)


def started_on(text: str, restart: int) -> set[str]:
    match = re.search(rf"start {restart} on \S+ with (.*)", text)
    assert match, text
    return set(match[1].split())


def test_requeued_job_starts_without_the_node(new_cluster):
    cluster = new_cluster(nodes=4, slurm_conf_lines=SOON)
    health = Health(cluster)
    job = health.submit(REQUEUES_ITSELF.format(
        command='slurmdl requeue --exclude "$(scontrol show hostnames | tail -n 1)" --reason "bad cable"'))
    record = cluster.wait(job, 90)
    text = cluster.run(["cat", record["StdOut"]]).stdout
    first, second = started_on(text, 0), started_on(text, 1)
    bad = record["ExcNodeList"]
    assert bad in first and bad not in second, text
    assert (record["JobState"], record["Restarts"]) == ("COMPLETED", "1")
    assert "status" not in text
    assert re.match(rf"{bad} of \S+: excluded for another 23 h 59 min; found .* ago by job {job}: bad cable\n",
                    health.history())


def test_script_does_not_go_on_until_slurm_ends_it(new_cluster):
    """Slurm terminates the processes of the job seconds after scontrol has returned."""
    cluster = new_cluster(nodes=4, slurm_conf_lines=SOON)
    health = Health(cluster)
    shim = cluster.script('#!/bin/sh\nPATH=${PATH#*:}\n[ "$1" = requeue ] || exec scontrol "$@"\n'
                          '(sleep 3; exec scontrol "$@") >/dev/null 2>&1 &\n', name="scontrol")
    job = health.submit(REQUEUES_ITSELF.format(command=f"PATH={shim.parent}:$PATH slurmdl requeue"))
    record = cluster.wait(job, 90)
    text = cluster.run(["cat", record["StdOut"]]).stdout
    assert started_on(text, 0) and started_on(text, 1) and record["Restarts"] == "1"
    assert f"job {job} is requeued\n" in text and "status" not in text, text


def test_requeue_killed_half_way_leaves_no_job_held(new_cluster):
    """scontrol requeue succeeds, then slurmdl is killed before it excludes the node."""
    cluster = new_cluster(nodes=4, slurm_conf_lines=SOON)
    health = Health(cluster)
    job = health.submit(WAITS)
    cluster.wait_for(job, {"RUNNING"})
    shim = cluster.script('#!/bin/sh\nPATH=${PATH#*:}\nscontrol "$@"\n[ "$1" != requeue ] || kill -9 $PPID\n',
                          name="scontrol")
    killed = cluster.run(["sh", "-c", f"PATH={shim.parent}:$PATH; slurmdl requeue --exclude n1 {job}"],
                         env=health.env)
    assert killed.returncode in (-9, 137), killed
    record = cluster.wait_for(job, {"RUNNING"}, 90)
    assert (record["Restarts"], record["ExcNodeList"]) == ("1", "(null)")
    assert "n1 of" in health.history()


def test_pending_job_keeps_its_place(health):
    blocker = health.submit("#SBATCH -N8 --exclusive\nsleep 60\n")
    health.cluster.wait_for(blocker, {"RUNNING"})
    job = health.submit(WAITS)
    deadline = time.monotonic() + 30
    while (before := health.cluster.job(job))["AccrueTime"] == "Unknown":
        assert time.monotonic() < deadline
        time.sleep(0.2)
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
    job = health.submit(WAITS, *options)
    health.cluster.wait_for(job, {"RUNNING"})
    result = health.run("requeue", *argv, str(job))
    assert result.returncode == status
    [line] = slurmdl_messages(result.stderr)
    assert line.startswith(f"slurmdl: {message.format(job=job)}"), line
    record = health.cluster.job(job)
    assert (record["JobState"], record["Restarts"], record["ExcNodeList"]) == ("RUNNING", "0", "(null)")
    assert health.history() == "no node was excluded\n"


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


def test_job_requeues_itself_at_most_as_often_as_allowed(new_cluster):
    cluster = new_cluster(nodes=4, slurm_conf_lines=SOON)
    health = Health(cluster)
    script = "#SBATCH -N1 --requeue --open-mode=append\n#DL --dl-max-requeues=1\nslurmdl requeue\necho status $?\n" \
             "[ $? = 0 ] || sleep 60\n"
    record = cluster.wait(health.submit(script, name="slurmdl"), 90)
    text = cluster.run(["cat", record["StdOut"]]).stdout
    assert record["Restarts"] == "1"
    assert text.rstrip().endswith("status 78"), text


def test_new_jobs_leave_out_a_remembered_node(health):
    job = health.submit(WAITS)
    health.cluster.wait_for(job, {"RUNNING"})
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
    new = health.submit("#SBATCH -N7\ntrue\n", name="slurmdl")
    assert health.cluster.wait(new)["ExcNodeList"] == "n3"
    file = health.cluster.directory("lists") / "bad_nodes"
    assert health.run("preflight", "--history", "--output", str(file)).returncode == 0
    assert list(parse_bad_nodes(file.read_text(), "f", pytest.fail)) == [("n3", "bad cable (f)")]
    assert health.run("preflight", "--forget", "n3").returncode == 0
    assert "--exclude" not in decision("-N2")[0]
    again = health.run("preflight", "--forget", "n3")
    assert again.returncode == 64 and "expected none: no node is excluded" in again.stderr


def test_verdicts_of_the_site(health):
    """New jobs leave out a node with a bad feature or comment, and the preflight counts it as bad."""
    config, bad_nodes = health.cluster.directory("config"), health.cluster.directory() / "bad"
    bad_nodes.write_text("n7 no fan\n")
    (config / "slurmdl").mkdir()
    (config / "slurmdl/slurmdl.yaml").write_text(f"bad_nodes: {{file: {bad_nodes}, comment: '^nhc: fail'}}\n")
    health.env["XDG_CONFIG_HOME"] = str(config)
    set_comment = ["scontrol", "update", "NodeName=n5", "Comment=nhc: fail of gpu 3"]
    health.cluster.run(set_comment, as_root=True).check_returncode()
    try:
        result = health.run("sbatch", "--dl-dry-run", "-N2", "--wrap", "true")
        text, reports = preflight(health, "--no-links", "-N2", "-w", "n[4-5]")
    finally:
        health.cluster.run([*set_comment[:3], "Comment="], as_root=True)
    assert "--exclude=n7" in result.stdout, result
    assert f"left out: n7 (no fan ({bad_nodes}))\n" in result.stderr
    assert "n5 may be used, though bad: at most 10%" in result.stderr
    assert "bad: n5: its comment in Slurm is 'nhc: fail of gpu 3'" in text
    # the nodes share this machine's cores, so the CPU check of two nodes may call the other one slow
    by_site = [node for node, report in reports.items() if "its comment in Slurm" in str(report["faults"])]
    assert by_site == ["n5"] and "status 78" in text


def test_damaged_list_does_not_cost_a_submission(health):
    path = health.state / "slurmdl/exclusions.jsonl"
    health.cluster.run(["mkdir", "-p", str(path.parent)]).check_returncode()
    health.cluster.run(["sh", "-c", f"head -c 3000 /dev/urandom > {path}"]).check_returncode()
    path_of_script = health.cluster.script("true\n")
    result = health.cluster.run(["slurmdl", "sbatch", str(path_of_script)], env=health.env,
                                directory=path_of_script.parent)
    assert result.returncode == 0
    assert ": not an exclusion; expected a JSON object" in result.stderr


PREFLIGHT = """\
#SBATCH -N4 --open-mode=append --requeue
slurmdl preflight --output report.jsonl {options}
echo "status $?"
"""


def preflight(health: Health, options: str = "", *sbatch_options: str) -> tuple[str, dict[str, dict]]:
    """Return the output of a job that runs a preflight, and its report of each node."""
    path = health.cluster.script(PREFLIGHT.format(options=options))
    job = health.cluster.submit(["sbatch", *sbatch_options, str(path)], env=health.env, directory=path.parent)
    text = health.cluster.output(job, 90)
    reports = [json.loads(line) for line in (path.parent / "report.jsonl").read_text().splitlines()]
    return text, {report["node"]: report for report in reports}


def test_preflight_of_good_nodes(health):
    text, reports = preflight(health)
    assert text.rstrip().endswith("status 0"), text
    assert len(reports) == 4
    for report in reports.values():
        assert not report["bad"] and not report["errors"], report
        assert report["checks"].keys() == {"clock", "disk", "memory", "gpu", "cpu"}
        assert report["link"]["throughput"] > 0
    samples = [json.loads(line) for line in (health.state / "slurmdl/probe.jsonl").read_text().splitlines()]
    assert {sample["name"] for sample in samples if sample["kind"] == "node"} == reports.keys()


def test_preflight_finds_the_slow_link(health):
    bad = "n3"
    health.cluster.shape_link(bad, rate=50e6)
    try:
        text, reports = preflight(health, "--budget 40", "-N6", "-w", "n[1-6]")
    finally:
        health.cluster.shape_link(bad, rate=1e9)
    assert text.rstrip().endswith("status 78"), text
    assert [node for node, report in reports.items() if report["bad"]] == [bad], text
    assert f"bad: {bad}: its link carries " in text


def test_preflight_finds_the_pair_that_cannot_communicate(new_sandbox):
    """Packets from one node to one other one are lost; both reach all other nodes."""
    cluster = new_sandbox(nodes=6, zones=1)
    pids = cluster.sandbox.pids
    address = namespaces.run_on_host(pids["n2"], ["getent", "hosts", "n5"]).split()[0]
    namespaces.run_on_host(pids["n2"], ["ip", "neigh", "replace", address, "lladdr", "02:00:00:00:00:99", "dev",
                                        "eth0", "nud", "permanent"])
    text, reports = preflight(Health(cluster), "", "-N6")
    assert text.rstrip().endswith("status 78"), text
    assert [node for node, report in reports.items() if report["bad"]] == ["n5"], text
    assert "bad: n5: it cannot exchange data with n2" in text


@pytest.mark.nightly
def test_preflight_finds_the_slow_cpus(new_sandbox):
    """The node has 10 % of a core; its link may seem slow, too, as the probes need CPU time."""
    cluster = new_sandbox(nodes=4)
    health = Health(cluster)
    cluster.sandbox.limit_cpu("n3", 0.1)
    text, reports = preflight(health)
    assert [node for node, report in reports.items() if report["bad"]] == ["n3"], text
    assert "bad: n3: a CPU quota of its control groups withholds " in text


@pytest.mark.nightly
def test_preflight_requeues_without_the_bad_node(new_sandbox):
    """Six nodes, of which the job takes four: it starts again on good ones."""
    cluster = new_sandbox(nodes=6, slurm_conf_lines=SOON)
    health = Health(cluster)
    path = cluster.script("#SBATCH -N4 --requeue --open-mode=append\n"
                          'echo "start ${SLURM_RESTART_COUNT-0} on $SLURM_JOB_NODELIST" with '
                          '"$(scontrol show hostnames | tr \'\\n\' \' \')"\n'
                          "until [ -e shaped ]; do sleep 0.2; done\n"
                          "slurmdl preflight --requeue --budget 40 || exit\necho all good\n")
    job = cluster.submit(["sbatch", str(path)], env=health.env, directory=path.parent)
    bad = hostlist.expand_hostlist(cluster.wait_for(job, {"RUNNING"})["NodeList"])[-1]
    cluster.shape_link(bad, rate=20e6)
    (path.parent / "shaped").touch()
    record = cluster.wait(job, 120)
    text = cluster.run(["cat", record["StdOut"]]).stdout
    assert text.rstrip().endswith("all good"), text
    assert bad in started_on(text, 0) and bad not in started_on(text, 1)


ARRAY = """\
#SBATCH -N1 -a 1-2 --requeue --open-mode=append
echo "start ${SLURM_RESTART_COUNT-0}" of task $SLURM_ARRAY_TASK_ID
[ "$SLURM_RESTART_COUNT" ] || [ "$SLURM_JOB_ID" != "$SLURM_ARRAY_JOB_ID" ] || slurmdl requeue
[ "$SLURM_RESTART_COUNT" ] || sleep 20
"""


@pytest.mark.nightly
def test_only_the_task_of_an_array_is_requeued(new_cluster):
    """The task whose job ID is that of the array requeues itself."""
    cluster = new_cluster(nodes=2, slurm_conf_lines=SOON)
    health = Health(cluster)
    job = health.submit(ARRAY)
    cluster.wait_for(job, {"COMPLETED"}, 90)
    lines = cluster.run(["scontrol", "-o", "show", "job", str(job)]).stdout.splitlines()
    restarts = {re.search(r"JobId=(\d+)", line)[1]: re.search(r" Restarts=(\d)", line)[1] for line in lines}
    assert (restarts.pop(str(job)), list(restarts.values())) == ("1", ["0"]), lines


@pytest.mark.parametrize(("argv", "message"), [
    ((), "no nodes; expected a call inside a job, or --nodes LIST"),
    (("--budget", "1s", "--nodes", "n1"), "--budget: invalid time '1s'; expected 5s to 3600s"),
    (("--requeue", "--nodes", "n1"), "--requeue: not inside a job"),
    (("--forget", "n7"), "--forget: node n7 is not excluded"),
    (("--history", "--forget", "n1"), "not allowed with argument"),
])
def test_usage_errors_of_preflight(health, argv, message):
    result = health.run("preflight", *argv)
    assert result.returncode == 64
    [line] = slurmdl_messages(result.stderr)
    assert message in line


def test_preflight_outside_of_a_job_uses_a_job_of_its_own(health):
    result = health.run("preflight", "--nodes", "n[1-2]", "--no-links")
    assert result.returncode == 0, result.stderr
    assert "0 of 2 nodes bad" in result.stdout


@pytest.mark.nightly
def test_node_that_dies_in_the_preflight_is_bad(new_sandbox):
    """With an eighth of a core the checks of the node last for seconds: it dies before they end."""
    cluster = new_sandbox(nodes=4, slurm_conf_lines=("SlurmdTimeout=300",))
    health = Health(cluster)
    path = cluster.script("#SBATCH -N4 --no-kill --open-mode=append\necho begin\n"
                          "slurmdl preflight --budget 20 --no-links\necho \"status $?\"\n")
    cluster.sandbox.limit_cpu(BAD, 0.12)
    job = cluster.submit(["sbatch", str(path)], env=health.env, directory=path.parent)
    wait_for_pattern(path.parent / f"slurm-{job}.out", "begin")
    host = cluster.job(job)["BatchHost"]
    assert host != BAD
    time.sleep(0.7)
    cluster.power_off(BAD)
    wait_for_pattern(path.parent / f"slurm-{job}.out", "status 78", 60)
    text = (path.parent / f"slurm-{job}.out").read_text()
    faults = re.findall(f"bad: {BAD}: (.*)", text)
    assert faults and not any("quota" in fault for fault in faults), text


#: two steps; the nodes are checked before the first one only
STEPS = """\
#SBATCH --requeue --open-mode=append
#DL --dl-preflight=25 --dl-explain
echo "start ${SLURM_RESTART_COUNT-0} on $SLURM_JOB_NODELIST" with "$(scontrol show hostnames | tr '\\n' ' ')"
for step in one two; do
    slurmdl srun sh -c "echo step $step on \\$SLURMD_NODENAME"
    echo "status $?"
done
"""
#: the bad node; it is never the first one, which runs the batch script
BAD = "n3"


def fill_disk(cluster: Cluster, node: str) -> None:
    """Leave 50 MB free in /tmp: a fault that is found whatever else the machine of the sandbox does."""
    namespaces.run_on_host(cluster.sandbox.pids[node], ["mount", "-t", "tmpfs", "-o", "size=50M,mode=1777", "tmpfs",
                                                        "/tmp"])


@pytest.fixture(scope="module")
def _cluster_with_bad_node(new_sandbox) -> Cluster:
    cluster = new_sandbox(nodes=5, slurm_conf_lines=SOON)
    fill_disk(cluster, BAD)
    return cluster


@pytest.fixture
def with_bad_node(_cluster_with_bad_node) -> Health:
    """A cluster of five nodes, one of which has a full disk."""
    return Health(_cluster_with_bad_node)


def nodes_of_steps(text: str) -> dict[str, set[str]]:
    """The nodes on which each step ran."""
    return {step: set(re.findall(rf"step {step} on (\S+)", text)) for step in ("one", "two")}


def test_srun_requeues_the_job_without_the_bad_node(with_bad_node):
    cluster = with_bad_node.cluster
    record = cluster.wait(with_bad_node.submit(STEPS, "-N4", name="slurmdl"), 120)
    text = cluster.run(["cat", record["StdOut"]]).stdout
    assert BAD in started_on(text, 0) and BAD not in started_on(text, 1), text
    assert (record["JobState"], record["Restarts"], record["ExcNodeList"]) == ("COMPLETED", "1", BAD), text
    assert list(nodes_of_steps(text).values()) == 2 * [{"n1", "n2", "n4", "n5"}], text
    assert text.count("1 of 4 nodes bad") == 1 and text.count("0 of 4 nodes bad") == 1, text
    assert f"{BAD} of " in with_bad_node.history()


def test_spare_node_replaces_the_bad_node(with_bad_node):
    cluster = with_bad_node.cluster
    record = cluster.wait(with_bad_node.submit(STEPS, "-N4", "--dl-node-binding=late", name="slurmdl"), 120)
    text = cluster.run(["cat", record["StdOut"]]).stdout
    assert BAD in started_on(text, 0), text
    assert (record["JobState"], record["Restarts"]) == ("COMPLETED", "0"), text
    assert list(nodes_of_steps(text).values()) == 2 * [{"n1", "n2", "n4", "n5"}], text
    assert f"slurmdl: preflight: the job continues without {BAD}" in text
    assert text.count(" of 5 nodes bad") == 1, text


TRAINS = """\
#SBATCH -N4 --ntasks-per-node=1 --requeue --open-mode=append
echo "start ${SLURM_RESTART_COUNT-0} on $SLURM_JOB_NODELIST" with "$(scontrol show hostnames | tr '\\n' ' ')"
slurmdl srun python -m slurmdl.train --strategy allreduce --steps 100 --summary summary.json
echo "status $?"
"""


@pytest.mark.nightly
def test_bad_node_that_recovers_before_the_next_start_is_left_out(new_sandbox):
    """The training ends with the model of an undisturbed one. In one zone: ranks in others sum in another order."""
    cluster = new_sandbox(nodes=5, zones=1, slurm_conf_lines=SOON)
    health = Health(cluster)
    undisturbed, path = cluster.script(TRAINS), cluster.script(TRAINS)
    text = cluster.output(cluster.submit(["slurmdl", "sbatch", str(undisturbed)], env=health.env,
                                         directory=undisturbed.parent), 120)
    assert BAD in started_on(text, 0) and text.rstrip().endswith("status 0"), text
    fill_disk(cluster, BAD)
    job = cluster.submit(["slurmdl", "sbatch", "--dl-preflight=25", str(path)], env=health.env, directory=path.parent)
    cluster.wait_for(job, {"RUNNING"})
    record = cluster.wait_for(job, {"PENDING"}, 90)
    namespaces.run_on_host(cluster.sandbox.pids[BAD], ["umount", "/tmp"])
    assert record["Restarts"] == "1"
    record = cluster.wait(job, 120)
    text = cluster.run(["cat", record["StdOut"]]).stdout
    assert text.rstrip().endswith("status 0"), text
    assert (record["JobState"], record["Restarts"], record["ExcNodeList"]) == ("COMPLETED", "1", BAD), text
    assert BAD in started_on(text, 0), text
    assert started_on(text, 1) == {"n1", "n2", "n4", "n5"}, text
    summaries = [json.loads((script.parent / "summary.json").read_text()) for script in (undisturbed, path)]
    for key in ("steps", "parameters_crc32", "test_accuracy"):
        assert summaries[0][key] == summaries[1][key], key
    assert {place["node"] for place in summaries[1]["rank_map"]} == {"n1", "n2", "n4", "n5"}


@pytest.mark.nightly
def test_job_that_needs_the_bad_node_stops_runs_or_waits(with_bad_node):
    """All five nodes are needed: the user chooses."""
    cluster = with_bad_node.cluster

    def output(*options: str) -> str:
        return cluster.output(with_bad_node.submit(STEPS, "-N5", *options, name="slurmdl"), 120)

    text = output()
    assert text.count("status 78") == 2 and "step" not in re.sub("the step", "", text), text
    assert re.search(rf"slurmdl: preflight: {BAD} bad, and job \d+ needs 5 nodes; without {BAD} partition main has 4 "
                     r"in service; the step is not started \(--dl-on-bad-nodes=run starts it\)", text)
    text = output("--dl-on-bad-nodes=run")
    assert nodes_of_steps(text)["two"] == {"n1", "n2", "n3", "n4", "n5"}
    assert f"the step runs with {BAD}" in text and text.count("status 0") == 2


@pytest.mark.nightly
def test_job_waits_for_a_node_that_is_drained_now(new_sandbox):
    """Five of six nodes are in service, one of them is bad: the job waits until the sixth one is back."""
    cluster = new_sandbox(nodes=6, slurm_conf_lines=SOON)
    cluster.run(["scontrol", "update", "NodeName=n6", "State=DRAIN", "Reason=test"], as_root=True)
    fill_disk(cluster, BAD)
    health = Health(cluster)
    job = health.submit(STEPS, "-N5", "--dl-on-bad-nodes=wait", name="slurmdl")
    cluster.wait_for(job, {"RUNNING"})
    record = cluster.wait_for(job, {"PENDING"}, 90)
    assert (record["Restarts"], record["ExcNodeList"]) == ("1", BAD)
    time.sleep(10)
    assert cluster.job(job)["JobState"] == "PENDING"
    cluster.run(["scontrol", "update", "NodeName=n6", "State=RESUME"], as_root=True)
    text = cluster.output(job, 90)
    assert nodes_of_steps(text)["two"] == {"n1", "n2", "n4", "n5", "n6"}, text
