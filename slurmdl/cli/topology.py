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
from slurmdl.text import print_escaped

if TYPE_CHECKING:
    from slurmdl.cluster.snapshot import ClusterSnapshot

_FILE_HELP = "a topology.conf, topology.yaml or JSON; without it the file beside slurm.conf, else the controller's answer"
_CLUSTER_HELP = "nodes from JSON, or from the text of `scontrol -d show nodes`, instead of the controller's"


def build_parser() -> argparse.ArgumentParser:
    top = CliParser(prog="slurmdl topology", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, file: str = _FILE_HELP) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("file", nargs="?", metavar="FILE", help=file)
        sub.add_argument("--name", metavar="TOPOLOGY", help="one of several topologies")
        return sub

    show = command("show", "print the zones as a tree; those that are alike share a line until it fits the terminal")
    show.add_argument("--topology", metavar="FILE", dest="file_option", help="the same as FILE")
    show.add_argument("--all", action="store_true", help="every zone on a line of its own, no line cut")
    show.add_argument("--svg", metavar="OUT", help="write a picture, too")
    show.add_argument("--json", action="store_true", help="print the canonical form instead")

    check = command("check", "all that is wrong or odd; status 65 where slurmctld would not start with it")
    check.add_argument("--cluster", metavar="FILE", help=_CLUSTER_HELP)
    check.add_argument("--offline", action="store_true", help="ask no controller for the nodes of the cluster")
    check.add_argument("--strict", action="store_true", help="status 65 where there are warnings, too")

    diff = command("diff", "compare a file with the controller, or with a second file; status 1 where they differ",
                   "a topology.conf, topology.yaml or JSON; without it the file beside slurm.conf")
    diff.add_argument("other", nargs="?", metavar="FILE2", help="what to compare with instead of the controller")

    convert = command("convert", "write the zones as topology.conf, topology.yaml or JSON; what is lost is told")
    convert.add_argument("--to", required=True, choices=("conf", "yaml", "json"), help="the form that is written")
    convert.add_argument("--output", metavar="OUT", help="where to, instead of standard output")

    features = command("features", "print the NodeName lines of slurm.conf with each node's zone as a feature")
    features.add_argument("--slurm-conf", metavar="FILE",
                          help="whose lines are rewritten (default: SLURM_CONF, /etc/slurm/slurm.conf)")
    features.add_argument("--cluster", metavar="FILE", help=_CLUSTER_HELP)
    features.add_argument("--every-level", action="store_true", help="the zones above the leaves as features, too")
    features.add_argument("--scontrol", action="store_true",
                          help="commands for the running controller instead, until slurm.conf is read again")

    example = commands.add_parser("example", help="print a topology of a shape",
                                  description="Print a topology of a shape, dealt out evenly.")
    example.add_argument("shape", metavar="SHAPE", help="zones of each level from the roots down, then nodes, "
                                                        "e.g. 1x23x394x4992; of blocks BLOCKSxNODES")
    example.add_argument("--blocks", metavar="SIZES",
                         help="blocks instead of a tree, with these BlockSizes, e.g. 18,72")
    example.add_argument("--to", default="conf", choices=("conf", "yaml", "json"), help="the form (default: conf)")
    return top


def run(argv: list[str]) -> int:
    """`slurmdl topology`: see `parser`."""
    options = build_parser().parse_args(argv)
    commands = {"show": _show, "check": _check, "diff": _diff, "convert": _convert, "features": _features,
                "example": _example}
    return commands[options.command](options)


def _show(options: argparse.Namespace) -> int:
    from slurmdl.topology import load, text_tree

    if options.file and options.file_option:
        raise UsageError("slurmdl topology show: FILE and --topology FILE are the same; give one of them")
    topologies = load.load_topologies(options.file or options.file_option)
    chosen = [topologies.get(options.name)] if options.name else list(topologies.topologies)
    if options.svg:
        from slurmdl.topology.topology_svg import draw_topology

        write_output_file(options.svg, "--svg", draw_topology(topologies.get(options.name)))
    if options.json:
        print(json.dumps((chosen[0] if len(chosen) == 1 else topologies).to_json()))
        return 0
    width, height = (sys.maxsize, None) if options.all else shutil.get_terminal_size()
    print_escaped("\n\n".join(text_tree.format_tree(topology, width=width, height=height) for topology in chosen))
    return 0


