"""show which nodes and ranks a job would get, and why"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from slurmdl import units
from slurmdl.cli.parser import write_file
from slurmdl.errors import PlacementError, UnavailableError, UsageError
from slurmdl.output import show

if TYPE_CHECKING:
    from slurmdl.config import Config
    from slurmdl.dl_options import DlOptions
    from slurmdl.launch.sbatch import Decision
    from slurmdl.launch.submission import Submission
    from slurmdl.launch.survey import Survey
    from slurmdl.placement.exact import Exact
    from slurmdl.placement.model import Placement
    from slurmdl.request import JobRequest

HELP = """\
usage: slurmdl place [options] [--dl-*] [sbatch options] [script]

Shows what `slurmdl sbatch` would choose for the same words, and why; submits nothing.

  --explain        the choice, what lost against it, the ranks, the cost (the default)
  --json           the same as one JSON object
  --exact          beside it the optimum of a small job by a solver (pip install 'slurmdl[exact]'), at most 10 s
  --svg FILE       a picture of the zones, the nodes and the ranks, too
  --topology FILE  zones from a topology.conf, topology.yaml or JSON instead of the cluster's
  --cluster FILE   nodes and partitions from JSON, or from the text of
                   `scontrol -d show nodes` and `show partitions`, instead of the cluster's
  --scores FILE    link scores, as --dl-scores=FILE
  --seed N         settles the choice among equal nodes, so that many who ask at once do not all get the same
                   ones; 0, the default: the first of them

