"""The sandbox: isolated hosts, shaped links, and no leftovers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import AT_ONCE, wait_until

from benchmarks import sandbox_faults
from slurmdl.sandbox import lifecycle, namespaces, veth_links
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology


def leftovers(name: str) -> list[str]:
    """Return the leftovers of a sandbox: processes (which hold namespaces), mounts, links, rules, files."""
    items = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            # the first process of a host has the name in its environment, the other processes in their mounts
            for file in ("environ", "mountinfo"):
                if int(pid) != os.getpid() and name.encode() in Path(f"/proc/{pid}/{file}").read_bytes():
                    items.append(f"process {pid} {Path(f'/proc/{pid}/comm').read_text().strip()}")
    # a chroot that tools/debian-chroot makes meanwhile has mounts with slurmdl in their paths, too
    for kind, argv, word in (("mount", ["findmnt", "-rno", "TARGET"], "slurmdl-sandbox"),
                             ("link", ["ip", "-br", "link"], "slurmdl"),
                             ("rule", ["nft", "list", "ruleset"], "slurmdl"),
                             ("namespace", ["ip", "netns"], "slurmdl")):
        text = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
        items += [f"{kind} {line}" for line in text.splitlines() if name in line or word in line]
    items += [f"control group {path}" for path in Path("/sys/fs/cgroup").glob(f"**/slurmdl-sandbox.{name}.*")]
    return items + [f"file {path}" for path in Path("/var/lib").glob(f"slurmdl*/{name}")]


def test_hosts_are_isolated_and_share_one_directory(cluster, tmp_path):
    # a checkout below /tmp is mounted there on every host
    sandbox = cluster.sandbox
    mounts = {Path(path).parts[2] for path in lifecycle._bind_mounts(sandbox.spec, sandbox.user)
              if path.startswith("/tmp/")}
    machine_directory = tmp_path.relative_to("/tmp").parts[0]
    for host in ("n1", "n2", "login"):
        output = cluster.run(["sh", "-c", "hostname; id -un; touch /dev/shm/private /run/private 2>/dev/null; "
                            "echo $$ > /tmp/only-here; ls /dev/shm /tmp"], host=host).stdout.split()
        assert output[:5] == [host, cluster.user, "/dev/shm:", "private", "/tmp:"]
        # jobs of other tests may have left files there, too
        assert {"only-here", *mounts} <= set(output[5:])
        assert machine_directory not in set(output[5:]) - mounts
    assert not Path("/tmp/only-here").exists()
    cluster.run(["touch", str(cluster.shared / "common")], host="n1")
    assert cluster.run(["test", "-e", str(cluster.shared / "common")], host="n2").returncode == 0


def test_var_lib_changes_of_a_host_are_private(cluster):
    """A host sees the machine's /var/lib with its private changes, and the directory of the sandbox."""
    assert cluster.sandbox.root.is_relative_to("/var/lib")
    before = set(os.listdir("/var/lib"))
    command = ["slurmdl", "links", "counters", "--node-name=n1", "--strict"]
    assert cluster.run(command, host="n1", as_root=True).returncode == 0
    directories = cluster.run(["ls", "/var/lib", "/var/lib/slurmdl"], host="n1").stdout.split()
    assert before <= set(directories)
    assert "slurmdl" in directories
    other_host = cluster.run(["ls", "/var/lib"], host="n2").stdout.split()
    assert set(other_host) == before == set(os.listdir("/var/lib"))
    cluster.run(["touch", str(cluster.shared / "lib")], host="n1").check_returncode()
    assert cluster.run(["test", "-e", str(cluster.shared / "lib")], host="n2").returncode == 0


def test_zones_reach_slurm_and_tasks(cluster):
    addresses = cluster.run(["srun", "-N8", "sh", "-c", "echo $SLURM_TOPOLOGY_ADDR"]).stdout.split()
    assert sorted(addresses) == sorted(f"core.zone{'AB'[i % 2]}.n{i + 1}" for i in range(8))
    assert "ActiveFeatures=zoneB" in cluster.run(["scontrol", "show", "node", "n2"]).stdout


TRANSFER = """
import socket, sys, time
if sys.argv[1] == "receive":
    server = socket.create_server(("", 5001))
    print("ready", flush=True)
    connection, count = server.accept()[0], 0
    start = time.monotonic()
    while data := connection.recv(1 << 20):
        count += len(data)
    print(count / (time.monotonic() - start))
else:
    connection = socket.create_connection((sys.argv[1], 5001))
    connection.sendall(bytes(int(sys.argv[2])))
"""


