"""The packages on one host: install, enable, submit, upgrade, disable and remove, without leftovers.

The tests run in a chroot of Debian with its Slurm, isolated from the checkout. `make test-packages` creates it, and
the packages in the directory SLURMDL_PACKAGES; without them the tests are skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import run_doctor, sbatch_error
from releases import RootCluster, skip_reason

from benchmarks.chroot_host import root_of

SUITE = "bookworm"
PACKAGES = Path(os.environ.get("SLURMDL_PACKAGES", "/nowhere"))
#: directories that any installation or removal changes
PACKAGE_MANAGER = ("var/lib/dpkg", "var/log", "var/cache", "var/lib/apt", "tmp", "run", "etc/ld.so.cache", "root")
#: user and group databases; the order of their lines may change
USERS = ("etc/passwd", "etc/group", "etc/shadow", "etc/gshadow")
UNITS = ("slurmdl-ingest.service", "slurmdl-counters.timer")

_skip_reason = skip_reason(SUITE) or ("" if list(PACKAGES.glob("*.deb")) else "no packages: run make test-packages")
pytestmark = pytest.mark.skipif(bool(_skip_reason), reason=_skip_reason or "-")


def list_files(root: Path) -> dict[str, str]:
    """Return path -> type and content of all files, except files of the package manager."""
    contents = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if name.startswith(PACKAGE_MANAGER) or name.endswith("-") or "__pycache__" in name:
            continue
        if path.is_symlink():
            contents[name] = f"-> {os.readlink(path)}"
        elif path.is_dir():
            contents[name] = "directory"
        elif path.is_file():
            data = path.read_bytes()
            data = b"\n".join(sorted(data.splitlines())) if name in USERS else data
            contents[name] = hashlib.sha256(data).hexdigest()
    return contents


def run_in_chroot(root: Path, *argv: str) -> str:
    """Run a command as root in a chroot, in temporary namespaces; return its output."""
    done = subprocess.run(["unshare", "--mount", "--pid", "--fork", "--kill-child", f"--mount-proc={root}/proc",
                           "chroot", str(root), *argv], capture_output=True, text=True, timeout=300, check=False,
                          env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive",
                               "LC_ALL": "C"})
    assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A copy of the chroot without slurmdl."""
    copy = tmp_path / "debian"
    subprocess.run(["cp", "-a", "--reflink=auto", str(root_of(SUITE)), str(copy)], check=True, timeout=300)
    (copy / "etc/hosts").touch()  # mount point of the cluster
    yield copy
    shutil.rmtree(copy)


def install(root: Path) -> None:
    names = [path.name for path in PACKAGES.glob("*.deb") if "dbgsym" not in path.name]
    for name in names:
        shutil.copy(PACKAGES / name, root / "var/cache")
    run_in_chroot(root, "dpkg", "--install", *(f"/var/cache/{name}" for name in names))


def test_packages_from_install_to_purge(root, tmp_path):
    before = list_files(root)
    install(root)
    installed = list_files(root)
    assert not {name for name in installed.keys() - before.keys() if name.startswith("etc/slurm/")}
    assert {name: installed[name] for name in before if name not in USERS} == {
        name: content for name, content in before.items() if name not in USERS}  # no existing file is changed
    assert "slurmdl" in (root / "etc/passwd").read_text()
    plugin = next(root.glob("usr/lib/*/slurm-wlm/slurmdl.so"))
    assert not list((root / "etc/systemd").rglob("slurmdl*"))  # no service is enabled

    files = tmp_path / "site"
    cluster = RootCluster(root, files, 4, plugin, "CgroupAutomount=no")
    try:
        plugstack = files / "slurm/plugstack.conf"
        (files / "slurm/slurmdl.so").unlink()
        plugstack.unlink()
        # installed but not enabled: `slurmdl sbatch` works, plain sbatch has no --dl-* options
        assert "not installed" in run_doctor(cluster)["plugin"]
        assert "(commit " in cluster.run(["slurmdl", "--version"]).stdout
        assert "unrecognized option" in sbatch_error(cluster, "--dl-ps=1", "--wrap=true")
        script = cluster.script("#DL --dl-ps=1\nslurmdl srun sh -c 'echo $SLURM_PROCID $SLURMDL_ROLE'")
        job = cluster.submit(["slurmdl", "sbatch", "-N4", str(script)])
        assert sorted(cluster.output(job).split("\n"))[1:] == ["0 ps", "1 worker", "2 worker", "3 worker"]

        # enabled
        plugstack.write_text("optional slurmdl.so\n")
        assert run_doctor(cluster, "--nodes=n[1-4]")["node plugin"] == "identical on n[1-4]"
        job = cluster.submit(["sbatch", "-N4", "--dl-ps=1", "--wrap=srun sh -c 'echo $SLURM_PROCID $SLURMDL_ROLE'"])
        assert sorted(cluster.output(job).split("\n"))[1:] == ["0 ps", "1 worker", "2 worker", "3 worker"]

        # the collector, started in the same way as by its systemd unit
        samples = "\n".join(json.dumps({"kind": "node", "name": f"n{i}", "time": 0, "throughput": 1e8,
                                        "source": "probe"}) for i in range(1, 5))
        script = ("install -d -o slurmdl -g slurmdl /var/lib/slurmdl; "
                  "exec setpriv --reuid=slurmdl --regid=slurmdl --clear-groups slurmdl links ingest -")
        now = cluster.run(["date", "+%s"]).stdout.strip()
        done = cluster.run(["sh", "-c", script], as_root=True, stdin=samples.replace('"time": 0', f'"time": {now}'))
        assert done.returncode == 0, done.stderr
        site_config = root / "etc/slurmdl/slurmdl.yaml"
        shipped = site_config.read_text()
        site_config.write_text("link_scores: {trusted_owner: slurmdl}\n")
        assert "newest link score" in run_doctor(cluster)["link_scores"]

        # an upgrade keeps the site's configuration
        install(root)
        assert site_config.read_text() == "link_scores: {trusted_owner: slurmdl}\n" != shipped
        run_doctor(cluster)

        # disabled
        plugstack.unlink()
        assert "unrecognized option" in sbatch_error(cluster, "--dl-ps=1", "--wrap=true")
        assert cluster.output(cluster.submit(["sbatch", "--wrap=echo plain"])) == "plain\n"
    finally:
        cluster.down()

    run_in_chroot(root, "systemctl", "enable", *UNITS)
    assert list((root / "etc/systemd").rglob("slurmdl*"))
    run_in_chroot(root, "dpkg", "--remove", "slurmdl", "slurmdl-spank")
    assert not list((root / "etc/systemd").rglob("slurmdl*"))
    assert not plugin.exists() and site_config.exists()  # a removal keeps the configuration
    run_in_chroot(root, "dpkg", "--purge", "slurmdl", "slurmdl-spank")
    # remove the cluster's mount points
    for path in (root / str(files)[1:], *(root / str(files)[1:]).parents):
        if path != root and path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    after = list_files(root)
    assert {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} == set()


