"""what of the site's set-up works, what does not, and the mend; status 0: all OK, 1: warnings, 2: faults"""

from __future__ import annotations

import argparse
import json

from slurmdl.cli.arguments import CliParser
from slurmdl.errors import UsageError
from slurmdl.text import print_escaped

#: seconds for all checks
TIMEOUT_S = 60.0


def build_parser() -> argparse.ArgumentParser:
    top = CliParser(prog="slurmdl doctor", description=__doc__,
                 epilog="A status of 64 and above is slurmdl's own: nothing was looked at.")
    top.add_argument("--nodes", metavar="LIST", default="",
                     help="look at these compute nodes, too, by a step of one task on each; e.g. n[1-4]")
    top.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS",
                     help="for all checks together (default: %(default)g)")
    top.add_argument("--json", action="store_true", help="print the findings as JSON")
    return top


def run(argv: list[str]) -> int:
    options = build_parser().parse_args(argv)
    if not options.timeout > 0:
        raise UsageError(f"--timeout={options.timeout:g}: not valid; valid: seconds above 0")
    from slurmdl.doctor.finding import SEVERITY_EXIT_STATUS, Finding
    from slurmdl.doctor.runner import run_checks
    from slurmdl.doctor.site import Site
    from slurmdl.slurm import hostlist

    site = Site(tuple(dict.fromkeys(hostlist.expand_hostlist(options.nodes))))
    found = [(check.name, result) for check, result in run_checks(site, options.timeout)]
    findings = [(name, result) for name, result in found if isinstance(result, Finding)]
    left = {name: result for name, result in found if isinstance(result, str)}
    grades = [finding.severity for _, finding in findings]
    status = max(SEVERITY_EXIT_STATUS[grade] for grade in grades)
    if options.json:
        print(json.dumps({"status": status, "not_looked_at": left, "findings": [
            {"check": name, "grade": finding.severity, "text": finding.text, "mend": finding.fix}
            for name, finding in findings]}))
        return status
    # the first line is what a monitoring system shows
    lines = ["slurmdl doctor: " + ", ".join(f"{grades.count(grade)} {grade}" for grade in SEVERITY_EXIT_STATUS)]
    width = max(len(name) for name, _ in findings)
    for name, finding in findings:
        lines.append(f"{finding.severity:4}  {name:{width}}  {finding.text}")
        lines += [f"{'':{width + 8}}mend: {finding.fix}"] * bool(finding.fix)
    if left:
        lines.append("not looked at: " + ", ".join(f"{name} ({reason})" for name, reason in left.items()))
    print_escaped("\n".join(lines))
    return status
