"""Degraded links on a real cluster, measured by probes and counters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from jobs import rank_nodes, slurmdl_messages

from slurmdl.links.samples import LinkSample, parse_sample_lines

#: rate of the slow link in bits/s
SLOW = 2e7
#: line of a job script: the job has no samples but its own
OWN_SAMPLES = "export XDG_STATE_HOME=$PWD/state-$SLURM_JOB_ID\n"


def parse_samples(text: str) -> dict[str, LinkSample]:
    """Parse JSON lines; return kind and name -> sample."""
    sample_by_name = {}
    for sample in parse_sample_lines(line for line in text.splitlines() if line.startswith("{")):
        assert isinstance(sample, LinkSample), sample
        sample_by_name[f"{sample.kind} {sample.name}"] = sample
    return sample_by_name


@pytest.fixture(scope="module")
def shaped(_shared_cluster):
    """The shared cluster with one slow, one high-latency and one lossy link, restored afterwards.

    The slow link is slower than the other links on a busy machine.
    """
    changes = {"n3": {"rate": SLOW}, "n5": {"delay": 2e-3}, "n6": {"loss": 0.05}}
    for node, change in changes.items():
        _shared_cluster.shape_link(node, **change)
    yield _shared_cluster
    for node in changes:
        _shared_cluster.shape_link(node, rate=1e9, delay=0.0, loss=0.0)


def test_probe_measures_slow_high_latency_and_lossy_links(shaped):
    done = shaped.run(["slurmdl", "links", "probe", "--all", "--output", "-"], timeout=120)
    assert done.returncode == 0, done.stderr
    measured = parse_samples(done.stdout)
    assert {f"node n{i}" for i in range(1, 9)} | {"inter_leaf zoneA|zoneB", "zone zoneA", "zone zoneB"} \
        == set(measured), done.stderr
    slow, high_latency, lossy = (measured.pop(f"node {node}") for node in ("n3", "n5", "n6"))
    clean = [sample for name, sample in measured.items() if name.startswith("node")]
    assert 0.6 * SLOW / 8 < slow.throughput < 1.3 * SLOW / 8
    assert 3.5e-3 < high_latency.rtt < 8e-3
    assert 0.03 < lossy.loss < 0.07
    assert min(sample.throughput for sample in clean) > 2 * slow.throughput
    assert max(sample.loss for sample in clean) < 0.01
    # a busy machine may delay the probes of one node
    assert sorted(sample.rtt for sample in clean)[-2] < high_latency.rtt / 3
    assert measured["inter_leaf zoneA|zoneB"].throughput < 1.3 * 50e6 / 8


def test_probe_of_a_job_changes_its_rank_map(shaped):
    """The parameter server, which has the most traffic, is not mapped to the slow first node."""
    script = f"#!/bin/sh\n#SBATCH -N3 --ntasks-per-node=1 -w n3,n5,n7\n{OWN_SAMPLES}{{probe}}\n" \
             "slurmdl srun --dl-ps=1 --dl-rank0=any sh -c 'echo rank $SLURM_PROCID $SLURMD_NODENAME $SLURMDL_ROLE'\n"
    server_node = {}
    for probe in ("slurmdl links probe --budget=3s", "true"):
        text = shaped.job_output(script.format(probe=probe), program="sbatch")
        server_node[probe] = next(line.split()[2] for line in text.splitlines() if line.endswith(" ps"))
        assert "slurmdl:" not in text
    assert server_node.pop("true") == "n3"
    assert set(server_node.values()) <= {"n5", "n7"}


def test_late_bound_job_releases_the_worst_node_of_its_probe(shaped):
    """The same probe decides which node is released and the rank map of the remaining nodes."""
    script = shaped.script(f"{OWN_SAMPLES}slurmdl links probe --budget=3s\n"
                           "slurmdl srun --dl-link-scores=auto --dl-explain --dl-bytes=100M sh -c "
                           "'echo rank $SLURM_PROCID $SLURMD_NODENAME $SLURMDL_ROLE'\n")
    text = shaped.job_output(script, "--dl-node-binding=late", "--dl-link-scores=off", "-N3", "-x", "n2,n4,n6,n8")
    assert set(rank_nodes(text)) == {"n1", "n5", "n7"}, text
    messages = slurmdl_messages(text)
    assert len([line for line in messages if line.startswith("slurmdl: scores of 4 nodes")]) == 1, text
    assert any(line.startswith("slurmdl: n5 used") and ": slowdown " in line for line in messages), text


def test_attacker_on_the_leader_node_changes_no_result(cluster):
    """Another user binds the ports derived from the job ID, replays received messages under the names of other nodes,
    and opens idle and slow connections to all listeners of the probe.

    The leader listens until all tasks have joined. A long delay on n8 lets the attacker connect before that.
    """
    attack = cluster.directory() / "attack.py"
    attack.write_text(ATTACK)
    config = cluster.run(["scontrol", "show", "config"]).stdout
    job = next(line.split("=")[1].strip() for line in config.splitlines() if line.startswith("NEXT_JOB_ID"))
    user = cluster.run(["id", "-u"]).stdout.strip()
    line = ["setpriv", "--reuid=20002", "--regid=20002", "--clear-groups", "python3", str(attack), job, user]
    attacker = subprocess.Popen(cluster.sandbox.command(line, "n1", as_root=True), stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE, text=True)
    try:
        assert attacker.stdout.readline() == "ready\n"
        cluster.shape_link("n8", delay=0.3)
        probe = subprocess.Popen(  # without the nodes that `shaped` may still shape
            cluster.sandbox.command(["slurmdl", "links", "probe", "--nodes=n1,n2,n4,n7,n8", "--budget=10s",
                                     "--output", "-"], directory=str(attack.parent)),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert attacker.stdout.readline() == "connected\n"
        cluster.shape_link("n8", delay=0.0)
        output, stderr = probe.communicate(timeout=90)
    finally:
        cluster.shape_link("n8", delay=0.0)
        messages_read, _ = attacker.communicate("", timeout=120)
    assert probe.returncode == 0, stderr
    assert messages_read == "\n"
    measured = [sample for name, sample in parse_samples(output).items() if name.startswith("node")]
    assert len(measured) == 5, stderr
    assert min(sample.throughput for sample in measured) > 1e7, measured
    assert max(sample.loss for sample in measured) < 0.05, measured
    assert all("unauthenticated connections to this probe rejected" in line for line in stderr.splitlines()), stderr


def test_probe_secret_is_visible_to_probe_tasks_only(cluster):
    """The secret is not in command lines, the output of Slurm, or the environment of the job's tasks."""
    script = cluster.script(
        "#!/bin/sh\n#SBATCH -N2 --ntasks-per-node=1\n"
        "{ slurmdl links probe --budget=2s --output -; srun env; } > env-$SLURM_JOB_ID &\n"
        "for i in $(seq 50); do cat /proc/[0-9]*/cmdline 2>/dev/null; scontrol show job; scontrol show step; "
        "sleep 0.05; done | tr '\\0' '\\n'\nwait\ncat env-$SLURM_JOB_ID\n")
    text = cluster.job_output(script, program="sbatch")
    assert "slurmdl.links.probe.tcp_task" in text
    assert "SLURM_PROCID=1" in text
    assert "PROBE_SECRET" not in text


