"""Slurm's answers to random requests for GPUs, compared with those of slurmdl's model.

Sandboxes of equal nodes, whose GPUs have numbers but no cores, answer the same requests: Slurm rejects a request, or
starts the job and shows it the number of nodes, its tasks and the tasks of each node. Requests whose counts depend on
Slurm's choice, e.g. `--gpus=16` without `-N`, are not answered by the model and count separately.

On nodes that are partly in use, a job is bound to nodes that fit by the model, and Slurm is asked whether it would
start there at once.

The negative control is the same comparison with a model that ignores the GPU options.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from benchmarks.cloud_nodes import SLURM_CONF_LINES
from benchmarks.results import Row, make_row
from benchmarks.suite import Suite, start
from slurmdl.cluster import reader
from slurmdl.cluster.snapshot import ClusterSnapshot
from slurmdl.errors import PlacementError, SandboxError
from slurmdl.job_request import JobRequest, resolve_job_size
from slurmdl.launch import sbatch, submission
from slurmdl.placement.eligibility import eligible_tasks, split_tasks
from slurmdl.sandbox import lifecycle, namespaces
from slurmdl.sandbox.lifecycle import Sandbox
from slurmdl.sandbox.spec import LOGIN, SandboxSpec, round_robin_topology
from slurmdl.slurm import hostlist
from slurmdl.slurm.jobs import expand_counts
from slurmdl.slurm.step_layout import block_distribution

#: requests that the model answers, and requests on nodes in use
REQUESTS, BUSY_REQUESTS = 500, 200
SANDBOXES, NODES, CPUS, MEMORY, GPUS = 4, 4, 16, 16_000, 8
#: options of the jobs that keep a part of each node, by node
BACKGROUND = {"n1": "-c3 --gres=gpu:1 --mem=2000", "n2": "-c5 --gres=gpu:5 --mem=5000",
              "n3": "-c9 --gres=gpu:2 --mem=1000", "n4": "-c1 --mem=8000"}

#: number of tasks of each node, or None if the request is rejected
Answer = tuple[int, ...] | None
Request = tuple[str, ...]

#: Submits the requests of the standard input one after the other, and prints for each the job's environment, or
#: `rejected`, or why it waits. A job whose node is still completing gets an equal node.
_DRIVER = """
cd %s
cat > job.sh <<'END'
#!/bin/sh
tasks=$(scontrol -o show job $SLURM_JOB_ID | sed -n 's,.* CPUs/Task=\\([0-9]*\\).*,\\1,p')
echo "$SLURM_NNODES ${SLURM_NTASKS:--} $SLURM_TASKS_PER_NODE $SLURM_JOB_CPUS_PER_NODE $tasks" > $1.new
mv $1.new $1
END
while read -r request; do
    rm -f answer
    if job=$(sbatch --parsable -o /dev/null $request job.sh $PWD/answer 2>error); then
        i=0
        reason=
        while [ ! -e answer ] && [ $i -lt 1200 ] && [ "${reason#Partition}" = "$reason" ]; do
            sleep 0.05
            i=$((i + 1))
            [ $((i %% 20)) != 0 ] || reason=$(squeue -h -j "$job" -o %%r)
        done
        cat answer 2>/dev/null || echo "${reason:-lost}"
    else
        grep -q 'contact\\|timed out' error && echo broken || echo rejected
    fi
    scancel --me --state=PENDING
    while [ -n "$(squeue -h -o %%A)" ]; do sleep 0.05; done
done
"""


def random_requests(seed: int) -> Iterator[Request]:
    """Yield different combinations of options for nodes, tasks, CPUs, GPUs and memory; many contradict each other."""
    generator, seen = random.Random(seed), set()

    def option(probability: float, text: str, values: Sequence[int]) -> list[str]:
        return [f"{text}{generator.choice(values)}"] if generator.random() < probability else []

    while True:
        request = [*option(0.7, "-N", range(1, NODES + 1)), *option(0.35, "-n", (1, 2, 3, 4, 5, 6, 8, 12, 16)),
                   *option(0.25, "--ntasks-per-node=", (1, 2, 3, 4, 8)), *option(0.2, "-c", (1, 2, 3, 4))]
        gpu_options = (("--gpus=", (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32)),
                       ("--gpus-per-node=", (1, 2, 3, 4, 6, 8, 9)), ("--gpus-per-task=", (1, 1, 2, 3, 4, 8)),
                       ("--gres=gpu:", (1, 2, 4, 8)), ("--ntasks-per-gpu=", (1, 1, 2, 3)))
        for text, values in generator.sample(gpu_options, generator.choice((1, 1, 1, 2, 2))):
            request += option(1, text, values)
        request += option(0.2, "--cpus-per-gpu=", (1, 2, 3, 4, 6))
        memory = generator.choice([("--mem-per-gpu=", (500, 1000, 2000, 3000, 5000))] * 4 + [
            ("--mem=", (0, 4000, 20000)), ("--mem-per-cpu=", (500, 1500))])
        request += option(0.3, *memory)
        request += ["--exclusive"] if generator.random() < 0.08 else []
        if tuple(request) not in seen:
            seen.add(tuple(request))
            yield tuple(request)


@dataclass(frozen=True)
class Model:
    """slurmdl's model, or the negative control that ignores the GPU options."""

    ignores_gpus: bool = False

    def parse(self, request: Request) -> JobRequest:
        """Return the request of a submission; PlacementError if slurmdl leaves it to Slurm."""
        options = [word for word in request if not (self.ignores_gpus and "gpu" in word)]
        parsed = submission.parse_submission(submission.SbatchCall.from_argv([*options, "--wrap=true"]), {}).request
        if parsed.unrestrictable_reason:
            return parsed
        if parsed.unplaceable_reason:
            raise PlacementError(parsed.unplaceable_reason)
        return parsed

    def answer(self, request: Request, cluster: ClusterSnapshot) -> Answer:
        """Predict Slurm's answer on idle nodes; PlacementError if slurmdl leaves the request to Slurm."""
        parsed = self.parse(request)
        if parsed.unrestrictable_reason:  # sbatch rejects it
            return None
        try:
            job = resolve_job_size(parsed)
        except PlacementError as error:
            if "do not fit" in str(error):
                return None
            raise
        counts = list(fitting_nodes(parsed, cluster, at_least=1).values())[:job.nodes]
        if len(counts) < job.nodes or sum(counts) < job.tasks:
            return None
        return tuple(split_tasks(parsed, job, counts))


