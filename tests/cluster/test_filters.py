"""The Lua plugins of etc/ in a real Slurm: plain `sbatch --dl-*` gets the nodes that `slurmdl sbatch` chooses."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from jobs import NIGHTLY, occupy
from test_spank import PLUGIN, plugin, slurmdl_lines  # noqa: F401

ETC = Path(__file__).parents[2] / "etc"


def replace_once(text: str, old: str, new: str) -> str:
    """Replace the only occurrence of `old`."""
    assert text.count(old) == 1
    return text.replace(old, new)


@pytest.fixture
def filtered(cluster_with, plugin):  # noqa: F811
    """A function that returns a cluster with the plugin and cli_filter.lua, with a timeout for busy machines."""
    def make(seconds: str = "30", program: str = "slurmdl", **options):
        text = replace_once((ETC / "cli_filter.lua").read_text(), 'TIMEOUT_S = "2"', f'TIMEOUT_S = "{seconds}"')
        text = replace_once(text, 'SLURMDL = "slurmdl"', f"SLURMDL = {json.dumps(program)}")
        return cluster_with(plugstack=f"optional {PLUGIN}\n", config_files={"cli_filter.lua": text},
                            slurm_conf_lines=("CliFilterPlugins=lua",), **options)
    return make


def submitted_record(cluster, *words: str, stdin: str = "", **environ: str) -> dict[str, str]:
    """Submit and cancel a job; return the fields of UNBOUND in its record, and the error output ("stderr")."""
    done = cluster.run(["sbatch", *words], env=environ, stdin=stdin)
    assert done.returncode == 0, done.stderr
    record = cluster.job(done.stdout.split()[-1])
    cluster.cancel_all()
    return {"stderr": done.stderr, **{name: record.get(name, "(null)") for name in UNBOUND}}


UNBOUND = {"ReqNodeList": "(null)", "ExcNodeList": "(null)", "Prefer": "(null)", "Features": "(null)"}


def binding_fields(record: dict[str, str]) -> dict[str, str]:
    return {name: record[name] for name in UNBOUND}


def test_plain_sbatch_chooses_the_nodes_of_slurmdl_sbatch(filtered):
    cluster = filtered()
    occupy(cluster, "n2", "n4")  # Slurm itself chooses zoneB, which has fewer free nodes left
    for words, nodes in ((["--dl-zone=zoneA"], {"n1", "n3", "n5", "n7"}), ([], {"n6", "n8"})):
        job = cluster.submit(["sbatch", "-N2", *words, "--wrap=scontrol show hostnames"])
        assert set(cluster.output(job).split()) <= nodes
    cluster.cancel_all()
    pinned = ["--dl-node-binding=nodelist", "-N4", "--dl-zone=zoneB", "--hold", "--wrap=true"]
    expected = cluster.run(["slurmdl", "sbatch", "--dl-dry-run", *pinned]).stdout
    record = submitted_record(cluster, *pinned)
    assert record["ReqNodeList"] == "n[2,4,6,8]" and "--nodelist=n[2,4,6,8]" in expected
    script = "#!/bin/sh\n#SBATCH -N2 --dl-zone=zoneA --dl-node-binding=zone\ntrue\n"
    record = submitted_record(cluster, stdin=script)
    assert record["Features"] == "zoneA" and record["stderr"] == "" and record["ExcNodeList"] == "n[2,4,6,8]"
    record = submitted_record(cluster, "--dl-node-binding=zone", stdin=script, SLURMDL_OPT_ZONE="zoneB")
    assert record["Features"] == "zoneB" and record["ExcNodeList"] == "n[1,3,5,7]"
    # --dl-zone also limits the nodes if Slurm chooses them
    assert submitted_record(cluster, "-N2", "--hold", "--dl-zone=zoneB", "--wrap=true")["ExcNodeList"] == "n[1,3,5,7]"


def test_jobs_without_a_choice_are_submitted_as_written(filtered):
    cluster = filtered()
    wrap = "--wrap=true"
    pin = ["-N2", "--dl-node-binding=nodelist"]
    cases: list[tuple[list[str], dict[str, str], str]] = [
        (["-N2"], {}, ""), (["-N2", "--dl-ps=1", "--dl-node-binding=off"], {}, ""),
        (pin, {"SLURMDL_SUBMISSION": "{}"}, ""), (pin, {"SLURM_JOB_ID": "1"}, ""),
        ([*pin, "--array=1-2"], {}, "job array"), ([*pin, "--contiguous"], {}, "--contiguous"),
        ([*pin, "--spread-job"], {}, "--spread-job"),
        (["-N2", "--dl-node-binding=late"], {}, "slurmdl srun"), (["-N2", "--dl-ps=1"], {}, "--hold")]
    assert binding_fields(submitted_record(cluster, "--hold", *pin, wrap)) != UNBOUND
    for words, environ, message in cases:
        record = submitted_record(cluster, "--hold", *words, wrap, **environ)
        assert binding_fields(record) == UNBOUND, words
        lines = slurmdl_lines(record["stderr"])
        assert (message in lines[0] if message else not lines), (words, record["stderr"])
    # heterogeneous jobs: by the script, by the command line, and by the script on standard input
    script = cluster.script("#SBATCH -N1 --dl-node-binding=nodelist\n#SBATCH hetjob\n#SBATCH -N1\ntrue")
    assert binding_fields(submitted_record(cluster, "--hold", str(script))) == UNBOUND
    plain = cluster.script("true")
    components = ["-N1", "--dl-node-binding=nodelist", ":", "-N1", str(plain)]
    assert binding_fields(submitted_record(cluster, "--hold", *components)) == UNBOUND
    done = cluster.run(["sh", "-c", f"sbatch --hold <{script}"])
    assert cluster.job(done.stdout.split()[-1])["ReqNodeList"] == "(null)"
    strict = cluster.run(["sbatch", *pin, "--array=1-2", "--dl-strict", wrap])
    assert strict.returncode != 0 and strict.stdout == "" and len(slurmdl_lines(strict.stderr)) == 1


#: options, whether the job is submitted, part of the message
MESSAGES = [
    (["--dl-zone=nowhere"], False, "--dl-zone=nowhere: no such zone; expected one of "),
    (["--dl-zone=zoneA,nowhere", "--dl-strict"], False, "--dl-zone=nowhere: no such zone; expected one of "),
    (["--dl-node-binding=late"], True, "--dl-node-binding=late"),
    (["--dl-zone=zoneA", "--dl-node-binding=off"], True, "submitted as written: --dl-zone=zoneA is not applied"),
    (["--dl-node-binding=nodelist", "--array=1-2"], True, "job array"),
    (["--dl-node-binding=nodelist", "--array=1-2", "--dl-strict"], False, "job array"),
    (["--dl-comm-pattern=/no/such/file"], True, "submitted as written: /no/such/file: "),
    (["--dl-link-scores=/no/such/file"], True, "scores: /no/such/file"),
    (["--dl-zone=zoneB", "--hold"], True, "Slurm chooses the nodes in zoneB: "),
    (["--dl-node-binding=nodelist"], True, "")]


def test_filter_and_wrapper_have_the_same_effect_and_message(filtered):
    """Only the wrapper prints the warning about the script."""
    cluster = filtered()
    for words, submits, message in MESSAGES:
        runs = [cluster.run([*command, "-N2", *words, "--wrap=srun true"])
                for command in (["sbatch"], ["slurmdl", "sbatch"])]
        assert [done.returncode == 0 for done in runs] == [submits, submits], (words, [done.stderr for done in runs])
        lines = [[line for line in slurmdl_lines(done.stderr) if "its ranks will not be mapped" not in line]
                 for done in runs]
        assert lines[0] == lines[1] and len(lines[0]) == bool(message), (words, lines)
        assert message in "".join(lines[0])
        cluster.cancel_all()


def test_broken_configuration_is_reported_and_the_job_submitted(filtered):
    cluster = filtered()
    directory = cluster.directory()
    (directory / "slurmdl").mkdir()
    (directory / "slurmdl/slurmdl.yaml").write_text("plan_dir: 2024-13-01")
    record = submitted_record(cluster, "--hold", "-N2", "--dl-ps=1", "--wrap=true", XDG_CONFIG_HOME=str(directory))
    assert binding_fields(record) == UNBOUND
    [line] = slurmdl_lines(record["stderr"])
    assert line.startswith("slurmdl: submitted as written: ") and "slurmdl.yaml:1: is not YAML" in line


#: option values with quotes, command substitutions, and other shell syntax
HOSTILE = ("'$(touch /tmp/executed)'", "$(touch /tmp/executed)`touch /tmp/executed`",
           "'; touch /tmp/executed; $(touch /tmp/executed) \" | & \\' \n touch /tmp/executed #")


#: an option of slurmdl and one of Slurm; in nightly tests more of them
HOSTILE_OPTIONS = ("dl-zone", "account") if not NIGHTLY else (
    "dl-zone", "dl-comm-pattern", "constraint", "partition", "exclude", "dependency", "account")


def test_user_input_is_not_executed(filtered):
    cluster = filtered()
    for value in HOSTILE:
        for option in HOSTILE_OPTIONS:
            cluster.run(["sbatch", "-N2", "--dl-rank0=first", f"--{option}={value}", "--wrap=true"])
        cluster.run(["sbatch", "-N2", "--dl-rank0=first", value, value, "--dl-x"])
    assert cluster.run(["test", "-e", "/tmp/executed"]).returncode == 1
    directory = cluster.directory()
    script = directory / "a'$(touch executed)'"
    script.write_text("#!/bin/sh\ntrue\n")
    pin = ["sbatch", "-N2", "--dl-node-binding=nodelist", f"--account={HOSTILE[-1]}", "-J", HOSTILE[-1], script.name]
    assert cluster.job(cluster.submit(pin, directory=directory))["ReqNodeList"].startswith("n[")
    assert not (directory / "executed").exists()
    assert cluster.run(["test", "-e", "/tmp/executed"]).returncode == 1


#: kind of program in place of slurmdl -> its shell script, or None if it is missing
IMPOSTORS = {
    "missing": None, "silent": "exit 0", "failing": "echo '{\"binding\": [\"--nodelist=n2\"]' ; exit 1",
    "hanging": "trap '' TERM; sleep 600", "endless": "exec yes '\"binding\": ['",
    "binary": "head -c 100000 /dev/urandom", "number": "echo '{\"binding\": [7]}'",
    "option": "echo '{\"binding\": [\"--wrap=true\"]}'",
    "shell": "echo '{\"binding\": [\"--nodelist=$(touch /tmp/executed)\"]}'",
    "foreign": "echo '{\"binding\": [\"--prefer=zoneA\", \"--nodes=7\"]}'", "refusal": "exit 64",
    "crash": "echo slurmdl: internal error >&2; exit 70", "garbage": "echo wrong option >&2; exit 64",
    "killed": "kill -9 $$", "status": "printf 'slurmdl: no\\nstatus 64\\n'; exit 70"}


IMPOSTOR = "/tmp/slurmdl"


def replace_slurmdl(cluster, text: str | None) -> None:
    make = "cat > $0; chmod 755 $0" if text else "rm -f $0"
    cluster.run(["sh", "-c", make, IMPOSTOR], stdin=f"#!/bin/sh\n{text}\n").check_returncode()


def test_job_is_submitted_if_slurmdl_fails(filtered):
    cluster = filtered(seconds="1", program=IMPOSTOR, nodes=4)
    for title, text in IMPOSTORS.items():
        replace_slurmdl(cluster, text)
        record = submitted_record(cluster, "--hold", "-N2", "--dl-ps=1", "--wrap=true")
        assert binding_fields(record) == UNBOUND, title
        assert len(slurmdl_lines(record["stderr"])) == 1, (title, record["stderr"])
    assert cluster.run(["test", "-e", "/tmp/executed"]).returncode == 1
    assert cluster.run(["pgrep", "-f", "sleep 600"]).returncode == 1


@pytest.mark.parametrize(("revert_field", "prefer"), [("Prefer", "(null)"), ("", "zoneA")])
def test_choice_is_reverted_if_the_job_does_not_start(filtered, revert_field, prefer):
    cluster = filtered(seconds="1", program=IMPOSTOR, nodes=4)
    answer = json.dumps({"binding": ["--prefer=zoneA"], "revert_field": revert_field})
    replace_slurmdl(cluster, f"echo '{answer}'")
    occupy(cluster, "n1", "n2", "n3", "n4")  # so that the job stays pending
    assert submitted_record(cluster, "-N2", "--dl-ps=1", "--wrap=true")["Prefer"] == prefer


def test_job_submit_on_the_controller(new_cluster, plugin):  # noqa: F811
    snapshot = Path("/etc/slurm/snapshot")
    text = replace_once((ETC / "job_submit.lua").read_text(), '"/run/slurmdl/snapshot"', f'"{snapshot}"')
    text = replace_once(text, 'TIMEOUT_S = "1"', 'TIMEOUT_S = "8"')
    text = replace_once(text, "MAX_AGE = 15 ", "MAX_AGE = 100 ")
    # an absolute path, because the controller has the PATH of its service
    program = Path(subprocess.run(["sh", "-c", "command -v slurmdl || echo .venv/bin/slurmdl"], capture_output=True,
                                  text=True, check=True).stdout.strip()).absolute()
    text = replace_once(text, 'SLURMDL = "slurmdl"', f'SLURMDL = "{program}"')
    cluster = new_cluster(plugstack=f"optional {PLUGIN}\n", config_files={"job_submit.lua": text},
                          slurm_conf_lines=("JobSubmitPlugins=lua",))
    pin = ["-N2", "--hold", "--dl-node-binding=nodelist", "--dl-zone=zoneB", "--wrap=true"]
    assert binding_fields(submitted_record(cluster, *pin)) == UNBOUND  # no snapshot
    write = f"(scontrol -o -d show nodes; scontrol -o show partitions) > {snapshot}.new; mv {snapshot}.new {snapshot}"
    cluster.root("sh", "-c", write)
    record = submitted_record(cluster, *pin[:1], *pin[2:])
    assert (record["ReqNodeList"], record["ExcNodeList"]) == ("n[2,4]", "n[1,3,5,7]")
    assert binding_fields(submitted_record(cluster, "-N2", "--hold", "--wrap=true")) == UNBOUND
    for value in HOSTILE:
        assert binding_fields(submitted_record(cluster, "-N2", f"--dl-zone={value}", "--wrap=true")) == UNBOUND
    assert cluster.run(["test", "-e", "/tmp/executed"]).returncode == 1
    cluster.root("touch", "-d", "-200 seconds", str(snapshot))
    assert binding_fields(submitted_record(cluster, *pin[:1], *pin[2:])) == UNBOUND  # too old
