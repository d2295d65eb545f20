"""requeue a job without bad nodes, or exclude them from a pending job

Run it on a login node with the ID of a job, or inside the job without. There it does not return, so that the script
does not go on. The nodes are remembered: later jobs that you submit with `slurmdl sbatch` leave them out, too, for a
day (`slurmdl preflight --history` lists them).
"""

from __future__ import annotations

import os

from slurmdl.cli.arguments import CliParser
from slurmdl.errors import UsageError
from slurmdl.health.requeue import requeue_and_exclude, wait_for_job_end
from slurmdl.slurm import hostlist, jobs
from slurmdl.text import print_escaped


def run(argv: list[str]) -> int:
    parser = CliParser(prog="slurmdl requeue", description=__doc__)
    parser.add_argument("job", nargs="?", metavar="JOB", help="ID of the job (default: the job of this process)")
    parser.add_argument("--exclude", metavar="NODES", default="", help="hostlist of nodes to leave out, e.g. n[3,7]")
    parser.add_argument("--reason", metavar="TEXT", default="slurmdl requeue --exclude",
                        help="why, for the list of exclusions (default: %(default)s)")
    parser.add_argument("--this-job-only", action="store_true", help="do not leave the nodes out of later jobs")
    parser.add_argument("--wait", action="store_true",
                        help="requeue even if too few other nodes are in service now: the job waits for them")
    parser.add_argument("--dry-run", action="store_true",
                        help="only check whether the job can be requeued without the nodes")
    options = parser.parse_args(argv)
    job_id = options.job or jobs.own_job_id(os.environ)
    if not job_id:
        raise UsageError("slurmdl requeue: no job; expected its ID, or a call inside a job")
    excluded = dict.fromkeys(hostlist.expand_hostlist(options.exclude), options.reason)
    requeue_and_exclude(job_id, excluded, os.environ, print_escaped, options.wait, options.dry_run,
                        options.this_job_only)
    if not (options.job or options.dry_run):
        wait_for_job_end()
    return 0
