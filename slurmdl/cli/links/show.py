"""the scores as a table and a heat map, worst links first"""

from __future__ import annotations

import json
import os
import shutil
from time import time
from typing import TYPE_CHECKING

from slurmdl import config
from slurmdl.cli.arguments import CliParser, write_output_file
from slurmdl.errors import InputError, SlurmdlError, warn
from slurmdl.text import print_escaped

if TYPE_CHECKING:
    from slurmdl.topology.topology import Topology


def run(argv: list[str]) -> int:
    parser = CliParser(prog="slurmdl links show", description=__doc__)
    parser.add_argument("--scores", default="auto", metavar="auto|FILE|URL",
                        help="what to show, as --dl-link-scores takes it (default: %(default)s)")
    parser.add_argument("--topology", metavar="FILE", help="zones of the heat map, instead of the cluster's")
    parser.add_argument("--all", action="store_true", help="every link; else as many as a screen holds")
    parser.add_argument("--json", action="store_true", help="the scores as JSON, worst links first")
    parser.add_argument("--svg", metavar="FILE", help="the heat map as a picture, too")
    options = parser.parse_args(argv)
    from slurmdl.links import heatmap, link_table
    from slurmdl.links.score_sources import load_from_sources
    from slurmdl.placement import score_report

    given = config.load_config()
    found = load_from_sources(given, options.scores, os.environ)
    for remark in found.warnings:
        warn(f"scores: {remark}")
    if not found.scores.link_count and options.scores != "auto":
        return InputError.exit_status
    topology = _load_topology_or_empty(options.topology)
    rows = link_table.link_rows(found.scores, topology)
    nodes, covered = len(topology.nodes), sum(name in found.scores.nodes for name in topology.nodes)
    if options.json:
        print(json.dumps({"links": [row.to_json() for row in rows], "time": time(), "nodes": nodes,
                          "nodes_with_score": covered}, indent=1))
    else:
        if nodes:
            print_escaped(f"{covered} of {nodes} nodes ({covered / nodes:.1%}) have a score younger than "
                 f"{link_table.format_age(given.link_scores.max_age)}\n")
        height = len(rows) if options.all else max(8, shutil.get_terminal_size().lines - 4)
        print_escaped(link_table.format_link_table(rows, height))
        if rows:
            print_escaped(
                f"x1: as over links that were not measured ({score_report.unmeasured_link_assumption(topology, found.scores)})")
    warmth = heatmap.build_heatmap(found.scores, topology)
    if warmth.zones and not options.json:
        print_escaped(f"\n{heatmap.heatmap_text(warmth)}")
    if options.svg:
        write_output_file(options.svg, "--svg", heatmap.heatmap_svg(warmth))
    return 0


def _load_topology_or_empty(path: str | None) -> Topology:
    """The cluster's zones, none where they cannot be read and nobody named a file of them."""
    from slurmdl.topology import load
    from slurmdl.topology.topology import Topology

    try:
        return load.load_topology(path)
    except SlurmdlError as error:
        if path:
            raise
        warn(f"no zones: {error}")
        return Topology.flat(())
