"""The inputs of a step, each read once: everything that queries Slurm, reads files or resolves names.

Imports no NumPy: the process that starts the step whatever happens uses a part of this module.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slurmdl.config import Config
from slurmdl.dl_options import DlOptions
from slurmdl.errors import InputError, PlacementError, UnavailableError
from slurmdl.launch import cluster_state, launchers, traffic_file
from slurmdl.launch.launchers import LauncherCommand
from slurmdl.launch.step_command import TASK_SHELL, UNMAPPED_TASK_SHELL, SrunArgs, TaskCommand, wrap_multi_prog
from slurmdl.launch.submission_record import SubmissionRecord
from slurmdl.slurm import jobs, process, slurm_conf, step_layout
from slurmdl.slurm.getopt import CommandLine
from slurmdl.slurm.jobs import Allocation
from slurmdl.slurm.slurm_conf import SlurmConfig
from slurmdl.slurm.step_layout import StepLayout

if TYPE_CHECKING:
    from slurmdl.links.link_scores import LinkScores
    from slurmdl.topology.topology import Topology
    from slurmdl.traffic import Traffic

#: nodes whose addresses the task shell can write as texts that sort as planned
MAX_SORTABLE_NODES = 4096
#: seconds for the addresses of all nodes
_MAX_RESOLVE_S = 5.0
_MAX_PORT_DRAWS = 100
#: bash as sh keeps variables with names that are not identifiers (exported functions); dash drops them
_BASH = ("/bin/bash", "--posix")


@dataclass(frozen=True)
class StepCall:
    """One call of `slurmdl srun` inside a job.

    Attributes:
        options: the --dl-* options of all layers.
        environ: the environment; after `job_start.reduce_job`, of the smaller job.
        record: of the job's submission, or None.
        get_slurm_config: waits for the answer of the controller.
        on_warning: receives warnings.
        link_scores: None if they are not loaded yet.
    """

    args: SrunArgs
    options: DlOptions
    environ: Mapping[str, str]
    record: SubmissionRecord | None
    site_config: Config
    get_slurm_config: Callable[[], SlurmConfig]
    on_warning: Callable[[str], None]
    link_scores: LinkScores | None = None

    def load_topology(self, nodes: Sequence[str]) -> tuple[Topology, str]:
        """The topology of the job's partition and ""; see `load_job_topology`."""
        return load_job_topology(self.get_slurm_config(), nodes, self.environ.get("SLURM_JOB_PARTITION", ""),
                                 self.options.strict)

    def load_link_scores(self) -> LinkScores:
        if self.link_scores is not None:
            return self.link_scores
        return cluster_state.load_link_scores(self.site_config, self.options.link_scores, self.on_warning,
                                              self.options.strict, partial(slurm_conf.cluster_name, self.environ))


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a step's rank map and command.

    Attributes:
        allocation: the job's nodes in Slurm's order.
        layout: nodes and tasks of the step.
        cpus_per_task: 1 if not given.
        topology: the zones; flat if there are none, for `no_zones_reason`.
        task: command of each task; None if only the rank map is printed.
        launcher: the launcher in the command that starts the ranks of a node, or None.
        ranks_per_task: ranks that each task starts, one task per node; 1 if the tasks are the ranks.
        rank_check_variables: variables of rank_check.
        local_hosts: hosts named in the launcher's command that are addresses of this machine.
        extra_options: options for srun besides the user's own.
        has_ulfm: mpirun supports ranks that continue after the loss of a rank.
        resolve_nodes: `node_addresses`, for the rendezvous of a program that may start torchrun; None for other
            programs, and for launchers whose command is changed.
    """

    call: StepCall
    allocation: Allocation
    layout: StepLayout
    cpus_per_task: int
    topology: Topology
    no_zones_reason: str
    link_scores: LinkScores
    traffic: Traffic
    master_port: int
    task: TaskCommand | None = None
    launcher: LauncherCommand | None = None
    ranks_per_task: int = 1
    local_hosts: frozenset[str] = frozenset()
    rank_check_variables: Mapping[str, str] = field(default_factory=dict)
    extra_options: tuple[str, ...] = ()
    has_ulfm: bool = False
    resolve_nodes: Callable[[Sequence[str]], Sequence[str]] | None = None


def read_inputs(call: StepCall) -> StepInputs:
    """Read the inputs of a step.

    Raises PlacementError if the layout of the step is not known in advance, UnavailableError if Slurm does not
    answer, or mpirun is missing, InputError if an input file is malformed.
    """
    args, options, environ = call.args, call.options, call.environ
    allocation = jobs.read_allocation(environ)
    slurm_config = call.get_slurm_config()
    if slurm_config.pack_nodes:
        raise PlacementError("SelectTypeParameters: CR_Pack_Nodes prevents rank mapping")
    request = step_layout.parse_step_request(args.line, environ, slurm_config.srun_cpus_per_task(environ))
    layout = step_layout.compute_step_layout(allocation, request)
    if layout.only_if_alone and jobs.other_steps_run(jobs.own_job_id(environ)):
        raise PlacementError("other steps of the job run: Slurm decides which nodes and CPUs are left")
    inputs = StepInputs(call, allocation, layout, request.cpus_per_task or 1, *call.load_topology(allocation.nodes),
                        call.load_link_scores(), traffic_file.load_traffic(options), pick_free_port(),
                        rank_check_variables=verify_variables(options.strict, environ))
    inputs = with_launcher(inputs)
    if args.map_format:
        return inputs
    inputs = replace(inputs, task=build_task_command(args.line, args.step_starter, environ))
    if args.step_starter != "mpirun":
        return replace(inputs, extra_options=(*slurm_conf.mpi_type_option(args.line, call.get_slurm_config, environ),
                                              *args.kill_on_bad_exit_option(environ)))
    if shutil.which("mpirun", path=environ.get("PATH")) is None:
        raise UnavailableError("--step-starter=mpirun: mpirun is not in PATH")
    return replace(inputs, has_ulfm=slurm_conf.mpirun_has_ulfm(environ))


def load_job_topology(slurm_config: SlurmConfig, nodes: Sequence[str], partition: str,
                      strict: bool) -> tuple[Topology, str]:
    """Load the topology of the job's partition; if that fails, return a flat one and the reason.

    Roles and task variables are useful without zones, too. With `strict` the failure is raised.
    """
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
        from slurmdl.cluster import reader

        record = process.check_output(["scontrol", "-o", "show", "partition", partition])
        return topologies.get(reader.parse_snapshot(record).topology_of([partition]))

    if strict:
        return load_partition_topology(), ""
    return load.topology_or_flat(nodes, load_partition_topology)


def with_launcher(inputs: StepInputs) -> StepInputs:
    """Add the launcher of the step, and the number of ranks that it starts on each node.

    Raises PlacementError if the launcher does not fit the step.
    """
    args, options, environ = inputs.call.args, inputs.call.options, inputs.call.environ
    counts = [count for _, count in inputs.layout.node_tasks]
    check = inputs.rank_check_variables
    launcher = None if options.launcher == "none" else launchers.find_launcher(args.line.operands, environ)
    if launcher is None and options.launcher_name not in ("auto", "none"):
        launcher = launchers.LAUNCHERS[options.launcher_name].unread(args.line.operands)
    if launcher is None or not launcher.is_multi_node:
        if max(counts) > 1 or args.step_starter != "srun":
            return inputs
        ranks = options.ranks_per_node or inputs.traffic.launched_ranks_per_node(sum(counts), len(counts)) or 1
        if len(counts) > 1 and launcher is None and options.launcher != "none":
            # the program may be a script that runs a launcher
            check = check and {**check, **check_variables(ranks if ranks > 1 else 0)}
            inputs = replace(inputs, rank_check_variables=check, resolve_nodes=node_addresses)
        return replace(inputs, ranks_per_task=ranks)
    if args.step_starter != "srun":
        raise PlacementError(f"--step-starter={args.step_starter}: does not start {launcher.name} once per "
                             "node; expected --step-starter=srun or --dl-launcher=none")
    launchers.check_launcher(launcher, counts)
    ranks = options.ranks_per_node or launcher.ranks_per_node(environ.get("SLURM_GPUS_ON_NODE", ""))
    if not ranks:
        inputs.call.on_warning(f"{launcher.name}: the number of ranks per node is unknown and 1 is assumed; expected "
                               f"--dl-launcher={launcher.name}:N")
    if check and launcher.is_checked and not launcher.is_elastic:
        check = {**check, **check_variables(ranks)}
    return replace(inputs, launcher=launcher, ranks_per_task=ranks or 1, rank_check_variables=check,
                   local_hosts=frozenset(filter(is_local_host, launcher.hosts())))


def verify_variables(strict: bool, environ: Mapping[str, str]) -> dict[str, str]:
    """The variable of every mapped step by which its tasks find and authenticate each other (see rank_check).

    None if the user has set it to 0.
    """
    if environ.get("SLURMDL_VERIFY") == "0":
        return {}
    return {"SLURMDL_VERIFY": f"{pick_free_port()} {os.urandom(16).hex()} {'strict' if strict else 'warn'}"}


def check_variables(ranks_per_node: int) -> dict[str, str]:
    """The variables with which the task shell starts rank_check; `ranks_per_node` is 0 if it is unknown."""
    return {"SLURMDL_VERIFY_PYTHON": sys.executable,
            "SLURMDL_VERIFY_SCRIPT": os.path.join(os.path.dirname(os.path.abspath(__file__)), "rank_check.py"),
            "SLURMDL_VERIFY_RANKS": str(ranks_per_node)}


def build_task_command(line: CommandLine, step_starter: str, environ: Mapping[str, str],
                       is_mapped: bool = True) -> TaskCommand:
    """Build the command of each task.

    Raises PlacementError if the file of `srun --multi-prog` cannot be read, InputError if a file of slurmdl's
    installation cannot be read.

    Args:
        line: the user's command line, with a program.
        step_starter: "srun" or "mpirun".
    """
    shell: tuple[str, ...] = TASK_SHELL if is_mapped else UNMAPPED_TASK_SHELL
    if any(not name.isidentifier() for name in environ) and os.path.exists(_BASH[0]):
        shell = (*_BASH, *shell[1:])
    script, program = _task_script(f"task_{step_starter}.sh"), line.operands[0]
    if step_starter != "srun":
        return TaskCommand(script, shell, line.operands)
    if line.has_option("multi-prog"):
        try:
            text = Path(program).read_text(encoding="utf-8", errors="surrogateescape")
        except OSError as error:
            raise PlacementError(f"--multi-prog: {program}: {error.strerror}") from error
        return TaskCommand(script, shell, line.operands, wrap_multi_prog(text, shell))
    # unlike srun, a shell does not search the working directory after PATH
    local = os.path.join(line.last_value("chdir") or os.getcwd(), program)
    if "/" not in program and shutil.which(program, path=environ.get("PATH")) is None and os.path.isfile(local):
        program = local
    return TaskCommand(script, shell, (program, *line.operands[1:]))


def _task_script(head: str) -> str:
    """The task script without comments."""
    directory = Path(__file__).parent
    try:
        text = (directory / head).read_text() + (directory / "task.sh").read_text()
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", error.filename) from error
    return "\n".join(line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))


def is_local_host(host: str) -> bool:
    """Whether a host name or address is this machine's: a socket can be bound to it."""
    with suppress(OSError, UnicodeError):
        for family, _, _, _, address in socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind(address)
                return True
    return False


