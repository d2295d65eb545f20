"""Bad nodes by the site's own health checks: a file, node features and comments in Slurm, and Prometheus.

slurmdl does not repeat what a site checks already. A source that fails costs a warning; the others are used.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence

from slurmdl import files
from slurmdl.config import Config
from slurmdl.errors import InputError, SlurmdlError
from slurmdl.slurm import hostlist, process
from slurmdl.slurm.output import SlurmOutput, split_output

_MAX_FILE_BYTES = 4 * 2**20
#: time limit of the query to Prometheus in seconds
_QUERY_TIMEOUT_S = 1.0


def load_site_reasons(config: Config, on_warning: Callable[[str], None],
                      get_records: Callable[[], SlurmOutput] | None = None) -> dict[str, str]:
    """Node -> why it is bad, by the sources of `bad_nodes` in slurmdl.yaml; the first source that names it counts.

    `get_records` returns the nodes as scontrol shows them; None to query Slurm.
    """
    settings = config.bad_nodes
    sources: list[Callable[[], Iterator[tuple[str, str]]]] = []
    if settings.file:
        sources.append(lambda: parse_bad_nodes(
            files.read_regular_file(settings.file, _MAX_FILE_BYTES).decode(errors="replace"), settings.file,
            lambda error: on_warning(f"bad_nodes: {error}; the line is ignored")))
    if settings.features or settings.comment:
        records = get_records or (lambda: split_output(process.check_output(["scontrol", "show", "nodes"])))
        sources.append(lambda: find_bad_records(records(), settings.features, settings.comment))
    if settings.prometheus_query:
        sources.append(lambda: _query_prometheus(config))
    reasons: dict[str, str] = {}
    for source in sources:
        try:
            for node, reason in source():
                reasons.setdefault(node, reason)
        except SlurmdlError as error:
            on_warning(f"bad_nodes: {error}")
    return reasons


def parse_bad_nodes(text: str, path: str, on_error: Callable[[InputError], None]) -> Iterator[tuple[str, str]]:
    """The nodes of a file with one hostlist per line and, after a blank, the reason; `#` starts a comment.

    Lists of node names, one per line or separated by commas, have this form, e.g. failing_nodes.txt of AMD Primus. A
    node with a domain also counts without it. `on_error` gets the first line that is not valid.
    """
    has_failed = False
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split(maxsplit=1)
        if not words:
            continue
        try:
            nodes = hostlist.expand_hostlist(words[0])
        except InputError as error:
            if not has_failed:
                on_error(InputError(str(error), path, number))
            has_failed = True
            continue
        reason = f"{words[1].strip()} ({path})" if len(words) > 1 else f"listed in {path}"
        for node in nodes:
            yield node, reason
            if "." in node:
                yield node.partition(".")[0], reason


def find_bad_records(output: SlurmOutput, features: Sequence[str], comment: str) -> Iterator[tuple[str, str]]:
    """The nodes in the output of scontrol with one of the features, or a matching Comment or Extra.

    `comment` is a regular expression, "" for none.
    """
    from slurmdl.cluster.reader import read_cluster, read_comments

    pattern = re.compile(comment or "(?!)")
    for node in read_cluster(output).nodes:
        if found := set(node.features).intersection(features):
            yield node.name, f"has the node feature {min(found)}"
    for name, comments in read_comments(output):
        for value in filter(pattern.search, comments):
            yield name, f"its comment in Slurm is {value!r}"


def _query_prometheus(config: Config) -> Iterator[tuple[str, str]]:
    from slurmdl.links import prometheus

    server, query = config.link_scores.prometheus, config.bad_nodes.prometheus_query
    if not server.url:
        raise InputError("prometheus_query: no server; expected link_scores.prometheus.url in slurmdl.yaml")
    deadline = time.monotonic() + _QUERY_TIMEOUT_S
    for node in prometheus.query_nodes(server, query, deadline):
        yield node, f"in the answer of Prometheus to {query}"
