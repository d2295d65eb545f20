"""Meshes and groups of nodes on a real Slurm; bad input is refused before the submission."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import skip_before_torch_2

EXAMPLE = Path(__file__).parents[2] / "examples/mesh.py"


def test_device_mesh_is_the_placed_one(cluster):
    """Four nodes in two zones, pp with most traffic: all stages of a replica are in one zone."""
    skip_before_torch_2(cluster)
    program = cluster.script(EXAMPLE.read_text(), "mesh.py")
    output = cluster.job_output(f"export GLOO_SOCKET_IFNAME=eth0\nslurmdl srun python {program}", "-N4",
                                "-w", "n[1-4]", "--dl-mesh=pp=2,dp=2", "--dl-bytes=pp=400M,dp=1M")
    lines = re.findall(r"rank (\d+) on (n\d+): \{'pp': (\d), 'dp': (\d)\}, sums \{'pp': 1.0, 'dp': 1.0\}", output)
    assert len(lines) == 4, output
    zones = {replica: {int(node[1:]) % 2 for _, node, _, at in lines if at == replica} for replica in "01"}
    assert sorted(zones.values(), key=min) == [{0}, {1}], output


def test_tasks_find_their_group(cluster):
    """Groups of three and five nodes in two zones of four: most traffic of the larger one stays in a zone."""
    task = ("echo $SLURM_PROCID $SLURMD_NODENAME $SLURMDL_ROLE $SLURMDL_ROLE_RANK "
            "$(python -c 'import slurmdl; print(slurmdl.planned_mesh())' 2>&1 | tail -n 1)")
    output = cluster.job_output(f'slurmdl srun sh -c "{task}"'.replace("$", "\\$"), "-N8",
                                "--dl-groups=trainer=3,rollout=5", "--dl-mesh=trainer:dp=3",
                                "--dl-bytes=dp=400M,rollout=1M")
    lines = sorted((line.split(maxsplit=4) for line in output.splitlines()), key=lambda fields: int(fields[0]))
    assert [fields[2:4] for fields in lines] == \
        [["trainer", str(i)] for i in range(3)] + [["rollout", str(i)] for i in range(5)], output
    assert len({int(node[1:]) % 2 for _, node, role, *_ in lines if role == "trainer"}) == 1, output
    assert all("has no mesh" in text if role == "rollout" else text == "dp=3" for *_, role, _, text in lines), output


@pytest.mark.parametrize(("options", "message"), [
    (["-N4", "--dl-groups=a=2,b=3"], r"--dl-groups=a=2,b=3: 5 nodes; the job has 4; expected b=2"),
    (["-N4", "--dl-groups=a=2,b=2", "--dl-bytes=a:c=1G"], r"unknown group 'c'; expected a, b"),
    (["-N4", "-n8", "--dl-mesh=dp=2,tp=8"], r"a mesh of 16 ranks; the job has 8; expected dp=1"),
    (["-N4", "--dl-mesh=dp=2,ttp=2"], r"unknown dimension 'ttp'; expected tp"),
    (["-N4", "--dl-mesh=dp=4", "--dl-model=params=7B,layers=2,seq=8"], r"hidden is missing"),
    (["-N4", "--dl-mesh=dp=4", "--dl-bytes=tp=1G"], r"unknown dimension 'tp'; expected dp"),
    (["-N4", "--dl-mesh=dp=4", "--dl-strategy=gossip"], r"not valid with --dl-strategy=gossip")])
def test_bad_mesh_submits_nothing(cluster, options, message):
    done = cluster.run(["slurmdl", "sbatch", *options, "--wrap=true"])
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (64, "", 1), done.stderr
    assert re.search(message, done.stderr) and "Traceback" not in done.stderr


def test_step_of_another_size_runs_without_the_mesh(cluster):
    output = cluster.job_output("slurmdl srun -N1 -n1 sh -c 'echo one task, $SLURMDL_RANKS_PER_TASK ranks'\n"
                                "slurmdl srun -n4 sh -c 'echo four tasks'", "-N4", "--dl-mesh=dp=4")
    assert "one task, ranks" in output and output.count("four tasks") == 4
