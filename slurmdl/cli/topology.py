"""show and check the zones of the cluster"""

from __future__ import annotations

from slurmdl.cli.parser import Parser


def run(argv: list[str]) -> int:
    """`slurmdl topology show [--topology FILE] [--json]`."""
    parser = Parser(prog="slurmdl topology", description="The zones of the cluster.")
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="print the zones as a tree")
    show.add_argument("--topology", metavar="FILE",
                      help="a topology.conf or JSON instead of the file beside slurm.conf or the controller's answer")
    show.add_argument("--json", action="store_true", help="print the canonical form instead")
    options = parser.parse_args(argv)

    import json

    from slurmdl.topology import read, tree

    topology = read.read(options.topology)
    print(json.dumps(topology.to_json()) if options.json else tree.text(topology))
    return 0
