"""Failures of nodes, zone uplinks, the controller, the disk, accounting and clocks during jobs.

Each test checks the messages, the state of the job, and that no checkpointed training steps are lost.
"""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from pathlib import Path

import pytest
from jobs import SOON, read_log, trainer_nodes, wait_for_pattern, wait_until

pytestmark = pytest.mark.nightly

#: job script; a restarted job resumes from its checkpoint
TRAIN = """\
#SBATCH -N6 --ntasks-per-node=1 --requeue --open-mode=append -o log
slurmdl srun {launcher} {run} --strategy {strategy} --emulate-compute 0.05:20000 --steps 200 \\
    --log-every 10 --checkpoint-dir kept --checkpoint-every 20 --summary summary.json
status=$?
echo "status $status"
[ $status = 0 ] || scontrol requeue $SLURM_JOB_ID
"""

#: preloaded library that adds the seconds in the file $CLOCK to the real-time clock; libfaketime disturbs sleeps
CLOCK = """\
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long ahead(void) {
    char text[32] = "";
    int file = open(getenv("CLOCK"), O_RDONLY);
    if (file >= 0) { if (read(file, text, 31) < 0) text[0] = 0; close(file); }
    return atol(text);
}
int clock_gettime(clockid_t id, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, id, now);
    if (!failed && id == CLOCK_REALTIME) now->tv_sec += ahead();
    return failed;
}
int gettimeofday(struct timeval *now, void *zone) {
    int failed = syscall(SYS_gettimeofday, now, zone);
    if (!failed) now->tv_sec += ahead();
    return failed;
}
time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
"""

#: restart munged of a host with this library
MUNGED = """\
pid=$(pgrep -o -x munged) user=$(stat -c %u /proc/$pid) group=$(stat -c %g /proc/$pid)
line=$(tr '\\0' ' ' </proc/$pid/cmdline)
kill $pid
while grep -qs '^State:.[^Z]' /proc/$pid/status; do sleep 0.1; done
LD_PRELOAD=$1 CLOCK=$2 exec setpriv --reuid=$user --regid=$group --clear-groups $line
"""


@pytest.fixture
def cluster(new_cluster):
    """A separate cluster, since tests shape its links; it restarts requeued jobs at once."""
    return new_cluster(slurm_conf_lines=(*SOON, "SlurmdTimeout=10"))


def start_training(cluster, strategy: str = "allreduce", run: str = "python -m slurmdl.train") -> tuple[int, Path]:
    """Submit a training job and wait for its first checkpoint; return its job ID and log."""
    script = cluster.script(TRAIN.format(strategy=strategy, run=run, launcher=cluster.launcher or "-K"))
    job, log = cluster.sbatch(script), script.parent / "log"
    wait_for_pattern(log, "step 30 of")
    return job, log


def build_clock(script: Path) -> Path:
    """Write the file and the library of CLOCK next to a script, with offset 0; return the file."""
    clock = script.with_name("clock")
    clock.write_text("0")
    clock.with_name("clock.c").write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", clock.with_name("clock.so"), clock.with_name("clock.c")],
                   check=True)
    return clock


def test_job_resumes_from_checkpoint_after_node_failure(cluster):
    job, log = start_training(cluster)
    cluster.power_off(trainer_nodes(read_log(log))[2])
    cluster.wait(job, timeout=240)
    assert "status 0" in read_log(log), read_log(log)
    assert len(re.findall(r"resumed after step \d+", read_log(log))) == 1
    assert json.loads((log.parent / "summary.json").read_text())["steps"] == 200


@pytest.mark.parametrize("strategy", ["allreduce", "gossip"])
def test_training_continues_after_30_s_uplink_outage(cluster, strategy):
    job, log = start_training(cluster, strategy)
    zones = {cluster.topology.zones[cluster.topology.leaf[cluster.topology.node_index[node]]]
             for node in trainer_nodes(read_log(log))}
    assert len(zones) == 2, "the uplink carries no traffic"
    cluster.shape_link(min(zones), loss=0.999999)
    time.sleep(30)
    before = read_log(log).count("step ")
    cluster.shape_link(min(zones), loss=0.0)
    cluster.wait(job, timeout=240)
    assert "status 0" in read_log(log), read_log(log)
    assert read_log(log).count("step ") > before
    assert "resumed after step" not in read_log(log), read_log(log) + cluster.controller_log()


