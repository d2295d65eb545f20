"""The plugin in other releases of Slurm: what test_spank holds against that of this machine, again."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import test_spank
from releases import RootCluster, missing, root_of
from test_spank import (  # noqa: F401
    bad_values,
    test_a_heterogeneous_step_is_one,
    test_a_map_is_applied_to_its_step_and_to_no_other,
    test_a_map_that_does_not_hold_is_not_applied,
    test_a_map_that_the_step_does_not_follow_is_warned_of_once,
    test_a_step_inside_a_task_gets_its_own,
    test_help,
    test_hostile_names_and_a_huge_environment,
    test_options_of_every_command_reach_the_tasks,
    test_tasks_find_their_variables,
    test_values_that_are_not_valid_end_the_submission,
)

TOOL = Path(__file__).parents[2] / "tools/test-plugin-releases"
#: the order in which the nodes of a job get its tasks: 26.05 goes from zone to zone
ORDER = {"24.11": ["n1", "n2", "n3", "n4"], "26.05": ["n1", "n3", "n2", "n4"]}


def slurm_release(cluster: RootCluster) -> str:
    return cluster.run(["sinfo", "-V"]).stdout.split()[1].rpartition(".")[0]


@pytest.fixture(scope="module", params=["trixie", "forky"])
def other_release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RootCluster]:
    suite = request.param
    if why := missing(suite):
        pytest.skip(why)
    subprocess.run([TOOL, suite], check=True, timeout=600)
    root = root_of(suite)
    cluster = RootCluster(root, tmp_path_factory.mktemp(suite) / "host", 4, root / "var/lib/slurmdl/gcc/slurmdl.so")
    try:
        yield cluster
    finally:
        cluster.down()


@pytest.fixture
def plugged(other_release: RootCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RootCluster]]:
    """The cluster of test_spank's tests, here one for all, and empty of jobs."""
    order = ORDER[slurm_release(other_release)]
    monkeypatch.setattr(test_spank, "PLAIN", sorted(test_spank.PLAIN, key=order.index))
    yield lambda: other_release
    other_release.cancel_all()
