"""The sandbox: separate hosts, shaped links, and no remains."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurmdl.sandbox import cpu_quota, lifecycle
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology


def traces(name: str) -> list[str]:
    """Return the remains of a sandbox: processes (which hold namespaces), mounts, links, rules, files."""
    remains = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            # the variable of a host's first process; the mounts of all its other processes
            for file in ("environ", "mountinfo"):
                if int(pid) != os.getpid() and name.encode() in Path(f"/proc/{pid}/{file}").read_bytes():
                    remains.append(f"process {pid} {Path(f'/proc/{pid}/comm').read_text().strip()}")
    for kind, argv in (("mount", ["findmnt", "-rno", "TARGET"]), ("link", ["ip", "-br", "link"]),
                       ("rule", ["nft", "list", "ruleset"]), ("namespace", ["ip", "netns"])):
        text = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
        remains += [f"{kind} {line}" for line in text.splitlines() if name in line or "slurmdl" in line]
    cgroups = Path("/sys/fs/cgroup")
    remains += [f"control group {path}" for path in cgroups.glob(f"**/slurmdl-sandbox.{name}.*")]
    if not list(cgroups.glob("**/slurmdl-sandbox.*")):  # unless another sandbox has one
        remains += [f"control group {path}" for path in cgroups.glob("**/slurmdl-sandbox-enabled-cpu")]
    return remains + [f"file {path}" for path in Path("/var/lib").glob(f"slurmdl*/{name}")]


def test_hosts_are_separate_and_share_one_directory(cluster):
    # a checkout below /tmp is visible there on every host
    box = cluster.box
    mounts = {Path(path).parts[2] for path in lifecycle._bind_mounts(box.spec, box.user) if path.startswith("/tmp/")}
    for host in ("n1", "n2", "login"):
        output = cluster.run(["sh", "-c", "hostname; id -un; touch /dev/shm/private /run/private 2>/dev/null; "
                            "echo $$ > /tmp/only-here; ls /dev/shm /tmp"], host=host).stdout.split()
        assert output[:5] == [host, cluster.user, "/dev/shm:", "private", "/tmp:"]
        assert set(output[5:]) == {"only-here", *mounts}
    assert not Path("/tmp/only-here").exists()
    cluster.run(["touch", str(cluster.shared / "common")], host="n1")
    assert cluster.run(["test", "-e", str(cluster.shared / "common")], host="n2").returncode == 0


def test_var_lib_changes_of_a_host_are_private(cluster):
    """/var/lib has the machine's content, private changes, and the sandbox's directory."""
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


def transfer(cluster, source: str, target: str, count: int) -> float:
    """Return the throughput of one TCP stream in bytes/s."""
    program = cluster.directory() / "transfer.py"
    program.write_text(TRANSFER)
    receiver = subprocess.Popen(cluster.box.command(["python3", str(program), "receive"], target),
                                stdout=subprocess.PIPE, text=True)
    assert receiver.stdout.readline() == "ready\n"
    cluster.run(["python3", str(program), target, str(count)], host=source).check_returncode()
    return float(receiver.communicate(timeout=30)[0])


def test_inter_zone_traffic_is_shaped_and_counted(new_cluster):
    cluster = new_cluster(nodes=4)
    before = cluster.inter_zone_bytes()
    intra_zone = transfer(cluster, "n1", "n3", 20_000_000)
    assert cluster.inter_zone_bytes() - before < 20_000
    inter_zone = transfer(cluster, "n1", "n2", 4_000_000)
    assert 4_000_000 <= cluster.inter_zone_bytes() - before < 4_200_000
    assert intra_zone > 5 * inter_zone
    cluster.shape_link("zoneB", rate=10e6)
    assert transfer(cluster, "n1", "n2", 1_000_000) < 0.5 * inter_zone


ECHO = """
import socket, statistics, sys, time
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
if len(sys.argv) == 1:
    link.bind(("", 5003))
    print("ready", flush=True)
    while True:
        link.sendto(*link.recvfrom(100))
link.settimeout(0.1)
trips = []
for number in range(60):
    began = time.monotonic()
    link.sendto(b"%d" % number, (sys.argv[1], 5003))
    try:
        while link.recv(100) != b"%d" % number:
            pass
        trips.append(time.monotonic() - began)
    except TimeoutError:
        pass