def start_receiver(cluster, target: str) -> tuple[Path, subprocess.Popen[str]]:
    """Start the receiver of a TCP stream on a node; return the program, which also sends, and the process."""
    program = cluster.directory() / "transfer.py"
    program.write_text(TRANSFER)
    receiver = subprocess.Popen(cluster.sandbox.command(["python3", str(program), "receive"], target),
                                stdout=subprocess.PIPE, text=True)
    assert receiver.stdout.readline() == "ready\n"
    return program, receiver


def transfer(cluster, source: str, target: str, count: int) -> float:
    """Return the throughput of one TCP stream in bytes/s."""
    program, receiver = start_receiver(cluster, target)
    cluster.run(["python3", str(program), target, str(count)], host=source).check_returncode()
    return float(receiver.communicate(timeout=120)[0])


def test_inter_zone_traffic_is_shaped_and_counted(new_cluster):
    cluster = new_cluster(nodes=4)
    before = cluster.inter_zone_bytes()
    intra_zone = transfer(cluster, "n1", "n3", 20_000_000)
    assert cluster.inter_zone_bytes() - before < 20_000
    inter_zone = transfer(cluster, "n1", "n2", 4_000_000)
    assert 4_000_000 <= cluster.inter_zone_bytes() - before < 4_200_000
    assert intra_zone > 5 * inter_zone
    name = cluster.sandbox.spec.name
    done = slurmdl("sandbox", "link", "--name", name, "zoneB", "--rate=10mbit", "--delay=20ms", "--loss=0")
    assert done.returncode == 0 and "10 Mbit/s (tbf), 20 ms each way" in done.stdout, done.stderr
    assert "link of zoneB, each way: 10 Mbit/s, delay 20 ms, loss 0" in slurmdl("sandbox", "status", "--name",
                                                                                name).stdout
    assert transfer(cluster, "n1", "n2", 1_000_000) < 0.5 * inter_zone


def test_controller_reaches_a_zone_whose_busy_uplink_is_cut(new_cluster):
    """Packets that wait for the uplink when it is cut do not block those of the controller behind them."""
    cluster = new_cluster(nodes=2, zone_rate=2e7)
    sandbox, (program, receiver) = cluster.sandbox, start_receiver(cluster, "n2")
    sender = subprocess.Popen(sandbox.command(["python3", str(program), "n2", "1000000000"], "n1"))
    try:
        queued = 0
        while queued < 140_000:  # some are segments of 64 KB
            assert sender.poll() is None, "no data are sent"
            query = ["tc", "-json", "-statistics", "qdisc", "show", "dev", "uplink"]
            queued = json.loads(namespaces.run_on_host(sandbox.pids["zoneA"], query))[0]["backlog"]
        cluster.shape_link("zoneA", loss=0.999999)
        assert cluster.run(["srun", "-w", "n1", "hostname"], timeout=60).stdout == "n1\n"
    finally:
        for process in (sender, receiver):
            process.kill()


def test_gateway_survives_the_death_of_a_node(new_sandbox):
    """A bridge whose address is that of a port changes it when the node of the port dies."""
    cluster = new_sandbox(nodes=3, zones=1)
    sandbox = cluster.sandbox
    zone = sandbox.spec.topology.zones[sandbox.spec.leaf_indices()[0]]

    def mac_addresses() -> dict[str, str]:
        text = namespaces.run_on_host(sandbox.pids[zone], ["ip", "-json", "link", "show"])
        return {link["ifname"]: link["address"] for link in json.loads(text)}

    before = mac_addresses()
    node, _ = min(((link.lower_host, before[link.upper_interface]) for link in veth_links.all_links(sandbox.spec)
                   if link.upper_host == zone), key=lambda port: port[1])
    cluster.power_off(node)
    assert mac_addresses()["br0"] == before["br0"]


def test_down_leaves_nothing_behind():
    first, second = (SandboxSpec(f"trace-{os.getpid()}-{i}", round_robin_topology(4, 2)) for i in (1, 2))
    try:
        sandboxes = [lifecycle.sandbox_up(first), lifecycle.sandbox_up(second)]  # concurrently
        for sandbox in sandboxes:
            line = sandbox.command(["srun", "-N4", "hostname"])
            done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
            assert sorted(done.stdout.split()) == ["n1", "n2", "n3", "n4"], done.stderr
        subprocess.run(sandboxes[0].command(["sbatch", "-N2", "--wrap", "sleep 300"]), check=True,
                       stdout=subprocess.DEVNULL)  # a running job ends with its cluster
        assert all(any(kind in item for item in leftovers(first.name))
                   for kind in ("slurmd", "slurmctld", "munged", "sleep", "file"))
    finally:
        lifecycle.sandbox_down(first.name)
        lifecycle.sandbox_down(second.name)
    assert leftovers(first.name) + leftovers(second.name) == []


