"""predict step times of placements on clusters of any size, by SimGrid"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING

from slurmdl.cli.arguments import CliParser
from slurmdl.errors import UsageError
from slurmdl.text import print_escaped

if TYPE_CHECKING:
    from slurmdl.simulate.compare import SimulatedJob
    from slurmdl.simulate.workload import TrainingWorkload

#: largest seed
_MAX_SEED = 2**32


def build_parser() -> argparse.ArgumentParser:
    top = CliParser(prog="slurmdl simulate",
                 description="Predict the step time of a job that is placed, in Slurm's leaf order, and at random, "
                             "by SimGrid (docs/simulate.md).")
    job = top.add_argument_group("the job")
    job.add_argument("-N", type=int, metavar="NODES", help="nodes of the job (default: those of --nodes)")
    job.add_argument("--ntasks-per-node", type=int, default=1, metavar="N", help="most ranks on a node (%(default)s)")
    job.add_argument("--ranks", type=int, metavar="N", help="ranks (default: as many as the nodes hold)")
    job.add_argument("--nodes", default="", metavar="LIST", help="its nodes, a hostlist; else each way chooses")
    job.add_argument("--strategy", default="allreduce", metavar="NAME",
                     help="allreduce (default), gossip, adaptive-gossip or ps")
    job.add_argument("--traffic", default="", metavar="NAME", help="as of `slurmdl train`, but for links")
    job.add_argument("--ps", type=int, metavar="N", help="parameter servers (default: 1 with ps)")
    job.add_argument("--parameters", default="25M", metavar="N", help="of the model (default: %(default)s)")
    job.add_argument("--compute", type=float, default=0.1, metavar="S",
                     help="seconds that a step computes (default: %(default)s)")
    job.add_argument("--no-overlap", action="store_true", help="allreduce begins after the backward pass")
    job.add_argument("--period", type=int, metavar="K",
                     help="steps from one exchange of gossip to the next (default: 1, adaptive-gossip 8)")
    job.add_argument("--compress", metavar="NAME", help="none, fp16, int8, int4, sign or topk (default: none, "
                                                        "adaptive-gossip int4)")
    cluster = top.add_argument_group("the cluster")
    cluster.add_argument("--topology", metavar="FILE", help="zones from a file instead of the cluster's")
    cluster.add_argument("--dl-link-scores", "--scores", default="auto", metavar="auto|off|FILE|URL", dest="scores",
                         help="link scores (default: %(default)s)")
    cluster.add_argument("--busy", type=float, default=0.0, metavar="SHARE",
                         help="of the nodes that other jobs hold, 0 to 0.95 (default: %(default)g)")
    cluster.add_argument("--seed", type=int, default=0, metavar="N",
                         help="of other jobs, partners and random placement (default: %(default)s)")
    top.add_argument("--steps", type=int, default=0, metavar="N",
                     help="that are simulated (default: one, of gossip all rounds of the graph, or eight drawn ones)")
    top.add_argument("--detail", default="auto", choices=("auto", "messages", "flows"),
                     help="message by message, or the messages of a phase as flows (default: by their number)")
    top.add_argument("--json", action="store_true", help="as JSON")
    return top


def run(argv: list[str]) -> int:
    """`slurmdl simulate`: see `parser`."""
    options = build_parser().parse_args(argv)
    if not 0 <= options.steps <= 10_000:
        raise UsageError(f"--steps {options.steps}: valid: 1 to 10000")
    case = _build_job(options)
    found = case.predict_policies(options.steps, options.detail)
    if options.json:
        print(json.dumps({"training": asdict(case.workload), "topology": case.topology.source, "nodes": case.node_count,
                          "ranks": case.rank_count, "busy": case.busy_share, "seed": case.seed,
                          "ways": {way: its.to_json() for way, its in found.items()}}, indent=1))
        return 0
    from slurmdl.placement import score_report
    from slurmdl.simulate.compare import format_predictions

    first = next(iter(found.values()))
    print_escaped(f"{case.workload.strategy} ({case.workload.effective_pattern}), {case.workload.parameters:,} parameters, "
         f"{case.rank_count} rank{'s' * (case.rank_count > 1)} on {case.node_count} of {len(case.topology.nodes)} nodes; "
         f"{first.steps} step{'s' * (first.steps > 1)} simulated as {first.granularity}; "
         f"{score_report.link_assumption(case.topology, case.scores)}")
    print_escaped("\n".join(format_predictions(found)))
    return 0


def _build_job(options: argparse.Namespace) -> SimulatedJob:
    from slurmdl import config
    from slurmdl.launch import cluster_state
    from slurmdl.simulate.compare import SimulatedJob
    from slurmdl.slurm import hostlist
    from slurmdl.topology import load

    chosen = tuple(dict.fromkeys(hostlist.expand_hostlist(options.nodes))) if options.nodes else ()
    nodes = options.N if options.N is not None else len(chosen)
    if not chosen and options.N is None:
        raise UsageError("-N or --nodes: one of them is needed")
    if nodes < 1 or (chosen and nodes != len(chosen)):
        raise UsageError(f"-N {nodes}: valid: {f'{len(chosen)}, the nodes of --nodes' if chosen else '1 and more'}")
    if options.ntasks_per_node < 1:
        raise UsageError(f"--ntasks-per-node {options.ntasks_per_node}: valid: 1 and more")
    slots = nodes * options.ntasks_per_node
    ranks = slots if options.ranks is None else options.ranks
    if not nodes <= ranks <= slots:
        raise UsageError(f"--ranks {ranks}: {nodes} nodes with --ntasks-per-node {options.ntasks_per_node} hold "
                         f"{nodes} to {slots}")
    if not 0 <= options.busy <= 0.95:
        raise UsageError(f"--busy {options.busy:g}: valid: 0 to 0.95")
    if not 0 <= options.seed <= _MAX_SEED:
        raise UsageError(f"--seed {options.seed}: valid: 0 to {_MAX_SEED}")
    training = _build_workload(options)
    training.check_supported(ranks)
    return SimulatedJob(training, load.load_topology(options.topology),
                cluster_state.load_link_scores(config.load_config(), options.scores,
                                        strict=options.scores != "auto"), nodes, ranks,
                chosen, options.busy, options.seed)


def _build_workload(options: argparse.Namespace) -> TrainingWorkload:
    from slurmdl.simulate.workload import TrainingWorkload

    adaptive = options.strategy == "adaptive-gossip"
    drawn = options.traffic == "random-matching"
    period = options.period if options.period is not None else 8 if adaptive else 1
    compress = options.compress or (("fp16" if drawn else "int4") if adaptive else "none")
    servers = options.ps if options.ps is not None else int(options.strategy == "ps")
    if period < 1:
        raise UsageError(f"--period {period}: valid: 1 and more")
    if not 0 <= options.compute < float("inf"):
        raise UsageError(f"--compute {options.compute:g}: valid: seconds, 0 and more")
    return TrainingWorkload(options.strategy, _parse_parameter_count(options.parameters), servers, options.traffic, options.compute,
                    not options.no_overlap, period, compress, options.seed)


def _parse_parameter_count(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)([kMG]?)", text)
    count = round(float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[match[2]]) if match else 0
    if not 1 <= count <= 10**13:
        raise UsageError(f"--parameters {text}: valid: a number of 1 and more, e.g. 25M")
    return count
