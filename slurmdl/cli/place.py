"""show which nodes and ranks a job would get, and why"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from slurmdl.cli.arguments import MAX_SEED, write_output_file
from slurmdl.errors import PlacementError, UnavailableError, UsageError, debug
from slurmdl.text import print_escaped

if TYPE_CHECKING:
    from slurmdl.config import Config
    from slurmdl.dl_options import DlOptions
    from slurmdl.job_request import JobRequest
    from slurmdl.launch.binding import Binding
    from slurmdl.launch.cluster_state import ClusterState
    from slurmdl.launch.submission import Submission
    from slurmdl.placement.result import Placement

HELP = """\
usage: slurmdl place [options] [--dl-*] [sbatch options] [script]

Makes the same decision as `slurmdl sbatch` with the same arguments, explains it, and submits nothing.

  --explain           print the choice, the alternatives, the ranks and the costs (default)
  --json              print the result as one JSON object
  --svg FILE          also draw the zones, nodes and ranks
  --topology FILE     read the zones from a topology.conf, topology.yaml or JSON file, or from the text of
                      `scontrol show topology`, instead of the cluster
  --cluster FILE      read nodes and partitions from JSON, from the text of `scontrol -d show nodes` and
                      `show partitions`, or from that of `sinfo -N -l`, instead of the cluster
  --link-scores FILE  read the link scores, as with --dl-link-scores=FILE
  --seed N            choose differently among equal nodes, so that simultaneous submitters do not all get the
                      same ones; 0 (default): the first ones

Options must come before the script; arguments after it belong to the script. Without a script only the options count.
The exit status is 0 also if Slurm chooses the nodes; with --dl-strict it is then 75."""

_FILE_OPTIONS = ("svg", "topology", "cluster", "link-scores")
_FLAGS = ("json", "explain", "help")
_OWN_OPTIONS = (*_FLAGS, *_FILE_OPTIONS, "seed")


def run(argv: list[str]) -> int:
    from slurmdl import config
    from slurmdl.launch.sbatch import find_sbatch
    from slurmdl.launch.submission import SbatchCall, parse_submission

    own_options, sbatch_args = _split_own_options(argv)
    if "help" in own_options:
        print(HELP)
        return 0
    site, sbatch = config.load_config(), ""
    if not {"cluster", "topology"} & own_options.keys():
        with suppress(UnavailableError):
            sbatch = find_sbatch(os.environ)
    submission = parse_submission(SbatchCall.from_argv(sbatch_args, sbatch), os.environ, site.options)
    seed = own_options.get("seed", "0")
    if not seed.isdecimal() or int(seed) > MAX_SEED:
        raise UsageError(f"--seed={seed}: expected a number from 0 to {MAX_SEED}")
    submission = replace(submission, request=replace(submission.request, seed=int(seed)))
    state = _load_state(site, own_options, submission.request)
    options, binding = submission.request.options, _decide_binding(submission, state)
    if "svg" in own_options:
        from slurmdl.placement.placement_svg import draw_placement

        write_output_file(own_options["svg"], "--svg", draw_placement(
            _placement_or_reason(binding), state.topology, state.cluster, options.traffic))
    format_result = _format_json if "json" in own_options else _format_text
    print_escaped(format_result(options, binding, state))
    return 0


def _split_own_options(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split into own options and sbatch's arguments; UsageError if an own one is misspelled or misplaced."""
    from slurmdl import dl_options
    from slurmdl.slurm import getopt

    table: dict[str, getopt.HasArg] = {**getopt.SBATCH_LONG_OPTIONS, **dl_options.LONG_OPTIONS}
    table.update({option: "no" if option in _FLAGS else "required" for option in _OWN_OPTIONS})
    line = getopt.parse_command_line(argv, getopt.SBATCH_SHORT_OPTIONS, table)
    for option in line.options:
        if not option.is_known and (meant := _similar_option(option.args[0], _OWN_OPTIONS)):
            raise UsageError(f"{option.args[0]}: unknown option; expected --{meant}")
    for arg in line.operands[1:]:
        options = list(dl_options.LONG_OPTIONS) if arg.startswith("--dl-") else _OWN_OPTIONS
        if meant := _similar_option(arg, options):
            raise UsageError(f"{arg.partition('=')[0]} after {line.operands[0]} is an argument of the script; "
                             f"expected --{meant} before the script")
    own = [option for option in line.options if option.name in _OWN_OPTIONS]
    for option in own:
        if option.name in _FILE_OPTIONS and not option.value:
            raise UsageError(f"--{option.name}: expected a file")
    own_indices = {i for option in own for i in range(option.index, option.index + len(option.args))}
    return ({option.name: option.value or "" for option in own},
            [arg for i, arg in enumerate(argv) if i not in own_indices])


