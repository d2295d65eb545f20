"""Methods to choose nodes and rank order of a job: slurmdl, Slurm, and random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.heterogeneous.trainer_jobs import Jobs, Result
from slurmdl.dl_options import DlOptions
from slurmdl.job_request import JobRequest
from slurmdl.slurm import hostlist
from slurmdl.traffic import Traffic

PLACED, LEAF, DEFAULT = "placed", "Slurm's nodes, leaf order", "Slurm's default"
VARIANTS = (PLACED, LEAF, DEFAULT)
NEGATIVE_CONTROL = "random nodes and ranks"
#: kind of job -> strategy and communication pattern
KINDS = {"PS": ("ps", "shards"), "allreduce": ("allreduce", "ring"),
         "gossip, random partners": ("gossip", "random-matching"), "gossip, base graph": ("gossip", "base-2")}
#: elements of the model, and emulated computation of a step in seconds
PARAMETERS, COMPUTE = 100_000, 0.01


@dataclass(frozen=True)
class Job:
    """A training job: `nodes` nodes with `tasks_per_node` tasks on each; the first `ps` ranks are servers.

    `kind` is one of KINDS; `parameters` are the elements of its model.
    """

    kind: str
    nodes: int
    tasks_per_node: int
    ps: int = 0
    parameters: int = PARAMETERS

    @property
    def request(self) -> JobRequest:
        strategy, comm_pattern = KINDS[self.kind]
        options = DlOptions(strategy=strategy, ps=self.ps, bytes=str(4 * self.parameters), comm_pattern=comm_pattern)
        return JobRequest(options, (self.nodes, self.nodes), ntasks_per_node=self.tasks_per_node, requeue=False)

    @property
    def traffic(self) -> Traffic:
        return self.request.options.traffic


@dataclass(frozen=True)
class Run:
    """Results of a job with one placement method.

    Attributes:
        order: node of each rank.
        inter_node_bytes, inter_zone_bytes: metered bytes per step, summed over all ranks.
        seconds: median step time of the slowest worker.
    """

    order: tuple[str, ...]
    inter_node_bytes: float
    inter_zone_bytes: float
    seconds: float
    result: Result

    @classmethod
    def of(cls, result: Result) -> Run:
        summary, sent = result.summary, result.summary["bytes_sent"]
        return cls(tuple(place["node"] for place in summary["rank_map"]),
                   (sent["intra_zone"] + sent["inter_zone"]) / summary["steps"],
                   sent["inter_zone"] / summary["steps"], summary["seconds_per_step"], result)


def run(jobs: Jobs, job: Job, variant: str, order: Sequence[str], steps: int) -> Run:
    """Submit a job and wait until it ends.

    Args:
        order: node of each rank, for LEAF and NEGATIVE_CONTROL; the other methods ignore it.
    """
    strategy, comm_pattern = KINDS[job.kind]
    train = (f"--strategy {strategy} --comm-pattern {comm_pattern} --steps {steps} --log-every {steps} "
             f"--emulate-compute {COMPUTE}:{job.parameters}")
    if variant == PLACED:
        ps = f" --dl-ps={job.ps}" if job.ps else ""
        return Run.of(jobs.train(
            job.nodes, job.tasks_per_node, train, start="exec slurmdl srun -K", submit=["slurmdl", "sbatch"],
            lines=f"#DL --dl-strategy={strategy} --dl-comm-pattern={comm_pattern} "
                  f"--dl-bytes={4 * job.parameters}{ps}\n"))
    train += f" --ps {job.ps}" if job.ps else ""
    if variant == DEFAULT:
        return Run.of(jobs.train(job.nodes, job.tasks_per_node, train))
    hosts = jobs.folder / "hosts"
    hosts.write_text("\n".join(order) + "\n")
    return Run.of(jobs.train(
        job.nodes, job.tasks_per_node, train, lines=f"#SBATCH -w {hostlist.fold_hostlist(sorted(set(order)))}\n",
        start=f"SLURM_HOSTFILE={hosts} exec srun --mpi=pmix -K -n {len(order)} -m arbitrary"))
