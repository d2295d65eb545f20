"""Effect of link scores on jobs on a real cluster."""

from __future__ import annotations

import json
import time
from pathlib import Path

from jobs import MAPPED, occupy, rank_nodes, slurmdl_messages

from slurmdl.links.link_scores import LinkScore, LinkScores

SLOW, LOSSY = LinkScore(1.25e8, 4e-5), LinkScore(1.25e9, 4e-5, 0.02)


def scores_file(cluster, *bad: str, age: float = 0.0, kind: LinkScore = SLOW) -> Path:
    """Write scores of all nodes to a file of the user; the nodes `bad` have the score `kind`."""
    nodes = {f"n{i}": LinkScore(1.25e9, 4e-5) for i in range(1, 9)}
    text = LinkScores({**nodes, **dict.fromkeys(bad, kind)}, time=time.time() - age, tolerance=0.25).to_text()
    path = cluster.directory("scores") / "scores.json"
    cluster.run(["sh", "-c", f"umask 022; cat > {path}"], stdin=text).check_returncode()
    return path


def test_job_gets_healthy_nodes_if_there_are_enough(cluster):
    script, file = cluster.script(MAPPED), scores_file(cluster, "n1", "n4", kind=LOSSY)
    output = cluster.job_output(script, "-N3", "--dl-node-binding=nodelist", f"--dl-link-scores={file}")
    assert set(rank_nodes(output)) in ({"n3", "n5", "n7"}, {"n2", "n6", "n8"})


def test_degraded_node_is_used_if_others_do_not_suffice(cluster):
    occupy(cluster, "n2", "n4", "n6", "n8")
    script, file = cluster.script(MAPPED), scores_file(cluster, "n1")
    args = ["--dl-node-binding=nodelist", f"--dl-link-scores={file}"]
    assert set(rank_nodes(cluster.job_output(script, *args, "-N3"))) == {"n3", "n5", "n7"}
    assert set(rank_nodes(cluster.job_output(script, *args, "-N4"))) == {"n1", "n3", "n5", "n7"}


def test_explanation_lists_the_decisive_scores(cluster):
    file = scores_file(cluster, "n1", age=60)
    args = ["slurmdl", "place", "-N3", f"--dl-link-scores={file}", "--dl-zone=zoneA"]
    done = cluster.run(args)
    assert done.returncode == 0, done.stderr
    assert "n1  left out: " in done.stdout and "1 min old" in done.stdout
    explanation = json.loads(cluster.run([*args, "--json"]).stdout)
    assert (explanation["scores"][0]["name"], explanation["scores"][0]["use"]) == ("n1", "left out")


def test_own_probes_count_only_for_their_cluster(cluster):
    file = cluster.directory("offline") / "cluster.txt"
    environ = {"XDG_STATE_HOME": str(file.parent)}

    def run(*args: str, **variables: str) -> str:
        done = cluster.run(["slurmdl", *args], env={**environ, **variables})
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("links", "probe", "--nodes=n[1-2]", "--budget=2s")
    name, = (path.name[len("probe-"):-len(".jsonl")] for path in (file.parent / "slurmdl").glob("probe-*.jsonl"))
    saved = cluster.run(["scontrol", "-o", "-d"], stdin="show nodes\nshow partitions\nshow config\n").stdout
    assert f"ClusterName             = {name}\n" in saved
    scores = {}
    for text, label in ((saved, "same"), (saved.replace(f"= {name}\n", "= another\n"), "other")):
        cluster.run(["sh", "-c", f"cat > {file}"], stdin=text).check_returncode()
        scores[label] = "scores" in json.loads(run("place", "-N2", "--json", "--cluster", str(file)))
    assert scores == {"same": True, "other": False}
    assert "scores" in json.loads(run("place", "-N2", "--json"))
    assert json.loads(run("links", "show", "--json"))["nodes_with_score"] == 2
    assert json.loads(run("links", "show", "--json", SLURM_CLUSTER_NAME="another"))["nodes_with_score"] == 0


def test_unusable_scores_give_one_warning_and_topology_placement(cluster):
    script = cluster.script(MAPPED)
    stale = scores_file(cluster, "n1", age=10_000)
    broken, forged = scores_file(cluster, "n1"), scores_file(cluster, "n1")
    cluster.run(["sh", "-c", f"echo '{{' > {broken}"]).check_returncode()
    cluster.run(["chmod", "666", str(forged)]).check_returncode()
    for file, reason in ((stale, "stale"), (broken, "is not JSON"), (forged, "others may write it"),
                         (script.parent / "missing", "No such file")):
        done = cluster.run(["slurmdl", "place", "-N3", f"--dl-link-scores={file}"])
        assert done.returncode == 0 and "choice     none" not in done.stdout
        assert len(slurmdl_messages(done.stderr)) == 1 and reason in done.stderr
        assert done.stderr.endswith("the topology alone decides\n")
    args = ["slurmdl", "sbatch", "--parsable", "-N3", "--dl-link-scores=http://127.0.0.1:9"]
    strict = cluster.run([*args, "--dl-strict", str(script)], directory=script.parent)
    assert strict.returncode == 65 and "refused" in strict.stderr and not strict.stdout
    done = cluster.run([*args, str(script)], directory=script.parent)
    assert done.returncode == 0 and len(slurmdl_messages(done.stderr)) == 1 and "refused" in done.stderr
    nodes = rank_nodes(cluster.output(int(done.stdout)))
    assert len(nodes) == 3 and len({int(node[1:]) % 2 for node in nodes}) == 1


def test_scores_of_another_user_are_ignored(cluster):
    file = scores_file(cluster, "n1")
    cluster.root("chown", "64001", str(file))
    done = cluster.run(["slurmdl", "place", "-N3", f"--dl-link-scores={file}"])
    assert done.returncode == 0 and "left out" not in done.stdout
    assert "user 64001 owns it" in done.stderr and done.stderr.count("\n") == 1


def test_rank_map_of_a_step_follows_the_scores(cluster):
    """A parameter server is not mapped to a node with a bad link, even if the user selected the nodes."""
    file = scores_file(cluster, "n1", "n5")
    script = cluster.script("slurmdl srun --dl-strategy=ps --dl-ps=1 --dl-rank0=any sh -c "
                            "'echo rank $SLURM_PROCID $SLURMD_NODENAME $SLURMDL_ROLE'\n")
    output = cluster.job_output(script, "-N3", "-w", "n1,n3,n5", program="sbatch",
                                env={"SLURMDL_OPT_LINK_SCORES": str(file)})
    assert [line.split()[2] for line in output.splitlines() if line.endswith(" ps")] == ["n3"]
