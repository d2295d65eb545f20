"""How a choice of nodes binds a job on a real cluster, and that it costs no start: races, lost nodes, requeues."""

from __future__ import annotations

import json
import re
import time

import pytest
from jobs import AT_ONCE, MAPPED, occupy, own_lines, ranks, release, zone

from slurmdl.slurm.hostlist import expand_hostlist


def overtaken(cluster, nodes: str, script, *words: str) -> list[str]:
    """A command that submits a script, but once the choice is made another job takes some nodes first."""
    taker = cluster.script("exec sleep 120\n")
    fake = cluster.directory("bin") / "sbatch"
    fake.write_text("#!/bin/sh\n"
                    f"other=$(/usr/bin/sbatch --parsable --exclusive -w {nodes} -o /dev/null {taker})\n"
                    "until scontrol show job $other | grep -q JobState=RUNNING; do sleep 0.1; done\n"
                    'exec /usr/bin/sbatch "$@"\n')
    fake.chmod(0o755)
    return ["sh", "-c", 'PATH=$1:$PATH; shift; exec slurmdl sbatch --parsable "$@"', "sh", str(fake.parent), *words,
            str(script)]


def asked_for(cluster, job: int) -> list[str]:
    """The node list that a job is bound to."""
    return expand_hostlist(cluster.job(job)["ReqNodeList"].replace("(null)", ""))


def argv_of(cluster, *words: str) -> str:
    """The command line of a dry run."""
    script = cluster.script(MAPPED)
    done = cluster.run(["slurmdl", "sbatch", "--dl-dry-run", *words, str(script)])
    return next(line for line in done.stdout.splitlines() if line.startswith("command:"))


def test_without_features_and_requeue_the_free_nodes_are_pinned(new_cluster):
    cluster = new_cluster(zone_features=False, slurm_conf_lines=AT_ONCE)
    occupy(cluster, "n2", "n4")
    script = cluster.script(MAPPED)
    requeued = cluster.submit(["slurmdl", "sbatch", "-N3", str(script)], directory=script.parent)
    assert cluster.job(requeued)["ReqNodeList"] == "(null)"
    cluster.wait(requeued)
    pinned = cluster.submit(["slurmdl", "sbatch", "--no-requeue", "-N3", str(script)], directory=script.parent)
    assert cluster.job(pinned)["ReqNodeList"] != "(null)"
    assert {zone(node) for node in ranks(cluster.output(pinned))} == {"zoneA"}


def test_a_pinned_job_keeps_its_nodes_until_the_scheduler_passes(new_cluster):
    """With the scheduler's own times: the job has not started when the prompt comes back, and keeps its nodes."""
    cluster = new_cluster(zone_features=False)
    occupy(cluster, "n2", "n4")
    script = cluster.script(MAPPED)
    for _ in range(3):
        job = cluster.submit(["slurmdl", "sbatch", "--no-requeue", "-N3", str(script)], directory=script.parent)
        assert cluster.job(job)["ReqNodeList"] != "(null)"
        assert {zone(node) for node in ranks(cluster.output(job))} == {"zoneA"}


@pytest.mark.parametrize("features", [True, False])
def test_a_lost_race_costs_no_start(new_cluster, features):
    """Nodes of the chosen zone are taken between the look and the submission: the job starts where it can."""
    cluster = new_cluster(zone_features=features)
    occupy(cluster, "n2", "n4")
    script = cluster.script(MAPPED)
    done = cluster.run(overtaken(cluster, "n1,n3", script, "--no-requeue", "-N3"), directory=script.parent)
    assert done.returncode == 0, done.stderr
    job = int(done.stdout.split()[-1])
    record = cluster.job(job)
    # taken back by the time that the user has the prompt
    assert record["ReqNodeList"] == "(null)"
    assert record.get("Prefer", "(null)") in ("(null)", "")
    assert set(ranks(cluster.output(job))) < {"n5", "n6", "n7", "n8"}


