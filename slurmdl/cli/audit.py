"""show how past jobs lay in the topology, and what better nodes would have gained"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from typing import TYPE_CHECKING

from slurmdl.cli.arguments import CliParser, write_output_file
from slurmdl.errors import UsageError
from slurmdl.text import print_escaped

if TYPE_CHECKING:
    from slurmdl.history.accounting import JobTable
    from slurmdl.history.audit import AuditOptions

_DEFAULT_PERIOD_S = 7 * 86_400  # of sacct, without --since


def build_parser() -> argparse.ArgumentParser:
    parser = CliParser(prog="slurmdl audit",
                       description="Compare the leaf zones of past jobs with the fewest possible ones, and predict "
                                   "the communication time that better nodes would have saved (docs/audit.md).")
    parser.add_argument("records", nargs="?", metavar="FILE",
                        help="output of `sacct -P` or `sacct --json`, which may be compressed by gzip (columns: "
                             "docs/audit.md), - for stdin (default: run sacct)")
    parser.add_argument("--topology", metavar="FILE", help="topology file (default: the cluster's topology)")
    parser.add_argument("-S", "--since", metavar="TIME",
                        help="audit jobs that started at or after TIME, e.g. 2024-05-01 or now-7days (default: of a "
                             "file all, of sacct now-7days)")
    parser.add_argument("-E", "--until", metavar="TIME", help="audit jobs that started before TIME")
    parser.add_argument("-u", "--user", default="", metavar="LIST", help="audit the jobs of these users only")
    parser.add_argument("-r", "--partition", default="", metavar="LIST",
                        help="audit the jobs of these partitions only")
    parser.add_argument("--strategy", default="allreduce,gossip", metavar="LIST",
                        help="assumed strategies, allreduce or gossip; the first one ranks the jobs "
                             "(default: %(default)s)")
    parser.add_argument("--comm-share", type=float, default=0.3, metavar="SHARE",
                        help="share of the run time that jobs spend in communication, 0 to 0.95 "
                             "(default: %(default)g)")
    parser.add_argument("--json", action="store_true", help="JSON output")
    parser.add_argument("--csv", metavar="FILE", help="also write all audited jobs, worst first")
    parser.add_argument("--html", metavar="FILE", help="also write a report with pictures, one file without scripts")
    return parser


def run(argv: list[str]) -> int:
    arguments = build_parser().parse_args(argv)
    options = _audit_options(arguments)

    from slurmdl import config
    from slurmdl.history.audit import audit_jobs
    from slurmdl.history.audit_html import format_html
    from slurmdl.history.audit_report import audit_to_json, format_audit, format_csv, summarize_audit
    from slurmdl.launch import cluster_state
    from slurmdl.topology import load

    topology = load.load_topology(arguments.topology)
    scores = cluster_state.load_link_scores(config.load_config(), "off")
    audit = audit_jobs(_read_records(arguments.records, options), topology, scores, options)
    summary = summarize_audit(audit)
    if arguments.csv:
        write_output_file(arguments.csv, "--csv", format_csv(audit))
    if arguments.html:
        write_output_file(arguments.html, "--html", format_html(audit, summary))
    if arguments.json:
        print(json.dumps(audit_to_json(audit, summary)))
    else:
        print_escaped("\n".join(format_audit(audit, summary)))
    return 0


def _audit_options(arguments: argparse.Namespace) -> AuditOptions:
    from slurmdl.history.audit import AuditOptions
    from slurmdl.history.sacct_format import parse_moment

    if not 0 <= arguments.comm_share <= 0.95:
        raise UsageError(f"--comm-share {arguments.comm_share:g}: expected 0 to 0.95")
    now_s = time.time()
    since_s, until_s = (None if text is None else parse_moment(text, option, now_s) for text, option in (
        (arguments.since, "--since"), (arguments.until, "--until")))
    if arguments.records is None and since_s is None:
        since_s = int(until_s or now_s) - _DEFAULT_PERIOD_S
    if since_s is not None and until_s is not None and since_s >= until_s:
        raise UsageError(f"--since {arguments.since}: expected a time before --until {arguments.until}")
    users, partitions, strategies = (tuple(dict.fromkeys(filter(None, text.split(",")))) for text in (
        arguments.user, arguments.partition, arguments.strategy))
    if not strategies:
        raise UsageError("--strategy: expected allreduce or gossip")
    return AuditOptions(strategies, comm_share=arguments.comm_share, since_s=since_s, until_s=until_s, users=users,
                        partitions=partitions)


def _read_records(path: str | None, options: AuditOptions) -> JobTable:
    from slurmdl.history import accounting

    if path is None:
        assert options.since_s is not None, "_audit_options sets the default period"
        return accounting.query_accounting(options.since_s, options.until_s or int(time.time()) + 1)
    if path == "-":
        if not sys.stdin:
            raise UsageError("-: standard input is closed")
        assert isinstance(sys.stdin.buffer, io.BufferedReader), "standard input is binary"
        return accounting.read_accounting_stream(sys.stdin.buffer, "standard input")
    return accounting.read_accounting_file(path)