print(statistics.median(trips), 1 - len(trips) / 60)
"""


def test_reshape_path_between_two_zones(new_cluster):
    """zoneA and zoneB get delay and loss; the paths of both to zoneC, over the same uplinks, stay unchanged."""
    cluster = new_cluster(nodes=3, zones=3, zone_rate=2e8)
    box, program = cluster.box, cluster.directory() / "echo.py"
    program.write_text(ECHO)
    servers = [subprocess.Popen(box.command(["python3", str(program)], node), stdout=subprocess.PIPE, text=True)
               for node in ("n2", "n3")]
    assert [server.stdout.readline() for server in servers] == ["ready\n"] * 2

    def measure(source: str, target: str) -> tuple[float, float]:
        done = cluster.run(["python3", str(program), target], host=source)
        seconds, lost = done.stdout.split()
        return float(seconds), float(lost)

    def status() -> str:
        return slurmdl("sandbox", "status", "--name", box.spec.name).stdout

    try:
        assert "path" not in status()
        result = slurmdl("sandbox", "link", "--name", box.spec.name, "zoneB:zoneA", "--delay=20ms", "--loss=10%")
        assert result.returncode == 0 and "20 ms each way" in result.stdout, result.stderr
        assert "path zoneA|zoneB, each way: no rate limit, delay 20 ms, loss 0.1" in status()
        rtt, lost = measure("n1", "n2")
        assert rtt > 0.04 and 0.03 < lost < 0.45  # 19 % of round trips in the mean
        for source in ("n1", "n2"):
            rtt, lost = measure(source, "n3")
            assert rtt < 0.02 and lost < 0.03
        box.shape_link("zoneA|zoneB", rate=1e7, delay=0.0, loss=0.0)
        slow, other = (transfer(cluster, "n2", target, 1_000_000) for target in ("n1", "n3"))
        assert slow < 1.3 * 1e7 / 8 < other / 3
        box.shape_link("zoneA|zoneB", rate=0.0)
        assert "path" not in status()
        assert transfer(cluster, "n1", "n2", 1_000_000) > 3 * slow
        assert box.link_shapes() == {}
    finally:
        for server in servers:
            server.kill()


def test_down_leaves_no_remains():
    first, second = (SandboxSpec(f"trace-{os.getpid()}-{i}", round_robin_topology(4, 2)) for i in (1, 2))
    try:
        boxes = [lifecycle.sandbox_up(first), lifecycle.sandbox_up(second)]  # concurrently
        for box in boxes:
            line = box.command(["srun", "-N4", "hostname"])
            done = subprocess.run(line, capture_output=True, text=True, timeout=30, check=False)
            assert sorted(done.stdout.split()) == ["n1", "n2", "n3", "n4"], done.stderr
        subprocess.run(boxes[0].command(["sbatch", "-N2", "--wrap", "sleep 300"]), check=True,
                       stdout=subprocess.DEVNULL)  # a running job ends with its cluster
        assert all(any(kind in trace for trace in traces(first.name))
                   for kind in ("slurmd", "slurmctld", "munged", "sleep", "file"))
    finally:
        lifecycle.sandbox_down(first.name)
        lifecycle.sandbox_down(second.name)
    assert traces(first.name) + traces(second.name) == []


def test_cpu_limit_of_a_node():
    """It applies to jobs and to those of a restarted slurmd; `sandbox cpu-limit` and `down` remove it."""
    name = f"cpu-{os.getpid()}"

    def throttled() -> int:
        """Number of throttled periods of the node."""
        stat = next(Path("/sys/fs/cgroup").glob(f"**/slurmdl-sandbox.{name}.n1/cpu.stat"))
        return int(dict(line.split() for line in stat.read_text().splitlines())["nr_throttled"])

    def run_job(node: str) -> str:
        """Run a job that uses half a second of CPU time; return its control groups."""
        code = "import time\nwhile time.process_time() < 0.5: pass\nprint(open('/proc/self/cgroup').read())"
        line = box.command(["srun", "-w", node, "python3", "-c", code])
        return subprocess.run(line, capture_output=True, text=True, timeout=60, check=True).stdout

    box = lifecycle.sandbox_up(SandboxSpec(name, round_robin_topology(2, 1)))
    try:
        done = slurmdl("sandbox", "cpu-limit", "--name", name, "n1", "25%")
        assert (done.returncode, done.stdout) == (0, "n1: 25% of a core\n"), done.stderr
        assert "CPU of n1: 25% of a core" in slurmdl("sandbox", "status", "--name", name).stdout
        assert f"slurmdl-sandbox.{name}.n1" in run_job("n1")
        assert throttled() > 0
        assert f"slurmdl-sandbox.{name}" not in run_job("n2")
        os.kill(box.daemon_pid("n1"), signal.SIGKILL)
        box.start_daemon("n1")
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
    assert traces(name) == []


@pytest.fixture
def cgroup_root(monkeypatch) -> Path:
    """Root of cgroup v2 with a controller that is not enabled: cpu, or another one if cpu belongs to cgroup v1."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        root, kind = line.split()[1:3]
        if kind == "cgroup2":
            control = Path(root, "cgroup.subtree_control")
            free = {"cpu", "hugetlb", "misc"} & set(Path(root, "cgroup.controllers").read_text().split())
            for controller in sorted(free - set(control.read_text().split())):
                with contextlib.suppress(OSError):
                    control.write_text(f"+{controller}")
                    control.write_text(f"-{controller}")
                    monkeypatch.setattr(cpu_quota, "_CONTROLLER", controller)
                    return Path(root)
    pytest.skip("no controller of cgroup v2 is free")


def is_enabled(root: Path) -> bool:
    return cpu_quota._CONTROLLER in (root / "cgroup.subtree_control").read_text().split()


def create_group(root: Path, name: str) -> None:
    with cpu_quota._group_lock(root):
        cpu_quota._enable_controller(root)
        (root / f"slurmdl-sandbox.{name}.n1").mkdir()


