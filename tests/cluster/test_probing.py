"""Known bad links on a real cluster, measured by probes, counters and the agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from jobs import own_lines, ranks

from slurmdl.links.samples import LinkSample, parse_sample_lines


def samples(text: str) -> dict[str, LinkSample]:
    found = {}
    for sample in parse_sample_lines(line for line in text.splitlines() if line.startswith("{")):
        assert isinstance(sample, LinkSample), sample
        found[f"{sample.kind} {sample.name}"] = sample
    return found


@pytest.fixture(scope="module")
def shaped(_shared_cluster):
    """The common cluster with one slow, one distant and one lossy link; restored afterwards."""
    changes = {"n3": {"rate": 1e8}, "n5": {"delay": 2e-3}, "n6": {"loss": 0.05}}
    for node, change in changes.items():
        _shared_cluster.shape_link(node, **change)
    yield _shared_cluster
    for node in changes:
        _shared_cluster.shape_link(node, rate=1e9, delay=0.0, loss=0.0)


def test_probe_finds_the_slow_the_distant_and_the_lossy_link(shaped):
    done = shaped.run(["slurmdl", "links", "probe", "--all", "--budget=15s", "--output", "-"], timeout=90)
    assert done.returncode == 0, done.stderr
    found = samples(done.stdout)
    assert {f"node n{i}" for i in range(1, 9)} | {"inter_leaf zoneA|zoneB", "zone zoneA", "zone zoneB"} == set(found)
    slow, late, lossy = (found.pop(f"node {node}") for node in ("n3", "n5", "n6"))
    clean = [sample for name, sample in found.items() if name.startswith("node")]
    assert 0.6 * 12.5e6 < slow.throughput < 1.3 * 12.5e6
    assert 3.5e-3 < late.rtt < 8e-3
    assert 0.03 < lossy.loss < 0.07
    assert min(sample.throughput for sample in clean) > 2 * slow.throughput
    assert max(sample.loss for sample in clean) < 0.01
    # the host may delay one of the few peers of a node
    assert sorted(sample.rtt for sample in clean)[-2] < late.rtt / 3
    assert found["inter_leaf zoneA|zoneB"].throughput < 1.3 * 50e6 / 8


def test_probe_of_a_job_changes_its_rank_map(shaped):
    """The server, whose link carries the most, moves off the slow first node."""
    script = "#!/bin/sh\n#SBATCH -N3 --ntasks-per-node=1 -w n3,n5,n7\nslurmdl srun --dl-strategy=ps --dl-ps=1 " \
             "--dl-rank0=any {probe} sh -c 'echo rank $SLURM_PROCID $SLURMD_NODENAME $SLURMDL_ROLE'\n"
    place = {}
    for probe in ("--dl-probe=2", "--dl-link-scores=off"):
        job = shaped.submit(["sbatch", "--output=out-%j", str(shaped.script(script.format(probe=probe)))])
        text = shaped.output(job)
        place[probe] = next(line.split()[2] for line in text.splitlines() if line.endswith(" ps"))
        assert "slurmdl:" not in text
    assert place["--dl-link-scores=off"] == "n3"
    assert place["--dl-probe=2"] in ("n5", "n7")


def test_overallocated_job_drops_the_node_that_its_probe_found(shaped):
    """One probe decides both which node is dropped and the rank map of the others."""
    script = shaped.script("slurmdl srun --dl-probe=2 --dl-explain --dl-model-bytes=100M sh -c "
                           "'echo rank $SLURM_PROCID $SLURMD_NODENAME $SLURMDL_ROLE'\n")
    job = shaped.submit(["slurmdl", "sbatch", "--dl-node-binding=late", "--dl-link-scores=off", "-N3",
                         "-x", "n2,n4,n6,n8", "--output=out-%j", str(script)], directory=script.parent)
    text = shaped.output(job)
    assert set(ranks(text)) == {"n1", "n5", "n7"}, text
    told = own_lines(text)
    assert len([line for line in told if line.startswith("slurmdl: scores of 4 nodes")]) == 1, text
    assert any(line.startswith("slurmdl: n5 used") and ": slowdown " in line for line in told), text


def test_attacker_on_the_leader_node_changes_no_result(cluster):
    """Another user binds the ports that follow from the job id, replays received messages under the names of other
    nodes, and opens idle and slow connections to all listeners of the probe."""
    attack = cluster.directory() / "attack.py"
    attack.write_text(ATTACK)
    config = cluster.run(["scontrol", "show", "config"]).stdout
    job = next(line.split("=")[1].strip() for line in config.splitlines() if line.startswith("NEXT_JOB_ID"))
    user = cluster.run(["id", "-u"]).stdout.strip()
    line = ["setpriv", "--reuid=20002", "--regid=20002", "--clear-groups", "python3", str(attack), job, user]
    attacker = subprocess.Popen(cluster.box.command(line, "n1", as_root=True), stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE, text=True)
    try:
        assert attacker.stdout.readline() == "ready\n"
        done = cluster.run(["slurmdl", "links", "probe", "--nodes=n1,n2,n4,n7,n8", "--budget=10s", "--output", "-"],
                           timeout=90)  # the other nodes may still be shaped
    finally:
        told, _ = attacker.communicate("", timeout=30)
    attacked, *heard = told.splitlines()
    assert int(attacked) > 0
    assert heard == []
    assert done.returncode == 0, done.stderr
    found = [sample for name, sample in samples(done.stdout).items() if name.startswith("node")]
    assert len(found) == 5, done.stderr
    assert min(sample.throughput for sample in found) > 1e7, found
    assert max(sample.loss for sample in found) < 0.05, found
    assert all("unauthenticated connections to this probe rejected" in line for line in done.stderr.splitlines()), \
        done.stderr


def test_secret_of_a_probe_is_visible_to_its_tasks_only(cluster):
    """Not in command lines, Slurm's output or the environment of the job's tasks."""
    script = cluster.script(
        "#!/bin/sh\n#SBATCH -N2 --ntasks-per-node=1\n"
        "slurmdl srun --dl-probe=2 sh -c 'env; sleep 1' > env-$SLURM_JOB_ID &\n"
        "for i in $(seq 50); do cat /proc/[0-9]*/cmdline 2>/dev/null; scontrol show job; scontrol show step; "
        "sleep 0.05; done | tr '\\0' '\\n'\nwait\ncat env-$SLURM_JOB_ID\n")
    text = cluster.output(cluster.submit(["sbatch", "--output=out-%j", str(script)], directory=script.parent))
    assert "slurmdl.links.probe.tcp_task" in text
    assert "SLURM_PROCID=1" in text
    assert "PROBE_SECRET" not in text


def test_unresponsive_nodes_lose_their_own_pairs_only(new_cluster):
    """During a probe one task hangs and one node loses power."""
    cluster = new_cluster(nodes=6, zones=1)
    probe = subprocess.Popen(
        cluster.box.command(["slurmdl", "links", "probe", "--nodes=n[1-6]", "--budget=12s", "--output", "-"],
                            directory=str(cluster.directory())),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    os.kill(task_on(cluster, "n6"), signal.SIGSTOP)
    time.sleep(2)
    cluster.power_off("n5")
    out, said = probe.communicate(timeout=60)
    found = samples(out)
    assert {f"node n{i}" for i in range(1, 5)} <= set(found), said
    assert min(found[f"node n{i}"].throughput for i in range(1, 5)) > 2e7
    assert "n6" in said
    assert all(line.startswith("slurmdl: probe:") for line in said.splitlines()), said


def task_on(cluster, node: str) -> int:
    """Wait for the probe's task on a node; return its process id."""
    inside = os.stat(f"/proc/{cluster.box.pids[node]}/ns/pid").st_ino
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.stat(entry / "ns/pid").st_ino == inside \
                        and b"-m\0slurmdl.links.probe.tcp_task" in (entry / "cmdline").read_bytes():
                    return int(entry.name)
            except OSError:
                continue
        time.sleep(0.02)
    raise AssertionError(f"no task on {node}")


