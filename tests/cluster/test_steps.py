"""Mapped steps on a real Slurm: same tasks per node and CPUs per task as plain srun; only the order differs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from jobs import NIGHTLY, rows, slurm_release, slurmdl_messages, wait_until

#: shell command that prints rank, node, usable CPUs and SLURM_CPUS_PER_TASK of a task
TASK = 'echo "$SLURM_PROCID $(hostname) $(nproc) ${SLURM_CPUS_PER_TASK:-none}"'

#: options of the job -> options of mapped steps, options of unmapped steps
STEPS: dict[str, tuple[list[str], list[str]]] = {
    "-N 8 --exclusive": (
        ["", "-n 9", "--ntasks-per-node=2", "-c 2", "-n 12 --exact", "-r 2 -N 4 -n 6", "-w n[2-6] -N 5 -n 9",
         "-x n2,n5 -N 6 -n 12", "-n16 -lu", "-n 9 -m block -p main --reservation=no"],
        ["-N 3", "-m cyclic", "-w n1 -N 2", "-n 8 : -n 8"]),
    "-N 4 -n 6": (["", "-n 5", "-n 4", "-c 1", "--ntasks-per-node=1 -n 4"], ["-n 2", "-r 1 -N 2 -n 2"]),
    "-n 4 -c 2": (["", "-n 8", "-c 2", "-c 1"], ["-n 3"]),
    "-N 4 --ntasks-per-node=2": (["", "-n 8", "-c 1"], ["-N 2"]),
    "-N 4 --ntasks-per-node=2 --ntasks-per-core=1 -m block --mem-per-cpu=50": (["", "-n 8"], []),
}


#: nightly: more options of the same kinds
MORE_STEPS: dict[str, tuple[list[str], list[str]]] = {
    "-N 8 --exclusive": (
        ["-N 8 -n 13", "-n 11 -c 1", "-n 8 --mem-per-cpu=10", "-n 8 --ntasks-per-core=1",
         "-n 8 --ntasks-per-socket=2", "-n 8", "-n 16", "--ntasks-per-node=1", "-N 8 -c 1", "-n 8 -c 2",
         "-n 10 --overlap", "-r 5 -N 3", "-w n1,n4 -N 2 -n 2", "-x n1 -N 7"],
        ["-n 3", "-N 2-5", "-O -n 20"]),
}

#: wait until all steps are complete: a completing step still occupies its nodes, so Slurm might choose other nodes
WAIT_FOR_STEPS = "while squeue -h -s -j $SLURM_JOB_ID -o %i | grep -q '[.][0-9]'; do sleep 0.05; done"


def comparison_script(options: Sequence[str]) -> str:
    """Return a job script that runs each step with srun and with slurmdl srun."""
    lines = []
    for number, option in enumerate(options):
        for kind in ("srun", "slurmdl srun"):
            step_options = option.replace(" : ", f" sh -c '{TASK}' : ")
            lines += [WAIT_FOR_STEPS, f"echo '@ {number} {kind}'",
                      f"{kind} {step_options} sh -c '{TASK}' 2>&1 | sed 's/^ *[0-9]*: //'"]
    return "\n".join(lines)


def parse_results(text: str) -> dict[tuple[int, str], tuple[list[list[str]], str]]:
    """Return (number, command) -> fields of the tasks by rank, and the messages of slurmdl."""
    results = {}
    for part in text.split("@ ")[1:]:
        head, _, body = part.partition("\n")
        number, _, kind = head.partition(" ")
        fields = [line.split() for line in body.splitlines()]
        tasks = sorted((row for row in fields if len(row) == 4 and row[0].isdigit()), key=lambda row: int(row[0]))
        results[int(number), kind] = tasks, "\n".join(line for line in body.splitlines() if "slurmdl:" in line)
    return results


def has_consecutive_zones(cluster, nodes: Sequence[str]) -> bool:
    """Return whether the ranks of each zone are consecutive."""
    zones = [cluster.topology.leaf_of(node) for node in nodes]
    return sum(a != b for a, b in pairwise(zones)) == len(set(zones)) - 1


def cpus_by_node(tasks: Sequence[Sequence[str]]) -> dict[str, list[list[str]]]:
    """Return node -> CPU fields of its tasks."""
    results: dict[str, list[list[str]]] = {}
    for _, node, *cpus in tasks:
        results[node] = sorted([*results.get(node, []), cpus])
    return results


def run(cluster, text: str, *options: str, timeout: float = 60) -> str:
    """Run a script by plain sbatch; return its output."""
    return cluster.job_output(text, *options, program="sbatch", timeout=timeout)


@pytest.mark.parametrize(("job", "steps"), [
    *(pytest.param(job, STEPS, id=job) for job in STEPS),
    *(pytest.param(job, MORE_STEPS, id=f"{job}, more steps", marks=pytest.mark.nightly) for job in MORE_STEPS)])
def test_layout_equals_plain_srun(cluster, job, steps):
    mapped, unmapped = steps[job]
    results = parse_results(run(cluster, comparison_script(mapped + unmapped), *job.split(), timeout=120))
    # newer releases start each step on a different node, 24.11 applies -c of the job to steps, and 26.05 counts -r in
    # zone order if it fills the nodes one after another
    is_newer = slurm_release(cluster) > (22, 5)
    unmapped_count = 0
    for number, options in enumerate(mapped + unmapped):
        plain, _ = results[number, "srun"]
        mapped_tasks, messages = results[number, "slurmdl srun"]
        if is_newer:
            assert sorted(cpus_by_node(mapped_tasks).values()) == sorted(cpus_by_node(plain).values()), options
        else:
            assert cpus_by_node(mapped_tasks) == cpus_by_node(plain), options
        if number < len(mapped) and (plain or not is_newer):
            assert "-r" in options or cpus_by_node(mapped_tasks).keys() == cpus_by_node(plain).keys(), options
            assert mapped_tasks, options
            assert messages == "", (options, messages)
            assert has_consecutive_zones(cluster, [row[1] for row in mapped_tasks]), options
        else:
            assert "the step runs in srun's own order" in messages and messages.count("\n") == 0, (options, messages)
            unmapped_count += number < len(mapped)
    assert unmapped_count <= int(is_newer)


def test_layout_with_gpus_equals_plain_srun(cluster_with):
    cluster = cluster_with(nodes=4, gres="gpu:2")
    options = ["--gpus-per-task=1 -n 8", "--gpus-per-task=1", "--gres=gpu:1 -n 4", "-G 8 -n 8", "-G 4 -n 4",
               "-G 8 --cpus-per-gpu=1 -n 8", "--gpus-per-node=2 --mem-per-gpu=100 -n 8"][::1 if NIGHTLY else 2]
    results = parse_results(run(cluster, comparison_script(options), "-N4", "--gres=gpu:2", "--ntasks-per-node=2"))
    for number, option in enumerate(options):
        plain, mapped_tasks = results[number, "srun"][0], results[number, "slurmdl srun"][0]
        assert mapped_tasks and Counter(row[1] for row in mapped_tasks) == Counter(row[1] for row in plain), option
        assert has_consecutive_zones(cluster, [row[1] for row in mapped_tasks]), option


def test_srun_in_salloc_is_mapped(cluster):
    for command in ("slurmdl srun", "srun"):
        done = cluster.run(["salloc", "-N", "8", "sh", "-c", f"{command} sh -c '{TASK}'"])
        task_rows = sorted((line.split() for line in done.stdout.splitlines()), key=lambda row: int(row[0]))
        assert sorted(row[1] for row in task_rows) == [f"n{i}" for i in range(1, 9)], done.stderr
        assert has_consecutive_zones(cluster, [row[1] for row in task_rows]) == (command == "slurmdl srun")


def test_concurrent_steps_run_at_the_same_time(cluster):
    """Two steps run at the same time on different halves of the nodes (-r), then two steps on all nodes."""
    text = run(cluster, f"""
