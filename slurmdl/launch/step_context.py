"""Gather all inputs of a step's plan: everything that queries Slurm or reads files, once."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from slurmdl import config
from slurmdl.dl_options import DlOptions
from slurmdl.errors import PlacementError, UnavailableError
from slurmdl.groups import launched_ranks_per_node
from slurmdl.launch import cluster_state, late_binding, launchers, rank_check, task_command, traffic_file
from slurmdl.launch.launchers import LauncherCommand
from slurmdl.launch.srun_args import SrunArgs
from slurmdl.launch.submission_record import SubmissionRecord
from slurmdl.launch.task_command import TaskCommand
from slurmdl.links.link_scores import LinkScores
from slurmdl.slurm import jobs, process, slurm_conf, step_layout
from slurmdl.slurm.slurm_conf import SlurmConfig
from slurmdl.slurm.step_layout import StepLayout
from slurmdl.topology.topology import Topology

if TYPE_CHECKING:
    from slurmdl.launch.traffic_file import Matrix


@dataclass(frozen=True)
class StepContext:
    """The inputs of a step's plan.

    Attributes:
        job_id, job_nodes: the allocation, nodes in Slurm's order.
        cpus_per_task: 1 if not given.
        topology: the zones; flat if there are none, for `no_zones_reason`.
        task: command of each task; None if only the rank map is printed.
        launcher: the launcher in the command that starts the ranks of a node, or None.
        ranks_per_task: ranks that each task starts, one task per node; 1 if the tasks are the ranks.
        rank_check_variables: variables of rank_check.
        local_hosts: hosts named in the launcher's command that are addresses of this machine.
        extra_options: options for srun besides the user's own.
        has_ulfm: mpirun supports ranks that continue after the loss of a rank.
        resolve_nodes: returns the addresses of nodes, for the rendezvous of a program that may start torchrun (see
            task_command.node_addresses); None for other programs, and for launchers whose command is changed.
    """

    args: SrunArgs
    dl: DlOptions
    environ: Mapping[str, str]
    job_id: int
    job_nodes: tuple[str, ...]
    layout: StepLayout
    cpus_per_task: int
    topology: Topology
    no_zones_reason: str
    link_scores: LinkScores
    traffic_matrices: tuple[Matrix, ...]
    master_port: int
    task: TaskCommand | None = None
    launcher: LauncherCommand | None = None
    ranks_per_task: int = 1
    local_hosts: frozenset[str] = frozenset()
    rank_check_variables: Mapping[str, str] = field(default_factory=dict)
    extra_options: tuple[str, ...] = ()
    has_ulfm: bool = False
    resolve_nodes: Callable[[Sequence[str]], Sequence[str]] | None = None


def gather_context(args: SrunArgs, dl: DlOptions, site_config: config.Config,
                   get_slurm_config: Callable[[], SlurmConfig], environ: Mapping[str, str],
                   on_warning: Callable[[str], None], link_scores: LinkScores | None = None) -> StepContext:
    """Gather the inputs of the plan.

    Raises PlacementError if the layout of the step is not known in advance, UnavailableError if Slurm does not
    answer, or mpirun is missing, InputError if an input file is malformed. Link scores that are None are loaded.
    """
    job = jobs.read_allocation(environ)
    slurm_config = get_slurm_config()
    if slurm_config.pack_nodes:
        raise PlacementError("SelectTypeParameters has CR_Pack_Nodes: its layout is not mapped")
    request = step_layout.parse_step_request(args.line, environ, slurm_config.srun_cpus_per_task(environ))
    layout = step_layout.compute_step_layout(job, request)
    if layout.only_if_alone and jobs.other_steps_run(jobs.own_job_id(environ)):
        raise PlacementError("other steps of the job run: Slurm decides which nodes and CPUs are left")
    topology, no_zones_reason = load_job_topology(slurm_config, job.nodes, environ.get("SLURM_JOB_PARTITION", ""),
                                                  dl.strict)
    if link_scores is None:
        link_scores = load_step_scores(dl, site_config, environ, on_warning)
    context = StepContext(args, dl, environ, job.job_id, job.nodes, layout, request.cpus_per_task or 1, topology,
                          no_zones_reason, link_scores, traffic_file.load_traffic_matrices(dl),
                          task_command.pick_free_port(),
                          rank_check_variables=rank_check.verify_variables(dl.strict, environ))
    context = _with_launcher(context, on_warning)
    if args.map_format:
        return context
    task = task_command.build_task_command(args.line, args.step_starter, environ)
    if args.step_starter == "mpirun":
        if shutil.which("mpirun", path=environ.get("PATH")) is None:
            raise UnavailableError("--step-starter=mpirun: mpirun is not in PATH")
        return replace(context, task=task, has_ulfm=slurm_conf.mpirun_has_ulfm(environ))
    extra_options = (*slurm_conf.mpi_type_option(args.line, get_slurm_config, environ),
                     *args.kill_on_bad_exit_option(environ))
    return replace(context, task=task, extra_options=extra_options)


def _with_launcher(context: StepContext, on_warning: Callable[[str], None]) -> StepContext:
    """Add the launcher of the step, and the number of ranks that it starts on each node."""
    dl, operands, environ = context.dl, context.args.line.operands, context.environ
    counts = [count for _, count in context.layout.node_tasks]
    launcher = None if dl.launcher == "none" else launchers.find_launcher(operands, environ)
    if launcher is None and dl.launcher_name not in ("auto", "none"):
        launcher = launchers.LAUNCHERS[dl.launcher_name].unread(operands)
    if launcher is None or not launcher.is_multi_node:
        ranks_per_node = dl.ranks_per_node or \
            launched_ranks_per_node(dl.mesh, dl.groups, sum(counts), len(counts))
        is_per_node = max(counts) == 1 and context.args.step_starter == "srun"
        if is_per_node and ranks_per_node > 1:
            context = replace(context, ranks_per_task=ranks_per_node)
        if is_per_node and len(counts) > 1 and launcher is None and dl.launcher != "none":
            # the program may be a script that runs a launcher
            check = context.rank_check_variables
            variables = rank_check.check_variables(ranks_per_node if ranks_per_node > 1 else 0)
            context = replace(context, rank_check_variables=check and {**check, **variables},
                              resolve_nodes=task_command.node_addresses)
        return context
    if context.args.step_starter != "srun":
        raise PlacementError(f"--step-starter={context.args.step_starter}: does not start {launcher.name} once per "
                             "node; expected --step-starter=srun or --dl-launcher=none")
    launchers.check_launcher(launcher, counts)
    ranks = dl.ranks_per_node or launcher.ranks_per_node(environ.get("SLURM_GPUS_ON_NODE", ""))
    if not ranks:
        on_warning(f"{launcher.name}: the number of ranks per node is unknown and 1 is assumed; expected "
                   f"--dl-launcher={launcher.name}:N")
    hosts = frozenset(filter(task_command.is_local_host, launcher.hosts()))
    check = context.rank_check_variables
    if check and launcher.is_checked and not launcher.is_elastic:
        check = {**check, **rank_check.check_variables(ranks)}
    return replace(context, launcher=launcher, ranks_per_task=ranks or 1, local_hosts=hosts,
                   rank_check_variables=check)


def load_job_topology(slurm_config: SlurmConfig, nodes: Sequence[str], partition: str,
                      strict: bool) -> tuple[Topology, str]:
    """Load the topology of the job's partition; if that fails, return a flat one and the reason.

    Roles and task variables are useful without zones, too. With `strict` the failure is raised.
    """
    from slurmdl.cluster import scontrol_parser
    from slurmdl.topology import load

    def load_partition_topology() -> Topology:
        # TopologyPlugin refers to topology.conf; a topology.yaml (25.05 and newer) applies regardless of it
        file = slurm_conf.topology_file_path()
        has_yaml = slurm_config.version >= (25, 5) if file is None else file.endswith(".yaml")
        if not (slurm_config.has_topology or has_yaml):
            raise UnavailableError("the cluster's topology has no zones")
        topologies = load.load_topologies()
        if len(topologies.topologies) == 1:
            return topologies.get("")
        record = process.check_output(["scontrol", "-o", "show", "partition", partition])
        return topologies.get(scontrol_parser.parse_snapshot(record).topology_of([partition]))

    if strict:
        return load_partition_topology(), ""
    return load.topology_or_flat(nodes, load_partition_topology)


def load_step_scores(dl: DlOptions, site_config: config.Config, environ: Mapping[str, str],
                     on_warning: Callable[[str], None]) -> LinkScores:
    return cluster_state.load_link_scores(site_config, dl.link_scores, on_warning, dl.strict,
                                          partial(slurm_conf.cluster_name, environ))


def shrink_late_bound_job(record: SubmissionRecord, dl: DlOptions, site_config: config.Config,
                          get_slurm_config: Callable[[], SlurmConfig], environ: Mapping[str, str],
                          on_warning: Callable[[str], None],
                          left_out: Collection[str] = ()) -> tuple[dict[str, str], LinkScores | None]:
    """Reduce a job submitted with --dl-node-binding=late to the best of its nodes, without those in `left_out`.

    Returns the environment of the reduced job, and the link scores used; None if no nodes had to be chosen.
    """
    size = record.requested_size
    assert size is not None
    scores: LinkScores | None = None

    def choose_nodes(job: jobs.JobRecord) -> Sequence[str]:
        nonlocal scores
        from slurmdl.job_request import JobRequest
        from slurmdl.placement.place import select_subset

        topology, _ = load_job_topology(get_slurm_config(), job.nodes, environ.get("SLURM_JOB_PARTITION", ""),
                                        dl.strict)
        request = JobRequest(dl, (size.nodes, size.nodes), size.tasks, size.tasks_per_node)
        scores = load_step_scores(dl, site_config, environ, on_warning)
        return select_subset(job.nodes, request, job.batch_host, topology, scores,
                             traffic_file.load_traffic_matrices(dl))

    shrunk = late_binding.shrink_job(environ, size, choose_nodes, on_warning, dry_run=dl.dry_run,
                                     left_out=left_out)
    return shrunk, scores
