"""slurmdl doctor on a real cluster: all checks are OK on a correct site; each fault causes one line with its fix."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from jobs import wait_until

from slurmdl.doctor.checks import CHECKS
from slurmdl.errors import SandboxError
from slurmdl.sandbox import namespaces
from slurmdl.sandbox.spec import LOGIN

SPANK = Path(__file__).parents[2] / "spank"
NODES = "n[1-4]"
OTHER_UID = 20777  # neither root nor the user who runs the doctor


def build_plugin(into: Path, include: Path | None = None) -> Path:
    """Build the plugin with the headers of `include`."""
    argv = ["make", "-s", "-C", str(SPANK), f"build={into}", *([f"SLURM_INCLUDE={include}"] if include else [])]
    subprocess.run(argv, check=True, capture_output=True, timeout=120)
    return into / "slurmdl.so"


@dataclass
class Site:
    """A cluster with a correct site setup, and ways to break it."""

    cluster: Any  # conftest's SandboxCluster
    directory: Path

    def __post_init__(self) -> None:
        self.slurm = self.cluster.sandbox.root / "slurm"  # is /etc/slurm on all hosts
        self.plans, self.scores = self.cluster.shared / "plans", self.directory / "scores.json"

    def configure(self, **changed: object) -> None:
        """Write /etc/slurmdl/slurmdl.yaml for all hosts."""
        config = {"plan_dir": str(self.plans), "link_scores": {"file": "/etc/slurmdl/scores.json"}, **changed}
        (self.directory / "slurmdl.yaml").write_text(json.dumps(config))

    def write_scores(self, age: float = 10.0) -> None:
        """Write link scores that are `age` seconds old."""
        scores = {"nodes": {"n1": {"throughput": 1e8, "age": 0.0, "samples": 3}}, "time": time.time() - age}
        self.scores.write_text(json.dumps(scores))

    def wait_until_idle(self) -> None:
        """Wait until every node is idle again after the previous case."""
        states = self.cluster.sandbox.node_states
        wait_until(lambda: set(states().values()) == {"idle"}, states, 60)

    def doctor(self, nodes: str = NODES, *words: str, env: dict[str, str] | None = None,
               ) -> subprocess.CompletedProcess[str]:
        nodes_option = [f"--nodes={nodes}"] if nodes else []
        return self.cluster.run(["env", *(f"{k}={v}" for k, v in (env or {}).items()),
                                 "slurmdl", "doctor", "--json", *nodes_option, *words])

    def write_file(self, name: str, text: str) -> Path:
        file = self.directory / name
        file.write_text(text)
        return file

    @contextmanager
    def mounted(self, path: str, source: Path, host: str = LOGIN) -> Iterator[None]:
        """Mount another file or directory over `path` on a host."""
        pid = self.cluster.sandbox.pids[host]
        namespaces.run_on_host(pid, ["mount", "--bind", str(source), path])
        try:
            yield
        finally:
            namespaces.run_on_host(pid, ["umount", "-l", path])

    @contextmanager
    def with_text(self, file: Path, text: str) -> Iterator[None]:
        original = file.read_text()
        file.write_text(text)
        try:
            yield
        finally:
            file.write_text(original)

    @contextmanager
    def renamed(self, name: str) -> Iterator[None]:
        (self.slurm / name).rename(self.directory / name)
        try:
            yield
        finally:
            (self.directory / name).rename(self.slurm / name)

    @contextmanager
    def with_mode(self, file: Path, mode: int, owner: int = 0) -> Iterator[None]:
        status = file.stat()
        file.chmod(mode)
        os.chown(file, owner, 0)
        try:
            yield
        finally:
            os.chown(file, status.st_uid, status.st_gid)
            file.chmod(status.st_mode & 0o7777)

    @contextmanager
    def configured(self, **changed: object) -> Iterator[None]:
        self.configure(**changed)
        try:
            yield
        finally:
            self.configure()

    @contextmanager
    def reconfigured(self, name: str, pattern: str, replacement: str) -> Iterator[None]:
        """Replace a pattern in a file of Slurm, and let the controller read it."""
        with self.edited(name, pattern, replacement):
            self.cluster.root("scontrol", "reconfigure")
            yield
        self.cluster.root("scontrol", "reconfigure")

    def edited(self, name: str, pattern: str, replacement: str) -> AbstractContextManager[None]:
        file = self.slurm / name
        return self.with_text(file, re.sub(pattern, replacement, file.read_text()))


@pytest.fixture(scope="module")
def site(new_sandbox: Callable[..., Any]) -> Site:
    cluster = new_sandbox(nodes=4, plugstack="optional /etc/slurm/slurmdl.so\n",
                          slurm_conf_lines=("CliFilterPlugins=lua",),
                          config_files={"cli_filter.lua": (SPANK.parent / "etc/cli_filter.lua").read_text()})
    site = Site(cluster, cluster.sandbox.root / "site")
    site.directory.mkdir()
    site.plans.mkdir()
    site.plans.chmod(0o1777)
    site.configure()
    site.write_scores()
    shutil.copy(build_plugin(SPANK.parent / "build/spank"), site.slurm)
    for host in (LOGIN, *cluster.topology.nodes):
        namespaces.run_on_host(cluster.sandbox.pids[host], ["mount", "--bind", str(site.directory), "/etc/slurmdl"])
    return site


def test_correct_site_is_ok(site):
    done = site.doctor()
    report = json.loads(done.stdout)
    assert [finding["severity"] for finding in report["findings"]] == ["OK"] * len(CHECKS), done.stdout
    assert (done.returncode, report["status"], report["skipped"]) == (0, 0, {})
    assert not list(site.plans.iterdir())
    text = site.cluster.run(["slurmdl", "doctor"])
    assert (text.returncode, text.stderr) == (0, "")
    lines = text.stdout.splitlines()
    count = sum(not check.on_nodes for check in CHECKS)
    assert lines[0] == f"slurmdl doctor: {count} OK, 0 warn, 0 fail"
    assert [line[:6] for line in lines[1:]] == ["OK    "] * count


Fault = Callable[[Site], AbstractContextManager[object]]


@contextmanager
def _frozen(site: Site) -> Iterator[None]:
    site.cluster.freeze_daemon(LOGIN, True)
    try:
        yield
    finally:
        site.cluster.freeze_daemon(LOGIN, False)


@contextmanager
def _other_release(site: Site) -> Iterator[None]:
    include = site.directory / "include"
    shutil.copytree("/usr/include/slurm", include / "slurm", dirs_exist_ok=True)
    header = include / "slurm/slurm_version.h"
    lines = ["#define SLURM_VERSION_NUMBER 0x170b00" if "define SLURM_VERSION_NUMBER" in line else line
             for line in header.read_text().splitlines()]
    header.write_text("\n".join(lines) + "\n")
    with site.mounted("/etc/slurm/slurmdl.so", build_plugin(site.directory / "release", include)):
        yield


@contextmanager
def _other_options(site: Site) -> Iterator[None]:
    """Build the plugin of another slurmdl release, with another option name."""
    source = site.directory / "spank"
    shutil.copytree(SPANK, source, dirs_exist_ok=True)
    table = source / "core/options.inc"
    table.write_text(table.read_text().replace('"dl-zone"', '"dl-spot"'))
    subprocess.run(["make", "-s", "-C", str(source), f"build={source}/build"], check=True, capture_output=True,
                   timeout=120)
    with site.mounted("/etc/slurm/slurmdl.so", source / "build/slurmdl.so"):
        yield


@contextmanager
def _without_pmix(site: Site) -> Iterator[None]:
    plugins = Path(next(iter(Path("/usr/lib").glob("*/slurm-wlm"))))
    other = site.directory / "plugins"
    shutil.copytree(plugins, other, ignore=shutil.ignore_patterns("mpi_pmix*"), symlinks=True, dirs_exist_ok=True)
    with site.mounted(str(plugins), other):
        yield


def _clock_environment(offset: str) -> dict[str, str]:
    """Return the environment of a program with a clock offset."""
    library = next(iter(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)
    if library is None:
        assert os.environ.get("SLURMDL_REQUIRE_CLUSTER") != "1", "libfaketime is missing"
        pytest.skip("libfaketime is missing")
    return {"LD_PRELOAD": str(library), "FAKETIME": offset}


@contextmanager
def _node_clock(site: Site) -> Iterator[None]:
    date = shutil.copy("/usr/bin/date", site.directory / "date")
    settings = " ".join(f"{name}={value}" for name, value in _clock_environment("-30s").items())
    shifted = site.write_file("shifted", f'#!/bin/sh\n{settings} exec {date} "$@"\n')
    shifted.chmod(0o755)
    with site.mounted("/usr/bin/date", shifted, "n2"):
        yield


@contextmanager
def _other_tree(site: Site) -> Iterator[None]:
    """Give a node an outdated topology.conf."""
    other = site.directory / "other-slurm"
    shutil.copytree(site.slurm, other, dirs_exist_ok=True)
    text = (other / "topology.conf").read_text()
    (other / "topology.conf").write_text(text.replace("zoneB", "zoneX"))
    with site.mounted("/etc/slurm", other, "n2"):
        site.cluster.stop_daemon("n2")
        site.cluster.start_daemon("n2")
        yield
    with contextlib.suppress(SandboxError):  # slurmd may have exited
        site.cluster.stop_daemon("n2")
    site.cluster.start_daemon("n2")


@contextmanager
def _node_site(site: Site) -> Iterator[None]:
    other = site.directory / "other-site"
    shutil.copytree(site.directory, other, ignore=shutil.ignore_patterns("other*", "spank", "plugins", "include"),
                    dirs_exist_ok=True)
    (other / "slurmdl.yaml").write_text("{}\n")
    with site.mounted("/etc/slurmdl", other, "n2"):
        yield


@dataclass(frozen=True)
class Case:
    """A fault: how to cause it, the check that reports it, the severity, and parts of the text and of the fix."""

    broken: Fault
    check: str
    severity: str
    text: str
    fix: str
    nodes: str = NODES


CASES = {
    "command missing": Case(
        lambda site: site.mounted("/usr/bin/squeue", site.write_file("empty", "")), "commands", "fail", "squeue",
        "slurm-client"),
    "controller hangs": Case(_frozen, "controller", "fail", "within 5 s", "slurmctld"),
    "plugstack.conf unreadable": Case(
        lambda site: site.with_mode(site.slurm / "plugstack.conf", 0o600), "plugin", "fail",
        "plugstack.conf: Permission denied", "chmod 644"),
    "plugin missing": Case(
        lambda site: site.with_text(site.slurm / "plugstack.conf", "optional /nowhere/slurmdl.so\n"), "plugin",
        "fail", "No such file", "install slurmdl-spank for Slurm 22.05"),
    "plugin of another Slurm": Case(_other_release, "plugin", "fail", "(23.11.0)", "make -C spank install"),
    "plugin of another slurmdl": Case(_other_options, "plugin", "fail", "--dl-spot, --dl-zone", "of one release"),
    "plugin required": Case(
        lambda site: site.with_text(site.slurm / "plugstack.conf", "required /etc/slurm/slurmdl.so\n"), "plugin",
        "fail", "drained", "optional"),
    "plugin open to others": Case(lambda site: site.with_mode(site.slurm / "slurmdl.so", 0o777), "plugin", "fail",
                                  "others may write it", "chmod 755"),
    "cli_filter.lua missing": Case(
        lambda site: site.renamed("cli_filter.lua"), "cli_filter", "fail", "Unable to stat", "CliFilterPlugins", ""),
    "cli_filter.lua malformed": Case(
        lambda site: site.with_text(site.slurm / "cli_filter.lua", "no lua"), "cli_filter", "fail",
        "cli_filter/lua", "readable for all"),
    "cli_filter.lua without the plugin": Case(
        lambda site: site.with_text(site.slurm / "plugstack.conf", ""), "plugin", "warn",
        "cli_filter.lua calls slurmdl", "slurmdl-spank", ""),
    "topology malformed": Case(
        lambda site: site.edited("topology.conf", "SwitchName=core", "SwichName=core"), "topology", "fail",
        "SwichName", "topology check"),
    "topology not the controller's": Case(
        lambda site: site.edited("topology.conf", "zoneA", "zoneX"), "controller topology", "fail", "zoneX",
        "scontrol reconfigure"),
    "no zone features": Case(
        lambda site: site.reconfigured("slurm.conf", r" Features=\S*", ""), "zone features", "warn",
        "zoneA,zoneB: no feature", "topology features", ""),
    "node in no zone": Case(
        lambda site: site.reconfigured("topology.conf", r"n\[1,3\]", "n1"), "topology", "warn", "n3",
        "topology check", "n[1-2,4]"),
    "MPI without its PMI": Case(_without_pmix, "MPI", "fail", "mpi_pmix.so", "srun --mpi=list"),
    "scores of another user": Case(lambda site: site.with_mode(site.scores, 0o644, OTHER_UID), "link_scores", "fail",
                                   f"user {OTHER_UID} owns it", "chown"),
    "scores open to others": Case(lambda site: site.with_mode(site.scores, 0o666), "link_scores", "fail",
                                  "others may write it", "chmod 644"),
    "scores malformed": Case(
        lambda site: site.with_text(site.scores, "{"), "link_scores", "fail", "JSON", "slurmdl-ingest"),
    "scores missing": Case(
        lambda site: site.configured(link_scores={"file": "/etc/slurmdl/none.json"}), "link_scores", "fail",
        "no such file", "slurmdl-ingest"),
    "owner of scores does not exist": Case(
        lambda site: site.configured(link_scores={"file": "/etc/slurmdl/scores.json", "trusted_owner": "slurmdlx"}),
        "link_scores", "fail", "user 'slurmdlx' does not exist", "systemd-sysusers"),
    "scores stale": Case(lambda site: site.configured(link_scores={"file": "/etc/slurmdl/scores.json", "max_age": 1}),
                         "link_scores", "warn", "max_age: 1", "systemctl status"),
    "Prometheus away": Case(
        lambda site: site.configured(link_scores={"file": "/etc/slurmdl/scores.json",
                                             "prometheus": {"url": "http://127.0.0.1:9"}}),
        "prometheus", "fail", "127.0.0.1:9", "link_scores.prometheus"),
    "plan_dir missing": Case(lambda site: site.configured(plan_dir="/nowhere"), "plan_dir", "fail", "/nowhere",
                             "install -d -m 1777"),
    "plan_dir of others": Case(
        lambda site: site.with_mode(site.plans, 0o755), "plan_dir", "fail", "Permission denied",
        "install -d -m 1777"),
    "plan_dir without the sticky bit": Case(
        lambda site: site.with_mode(site.plans, 0o777), "plan_dir", "warn", "replace", "chmod +t"),
    "plan_dir not shared": Case(lambda site: site.configured(plan_dir="/tmp"), "node plan_dir", "fail", "n[1-4]",
                                "mount"),
    "unknown key": Case(lambda site: site.configured(plan_dri="/tmp"), "configuration", "fail",
                        "unknown key plan_dri; expected plan_dir", "slurmdl.yaml(5)"),
    "slurmdl.yaml open to others": Case(
        lambda site: site.with_mode(site.directory / "slurmdl.yaml", 0o666), "configuration", "fail",
        "others may write it", "chmod 644"),
    "clock apart": Case(lambda site: contextlib.nullcontext(), "clock", "fail", "the controller: ", "chrony"),
    "clock of a node apart": Case(_node_clock, "node clocks", "warn", "n2: ", "chrony"),
    "node drained": Case(lambda site: site.cluster.drained("n3"), "nodes", "warn",
                         "n3: not in service (IDLE+DRAIN)", "scontrol show node n3"),
    "no such node": Case(lambda site: contextlib.nullcontext(), "nodes", "fail", "n9: the cluster has no such node",
                         "srun", "n[1-4,9]"),
    "node without the plugin": Case(lambda site: site.mounted("/etc/slurm/plugstack.conf", Path("/dev/null"), "n2"),
                                    "node plugin", "fail", "n2", "install"),
    "node with another plugin": Case(
        lambda site: site.mounted("/etc/slurm/slurmdl.so", site.write_file("other.so", "other"), "n3"),
        "node plugin", "fail", "n3: /etc/slurm/slurmdl.so differs", "slurmdl-spank"),
    "node with another slurmdl.yaml": Case(_node_site, "node configuration", "fail", "n2", "copy"),
    "node with another topology": Case(_other_tree, "node topology", "fail", "zoneX", "same topology.conf"),
    "node without slurmdl": Case(
        lambda site: site.mounted(f"{sys.prefix}/bin/slurmdl", Path("/bin/true"), "n4"), "node slurmdl", "fail", "n4",
        "install slurmdl"),
}


@pytest.mark.parametrize("name", CASES)
def test_each_fault_causes_one_line(site, name):
    case = CASES[name]
    site.wait_until_idle()
    site.write_scores()
    with case.broken(site):
        done = site.doctor(case.nodes, env=_clock_environment("+90s") if name == "clock apart" else None)
    report = json.loads(done.stdout)
    problems = [finding for finding in report["findings"] if finding["severity"] != "OK"]
    reported = [(finding["check"], finding["severity"]) for finding in problems]
    assert reported == [(case.check, case.severity)], done.stdout
    assert case.text in problems[0]["text"]
    assert case.fix in problems[0]["fix"]
    assert done.returncode == report["status"] == {"warn": 1, "fail": 2}[case.severity]
    assert done.stderr == ""


@pytest.mark.parametrize("before", [
    "", "\n\n# a comment\n", "# form feed \f, new line \x85, separator \u2028 and carriage return \r in one line\n",
    f"# {'x' * 4000}\n", f"# {'x' * 5000}\n", "include /nowhere/*.conf\n\n"], ids=repr)
def test_plugstack_line_number_equals_slurm(site, before):
    with site.with_text(site.slurm / "plugstack.conf", f"{before}required /nowhere/slurmdl.so\n"):
        slurm = site.cluster.run(["sbatch", "--help"]).stderr
        done = site.doctor("")
    number = re.search(r"plugstack.conf:(\d+): *Failed to load", slurm)[1]
    text = {finding["check"]: finding["text"] for finding in json.loads(done.stdout)["findings"]}
    assert text["plugin"].startswith(f"/etc/slurm/plugstack.conf:{number}: ")


def test_busy_nodes_are_skipped(site):
    site.cluster.start(["sbatch", "-w", "n1", "-n", "2", "--wrap=sleep 60"])
    try:
        partly_busy, busy = site.doctor("n[1-2]"), site.doctor("n1")
    finally:
        site.cluster.cancel_all()
    text = {finding["check"]: finding["text"] for finding in json.loads(partly_busy.stdout)["findings"]}
    assert (partly_busy.returncode, text["nodes"]) == (0, "tasks run on n2; n1: busy, skipped")
    problems = [finding["text"] for finding in json.loads(busy.stdout)["findings"] if finding["severity"] != "OK"]
    assert (busy.returncode, problems) == (1, ["n1: busy, skipped"]), "a full cluster is not a failure"


def test_doctor_timeout_limits_the_run(site):
    """The controller hangs, and --timeout is shorter than the timeout of its check."""
    with _frozen(site):
        done = site.doctor("", "--timeout=1")
    findings = json.loads(done.stdout)["findings"]
    assert [finding["text"] for finding in findings if finding["severity"] == "fail"] == [
        "no result within 1 s"]
