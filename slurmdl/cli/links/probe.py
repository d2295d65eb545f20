"""measure links by a short job with one task per node, or inside a job on its own nodes"""

from __future__ import annotations

import argparse
import os
import time

from slurmdl import config, units
from slurmdl.cli.arguments import CliParser, duration_between
from slurmdl.cli.links import load_topology_or_flat
from slurmdl.errors import UsageError, warn
from slurmdl.text import pluralize, print_escaped


def run(argv: list[str]) -> int:
    separator = argv.index("--") if "--" in argv else len(argv)
    own_args, srun_args = argv[:separator], argv[separator + 1:]
    parser = CliParser(prog="slurmdl links probe", description=__doc__,
                       epilog="Options after -- are passed to srun, e.g. `-- --partition=debug`.")
    selection = parser.add_mutually_exclusive_group()
    selection.add_argument("--nodes", metavar="LIST", help="hostlist, e.g. n[1-8] (default in a job: all its nodes)")
    selection.add_argument("--all", action="store_true", help="all idle nodes")
    parser.add_argument("--budget", default="30s", type=duration_between(1, 3600), metavar="TIME",
                        help="time for all rounds (default: %(default)s)")
    parser.add_argument("--rate-limit", default=0.0, type=lambda text: units.parse_bytes(text, "--rate-limit"),
                        metavar="RATE", help="bytes/s of one stream, e.g. 100M; throughput at the limit is not "
                                             "reported")
    parser.add_argument("--interface", default="", metavar="IF",
                        help="network interface (default: that of the route to the leader)")
    parser.add_argument("--output", metavar="FILE",
                        help="file for the samples as JSON lines, - for stdout (default: the user's own samples)")
    return _run_probe(parser.parse_args(own_args), srun_args)


def _run_probe(options: argparse.Namespace, srun_args: list[str]) -> int:
    from slurmdl.links import aggregate, link_table
    from slurmdl.links.probe import probe_step
    from slurmdl.links.probe.pair_probe import ProbeConfig
    from slurmdl.links.samples import format_sample_lines, merge_into_sample_file
    from slurmdl.links.score_sources import user_probe_file
    from slurmdl.slurm.slurm_conf import cluster_name

    nodes = _select_nodes(options)
    if len(nodes) < 2:
        raise UsageError(f"slurmdl links probe: {len(nodes)} node{'s' * (len(nodes) != 1)}; expected at least two")
    topology = load_topology_or_flat(None, nodes, "all nodes count as one zone")
    immediate = () if "SLURM_JOB_ID" in os.environ else ("--immediate=30",)
    step = probe_step.ProbeStep(nodes, topology, ProbeConfig(rate_limit=options.rate_limit), options.budget,
                                interface=options.interface, srun_args=(*immediate, *srun_args))
    samples = probe_step.run_probe_step(step, os.environ, warn).samples
    if options.output == "-":
        print(format_sample_lines(samples), end="")
        return 0
    rows = link_table.link_rows(aggregate.aggregate_scores(samples, time.time()), topology)
    print_escaped(link_table.format_link_table(rows, len(rows)))
    path = options.output or user_probe_file(os.environ, cluster_name(os.environ))
    try:
        merge_into_sample_file(path, samples)
    except OSError as error:
        raise UsageError(f"--output={path}: cannot be used ({error.strerror})") from error
    return 0


def _select_nodes(options: argparse.Namespace) -> tuple[str, ...]:
    from slurmdl.slurm import hostlist

    if options.nodes:
        return tuple(dict.fromkeys(hostlist.expand_hostlist(options.nodes)))
    if options.all:
        from slurmdl.cluster.load import query_cluster

        idle: list[str] = []
        skipped: dict[str, str] = {}
        for node in query_cluster(config.load_config().cluster_backend)[0].nodes:
            if node.state == ("IDLE",) and node.responding:
                idle.append(node.name)
            else:
                skipped[node.name] = "+".join(node.state) if node.responding else "not responding"
        if skipped:
            warn(f"--all: {len(skipped)} of {pluralize(len(idle) + len(skipped), 'node')} skipped, not idle: "
                 f"{hostlist.fold_hostlist(list(skipped))} ({', '.join(sorted(set(skipped.values())))})")
        return tuple(idle)
    if "SLURM_JOB_NODELIST" in os.environ:
        return tuple(hostlist.expand_hostlist(os.environ["SLURM_JOB_NODELIST"]))
    raise UsageError("slurmdl links probe: no nodes; expected --nodes LIST or --all outside of a job")
