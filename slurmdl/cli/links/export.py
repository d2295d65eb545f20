"""the scores as Prometheus text: on stdout, as a file for node_exporter's textfile collector, or over HTTP"""

from __future__ import annotations

from time import time

from slurmdl import config
from slurmdl.cli.address import parse_address
from slurmdl.cli.arguments import CliParser
from slurmdl.errors import UnavailableError, UsageError, warn
from slurmdl.links import prometheus_exporter, score_files
from slurmdl.links.link_scores import LinkScores
from slurmdl.links.sample_store import publish_file


def run(argv: list[str]) -> int:
    parser = CliParser(prog="slurmdl links export", description=__doc__)
    parser.add_argument("--scores", metavar="FILE", help="the snapshot (default: link_scores.file of slurmdl.yaml)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--textfile", metavar="FILE", help="written at once, so that nobody reads half of it")
    where.add_argument("--listen", metavar="HOST:PORT", help="serve http://HOST:PORT/metrics until it is ended")
    options = parser.parse_args(argv)
    given = config.load_config().link_scores
    path = options.scores or given.file

    told = ""

    def scores() -> LinkScores:
        nonlocal told
        refused: list[str] = []
        found = score_files.load_scores(path, time(), given.trusted_owner, on_reject=refused.append)
        line = f"{path}: {len(refused)} refused, the first: {refused[0]}" if refused else ""
        if line and line != told:
            warn(line)
        told = line
        return found

    if not options.listen:
        text = prometheus_exporter.exposition_text(scores())
        if options.textfile:
            if not options.textfile.endswith(".prom"):
                raise UsageError(f"--textfile {options.textfile}: node_exporter reads only names that end in .prom")
            publish_file(options.textfile, text)
        else:
            print(text, end="")
        return 0
    host, port = parse_address(options.listen, "--listen")
    try:
        server = prometheus_exporter.metrics_server((host, port), scores)
    except OSError as error:
        raise UnavailableError(f"--listen {options.listen}: cannot listen ({error.strerror})") from error
    warn(f"listening on port {server.server_address[1]}")
    with server:
        server.serve_forever()
    return 0