def node_addresses(hosts: Sequence[str]) -> tuple[str, ...]:
    """The IPv4 address of each host at which other hosts reach it.

    Empty if a host has none, if there are more than MAX_SORTABLE_NODES hosts, or if name resolution is slow.
    """
    end = time.monotonic() + _MAX_RESOLVE_S
    addresses: list[str] = []
    for host in hosts:
        address = _ipv4_address(host)
        if not address or len(addresses) == MAX_SORTABLE_NODES or time.monotonic() > end:
            return ()
        addresses.append(address)
    return tuple(addresses)


def _ipv4_address(host: str) -> str:
    """An address of a host that is not of the loopback interface, else ""."""
    with suppress(OSError, UnicodeError):
        for *_, address in socket.getaddrinfo(host, 0, socket.AF_INET, socket.SOCK_STREAM):
            if not str(address[0]).startswith("127."):
                return str(address[0])
    return ""


def pick_free_port() -> int:
    """A port for rank 0 that is free on this host, since `slurmdl srun` usually runs on the host of rank 0.

    It is random, so that no other user can occupy it beforehand; below Linux's ephemeral ports (32768) and above the
    ports of services.
    """
    for _ in range(_MAX_PORT_DRAWS):
        port = 10_000 + int.from_bytes(os.urandom(4), "little") % 22_000
        if _is_port_free(port):
            break
    return port


def _is_port_free(port: int) -> bool:
    """Whether a server can listen at this port of this host, by IPv6 and IPv4; True if that cannot be tested."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family) as server:
                server.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
    return True
