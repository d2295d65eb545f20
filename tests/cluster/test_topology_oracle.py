"""Slurm is the oracle: what slurmctld makes of a topology.conf, and scontrol of a hostlist, is what we make of it.

SLURMDL_ORACLE_FILES and SLURMDL_ORACLE_HOSTLISTS ask for more random ones than there are by default,
SLURMDL_ORACLE_SEED for others.
"""

from __future__ import annotations

import math
import os
import random
import re
from pathlib import Path

import oracle
import oracle_files
import pytest

from slurmdl.errors import InputError
from slurmdl.slurm.hostlist import MAX_NAMES, expand_hostlist, fold_hostlist
from slurmdl.topology import topology_conf
from slurmdl.topology.source import ZoneDecl
from slurmdl.topology.topology import Topology

FILES = int(os.environ.get("SLURMDL_ORACLE_FILES", "300"))
HOSTLISTS = int(os.environ.get("SLURMDL_ORACLE_HOSTLISTS", "2000"))
SEED = int(os.environ.get("SLURMDL_ORACLE_SEED", "1"))

_LISTED = re.compile(r"SwitchName=(?P<name>.*) Level=(?P<level>\d+)(?: LinkSpeed=(?P<speed>\d+))?"
                     r"(?: Nodes=(?P<nodes>.*?))?(?: Switches=(?P<switches>.*))?")

#: hostlists that Slurm half reads and we refuse: `[1x-3]`, `[1-]`, numbers of more than 18 digits, n{1}
_HALF_READ = re.compile(r"\[[^\]]*([^\d,\[\]-]|\d-[,\]]|\d{18,})|\{")
_SUFFIX = re.compile(r"\][^\[\],\s]+(?=[,\s]|$)|\][^\[,\s]*\](?=[,\s]|$)")

#: Where we refuse what Slurm takes, on purpose: it takes these for names that no host has. Our message, why.
STRICTER = {
    "is not UTF-8 text": "Slurm reads bytes",
    "contains a NUL byte": "to Slurm a line ends there, and what follows is lost without a word",
    "needs a name": 'SwitchName="" is a switch that nothing can refer to',
    "brackets must close": "22.05 takes n[1- for a host of that name, newer releases refuse it",
    "-' is no range": "as above, of n[1-]",
    "'Include' is no KEY=VALUE": "22.05 passes over an Include without a file",
    "is not a regular file": "what a device or a directory holds is no topology",
    "Is a directory": "as above",
    "functions such as": "n{1} is resolved by the controller of newer releases only",
}


@pytest.fixture(autouse=True)
def _oracle() -> None:
    if why := oracle.missing():
        assert os.environ.get("SLURMDL_REQUIRE_CLUSTER") != "1", why
        pytest.skip(why)


def ours(path: Path) -> Topology | InputError:
    try:
        return topology_conf.parse_topology_conf(str(path))
    except InputError as error:
        assert error.file, f"no file in {error}"
        assert len(str(error).splitlines()) == 1, str(error)
        return error


def difference(slurm: oracle.Verdict, found: Topology | InputError) -> str:
    """How the two disagree on a file, "" where they do not."""
    listed = [match for line in slurm.text.splitlines() if (match := _LISTED.fullmatch(line))]
    if isinstance(found, InputError):
        if not slurm.accepted or any(reason in str(found) for reason in STRICTER):
            return ""
        return "" if not listed and "declares no zone" in str(found) else f"Slurm accepts it; we say {found}"
    if not slurm.accepted:
        # since 25.05 a leaf may be empty
        empty = "neither child switches nor nodes" in slurm.log and "is empty" in " ".join(found.notes)
        # and 22.05 knows no names that go on after a bracket
        invalid = re.search(r"Invalid node name \((.*)\) in switch config", slurm.log)
        suffix = invalid and _SUFFIX.search(invalid[1])
        return "" if empty or suffix else "Slurm refuses it; we accept it"
    if [match["name"] for match in listed] != list(found.zones):
        return f"zones {[match['name'] for match in listed]} are {found.zones}"
    speed = [ZoneDecl(match["name"], link_speed=int(match["speed"] or 0)).uplink_bandwidth for match in listed]
    leaf: dict[str, int] = {}
    for i, match in enumerate(listed):
        if int(match["level"]) != found.level[i]:
            return f"{match['name']} has level {match['level']}, not {found.level[i]}"
        if not (speed[i] == found.uplink_bandwidth[i] or (
            math.isnan(speed[i]) and math.isnan(found.uplink_bandwidth[i]))):
            return f"{match['name']} has speed {speed[i]}, not {found.uplink_bandwidth[i]}"
        if not match["switches"]:
            for node in expand_hostlist(match["nodes"] or ""):
                leaf.setdefault(node, i)
    mine = dict(zip(found.nodes, found.leaf.tolist(), strict=True))
    if leaf.keys() <= set(oracle.NODES):  # newer releases list only nodes that the cluster has
        mine = {node: zone for node, zone in mine.items() if node in oracle.NODES}
    if leaf != mine:
        return f"nodes {leaf} are {mine}"
    parents: dict[str, list[tuple[int, int]]] = {}
    for i, match in enumerate(listed):
        for child in expand_hostlist(match["switches"] or ""):
            parents.setdefault(child, []).append((int(match["level"]), i))
    # of several parents the lowest holds the zone
    above = [min(parents.get(match["name"], [(0, -1)]))[1] for match in listed]
    if above != found.parent.tolist():
        return f"parents {above} are {found.parent.tolist()}"
    return _difference_above(listed, found)


