"""show which nodes and ranks a job would get, and why"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from slurmdl import units
from slurmdl.cli.arguments import write_output_file
from slurmdl.errors import PlacementError, UnavailableError, UsageError
from slurmdl.text import print_escaped

if TYPE_CHECKING:
    from slurmdl.config import Config
    from slurmdl.dl_options import DlOptions
    from slurmdl.job_request import JobRequest
    from slurmdl.launch.cluster_state import ClusterState
    from slurmdl.launch.binding import Decision
    from slurmdl.launch.submission import Submission
    from slurmdl.placement.exact_solver import ExactPlacement
    from slurmdl.placement.result import Placement

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
  --scores FILE    link scores, as --dl-link-scores=FILE
  --seed N         settles the choice among equal nodes, so that many who ask at once do not all get the same
                   ones; 0, the default: the first of them

Options stand before the script: what stands behind it are its own arguments. Without a script only the options
count. Status 0 also where Slurm chooses the nodes, with --dl-strict then 75."""

_FILE_OPTIONS = ("svg", "topology", "cluster", "scores")
#: largest seed
_MAX_SEED = 2**32


def run(argv: list[str]) -> int:
    """`slurmdl place`: see HELP."""
    from slurmdl import config
    from slurmdl.launch import submission

    own, words = _split_own_options(argv)
    if "help" in own:
        print(HELP)
        return 0
    site = config.load_config()
    job = submission.parse_submission(words, os.environ, site.options)
    job = replace(job, request=replace(job.request, seed=_parse_seed(own.get("seed", "0"))))
    seen = _load_state(site, own, job.request)
    decision = _make_decision(job, seen, query_slurm=not {"cluster", "topology"} & own.keys())
    if "svg" in own:
        _write_svg(decision, seen, own["svg"])
    exact = _solve_exactly(job.request, seen) if "exact" in own else None
    print_escaped(
    _format_json(
        job.request.dl,
        decision,
        seen,
        exact) if "json" in own else _format_text(
            job.request,
            decision,
            seen,
             exact))
    return 0


