"""Hostlists: Slurm's grammar and order, with `scontrol show hostnames` as the oracle if it is installed."""

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

#: hostlist -> names, as Slurm expands it
EXPANDED = {
    "": "", ",": "", " \t\n": "", "n1": "n1", "n[1-3],m2,n2": "n1 n2 n3 m2 n2", "n[3,1-2]": "n3 n1 n2", "a b": "a b",
    "n[08-11,3]": "n08 n09 n10 n11 n3", "[1-010]": "1 2 3 4 5 6 7 8 9 10", "x,,y": "x y", "a[01-2]": "a01 a02",
    "n[1-2]x,m[3]-ib": "n1x n2x m3-ib", "n[9-11],login": "n9 n10 n11 login", "@compute": "@compute",
    "a[1-2]b[3-4]": "a1b3 a1b4 a2b3 a2b4", "rack-1.n[1-2][3-4]": "rack-1.n13 rack-1.n14 rack-1.n23 rack-1.n24",
    "a[1-2]b[3-4]c[5-6]": "a1b3c5 a1b3c6 a2b3c5 a2b3c6 a1b4c5 a1b4c6 a2b4c5 a2b4c6",
    "a[1-2]b[1-2]c[1]d[1-2]": "a1b1c1d1 a1b1c1d2 a2b1c1d1 a2b1c1d2 a1b2c1d1 a1b2c1d2 a2b2c1d1 a2b2c1d2",
    "x" * 254 + "[1-2]": f"{'x' * 254}1 {'x' * 254}2", "[1]" * 64: "1" * 64,
}


@pytest.mark.parametrize("text", EXPANDED)
def test_names_of_a_hostlist(text: str, tmp_path: Path) -> None:
    assert expand_hostlist(text) == EXPANDED[text].split()
    # Slurm 22.05 rejects a suffix; the others are no valid arguments
    if text.strip(", \t\n") and "@" not in text and "]x" not in text and len(text) < 99 and shutil.which("scontrol"):
        conf = tmp_path / "slurm.conf"
        conf.write_text("ClusterName=oracle\nSlurmctldHost=localhost\n")
        oracle = subprocess.run(["scontrol", "show", "hostnames", text], capture_output=True, text=True, timeout=120,
                                check=True, env={**os.environ, "SLURM_CONF": str(conf)})
        assert oracle.stdout.split() == EXPANDED[text].split()


@pytest.mark.parametrize(("text", "expected"), [
    ("b[3-1]", "low bound"), ("n[1,,2]", "not a range"), ("n[]", "not a range"), ("n[0-8:2]", "not a range"),
    ("n[a-c]", "not a range"), ("n[1-2", "close"), ("n1]", "close"), ("n[1-[2]]", "close"), ("n[1-70000]", "at most"),
    ("switch{s1}", "controller"), ("block{b[1-2]}", "controller"),
    ("n[1-" + "9" * 40 + "]", "at most"), ("a[0-65535]b[0-65535]", "more than"), ("n[1-99999999]", "at most"),
    ("[1]" * 65, "more than 64 brackets"), ("x" * 255 + "[1-2]", "names of 256 characters"),
    ("n[1-2]" + "y" * 253 + "[1-2]", "names of 256 characters"),
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


@pytest.mark.parametrize(("names", "expected"), [
    ("n1 n2 n3", "n[1-3]"), ("n3 n1 n2", "n[3,1-2]"), ("n1 n1", "n[1,1]"), ("n9 n10", "n[9-10]"), ("n1", "n1"),
    ("n08 n9 n10", "n[08,9-10]"), ("n n n1 n2 n", "n,n,n[1-2],n"), ("a1 b1", "a1,b1"), ("", ""), ("7 8", "[7-8]"),
    ("n" + "9" * 18 + " n" + "9" * 19, "n" + "9" * 18 + ",n" + "9" * 19), ("007 008", "[007-008]"),
    ("n40000 n40001", "n[40000-40001]"),
    ("r1n1 r1n2 r2n1", "r1n[1-2],r2n1"), ("n1-ib n2-ib", "n1-ib,n2-ib"),
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


@pytest.mark.parametrize(("names", "expected"), [
    ("n10 n2 n1 n3 n1", "n[1-3,10]"), ("n2-ib n1-ib", "n1-ib,n2-ib"), ("a2b1 a1b2 a1b1", "a1b[1-2],a2b1"),
    ("n9 n10 n11 n08 n09", "n[9,08-11]"), ("login n1", "login,n1"), ("@compute n2 n1", "@compute,n[1-2]"), ("", "")])
def test_fold_sorts_like_slurm(names: str, expected: str) -> None:
    """Suffixes stay outside brackets: Slurm 22.05 rejects suffixes within brackets."""
    assert fold_hostlist(names.split()) == expected
