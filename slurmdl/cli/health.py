"""Commands against bad nodes: `slurmdl preflight` and `slurmdl requeue`."""

from __future__ import annotations

import argparse
import json
import os
import time

from slurmdl import config, units
from slurmdl.cli.arguments import CliParser, duration_between, write_output_file
from slurmdl.errors import BadNodesError, UsageError, warn
from slurmdl.health import exclusions
from slurmdl.health.requeue import requeue_and_exclude, wait_for_job_end
from slurmdl.slurm import hostlist, jobs
from slurmdl.text import print_escaped


def preflight(argv: list[str]) -> int:
    """check the nodes of this job, and find the bad ones before the job's program starts

    Call it in a job script before the program. Every node checks its CPUs, memory, disk, clock and GPUs, and pairs
    of nodes check their links. Exit status: 0 if all nodes are good, 78 if one is bad. --requeue requeues the job
    without the bad nodes.
    """
    parser = CliParser(prog="slurmdl preflight", description=preflight.__doc__)
    parser.add_argument("--budget", default="30s", type=duration_between(5, 3600), metavar="TIME",
                        help="time for all checks (default: %(default)s)")
    parser.add_argument("--nodes", metavar="LIST", help="hostlist (default in a job: all its nodes)")
    parser.add_argument("--no-links", action="store_true", help="do not check the links between the nodes")
    parser.add_argument("--output", metavar="FILE",
                        help="write the results to a file, one JSON object per node; with --history: the nodes that "
                             "are left out now, as a file for `bad_nodes` of slurmdl.yaml")
    parser.add_argument("--requeue", action="store_true",
                        help="if a node is bad, remember that, and requeue the job without it")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--history", action="store_true", help="only list the nodes that your jobs leave out, and why")
    group.add_argument("--forget", metavar="LIST", help="only end the exclusion of these nodes")
    options = parser.parse_args(argv)
    if options.history:
        print_escaped(_history_text())
        if options.output:
            write_output_file(options.output, "--output", _bad_nodes_text())
        return 0
    if options.forget is not None:
        return _forget(options.forget)
    return _check_nodes(options)


def _check_nodes(options: argparse.Namespace) -> int:
    from slurmdl.cli.links import load_topology_or_flat
    from slurmdl.health.preflight import format_table, keep_link_samples, preflight_to_json, run_preflight
    from slurmdl.health.site_checks import load_site_reasons

    job_id = jobs.own_job_id(os.environ)
    if options.requeue and not job_id:
        raise UsageError("--requeue: not inside a job (SLURM_JOB_ID is not set)")
    nodelist = options.nodes or os.environ.get("SLURM_JOB_NODELIST")
    if not nodelist:
        raise UsageError("slurmdl preflight: no nodes; expected a call inside a job, or --nodes LIST")
    nodes = tuple(dict.fromkeys(hostlist.expand_hostlist(nodelist)))
    topology = load_topology_or_flat(None, nodes, "all nodes count as one zone")
    result = run_preflight(nodes, topology, os.environ, warn, options.budget, not options.no_links,
                           load_site_reasons(config.load_config(), warn))
    keep_link_samples(result, os.environ, warn)
    print_escaped(format_table(result))
    if options.output:
        lines = [json.dumps(preflight_to_json(result, node)) for node in nodes]
        write_output_file(options.output, "--output", "".join(f"{line}\n" for line in lines))
    if not result.reasons:
        return 0
    if options.requeue:
        requeue_and_exclude(job_id, result.reasons, os.environ, print_escaped)
        wait_for_job_end()
    return BadNodesError.exit_status


def _history_text() -> str:
    path = config.exclusions_file(os.environ)
    entries, warning = exclusions.load_exclusions(path)
    if warning:
        warn(warning)
    now, newest = time.time(), {(entry.cluster, entry.node): entry for entry in entries}
    lines = []
    for entry in reversed(entries):
        if entry.expires <= entry.time:
            continue
        active = newest[(entry.cluster, entry.node)] is entry and entry.expires > now
        state = f"excluded for another {units.format_coarse_duration(entry.expires - now)}" if active else "ended"
        job = f" by job {entry.job}" if entry.job else ""
        lines.append(f"{entry.node} of {entry.cluster}: {state}; found "
                     f"{units.format_coarse_duration(now - entry.time)} ago{job}: {entry.reason}")
    return "\n".join(lines) or "no node was excluded"


def _bad_nodes_text() -> str:
    """The nodes that are left out now, each with its reason, as site_checks reads them."""
    active, _ = exclusions.load_active_exclusions(os.environ)
    return "".join(f"{node} {entry.reason.replace('#', ' ')}\n" for node, entry in active.items())


def _forget(nodelist: str) -> int:
    nodes = dict.fromkeys(hostlist.expand_hostlist(nodelist))
    active, warning = exclusions.load_active_exclusions(os.environ)
    if warning:
        warn(warning)
    if unknown := [node for node in nodes if node not in active]:
        expected = hostlist.fold_hostlist(active) or "none: no node is excluded"
        raise UsageError(f"--forget: node {unknown[0]} is not excluded; expected {expected}")
    exclusions.record_exclusions(dict.fromkeys(nodes, "forgotten"), os.environ, lifetime_s=0.0)
    return 0


def requeue(argv: list[str]) -> int:
    """requeue a job without bad nodes, or exclude them from a pending job

    Run it on a login node with the ID of a job, or inside the job without. There it does not return, so that the
    script does not go on. The nodes are remembered: later jobs that you submit with `slurmdl sbatch` leave them out,
    too, for a day (`slurmdl preflight --history` lists them).
    """
    parser = CliParser(prog="slurmdl requeue", description=requeue.__doc__)
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
