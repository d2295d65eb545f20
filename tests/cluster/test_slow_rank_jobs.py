"""Slow ranks on a real Slurm: a node that becomes slow during the training is left out of the next start."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from jobs import read_log, wait_for_pattern

#: Slurm starts a requeued job again after 6 s instead of 121 s
SOON = ("AuthInfo=cred_expire=5",)
JOB = """\
#SBATCH -N{nodes} --ntasks-per-node=1 --requeue --open-mode=append
echo "start ${{SLURM_RESTART_COUNT-0}} on $(scontrol show hostnames | tr '\\n' ' ')"
slurmdl srun --dl-on-slow=exclude python -m slurmdl.train --strategy allreduce --model mlp:512 --batch-size 64 \\
    --steps {steps} --log-every 10 --checkpoint-dir kept --checkpoint-every 100 --summary summary.json
echo "status $?"
"""


def train_undisturbed(cluster: Any, script: str) -> dict[str, Any]:
    """The summary of the same training without a slow node."""
    path = cluster.script(script)
    text = cluster.output(cluster.submit(["slurmdl", "sbatch", str(path)], directory=path.parent), 300)
    assert text.rstrip().endswith("status 0") and "computes" not in text, text
    return dict(json.loads((path.parent / "summary.json").read_text()))


@pytest.mark.nightly
@pytest.mark.parametrize("has_spare_node", [True, False])
def test_job_leaves_the_slow_node(new_sandbox, has_spare_node):
    """With a spare node it resumes there from a checkpoint, and ends with the model of an undisturbed job.

    Without a spare node it continues, and says so once. In one zone: ranks in other zones sum in another order.
    """
    cluster = new_sandbox(nodes=4 if has_spare_node else 3, zones=1, slurm_conf_lines=SOON)
    script = JOB.format(nodes=3, steps=800 if has_spare_node else 250)
    undisturbed = train_undisturbed(cluster, script)
    path = cluster.script(script)
    job = cluster.submit(["slurmdl", "sbatch", str(path)], directory=path.parent,
                         env={"XDG_STATE_HOME": str(cluster.directory("state"))})
    log = path.parent / f"slurm-{job}.out"
    wait_for_pattern(log, "step +20 of")
    nodes = re.search("start 0 on (.*)", read_log(log))[1].split()
    cluster.sandbox.limit_cpu(nodes[-1], 0.1)
    record = cluster.wait(job, 300)
    text = read_log(log)
    warning, = [line for line in text.splitlines() if "computes" in line]
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