slurmdl srun -r 0 -N 4 -n 4 sh -c 'sleep 2; {TASK}' > a & slurmdl srun -r 4 -N 4 -n 4 sh -c 'sleep 2; {TASK}' > b &
wait; cat a; echo; cat b; echo
slurmdl srun -n 8 -c 1 sh -c 'sleep 2; {TASK}' > c & slurmdl srun -n 8 -c 1 sh -c 'sleep 2; {TASK}' > d &
wait; cat c; echo; cat d
""", "-N8", "--exclusive")
    # the second of two steps may report that it is not mapped
    for line in slurmdl_messages(text):
        text = text.replace(f"{line}\n", "")
    nodes = [sorted(line.split()[1] for line in group.splitlines()) for group in text.strip().split("\n\n")]
    everywhere = [f"n{i}" for i in range(1, 9)]
    assert nodes == [everywhere[:4], everywhere[4:], everywhere, everywhere]


def test_task_variables(cluster):
    task_rows = rows(run(cluster, """
slurmdl srun --dl-ps=2 -n 10 sh -c 'echo $SLURM_PROCID $(hostname) $SLURM_LOCALID $SLURMDL_ROLE $SLURMDL_ROLE_RANK \\
    $SLURMDL_ZONE $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $SLURM_JOB_NAME'
