"""The SPANK plugin in other releases of Slurm: tests of test_spank in chroots of other Debian releases."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_spank
from jobs import slurm_release
from releases import RELEASES, RootCluster, skip_reason
from test_spank import (  # noqa: F401
    test_help,
    test_heterogeneous_step_has_global_ranks,
    test_hostile_job_name_and_huge_environment,
    test_invalid_map_is_not_applied,
    test_invalid_values_fail_the_submission,
    test_map_applies_to_its_step_only,
    test_mismatched_map_warns_once,
    test_nested_step_has_its_own_variables,
    test_options_of_all_commands_reach_the_tasks,
    test_tasks_have_their_variables,
)

from benchmarks.chroot_host import root_of

BUILD_TOOL = Path(__file__).parents[2] / "tools/test-plugin-releases"
#: order in which Slurm assigns tasks to nodes; 26.05 fills one zone after another
ORDER = {(24, 11): ["n1", "n2", "n3", "n4"], (26, 5): ["n1", "n3", "n2", "n4"]}


@pytest.fixture(scope="module", params=RELEASES)
def other_release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RootCluster]:
    suite = request.param
    if reason := skip_reason(suite):
        pytest.skip(reason)
    subprocess.run([BUILD_TOOL, suite], check=True, timeout=600)
    root = root_of(suite)
    cluster = RootCluster(root, tmp_path_factory.mktemp(suite) / "host", 4, root / "var/lib/slurmdl/gcc/slurmdl.so")
    try:
        yield cluster
    finally:
        cluster.down()


@pytest.fixture
def plugged(other_release: RootCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[RootCluster]:
    """The fixture `plugged` of test_spank, with one cluster for all tests; it has no jobs at the start of a test."""
    order = ORDER[slurm_release(other_release)]
    monkeypatch.setattr(test_spank, "PLAIN", sorted(test_spank.PLAIN, key=order.index))
    yield other_release
    other_release.cancel_all()
