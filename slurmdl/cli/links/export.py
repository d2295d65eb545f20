"""export link scores as Prometheus text: to stdout, to a file for node_exporter's textfile collector, or over HTTP"""

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
    parser.add_argument("--link-scores", metavar="FILE",
                        help="file of link scores (default: link_scores.file of slurmdl.yaml)")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--textfile", metavar="FILE", help="file that is written atomically")
    output.add_argument("--listen", metavar="HOST:PORT", help="serve http://HOST:PORT/metrics until terminated")
    options = parser.parse_args(argv)
    settings = config.load_config().link_scores
    path = options.link_scores or settings.file
    last_warning = ""

    def load_scores() -> LinkScores:
        nonlocal last_warning
        rejected: list[str] = []
        scores = score_files.load_scores(path, time(), settings.trusted_owner, on_reject=rejected.append)
        warning = f"{path}: {len(rejected)} rejected, the first: {rejected[0]}" if rejected else ""
        if warning and warning != last_warning:
            warn(warning)
        last_warning = warning
        return scores

    if not options.listen:
        text = prometheus_exporter.exposition_text(load_scores())
        if options.textfile:
            if not options.textfile.endswith(".prom"):
                raise UsageError(f"--textfile {options.textfile}: expected a name ending in .prom (node_exporter "
                                 "reads no others)")
            publish_file(options.textfile, text)
        else:
            print(text, end="")
        return 0
    try:
        server = prometheus_exporter.metrics_server(parse_address(options.listen, "--listen"), load_scores)
    except OSError as error:
        raise UnavailableError(f"--listen {options.listen}: cannot listen ({error.strerror})") from error
    warn(f"listening on port {server.server_address[1]}")
    with server:
        server.serve_forever()
    return 0