""", "-N8", "--exclusive"))
    assert [int(row[0]) for row in task_rows] == list(range(10))
    counts = Counter(row[1] for row in task_rows)
    counted: Counter[str] = Counter()
    for rank, row in enumerate(task_rows):
        _, node, local_id, role, role_rank, zone, global_rank, size, local_rank, local_size, master, port, name = row
        assert (role, int(role_rank)) == (("ps", rank) if rank < 2 else ("worker", rank - 2))
        assert zone == cluster.topology.leaf_of(node)
        assert (int(global_rank), int(size)) == (rank, 10)
        assert local_id == local_rank and int(local_rank) == counted[node] and int(local_size) == counts[node]
        assert master == task_rows[0][1] and 10_000 <= int(port) < 32_768 and name == "job.sh"
        counted[node] += 1


def test_unmapped_step_has_ranks_in_the_order_of_srun(cluster):
    """Programs with an env:// rendezvous run there, too. A single task may be a script that starts steps."""
    if slurm_release(cluster) >= (26, 5):
        pytest.skip("its order follows the topology, so that unmapped tasks get no ranks")
    options = ["-N 3 -n 5", "-m cyclic -n 9", "-O -n 17", "-w n[3,5] -N 2 -n 2"]
    task = 'echo "$RANK $SLURM_PROCID $WORLD_SIZE $LOCAL_RANK $SLURM_LOCALID $LOCAL_WORLD_SIZE $SLURMD_NODENAME ' \
        '$MASTER_ADDR $SLURM_JOB_NAME"'
    steps = "".join(f"echo @; slurmdl srun {option} sh -c '{task}; python3 meet.py >/dev/null' 2> err || cat err\n"
                    for option in options)
    script = cluster.script(f"""
cat > meet.py <<'END'
{RENDEZVOUS}
END
{steps}
echo @
RANK=mine MASTER_PORT=1234 slurmdl srun -N 2 -n 2 sh -c 'echo $RANK $MASTER_PORT ${{SLURMDL_ROLE-unset}}' 2> err
slurmdl srun -N 1 -n 1 sh -c 'srun -n 1 --overlap sh -c "echo \\${{RANK-none}} \\${{SLURMDL_EXPORTED-none}}"' 2>> err
""")
    *steps, last = run(cluster, script, "-N8", "--exclusive").split("@\n")[1:]
    for option, step in zip(options, steps, strict=True):
        tasks = sorted((line.split() for line in step.splitlines()), key=lambda row: int(row[0]))
        counts = Counter(row[6] for row in tasks)
        assert tasks and [row[0] for row in tasks] == [row[1] for row in tasks], (option, step)
        for row in tasks:
            assert row[2] == str(len(tasks)) and row[3] == row[4], (option, step)
            assert (int(row[5]), row[7], row[8]) == (counts[row[6]], tasks[0][6], "job.sh"), (option, step)
    assert last.splitlines() == ["mine 1234 unset"] * 2 + ["none none"]
    assert (script.parent / "err").read_text().count("the step runs in srun's own order") == 2


def test_variables_of_the_user_are_kept(cluster):
    lines = run(cluster, """#!/bin/bash
export RANK=mine MASTER_PORT=1234
f() { echo "function of the shell"; }
export -f f
slurmdl srun -n 8 bash -c 'echo $RANK $MASTER_PORT $WORLD_SIZE; f; env | grep -c -e HOSTFILE -e DISTRIBUTION || true'
""", "-N8").splitlines()
    assert Counter(lines) == {"mine 1234 8": 8, "function of the shell": 8, "0": 8}