def _split_own_options(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """This command's own options, and the words that are sbatch's.

    Raises
    ------
    UsageError : an option without its file, a misspelled one, or one behind the script.
    """
    from slurmdl import dl_options
    from slurmdl.slurm import getopt, sbatch_options

    flags = ("json", "explain", "exact", "help")
    own = (*flags, *_FILE_OPTIONS, "seed")
    table: dict[str, getopt.HasArg] = {**sbatch_options.LONG_OPTIONS, **dl_options.LONG_OPTIONS}
    table.update(dict.fromkeys(flags, "no"))
    table.update(dict.fromkeys((*_FILE_OPTIONS, "seed"), "required"))
    line = getopt.parse_command_line(argv, sbatch_options.SHORT_OPTIONS, table)
    for option in line.options:
        if not option.is_known and (meant := _similar_option(option.args[0], own)):
            raise UsageError(f"unknown option {option.args[0]}; valid: --{meant}")
    for word in line.operands[1:]:
        if meant := _similar_option(word, list(dl_options.LONG_OPTIONS) if word.startswith("--dl-") else own):
            raise UsageError(f"{word.partition('=')[0]} behind {line.operands[0]} is an argument of the script; "
                             f"valid: --{meant} before the script, and nothing behind it")
    ours = [option for option in line.options if option.name in own]
    for option in ours:
        if option.name in _FILE_OPTIONS and not option.value:
            raise UsageError(f"--{option.name} needs a file")
    taken = {i for option in ours for i in range(option.index, option.index + len(option.args))}
    return ({option.name: option.value or "" for option in ours},
            [word for i, word in enumerate(argv) if i not in taken])


def _similar_option(arg: str, names: Sequence[str]) -> str:
    """The option that a word names, or nearly names; "" for none. What else there is can be an option of a newer
    sbatch, or an argument of the script."""
    from difflib import get_close_matches

    if not arg.startswith("--"):
        return ""
    return next(iter(get_close_matches(arg[2:].partition("=")[0][:40], names, n=1, cutoff=0.8)), "")


def _parse_seed(text: str) -> int:
    if not text.isdecimal() or int(text) > _MAX_SEED:
        raise UsageError(f"--seed: {text!r} is not valid; valid: 0 to {_MAX_SEED}")
    return int(text)


def _load_state(config: Config, own_options: dict[str, str], request: JobRequest) -> ClusterState:
    from slurmdl.cluster import load as cluster
    from slurmdl.launch import cluster_state
    from slurmdl.topology import load as topology

    scores, strict = own_options.get("scores", request.dl.link_scores), request.dl.strict or "scores" in own_options
    if "cluster" not in own_options and "topology" not in own_options:
        return cluster_state.load_cluster_state(config, scores, request.partitions, strict=strict)
    snapshot = cluster.load_cluster_file(own_options["cluster"]) if "cluster" in own_options else \
        cluster.query_cluster(config.cluster_backend)[0]
    return cluster_state.ClusterState(snapshot, topology.load_topology(own_options.get("topology"), snapshot.topology_of(request.partitions)),
                         cluster_state.load_link_scores(config, scores, strict=strict))


def _make_decision(job: Submission, state: ClusterState, query_slurm: bool) -> Decision:
    from slurmdl.launch.binding import Decision, zone_not_applied_reason
    from slurmdl.launch.sbatch import decide_binding

    dl = job.request.dl
    if dl.node_binding == "off":
        return Decision(reason=zone_not_applied_reason(dl, "--dl-node-binding=off"), failed=bool(dl.zone))
    decision = decide_binding(job, state, _find_sbatch_if_any() if query_slurm else "")
    if decision.reason and dl.strict:
        raise PlacementError(decision.reason)
    return decision


def _find_sbatch_if_any() -> str:
    from slurmdl.launch.sbatch import find_sbatch

    try:
        return find_sbatch(os.environ)
    except UnavailableError:
        return ""


def _solve_exactly(request: JobRequest, state: ClusterState) -> ExactPlacement | str:
    """The solver's answer, or why it has none.

    Raises
    ------
    UnavailableError : the solver is not installed.
    """
    from slurmdl.placement import exact_solver

    try:
        return exact_solver.solve_exactly(request, state.cluster, state.topology, state.scores)
    except PlacementError as error:
        return str(error)


def _format_text(request: JobRequest, decision: Decision, state: ClusterState,
                 exact: ExactPlacement | str | None) -> str:
    from slurmdl.placement.explain import explain_placement
    from slurmdl.placement.result import Placement

    binding = " ".join(decision.binding_options) or "none"
    if decision.reason:
        binding += f", Slurm chooses the nodes: {decision.reason}"
    placement = decision.placement or Placement(reason=decision.reason)
    solved = f"\nexact      {_format_exact(exact, placement)}" if exact is not None else ""
    text = explain_placement(placement, state.topology, state.cluster, state.scores, request.dl)
    return f"{text}{solved}\nbinding    {binding}"


def _format_exact(exact: ExactPlacement | str, placement: Placement) -> str:
    if isinstance(exact, str):
        return f"none: {exact}"
    found = f"{units.format_duration(exact.cost.seconds)}, {'proven' if exact.proven else 'the best that was found in time'}"
    if not placement.rank_map or not exact.cost.seconds:
        return found
    return f"{found}; this choice takes {placement.rank_map.cost.seconds / exact.cost.seconds:.4g} times that"


def _format_json(dl: DlOptions, decision: Decision, state: ClusterState, exact: ExactPlacement | str | None) -> str:
    found: dict[str, Any] = {"placement": decision.placement.to_json() if decision.placement else None,
                             "binding": list(decision.binding_options), "revert_field": decision.revert_field, "reason": decision.reason,
                             "line": " ".join(decision.summary(dl).split()) if decision.reason else ""}
    if decision.placement and state.scores.link_count:
        from slurmdl.placement.score_report import decisive_scores

        found["scores"] = [each.to_json() for each in decisive_scores(decision.placement, state.topology, state.cluster,
                                                               state.scores)]
    if exact is not None:
        found["exact"] = {"reason": exact} if isinstance(exact, str) else asdict(exact)
    return json.dumps(found, indent=2)


def _write_svg(decision: Decision, state: ClusterState, path: str) -> None:
    from slurmdl.placement.placement_svg import draw_placement
    from slurmdl.placement.result import Placement

    picture = draw_placement(decision.placement or Placement(reason=decision.reason), state.topology, state.cluster)
    write_output_file(path, "--svg", picture)
