"""Checks of `slurmdl doctor` without a cluster: plugstack.conf, timeouts, and results without Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmdl import __version__, config
from slurmdl.doctor import checks
from slurmdl.doctor import site as site_facts
from slurmdl.doctor.checks import CHECKS, Check, run_checks
from slurmdl.doctor.site import Finding, Site, failure, ok, warning
from slurmdl.errors import InputError, UnavailableError
from slurmdl.slurm import slurm_conf


def doctor(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "slurmdl", "doctor", *args], capture_output=True, text=True,
                          timeout=60, check=False, env={"HOME": "/nowhere", **environ})


def test_without_slurm():
    proc = doctor(PATH="/nowhere")
    lines = proc.stdout.splitlines()
    assert (proc.returncode, proc.stderr) == (2, "")
    assert lines[0].endswith("0 warn, 1 fail")
    assert lines[1] == "fail  commands       sbatch, srun, scontrol, squeue: not found in PATH"
    assert lines[2].lstrip().startswith("fix: install Slurm's commands")
    assert lines[-1].startswith("skipped: controller (requires commands), clock (requires controller)")


@pytest.mark.parametrize(("args", "culprit"), [
    (["--nodes=n[1-"], "n[1-"), (["--timeout=0"], "--timeout=0"), (["--timeout=x"], "--timeout"), (["now"], "now")])
def test_wrong_usage_is_no_finding(args, culprit):
    proc = doctor(*args, PATH="/nowhere")
    assert (proc.returncode >= 64, proc.stdout, len(proc.stderr.splitlines())) == (True, "", 1)
    assert culprit in proc.stderr


def test_hanging_check_is_abandoned(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def hang(_: Site) -> Finding:
        return ok(pipe.read_text())  # blocks

    def fail(_: Site) -> Finding:
        raise UnavailableError("x: away")

    some = (Check("one", hang, fix="df"), Check("two", fail, fix="bring it back"),
            Check("three", hang, ("two",)), Check("four", hang, ("three",)),
            Check("five", lambda _: warning("late", "hurry")),
            Check("six", lambda _: ok("fine"), ("five",)), Check("seven", lambda _: ok(""), on_nodes=True))
    results = {check.name: finding for check, finding in run_checks(Site(), 60, 0.2, some)}
    assert results == {"one": failure("no result within 0 s", "df"),
                     "two": failure("x: away", "bring it back"), "three": "requires two", "four": "requires three",
                     "five": Finding("warn", "late", "hurry"), "six": ok("fine")}
    late = [finding for _, finding in run_checks(Site(), 0.1, 60, (some[0], some[4]))]
    assert late == [failure("no result within 0 s", "df"), "no time left"]
    pipe.open("w").close()


def test_checks_require_earlier_checks():
    earlier: set[str] = set()
    for check in CHECKS:
        assert earlier.issuperset(check.requires), check.name
        earlier.add(check.name)
    assert len(earlier) == len(CHECKS)


def test_checks_are_documented():
    text = (Path(__file__).parents[2] / "docs/admin.md").read_text()
    rows = text.partition("| checked | by |")[2].partition("\n\n")[0].splitlines()[2:]
    documented = {word.strip().removeprefix("node ") for row in rows for word in row.split("|")[1].split(",")}
    assert {check.name.removeprefix("node ") for check in CHECKS} == documented


def test_plugin_line_of_plugstack(tmp_path):
    folder = tmp_path / "plugstack.conf.d"
    folder.mkdir()
    main, plugins = tmp_path / "plugstack.conf", tmp_path / "plugins"
    assert slurm_conf.find_plugin_line(str(main), []) is None
    main.write_text("# optional slurmdl.so\nrequired other.so a=b\ninclude plugstack.conf.d/*.conf\n")
    assert slurm_conf.find_plugin_line(str(main), []) is None
    (folder / "a.conf").write_text(f"include {main}\n")  # a cycle of includes
    (folder / "b.conf").write_text("\n  required\tslurmdl.so  # comment\n")
    (folder / "c.bak").write_text("optional /elsewhere/slurmdl.so\n")
    assert slurm_conf.find_plugin_line(str(main), [str(plugins)]) == \
        slurm_conf.PlugstackLine(f"{folder}/b.conf:2", True, "slurmdl.so")
    plugins.mkdir()
    (plugins / "slurmdl.so").touch()
    line = slurm_conf.find_plugin_line(str(main), ["/nowhere", str(plugins)])
    assert line is not None and line.path == str(plugins / "slurmdl.so")
    (folder / "b.conf").unlink()
    (folder / "b.conf").mkdir()
    with pytest.raises(InputError, match=r"b\.conf: cannot be read"):
        slurm_conf.find_plugin_line(str(main), [])


@pytest.mark.parametrize(("text", "number"), [
    (b"# a\x0cb\x0bc\x85d\xe2\x80\xa8e\rf\noptional slurmdl.so\n", 2),  # only a newline ends a line
    (b"#" + b"x" * 4093 + b"\noptional slurmdl.so\n", 2), (b"#" + b"x" * 4094 + b"\noptional slurmdl.so\n", 3),
    (b"#" + b"x" * 9000 + b"\noptional slurmdl.so", 4), (b"\0\n\n\noptional slurmdl.so\0#", 4),
    (b"slurmdl.so optional\nplease slurmdl.so\n", None), (b"optional\x0cslurmdl.so\n", None),
])
def test_plugin_line_number_equals_slurm(tmp_path, text, number):
    file = tmp_path / "plugstack.conf"
    file.write_bytes(text)
    line = slurm_conf.find_plugin_line(str(file), [])
    assert (line and line.location) == (number and f"{file}:{number}")


def test_unknown_owner_of_link_scores(monkeypatch):
    scores_config = config.LinkScoresConfig(trusted_owner="no-such-user")
    monkeypatch.setattr(Site, "config", config.Config(link_scores=scores_config))
    finding = checks.check_link_scores(Site())
    assert (finding.severity, finding.text.partition(",")[0]) == (
        "fail", "link_scores.trusted_owner: user 'no-such-user' does not exist")
    for owner in ("", "root", "0", "4294967294"):
        monkeypatch.setattr(Site, "config", config.Config(link_scores=config.LinkScoresConfig(trusted_owner=owner)))
        assert checks.check_link_scores(Site()).severity == "OK"


def test_bad_nodes_file_that_others_may_write(monkeypatch, tmp_path):
    path = tmp_path / "bad_nodes.txt"

    def check(file):
        monkeypatch.setattr(Site, "config", config.Config(bad_nodes=config.BadNodesConfig(file=file)))
        return checks.check_bad_nodes_file(Site())

    assert check("").severity == "OK"
    missing = check(str(path))
    assert (missing.severity, missing.text) == ("fail", f"{path}: cannot be read (No such file or directory)")
    path.write_text("n3 bad cable\n")
    path.chmod(0o644)
    assert check(str(path)).severity == "OK"
    path.chmod(0o666)
    assert check(str(path)).text.startswith(f"{path}: others may write it (mode 666)")
    path.chmod(0o644)
    tmp_path.chmod(0o777)
    assert check(str(path)).text.startswith(f"{path}: others may write {tmp_path} (mode 777)")


def test_min_clock_offset():
    timed = site_facts.TimedResult(100.0, None, 103.0)
    for remote, resolution, offset in ((100, 0, 0), (103, 0, 0), (105, 0, 2), (96, 0, -4), (96, 1, -3), (99, 1, 0)):
        assert checks._min_clock_offset(remote, resolution, timed) == offset
    assert checks._controller_time("Configuration data as of 2026-11-21T19:42:31\nA = b\n") > 1.7e9
    with pytest.raises(InputError, match="no time in the first line"):
        checks._controller_time("slurm_load_ctl_conf error: x\n")


def test_node_facts_script(tmp_path):
    """The script alone: missing files are reported, and no value breaks a line."""
    script, plugin = Path(site_facts.__file__).with_name("node_facts.sh").read_text(), tmp_path / "slurmdl.so"
    plugin.write_text("x")
    proc = subprocess.run(["sh", "-c", script, "sh", str(plugin), str(tmp_path / "none")], capture_output=True,
                          env={"PATH": "/usr/bin:/bin", "SLURMD_NODENAME": "n1", "PMIX_RANK": "0"}, text=True,
                          check=True, timeout=120)
    facts = dict(line.split("\t")[1:] for line in proc.stdout.splitlines())
    assert {line.split("\t")[0] for line in proc.stdout.splitlines()} == {"n1"}
    assert facts["plugin_checksum"] == site_facts.file_checksum(str(plugin)) != "missing"
    assert site_facts.file_checksum("/nowhere") == "missing"
    assert "No such file" in facts["plan_dir_token"]
    assert facts["pmi"] == "0"
    assert float(facts["clock"]) > 1.7e9


@pytest.mark.parametrize(("exists", "text"), [
    (False, "is missing on n[1-2] and on this host"), (True, "is identical on n[1-2]")])
def test_missing_configuration_is_not_called_identical(exists, text, tmp_path, monkeypatch):
    monkeypatch.setattr(config, "SITE_CONFIG_FILE", str(tmp_path / "slurmdl.yaml"))
    if exists:
        (tmp_path / "slurmdl.yaml").write_text("link_defaults: {}\n")
    site = Site()
    facts = {node: {"config_checksum": site_facts.file_checksum(config.SITE_CONFIG_FILE)} for node in ("n1", "n2")}
    site.__dict__["facts"] = site_facts.timed_call(lambda: facts)
    assert checks.check_node_configuration(site) == ok(f"{config.SITE_CONFIG_FILE} {text}")


def test_builds_of_slurmdl_on_nodes(monkeypatch):
    monkeypatch.setattr(checks, "describe_version", lambda: f"{__version__} (commit abc, modified)")
    same, other, older = (f"slurmdl {text}" for text in (f"{__version__} (commit abc)", f"{__version__} (commit def)",
                                                         "0.0.1 (commit abc)"))

    def check(*lines: str) -> Finding:
        site = Site()
        facts = {f"n{i}": {"slurmdl": line} for i, line in enumerate(lines, 1)}
        site.__dict__["facts"] = site_facts.timed_call(lambda: facts)
        return checks.check_node_slurmdl(site)

    assert check(same, same).severity == "OK"
    found = check(same, other)
    assert found.severity == "warn" and found.text.startswith(f"n2: {other}, but slurmdl {__version__} (commit abc")
    for line in (older, "sh: 1: slurmdl: not found", ""):
        found = check(other, line)
        assert (found.severity, found.text) == (
            "fail", f"n2: no slurmdl {__version__} in PATH ({line or 'no output'})")