#: script of a systemd unit in the booted container; shuts the container down at the end
_TRIAL_SCRIPT = """\
exec >/trial.log 2>&1
install -d -o slurmdl -m 755 /srv/spool
cat >/etc/default/slurmdl <<X
SLURMDL_INGEST_OPTS="--spool-dir /srv/spool --interval 1"
SLURMDL_COUNTERS_OPTS="--spool-dir /srv/spool --strict"
X
systemctl enable --now slurmdl-ingest slurmdl-counters.timer
systemctl start slurmdl-counters && echo collected
cat >/spool.py <<X
import time
from slurmdl.links.samples import LinkSample, spool_samples
spool_samples("/srv/spool", [LinkSample("node", "n1", time.time(), "probe", 1e8)])
X
for unit in user node; do
    printf '%s\\n' '[Service]' Type=oneshot DynamicUser=yes ReadWritePaths=/srv \\
        'ExecStart=/usr/bin/python3 /spool.py' >/etc/systemd/system/$unit.service
done
sed -i s/DynamicUser=yes/User=slurmdl/ /etc/systemd/system/node.service
systemctl daemon-reload
systemctl start user || echo refused
systemctl start node && echo written
echo '{"kind": "node", "name": "n2", "time": 1, "source": "probe", "throughput": 1e8}' >/srv/foreign
chown nobody /srv/foreign
mv /srv/foreign /srv/spool/foreign.jsonl
sleep 3
ls /srv/spool
systemctl is-active slurmdl-ingest slurmdl-counters.timer
ps -eo user:20,args | grep -o '^[a-z0-9]* .*[l]inks [a-z]*' | cut -d' ' -f1
cp /var/lib/slurmdl/scores.json /published.json
dpkg --purge slurmdl slurmdl-spank >/purge.log 2>&1 && echo purged
systemctl list-units --all 'slurmdl*' | grep -c 'loaded active'
ls -d /var/lib/slurmdl* /var/lib/private/slurmdl* /etc/slurmdl /etc/systemd/system/*.wants/slurmdl* 2>/dev/null
systemctl poweroff
"""


@pytest.mark.skipif(not shutil.which("systemd-nspawn"), reason="systemd-nspawn is missing (systemd-container)")
def test_services_under_systemd(root):
    install(root)
    (root / "trial.sh").write_text(_TRIAL_SCRIPT)
    (root / "etc/systemd/system/trial.service").write_text(
        "[Service]\nType=oneshot\nExecStart=/bin/sh /trial.sh\n[Install]\nWantedBy=multi-user.target\n")
    run_in_chroot(root, "systemctl", "enable", "trial.service")
    subprocess.run(["systemd-nspawn", "--quiet", "--keep-unit", "--register=no", "--private-network", "--boot",
                    f"--directory={root}"], stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False)
    log = (root / "trial.log").read_text()
    expected = {"collected", "refused", "written", "foreign.jsonl.rejected", "purged"}
    assert expected <= set(log.splitlines()), log
    assert log.count("\nactive") == 2, log
    assert log.rpartition("purged\n")[2].splitlines()[0] == "0", log
    assert "/slurmdl" not in log.rpartition("purged\n")[2], log
    nodes = json.loads((root / "published.json").read_text())["nodes"]
    assert list(nodes) == ["n1"] and nodes["n1"]["throughput"] == 1e8
