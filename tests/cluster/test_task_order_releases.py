"""The order in which plain srun numbers the tasks of a job, in Slurm 24.11 and 26.05 in chroots."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from jobs import slurm_release
from releases import RELEASES, RootCluster, skip_reason

from benchmarks.chroot_host import root_of

#: nodes n1 and n3 are in one leaf zone, n2 and n4 in the other
BY_NAME, BY_LEAF = ["n1", "n2", "n3", "n4"], ["n1", "n3", "n2", "n4"]
#: options of srun in a job of 4 nodes -> node of each task in Slurm 26.05 (docs/glossary.md, leaf order)
STEPS = {
    "": BY_NAME,
    "-n 4": BY_NAME,
    "-m block": BY_LEAF,
    "-n 8": [node for node in BY_LEAF for _ in range(2)],
    "-n 6": ["n1", "n1", "n3", "n3", "n2", "n4"],
}


@pytest.fixture(scope="module", params=RELEASES)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RootCluster]:
    if reason := skip_reason(request.param):
        pytest.skip(reason)
    made = RootCluster(root_of(request.param), tmp_path_factory.mktemp(request.param) / "host", 4, None)
    try:
        yield made
    finally:
        made.down()


def test_only_block_distribution_of_26_05_follows_the_leaf_zones(cluster: RootCluster) -> None:
    script = cluster.script("\n".join(f"srun -l {options} printenv SLURMD_NODENAME > {number}"
                                      for number, options in enumerate(STEPS)))
    cluster.job_output(script, "-N4", "--exclusive", program="sbatch")
    is_by_leaf = slurm_release(cluster) >= (26, 5)
    for number, (options, by_leaf) in enumerate(STEPS.items()):
        lines = re.findall(r"^ *(\d+): (\w+)$", (script.parent / str(number)).read_text(), re.M)
        nodes = [node for _, node in sorted(lines, key=lambda line: int(line[0]))]
        assert nodes == (by_leaf if is_by_leaf else sorted(nodes)), options
        assert len(nodes) == len(by_leaf), options
