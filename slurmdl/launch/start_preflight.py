"""The preflight of `slurmdl srun --dl-preflight`: check the nodes once per start of a job, and act on bad ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress

from slurmdl import config
from slurmdl.dl_options import DlOptions
from slurmdl.errors import BadNodesError, SlurmdlError, internal_error_text
from slurmdl.health import exclusions, site_checks
from slurmdl.health.preflight import Preflight, format_table, keep_link_samples, run_preflight
from slurmdl.health.requeue import requeue_and_exclude, wait_for_job_end
from slurmdl.launch import step_inputs
from slurmdl.launch.submission_record import RequestedSize
from slurmdl.slurm import hostlist, jobs
from slurmdl.slurm.slurm_conf import SlurmConfig


def check_nodes_once(dl: DlOptions, requested_size: RequestedSize | None, site_config: config.Config,
                     get_slurm_config: Callable[[], SlurmConfig], environ: Mapping[str, str],
                     on_warning: Callable[[str], None]) -> frozenset[str]:
    """Check the nodes of this job unless an earlier step of this start did; return the nodes that must be left out.

    Bad nodes are left out of a job with spare nodes (`requested_size`). Without spare nodes the job is requeued, and
    this does not return. A check that fails itself costs a warning, not the step.

    Raises BadNodesError if the job can do neither, unless --dl-on-bad-nodes=run.
    """
    mark = exclusions.mark_path("preflight", environ)
    if not dl.preflight or os.path.exists(mark):
        return frozenset()
    try:
        nodes = jobs.read_allocation(environ).nodes
        topology, _ = step_inputs.load_job_topology(get_slurm_config(), nodes,
                                                     environ.get("SLURM_JOB_PARTITION", ""), strict=False)
        result = run_preflight(nodes, topology, environ, on_warning, dl.preflight,
                               site_reasons=site_checks.load_site_reasons(site_config, on_warning))
    except Exception as error:
        text = str(error) if isinstance(error, SlurmdlError) else internal_error_text(error)
        on_warning(f"preflight: the nodes are not checked: {text}")
        return frozenset()
    keep_link_samples(result, environ, on_warning)
    if dl.explain:
        for line in format_table(result).splitlines():
            on_warning(line)
    left_out = _act(result, dl, requested_size, environ, on_warning)
    _write_mark(mark, on_warning)
    return left_out


def _act(result: Preflight, dl: DlOptions, requested_size: RequestedSize | None, environ: Mapping[str, str],
         on_warning: Callable[[str], None]) -> frozenset[str]:
    """Replace bad nodes by spare ones, else requeue the job, else run with them or give up (docs/health.md)."""
    bad, job_id, problem = result.reasons, jobs.own_job_id(environ), ""
    if not bad:
        return frozenset()
    for node, reason in bad.items():
        on_warning(f"preflight: {node}: {reason}")
    names = hostlist.fold_hostlist(bad)
    has_spare_nodes = _has_spare_nodes(result, requested_size, environ)
    if has_spare_nodes:
        on_warning(f"preflight: the job continues without {names}")
    else:
        try:
            requeue_and_exclude(job_id, bad, environ, lambda outcome: on_warning(f"preflight: {outcome}"),
                                may_wait=dl.on_bad_nodes == "wait")
        except SlurmdlError as error:
            problem = str(error)
        else:
            wait_for_job_end()
    with suppress(SlurmdlError):  # the requeue has not remembered them
        exclusions.record_exclusions(bad, environ, job_id)
    if problem and dl.on_bad_nodes != "run":
        raise BadNodesError(f"preflight: {names} bad, and {problem}; the step is not started "
                          "(--dl-on-bad-nodes=run starts it)")
    if problem:
        on_warning(f"preflight: {problem}; the step runs with {names}")
    return frozenset(bad) if has_spare_nodes else frozenset()


def _has_spare_nodes(result: Preflight, requested_size: RequestedSize | None, environ: Mapping[str, str]) -> bool:
    """Whether the good nodes are enough for the job; the node of its batch script cannot be released."""
    good = [node for node in result.reports if node not in result.reasons]
    return requested_size is not None and len(good) >= requested_size.nodes \
        and environ.get("SLURMD_NODENAME", "") not in result.reasons


def _write_mark(path: str, on_warning: Callable[[str], None]) -> None:
    try:
        exclusions.write_mark(path)
    except OSError as error:
        on_warning(f"{path}: cannot be written ({error.strerror}); the next step of the job checks the nodes again")