def test_arguments_status_and_output_equal_srun(cluster):
    text = run(cluster, """
slurmdl srun -n 8 -o output-%x-%t python3 -c 'import sys; print(sys.argv[1:])' 'a  b' "it's" '$(ls) *' '' "two
lines"
cat output-job.sh-3
for kind in srun 'slurmdl srun'; do
    $kind -n 8 sh -c 'exit $((SLURM_PROCID % 5 * 3))' 2> /dev/null; echo $?
    $kind -n 8 sh -c 'kill -9 $$' 2> /dev/null; echo $?
    $kind -n 8 no-such-program 2> /dev/null; echo $?
    $kind -n 8 /etc/passwd 2> /dev/null; echo $?
done
""", "-N8")
    output, *statuses = text.splitlines()
    assert output == repr(["a  b", "it's", "$(ls) *", "", "two\nlines"])
    assert statuses[:4] == statuses[4:] == ["12", "137", "2", "13"]


def test_program_is_broadcast_where_that_of_an_earlier_step_still_is(cluster):
    """srun writes over it, under every name that its own steps choose."""
    text = run(cluster, """
cp "$(command -v hostname)" program
for options in --bcast --bcast=/tmp/ --bcast=/tmp/program; do
    for i in 1 2; do slurmdl srun $options ./program; done
done
SLURM_BCAST=/tmp/program slurmdl srun ./program
""", "-N3")
    messages = slurmdl_messages(text)
    assert len(messages) == 7 and all("BCAST" in message.upper() for message in messages), text
    assert len(text.splitlines()) == 7 * 4 and len(set(text.splitlines()) - set(messages)) == 3, text


def test_multi_prog_is_mapped(cluster):
    text = run(cluster, f"""
cat > programs <<'END'
# one rank apart from the others
0,5 sh -c '{TASK}' %t %o
  1-4 sh -c \\
'{TASK}'
* sh -c '{TASK}; test -n "$SLURMDL_ROLE"'
END
slurmdl srun -n 8 --multi-prog programs
""", "-N8")
    task_rows = rows(text)
    assert [int(row[0]) for row in task_rows] == list(range(8)), text
    assert has_consecutive_zones(cluster, [row[1] for row in task_rows])


def test_mpirun_is_mapped(cluster):
    program = "echo $OMPI_COMM_WORLD_RANK $(hostname) $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $SLURMDL_ROLE"
    task_rows = rows(run(cluster, f"slurmdl srun --step-starter=mpirun --dl-ps=1 -n 10 sh -c '{program}'", "-N8",
                         "--exclusive"))
    assert [(row[0], row[2], row[3]) for row in task_rows] == [(str(i), str(i), "10") for i in range(10)]
    assert Counter(Counter(row[1] for row in task_rows).values()) == {1: 6, 2: 2}
    assert [row[6] for row in task_rows] == ["ps"] + ["worker"] * 9
    assert has_consecutive_zones(cluster, [row[1] for row in task_rows[1:]])


#: program with a rendezvous like env:// of PyTorch: rank 0 listens, the other ranks connect to MASTER_ADDR
RENDEZVOUS = """
import os, socket, time
address, rank = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), int(os.environ["SLURM_PROCID"])
peer_count = int(os.environ["SLURM_NTASKS"]) - 1
if rank == 0:
    with socket.create_server(("", address[1]), backlog=peer_count) as server:
        server.settimeout(20)
        peers = [server.accept()[0] for _ in range(peer_count)]
    for peer in peers:
        peer.sendall(b"met")
else:
    deadline = time.monotonic() + 20
    while True:
        try:
            with socket.create_connection(address, timeout=120) as peer:
                assert peer.recv(3) == b"met"
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, f"rank 0 is not at {address[0]}"
            time.sleep(0.1)
print(rank, socket.gethostname())
"""


