"""Launchers on a real cluster: the nodes of their ranks, with slurmdl's support and, as a control, without it.

The nodes' names sort badly: n10 comes before n2. accelerate, Lightning and submitit are optional: make nightly
installs them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import in_containers
from jobs import NIGHTLY, skip_before_torch_2, slurmdl_messages

#: prints the node of every rank, gathered by torch.distributed
GATHER = """\
import os, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
places = [None] * dist.get_world_size()
dist.all_gather_object(places, (dist.get_rank(), os.environ["SLURMD_NODENAME"]))
if dist.get_rank() == 0:
    sys.stdout.write("".join(f"rank {rank} {node}\\n" for rank, node in sorted(places)))
dist.barrier()
sys.stdout.flush()
time.sleep(1)  # a rank that leaves the barrier late must not lose its peers: torchrun would restart all
os._exit(0)  # gloo's threads may abort a process that ends later than others
"""
#: the shape of Accelerate's nlp_example, with random tokens instead of a download; ends as GATHER does
ACCELERATE = """\
import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# on CPUs Accelerate prefers PyTorch's MPI backend, which Debian's PyTorch has: one rank per task only
accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
torch.manual_seed(7)
tokens = torch.randint(100, (340, 16))
labels = (tokens[:, 0] >= 50).long()
training, test = (TensorDataset(tokens[part], labels[part]) for part in (slice(240), slice(240, None)))
model = nn.Sequential(nn.Embedding(100, 16), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Flatten(),
                      nn.Linear(256, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
model, optimizer, loader, test_loader, scheduler = accelerator.prepare(
    model, optimizer, DataLoader(training, 5, shuffle=True), DataLoader(test, 5), scheduler)
for batch, label in loader:
    accelerator.backward(nn.functional.cross_entropy(model(batch), label))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
model.eval()
seen = 0
for batch, label in test_loader:
    with torch.no_grad():
        prediction = model(batch).argmax(1)
    seen += len(accelerator.gather_for_metrics((prediction, label))[0])
assert seen == 100, seen
""" + GATHER.replace('dist.init_process_group("gloo")\n', "")
LIGHTNING = """\
import os, sys, torch, lightning
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.layer(batch[0]).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
    def on_train_start(self):
        places = [None] * dist.get_world_size()
        dist.all_gather_object(places, (dist.get_rank(), os.environ["SLURMD_NODENAME"]))
        if dist.get_rank() == 0:
            sys.stdout.write("".join(f"rank {rank} {node}\\n" for rank, node in sorted(places)))

trainer = lightning.Trainer(max_steps=2, accelerator="cpu", devices=1, num_nodes=int(os.environ["SLURM_NNODES"]),
                            logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=2))
"""
#: submits a function that prints its rank; its srun is that of slurm_setup
SUBMITIT = """\
import os, submitit
from submitit.helpers import TorchDistributedEnvironment
def place():
    environment = TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
    return environment.rank, environment.master_addr, os.environ["SLURMD_NODENAME"]
executor = submitit.SlurmExecutor("log")
executor.update_parameters(nodes=4, ntasks_per_node=1, exclusive=True, time=5,
                           additional_parameters={"nodelist": "n1,n2,n3,n4"},
                           setup=['srun() { slurmdl srun "$@"; }'])
job = executor.submit(place)
results = job.results()
masters = {master for _, master, _ in results}
print("".join(f"rank {rank} {node}\\n" for rank, _, node in sorted(results)), end="")
print("masters", *masters)
"""
PACKAGES = ("accelerate", "lightning", "submitit")
PLAIN_RANK = "--no-python sh -c 'echo rank $RANK $SLURMD_NODENAME; sleep 3'"
C10D = "--rdzv-backend=c10d --rdzv-endpoint=$head:29500"
#: header of the job scripts, as in many centres' documentation
HEADER = """#!/bin/bash
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
export head OMP_NUM_THREADS=1
[ "$USE_LIBUV" != 0 ] || export PYTHONPATH=$PWD/without-libuv
"""
#: sitecustomize.py for Debian's PyTorch: torchrun's stores require libuv, which it lacks, and ignore USE_LIBUV
WITHOUT_LIBUV = """\
import sys
import torch.distributed as dist
class TCPStore(dist.TCPStore):
    def __init__(self, *args, use_libuv=False, **options):
        super().__init__(*args, use_libuv=False, **options)
dist.TCPStore = sys.modules["torch.distributed.rendezvous"].TCPStore = TCPStore
"""


def planned(cluster, count: int) -> list[str]:
    """The nodes n1, ..., n`count` in the planned order: one zone after the other, Slurm's order in each."""
    nodes = [node for node in cluster.topology.nodes if int(node[1:]) <= count]
    return sorted(nodes, key=lambda node: int(node[1:]) % 2 == 0)


def run_steps(cluster, nodes: int, steps: dict[str, str], files: dict[str, str],
              packages: Path | None = None) -> dict[str, tuple[list[str], str]]:
    """Run steps in one job; return for each the node of every rank, and the messages of slurmdl."""
    lines = [f"export PATH={packages}/bin:$PATH PYTHONPATH={packages}:$PYTHONPATH"] if packages else []
    lines += [f"{command} > {name}.out 2> {name}.err" for name, command in steps.items()]
    script = cluster.script(HEADER + "\n".join([*lines, "true"]))
    cluster.run(["mkdir", str(script.parent / "without-libuv")]).check_returncode()
    for name, text in {**files, "without-libuv/sitecustomize.py": WITHOUT_LIBUV}.items():
        (script.parent / name).write_text(text)
    names = ",".join(f"n{i}" for i in range(1, nodes + 1))
    cluster.job_output(script, "-w", names, "-N", str(nodes), "--ntasks-per-node=1", "--exclusive", program="sbatch",
                       timeout=120 * len(steps))
    results = {}
    for name in steps:
        text, errors = ((script.parent / f"{name}.{kind}").read_text() for kind in ("out", "err"))
        places = {int(rank): node for rank, node in re.findall(r"^rank (\d+) (\S+)$", text, re.M)}
        messages = "\n".join(slurmdl_messages(errors)) if places else ""
        results[name] = ([places[rank] for rank in sorted(places)], messages or errors.strip())
    return results


def twice(nodes: list[str]) -> list[str]:
    return [node for node in nodes for _ in range(2)]


def test_torchrun_keeps_the_planned_order(cluster):
    """With a c10d rendezvous, and in nightly runs in a script that cannot be read."""
    skip_before_torch_2(cluster)
    torchrun = f"torchrun --nnodes=3 --nproc-per-node=2 {C10D} {PLAIN_RANK}"
    script = "torchrun --nnodes=3 --node-rank=$SLURM_NODEID --master-addr=$head --master-port=29501 " + PLAIN_RANK
    steps = {"c10d": f"slurmdl srun {torchrun}", **({"script": "slurmdl srun bash run.sh"} if NIGHTLY else {})}
    results = run_steps(cluster, 3, steps, {"run.sh": script})
    order = planned(cluster, 3)
    assert order == ["n1", "n3", "n2"]
    assert results["c10d"] == (twice(order), "slurmdl: 6 of 6 ranks on their planned nodes")
    assert not NIGHTLY or results["script"][0] == order


@pytest.mark.parametrize("names", [("script",), pytest.param(
    ("by_name", "alone", "forced", "halves", "unknown"), marks=pytest.mark.nightly)])
def test_launcher_in_a_script_keeps_the_planned_order(cluster, names):
    """Scripts that start torchrun with a c10d rendezvous: on all nodes, on each by itself, on each half of them."""
    skip_before_torch_2(cluster)
    files = {"run.sh": f"torchrun --nnodes=4 --nproc-per-node=2 {C10D} ${{1:+$1=$SLURMD_NODENAME}} {PLAIN_RANK}",
             "alone.sh": "torchrun --standalone gather.py > alone-$SLURM_PROCID", "gather.py": GATHER,
             "halves.sh": "half=$((SLURM_PROCID / 2)) first=$(echo $1 | cut -d, -f$((half + 1)))\n"
                          "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=$first:29500 gather.py "
                          "> half-$half-$SLURM_PROCID"}
    steps = {
        "script": "slurmdl srun env A=1 bash run.sh", "by_name": "slurmdl srun bash run.sh --local-addr",
        "alone": "slurmdl srun bash alone.sh; cat alone-2",
        "halves": "slurmdl srun bash halves.sh n1,n2; cat half-1-*",
        "forced": "slurmdl srun --dl-launcher=torchrun:2 bash run.sh",
        "unknown": "slurmdl srun --dl-launcher=torchrun bash run.sh"}
    results = run_steps(cluster, 4, {name: steps[name] for name in names}, files)
    order, kept = planned(cluster, 4), "slurmdl: 8 of 8 ranks on their planned nodes"
    unknown = ("slurmdl: torchrun: the number of ranks per node is unknown and 1 is assumed; "
               f"expected --dl-launcher=torchrun:N\n{kept}")
    expected = {"script": (twice(order), kept), "forced": (twice(order), kept), "unknown": (twice(order), unknown),
                "alone": (order[2:3], "")}  # rank 2 is alone on its node
    if "halves" in names:
        assert results.pop("halves")[0] == order[2:]
        nodes, message = results.pop("by_name")
        assert nodes == twice(sorted(order)) and "4 of 8 ranks on their planned nodes" in message
        assert message.endswith("expected --dl-launcher=torchrun"), message
    assert results == {name: expected[name] for name in results}


def test_plain_srun_with_slurmdl_env(cluster):
    results = run_steps(cluster, 4, {
        "env": 'eval "$(slurmdl env)" && srun sh -c \'eval "$(slurmdl env)"; echo rank $RANK $SLURMD_NODENAME\'',
        "verify": "slurmdl srun slurmdl verify"}, {})
    assert results["env"][0] == planned(cluster, 4), results["env"][1]
    assert results["verify"][1] == "slurmdl: 4 of 4 ranks on their planned nodes"


@pytest.mark.nightly
def test_torch_programs_keep_the_planned_order(cluster):
    """torch.distributed with one and two ranks per node, a fixed and an elastic number of nodes."""
    results = run_steps(cluster, 6, {
        "env": "slurmdl srun python gather.py",
        "c10d": f"slurmdl srun torchrun --nnodes=6 --nproc-per-node=2 {C10D} gather.py",
        "elastic": f"slurmdl srun torchrun --nnodes=2:6 --max-restarts=2 {C10D} gather.py",
        "plain": "eval \"$(slurmdl env)\"; srun sh -c 'eval \"$(slurmdl env)\"; "
                 f"torchrun --nnodes=6 {C10D} gather.py'",
        "control": f"slurmdl srun --dl-launcher=none torchrun --nnodes=2:6 {C10D} gather.py"}, {"gather.py": GATHER})
    order = planned(cluster, 6)
    assert {name: nodes for name, (nodes, _) in results.items()} == {
        "env": order, "c10d": twice(order), "elastic": order, "plain": order, "control": sorted(order)}
    assert results["c10d"][1] == "slurmdl: 12 of 12 ranks on their planned nodes"


#: numbers the nodes by name, which slurmdl cannot change; prints like PLAIN_RANK
BY_NAME = f"bash -c 'torchrun --nnodes=4 {C10D} --local-addr=$SLURMD_NODENAME --no-python sh place.sh'"
PLACE = "echo rank $RANK $SLURMD_NODENAME; sleep ${SECONDS_TO_RUN-3}"


@pytest.mark.parametrize(("command", "fact"), [
    (f"torchrun --nnodes=3 {C10D} --no-python sh place.sh", "--nnodes=4"), (BY_NAME, "--local-addr=")])
@pytest.mark.nightly
def test_launch_that_cannot_keep_the_order_says_so_and_runs(cluster, command, fact):
    nodes, message = run_steps(cluster, 4, {"step": f"slurmdl srun {command}"}, {"place.sh": PLACE})["step"]
    assert nodes == sorted(nodes)
    assert fact in message


@pytest.mark.nightly
def test_mismatch_ends_a_strict_step(cluster):
    command = f"SECONDS_TO_RUN=300 slurmdl srun --dl-strict {BY_NAME}"
    _, message = run_steps(cluster, 4, {"step": command}, {"place.sh": PLACE})["step"]
    assert "2 of 4 ranks on their planned nodes" in message
    assert "canceled" in message


@pytest.mark.nightly
def test_training_scripts_on_nodes_whose_names_sort_badly(new_cluster, request):
    """One and two ranks per node; each launcher is really installed."""
    if in_containers(request.config):
        nodes, cluster = 8, new_cluster()
    else:
        nodes, cluster = 12, new_cluster(nodes=12, names=tuple(f"n{i}" for i in range(1, 13)))
    packages = cluster.python_packages(*PACKAGES)
    accelerate = f"accelerate launch --multi_gpu --num_machines {nodes} --main_process_ip $head " \
                 "--main_process_port 29505"
    results = run_steps(cluster, nodes, {
        "env": "slurmdl srun python gather.py",
        "torchrun": f"slurmdl srun torchrun --nnodes={nodes} --nproc-per-node=2 {C10D} gather.py",
        "static": f"slurmdl srun torchrun --nnodes={nodes} gather.py",
        "accelerate": f"slurmdl srun {accelerate} --rdzv_backend c10d --num_processes {2 * nodes} accelerated.py",
        "bash": f"slurmdl srun bash -c '{accelerate} --machine_rank $SLURM_NODEID --num_processes {nodes} "
                "accelerated.py'",
        "lightning": "slurmdl srun python trained.py",
        "control": f"slurmdl srun --dl-launcher=none torchrun --nnodes={nodes} {C10D} gather.py",
        "control2": f"slurmdl srun --dl-launcher=none bash -c '{accelerate} --machine_rank $SLURM_PROCID "
                    f"--rdzv_backend c10d --num_processes {nodes} accelerated.py'",
    }, {"gather.py": GATHER, "accelerated.py": ACCELERATE, "trained.py": LIGHTNING}, packages)
    order = planned(cluster, nodes)
    assert order == [f"n{i}" for i in (*range(1, nodes, 2), *range(2, nodes + 1, 2))]
    for name, ranks in (("env", order), ("torchrun", twice(order)), ("static", order), ("accelerate", twice(order)),
                        ("bash", order), ("lightning", order), ("control", sorted(order)),
                        ("control2", sorted(order))):
        assert results[name][0] == ranks, (name, results[name])


@pytest.mark.nightly
def test_submitit_function_runs_in_the_planned_order(cluster):
    packages = cluster.python_packages(*PACKAGES)
    directory = cluster.directory()
    Path(directory / "submit.py").write_text(SUBMITIT)
    done = cluster.run(["python", "submit.py"], directory=directory, timeout=120,
                       env={"PYTHONPATH": str(packages)} if packages else None)
    assert done.returncode == 0, done.stderr
    nodes = [line.split()[2] for line in done.stdout.splitlines() if line.startswith("rank ")]
    assert nodes == planned(cluster, 4)
    assert "masters n1\n" in done.stdout