def _difference_above(listed: list[re.Match[str]], found: Topology) -> str:
    """Slurm also lists the nodes of each zone above the leaves: those of the cluster that lie below it."""
    below: dict[int, set[str]] = {}
    for node in found.nodes:
        if node in oracle.NODES:
            for zone in found.path_of(node):
                below.setdefault(found.zone_index[zone], set()).add(node)
    for i, match in enumerate(listed):
        said = set(expand_hostlist(match["nodes"] or "")) & set(oracle.NODES)
        # a node on two leaves, or a zone with two parents, counts for each of them in Slurm, and once with us
        if not below.get(i, set()) <= said:
            return f"{match['name']} has nodes {sorted(said)}, not {sorted(below.get(i, set()))}"
        if found.parent[i] < 0 and match["switches"] and said - set(found.nodes):
            return f"{match['name']} has nodes that we do not know: {sorted(said - set(found.nodes))}"
    return ""


def test_files(tmp_path: Path) -> None:
    source = random.Random(SEED)
    cases = [*oracle_files.BY_HAND, *(oracle_files.drawn(source) for _ in range(FILES))]
    verdicts = oracle.ask_many(tmp_path, cases)
    wrong = []
    for i, (case, verdict) in enumerate(zip(cases, verdicts, strict=True)):
        found = ours(tmp_path / str(i) / "topology.conf")
        if text := difference(verdict, found):
            reason = "".join(line for line in verdict.log.splitlines() if "fatal" in line or "rror: " in line)[-300:]
            wrong.append(f"{text}\n  {str(case)[:600]}\n  Slurm: {reason}\n{verdict.text[:600]}")
    accepted = sum(verdict.accepted for verdict in verdicts)
    print(f"{len(cases)} files, {accepted} accepted by Slurm, {len(wrong)} differences")
    assert min(accepted, len(cases) - accepted) > len(cases) / 10, "the files are all of one kind"
    assert not wrong, f"{len(wrong)} of {len(cases)} files:\n" + "\n".join(wrong[:10])


def test_hostlists(tmp_path: Path) -> None:
    source = random.Random(SEED)
    expressions = [oracle_files.hostlist(source) for _ in range(HOSTLISTS)]
    suffix, newline, *answers = oracle.hostnames(tmp_path, ["n[1]x", "n[1-2]\na[3]", *expressions])
    suffixes = suffix is not None  # 22.05 refuses a name that goes on after its last bracket,
    newlines = newline == ["n1", "n2", "a3"]  # and takes a newline for a letter
    wrong, refused, skipped = [], 0, 0
    for expression, answer in zip(expressions, answers, strict=True):
        try:
            found: list[str] | None = expand_hostlist(expression)
        except InputError as error:
            assert len(str(error).splitlines()) == 1
            found = None
        refused += answer is None
        if found == answer:
            continue
        if "\n" in expression and not newlines:
            ours_alone = True
        elif answer is None:
            ours_alone = not suffixes and bool(_SUFFIX.search(expression))
        else:
            ours_alone = found is None and (len(answer) > MAX_NAMES or bool(
                _HALF_READ.search(expression) or _unbalanced(expression)))
        if ours_alone:
            skipped += 1
        else:
            wrong.append(f"{expression!r}: Slurm {str(answer)[:200]}, we {str(found)[:200]}")
    print(f"{HOSTLISTS} hostlists, {refused} refused by Slurm, {skipped} judged otherwise on purpose, "
          f"{len(wrong)} differences")
    assert HOSTLISTS / 20 < refused < HOSTLISTS / 2
    assert skipped < HOSTLISTS / 5, "too little is compared"
    assert not wrong, f"{len(wrong)} of {HOSTLISTS}:\n" + "\n".join(wrong[:20])


def _unbalanced(expression: str) -> bool:
    depth = 0
    for c in expression:
        depth += (c == "[") - (c == "]")
        if depth not in (0, 1):
            return True
    return depth != 0


def test_fold_keeps_the_names(tmp_path: Path) -> None:
    """What we fold, Slurm expands to the same names."""
    source = random.Random(SEED)
    sets = []
    for _ in range(200):
        prefix = source.choice(("n", "rack-1.n", "a1b", "login"))
        width = source.choice((0, 0, 2, 4))
        sets.append({f"{prefix}{source.randrange(1, 300):0{width}}" for _ in range(source.randrange(1, 60))})
    folded = [fold_hostlist(sorted(names)) for names in sets]
    for names, text, answer in zip(sets, folded, oracle.hostnames(tmp_path, folded), strict=True):
        assert answer is not None, text
        assert sorted(answer) == sorted(names), text