def test_all_nodes_of_a_busy_cluster_get_scores(new_cluster):
    """Jobs hold 19 of 20 nodes. One zone is measured by agents, the other by counters."""
    cluster = new_cluster(nodes=20)
    cluster.shape_link("n04", loss=0.05)
    counted, served = cluster.topology.nodes[0::2], cluster.topology.nodes[1::2]
    job = cluster.submit(["sbatch", "-N19", "--exclusive", "-o/dev/null", "--wrap", "sleep 300"])
    cluster.wait_for(job, {"RUNNING"})
    spool = cluster.shared / "spool"

    def start(node: str, *argv: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(cluster.box.command(list(argv), node, as_root=True, directory="/"),
                                stdout=subprocess.DEVNULL)

    services = [start(node, "slurmdl", "links", "agent", "--allow=10.0.0.0/8", "--interval=12", "--peers=2",
                      f"--node-name={node}", f"--spool-dir={spool}") for node in served]
    services += [start(node, "python3", "-c", RECEIVE_ALL) for node in counted[:2]]
    try:
        collect = "slurmdl links counters --strict --node-name=$0 --spool-dir=$1 --state-dir=/run/slurmdl"
        runs = [start(node, "sh", "-ec", f'{collect}; python3 -c "$2" {target}; {collect}', node, str(spool), SEND)
                for node, target in zip(counted, [counted[1], *[counted[0]] * 9], strict=True)]
        assert [run.wait(90) for run in runs] == [0] * 10
        deadline = time.monotonic() + 60
        while len(with_loss(spool)) < 20 and time.monotonic() < deadline:
            time.sleep(0.5)
    finally:
        for service in services:
            service.kill()  # nsenter only; the agent ends with the cluster
    published, history = cluster.shared / "scores.json", cluster.shared / "samples.db"
    cluster.run(["slurmdl", "links", "ingest", f"--spool-dir={spool}", f"--database={history}",
                 f"--snapshot={published}"], as_root=True).check_returncode()
    told = cluster.run(["slurmdl", "links", "show", f"--link-scores={published}"]).stdout
    assert "20 of 20 nodes (100.0%) have a link score younger than" in told, told
    scores = json.loads(published.read_text())["nodes"]
    assert scores["n04"]["loss"] > 0.01, scores
    assert scores["n02"].get("loss", 0.0) < 0.01, scores
    assert {scores[node]["source"] for node in counted} == {"counters"}


def with_loss(spool: Path) -> set[str]:
    """Nodes with a loss in the samples of a spool."""
    return {sample.name for path in spool.glob("*.jsonl") for sample in samples(path.read_text()).values()
            if sample.loss is not None}


def test_counters_are_silent_and_report_retransmissions(shaped):
    """Run like a HealthCheckProgram: as root without a terminal. n6 loses 5 % of its packets."""
    state = shaped.directory("state")
    collect = ["slurmdl", "links", "counters", f"--state-dir={state}", "--node-name=n6"]
    for _ in range(2):
        done = shaped.run(collect, host="n6", as_root=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        receiver = subprocess.Popen(shaped.box.command(["python3", "-c", RECEIVE], "n2"), stdout=subprocess.PIPE)
        assert receiver.stdout.readline()
        shaped.run(["python3", "-c", SEND, "10.2.0.1"], host="n6").check_returncode()
        receiver.wait(30)
    found = [samples(path.read_text())["node n6"] for path in Path(state, "spool").glob("*.jsonl")]
    assert found
    assert all(sample.source == "counters" and 0.01 < sample.loss < 0.2 for sample in found), found


RECEIVE = """
import socket
server = socket.create_server(("", 5002))
print("ready", flush=True)
connection = server.accept()[0]
while connection.recv(1 << 20):
    pass
"""
RECEIVE_ALL = """
import socket, threading

def swallow(connection):
    while connection.recv(1 << 20):
        pass
    connection.close()

server = socket.create_server(("", 5002))
while True:
    threading.Thread(target=swallow, args=server.accept()[:1]).start()
"""
SEND = """
import socket, sys, time
for attempt in range(100):
    try:
        connection = socket.create_connection((sys.argv[1], 5002))
        break
    except ConnectionRefusedError:
        time.sleep(0.1)
connection.sendall(bytes(20_000_000))
"""
ATTACK = """
import contextlib, json, os, select, socket, sys, threading, time

job, victim = int(sys.argv[1]), sys.argv[2]
count, heard = 0, []

def guessed(number):
    return [30000 + (number * 31 + i * 4241) % 20000 for i in range(4)]

def listening():
    with open("/proc/net/tcp") as file:
        rows = [line.split() for line in file][1:]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[7] == victim}

def forge(connection, ports):
    lines = connection.makefile()
    hello = json.loads(lines.readline())
    heard.append(hello)
    for port in ports:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as leader:
            say = lambda **message: leader.sendall(json.dumps(message).encode() + b"\\n")
            orders = leader.makefile()
            say(**hello)
            orders.readline()
            say(port=1, address="")
            while (order := json.loads(orders.readline())) and "probe" in order:
                say(probe=order["probe"], pair=dict(first=hello["node"], second=order["peer"], forward=1e6,
                                                    backward=1e6, rtt=1e-3, rtt_p99=1e-3, loss=0.16))

def guard(server, ports):
    while True:
        threading.Thread(target=forge, args=(server.accept()[0], ports), daemon=True).start()

def hold(port):
    global count
    held = []
    with contextlib.suppress(OSError):
        for i in range(100):
            held.append(socket.create_connection(("127.0.0.1", port)))
            count += 1
    for number in range(10**6):
        for connection in held[::2]:
            with contextlib.suppress(OSError):
                connection.sendall(b"0" if number else b'{"token"')
        time.sleep(0.5)

for number in range(job, job + 3):
    first, *others = guessed(number)
    threading.Thread(target=guard, args=(socket.create_server(("", first)), others), daemon=True).start()
print("ready", flush=True)
known = set()
while not select.select([sys.stdin], [], [], 0.02)[0]:
    for port in listening() - known:
        known.add(port)
        threading.Thread(target=hold, args=(port,), daemon=True).start()
print(count, *heard, sep="\\n", flush=True)
os._exit(0)
"""