def fitting_nodes(request: JobRequest, cluster: ClusterSnapshot, at_least: int) -> dict[str, int]:
    """Nodes that can take this number of tasks now, and the tasks that they can take."""
    tasks = eligible_tasks(request, cluster, cluster.default_partition).tasks_now.tolist()
    return {name: count for name, count in zip(cluster.names, tasks, strict=True) if count >= at_least}


@contextmanager
def gpu_sandbox(name: str) -> Iterator[Sandbox]:
    """A sandbox of equal nodes with GPUs in one zone."""
    sandbox = lifecycle.sandbox_up(SandboxSpec(
        name, round_robin_topology(NODES, 1), cpus=CPUS, memory=MEMORY, gres=f"gpu:{GPUS}",
        slurm_conf_lines=SLURM_CONF_LINES[:1]))
    try:
        yield sandbox
    finally:
        lifecycle.sandbox_down(name)


def ask_slurm(sandbox: Sandbox, requests: Sequence[Request]) -> list[Answer]:
    """Submit each request to the idle sandbox; SandboxError if a job neither starts nor is rejected."""
    directory = sandbox.shared / "requests"
    directory.mkdir(exist_ok=True)
    directory.chmod(0o777)
    done = subprocess.run(sandbox.command(["sh", "-c", _DRIVER % directory], directory=str(directory)),
                          input="".join(" ".join(request) + "\n" for request in requests),
                          capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if len(lines) != len(requests):
        raise SandboxError(f"{len(lines)} answers to {len(requests)} requests: {done.stderr[-300:]}")
    return [_parse_answer(line, request) for line, request in zip(lines, requests, strict=True)]


def _parse_answer(line: str, request: Request) -> Answer:
    if line == "rejected" or line.startswith("Partition"):  # waits for more nodes or CPUs than there are
        return None
    try:
        nodes, ntasks, tasks_per_node, cpus_per_node, cpus_per_task = line.split()
        if ntasks == "-":  # a step has one task per node
            return (1,) * int(nodes)
        tasks = expand_counts(tasks_per_node)
        if sum(tasks) == int(ntasks):
            return tasks
        # the variable counts other tasks than those of -n: see the CPUs
        limits = [max(1, cpus // int(cpus_per_task)) for cpus in expand_counts(cpus_per_node)]
        return tuple(block_distribution(limits, int(ntasks)))
    except ValueError as error:
        raise SandboxError(f"{' '.join(request)}: unexpected answer {line!r}") from error


def read_cluster(sandbox: Sandbox) -> ClusterSnapshot:
    """Read the nodes and partitions of a sandbox."""
    commands = "scontrol -o -d show nodes; scontrol -o show partitions; scontrol show config"
    return reader.parse_snapshot(namespaces.run_on_host(sandbox.pids[LOGIN], ["sh", "-c", commands]))


def start_background_jobs(sandbox: Sandbox) -> None:
    """Take a part of each node; returns when the jobs run."""
    for node, options in BACKGROUND.items():
        command = ["sbatch", "-Q", "-w", node, "-o", "/dev/null", *options.split(), "--wrap", "sleep 3600"]
        subprocess.run(sandbox.command(command, directory=str(sandbox.shared)), check=True, capture_output=True)
    namespaces.run_on_host(sandbox.pids[LOGIN], [
        "sh", "-c", f"until [ $(squeue -h -t R -o %A | wc -l) = {len(BACKGROUND)} ]; do sleep 0.1; done"])


def starts_on(sandbox: Sandbox, request: Request, nodes: Sequence[str]) -> bool:
    """Whether Slurm would start the job on these nodes at once."""
    command = ["sbatch", "--test-only", f"--nodelist={hostlist.fold_hostlist(nodes)}", *request, "--wrap=true"]
    done = subprocess.run(sandbox.command(command, directory=str(sandbox.shared)), capture_output=True, text=True,
                          check=False)
    plan = sbatch.parse_test_only(done.stderr)
    return plan is not None and plan[0] < time.time() + 5 and set(plan[1]) == set(nodes)


def differing(answers: Sequence[tuple[Request, Answer]], model: Model, cluster: ClusterSnapshot) -> list[Request]:
    """The requests that the model answers differently."""
    wrong = []
    for request, answer in answers:
        try:
            if model.answer(request, cluster) != answer:
                wrong.append(request)
        except PlacementError:
            wrong.append(request)
    return wrong


def idle_rows(sandboxes: Sequence[Sandbox], seed: int, count: int) -> Iterator[Row]:
    """Compare the answers on idle nodes."""
    cluster, model = read_cluster(sandboxes[0]), Model()
    requests: list[Request] = []
    left_to_slurm = 0
    for request in random_requests(seed):
        if len(requests) == count:
            break
        try:
            model.answer(request, cluster)
            requests.append(request)
        except PlacementError:
            left_to_slurm += 1
    parts = [requests[i::len(sandboxes)] for i in range(len(sandboxes))]
    with ThreadPoolExecutor(len(sandboxes)) as pool:
        answers = [pair for part, found in zip(parts, pool.map(ask_slurm, sandboxes, parts), strict=True)
                   for pair in zip(part, found, strict=True)]
    wrong = differing(answers, model, cluster)
    for request in wrong:
        print(f"differs: {' '.join(request)}: Slurm {dict(answers)[request]}, "
              f"model {model.answer(request, cluster)}", flush=True)
    accepted = [pair for pair in answers if pair[1] is not None]
    yield make_row("answers that differ from Slurm's: rejected, or nodes and tasks of each node", [len(wrong)], "",
                   baseline=len(answers), target=f"0 of {count}", met=not wrong)
    yield make_row("requests among them that Slurm accepts", [len(accepted)], "", baseline=len(answers))
    yield make_row("random requests that the model leaves to Slurm", [left_to_slurm], "",
                   baseline=left_to_slurm + len(answers))
    control = differing(answers, Model(ignores_gpus=True), cluster)
    yield make_row("control, GPU options ignored: answers that differ", [len(control)], "", baseline=len(answers),
                   target="above 0", met=len(control) > 0)


def busy_rows(sandbox: Sandbox, seed: int, count: int) -> Iterator[Row]:
    """Bind jobs to nodes that fit among nodes in use."""
    start_background_jobs(sandbox)
    cluster, generator = read_cluster(sandbox), random.Random(seed)
    for model, label, target in ((Model(), "", "0"), (Model(ignores_gpus=True), "control, GPU options ignored: ",
                                                     "above 0")):
        asked = refused = 0
        for request in random_requests(seed):
            if asked == count:
                break
            try:
                parsed = model.parse(request)
                job = resolve_job_size(parsed)
            except PlacementError:
                continue
            fitting = list(fitting_nodes(parsed, cluster, job.max_tasks_per_node))
            if parsed.unrestrictable_reason or parsed.unmodelled_reason or len(fitting) < job.nodes:
                continue  # slurmdl binds no nodes, or asks Slurm before
            nodes = sorted(generator.sample(fitting, job.nodes))
            asked += 1
            if not starts_on(sandbox, request, nodes):
                refused += 1
                if not model.ignores_gpus:
                    print(f"does not start on {','.join(nodes)}: {' '.join(request)}", flush=True)
        yield make_row(f"{label}jobs that do not start at once on nodes that fit, among nodes in use", [refused], "",
                       baseline=asked, target=f"{target} of {count}", met=(refused > 0) == model.ignores_gpus)


def rows(part: str, seed: int, quick: bool) -> Iterator[Row]:
    """Yield the rows of one part."""
    scale = 10 if quick else 1
    with ExitStack() as stack:
        names = [f"gpu-{os.getpid()}-{i}" for i in range(SANDBOXES if part == "idle" and not quick else 1)]
        sandboxes = [stack.enter_context(gpu_sandbox(name)) for name in names]
        if part == "idle":
            yield from idle_rows(sandboxes, seed, REQUESTS // scale)
        else:
            yield from busy_rows(sandboxes[0], seed, BUSY_REQUESTS // scale)


def slurm_version() -> dict[str, str]:
    """The release of Slurm on this machine."""
    done = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True)
    return {"slurm": done.stdout.strip()}


SUITE = Suite("gpu_requests", "Slurm's answers to random GPU requests, and slurmdl's (needs root).", ("idle", "busy"),
              rows, slurm_version, quick="a tenth of the requests")


if __name__ == "__main__":
    start(SUITE.main)