@pytest.mark.parametrize("options", ["", "--dl-strategy=adaptive-gossip", "--dl-ps=2", "-r 1 -N 4 -n 4"])
def test_ranks_connect_to_the_first_node_of_the_job(cluster, options):
    """The first node, n2, is in the second zone."""
    text = run(cluster, f"""
cat > meet.py <<'END'
{RENDEZVOUS}
END
first={2 if '-r' in options else 1}
export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | sed -n ${{first}}p) MASTER_PORT=29500
slurmdl srun {options} python3 meet.py
""", "-w", "n[2-7]", "-N6")
    nodes = mapped_nodes(text)
    assert nodes[0] == ("n3" if "-r" in options else "n2") and len(nodes) == (4 if "-r" in options else 6)
    assert slurmdl_messages(text) == []


def test_conflicting_master_addr_is_a_warning(cluster):
    """The warning is printed if it is another node of the job; printed maps begin on the first node."""
    text = run(cluster, """
for MASTER_ADDR in n4 n4.cluster n2 n1 10.0.0.4; do
    export MASTER_ADDR; slurmdl srun --dl-dry-run true 2>&1 >/dev/null
done
unset MASTER_ADDR
echo @
for form in slurm-hostfile intel-machinefile torchrun; do slurmdl srun --print-rank-map=$form | head -n 1; done
slurmdl srun --print-rank-map=slurm-hostfile --dl-rank0=any | head -n 1
""", "-w", "n[2-7]", "-N6")
    lines, _, printed = text.partition("@\n")
    warnings = slurmdl_messages(lines)
    assert [warning.split()[1] for warning in warnings] == ["MASTER_ADDR=n4:", "MASTER_ADDR=n4.cluster:"]
    assert all(warning.endswith(" n2") for warning in warnings)
    hosts, machines, torchrun, free = printed.splitlines()
    assert (hosts, machines, torchrun.split()[0], free) == ("n2", "n2:1", "n2", "n3")
    assert "--node_rank=0" in torchrun and "--master_addr=n2" in torchrun


def test_srun_outside_a_job_is_plain_srun(cluster):
    """srun allocates nodes, or runs in the job of --jobid; --dl-strict makes that an error."""
    done = cluster.run(["slurmdl", "srun", "-N", "2", "hostname"])
    assert (done.returncode, len(set(done.stdout.split()))) == (0, 2), done.stderr
    message, = slurmdl_messages(done.stderr)
    assert "not inside a job" in message and "the step runs in srun's own order" in message
    job = cluster.start(["sbatch", "-w", "n5", "--wrap", "sleep 60"])
    done = cluster.run(["slurmdl", "srun", f"--jobid={job}", "--overlap", "hostname"])
    assert (done.returncode, done.stdout) == (0, "n5\n"), done.stderr
    done = cluster.run(["slurmdl", "srun", "--dl-strict", "hostname"])
    assert (done.returncode, done.stdout) == (64, "") and done.stderr.count("\n") == 1 and "job" in done.stderr


def test_strict_fails_for_an_unmapped_step(cluster):
    lines = run(cluster, "slurmdl srun --dl-strict -N 3 hostname 2>&1; echo $?", "-N8").splitlines()
    assert len(lines) == 2 and "Slurm chooses" in lines[0] and lines[1] == "75"


def test_options_of_the_submission_reach_the_step(cluster):
    *roles, complaint = cluster.job_output("""
#DL --dl-strategy=ps --dl-ps=1
slurmdl srun sh -c 'echo $SLURMDL_ROLE'
slurmdl srun --dl-strategy=gossip sh -c 'echo $SLURMDL_ROLE'
SLURMDL_SUBMISSION='{' slurmdl srun sh -c 'echo ${SLURMDL_ROLE:-none}' 2> complaint
grep ^slurmdl: complaint
""", "--dl-ps=3", "-N8").splitlines()
    assert Counter(roles[:8]) == {"ps": 3, "worker": 5}
    assert roles[8:] == ["worker"] * 8 + ["none"] * 8
    assert complaint.startswith("slurmdl: SLURMDL_SUBMISSION is malformed")