def test_cpu_limit_of_a_node():
    """The limit applies to jobs, also after a restart of slurmd; `sandbox cpu-limit` and `down` remove it."""
    name = f"cpu-{os.getpid()}"

    def throttled() -> int:
        """Return the number of throttled periods of n1."""
        stat = next(Path("/sys/fs/cgroup").glob(f"**/slurmdl-sandbox.{name}.n1/cpu.stat"))
        return int(dict(line.split() for line in stat.read_text().splitlines())["nr_throttled"])

    def run_job(node: str) -> str:
        """Run a job that uses half a second of CPU time; return its control groups."""
        code = "import time\nwhile time.process_time() < 0.5: pass\nprint(open('/proc/self/cgroup').read())"
        line = sandbox.command(["srun", "-w", node, "python3", "-c", code])
        return subprocess.run(line, capture_output=True, text=True, timeout=60, check=True).stdout

    sandbox = lifecycle.sandbox_up(SandboxSpec(name, round_robin_topology(2, 1), slurm_conf_lines=AT_ONCE))
    try:
        done = slurmdl("sandbox", "cpu-limit", "--name", name, "n1", "25%")
        assert (done.returncode, done.stdout) == (0, "n1: 25% of a core\n"), done.stderr
        assert "CPU of n1: 25% of a core" in slurmdl("sandbox", "status", "--name", name).stdout
        assert f"{name}: 2 nodes in 1 zone; user {sandbox.user.name}, " in slurmdl("sandbox", "list").stdout
        (sandbox.root / "ready").rename(sandbox.root / "not ready")  # as while it starts, or after a crash
        assert f"{name}: incomplete; remove it: slurmdl sandbox down" in slurmdl("sandbox", "list").stdout
        (sandbox.root / "not ready").rename(sandbox.root / "ready")
        assert f"slurmdl-sandbox.{name}.n1" in run_job("n1")
        assert throttled() > 0
        assert f"slurmdl-sandbox.{name}" not in run_job("n2")
        os.kill(sandbox_faults.daemon_pid(sandbox, "n1"), signal.SIGKILL)
        sandbox_faults.start_daemon(sandbox, "n1")
        assert f"slurmdl-sandbox.{name}.n1" in run_job("n1")
        assert slurmdl("sandbox", "cpu-limit", "--name", name, "n1", "0").stdout == "n1: no CPU limit\n"
        before = throttled()
        run_job("n1")
        assert throttled() == before
        for args, status in ((("n9", "0.5"), 64), (("n1", "2"), 64), (("n1", "0.01"), 71)):
            done = slurmdl("sandbox", "cpu-limit", "--name", name, *args)
            assert (done.returncode, len(done.stderr.splitlines())) == (status, 1), done.stderr
    finally:
        lifecycle.sandbox_down(name)
    assert leftovers(name) == []


@pytest.mark.parametrize("seconds", [
    0.15, *(pytest.param(seconds, marks=pytest.mark.nightly) for seconds in (0.05, 0.25))])
def test_down_and_up_remove_leftovers_of_an_interrupted_start(seconds):
    name = f"cut-{os.getpid()}"
    code = ("from slurmdl.sandbox import lifecycle, spec; print(1, flush=True);"
            f"lifecycle.sandbox_up(spec.SandboxSpec({name!r}, spec.round_robin_topology(8, 2)))")

    def interrupt_start() -> None:
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        child.stdout.readline()
        time.sleep(seconds)
        child.kill()
        child.wait()

    interrupt_start()
    try:
        lifecycle.sandbox_down(name)
        assert leftovers(name) == []
        interrupt_start()
        (lifecycle._STATE_ROOT / name / "ready").unlink(missing_ok=True)
        sandbox = lifecycle.sandbox_up(SandboxSpec(name, round_robin_topology(8, 2)))
        assert set(sandbox.node_states().values()) == {"idle"}
    finally:
        lifecycle.sandbox_down(name)
    assert leftovers(name) == []


def slurmdl(*argv: str, directory: str = "/") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "slurmdl", *argv], capture_output=True, text=True, timeout=60,
                          check=False, cwd=directory)