def test_submission_during_controller_restart_submits_at_most_one_job(cluster):
    script = cluster.script("#SBATCH -N2 -J once\nslurmdl srun sh -c 'echo mark $SLURM_PROCID'\n")
    cluster.stop_daemon("login")
    restart = threading.Timer(4, cluster.start_daemon, ("login",))
    restart.start()
    try:
        done = cluster.run(["slurmdl", "sbatch", "--parsable", str(script)], directory=script.parent, timeout=120)
    finally:
        restart.join()
    queued = cluster.run(["sacct", "-n", "-X", "-o", "JobID", "--name=once"]).stdout.split()
    jobs = cluster.run(["squeue", "-h", "-t", "all", "-n", "once", "-o", "%A"]).stdout.split() or queued
    if done.returncode:  # sbatch itself also times out
        assert jobs == []
        assert len([line for line in done.stderr.splitlines() if line.startswith("slurmdl:")]) <= 1, done.stderr
        assert "Traceback" not in done.stderr
    else:
        assert jobs == [done.stdout.strip()]
        assert sorted(re.findall(r"mark \d", cluster.output(int(done.stdout)))) == ["mark 0", "mark 1"]


def test_controller_restart_does_not_affect_training(cluster):
    job, log = start_training(cluster)
    cluster.stop_daemon("login")
    time.sleep(3)
    cluster.start_daemon("login")
    cluster.wait(job, timeout=240)
    assert "status 0" in read_log(log), read_log(log)
    assert "resumed after step" not in read_log(log)


def test_clock_jumps_do_not_affect_training(cluster):
    """The real-time clock of one node jumps an hour ahead, then an hour back; its monotonic clock does not change."""
    run = cluster.script('[ $SLURM_PROCID != 1 ] || export LD_PRELOAD=${0%run}clock.so CLOCK=${0%run}clock\n'
                         'exec python -m slurmdl.train "$@"\n', "run")
    clock = build_clock(run)
    job, log = start_training(cluster, run=str(run))
    clock.write_text("3600")
    wait_for_pattern(log, "step 80 of")
    clock.write_text("-3600")
    wait_for_pattern(log, "step 120 of")
    cluster.run(["scontrol", "requeue", str(job)]).check_returncode()
    wait_for_pattern(log, "resumed after step")
    cluster.wait(job, timeout=240)
    assert "status 0" in read_log(log), read_log(log)
    [checkpoint_step] = re.findall(r"resumed after step (\d+)", read_log(log))
    assert int(checkpoint_step) >= 100
    assert json.loads((log.parent / "summary.json").read_text())["steps"] == 200


def test_job_resumes_without_node_whose_clock_is_an_hour_ahead(cluster):
    """munge rejects the messages between the node and the controller: the node goes down, and the job is requeued."""
    clock = build_clock(cluster.script("", "none"))
    for node in cluster.topology.nodes:
        done = cluster.run(["sh", "-c", MUNGED, "sh", str(clock.with_name("clock.so")), str(clock.with_name(node))],
                           host=node, as_root=True)
        assert done.returncode == 0, done.stderr
    job, log = start_training(cluster)
    wrong_node = trainer_nodes(read_log(log))[2]
    clock.with_name(wrong_node).write_text("3600")
    try:
        cluster.wait(job, timeout=240)
    finally:
        clock.with_name(wrong_node).write_text("0")
    assert "status 0" in read_log(log), read_log(log)
    assert len(re.findall(r"resumed after step \d+", read_log(log))) == 1
    assert wrong_node not in trainer_nodes(read_log(log)[read_log(log).rindex("ranks: "):])
    assert json.loads((log.parent / "summary.json").read_text())["steps"] == 200


def test_submission_works_without_writable_files_on_the_login_host(cluster):
    """The file size limit is 0, similar to a full disk."""
    script = cluster.script("#SBATCH -N2\nslurmdl srun sh -c 'echo mark $SLURM_PROCID'\n")
    done = cluster.run(["sh", "-c", f"ulimit -f 0; exec slurmdl sbatch --propagate=NONE --parsable {script}"],
                       directory=script.parent)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"mark \d", cluster.output(int(done.stdout)))) == ["mark 0", "mark 1"]


def test_job_during_accounting_outage_is_recorded_later(cluster):
    if cluster.run(["sacct", "-X"]).returncode:
        pytest.skip("this cluster has no accounting; the containerized one has")
    cluster.stop_daemon("slurmdbd")
    try:
        job = cluster.sbatch("#SBATCH -N2\nslurmdl srun sh -c 'echo mark $SLURM_PROCID'\n")
        assert sorted(re.findall(r"mark \d", cluster.output(job))) == ["mark 0", "mark 1"]
    finally:
        cluster.start_daemon("slurmdbd")
    wait_until(lambda: "COMPLETED" in cluster.run(["sacct", "-n", "-X", "-j", str(job), "-o", "State"]).stdout,
               f"accounting has no record of job {job}", 120)
