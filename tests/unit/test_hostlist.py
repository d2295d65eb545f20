"""Hostlists: Slurm's grammar and order, with `scontrol show hostnames` as the oracle if installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmdl.errors import InputError
from slurmdl.slurm.hostlist import expand_hostlist, fold_hostlist, ranged_string

GOOD = ["n1", "n[1-3],m2,n2", "n[3,1-2]", "n[08-11,3]", "n[001-1000]", "[1-010]", "a b", "x,,y", "a[01-2]",
        "a[1-2]b[3-4]", "a[1-2]b[3-4]c[5-6]", "a[1-2]b[1-2]c[1-2]d[1-2]", "n[9-11],login", "rack-1.n[1-2][3-4]"]


@pytest.mark.parametrize("text", GOOD)
def test_expansion_equals_scontrol(text: str, tmp_path: Path) -> None:
    if not shutil.which("scontrol"):
        pytest.skip("scontrol is not installed")
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=oracle\nSlurmctldHost=localhost\n")
    oracle = subprocess.run(["scontrol", "show", "hostnames", text], capture_output=True, text=True, timeout=120,
                            check=True, env={**os.environ, "SLURM_CONF": str(conf)})
    assert expand_hostlist(text) == oracle.stdout.split()


def test_order_of_three_groups() -> None:
    assert expand_hostlist("a[1-2]b[3-4]c[5-6]")[:5] == ["a1b3c5", "a1b3c6", "a2b3c5", "a2b3c6", "a1b4c5"]


def test_suffix() -> None:
    assert expand_hostlist("n[1-2]x,m[3]-ib") == ["n1x", "n2x", "m3-ib"]


@pytest.mark.parametrize("text", ["", ",", " \t\n"])
def test_empty(text: str) -> None:
    assert expand_hostlist(text) == []


@pytest.mark.parametrize(("text", "expected"), [
    ("b[3-1]", "low bound"), ("n[1,,2]", "no range"), ("n[]", "no range"), ("n[0-8:2]", "no range"),
    ("n[a-c]", "no range"), ("n[1-2", "close"), ("n1]", "close"), ("n[1-[2]]", "close"), ("n[1-70000]", "at most"),
    ("switch{s1}", "controller"), ("block{b[1-2]}", "controller"),
    ("n[1-" + "9" * 40 + "]", "at most"), ("a[0-65535]b[0-65535]", "more than"), ("n[1-99999999]", "at most"),
    ("x" * 255 + "[1-2]", "names of 256 characters"), ("n[1-2]" + "y" * 253 + "[1-2]", "names of 256 characters"),
])
def test_invalid_hostlist_is_rejected(text: str, expected: str) -> None:
    with pytest.raises(InputError) as error:
        expand_hostlist(text)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("text", "expected"), [
    ("'x' * 2**20 + '[1-60000]'", "1048581 characters"), ("'n[1-60000]' + 'y' * 2**20", "1048582 characters"),
    ("'[1-65535,1-65535,1-65535,1-65535]' * 60", "names in all"),
    ("'n[' + '1-65535,' * 100000 + '1]'", "names in all"),
])
def test_memory_is_bounded(text: str, expected: str) -> None:
    """Less than 300 MB of memory in all: the texts expand to between 3 and 63 GB of names."""
    code = ("import resource; resource.setrlimit(resource.RLIMIT_AS, (300 * 2**20,) * 2)\n"
            "from slurmdl.errors import InputError\nfrom slurmdl.slurm.hostlist import expand_hostlist\n"
            f"try: expand_hostlist({text})\n"
            "except InputError as error: print(error)")
    proc = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert proc.stdout.startswith("hostlist '"), proc.stderr
    assert expected in proc.stdout
    assert len(proc.stdout) < 300


def test_longest_name_is_expanded() -> None:
    assert expand_hostlist("x" * 254 + "[1-2]") == ["x" * 254 + "1", "x" * 254 + "2"]


def test_node_groups_are_not_expanded() -> None:
    assert expand_hostlist("@compute") == ["@compute"]
    assert fold_hostlist(["@compute", "n2", "n1"]) == "@compute,n[1-2]"


@pytest.mark.parametrize(("names", "expected"), [
    ("n1 n2 n3", "n[1-3]"), ("n3 n1 n2", "n[3,1-2]"), ("n1 n1", "n[1,1]"), ("n9 n10", "n[9-10]"), ("n1", "n1"),
    ("n08 n9 n10", "n[08,9-10]"), ("n n n1 n2 n", "n,n,n[1-2],n"), ("a1 b1", "a1,b1"), ("", ""), ("7 8", "[7-8]"),
    ("n" + "9" * 18 + " n" + "9" * 19, "n" + "9" * 18 + ",n" + "9" * 19),
])
def test_ranged_keeps_the_order(names: str, expected: str) -> None:
    assert ranged_string(names.split()) == expected
    assert expand_hostlist(expected) == names.split()


@given(st.lists(st.from_regex(r"[a-c]?[0-9]{0,3}[a-c]?([0-9]{0,2}|9{17,20})", fullmatch=True).filter(bool)))
def test_ranged_expands_to_the_same(names: list[str]) -> None:
    assert expand_hostlist(ranged_string(names)) == names


def test_max_names_counts_all_names() -> None:
    assert len(expand_hostlist("n[1-5],m[1-5]", 10)) == 10
    for text in ("n[1-5],m[1-6]", "n[1-6]m[1-2]", "a,b,c,d,e,f,g,h,i,j,k", "n[1,2,3,4,5,6,7,8,9,10,11]"):
        with pytest.raises(InputError, match="more than"):
            expand_hostlist(text, 10)


def test_fold_expands_to_same_names() -> None:
    names = [f"n{i:03d}" for i in range(1, 40)] + ["a1b2", "a1b3", "login"]
    assert sorted(expand_hostlist(fold_hostlist(names))) == sorted(names)
    assert fold_hostlist([]) == ""


@pytest.mark.parametrize(("names", "expected"), [
    ("n10 n2 n1 n3 n1", "n[1-3,10]"), ("n2-ib n1-ib", "n1-ib,n2-ib"), ("a2b1 a1b2 a1b1", "a1b[1-2],a2b1"),
    ("n9 n10 n11 n08 n09", "n[9,08-11]"), ("login n1", "login,n1")])
def test_fold_sorts_like_slurm(names: str, expected: str) -> None:
    """Suffixes stay outside brackets: Slurm 22.05 rejects suffixes within brackets."""
    assert fold_hostlist(names.split()) == expected
