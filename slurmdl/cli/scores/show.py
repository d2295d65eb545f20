"""the scores as a table and a heat map, worst links first"""

from __future__ import annotations

import json
import os
import shutil
from time import time
from typing import TYPE_CHECKING

from slurmdl import config
from slurmdl.cli.parser import Parser, write_file
from slurmdl.errors import InputError, SlurmdlError, warn
from slurmdl.output import show

if TYPE_CHECKING:
    from slurmdl.topology.model import Topology


def run(argv: list[str]) -> int:
    parser = Parser(prog="slurmdl score show", description=__doc__)
    parser.add_argument("--scores", default="auto", metavar="auto|FILE|URL",
                        help="what to show, as --dl-scores takes it (default: %(default)s)")
    parser.add_argument("--topology", metavar="FILE", help="zones of the heat map, instead of the cluster's")
    parser.add_argument("--all", action="store_true", help="every link; else as many as a screen holds")
    parser.add_argument("--json", action="store_true", help="the scores as JSON, worst links first")
    parser.add_argument("--svg", metavar="FILE", help="the heat map as a picture, too")
    options = parser.parse_args(argv)
    from slurmdl.network import heat, table
    from slurmdl.network.live import live
    from slurmdl.placement import assumed

    given = config.load()
    found = live(given, options.scores, os.environ)
    for remark in found.remarks:
        warn(f"scores: {remark}")
    if not found.scores.measured and options.scores != "auto":
        return InputError.exit_status
    topology = _topology(options.topology)
    rows = table.rows(found.scores, topology)
    nodes, covered = len(topology.nodes), sum(name in found.scores.nodes for name in topology.nodes)
    if options.json:
        print(json.dumps({"links": [row.to_json() for row in rows], "time": time(), "nodes": nodes,
                          "nodes_with_score": covered}, indent=1))
    else:
        if nodes:
            show(f"{covered} of {nodes} nodes ({covered / nodes:.1%}) have a score younger than "
                 f"{table.age(given.scores.max_age)}\n")
        height = len(rows) if options.all else max(8, shutil.get_terminal_size().lines - 4)
        show(table.text(rows, height))
        if rows:
            show(f"x1: as over links that were not measured ({assumed.unmeasured(topology, found.scores)})")
    warmth = heat.of(found.scores, topology)
    if warmth.zones and not options.json:
        show(f"\n{heat.text(warmth)}")
    if options.svg:
        write_file(options.svg, "--svg", heat.svg(warmth))
    return 0


def _topology(path: str | None) -> Topology:
    """The cluster's zones, none where they cannot be read and nobody named a file of them."""
    from slurmdl.topology import read
    from slurmdl.topology.model import Topology

    try:
        return read.read(path)
    except SlurmdlError as error:
        if path:
            raise
        warn(f"no zones: {error}")
        return Topology.flat(())
