"""check the site's setup and suggest fixes; status 0: all OK, 1: warnings, 2: failures"""

from __future__ import annotations

import argparse
import json

from slurmdl.cli.arguments import CliParser
from slurmdl.errors import UsageError
from slurmdl.text import print_escaped


def build_parser() -> argparse.ArgumentParser:
    parser = CliParser(prog="slurmdl doctor", description=__doc__,
                       epilog="A status of 64 and above is an error of slurmdl itself: no check ran.")
    parser.add_argument("--nodes", metavar="LIST", default="",
                        help="also check these compute nodes, by a step with one task on each; e.g. n[1-4]")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS",
                        help="timeout for all checks together (default: %(default)g)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(argv: list[str]) -> int:
    options = build_parser().parse_args(argv)
    if not options.timeout > 0:
        raise UsageError(f"--timeout={options.timeout:g}: expected a number of seconds greater than 0")
    from slurmdl.doctor.checks import run_checks
    from slurmdl.doctor.site import SEVERITY_EXIT_STATUS, Finding, Site
    from slurmdl.slurm import hostlist

    site = Site(tuple(dict.fromkeys(hostlist.expand_hostlist(options.nodes))))
    results = [(check.name, result) for check, result in run_checks(site, options.timeout)]
    findings = [(name, result) for name, result in results if isinstance(result, Finding)]
    skipped = {name: result for name, result in results if isinstance(result, str)}
    severities = [finding.severity for _, finding in findings]
    status = max(SEVERITY_EXIT_STATUS[severity] for severity in severities)
    if options.json:
        print(json.dumps({"status": status, "skipped": skipped, "findings": [
            {"check": name, "severity": finding.severity, "text": finding.text, "fix": finding.fix}
            for name, finding in findings]}))
        return status
    # monitoring systems show the first line
    counts = ", ".join(f"{severities.count(severity)} {severity}" for severity in SEVERITY_EXIT_STATUS)
    lines = [f"slurmdl doctor: {counts}"]
    width = max(len(name) for name, _ in findings)
    for name, finding in findings:
        lines.append(f"{finding.severity:4}  {name:{width}}  {finding.text}")
        lines += [f"{'':{width + 8}}fix: {finding.fix}"] * bool(finding.fix)
    if skipped:
        lines.append("skipped: " + ", ".join(f"{name} ({reason})" for name, reason in skipped.items()))
    print_escaped("\n".join(lines))
    return status
