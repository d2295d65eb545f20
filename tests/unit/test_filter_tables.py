"""Tables of etc/*.lua agree with the tables in slurmdl."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurmdl import dl_options
from slurmdl.cli import place
from slurmdl.errors import UsageError
from slurmdl.slurm import getopt

ETC = Path(__file__).parents[2] / "etc"


def table(name: str) -> set[str]:
    text = (ETC / "cli_filter.lua").read_text()
    match = re.search(rf"^local {name} = words (?:\[\[(.*?)\]\]|\"(.*?)\")$", text, re.DOTALL | re.MULTILINE)
    assert match, name
    return set((match[1] or match[2]).split())


def test_tables_of_option_values_match_sbatch():
    assert table("FLAGS") == {name for name, has_arg in getopt.SBATCH_LONG_OPTIONS.items() if has_arg == "no"}
    assert table("OPTIONAL") == {name for name, has_arg in getopt.SBATCH_LONG_OPTIONS.items()
                                 if has_arg == "optional"}
    assert table("IGNORED_OPTIONS") <= set(getopt.SBATCH_LONG_OPTIONS)


def test_ignored_options_do_not_change_the_request():
    from slurmdl.job_request import build_request

    plain = build_request({}, dl_options.DlOptions())
    for name in table("IGNORED_OPTIONS"):
        assert build_request({name: "1"}, dl_options.DlOptions()) == plain, name


def test_job_submit_passes_all_options_without_files():
    text = (ETC / "job_submit.lua").read_text()
    match = re.search(r"^local OPTIONS = \{([^}]*)\}", text, re.MULTILINE)
    assert match
    names = {f"SLURMDL_OPT_{name}" for name in re.findall(r'"(\w+)"', match[1])}
    files = {"SLURMDL_OPT_COMM_PATTERN", "SLURMDL_OPT_LINK_SCORES"}
    # job_submit.lua runs as SlurmUser, which cannot read users' files, and never rejects a job
    known = {dl_options.env_variable(option.field) for option in dl_options.OPTIONS
             if f"dl-{option.name}" in dl_options.SPANK_OPTIONS}
    assert names == known - files - {"SLURMDL_OPT_STRICT"}


@pytest.mark.parametrize("seed", ["", "-1", "x", "1.5", str(2**33)])
def test_invalid_seed_raises_usage_error(seed):
    with pytest.raises(UsageError, match=r"--seed=.*: expected a number from 0 to"):
        place.run([f"--seed={seed}", "-N2", "--topology=topology/topology.conf", "--cluster=examples/cluster.json"])