def test_a_job_that_another_program_names_on_stdout_is_not_touched(new_cluster):
    """A site's sbatch tells of another job of the user, before and after Slurm's own line."""
    cluster = new_cluster(slurm_conf_lines=AT_ONCE)
    held = cluster.submit(["sbatch", "--hold", "--prefer=zoneB", "-N2", "-o", "/dev/null", "--wrap", "true"])
    fake = cluster.directory("bin") / "sbatch"
    fake.write_text(f'#!/bin/sh\necho "Quota: {held} jobs pending"\n'
                    f'/usr/bin/sbatch "$@" || exit\necho "{held} jobs"\n')
    fake.chmod(0o755)
    script = cluster.script(MAPPED)
    for words, named in (["-N3"], r"Submitted batch job \d+"), (["-N3", "--parsable"], r"\d+"):
        done = cluster.run(["sh", "-c", f'PATH={fake.parent}:$PATH; exec slurmdl sbatch "$@"', "sh", *words,
                            str(script)], directory=script.parent)
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(rf"Quota: {held} jobs pending\n{named}\n{held} jobs\n", done.stdout)
        assert own_lines(done.stderr) == []
        time.sleep(5)  # what is left to the background has been done
        assert cluster.job(held)["Prefer"] == "zoneB"


def test_nodes_lost_after_the_submission_cost_no_start(new_cluster):
    """A node goes down before the scheduler passes, which here takes it longer than usual."""
    cluster = new_cluster(zone_features=False, slurm_conf_lines=("SchedulerParameters=batch_sched_delay=7",))
    script = cluster.script(MAPPED)
    cluster.wait(cluster.submit(["sbatch", "-o", "/dev/null", "--wrap", "true"]))  # the scheduler has just passed
    job = cluster.submit(["slurmdl", "sbatch", "--no-requeue", "-N3", str(script)], directory=script.parent)
    lost = asked_for(cluster, job)[1]
    cluster.run(["scontrol", "update", f"NodeName={lost}", "State=DRAIN", "Reason=test"], as_root=True)
    assert lost not in ranks(cluster.output(job))


def test_pin_waits_for_its_nodes(new_cluster):
    cluster = new_cluster()
    occupy(cluster, "n2", "n4")
    script = cluster.script(MAPPED)
    done = cluster.run(overtaken(cluster, "n1,n3", script, "--dl-node-binding=nodelist", "-N3"), directory=script.parent)
    job = int(done.stdout.split()[-1])
    chosen = asked_for(cluster, job)
    assert set(chosen) & {"n1", "n3"}
    assert cluster.job(job)["JobState"] == "PENDING"
    cluster.run(["scancel", "--state=RUNNING", f"--user={cluster.user}"])
    assert sorted(ranks(cluster.output(job))) == chosen


@pytest.mark.parametrize(("features", "option"), [(True, "--constraint=zoneB"), (False, "--switches=1")])
def test_zone_binds_to_the_zone(new_cluster, features, option):
    cluster = new_cluster(zone_features=features)
    occupy(cluster, "n1", "n3")
    assert option in argv_of(cluster, "--dl-node-binding=zone", "-N3")
    script = cluster.script(MAPPED)
    job = cluster.submit(["slurmdl", "sbatch", "--dl-node-binding=zone", "-N3", str(script)], directory=script.parent)
    assert {zone(node) for node in ranks(cluster.output(job))} == {"zoneB"}