@pytest.mark.nightly
def test_unresponsive_nodes_do_not_affect_pairs_of_other_nodes(new_cluster):
    """During a probe, one task hangs and one node loses power."""
    cluster = new_cluster(nodes=6, zones=1)
    probe = subprocess.Popen(
        cluster.sandbox.command(["slurmdl", "links", "probe", "--nodes=n[1-6]", "--budget=12s", "--output", "-"],
                                directory=str(cluster.directory())),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    os.kill(task_on(cluster, "n6", probe), signal.SIGSTOP)
    time.sleep(2)
    cluster.power_off("n5")
    output, stderr = probe.communicate(timeout=60)
    measured = parse_samples(output)
    assert {f"node n{i}" for i in range(1, 5)} <= set(measured), stderr
    assert min(measured[f"node n{i}"].throughput for i in range(1, 5)) > 2e7
    assert "n6" in stderr
    assert all(line.startswith("slurmdl: probe:") for line in stderr.splitlines()), stderr


def task_on(cluster, node: str, probe: subprocess.Popen) -> int:
    """Wait for the probe's task on a node; return its process ID."""
    namespace = os.stat(f"/proc/{cluster.sandbox.pids[node]}/ns/pid").st_ino
    while probe.poll() is None:
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.stat(entry / "ns/pid").st_ino == namespace \
                        and b"__main__.py\0slurmdl.links.probe.tcp_task" in (entry / "cmdline").read_bytes():
                    return int(entry.name)
            except OSError:
                continue
        time.sleep(0.02)
    raise AssertionError(f"no task on {node}: {probe.communicate()}")


def test_all_nodes_of_a_busy_cluster_get_scores(new_cluster):
    """Jobs occupy 19 of 20 nodes. Each node sends to the previous node of its zone, and its counters are read before
    and after that."""
    cluster = new_cluster(nodes=20)
    cluster.shape_link("n04", loss=0.05)
    zones = cluster.topology.nodes[0::2], cluster.topology.nodes[1::2]
    target = {node: zone[i - 1] for zone in zones for i, node in enumerate(zone)}
    cluster.start(["sbatch", "-N19", "--exclusive", "-o/dev/null", "--wrap", "sleep 300"])
    spool = cluster.shared / "spool"

    def start(node: str, *argv: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(cluster.sandbox.command(list(argv), node, as_root=True, directory="/"),
                                stdout=subprocess.DEVNULL)

    receivers = [start(node, "python3", "-c", RECEIVE_ALL) for node in target]
    try:
        collect = "slurmdl links counters --strict --node-name=$0 --spool-dir=$1 --state-dir=/run/slurmdl"
        runs = [start(node, "sh", "-ec", f'{collect}; python3 -c "$2" {peer}; {collect}', node, str(spool), SEND)
                for node, peer in target.items()]
        assert [run.wait(90) for run in runs] == [0] * 20
    finally:
        for receiver in receivers:
            receiver.kill()  # ends nsenter only; the receiver ends with the cluster
    assert nodes_with_loss(spool) == set(target)
    published, history = cluster.shared / "scores.json", cluster.shared / "samples.db"
    cluster.run(["slurmdl", "links", "ingest", f"--spool-dir={spool}", f"--database={history}",
                 f"--score-file={published}"], as_root=True).check_returncode()
    table = cluster.run(["slurmdl", "links", "show", f"--link-scores={published}"]).stdout
    assert "20 of 20 nodes (100.0%) with a link score younger than" in table, table
    scores = json.loads(published.read_text())["nodes"]
    assert scores["n04"]["loss"] > 0.01, scores
    assert scores["n02"].get("loss", 0.0) < 0.01, scores
    assert {score["source"] for score in scores.values()} == {"counters"}


def nodes_with_loss(spool: Path) -> set[str]:
    """Return the nodes with a loss in the samples of a spool."""
    return {sample.name for path in spool.glob("*.jsonl") for sample in parse_samples(path.read_text()).values()
            if sample.loss is not None}


def test_counters_are_silent_and_report_retransmissions(shaped):
    """A HealthCheckProgram collects counters as root, without a terminal. n6 loses 5 % of its packets."""
    state = shaped.directory("state")
    collect = ["slurmdl", "links", "counters", f"--state-dir={state}", "--node-name=n6"]
    for _ in range(2):
        done = shaped.run(collect, host="n6", as_root=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        receiver = subprocess.Popen(shaped.sandbox.command(["python3", "-c", RECEIVE], "n2"), stdout=subprocess.PIPE)
        assert receiver.stdout.readline()
        shaped.run(["python3", "-c", SEND, "10.2.0.1"], host="n6").check_returncode()
        receiver.wait(30)
    collected = [parse_samples(path.read_text())["node n6"] for path in Path(state, "spool").glob("*.jsonl")]
    assert collected
    assert all(sample.source == "counters" and 0.01 < sample.loss < 0.2 for sample in collected), collected


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

def discard_input(connection):
    while connection.recv(1 << 20):
        pass
    connection.close()

server = socket.create_server(("", 5002))
while True:
    threading.Thread(target=discard_input, args=server.accept()[:1]).start()
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
messages = []

def derived_ports(number):
    return [30000 + (number * 31 + i * 4241) % 20000 for i in range(4)]

def listening_ports():
    with open("/proc/net/tcp") as file:
        rows = [line.split() for line in file][1:]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[7] == victim}

def forge(connection, ports):
    lines = connection.makefile()
    hello = json.loads(lines.readline())
    messages.append(hello)
    for port in ports:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as leader:
            send = lambda **message: leader.sendall(json.dumps(message).encode() + b"\\n")
            orders = leader.makefile()
            send(**hello)
            orders.readline()
            send(port=1, address="")
            while (order := json.loads(orders.readline())) and "probe" in order:
                send(probe=order["probe"], pair=dict(first=hello["node"], second=order["peer"], forward=1e6,
                                                     backward=1e6, rtt=1e-3, rtt_p99=1e-3, loss=0.16))

def accept_all(server, ports):
    while True:
        threading.Thread(target=forge, args=(server.accept()[0], ports), daemon=True).start()

def hold(port):
    connections = []
    with contextlib.suppress(OSError):
        for i in range(100):
            connections.append(socket.create_connection(("127.0.0.1", port)))
    if connections:
        print("connected", flush=True)
    for number in range(10**6):
        for connection in connections[::2]:
            with contextlib.suppress(OSError):
                connection.sendall(b"0" if number else b'{"token"')
        time.sleep(0.5)

for number in range(job, job + 3):
    first, *others = derived_ports(number)
    threading.Thread(target=accept_all, args=(socket.create_server(("", first)), others), daemon=True).start()
print("ready", flush=True)
known = set()
while not select.select([sys.stdin], [], [], 0.02)[0]:
    for port in listening_ports() - known:
        known.add(port)
        threading.Thread(target=hold, args=(port,), daemon=True).start()
print(*messages, sep="\\n", flush=True)
os._exit(0)
"""
