"""What breaks while users work: a node, a zone's uplink, the controller, the disk, accounting, a clock.

For each: what the user sees, what the job does, and that nothing that was trained or checkpointed is lost.
"""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from pathlib import Path

import pytest
from jobs import trained_on, wait_for_words, written

pytestmark = pytest.mark.nightly

#: goes on from its checkpoint where it starts again
TRAIN = """\
#SBATCH -N6 --ntasks-per-node=1 --requeue --open-mode=append -o log
slurmdl srun {launcher} {run} --strategy {strategy} --emulate-compute 0.05:20000 --steps 200 \\
    --log-every 10 --checkpoint-dir kept --checkpoint-every 20 --summary summary.json
status=$?
echo "status $status"
[ $status = 0 ] || scontrol requeue $SLURM_JOB_ID
"""

#: the clock of a program is so many seconds ahead as a file says at that moment (libfaketime makes it stumble when it
#: sleeps)
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
time_t time(time_t *where) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where) *where = now.tv_sec;
    return now.tv_sec;
}
"""

#: munged of a host begins anew, with that clock
MUNGED = """\
pid=$(pgrep -o -x munged) user=$(stat -c %u /proc/$pid) group=$(stat -c %g /proc/$pid)
line=$(tr '\\0' ' ' </proc/$pid/cmdline)
kill $pid
while grep -qs '^State:.[^Z]' /proc/$pid/status; do sleep 0.1; done
LD_PRELOAD=$1 CLOCK=$2 exec setpriv --reuid=$user --regid=$group --clear-groups $line
"""


@pytest.fixture
def cluster(new_cluster):
    """Links of its own, and a requeued job may start again at once."""
    return new_cluster(slurm_conf_lines=("AuthInfo=cred_expire=5", "SlurmdTimeout=10"))


def started(cluster, strategy: str = "allreduce", run: str = "python -m slurmdl.train") -> tuple[int, Path]:
    """A training job that has made its first checkpoint, and its log."""
    script = cluster.script(TRAIN.format(strategy=strategy, run=run, launcher=cluster.launcher or "-K"))
    job, log = cluster.submit(["slurmdl", "sbatch", str(script)], directory=script.parent), script.parent / "log"
    wait_for_words(log, "step 30 of")
    return job, log


def clock_beside(script: Path) -> Path:
    """The file of a clock that tells the right time, beside a script, and the library that reads it."""
    clock = script.with_name("clock")
    clock.write_text("0")
    clock.with_name("clock.c").write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", clock.with_name("clock.so"), clock.with_name("clock.c")],
                   check=True)
    return clock


def test_a_node_that_loses_power_costs_the_steps_since_the_last_checkpoint(cluster):
    job, log = started(cluster)
    cluster.power_off(trained_on(written(log))[2])
    cluster.wait(job, timeout=240)
    assert "status 0" in written(log), written(log)
    assert len(re.findall(r"resumed after step \d+", written(log))) == 1
    assert json.loads((log.parent / "summary.json").read_text())["steps"] == 200


@pytest.mark.parametrize("strategy", ["allreduce", "gossip"])
def test_a_zone_that_is_cut_off_for_30_s_holds_training_up_and_nothing_is_lost(cluster, strategy):
    job, log = started(cluster, strategy)
    zones = {cluster.topology.zones[cluster.topology.leaf[cluster.topology.node_index[node]]]
             for node in trained_on(written(log))}
    assert len(zones) == 2, "else nothing is cut off"
    cluster.shape_link(min(zones), loss=0.999999)
    time.sleep(30)
    before = written(log).count("step ")
    cluster.shape_link(min(zones), loss=0.0)
    cluster.wait(job, timeout=240)
    assert "status 0" in written(log), written(log)
    assert written(log).count("step ") > before
    assert "resumed after step" not in written(log), "the job need not start again"


def test_the_controller_starts_anew_while_a_job_is_submitted(cluster):
    script = cluster.script("#SBATCH -N2 -J once\nslurmdl srun sh -c 'echo mark $SLURM_PROCID'\n")
    cluster.stop_daemon("login")
    back = threading.Timer(4, cluster.start_daemon, ("login",))
    back.start()
    try:
        done = cluster.run(["slurmdl", "sbatch", "--parsable", str(script)], directory=script.parent, timeout=120)
    finally:
        back.join()
    queued = cluster.run(["sacct", "-n", "-X", "-o", "JobID", "--name=once"]).stdout.split()
    jobs = cluster.run(["squeue", "-h", "-t", "all", "-n", "once", "-o", "%A"]).stdout.split() or queued
    if done.returncode:  # as sbatch itself, which gives up after some time
        assert jobs == []
        assert len([line for line in done.stderr.splitlines() if line.startswith("slurmdl:")]) <= 1, done.stderr
        assert "Traceback" not in done.stderr
    else:
        assert jobs == [done.stdout.strip()]
        assert sorted(re.findall(r"mark \d", cluster.output(int(done.stdout)))) == ["mark 0", "mark 1"]


def test_a_controller_that_starts_anew_disturbs_no_training(cluster):
    job, log = started(cluster)
    cluster.stop_daemon("login")
    time.sleep(3)
    cluster.start_daemon("login")
    cluster.wait(job, timeout=240)
    assert "status 0" in written(log), written(log)
    assert "resumed after step" not in written(log)


def test_a_clock_that_jumps_disturbs_no_training(cluster):
    """Of one node, an hour ahead and then an hour back; the monotonic clock goes on, as where a clock is set."""
    run = cluster.script('[ $SLURM_PROCID != 1 ] || export LD_PRELOAD=${0%run}clock.so CLOCK=${0%run}clock\n'
                         'exec python -m slurmdl.train "$@"\n', "run")
    clock = clock_beside(run)
    job, log = started(cluster, run=str(run))
    clock.write_text("3600")
    wait_for_words(log, "step 80 of")
    clock.write_text("-3600")
    wait_for_words(log, "step 120 of")
    cluster.run(["scontrol", "requeue", str(job)]).check_returncode()
    wait_for_words(log, "resumed after step")
    cluster.wait(job, timeout=240)
    assert "status 0" in written(log), written(log)
    [after] = re.findall(r"resumed after step (\d+)", written(log))
    assert int(after) >= 100
    assert json.loads((log.parent / "summary.json").read_text())["steps"] == 200


def test_a_node_whose_clock_is_an_hour_off_loses_the_steps_since_the_last_checkpoint(cluster):
    """No word between it and the controller is taken any more: it goes out of service, and the job starts again."""
    clock = clock_beside(cluster.script("", "none"))
    for node in cluster.topology.nodes:
        done = cluster.run(["sh", "-c", MUNGED, "sh", str(clock.with_name("clock.so")), str(clock.with_name(node))],
                           host=node, as_root=True)
        assert done.returncode == 0, done.stderr
    job, log = started(cluster)
    off = trained_on(written(log))[2]
    clock.with_name(off).write_text("3600")
    try:
        cluster.wait(job, timeout=240)
    finally:
        clock.with_name(off).write_text("0")
    assert "status 0" in written(log), written(log)
    assert len(re.findall(r"resumed after step \d+", written(log))) == 1
    assert off not in trained_on(written(log)[written(log).rindex("ranks: "):])
    assert json.loads((log.parent / "summary.json").read_text())["steps"] == 200


def test_a_login_host_on_which_no_file_can_be_written(cluster):
    """As on a full disk: a job is submitted all the same, or one line says why not."""
    script = cluster.script("#SBATCH -N2\nslurmdl srun sh -c 'echo mark $SLURM_PROCID'\n")
    done = cluster.run(["sh", "-c", f"ulimit -f 0; exec slurmdl sbatch --propagate=NONE --parsable {script}"],
                       directory=script.parent)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"mark \d", cluster.output(int(done.stdout)))) == ["mark 0", "mark 1"]


def test_accounting_that_is_down_holds_no_job_up_and_hears_of_it_later(cluster):
    if cluster.run(["sacct", "-X"]).returncode:
        pytest.skip("this cluster has no accounting; the containerized one has")
    cluster.stop_daemon("slurmdbd")
    try:
        script = cluster.script("#SBATCH -N2\nslurmdl srun sh -c 'echo mark $SLURM_PROCID'\n")
        job = cluster.submit(["slurmdl", "sbatch", str(script)], directory=script.parent)
        assert sorted(re.findall(r"mark \d", cluster.output(job))) == ["mark 0", "mark 1"]
    finally:
        cluster.start_daemon("slurmdbd")
    deadline = time.monotonic() + 120
    while "COMPLETED" not in cluster.run(["sacct", "-n", "-X", "-j", str(job), "-o", "State"]).stdout:
        assert time.monotonic() < deadline, f"accounting never heard of job {job}"
        time.sleep(1)
