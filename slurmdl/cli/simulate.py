"""predict step times of placements on clusters of any size, with SimGrid"""

from __future__ import annotations

import argparse
import json
import os
import re
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from slurmdl import comm_layout
from slurmdl.cli.arguments import MAX_SEED, CliParser, check_bounds
from slurmdl.errors import UsageError
from slurmdl.text import pluralize, print_escaped

if TYPE_CHECKING:
    from slurmdl.simulate.compare import SimulatedJob
    from slurmdl.simulate.workload import TrainingWorkload


def build_parser() -> argparse.ArgumentParser:
    parser = CliParser(prog="slurmdl simulate",
                       description="Predict the step time of a job with SimGrid for three placements: by slurmdl, in "
                                   "Slurm's leaf order, and random (docs/simulate.md).")
    job = parser.add_argument_group("job")
    job.add_argument("-N", type=int, metavar="NODES", help="number of nodes (default: those of --nodes)")
    job.add_argument("--ntasks-per-node", type=int, default=1, metavar="N",
                     help="maximum ranks per node (default: %(default)s)")
    job.add_argument("--ranks", type=int, metavar="N", help="number of ranks (default: as many as fit the nodes)")
    job.add_argument("--nodes", default="", metavar="LIST", help="hostlist (default: chosen by each placement)")
    job.add_argument("--strategy", default="allreduce", metavar="NAME",
                     help="allreduce, gossip, adaptive-gossip or ps (default: %(default)s)")
    job.add_argument("--islands", default="", metavar="LEVEL",
                     help="zone: islands, allreduce in each leaf zone, and local-sgd, gossip or adaptive-gossip "
                          "between them")
    job.add_argument("--comm-pattern", default="", metavar="NAME",
                     help="communication pattern as for `slurmdl train`")
    job.add_argument("--ps", type=int, metavar="N", help="number of parameter servers (default: 1 with ps)")
    job.add_argument("--parameters", default="25M", metavar="N", help="size of the model (default: %(default)s)")
    job.add_argument("--compute-seconds", type=float, default=0.1, metavar="SECONDS",
                     help="computation per step (default: %(default)s)")
    job.add_argument("--no-overlap", action="store_true", help="start allreduce after the backward pass")
    job.add_argument("--period", type=int, metavar="K",
                     help="steps per exchange of gossip or between islands (default: 1, adaptive-gossip 8, "
                          "local-sgd 32)")
    job.add_argument("--compression", metavar="NAME",
                     help="none, fp16, int8, int4 or sign (default: none, adaptive-gossip int4)")
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--topology", metavar="FILE",
                         help="topology file, or text of `scontrol show topology` (default: the cluster's topology)")
    cluster.add_argument("--dl-link-scores", default="auto", metavar="auto|off|FILE|URL", dest="scores",
                         help="link scores (default: %(default)s)")
    cluster.add_argument("--busy-share", type=float, default=0.0, metavar="SHARE",
                         help="share of the nodes that other jobs hold, 0 to 0.95 (default: %(default)g)")
    cluster.add_argument("--seed", type=int, default=0, metavar="N",
                         help="seed of other jobs, gossip partners and random placement (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=0, metavar="N",
                        help="simulated steps (default: 1; gossip: one cycle of the graph, or 8 random exchanges)")
    parser.add_argument("--granularity", default="auto", choices=("auto", "messages", "flows"),
                        help="simulate single messages, or the messages of a phase as flows (default: messages if "
                             "there are few)")
    parser.add_argument("--json", action="store_true", help="JSON output")
    return parser


