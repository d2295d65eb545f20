"""A site's way with the packages on several hosts: the containerized cluster's login host and all its nodes.

They are built in a container of the release of Debian that the cluster has. What the images have of slurmdl is taken
out first, so that nothing but the packages can be what works. On one machine: test_site_flow.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from jobs import doctor, refusal

from compose import ROOT, ComposeCluster

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
#: what `apt install ./slurmdl*.deb` would do: libslurm, too, which the hosts reach no mirror for
INSTALL = "rm -f {0}/*dbgsym*; dpkg --install {0}/*.deb"
REMOVE = "dpkg --purge slurmdl slurmdl-spank $(dpkg-query -W -f='${Package} ' 'libslurm[0-9]*')"
#: all but what installing and removing any package changes
LIST = "find / -xdev {} -o -print | sort".format(" -o ".join([
    *(f"-path {path} -prune" for path in ("/proc", "/sys", "/tmp", "/run", "/var/cache", "/var/log", "/var/lib/dpkg",
                                          "/var/lib/munge", "/var/spool/slurmd")),
    "-name __pycache__ -prune", "-name '*-' -prune"]))


@pytest.fixture
def site(cluster) -> Iterator[ComposeCluster]:
    """The cluster without slurmdl; at the end as it was."""
    if not isinstance(cluster, ComposeCluster):
        pytest.skip("the packages' way on the machine's own Slurm is test_site_flow.py; this one is for compose")
    try:
        everywhere(cluster, "cd / && pip uninstall -q -y --break-system-packages --root-user-action=ignore slurmdl")
        yield cluster
    finally:
        (cluster.etc / "plugstack.conf").unlink(missing_ok=True)
        everywhere(cluster, f"{REMOVE} 2>/dev/null; cd / && pip install -q --no-deps "
                            "--no-build-isolation --no-index --break-system-packages --root-user-action=ignore /src")


@pytest.fixture
def packages(site):
    """A folder that all hosts see, with the packages."""
    into = site.shared / "packages"
    into.mkdir(exist_ok=True)
    release = os.environ.get("DEBIAN", "trixie")
    done = subprocess.run(
        ["docker", "run", "--rm", "--network=host", f"--volume={ROOT}:/checkout:ro", f"--volume={into}:/packages",
         "--entrypoint=/bin/sh", f"slurmdl-cluster:{release}", "-euc", BUILD],
        capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    yield into
    shutil.rmtree(into)


def everywhere(cluster: ComposeCluster, script: str) -> dict[str, str]:
    """Run a shell's command as root on the login host and on all nodes; host -> what it printed."""
    def one(host: str) -> str:
        done = cluster.run(["sh", "-c", script], host=host, as_root=True, timeout=300)
        assert done.returncode == 0, f"{host}: {done.stdout}{done.stderr}"
        return done.stdout
    with ThreadPoolExecutor(3) as pool:
        return dict(zip(HOSTS, pool.map(one, HOSTS), strict=True))


def roles(cluster: ComposeCluster, submit: Callable[[], int]) -> list[str]:
    """Rank and role of each task of a job."""
    return sorted(line for line in cluster.output(submit()).splitlines() if line[:1].isdigit())


def test_install_enable_use_disable_remove(site, packages):
    before = everywhere(site, LIST)
    everywhere(site, INSTALL.format(packages))
    expected = ["0 ps", "1 worker", "2 worker", "3 worker"]
    tell = "sh -c 'echo $SLURM_PROCID $SLURMDL_ROLE'"

    # installed, not enabled
    assert "not installed" in doctor(site, all_ok=False)["plugin"]
    assert "unrecognized option" in refusal(site, "--dl-ps=1", "--wrap=true")
    script = site.script(f"#DL --dl-ps=1\nslurmdl srun {tell}")
    assert roles(site, lambda: site.submit(["slurmdl", "sbatch", "-N4", str(script)])) == expected

    # enabled: on all hosts, which share /etc/slurm
    (site.etc / "plugstack.conf").write_text("optional slurmdl.so\n")
    assert doctor(site, "--nodes=n[1-8]", all_ok=False)["nodes' plugin"] == "the same on n[1-8]"
    assert roles(site, lambda: site.submit(["sbatch", "-N4", "--dl-ps=1", f"--wrap=srun {tell}"])) == expected
    script = site.script("#DL --dl-strategy=gossip\n"
                         f"slurmdl srun {site.launcher} slurmdl train --steps 4 --model mlp:8")
    assert "accuracy" in site.output(site.submit(["slurmdl", "sbatch", "-N4", str(script)]), timeout=180)

    # disabled, and removed
    (site.etc / "plugstack.conf").unlink()
    assert "unrecognized option" in refusal(site, "--dl-ps=1", "--wrap=true")
    assert roles(site, lambda: site.submit(["sbatch", "-N2", "--wrap=srun sh -c 'echo $SLURM_PROCID'"])) == ["0", "1"]
    everywhere(site, REMOVE)
    after = everywhere(site, LIST)
    for host in HOSTS:
        assert set(before[host].split("\n")) ^ set(after[host].split("\n")) == set(), host