def _check(options: argparse.Namespace) -> int:
    from slurmdl.topology import load
    from slurmdl.topology.check import check_source, finding_from_error, sort_findings
    from slurmdl.text import pluralize

    faults: list[InputError] = []
    try:
        each = load.load_sources(options.file, faults.append)
    except InputError as error:
        faults.append(error)
        each = []
    names = [contents.name for contents in each]
    if options.name and each:
        each = [contents for contents in each if contents.name == options.name]
        if not each:
            raise UsageError(f"--name={options.name}: no such topology; valid: {', '.join(names)}")
    nodes, unasked = None, ""
    if options.cluster or not options.offline:
        try:
            nodes = [node.name for node in _load_snapshot(options.cluster).nodes]
        except UnavailableError as error:
            unasked = f"; not compared with the nodes of the cluster ({error})"
    found = [finding_from_error(error) for error in faults]
    for contents in each:
        found += check_source(contents, nodes)
    for finding in sort_findings(found):
        print_escaped(f"{finding.severity}: {finding.text}")
    grades = [finding.severity for finding in found]
    counts = ", ".join(pluralize(grades.count(grade), grade) for grade in ("error", "warning", "note"))
    zones = sum(len(contents.zones) for contents in each)
    print_escaped(f"{counts} in {pluralize(zones, 'zone')}{unasked}")
    return InputError.exit_status if "error" in grades or (options.strict and "warning" in grades) else 0


def _diff(options: argparse.Namespace) -> int:
    from slurmdl.topology import diff, load
    from slurmdl.text import pluralize

    one = load.load_topology_file(options.file) if options.file else load.load_slurm_topology_file()
    if one is None:
        raise UsageError("slurmdl topology diff: no topology.conf or topology.yaml beside slurm.conf; name a FILE")
    other = load.load_topology_file(options.other) if options.other else load.query_topologies()
    sides = one.topologies[0].source, options.other or "the controller"
    lines = diff.diff_sets(one, other, sides, options.name)
    print_escaped("\n".join([*lines, f"{pluralize(len(lines), 'difference')} between {sides[0]} and {sides[1]}"]))
    return 1 if lines else 0


def _convert(options: argparse.Namespace) -> int:
    from slurmdl.topology import load, write

    topologies = load.load_topologies(options.file)
    text = write.format_topology(topologies, options.name, options.to)
    for loss in write.conversion_losses(topologies, options.name, options.to):
        warn(f"lost: {loss}")
    if options.output:
        write_output_file(options.output, "--output", text)
    else:
        print(text, end="")
    return 0


def _features(options: argparse.Namespace) -> int:
    from slurmdl.slurm.slurm_conf import slurm_conf_path
    from slurmdl.topology import features, load

    topology = load.load_topology(options.file, options.name)
    zones = features.zone_features(topology, options.every_level)
    conf = options.slurm_conf or slurm_conf_path()
    if not options.scontrol and (options.slurm_conf or (not options.cluster and os.path.exists(conf))):
        lines = list(features.rewrite_node_lines(conf, zones))
        print_escaped(
            "\n".join([f"# instead of the NodeName lines of {conf} and of the files that it includes", *lines]))
        return 0
    present = {node.name: node.features for node in _load_snapshot(options.cluster).nodes}
    known = {node: names for node, names in zones.items() if node in present}
    if options.scontrol:
        for nodes, names in features.group_by_features(known, present):
            print_escaped(f"scontrol update NodeName={nodes} AvailableFeatures={names}")
        return 0
    print("# what to put into the NodeName lines of slurm.conf; each node may stand on one such line only")
    for nodes, names in features.group_by_features(known, present):
        print_escaped(f"NodeName={nodes} Features={names}")
    return 0


def _load_snapshot(path: str | None) -> ClusterSnapshot:
    from slurmdl import config
    from slurmdl.cluster import load

    return load.load_cluster_file(path) if path else load.query_cluster(config.load_config().cluster_backend)[0]


def _example(options: argparse.Namespace) -> int:
    from slurmdl.topology import example, write
    from slurmdl.topology.topology import TopologySet

    counts = example.parse_shape(options.shape)
    made = example.block_topology(counts, example.parse_block_sizes(options.blocks)
                                  ) if options.blocks else example.tree_topology(counts)
    print(write.format_topology(TopologySet.single(made), None, options.to), end="")
    return 0
