"""Compare slurmdl with Slurm: the topology of a topology.conf with slurmctld, hostlists with scontrol.

SLURMDL_ORACLE_FILES and SLURMDL_ORACLE_HOSTLISTS set the numbers of random cases, SLURMDL_ORACLE_SEED their seed.
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

FILES = int(os.environ.get("SLURMDL_ORACLE_FILES", "25"))
HOSTLISTS = int(os.environ.get("SLURMDL_ORACLE_HOSTLISTS", "500"))
SEED = int(os.environ.get("SLURMDL_ORACLE_SEED", "1"))

_LISTED = re.compile(r"SwitchName=(?P<name>.*) Level=(?P<level>\d+)(?: LinkSpeed=(?P<speed>\d+))?"
                     r"(?: Nodes=(?P<nodes>.*?))?(?: Switches=(?P<switches>.*))?")

#: hostlists that Slurm reads in part and slurmdl rejects: `[1x-3]`, `[1-]`, numbers with more than 18 digits, n{1}
_PARTLY_READ = re.compile(r"\[[^\]]*([^\d,\[\]-]|\d-[,\]]|\d{18,})|\{")
_SUFFIX = re.compile(r"\][^\[\],\s]+(?=[,\s]|$)|\][^\[,\s]*\](?=[,\s]|$)")

#: input that slurmdl rejects on purpose, although Slurm accepts it: part of the message -> reason
STRICTER = {
    "is not UTF-8 text": "Slurm reads bytes",
    "contains a NUL byte": "Slurm silently ignores the rest of the line",
    "expected a name": 'SwitchName="" is a switch that no line can refer to',
    "brackets must close": "22.05 reads n[1- as a host name, newer releases reject it",
    "-' is not a range": "as above, for n[1-]",
    "'Include' is not KEY=VALUE": "22.05 ignores an Include without a file",
    "is not a regular file": "a device or a directory has no topology",
    "Is a directory": "as above",
    "functions such as": "n{1} is resolved by the controller of newer releases only",
}


@pytest.fixture(autouse=True)
def _oracle() -> None:
    if reason := oracle.unavailable_reason():
        assert os.environ.get("SLURMDL_REQUIRE_CLUSTER") != "1", reason
        pytest.skip(reason)


def read_topology(path: Path) -> Topology | InputError:
    try:
        return topology_conf.parse_topology_conf(str(path)).to_topology()
    except InputError as error:
        assert error.file, f"no file in {error}"
        assert len(str(error).splitlines()) == 1, str(error)
        return error


def difference(slurm: oracle.Outcome, result: Topology | InputError) -> str:
    """Return the difference between Slurm and slurmdl for a file, or ""."""
    listed = [match for line in slurm.text.splitlines() if (match := _LISTED.fullmatch(line))]
    if isinstance(result, InputError):
        if not slurm.accepted or any(reason in str(result) for reason in STRICTER):
            return ""
        return "" if not listed and "declares no zone" in str(result) else f"accepted by Slurm; slurmdl: {result}"
    if not slurm.accepted:
        # slurmdl also accepts empty leaves, as Slurm does since 25.05
        is_empty = "neither child switches nor nodes" in slurm.log and "is empty" in " ".join(result.notes)
        # slurmdl also accepts a suffix after a bracket, which 22.05 rejects
        invalid = re.search(r"Invalid node name \((.*)\) in switch config", slurm.log)
        has_suffix = invalid and _SUFFIX.search(invalid[1])
        return "" if is_empty or has_suffix else "rejected by Slurm, accepted by slurmdl"
    if [match["name"] for match in listed] != list(result.zones):
        return f"zones {[match['name'] for match in listed]} are {result.zones}"
    speed = [ZoneDecl(match["name"], link_speed=int(match["speed"] or 0)).uplink_bandwidth for match in listed]
    slurm_leaf: dict[str, int] = {}
    for i, match in enumerate(listed):
        if int(match["level"]) != result.level[i]:
            return f"{match['name']} has level {match['level']}, not {result.level[i]}"
        bandwidth = result.uplink_bandwidth[i]
        if not (speed[i] == bandwidth or (math.isnan(speed[i]) and math.isnan(bandwidth))):
            return f"{match['name']} has speed {speed[i]}, not {bandwidth}"
        if not match["switches"]:
            for node in expand_hostlist(match["nodes"] or ""):
                slurm_leaf.setdefault(node, i)
    leaf_of_node = dict(zip(result.nodes, result.leaf.tolist(), strict=True))
    if slurm_leaf.keys() <= set(oracle.NODES):  # newer releases list only nodes of the cluster
        leaf_of_node = {node: zone for node, zone in leaf_of_node.items() if node in oracle.NODES}
    if slurm_leaf != leaf_of_node:
        return f"nodes {slurm_leaf} are {leaf_of_node}"
    parents: dict[str, list[tuple[int, int]]] = {}
    for i, match in enumerate(listed):
        for child in expand_hostlist(match["switches"] or ""):
            parents.setdefault(child, []).append((int(match["level"]), i))
    # a zone with several parents belongs to the lowest one
    slurm_parents = [min(parents.get(match["name"], [(0, -1)]))[1] for match in listed]
    if slurm_parents != result.parent.tolist():
        return f"parents {slurm_parents} are {result.parent.tolist()}"
    return _difference_above(listed, result)


def _difference_above(listed: list[re.Match[str]], topology: Topology) -> str:
    """Compare the nodes of the zones above the leaves; Slurm lists only nodes of the cluster for them."""
    nodes_below: dict[int, set[str]] = {}
    for node in topology.nodes:
        if node in oracle.NODES:
            for zone in topology.path_of(node):
                nodes_below.setdefault(topology.zone_index[zone], set()).add(node)
    for i, match in enumerate(listed):
        slurm_nodes = set(expand_hostlist(match["nodes"] or "")) & set(oracle.NODES)
        # Slurm counts a node on two leaves, or a zone with two parents, for each of them; slurmdl counts it once
        if not nodes_below.get(i, set()) <= slurm_nodes:
            return f"{match['name']} has nodes {sorted(slurm_nodes)}, not {sorted(nodes_below.get(i, set()))}"
        if topology.parent[i] < 0 and match["switches"] and slurm_nodes - set(topology.nodes):
            return f"{match['name']} has nodes unknown to slurmdl: {sorted(slurm_nodes - set(topology.nodes))}"
    return ""


def test_files(tmp_path: Path) -> None:
    source = random.Random(SEED)
    cases = [*oracle_files.HAND_WRITTEN, *(oracle_files.random_files(source) for _ in range(FILES))]
    outcomes = oracle.ask_slurmctld(tmp_path, cases)
    differences = []
    for i, (case, outcome) in enumerate(zip(cases, outcomes, strict=True)):
        result = read_topology(tmp_path / str(i) / "topology.conf")
        if text := difference(outcome, result):
            reason = "".join(line for line in outcome.log.splitlines() if "fatal" in line or "rror: " in line)[-300:]
            differences.append(f"{text}\n  {str(case)[:600]}\n  Slurm: {reason}\n{outcome.text[:600]}")
    accepted = sum(outcome.accepted for outcome in outcomes)
    print(f"{len(cases)} files, {accepted} accepted by Slurm, {len(differences)} differences")
    assert min(accepted, len(cases) - accepted) > len(cases) / 10, "nearly all files are valid, or nearly all invalid"
    assert not differences, f"{len(differences)} of {len(cases)} files:\n" + "\n".join(differences[:10])


def test_hostlists(tmp_path: Path) -> None:
    source = random.Random(SEED)
    expressions = [oracle_files.random_hostlist(source) for _ in range(HOSTLISTS)]
    suffix, newline, *answers = oracle.hostnames(tmp_path, ["n[1]x", "n[1-2]\na[3]", *expressions])
    accepts_suffix = suffix is not None  # False in 22.05, which rejects a suffix after the last bracket
    accepts_newline = newline == ["n1", "n2", "a3"]  # False in 22.05, which reads a newline as a letter
    differences, rejected, skipped = [], 0, 0
    for expression, answer in zip(expressions, answers, strict=True):
        try:
            names: list[str] | None = expand_hostlist(expression)
        except InputError as error:
            assert len(str(error).splitlines()) == 1
            names = None
        rejected += answer is None
        if names == answer:
            continue
        if "\n" in expression and not accepts_newline:
            is_intended = True
        elif answer is None:
            is_intended = not accepts_suffix and bool(_SUFFIX.search(expression))
        else:
            is_intended = names is None and (len(answer) > MAX_NAMES or bool(
                _PARTLY_READ.search(expression) or _has_unbalanced_brackets(expression)))
        if is_intended:
            skipped += 1
        else:
            differences.append(f"{expression!r}: Slurm {str(answer)[:200]}, slurmdl {str(names)[:200]}")
    print(f"{HOSTLISTS} hostlists, {rejected} rejected by Slurm, {skipped} differ on purpose, "
          f"{len(differences)} differences")
    assert HOSTLISTS / 20 < rejected < HOSTLISTS / 2
    assert skipped < HOSTLISTS / 5, "too few hostlists are compared"
    assert not differences, f"{len(differences)} of {HOSTLISTS}:\n" + "\n".join(differences[:20])


def _has_unbalanced_brackets(expression: str) -> bool:
    depth = 0
    for char in expression:
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            return True
    return depth != 0


def test_slurm_expands_folded_names(tmp_path: Path) -> None:
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
