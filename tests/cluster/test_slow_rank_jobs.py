"""Slow ranks on a real Slurm: a node that becomes slow during the training is left out of the next start."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from jobs import SOON, read_log, wait_for_pattern

JOB = """\
#SBATCH -N{nodes} --ntasks-per-node=1 --requeue --open-mode=append
echo "start ${{SLURM_RESTART_COUNT-0}} on $(scontrol show hostnames | tr '\\n' ' ')"
slurmdl srun {launcher} --dl-on-slow=exclude python -m slurmdl.train --strategy allreduce --model mlp:2048 \\
    --batch-size 256 --steps {steps} --log-every 10 --summary summary.json \\
    --checkpoint-dir kept --checkpoint-every 100
echo "status $?"
"""
DDP_STEPS = 600
DDP_JOB = """\
#SBATCH -N3 --ntasks-per-node=1 --requeue --open-mode=append
echo "start ${SLURM_RESTART_COUNT-0} on $(scontrol show hostnames | tr '\\n' ' ')"
slurmdl srun --dl-on-slow=exclude python train.py
echo "status $?"
"""
#: plain script of a user, with a checkpoint of its own
DDP_SCRIPT = f"""\
import os
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from slurmdl.train import watch_slow_ranks

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_num_threads(1)
torch.manual_seed(1)
network = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
opt, first = torch.optim.SGD(network.parameters(), lr=0.05), 0
if os.path.exists("kept"):
    kept = torch.load("kept")
    network.load_state_dict(kept["model"])
    first = kept["steps"]
    if rank == 0:
        print(f"resumed after step {{first}}", flush=True)
model = DistributedDataParallel(network)
watch_slow_ranks(model)
for step in range(first + 1, {DDP_STEPS} + 1):
    torch.manual_seed(3 * step + rank)
    images, target = torch.randn(512, 64), torch.randint(10, (512,))
    opt.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(images), target)
    # not a CPU limit: beside other programs all ranks may get as little CPU time
    if os.path.exists(f"slow-{{os.environ['SLURMD_NODENAME']}}"):
        time.sleep(0.3)
    loss.backward()
    opt.step()
    if rank == 0 and step % 20 == 0:
        torch.save({{"model": network.state_dict(), "steps": step}}, "kept.new")
        os.replace("kept.new", "kept")
        print(f"step {{step}} of {DDP_STEPS}", flush=True)
dist.barrier()
os._exit(0)  # see examples/ddp.py
"""


def train_undisturbed(cluster: Any, script: str) -> dict[str, Any]:
    """The summary of the same training without a slow node."""
    path = cluster.script(script)
    text = cluster.job_output(path, timeout=300)
    assert text.rstrip().endswith("status 0") and "computes" not in text, text
    return dict(json.loads((path.parent / "summary.json").read_text()))


@pytest.mark.nightly
@pytest.mark.parametrize(("has_spare_node", "launcher"), [(True, ""), (False, ""), (True, "--step-starter=mpirun")])
def test_job_leaves_the_slow_node(new_sandbox, has_spare_node, launcher):
    """With a spare node it resumes there from a checkpoint, and ends with the model of an undisturbed job.

    Without a spare node it continues, and says so once. In one zone: ranks in other zones sum in another order.
    """
    cluster = new_sandbox(nodes=4 if has_spare_node else 3, zones=1, slurm_conf_lines=SOON)
    script = JOB.format(nodes=3, launcher=launcher, steps=400 if has_spare_node else 200)
    undisturbed = train_undisturbed(cluster, script)
    path = cluster.script(script)
    job = cluster.sbatch(path, env={"XDG_STATE_HOME": str(cluster.directory("state"))})
    log = path.parent / f"slurm-{job}.out"
    wait_for_pattern(log, "step +20 of")
    nodes = re.search("start 0 on (.*)", read_log(log))[1].split()
    cluster.sandbox.limit_cpu(nodes[-1], 0.1)
    record = cluster.wait(job, 300)
    text = read_log(log)
    # on a busy machine, a rank of the second start may compute slowly for a moment
    warning, = [line for line in text.partition("start 1 on")[0].splitlines() if "computes" in line]
    assert re.search(rf"rank \d on {nodes[-1]} computes [\d.]+ times as long as the median rank, since step", warning)
    assert text.rstrip().endswith("status 0"), text
    summary = json.loads((path.parent / "summary.json").read_text())
    for key in ("steps", "parameters_crc32", "test_accuracy"):
        assert summary[key] == undisturbed[key], key
    if has_spare_node:
        started_again = re.search("start 1 on (.*)", text)
        assert started_again, text
        assert nodes[-1] not in started_again[1].split()
        assert "resumed after step" in text
        assert record["ExcNodeList"] == nodes[-1]
    else:
        assert record["Restarts"] == "0"
        assert text.count(f"not requeued without {nodes[-1]}, and the run continues") == 1, text


@pytest.mark.nightly
def test_ddp_script_leaves_the_slow_node(new_sandbox):
    """Slurm ends the script, which resumes from its own checkpoint on the spare node."""
    cluster = new_sandbox(nodes=4, zones=1, slurm_conf_lines=SOON)
    path = cluster.script(DDP_JOB)
    (path.parent / "train.py").write_text(DDP_SCRIPT)
    job = cluster.sbatch(path, env={"XDG_STATE_HOME": str(cluster.directory("state"))})
    log = path.parent / f"slurm-{job}.out"
    wait_for_pattern(log, "step 40 of")
    slow = re.search("start 0 on (.*)", read_log(log))[1].split()[-1]
    (path.parent / f"slow-{slow}").touch()
    record = cluster.wait(job, 300)
    text = read_log(log)
    started_again, resumed = re.search("start 1 on (.*)", text), re.search(r"resumed after step (\d+)", text)
    assert started_again and resumed, text
    assert slow not in started_again[1].split()
    assert (record["Restarts"], record["ExcNodeList"]) == ("1", slow)
    # on a busy machine, a rank of the second start may compute slowly for a moment
    warning, = [line for line in text.partition("start 1 on")[0].splitlines() if "computes" in line]
    assert re.search(rf"rank \d on {slow} computes [\d.]+ times as long as the median rank, since step", warning)
    # the second start makes the steps after the checkpoint, and only those
    assert int(resumed[1]) >= 80
    second_start = text[started_again.end():]
    steps = [int(step) for step in re.findall(rf"^step (\d+) of {DDP_STEPS}$", second_start, re.M)]
    assert steps == list(range(int(resumed[1]) + 20, DDP_STEPS + 1, 20)), text
    assert text.rstrip().endswith("status 0"), text
