"""slurmdl audit of jobs that a cluster has just run, from its own accounting and topology."""

from __future__ import annotations

import json
import time

from conftest import in_containers


def test_audit_of_jobs_that_just_ran(cluster, request):
    if not in_containers(request.config):
        refused = cluster.run(["slurmdl", "audit"])  # a sandbox has no slurmdbd
        assert (refused.returncode, refused.stdout) == (69, "")
        assert refused.stderr == "slurmdl: sacct: exit status 1: Slurm accounting storage is disabled\n"
        return
    zone_of = {name: cluster.topology.path_of(name) for name in cluster.topology.nodes}
    first, *others = zone_of
    near, far = (next(name for name in others if (zone_of[name] == zone_of[first]) is same) for same in (True, False))
    time.sleep(1)  # sacct also lists a job of another test that ended in the second of --since
    since, ids = time.strftime("%Y-%m-%dT%H:%M:%S"), []
    for other in (near, far):
        ids.append(cluster.submit(["sbatch", "-N2", f"-w{first},{other}", "-o/dev/null", "--wrap=sleep 2"]))
        cluster.wait(ids[-1])
    deadline, found, report = time.monotonic() + 30, (), {}
    # slurmctld sends records every few seconds, also the end of a job of another test
    while found != (2, 3, 2) and time.monotonic() < deadline:
        audit = cluster.run(["slurmdl", "audit", "--since", since, "--json"])
        if audit.returncode == 0:
            report = json.loads(audit.stdout)
            found = tuple(report["total"][name] for name in ("jobs", "used_zones", "fewest_zones"))
        time.sleep(1)
    assert found == (2, 3, 2), report
    assert [(job["job_id"], job["user"]) for job in report["worst_jobs"]] == [(str(ids[1]), cluster.user)]
