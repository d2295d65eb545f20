"""`slurmdl topology` compared with a real controller: differences, warnings on the same files, and NodeName lines."""

from __future__ import annotations

import re


def reconfigure(cluster) -> str:
    """Make slurmctld reread its files; return its log of that. It answers, or exits, after reading them."""
    previous_length = len(cluster.controller_log())
    cluster.run(["scontrol", "reconfigure"], as_root=True)
    return cluster.controller_log()[previous_length:]


def test_diff_with_the_controller(cluster):
    done = cluster.run(["slurmdl", "topology", "diff"])
    assert (done.returncode, done.stdout) == (
        0, "0 differences between /etc/slurm/topology.conf and the controller\n")
    other = cluster.directory() / "other.conf"
    other.write_text("SwitchName=zoneA Nodes=n[1,3,5]\nSwitchName=zoneB Nodes=n[2,4,6-8]\n"
                     "SwitchName=core Switches=zoneA,zoneB\n")
    done = cluster.run(["slurmdl", "topology", "diff", str(other)])
    assert done.returncode == 1
    assert done.stdout.splitlines()[0] == f"node n7: in zoneB in {other}, in zoneA in the controller"


def test_check_compares_the_nodes_with_the_cluster(cluster):
    done = cluster.run(["slurmdl", "topology", "check"])
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "0 errors, 0 warnings, 0 notes in 3 zones")
    partial = cluster.directory() / "less.conf"
    partial.write_text("SwitchName=zoneA Nodes=n[1-6,9]\n")
    done = cluster.run(["slurmdl", "topology", "check", str(partial)])
    assert "warning: 2 nodes of the cluster without a zone: n[7-8]\n" in done.stdout
    assert "n9: unknown to the cluster\n" in done.stdout


def test_check_and_slurm_report_the_same_problems(new_cluster):
    cluster = new_cluster(zone_features=False)
    file = cluster.etc / "topology.conf"
    file.write_text("SwitchName=s1 Nodes=n[1-4]\nSwitchName=s2 Nodes=n[4-6],x9\nSwitchName=s3 Nodes=n7\n"
                    "SwitchName=left Switches=s1\nSwitchName=right Switches=s[2-3]\n")
    log = reconfigure(cluster)
    output = cluster.run(["slurmdl", "topology", "check"]).stdout
    for slurm_message, message in (
            ("switches lack access to 1 nodes: n8", "1 node of the cluster without a zone: n8"),
            ("Invalid hostnames in switch configuration: x9", "x9: unknown to the cluster"),
            ("Multiple leaf switches contain nodes: n4", "n4: also in zone 's1'"),
            ("no switch can reach all nodes", "no switch reaches all nodes; no job can span the roots left,right")):
        assert slurm_message in log
        assert message in output
    # both have the same limit of the depth
    for levels, status in ((21, 0), (22, 65)):
        file.write_text("".join(f"SwitchName=s{i} Switches=s{i + 1}\n" for i in range(levels))
                        + f"SwitchName=s{levels} Nodes=n[1-8]\n")
        assert cluster.run(["slurmdl", "topology", "check"]).returncode == status
        assert ("fatal: Switch configuration is not a tree" in reconfigure(cluster)) == bool(status)


def test_printed_features_are_valid_for_slurm(new_cluster):
    cluster = new_cluster(zone_features=False)
    features = "scontrol -o show nodes | grep -o 'NodeName=[^ ]*\\|ActiveFeatures=[^ ]*' | paste -sd ' '"

    commands = cluster.run(["slurmdl", "topology", "features", "--scontrol"]).stdout
    cluster.run(["sh", "-e"], as_root=True, stdin=commands).check_returncode()
    active = cluster.run(["sh", "-c", features]).stdout
    assert "NodeName=n1 ActiveFeatures=zoneA NodeName=n2 ActiveFeatures=zoneB" in active

    file = cluster.etc / "slurm.conf"
    other_lines = [line for line in file.read_text().splitlines() if not re.match("NodeName=n[12] ", line)]
    addresses = re.findall("^NodeName=n[12] NodeAddr=([^ ]+)", file.read_text(), re.MULTILINE)
    shared_line = f"NodeName=n[1-2] NodeAddr={','.join(addresses)} CPUs=2 RealMemory=4000 Features=fast"
    file.write_text("\n".join([shared_line, *other_lines]) + "\n")
    lines = cluster.run(["slurmdl", "topology", "features"]).stdout
    settings = [line for line in file.read_text().splitlines() if not line.startswith("NodeName=")]
    end = next(i for i, line in enumerate(settings) if line.startswith("PartitionName="))
    file.write_text("\n".join([*settings[:end], lines, *settings[end:]]) + "\n")
    assert "fatal" not in reconfigure(cluster)
    active = cluster.run(["sh", "-c", features]).stdout
    assert "NodeName=n1 ActiveFeatures=fast,zoneA NodeName=n2 ActiveFeatures=fast,zoneB" in active
    assert "NodeName=n8 ActiveFeatures=zoneB" in active