def run(argv: list[str]) -> int:
    options = build_parser().parse_args(argv)
    check_bounds(options, {"steps": (0, 10_000), "ntasks_per_node": (1, 10_000), "busy_share": (0, 0.95),
                           "seed": (0, MAX_SEED), "period": (1, 10**6), "compute_seconds": (0, 10**9)})
    job = _build_job(options)
    predictions = job.predict_policies(options.steps, options.granularity)
    if options.json:
        print(json.dumps({
            "workload": _workload_json(job.workload), "topology": job.topology.source, "nodes": job.node_count,
            "ranks": job.rank_count, "busy_share": job.busy_share, "seed": job.seed,
            "policies": {policy: asdict(each) for policy, each in predictions.items()}}, indent=1))
        return 0
    from slurmdl.placement import explain
    from slurmdl.simulate.compare import format_predictions

    first, workload = next(iter(predictions.values())), job.workload
    islands = f", islands of a {workload.traffic.islands}" * bool(workload.traffic.islands)
    print_escaped(f"{workload.traffic.strategy} ({workload.pattern}{islands}), {workload.parameters:,} parameters, "
                  f"{pluralize(job.rank_count, 'rank')} on {job.node_count} of "
                  f"{pluralize(len(job.topology.nodes), 'node')}; {pluralize(first.steps, 'step')} simulated as "
                  f"{first.granularity}; {explain.link_assumption(job.topology, job.scores)}")
    print_escaped("\n".join(format_predictions(predictions)))
    return 0


def _build_job(options: argparse.Namespace) -> SimulatedJob:
    from slurmdl import config
    from slurmdl.launch import cluster_state
    from slurmdl.simulate.compare import SimulatedJob
    from slurmdl.slurm import hostlist
    from slurmdl.slurm.slurm_conf import cluster_name
    from slurmdl.topology import load

    fixed_nodes = tuple(dict.fromkeys(hostlist.expand_hostlist(options.nodes))) if options.nodes else ()
    nodes = options.N if options.N is not None else len(fixed_nodes)
    if not fixed_nodes and options.N is None:
        raise UsageError("-N or --nodes: expected one of them")
    if nodes < 1 or (fixed_nodes and nodes != len(fixed_nodes)):
        expected = f"{len(fixed_nodes)}, the number of nodes in --nodes" if fixed_nodes else "a number from 1"
        raise UsageError(f"-N {nodes}: expected {expected}")
    slots = nodes * options.ntasks_per_node
    ranks = slots if options.ranks is None else options.ranks
    if not nodes <= ranks <= slots:
        raise UsageError(f"--ranks {ranks}: expected {nodes} to {slots} for {pluralize(nodes, 'node')} with "
                         f"--ntasks-per-node {options.ntasks_per_node}")
    workload = _build_workload(options)
    workload.check_supported(ranks)
    get_cluster = str if options.topology else partial(cluster_name, os.environ)
    scores = cluster_state.load_link_scores(config.load_config(), options.scores, strict=options.scores != "auto",
                                            get_cluster=get_cluster)
    return SimulatedJob(workload, load.load_topology(options.topology), scores, nodes, ranks, fixed_nodes,
                        options.busy_share, options.seed)


def _build_workload(options: argparse.Namespace) -> TrainingWorkload:
    from slurmdl.simulate.workload import TrainingWorkload
    from slurmdl.traffic import Traffic

    is_adaptive = options.strategy == "adaptive-gossip"
    default_period = 8 if is_adaptive else comm_layout.default_period(options.strategy if options.islands else "")
    period = default_period if options.period is None else options.period
    default_compression = "fp16" if options.comm_pattern == "random-matching" else "int4"
    servers = options.ps if options.ps is not None else int(options.strategy == "ps")
    traffic = Traffic(options.strategy, 4 * _parse_parameter_count(options.parameters), servers, options.comm_pattern,
                      islands=options.islands)
    return TrainingWorkload(traffic, options.compute_seconds, not options.no_overlap, period,
                            options.compression or (default_compression if is_adaptive else "none"), options.seed)


def _workload_json(workload: TrainingWorkload) -> dict[str, Any]:
    traffic = workload.traffic
    return {"strategy": traffic.strategy, "parameters": workload.parameters, "ps": traffic.ps,
            "comm_pattern": traffic.pattern, "compute_seconds": workload.compute_seconds, "overlap": workload.overlap,
            "period": workload.period, "compression": workload.compression, "seed": workload.seed,
            "islands": traffic.islands}


def _parse_parameter_count(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)([kMG]?)", text)
    count = round(float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[match[2]]) if match else 0
    if not 1 <= count <= 10**13:
        raise UsageError(f"--parameters {text}: expected a number from 1, e.g. 25M")
    return count
