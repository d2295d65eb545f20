"""show, check, compare and convert the zones of the cluster"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from typing import TYPE_CHECKING

from slurmdl.cli.arguments import CliParser, write_output_file
from slurmdl.errors import InputError, UnavailableError, UsageError, warn
from slurmdl.text import pluralize, print_escaped

if TYPE_CHECKING:
    from slurmdl.cluster.snapshot import ClusterSnapshot

_FORMATS = "topology.conf, topology.yaml, JSON or text of `scontrol show topology`"
_FILE_HELP = f"{_FORMATS} (default: the file next to slurm.conf, else the controller)"
_CLUSTER_HELP = "nodes from JSON, or text of `scontrol -d show nodes` or `sinfo -N -l` (default: the controller)"


def build_parser() -> argparse.ArgumentParser:
    top = CliParser(prog="slurmdl topology", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, file: str = _FILE_HELP) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("file", nargs="?", metavar="FILE", help=file)
        sub.add_argument("--name", metavar="TOPOLOGY", help="select one of several topologies")
        return sub

    show = command("show", "print the zones as a tree that fits the terminal; similar zones share a line")
    show.add_argument("--all", action="store_true", help="print one line per zone, not truncated")
    show.add_argument("--svg", metavar="OUT", help="also write an SVG drawing")
    show.add_argument("--json", action="store_true", help="print JSON")

    check = command("check", "report errors and oddities; status 65 if slurmctld would not start")
    check.add_argument("--cluster", metavar="FILE", help=_CLUSTER_HELP)
    check.add_argument("--offline", action="store_true", help="do not query the controller for the nodes")
    check.add_argument("--strict", action="store_true", help="status 65 for warnings, too")

    diff = command("diff", "compare a file with the controller or a second file; status 1 if they differ",
                   f"{_FORMATS} (default: the file next to slurm.conf)")
    diff.add_argument("other", nargs="?", metavar="FILE2", help="second file (default: the controller)")

    convert = command("convert", "write the zones in another format; report lost information")
    convert.add_argument("--format", required=True, choices=("conf", "yaml", "json", "graphml"),
                         help="output format; graphml needs networkx (pip install 'slurmdl[graph]')")
    convert.add_argument("--output", metavar="OUT", help="output file (default: standard output)")

    features = command("features", "print the NodeName lines of slurm.conf with each node's zone as a feature")
    features.add_argument("--slurm-conf", metavar="FILE",
                          help="file whose lines are rewritten (default: SLURM_CONF, /etc/slurm/slurm.conf)")
    features.add_argument("--cluster", metavar="FILE", help=_CLUSTER_HELP)
    features.add_argument("--all-levels", action="store_true", help="also add the zones above the leaves as features")
    features.add_argument("--scontrol", action="store_true",
                          help="print commands for the running controller; valid until slurm.conf is read again")

    example = commands.add_parser("example", help="print a synthetic topology",
                                  description="Print a synthetic topology with equal zones.")
    example.add_argument("shape", metavar="SHAPE", help="zones per level from the roots down, then nodes, "
                                                        "e.g. 1x23x394x4992; for blocks BLOCKSxNODES")
    example.add_argument("--blocks", metavar="SIZES",
                         help="BlockSizes, e.g. 18,72; print blocks instead of a tree")
    example.add_argument("--format", default="conf", choices=("conf", "yaml", "json"),
                         help="output format (default: conf)")
    return top


def run(argv: list[str]) -> int:
    options = build_parser().parse_args(argv)
    commands = {"show": _show, "check": _check, "diff": _diff, "convert": _convert, "features": _features,
                "example": _example}
    return commands[options.command](options)


def _show(options: argparse.Namespace) -> int:
    from slurmdl.topology import drawing, load

    topologies = load.load_topologies(options.file)
    chosen = [topologies.get(options.name)] if options.name else list(topologies.topologies)
    if options.svg:
        write_output_file(options.svg, "--svg", drawing.draw_topology(topologies.get(options.name)))
    if options.json:
        print(json.dumps((chosen[0] if len(chosen) == 1 else topologies).to_json()))
        return 0
    width, height = (sys.maxsize, None) if options.all else shutil.get_terminal_size()
    print_escaped("\n\n".join(drawing.format_tree(topology, width=width, height=height) for topology in chosen))
    return 0


def _check(options: argparse.Namespace) -> int:
    from slurmdl.topology import load
    from slurmdl.topology.check import check_declarations, finding_from_error, sort_findings

    errors: list[InputError] = []
    try:
        sources = load.load_declarations(options.file, errors.append)
    except InputError as error:
        errors.append(error)
        sources = []
    names = [source.name for source in sources]
    if options.name and sources:
        sources = [source for source in sources if source.name == options.name]
        if not sources:
            raise UsageError(f"--name={options.name}: no such topology; expected one of {', '.join(names)}")
    nodes, comparison_note = None, ""
    if options.cluster or not options.offline:
        try:
            nodes = [node.name for node in _load_snapshot(options.cluster).nodes]
        except UnavailableError as error:
            comparison_note = f"; not compared with the cluster ({error})"
    findings = [*map(finding_from_error, errors),
                *(finding for source in sources for finding in check_declarations(source, nodes))]
    for finding in sort_findings(findings):
        print_escaped(f"{finding.severity}: {finding.text}")
    severities = [finding.severity for finding in findings]
    counts = ", ".join(pluralize(severities.count(severity), severity) for severity in ("error", "warning", "note"))
    zone_count = sum(len(source.zones) for source in sources)
    print_escaped(f"{counts} in {pluralize(zone_count, 'zone')}{comparison_note}")
    return InputError.exit_status if "error" in severities or (options.strict and "warning" in severities) else 0


def _diff(options: argparse.Namespace) -> int:
    from slurmdl.topology import check, load

    left = load.load_topology_file(options.file) if options.file else load.load_slurm_topology_file()
    if left is None:
        raise UsageError("slurmdl topology diff: no topology.conf or topology.yaml next to slurm.conf; expected FILE")
    right = load.load_topology_file(options.other) if options.other else load.query_topologies()
    labels = left.topologies[0].source, options.other or "the controller"
    lines = check.diff_sets(left, right, labels, options.name)
    print_escaped("\n".join([*lines, f"{pluralize(len(lines), 'difference')} between {labels[0]} and {labels[1]}"]))
    return 1 if lines else 0


def _convert(options: argparse.Namespace) -> int:
    from slurmdl.topology import load, write

    topologies = load.load_topologies(options.file)
    text = write.format_topology(topologies, options.name, options.format)
    for loss in write.conversion_losses(topologies, options.name, options.format):
        warn(f"lost: {loss}")
    if options.output:
        write_output_file(options.output, "--output", text)
    else:
        print(text, end="")
    return 0


def _features(options: argparse.Namespace) -> int:
    from slurmdl.slurm.slurm_conf import slurm_conf_path
    from slurmdl.topology import load, write

    zones = write.zone_features(load.load_topology(options.file, options.name), options.all_levels)
    conf = options.slurm_conf or slurm_conf_path()
    if not options.scontrol and (options.slurm_conf or (not options.cluster and os.path.exists(conf))):
        lines = list(write.rewrite_node_lines(conf, zones))
        print_escaped("\n".join([f"# replaces the NodeName lines of {conf} and of its includes", *lines]))
        return 0
    present = {node.name: node.features for node in _load_snapshot(options.cluster).nodes}
    known = {node: names for node, names in zones.items() if node in present}
    if not options.scontrol:
        print("# for the NodeName lines of slurm.conf; each node may be on one such line only")
    prefix, key = ("scontrol update ", "AvailableFeatures") if options.scontrol else ("", "Features")
    for nodes, names in write.group_by_features(known, present):
        print_escaped(f"{prefix}NodeName={nodes} {key}={names}")
    return 0


def _load_snapshot(path: str | None) -> ClusterSnapshot:
    from slurmdl import config
    from slurmdl.cluster import load

    return load.load_cluster_file(path) if path else load.query_cluster(config.load_config().cluster_backend)[0]


def _example(options: argparse.Namespace) -> int:
    from slurmdl.topology import write
    from slurmdl.topology.source import block_topology, parse_block_sizes, parse_shape, tree_topology
    from slurmdl.topology.topology import TopologySet

    counts = parse_shape(options.shape)
    try:
        topology = block_topology(counts, parse_block_sizes(options.blocks)) if options.blocks else \
            tree_topology(counts)
    except ValueError as error:
        raise UsageError(f"--blocks: {error}") from error
    print(write.format_topology(TopologySet.single(topology), None, options.format), end="")
    return 0
