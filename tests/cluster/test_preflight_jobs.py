"""`slurmdl preflight` in jobs on a real Slurm."""

from __future__ import annotations

import json
import re
import time

import pytest
from jobs import SOON, Health, slurmdl_messages, started_on, wait_for_pattern

from slurmdl.sandbox import namespaces
from slurmdl.slurm import hostlist

PREFLIGHT = """\
#SBATCH -N4 --open-mode=append --requeue
slurmdl preflight --output report.jsonl {options}
echo "status $?"
"""


def preflight(health: Health, options: str = "", *sbatch_options: str) -> tuple[str, dict[str, dict]]:
    """Return the output of a job that runs a preflight, and its report of each node."""
    path = health.cluster.script(PREFLIGHT.format(options=options))
    text = health.cluster.job_output(path, *sbatch_options, program="sbatch", env=health.env, timeout=90)
    reports = [json.loads(line) for line in (path.parent / "report.jsonl").read_text().splitlines()]
    return text, {report["node"]: report for report in reports}


@pytest.fixture
def health(cluster):
    return Health(cluster)


def test_preflight_of_good_nodes(health):
    text, reports = preflight(health, "--budget 15")
    assert text.rstrip().endswith("status 0"), text
    assert len(reports) == 4
    for report in reports.values():
        assert not report["bad"] and not report["errors"], report
        assert report["checks"].keys() == {"clock", "disk", "memory", "gpu", "cpu"}
        assert report["link"]["throughput"] > 0
    file, = (health.state / "slurmdl").glob("probe-?*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    assert {sample["name"] for sample in samples if sample["kind"] == "node"} == reports.keys()


def test_preflight_finds_the_slow_link(health):
    bad = "n3"
    health.cluster.shape_link(bad, rate=50e6)
    try:
        text, reports = preflight(health, "--budget 20", "-N6", "-w", "n[1-6]")
    finally:
        health.cluster.shape_link(bad, rate=1e9)
    assert text.rstrip().endswith("status 78"), text
    assert [node for node, report in reports.items() if report["bad"]] == [bad], text
    assert f"bad: {bad}: its link carries " in text


def test_preflight_finds_the_pair_that_cannot_communicate(new_sandbox):
    """Packets from one node to one other one are lost; both reach all other nodes."""
    cluster = new_sandbox(nodes=6, zones=1)
    pids = cluster.sandbox.pids
    address = namespaces.run_on_host(pids["n2"], ["getent", "hosts", "n5"]).split()[0]
    namespaces.run_on_host(pids["n2"], ["ip", "neigh", "replace", address, "lladdr", "02:00:00:00:00:99", "dev",
                                        "eth0", "nud", "permanent"])
    text, reports = preflight(Health(cluster), "--budget 15", "-N6")
    assert text.rstrip().endswith("status 78"), text
    assert [node for node, report in reports.items() if report["bad"]] == ["n5"], text
    assert "bad: n5: it cannot exchange data with n2" in text


@pytest.mark.nightly
def test_preflight_finds_the_slow_cpus(new_sandbox):
    """The node has 10 % of a core; its link may seem slow, too, as the probes need CPU time."""
    cluster = new_sandbox(nodes=4)
    health = Health(cluster)
    cluster.sandbox.limit_cpu("n3", 0.1)
    text, reports = preflight(health)
    assert [node for node, report in reports.items() if report["bad"]] == ["n3"], text
    assert "bad: n3: a CPU quota of its control groups withholds " in text


@pytest.mark.nightly
def test_preflight_requeues_without_the_bad_node(new_sandbox):
    """Six nodes, of which the job takes four: it starts again on good ones."""
    cluster = new_sandbox(nodes=6, slurm_conf_lines=SOON)
    health = Health(cluster)
    path = cluster.script("#SBATCH -N4 --requeue --open-mode=append\n"
                          'echo "start ${SLURM_RESTART_COUNT-0} on $SLURM_JOB_NODELIST" with '
                          '"$(scontrol show hostnames | tr \'\\n\' \' \')"\n'
                          "until [ -e shaped ]; do sleep 0.2; done\n"
                          "slurmdl preflight --requeue --budget 40 || exit\necho all good\n")
    job = cluster.sbatch(path, program="sbatch", env=health.env)
    bad = hostlist.expand_hostlist(cluster.wait_for(job, {"RUNNING"})["NodeList"])[-1]
    cluster.shape_link(bad, rate=20e6)
    (path.parent / "shaped").touch()
    record = cluster.wait(job, 120)
    text = cluster.text_of(record)
    assert text.rstrip().endswith("all good"), text
    assert bad in started_on(text, 0) and bad not in started_on(text, 1)


def test_faults_of_the_site(health):
    """New jobs leave out a node with a bad feature or comment, and the preflight counts it as bad."""
    config, bad_nodes = health.cluster.directory("config"), health.cluster.directory() / "bad"
    bad_nodes.write_text("n7 no fan\n")
    (config / "slurmdl").mkdir()
    (config / "slurmdl/slurmdl.yaml").write_text(f"bad_nodes: {{file: {bad_nodes}, comment: '^nhc: fail'}}\n")
    health.env["XDG_CONFIG_HOME"] = str(config)
    set_comment = ["scontrol", "update", "NodeName=n5", "Comment=nhc: fail of gpu 3"]
    health.cluster.root(*set_comment)
    try:
        result = health.run("sbatch", "--dl-dry-run", "-N2", "--wrap", "true")
        text, reports = preflight(health, "--no-links", "-N2", "-w", "n[4-5]")
    finally:
        health.cluster.run([*set_comment[:3], "Comment="], as_root=True)
    assert "--exclude=n7" in result.stdout, result
    assert f"left out: n7 (no fan ({bad_nodes}))\n" in result.stderr
    assert "n5 may be used, though bad: at most 10%" in result.stderr
    assert "bad: n5: its comment in Slurm is 'nhc: fail of gpu 3'" in text
    # the nodes share this machine's cores, so the CPU check of two nodes may call the other one slow
    by_site = [node for node, report in reports.items() if "its comment in Slurm" in str(report["faults"])]
    assert by_site == ["n5"] and "status 78" in text


@pytest.mark.parametrize(("argv", "message"), [
    ((), "no nodes; expected a call inside a job, or --nodes LIST"),
    (("--budget", "1s", "--nodes", "n1"), "--budget: invalid time '1s'; expected 5s to 3600s"),
    (("--requeue", "--nodes", "n1"), "--requeue: not inside a job"),
    (("--forget", "n7"), "--forget: node n7 is not excluded"),
    (("--history", "--forget", "n1"), "not allowed with argument"),
])
def test_usage_errors_of_preflight(health, argv, message):
    result = health.run("preflight", *argv)
    assert result.returncode == 64
    [line] = slurmdl_messages(result.stderr)
    assert message in line


def test_preflight_outside_of_a_job_uses_a_job_of_its_own(health):
    result = health.run("preflight", "--nodes", "n[1-2]", "--no-links")
    assert result.returncode == 0, result.stderr
    assert "0 of 2 nodes bad" in result.stdout


@pytest.mark.nightly
def test_node_that_dies_in_the_preflight_is_bad(new_sandbox):
    """With an eighth of a core the checks of the node last for seconds: it dies before they end."""
    bad, cluster = "n3", new_sandbox(nodes=4, slurm_conf_lines=("SlurmdTimeout=300",))
    health = Health(cluster)
    path = cluster.script("#SBATCH -N4 --no-kill --open-mode=append\necho begin\n"
                          "slurmdl preflight --budget 20 --no-links\necho \"status $?\"\n")
    cluster.sandbox.limit_cpu(bad, 0.12)
    job = cluster.sbatch(path, program="sbatch", env=health.env)
    wait_for_pattern(path.parent / f"slurm-{job}.out", "begin")
    host = cluster.job(job)["BatchHost"]
    assert host != bad
    time.sleep(0.7)
    cluster.power_off(bad)
    wait_for_pattern(path.parent / f"slurm-{job}.out", "status 78", 60)
    text = (path.parent / f"slurm-{job}.out").read_text()
    faults = re.findall(f"bad: {bad}: (.*)", text)
    assert faults and not any("quota" in fault for fault in faults), text