def test_hanging_controller_delays_the_step_by_seconds(cluster):
    script = cluster.script("""
touch ready; while [ ! -e go ]; do sleep 0.1; done
date +%s; slurmdl srun --dl-dry-run -n 8 hostname; date +%s
slurmdl srun --dl-dry-run --dl-strict -n 8 hostname; echo $?; touch done
while [ -e go ]; do sleep 0.1; done
""")
    job, directory = cluster.sbatch(script, "-N8", program="sbatch"), script.parent
    wait_until((directory / "ready").exists, "the job does not start")
    cluster.freeze_daemon("login", True)
    try:
        cluster.run(["touch", "go"], directory=directory)
        wait_until((directory / "done").exists, "slurmdl srun does not end")
    finally:
        cluster.freeze_daemon("login", False)
        cluster.run(["rm", "-f", "go"], directory=directory)
    lines = cluster.output(job).splitlines()
    messages = [line for line in lines if line.startswith("slurmdl: scontrol: no answer")]
    assert len(messages) == 2 and "the step runs in srun's own order" in messages[0] and "69" in lines
    start, end = (int(line) for line in lines if line.isdigit() and len(line) > 9)
    assert any(re.fullmatch("srun (--mpi=\\w+ )?-n 8 hostname", line) for line in lines)
    assert 4 <= end - start <= 8


def test_cluster_without_zones_sets_roles_and_variables(cluster_with):
    """Roles and variables are set; ranks are in the order of the node names."""
    output = run(cluster_with(nodes=2, slurm_conf_lines=("TopologyPlugin=topology/none",)), """
slurmdl srun --dl-ps=1 sh -c 'echo $SLURM_PROCID $(hostname) $SLURMDL_ROLE' 2> complaint | sort
cat complaint
slurmdl srun -Q --dl-ps=1 true 2>&1; slurmdl srun --dl-strict hostname 2>&1; echo $?
""", "-N2")
    assert output.splitlines() == [
        "0 n1 ps", "1 n2 worker",
        "slurmdl: the cluster's topology has no zones; ranks in the order of the node names",
        "slurmdl: the cluster's topology has no zones", "69"]


def mapped_nodes(text: str) -> list[str]:
    """Return the node of each rank, from lines `RANK NODE` in any order."""
    task_rows = rows(text)
    assert [int(row[0]) for row in task_rows] == list(range(len(task_rows)))
    return [row[1] for row in task_rows]


def test_printed_maps_put_every_rank_on_its_node(cluster):
    """Compare the map of a step with srun and Open MPI using the printed files, and with torchrun's rule."""
    task = "sh -c 'echo $SLURM_PROCID $(hostname)'"
    mpi_task = "sh -c 'echo $OMPI_COMM_WORLD_RANK $(hostname)'"
    forms = ("slurm-hostfile", "openmpi-rankfile", "openmpi-seq", "intel-machinefile")
    # Open MPI 5 rejects a rank file with a dash in its name
    script = cluster.script(f"""
options='--dl-ps=2 -n 10'
slurmdl srun $options {task} > mapped
for form in {' '.join(forms)}; do slurmdl srun $options --print-rank-map=$form > ${{form#*-}} || echo failed; done
SLURM_HOSTFILE=$PWD/hostfile srun -n 10 -m arbitrary {task} > 0
mpirun -np 10 --rankfile rankfile {mpi_task} > 1
mpirun -np 10 --hostfile seq --map-by seq --bind-to none {mpi_task} > 2
slurmdl srun -n 16 --print-rank-map=torchrun > torchrun
slurmdl srun -n 16 sh -c 'echo $RANK $(hostname) $MASTER_ADDR' > even
slurmdl srun -n 10 --print-rank-map=torchrun; echo $?
""")
    messages, directory = run(cluster, script, "-N8", "--exclusive").splitlines(), script.parent
    expected = mapped_nodes((directory / "mapped").read_text())
    assert (directory / "hostfile").read_text().split() == expected
    for number in range(3):
        assert mapped_nodes((directory / str(number)).read_text()) == expected, (forms[number], '\n'.join(messages))
    counts = [line.split(":") for line in (directory / "machinefile").read_text().split()]
    assert [node for node, count in counts for _ in range(int(count))] == expected
    even = mapped_nodes((directory / "even").read_text())
    for line in (directory / "torchrun").read_text().splitlines():
        node, *options = line.split()
        values = dict(option.removeprefix("--").split("=") for option in options)
        first_rank, count = int(values["node_rank"]) * 2, int(values["nproc_per_node"])
        assert {even[first_rank + local] for local in range(count)} == {node}
        assert (values["nnodes"], values["master_addr"]) == ("8", even[0])
    assert messages[-1] == "75" and "with 1 and with 2 tasks" in messages[-2]