@pytest.mark.parametrize("features", [True, False])
def test_a_zone_that_the_user_names_is_never_left(new_cluster, features):
    """Too few nodes of zoneA are free, and enough of zoneB: the job waits for zoneA, and so does each array task."""
    cluster = new_cluster(zone_features=features, features={"": "any", "n8": "rare"}, slurm_conf_lines=AT_ONCE)
    occupy(cluster, "n1", "n3")
    script = cluster.script(MAPPED)
    submitted = [cluster.run(["slurmdl", "sbatch", "--parsable", "--dl-zone=zoneA", "-N3", "-o", "job-%j-%a.log",
                              *words, str(script)], directory=script.parent)
                 for words in ((), ("--array=1",), ("--no-requeue", "-C", "any"), ("-C", "[any|rare]", "-x", "n8"))]
    for done in submitted:
        assert done.returncode == 0, done.stderr
        assert len(own_lines(done.stderr)) <= 1
        record = cluster.job(done.stdout.strip())
        assert record["JobState"] == "PENDING"
        assert set(expand_hostlist(record["ExcNodeList"])) == {"n2", "n4", "n6", "n8"}
    assert cluster.job(submitted[2].stdout.strip())["Features"] == "any"
    cluster.run(["scancel", "--state=RUNNING", f"--user={cluster.user}"])
    for done in submitted:
        assert cluster.wait(done.stdout.strip())["JobState"] == "COMPLETED"
    for log in script.parent.glob("job-*.log"):
        assert {zone(node) for node in ranks(log.read_text())} == {"zoneA"}, log
    assert len(list(script.parent.glob("job-*.log"))) == len(submitted)


def test_a_named_zone_that_cannot_be_a_limit(cluster):
    """The user's own nodes win, and one line says so; with --dl-strict nothing is submitted."""
    script = cluster.script(MAPPED)
    words = ["--dl-zone=zoneA", "-w", "n2", "-N1", str(script)]
    done = cluster.run(["slurmdl", "sbatch", "--parsable", *words], directory=script.parent)
    assert own_lines(done.stderr) == ["slurmdl: submitted as written: --dl-zone=zoneA is not applied: -w is given"]
    assert ranks(cluster.output(int(done.stdout))) == ["n2"]
    strict = cluster.run(["slurmdl", "sbatch", "--dl-strict", *words])
    assert (strict.returncode, strict.stdout) == (75, "")


def test_off_adds_nothing(cluster):
    assert argv_of(cluster, "--dl-node-binding=off", "-N3").split()[1:3] == ["/usr/bin/sbatch", "-N3"]
    assert "--" not in argv_of(cluster, "--dl-node-binding=off", "-N3")


@pytest.mark.parametrize("words", [["-n4"], ["-N2-3"], ["-N2-"], ["-N2", "--array=1-2"], ["-N1", ":", "-N1"]])
@pytest.mark.parametrize("bind", ["auto", "nodelist", "late"])
def test_nothing_is_pinned_where_the_nodes_are_not_certain(cluster, words, bind):
    line = argv_of(cluster, f"--dl-node-binding={bind}", "--no-requeue", *words)
    assert not [option for option in ("--nodelist", "--prefer", "--nodes") if option in line]


LATE = "slurmdl srun sh -c 'echo rank $SLURM_PROCID $SLURMD_NODENAME n $SLURM_NTASKS'\n"
HOLD = 'while [ ! -e go ]; do sleep 0.1; done\nslurmdl srun sh -c \'echo again $SLURMD_NODENAME\' | sort\n'


@pytest.mark.parametrize(("words", "tasks"), [
    (["-N3"], 3), (["-N3", "-n3"], 3), (["-N3", "-n5"], 5), (["-N3", "--ntasks-per-node=2"], 6)])
