"""the scores as Prometheus text: on stdout, as a file for node_exporter's textfile collector, or over HTTP"""

from __future__ import annotations

from time import time

from slurmdl import config
from slurmdl.cli.address import address
from slurmdl.cli.parser import Parser
from slurmdl.errors import UnavailableError, UsageError, warn
from slurmdl.network import exposition, read
from slurmdl.network.model import LinkScores
from slurmdl.network.store import publish


def run(argv: list[str]) -> int:
    parser = Parser(prog="slurmdl score export", description=__doc__)
    parser.add_argument("--scores", metavar="FILE", help="the snapshot (default: scores.file of slurmdl.yaml)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--textfile", metavar="FILE", help="written at once, so that nobody reads half of it")
    where.add_argument("--listen", metavar="HOST:PORT", help="serve http://HOST:PORT/metrics until it is ended")
    options = parser.parse_args(argv)
    given = config.load().scores
    path = options.scores or given.file

    told = ""

    def scores() -> LinkScores:
        nonlocal told
        refused: list[str] = []
        found = read.from_file(path, time(), given.owner, refuse=refused.append)
        line = f"{path}: {len(refused)} refused, the first: {refused[0]}" if refused else ""
        if line and line != told:
            warn(line)
        told = line
        return found

    if not options.listen:
        text = exposition.text(scores())
        if options.textfile:
            if not options.textfile.endswith(".prom"):
                raise UsageError(f"--textfile {options.textfile}: node_exporter reads only names that end in .prom")
            publish(options.textfile, text)
        else:
            print(text, end="")
        return 0
    host, port = address(options.listen, "--listen")
    try:
        server = exposition.server((host, port), scores)
    except OSError as error:
        raise UnavailableError(f"--listen {options.listen}: cannot listen ({error.strerror})") from error
    warn(f"listening on port {server.server_address[1]}")
    with server:
        server.serve_forever()
    return 0