def test_command_line(tmp_path):
    """Options for a three-level topology file, features, GRES and slurm.conf lines; any working directory."""
    conf = tmp_path / "topology.conf"
    conf.write_text("SwitchName=top Switches=left,right\nSwitchName=left Switches=l[1-2]\n"
                    "SwitchName=right Switches=r1\nSwitchName=r1 Nodes=c\n"
                    "SwitchName=l1 Nodes=a[1-2]\nSwitchName=l2 Nodes=b[1-2]\n")
    name = f"cli-{os.getpid()}"
    try:
        done = slurmdl("sandbox", "up", "--name", name, "--topology", str(conf), "--cpus", "4", "--memory", "2000",
                       "--gres", "gpu:2", "--features", "fast", "--features", "c=old", "--no-zone-features",
                       "--zone-rate", "80mbit", "--slurm-conf", "MaxJobCount=77", "--slurm-conf", AT_ONCE[0])
        assert done.returncode == 0, done.stderr
        assert "5 nodes in 3 zones" in done.stdout
        second = slurmdl("sandbox", "up", "--name", name)
        assert (second.returncode, len(second.stderr.splitlines())) == (71, 1)
        for directory in ("/", "/root", str(tmp_path)):
            job = slurmdl("sandbox", "exec", "--name", name, "sbatch", "-N5", "--gres=gpu:2",
                           "--wrap", "srun -l sh -c 'echo $SLURM_TOPOLOGY_ADDR'", directory=directory)
            assert job.returncode == 0, job.stderr
        shared = lifecycle._STATE_ROOT / name / "shared"  # the user has no write permission for these directories
        wait_until(lambda: [path.read_text().count("top.left.l1.a1")
                            for path in shared.glob("slurm-*.out")] == [1] * 3, "the jobs have no output", 60)
        node = slurmdl("sandbox", "exec", "--name", name, "scontrol", "show", "node", "c").stdout
        assert "ActiveFeatures=fast,old" in node
        assert "CPUTot=4" in node
        assert "Gres=gpu:2" in node
        step = slurmdl("sandbox", "exec", "--name", name, "srun", "-N5", "sh", "-c", "echo $SLURM_TOPOLOGY_ADDR")
        assert sorted(step.stdout.split()) == [
            "top.left.l1.a1", "top.left.l1.a2", "top.left.l2.b1", "top.left.l2.b2", "top.right.r1.c"], step.stdout
        assert slurmdl("sandbox", "exec", "--name", name, "false").returncode == 1
        assert "MaxJobCount             = 77" in slurmdl("sandbox", "exec", "--name", name, "scontrol", "show",
                                                         "config").stdout
        assert "l1: a1(idle) a2(idle)" in slurmdl("sandbox", "status", "--name", name).stdout
    finally:
        assert "down" in slurmdl("sandbox", "down", "--name", name).stdout
    assert leftovers(name) == []


@pytest.mark.parametrize(("argv", "status", "culprit"), [
    (["up", "--nodes", "0"], 64, "--nodes"),
    (["up", "--zones", "9"], 64, "--zones"),
    (["up", "--zone-rate", "fast"], 64, "50mbit"),
    (["up", "--name", "No Good"], 64, "--name"),
    (["up", "--topology", "/no/such/file"], 65, "/no/such/file"),
    (["up", "--features", "n99=x"], 64, "n99"),
    (["up", "--slurm-conf", "nothing"], 64, "KEY=VALUE"),
    (["up", "--slurm-conf", "NoSuchKey=1"], 71, "NoSuchKey"),
    (["exec", "--name", "absent", "true"], 71, "absent"),
    (["sideways"], 64, "sideways"),
])
def test_invalid_input_causes_one_line_and_no_leftovers(argv, status, culprit):
    name = f"bad-{os.getpid()}"
    full_argv = argv if "--name" in argv or argv[0] == "sideways" else [argv[0], "--name", name, *argv[1:]]
    done = slurmdl("sandbox", *full_argv)
    assert done.returncode == status, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert culprit in done.stderr
    assert leftovers(name) == []


def test_machine_account_changes_do_not_affect_hosts(cluster):
    """useradd(8) replaces /etc/passwd by renaming a new file."""
    new_file = Path("/etc/passwd.slurmdl-test")
    new_file.write_bytes(Path("/etc/passwd").read_bytes())
    new_file.chmod(0o644)
    new_file.rename("/etc/passwd")
    assert cluster.run(["srun", "-N2", "id", "-un"]).stdout.split() == [cluster.user] * 2