def test_late_drops_the_worst_node_and_gives_it_back(cluster, words, tasks):
    """n3 has a slow link: of four nodes it goes, and the steps have the tasks that were asked for."""
    script = cluster.script(LATE + HOLD)
    scores = script.parent / "scores.json"
    scores.write_text(json.dumps({"nodes": {"n3": {"throughput": 1e6}}}))
    done = cluster.run(["slurmdl", "sbatch", "--parsable", "--dl-node-binding=late", f"--dl-link-scores={scores}", *words,
                        "-o", "log", str(script)], directory=script.parent)
    assert done.stderr == ""
    job, log = int(done.stdout), script.parent / "log"
    deadline = time.monotonic() + 30
    while not log.exists() or log.read_text().count("rank ") < tasks:
        assert time.monotonic() < deadline, log.read_text() if log.exists() else cluster.job(job)
        time.sleep(0.1)
    kept = expand_hostlist(cluster.job(job)["NodeList"])
    # for 5 tasks 24.11 gives nodes of 2 CPUs 5 of them, and no 3 of 4 nodes have 5
    short = tasks % 3 > 0 and release(cluster) == (24, 11)
    assert short == ("5 tasks do not fit" in log.read_text())
    assert len(kept) == 4 if short else kept == ["n1", "n5", "n7"]
    (script.parent / "go").touch()
    text = cluster.output(job)
    assert len(ranks(text)) == tasks and set(ranks(text)) == set(kept)
    assert {line.split()[-1] for line in text.splitlines() if line.startswith("rank ")} == {str(tasks)}
    assert sorted({line.split()[1] for line in text.splitlines() if line.startswith("again ")}) == kept
    assert "resize" not in text and ("slurmdl:" in text) == short


def test_late_waits_no_longer_than_the_job_without(cluster):
    """Exactly as many nodes are free as the job needs: it starts on these."""
    occupy(cluster, "n2", "n4", "n6", "n7", "n8")
    script = cluster.script(MAPPED)
    job = cluster.submit(["slurmdl", "sbatch", "--dl-node-binding=late", "-N3", str(script)], directory=script.parent)
    assert sorted(ranks(cluster.output(job))) == ["n1", "n3", "n5"]


@pytest.mark.parametrize(("settings", "before"), [
    (("SchedulerParameters=disable_job_shrink",), ""),
    ((), "srun -N1 -n1 --overlap sleep 20 &\nsleep 1\n"),
])
def test_late_where_the_job_cannot_shrink(new_cluster, settings, before):
    """The site forbids it, or another step runs: the job keeps all nodes, its steps run on the best of them."""
    cluster = new_cluster(slurm_conf_lines=settings)
    script = cluster.script(before + MAPPED + "scontrol show job $SLURM_JOB_ID | grep NumNodes\n"
                                              "kill %1 2>/dev/null; exit 0\n")
    job = cluster.submit(["slurmdl", "sbatch", "--dl-node-binding=late", "-N3", str(script)], directory=script.parent)
    text = cluster.output(job)
    assert sorted(ranks(text)) == ["n1", "n3", "n5"]
    assert "NumNodes=4" in text
    (line,) = own_lines(text)
    assert "keeps its 4 nodes" in line


@pytest.mark.parametrize("bind", ["auto", "late"])
def test_a_requeued_job_starts_elsewhere_when_its_node_died(new_cluster, bind):
    cluster = new_cluster(slurm_conf_lines=("AuthInfo=cred_expire=5",))
    script = cluster.script("echo run $SLURM_RESTART_COUNT\n" + MAPPED + '[ "$SLURM_RESTART_COUNT" ] || sleep 300\n')
    job = cluster.submit(["slurmdl", "sbatch", f"--dl-node-binding={bind}", "--open-mode=append", "--requeue", "-N3", "-o",
                          "log", str(script)], directory=script.parent)
    deadline = time.monotonic() + 20
    log = script.parent / "log"
    while not log.exists() or log.read_text().count("rank ") < 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    first = ranks(log.read_text())
    cluster.power_off(first[1])
    cluster.run(["scontrol", "update", f"NodeName={first[1]}", "State=DOWN", "Reason=died"], as_root=True)
    record = cluster.wait(job, timeout=120)
    assert record["JobState"] == "COMPLETED"
    again = log.read_text().split("run 1\n")[1]
    assert first[1] not in ranks(again)
    assert len(ranks(again)) == 3