def _similar_option(arg: str, names: Sequence[str]) -> str:
    """Option that an argument equals or resembles; "" for others, e.g. options of a newer sbatch or of the script."""
    from difflib import get_close_matches

    if not arg.startswith("--"):
        return ""
    return next(iter(get_close_matches(arg[2:].partition("=")[0][:40], names, n=1, cutoff=0.8)), "")


def _load_state(config: Config, own_options: dict[str, str], request: JobRequest) -> ClusterState:
    from slurmdl.cluster import load as cluster
    from slurmdl.launch import cluster_state
    from slurmdl.topology import load as topology

    source = own_options.get("link-scores", request.options.link_scores)
    strict = request.options.strict or "link-scores" in own_options
    if "cluster" not in own_options and "topology" not in own_options:
        return cluster_state.load_cluster_state(config, source, request.partitions, strict=strict)
    snapshot = cluster.load_cluster_file(own_options["cluster"]) if "cluster" in own_options else \
        cluster.query_cluster(config.cluster_backend)[0]
    zones = topology.load_topology(own_options.get("topology"), snapshot.topology_of(request.partitions))
    scores = cluster_state.load_link_scores(config, source, strict=strict, get_cluster=lambda: snapshot.name)
    return cluster_state.ClusterState(snapshot, zones, scores)


def _decide_binding(submission: Submission, state: ClusterState) -> Binding:
    from slurmdl.launch.binding import Binding, zone_not_applied_reason
    from slurmdl.launch.sbatch import decide_with_slurm

    options = submission.request.options
    if options.node_binding == "off":
        return Binding(reason=zone_not_applied_reason(options, "--dl-node-binding=off"), failed=bool(options.zone))
    binding = decide_with_slurm(submission, state)
    debug("decision: %s", binding.summary(options))
    if binding.reason and options.strict:
        raise PlacementError(binding.reason)
    return binding


def _placement_or_reason(binding: Binding) -> Placement:
    from slurmdl.placement.result import Placement

    return binding.placement or Placement(reason=binding.reason)


def _format_text(options: DlOptions, binding: Binding, state: ClusterState) -> str:
    from slurmdl.placement.explain import explain_placement

    text = explain_placement(_placement_or_reason(binding), state.topology, state.cluster, state.scores, options)
    bound = " ".join(binding.options) or "none"
    if binding.reason:
        bound += f", Slurm chooses the nodes: {binding.reason}"
    return f"{text}\nbinding    {bound}"


def _format_json(options: DlOptions, binding: Binding, state: ClusterState) -> str:
    from slurmdl.placement.explain import decisive_scores

    placement = binding.placement
    result: dict[str, Any] = {
        "placement": placement.to_json() if placement else None, "binding": list(binding.options),
        "revert_field": binding.revert_field, "reason": binding.reason,
        "line": " ".join(binding.summary(options).split()) if binding.reason else ""}
    if placement and state.scores.link_count:
        decisive = decisive_scores(placement, state.topology, state.cluster, state.scores)
        result["scores"] = [asdict(score) for score in decisive]
    return json.dumps(result, indent=2)
