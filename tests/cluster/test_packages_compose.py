"""The packages on several hosts: the login host and all nodes of the containerized cluster.

The packages are built in a container with the cluster's Debian release. slurmdl is first removed from the containers,
so that only the packages provide it. test_packages.py tests the packages on one host.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from jobs import run_doctor, sbatch_error

from compose import ROOT, ComposeCluster
from slurmdl.commit import find_commit

NODES = tuple(f"n{i}" for i in range(1, 9))
HOSTS = ("login", *NODES)
BUILD = """\
apt-get update -qq
apt-get install -y -qq --no-install-recommends git build-essential debhelper dh-python libslurm-dev \
    pybuild-plugin-pyproject python3-all >/dev/null
git config --global --add safe.directory '*'
/checkout/tools/build-packages deb /packages
cd /packages
apt-get download -qq $(dpkg-query -W -f='${Depends}' libslurm-dev | grep -o 'libslurm[0-9][0-9a-z]*' | head -n 1)
chmod a+r *
"""
#: equivalent of `apt install ./slurmdl*.deb`; includes libslurm, because the hosts have no access to a mirror
INSTALL = "rm -f {0}/*dbgsym*; dpkg --install {0}/*.deb"
REMOVE = "dpkg --purge slurmdl slurmdl-spank $(dpkg-query -W -f='${Package} ' 'libslurm[0-9]*')"
#: list all files, except files that any installation or removal changes
LIST = "find / -xdev {} -o -print | sort".format(" -o ".join([
    *(f"-path {path} -prune" for path in ("/proc", "/sys", "/tmp", "/run", "/var/cache", "/var/log", "/var/lib/dpkg",
                                          "/var/lib/munge", "/var/spool/slurmd")),
    "-name __pycache__ -prune", "-name '*-' -prune"]))


@pytest.fixture
def site(cluster) -> Iterator[ComposeCluster]:
    """The cluster without slurmdl, which is reinstalled at the end."""
    if not isinstance(cluster, ComposeCluster):
        pytest.skip("runs on the containerized cluster only; see test_packages.py for this machine's Slurm")
    # /tmp is not listed; dpkg would ask what to do with the image's configuration
    try:
        run_on_all(cluster, "mv /etc/slurmdl /tmp/etc-slurmdl && cd / && "
                            "pip uninstall -q -y --break-system-packages --root-user-action=ignore slurmdl")
        yield cluster
    finally:
        (cluster.etc / "plugstack.conf").unlink(missing_ok=True)
        run_on_all(cluster, f"{REMOVE} 2>/dev/null; rm -rf /etc/slurmdl; mv /tmp/etc-slurmdl /etc/slurmdl; "
                            "cd / && pip install -q --no-deps "
                            "--no-build-isolation --no-index --break-system-packages --root-user-action=ignore /src")


def test_the_image_knows_its_commit(cluster):
    if not isinstance(cluster, ComposeCluster):
        pytest.skip("runs on the containerized cluster only")
    assert cluster.run(["slurmdl", "--version"]).stdout.rstrip().endswith(f"(commit {find_commit()})")


@pytest.fixture
def packages(site):
    """A directory with the packages that all hosts share."""
    directory = site.shared / "packages"
    directory.mkdir(exist_ok=True)
    release = os.environ.get("DEBIAN", "trixie")
    done = subprocess.run(
        ["docker", "run", "--rm", "--network=host", f"--volume={ROOT}:/checkout:ro",
         f"--volume={directory}:/packages", "--entrypoint=/bin/sh", f"slurmdl-cluster:{release}", "-euc", BUILD],
        capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    yield directory
    shutil.rmtree(directory)


def run_on_all(cluster: ComposeCluster, script: str) -> dict[str, str]:
    """Run a shell command as root on the login host and all nodes; return host -> output."""
    def run_on(host: str) -> str:
        done = cluster.run(["sh", "-c", script], host=host, as_root=True, timeout=300)
        assert done.returncode == 0, f"{host}: {done.stdout}{done.stderr}"
        return done.stdout
    with ThreadPoolExecutor(3) as pool:
        return dict(zip(HOSTS, pool.map(run_on, HOSTS), strict=True))


def roles(cluster: ComposeCluster, submit: Callable[[], int]) -> list[str]:
    """Submit a job; return the rank and role of each task."""
    return sorted(line for line in cluster.output(submit()).splitlines() if line[:1].isdigit())


def test_packages_install_enable_use_disable_remove(site, packages):
    before = run_on_all(site, LIST)
    run_on_all(site, INSTALL.format(packages))
    expected = ["0 ps", "1 worker", "2 worker", "3 worker"]
    print_role = "sh -c 'echo $SLURM_PROCID $SLURMDL_ROLE'"

    # installed, not enabled
    assert "not installed" in run_doctor(site, all_ok=False)["plugin"]
    assert "unrecognized option" in sbatch_error(site, "--dl-ps=1", "--wrap=true")
    script = site.script(f"#DL --dl-ps=1\nslurmdl srun {print_role}")
    assert roles(site, lambda: site.submit(["slurmdl", "sbatch", "-N4", str(script)])) == expected

    # enabled: on all hosts, which share /etc/slurm
    (site.etc / "plugstack.conf").write_text("optional slurmdl.so\n")
    assert run_doctor(site, "--nodes=n[1-8]", all_ok=False)["node plugin"] == "identical on n[1-8]"
    assert roles(site, lambda: site.submit(["sbatch", "-N4", "--dl-ps=1", f"--wrap=srun {print_role}"])) == expected
    script = site.script("#DL --dl-strategy=gossip\n"
                         f"slurmdl srun {site.launcher} slurmdl train --steps 4 --model mlp:8")
    assert "accuracy" in site.output(site.submit(["slurmdl", "sbatch", "-N4", str(script)]), timeout=180)

    # disabled, and removed
    (site.etc / "plugstack.conf").unlink()
    assert "unrecognized option" in sbatch_error(site, "--dl-ps=1", "--wrap=true")
    assert roles(site, lambda: site.submit(["sbatch", "-N2", "--wrap=srun sh -c 'echo $SLURM_PROCID'"])) == ["0", "1"]
    run_on_all(site, REMOVE)
    after = run_on_all(site, LIST)
    for host in HOSTS:
        assert set(before[host].split("\n")) ^ set(after[host].split("\n")) == set(), host
