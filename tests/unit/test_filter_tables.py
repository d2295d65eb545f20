"""What etc/cli_filter.lua knows of sbatch's options and of our choices is what slurmdl knows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurmdl import dl_options
from slurmdl.cli import place
from slurmdl.errors import UsageError
from slurmdl.slurm import sbatch_options

TOPOLOGY = Path(__file__).parents[2] / "topology"


def table(name: str) -> set[str]:
    text = (TOPOLOGY / "cli_filter.lua").read_text()
    found = re.search(rf"^local {name} = words (?:\[\[(.*?)\]\]|\"(.*?)\")$", text, re.DOTALL | re.MULTILINE)
    assert found, name
    return set((found[1] or found[2]).split())


def test_options_without_a_value():
    assert table("FLAGS") == {name for name, takes in sbatch_options.LONG_OPTIONS.items() if takes == "no"}
    assert table("OPTIONAL") == {name for name, takes in sbatch_options.LONG_OPTIONS.items() if takes == "optional"}
    assert table("PASSED_OVER") <= set(sbatch_options.LONG_OPTIONS)


def test_what_is_passed_over_decides_no_placement():
    from slurmdl.job_request import build_request

    plain = build_request({}, dl_options.DlOptions())
    for name in table("PASSED_OVER"):
        assert build_request({name: "1"}, dl_options.DlOptions()) == plain, name


def test_the_options_that_the_controllers_side_hands_on():
    text = (TOPOLOGY / "job_submit.lua").read_text()
    found = re.search(r"^local OPTIONS = \{(.*?)\}", text, re.MULTILINE)
    assert found
    names = {f"SLURMDL_OPT_{name}" for name in re.findall(r'"(\w+)"', found[1])}
    files = {"SLURMDL_OPT_COMM_PATTERN", "SLURMDL_OPT_LINK_SCORES"}
    # those that name files are none that SlurmUser may read, and it never refuses a job
    known = {option.env_variable for option in dl_options.OPTIONS if f"dl-{option.name}" in dl_options.SPANK_OPTIONS}
    assert names == known - files - {"SLURMDL_OPT_STRICT"}


@pytest.mark.parametrize("seed", ["", "-1", "x", "1.5", str(2**33)])
def test_a_seed_that_is_none(seed):
    with pytest.raises(UsageError, match=r"--seed: .* valid: 0 to"):
        place.run([f"--seed={seed}", "-N2", "--topology=topology/topology.conf", "--cluster=examples/cluster.json"])
