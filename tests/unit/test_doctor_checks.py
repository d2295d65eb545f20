"""Parts of the doctor without a cluster: what it reads, how it is bounded, what it says where there is nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmdl import config
from slurmdl.doctor import command_checks, config_checks, node_facts
from slurmdl.doctor.finding import Finding, failure, ok, warning
from slurmdl.doctor.runner import CHECKS, Check, run_checks
from slurmdl.doctor.site import Site
from slurmdl.errors import InputError, UnavailableError
from slurmdl.slurm import plugstack


def doctor(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "slurmdl", "doctor", *words], capture_output=True, text=True,
                          timeout=60, check=False, env={"HOME": "/nowhere", **environ})


def test_without_slurm():
    done = doctor(PATH="/nowhere")
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (2, "")
    assert lines[0].endswith("0 warn, 1 fail")
    assert lines[1] == "fail  commands       sbatch, srun, scontrol, squeue: not found in PATH"
    assert lines[2].lstrip().startswith("mend: install Slurm's commands")
    assert lines[-1].startswith("not looked at: controller (needs commands), clock (needs controller)")


@pytest.mark.parametrize("words, said", [
    (["--nodes=n[1-"], "n[1-"), (["--timeout=0"], "--timeout=0"), (["--timeout=x"], "--timeout"), (["now"], "now")])
def test_wrong_usage_is_no_finding(words, said):
    done = doctor(*words, PATH="/nowhere")
    assert (done.returncode >= 64, done.stdout, len(done.stderr.splitlines())) == (True, "", 1)
    assert said in done.stderr


def test_a_check_that_hangs_is_left_behind(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def hangs(_: Site) -> Finding:
        return ok(pipe.read_text())  # nobody writes

    def away(_: Site) -> Finding:
        raise UnavailableError("x: away")

    checks = (Check("one", hangs, fix="df"), Check("two", away, fix="bring it back"),
              Check("three", hangs, ("two",)), Check("four", hangs, ("three",)),
              Check("five", lambda _: warning("late", "hurry")),
              Check("six", lambda _: ok("fine"), ("five",)), Check("seven", lambda _: ok(""), on_nodes=True))
    found = {check.name: finding for check, finding in run_checks(Site(), 60, 0.2, checks)}
    assert found == {"one": failure("no answer within 0 s", "df"),
                     "two": failure("x: away", "bring it back"), "three": "needs two", "four": "needs three",
                     "five": Finding("warn", "late", "hurry"), "six": ok("fine")}
    late = [finding for _, finding in run_checks(Site(), 0.1, 60, (checks[0], checks[4]))]
    assert late == [failure("no answer within 0 s", "df"), "no time left"]
    pipe.open("w").close()


def test_checks_need_earlier_ones():
    seen: set[str] = set()
    for check in CHECKS:
        assert seen.issuperset(check.requires), check.name
        seen.add(check.name)
    assert len(seen) == len(CHECKS)


def test_checks_are_documented():
    text = (Path(__file__).parents[2] / "docs/admin.md").read_text()
    rows = text.partition("| checked | by |")[2].partition("\n\n")[0].splitlines()[2:]
    named = {word.strip().removeprefix("nodes' ") for row in rows for word in row.split("|")[1].split(",")}
    assert {check.name.removeprefix("nodes' ") for check in CHECKS} == named


def test_the_plugins_line(tmp_path):
    folder = tmp_path / "plugstack.conf.d"
    folder.mkdir()
    main, plugins = tmp_path / "plugstack.conf", tmp_path / "plugins"
    assert plugstack.find_plugin_line(str(main), []) is None
    main.write_text("# optional slurmdl.so\nrequired other.so a=b\ninclude plugstack.conf.d/*.conf\n")
    assert plugstack.find_plugin_line(str(main), []) is None
    (folder / "a.conf").write_text(f"include {main}\n")  # a ring of files
    (folder / "b.conf").write_text("\n  required\tslurmdl.so  # ours\n")
    (folder / "c.bak").write_text("optional /elsewhere/slurmdl.so\n")
    assert plugstack.find_plugin_line(
    str(main), [
        str(plugins)]) == plugstack.PlugstackLine(
            f"{folder}/b.conf:2", True, "slurmdl.so")
    plugins.mkdir()
    (plugins / "slurmdl.so").touch()
    found = plugstack.find_plugin_line(str(main), ["/nowhere", str(plugins)])
    assert found is not None and found.path == str(plugins / "slurmdl.so")
    (folder / "b.conf").unlink()
    (folder / "b.conf").mkdir()
    with pytest.raises(InputError, match=r"b\.conf: cannot be read"):
        plugstack.find_plugin_line(str(main), [])


@pytest.mark.parametrize(("text", "number"), [
    (b"# a\x0cb\x0bc\x85d\xe2\x80\xa8e\rf\noptional slurmdl.so\n", 2),  # only a newline ends a line
    (b"#" + b"x" * 4093 + b"\noptional slurmdl.so\n", 2), (b"#" + b"x" * 4094 + b"\noptional slurmdl.so\n", 3),
    (b"#" + b"x" * 9000 + b"\noptional slurmdl.so", 4), (b"\0\n\n\noptional slurmdl.so\0#", 4),
    (b"slurmdl.so optional\nplease slurmdl.so\n", None), (b"optional\x0cslurmdl.so\n", None),
])
def test_the_plugins_line_is_counted_as_slurm_counts(tmp_path, text, number):
    file = tmp_path / "plugstack.conf"
    file.write_bytes(text)
    found = plugstack.find_plugin_line(str(file), [])
    assert (found and found.location) == (number and f"{file}:{number}")


def test_an_owner_of_scores_who_does_not_exist(monkeypatch):
    monkeypatch.setattr(
    Site, "config", config.Config(
        link_scores=config.LinkScoresConfig(
            trusted_owner="no-such-user")))
    found = config_checks.check_link_scores(Site())
    assert (found.severity, found.text.partition(",")[0]) == (
        "fail", "link_scores.trusted_owner: no user has the name 'no-such-user' here")
    for owner in ("", "root", "0", "4294967294"):
        monkeypatch.setattr(Site, "config", config.Config(link_scores=config.LinkScoresConfig(trusted_owner=owner)))
        assert config_checks.check_link_scores(Site()).severity == "OK"


def test_clocks_are_judged_between_two_moments():
    asked = node_facts.TimedResult(100.0, None, 103.0)
    for told, coarse, apart in ((100, 0, 0), (103, 0, 0), (105, 0, 2), (96, 0, -4), (96, 1, -3), (99, 1, 0)):
        assert command_checks._min_clock_offset(told, coarse, asked) == apart
    assert command_checks._controller_time("Configuration data as of 2026-11-21T19:42:31\nA = b\n") > 1.7e9
    with pytest.raises(InputError, match="no time in its first line"):
        command_checks._controller_time("slurm_load_ctl_conf error: x\n")


def test_probe_of_a_node(tmp_path):
    """The script by itself: what it finds missing is told, and no value breaks a line."""
    script, plugin = Path(node_facts.__file__).with_name("probe.sh").read_text(), tmp_path / "slurmdl.so"
    plugin.write_text("x")
    done = subprocess.run(["sh", "-c", script, "sh", str(plugin), str(tmp_path / "none")], capture_output=True,
                          env={"PATH": "/usr/bin:/bin", "SLURMD_NODENAME": "n1", "PMIX_RANK": "0"}, text=True,
                          check=True, timeout=20)
    facts = dict(line.split("\t")[1:] for line in done.stdout.splitlines())
    assert {line.split("\t")[0] for line in done.stdout.splitlines()} == {"n1"}
    assert facts["plugin"] == node_facts.file_checksum(str(plugin)) != "missing" == node_facts.file_checksum("/nowhere")
    assert "No such file" in facts["shared"]
    assert facts["pmi"] == "0"
    assert float(facts["clock"]) > 1.7e9


@pytest.mark.parametrize(("here", "said"), [
    (False, "is on none of n[1-2], nor here"), (True, "is the same on n[1-2]")])
def test_no_configuration_is_not_called_the_same(here, said, tmp_path, monkeypatch):
    monkeypatch.setattr(config, "SITE_FILE", str(tmp_path / "slurmdl.yaml"))
    if here:
        (tmp_path / "slurmdl.yaml").write_text("link_defaults: {}\n")
    site = Site()
    told = {node: {"site": node_facts.file_checksum(config.SITE_CONFIG_FILE)} for node in ("n1", "n2")}
    site.__dict__["reports"] = node_facts.timed_call(lambda: told)
    assert config_checks.check_node_configuration(site) == ok(f"{config.SITE_CONFIG_FILE} {said}")
