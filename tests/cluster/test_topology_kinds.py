"""Topologies of newer releases of Slurm: blocks (23.11), and several topologies in one file (25.05)."""

from __future__ import annotations

import pytest
from jobs import MAPPED, rank_nodes, slurm_release, zone, zone_changes

BLOCKS = "BlockName=zoneA Nodes=n[1,3,5,7]\nBlockName=zoneB Nodes=n[2,4,6,8]\nBlockSizes=4,8\n"

SEVERAL = """
- topology: fabric
  cluster_default: true
  tree:
    switches: [{switch: zoneA, nodes: "n[1,3,5,7]"}, {switch: zoneB, nodes: "n[2,4,6,8]"},
               {switch: core, children: "zoneA,zoneB"}]
- topology: pairs
  cluster_default: false
  block:
    block_sizes: [2, 4, 8]
    blocks: [{block: p1, nodes: "n[1-2]"}, {block: p2, nodes: "n[3-4]"}, {block: p3, nodes: "n[5-6]"},
             {block: p4, nodes: "n[7-8]"}]
"""


@pytest.fixture
def cluster_since(cluster, cluster_with):
    """`cluster_with` for features since a release of Slurm; skips the test on older releases."""
    def find(minimum: tuple[int, int], **options: object):
        current = slurm_release(cluster)
        if current < minimum:
            pytest.skip("Slurm {}.{:02d} is older than {}.{:02d}".format(*current, *minimum))
        return cluster_with(**options)

    return find


def test_blocks(cluster_since):
    cluster = cluster_since((23, 11), slurm_conf_lines=("TopologyPlugin=topology/block",),
                                config_files={"topology.conf": BLOCKS})
    shown = cluster.run(["slurmdl", "topology", "show"])
    assert shown.returncode == 0 and shown.stdout.startswith("block, "), shown.stderr
    assert cluster.run(["slurmdl", "topology", "diff"]).stdout.startswith("0 differences")
    script = cluster.script(MAPPED)
    assert len({zone(node) for node in rank_nodes(cluster.job_output(script, "-N4"))}) == 1
    assert zone_changes(rank_nodes(cluster.job_output(script, "-N8"))) == 1


def test_segments(cluster_since):
    """Of a mesh, the groups with most traffic are segments; a zone binding gives Slurm their size."""
    pairs = "".join(f"BlockName=p{i} Nodes=n[{2 * i - 1}-{2 * i}]\n" for i in range(1, 5)) + "BlockSizes=2\n"
    cluster = cluster_since((24, 5), slurm_conf_lines=("TopologyPlugin=topology/block",),
                                config_files={"topology.conf": pairs})

    def blocks(*options: str) -> list[int]:
        return [(int(node[1:]) + 1) // 2 for node in rank_nodes(cluster.job_output(script, "-N4", *options))]

    script = cluster.script(MAPPED)
    mesh = ["--dl-mesh=tp=2,dp=2", "--dl-bytes=tp=1G,dp=1M"]
    shown = cluster.run(["slurmdl", "sbatch", "-N4", "--dl-dry-run", "--dl-node-binding=zone", *mesh, str(script)])
    assert "--segment=2" in shown.stdout.split(), shown.stdout + shown.stderr
    for options in (["--dl-node-binding=zone"], ["--segment=2"], ["--segment=2", "--no-requeue"]):
        first, second, third, last = blocks(*mesh, *options)
        assert first == third != second == last, "ranks 0 and 2 are a tensor group"
    refused = cluster.run(["slurmdl", "place", "-N4", "--segment=3", "--wrap=:"])
    assert "--segment=3 does not divide 4 nodes; expected 1, 2, 4" in refused.stdout, refused.stdout


def test_several_topologies(cluster_since):
    """Ranks follow the topology of the partition, zones or pairs, with any TopologyPlugin."""
    cluster = cluster_since((25, 5), config_files={"topology.yaml": SEVERAL},
                                slurm_conf_lines=(
                                    "TopologyPlugin=topology/flat",
                                    "PartitionName=pairs Nodes=ALL MaxTime=INFINITE State=UP Topology=pairs"))
    script = cluster.script(MAPPED)
    assert zone_changes(rank_nodes(cluster.job_output(script, "-N8"))) == 1
    pairs = [(int(node[1:]) + 1) // 2 for node in rank_nodes(cluster.job_output(script, "-p", "pairs", "-N8"))]
    assert all(pairs[rank] == pairs[rank + 1] for rank in range(0, 8, 2)), pairs


def test_plain_srun_orders_ranks_by_zone_with_block_distribution(cluster_since):
    """Since 26.05 plain srun orders ranks by zone if it fills the nodes one after another.

    It does so with -m block, or if there are more tasks than nodes; otherwise ranks are in the order of node names.
    """
    cluster = cluster_since((26, 5))
    output = cluster.job_output("srun -m block sh -c 'echo rank $SLURM_PROCID $SLURMD_NODENAME'", "-N8",
                                program="sbatch")
    assert zone_changes(rank_nodes(output)) == 1