Options stand before the script: what stands behind it are its own arguments. Without a script only the options
count. Status 0 also where Slurm chooses the nodes, with --dl-strict then 75."""

_FILES = ("svg", "topology", "cluster", "scores")
#: largest seed
_MAX_SEED = 2**32


def run(argv: list[str]) -> int:
    """`slurmdl place`: see HELP."""
    from slurmdl import config
    from slurmdl.launch import submission

    own, words = _split(argv)
    if "help" in own:
        print(HELP)
        return 0
    site = config.load()
    job = submission.read(words, os.environ, site.options)
    job = replace(job, request=replace(job.request, seed=_seed(own.get("seed", "0"))))
    seen = _survey(site, own, job.request)
    decision = _decide(job, seen, live=not {"cluster", "topology"} & own.keys())
    if "svg" in own:
        _draw(decision, seen, own["svg"])
    exact = _exact(job.request, seen) if "exact" in own else None
    show(_json(job.request.dl, decision, seen, exact) if "json" in own else _text(job.request, decision, seen, exact))
    return 0


def _split(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """This command's own options, and the words that are sbatch's.

    Raises
    ------
    UsageError : an option without its file, a misspelled one, or one behind the script.
    """
    from slurmdl import dl_options, getopt, sbatch_options

    flags = ("json", "explain", "exact", "help")
    own = (*flags, *_FILES, "seed")
    table: dict[str, getopt.Takes] = {**sbatch_options.LONG, **dl_options.LONG}
    table.update(dict.fromkeys(flags, "no"))
    table.update(dict.fromkeys((*_FILES, "seed"), "yes"))
    line = getopt.parse(argv, sbatch_options.SHORT, table)
    for option in line.options:
        if not option.known and (meant := _meant(option.words[0], own)):
            raise UsageError(f"unknown option {option.words[0]}; valid: --{meant}")
    for word in line.operands[1:]:
        if meant := _meant(word, list(dl_options.LONG) if word.startswith("--dl-") else own):
            raise UsageError(f"{word.partition('=')[0]} behind {line.operands[0]} is an argument of the script; "
                             f"valid: --{meant} before the script, and nothing behind it")
    ours = [option for option in line.options if option.name in own]
    for option in ours:
        if option.name in _FILES and not option.value:
            raise UsageError(f"--{option.name} needs a file")
    taken = {i for option in ours for i in range(option.index, option.index + len(option.words))}
    return ({option.name: option.value or "" for option in ours},
            [word for i, word in enumerate(argv) if i not in taken])


def _meant(word: str, names: Sequence[str]) -> str:
    """The option that a word names, or nearly names; "" for none. What else there is can be an option of a newer
    sbatch, or an argument of the script."""
    from difflib import get_close_matches

    if not word.startswith("--"):
        return ""
    return next(iter(get_close_matches(word[2:].partition("=")[0][:40], names, n=1, cutoff=0.8)), "")


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) > _MAX_SEED:
        raise UsageError(f"--seed: {text!r} is not valid; valid: 0 to {_MAX_SEED}")
    return int(text)


def _survey(site: Config, own: dict[str, str], request: JobRequest) -> Survey:
    from slurmdl.cluster import read as cluster
    from slurmdl.launch import survey
    from slurmdl.topology import read as topology

    scores, strict = own.get("scores", request.dl.scores), request.dl.strict or "scores" in own
    if "cluster" not in own and "topology" not in own:
        return survey.take(site, scores, request.partitions, strict=strict)
    snapshot = cluster.from_file(own["cluster"]) if "cluster" in own else \
        cluster.from_controller(site.cluster_backend)[0]
    return survey.Survey(snapshot, topology.read(own.get("topology"), snapshot.topology_of(request.partitions)),
                         survey.link_scores(site, scores, strict=strict))


def _decide(job: Submission, seen: Survey, live: bool) -> Decision:
    from slurmdl.launch.sbatch import Decision, decide, not_applied

    dl = job.request.dl
    if dl.bind == "off":
        return Decision(reason=not_applied(dl, "--dl-bind=off"), failed=bool(dl.zone))
    decision = decide(job, seen, _sbatch() if live else "")
    if decision.reason and dl.strict:
        raise PlacementError(decision.reason)
    return decision


def _sbatch() -> str:
    from slurmdl.launch.sbatch import find_sbatch

    try:
        return find_sbatch(os.environ)
    except UnavailableError:
        return ""


def _exact(request: JobRequest, seen: Survey) -> Exact | str:
    """The solver's answer, or why it has none.

    Raises
    ------
    UnavailableError : the solver is not installed.
    """
    from slurmdl.placement import exact

    try:
        return exact.solve(request, seen.cluster, seen.topology, seen.scores)
    except PlacementError as error:
        return str(error)


def _text(request: JobRequest, decision: Decision, seen: Survey, exact: Exact | str | None) -> str:
    from slurmdl.placement.explain import explain
    from slurmdl.placement.model import Placement

    binding = " ".join(decision.argv) or "none"
    if decision.reason:
        binding += f", Slurm chooses the nodes: {decision.reason}"
    placement = decision.placement or Placement(reason=decision.reason)
    solved = f"\nexact      {_solved(exact, placement)}" if exact is not None else ""
    text = explain(placement, seen.topology, seen.cluster, seen.scores, request.dl)
    return f"{text}{solved}\nbinding    {binding}"


def _solved(exact: Exact | str, placement: Placement) -> str:
    if isinstance(exact, str):
        return f"none: {exact}"
    found = f"{units.duration(exact.cost.seconds)}, {'proven' if exact.proven else 'the best that was found in time'}"
    if not placement.map or not exact.cost.seconds:
        return found
    return f"{found}; this choice takes {placement.map.cost.seconds / exact.cost.seconds:.4g} times that"


def _json(dl: DlOptions, decision: Decision, seen: Survey, exact: Exact | str | None) -> str:
    from slurmdl.launch.sbatch import outcome

    found: dict[str, Any] = {"placement": decision.placement.to_json() if decision.placement else None,
                             "binding": list(decision.argv), "releases": decision.releases, "reason": decision.reason,
                             "line": " ".join(outcome(dl, decision).split()) if decision.reason else ""}
    if decision.placement and seen.scores.measured:
        from slurmdl.placement.scored import mattered

        found["scores"] = [each.to_json() for each in mattered(decision.placement, seen.topology, seen.cluster,
                                                               seen.scores)]
    if exact is not None:
        found["exact"] = {"reason": exact} if isinstance(exact, str) else asdict(exact)
    return json.dumps(found, indent=2)


def _draw(decision: Decision, seen: Survey, path: str) -> None:
    from slurmdl.placement.model import Placement
    from slurmdl.placement.svg import svg

    picture = svg(decision.placement or Placement(reason=decision.reason), seen.topology, seen.cluster)
    write_file(path, "--svg", picture)
