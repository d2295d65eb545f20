"""show link scores as a table, worst links first"""

from __future__ import annotations

import json
import os
import shutil
from time import time

from slurmdl import config
from slurmdl.cli.arguments import CliParser
from slurmdl.cli.links import load_topology_or_flat
from slurmdl.errors import InputError, SlurmdlError, warn
from slurmdl.text import pluralize, print_escaped


def run(argv: list[str]) -> int:
    parser = CliParser(prog="slurmdl links show", description=__doc__)
    parser.add_argument("--link-scores", default="auto", metavar="auto|FILE|URL",
                        help="source, as for --dl-link-scores (default: %(default)s)")
    parser.add_argument("--topology", metavar="FILE",
                        help="topology file, or text of `scontrol show topology` (default: the cluster's topology)")
    parser.add_argument("--all", action="store_true", help="all links (default: as many as fit the terminal)")
    parser.add_argument("--json", action="store_true", help="JSON output, worst links first")
    options = parser.parse_args(argv)
    from slurmdl.links import link_table
    from slurmdl.links.score_sources import load_from_sources
    from slurmdl.placement import explain
    from slurmdl.slurm.slurm_conf import cluster_name

    def own_cluster_name() -> str:
        try:
            return cluster_name(os.environ)
        except SlurmdlError as error:
            warn(f"link scores: your own probes are not shown, because the cluster's name is unknown: {error}")
            return ""

    settings = config.load_config()
    loaded = load_from_sources(settings, options.link_scores, os.environ, own_cluster_name)
    for warning in loaded.warnings:
        warn(f"link scores: {warning}")
    if not loaded.scores.link_count and options.link_scores != "auto":
        return InputError.exit_status
    topology = load_topology_or_flat(options.topology, (), "no zones are shown")
    rows = link_table.link_rows(loaded.scores, topology)
    node_count, scored = len(topology.nodes), sum(name in loaded.scores.nodes for name in topology.nodes)
    if options.json:
        print(json.dumps({"links": [row.to_json() for row in rows], "time": time(), "nodes": node_count,
                          "nodes_with_score": scored}, indent=1))
    else:
        if node_count:
            max_age = link_table.format_age(settings.link_scores.max_age)
            print_escaped(f"{scored} of {pluralize(node_count, 'node')} ({scored / node_count:.1%}) with a link "
                          f"score younger than {max_age}\n")
        max_rows = len(rows) if options.all else max(8, shutil.get_terminal_size().lines - 4)
        print_escaped(link_table.format_link_table(rows, max_rows))
        if rows:
            assumption = explain.unmeasured_link_assumption(topology, loaded.scores)
            print_escaped(f"x1: same as a link without a score ({assumption})")
    return 0