def test_last_sandbox_disables_the_controller(cgroup_root):
    names = [f"{word}-{os.getpid()}" for word in ("one", "two")]
    try:
        assert cpu_quota.cpu_quotas(names[0]) == {}
        cpu_quota.remove_quotas(names[0])
        assert not is_enabled(cgroup_root)  # queries change nothing
        for name in names:
            create_group(cgroup_root, name)
        assert is_enabled(cgroup_root)
        cpu_quota.remove_quotas(names[0])
        assert is_enabled(cgroup_root)
    finally:
        for name in names:
            cpu_quota.remove_quotas(name)
    assert not is_enabled(cgroup_root)
    assert list(cgroup_root.glob("slurmdl-sandbox*")) == []


def test_controller_used_by_others_stays_enabled(cgroup_root):
    name, control = f"kept-{os.getpid()}", cgroup_root / "cgroup.subtree_control"
    other = cgroup_root / f"other-{os.getpid()}"
    try:
        control.write_text(f"+{cpu_quota._CONTROLLER}")
        create_group(cgroup_root, name)
        cpu_quota.remove_quotas(name)
        assert is_enabled(cgroup_root)
        control.write_text(f"-{cpu_quota._CONTROLLER}")
        create_group(cgroup_root, name)
        other.mkdir()
        (other / "cgroup.subtree_control").write_text(f"+{cpu_quota._CONTROLLER}")
        cpu_quota.remove_quotas(name)
        assert is_enabled(cgroup_root)
    finally:
        cpu_quota.remove_quotas(name)
        with contextlib.suppress(OSError):
            other.rmdir()
        control.write_text(f"-{cpu_quota._CONTROLLER}")
    assert list(cgroup_root.glob("slurmdl-sandbox*")) == []


@pytest.mark.parametrize("seconds", [0.05, 0.15, 0.25])
def test_remains_of_interrupted_start_are_removed_by_down_and_up(seconds):
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
        assert traces(name) == []
        interrupt_start()
        (lifecycle._STATE_ROOT / name / "ready").unlink(missing_ok=True)
        box = lifecycle.sandbox_up(SandboxSpec(name, round_robin_topology(8, 2)))
        assert set(box.node_states().values()) == {"idle"}
    finally:
        lifecycle.sandbox_down(name)
    assert traces(name) == []


def slurmdl(*argv: str, directory: str = "/") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "slurmdl", *argv], capture_output=True, text=True, timeout=60,
                          check=False, cwd=directory)


def test_command_line(tmp_path):
    """A topology of three levels from a file; features, GRES and slurm.conf lines; any directory."""
    conf = tmp_path / "topology.conf"
    conf.write_text("SwitchName=top Switches=left,right\nSwitchName=left Switches=l[1-2]\n"
                    "SwitchName=right Switches=r1\nSwitchName=r1 Nodes=c\n"
                    "SwitchName=l1 Nodes=a[1-2]\nSwitchName=l2 Nodes=b[1-2]\n")
    name = f"cli-{os.getpid()}"
    try:
        done = slurmdl("sandbox", "up", "--name", name, "--topology", str(conf), "--cpus", "4", "--memory", "2000",
                       "--gres", "gpu:2", "--features", "fast", "--features", "c=old", "--no-zone-features",
                       "--zone-rate", "80mbit", "--slurm-conf", "MaxJobCount=77")
        assert done.returncode == 0, done.stderr
        assert "5 nodes in 3 zones" in done.stdout
        second = slurmdl("sandbox", "up", "--name", name)
        assert (second.returncode, len(second.stderr.splitlines())) == (71, 1)
        for directory in ("/", "/root", str(tmp_path)):
            job = slurmdl("sandbox", "exec", "--name", name, "sbatch", "--wait", "-N5", "--gres=gpu:2",
                           "--wrap", "srun -l sh -c 'echo $SLURM_TOPOLOGY_ADDR'", directory=directory)
            assert job.returncode == 0, job.stderr
        outputs = list((lifecycle._STATE_ROOT / name / "shared").glob("slurm-*.out"))
        assert len(outputs) == 3  # the user may write to none of these directories
        assert all("top.left.l1.a1" in path.read_text() for path in outputs)
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
    assert traces(name) == []


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
def test_invalid_input_is_one_line_and_leaves_no_remains(argv, status, culprit):
    name = f"bad-{os.getpid()}"
    named = argv if "--name" in argv or argv[0] == "sideways" else [argv[0], "--name", name, *argv[1:]]
    done = slurmdl("sandbox", *named)
    assert done.returncode == status, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert culprit in done.stderr
    assert traces(name) == []


def test_machine_account_changes_do_not_affect_hosts(cluster):
    """useradd(8) renames a new /etc/passwd over the old one."""
    fresh = Path("/etc/passwd.slurmdl-test")
    fresh.write_bytes(Path("/etc/passwd").read_bytes())
    fresh.chmod(0o644)
    fresh.rename("/etc/passwd")
    assert cluster.run(["srun", "-N2", "id", "-un"]).stdout.split() == [cluster.user] * 2
