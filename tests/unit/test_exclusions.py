"""The file of a user's exclusions, the rules by which its entries apply, and marks of job starts."""

import json
import os
import subprocess
import sys
import time

import pytest
from placing import cluster, node

from slurmdl.errors import InputError, UnavailableError
from slurmdl.health.exclusions import (
    DEFAULT_LIFETIME_S,
    Exclusion,
    active_exclusions,
    add_exclusions,
    choose_exclusions,
    count_marks,
    limit_exclusions,
    load_exclusions,
    mark_path,
    record_exclusions,
    write_mark,
)
from slurmdl.job_request import JobRequest

NOW = 1_800_000_000.0


def entry(node: str, time: float = NOW, lifetime: float = 3600.0, cluster: str = "c",
          reason: str = "slow") -> Exclusion:
    return Exclusion(node, reason, time, time + lifetime, cluster, "17")


@pytest.fixture
def file(tmp_path):
    return str(tmp_path / "state/slurmdl/exclusions.jsonl")


def test_entries_are_read_in_order_of_time(file):
    assert load_exclusions(file) == ([], "")
    later, earlier = entry("n2", NOW + 5), entry("n1", reason="a\nb")
    add_exclusions(file, [later, earlier], NOW)
    assert load_exclusions(file) == ([Exclusion("n1", "a b", NOW, NOW + 3600, "c", "17"), later], "")


def test_newest_entry_of_a_node_counts_until_it_expires():
    entries = [entry("n1"), entry("n1", NOW + 10, lifetime=0), entry("n2"), entry("n3", cluster="other"),
               entry("n4", NOW - 7200), entry("n5", NOW + 1)]
    assert list(active_exclusions(entries, NOW + 20, "c")) == ["n5", "n2"]
    assert active_exclusions(entries, NOW + 4000, "c") == {}


@pytest.mark.parametrize(("nodes", "excluded"), [(5, 1), (20, 2), (29, 2), (1000, 100)])
def test_cap_keeps_the_first_nodes(nodes, excluded):
    names = [f"n{i}" for i in range(nodes)]
    kept, beyond = limit_exclusions(["elsewhere", *names], names)
    assert (kept, beyond) == (names[:excluded], names[excluded:])


@pytest.mark.parametrize("line", ["garbage", "[]", "{}", "null", '{"node": "n1"}', "[" * 100_000,
                                  '{"node":1,"reason":"r","time":1,"expires":2,"cluster":"c"}',
                                  '{"node":"n1","reason":"r","time":"x","expires":2,"cluster":"c"}', "\ufffd\0"])
def test_invalid_line_is_a_warning_and_loses_no_other(file, line):
    add_exclusions(file, [entry("n1")], NOW)
    with open(file, "a") as stream:
        stream.write(line)  # without a newline: the disk was full
    add_exclusions(file, [entry("n2")], NOW)
    entries, warning = load_exclusions(file)
    assert [item.node for item in entries] == ["n1", "n2"]
    assert warning.startswith(f"{file}:2: not an exclusion; expected ") and "1 of 3 lines" in warning


def test_unusable_file_is_a_warning(file):
    os.makedirs(file)
    assert load_exclusions(file) == ([], f"{file}: cannot be read (Is a directory); no remembered node is excluded")
    with pytest.raises(UnavailableError, match="cannot be written"):
        add_exclusions(file, [entry("n1")], NOW)


def test_long_file_is_compacted_and_keeps_what_counts(file):
    add_exclusions(file, [entry(f"n{i}", NOW - 9999, reason="x" * 250) for i in range(1000)], NOW)
    add_exclusions(file, [entry("n1")], NOW)
    assert [item.node for item in load_exclusions(file)[0]] == ["n1"]


@pytest.mark.parametrize("count", [4000, 30_000], ids=["more than 1 MiB", "more than is kept"])
def test_many_exclusions_stay_and_the_newest_of_a_node_counts(file, count):
    add_exclusions(file, [entry(f"n{i}", NOW + i, 99_999, reason="x" * 250) for i in range(count)], NOW)
    add_exclusions(file, [entry(f"n{count - 1}", NOW + count, lifetime=0)], NOW)
    add_exclusions(file, [entry("m", NOW + count)], NOW)
    active = active_exclusions(load_exclusions(file)[0], NOW + count, "c")
    kept = min(count, 10_000)
    assert len(active) >= kept and list(active)[:2] == ["m", f"n{count - 2}"] and f"n{count - 1}" not in active
    assert os.path.getsize(file) < 5 * 2**20


def test_file_that_cannot_be_read_is_not_replaced(file, monkeypatch):
    add_exclusions(file, [entry(f"n{i}", NOW - 9999, reason="x" * 250) for i in range(1000)], NOW)

    def fail(*_: object) -> bytes:
        raise InputError("cannot be read (Input/output error)")

    with monkeypatch.context() as patch:
        patch.setattr("slurmdl.files.read_regular_file", fail)
        add_exclusions(file, [entry("m")], NOW)
    assert len(load_exclusions(file)[0]) == 1001


#: adds entries of one writer to a file that is long enough to be compacted at each addition
WRITER = """
import sys
from slurmdl import files
from slurmdl.health.exclusions import Exclusion, add_exclusions
files._LOCK_TIMEOUT_S = 60.0  # the machine may be busy
for i in range(20):
    add_exclusions(sys.argv[1], [Exclusion(f"{sys.argv[2]}-{i}", "x", 1.0, 9e9, "c")], 2.0)
"""


def test_concurrent_writers_lose_nothing(file):
    add_exclusions(file, [entry(f"n{i}", reason="x" * 250) for i in range(1000)], NOW)
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, file, str(number)]) for number in range(4)]
    assert [writer.wait() for writer in writers] == [0] * 4
    entries, warning = load_exclusions(file)
    assert (len(entries), warning) == (1080, "")


def test_remembered_node_expires_after_a_day(tmp_path):
    environ = {"XDG_STATE_HOME": str(tmp_path), "SLURM_CLUSTER_NAME": "c"}
    record_exclusions({"n1": "bad cable"}, environ, "5")
    data = json.loads((tmp_path / "slurmdl/exclusions.jsonl").read_text())
    assert (data["node"], data["reason"], data["cluster"], data["job"]) == ("n1", "bad cable", "c", "5")
    assert data["expires"] - data["time"] == DEFAULT_LIFETIME_S == 24 * 3600


ENVIRON = {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "c"}


def test_starts_of_one_job_are_counted(tmp_path):
    environ = {"XDG_STATE_HOME": str(tmp_path), **ENVIRON}
    assert count_marks("requeues", environ) == 0
    for restart in ("0", "0", "3"):
        write_mark(mark_path("requeues", environ | {"SLURM_RESTART_COUNT": restart}))
    write_mark(mark_path("requeues", environ | {"SLURM_JOB_ID": "77"}))
    assert count_marks("requeues", environ) == 2
    assert count_marks("preflight", environ) == 0


def test_no_count_if_marks_cannot_be_written(tmp_path):
    (tmp_path / "slurmdl").touch()
    assert count_marks("requeues", {"XDG_STATE_HOME": str(tmp_path), **ENVIRON}) is None


def test_marks_of_old_jobs_are_removed(tmp_path):
    old, new = tmp_path / "c-1-0", tmp_path / "c-2-0"
    for path, age_s in ((old, 40 * 86400), (new, 86400)):
        path.touch()
        os.utime(path, (time.time() - age_s,) * 2)
    write_mark(str(tmp_path / "c-3-0"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c-2-0", "c-3-0"]


@pytest.mark.parametrize(("request_", "remembered", "site", "rejection", "excluded", "messages"), [
    ({}, {}, {}, "", (), []),
    ({}, {"n3": "slow"}, {}, "", ("n3",),
     ["left out: n3 (slow, 2 h ago); `slurmdl preflight --forget NODES` ends that"]),
    ({"exclude": ("n9", "n1")}, {}, {"n3": "listed"}, "", ("n9", "n1", "n3"), ["left out: n3 (listed)"]),
    # both know it: the reason of the site; named by the user: it stays; of another partition
    ({}, {"n3": "slow"}, {"n3": "listed"}, "", ("n3",), ["left out: n3 (listed)"]),
    ({"nodelist": ("n3",)}, {"n3": "slow"}, {}, "", (), []),
    ({"partitions": ("main",)}, {"other": "slow"}, {}, "", (), []),
    # one node of ten, those of the site first
    ({}, {"n3": "slow"}, {"n4": "listed"}, "", ("n4",),
     ["n3 may be used, though bad: at most 10% of the partition's nodes are left out", "left out: n4 (listed)"]),
    # the job could not run without it: one of the others is down
    ({"nodes": (9, 9)}, {"n3": "slow"}, {}, "",
     (), ["n3 may be used, though bad: it needs 9 nodes, and 8 others are in service"]),
    ({"nodes": (8, 8)}, {}, {"n3": "listed"}, "", ("n3",), ["left out: n3 (listed)"]),
    ({}, {"n3": "slow"}, {}, "Slurm rejects it", (), ["n3 may be used, though bad: Slurm rejects it"])])
def test_choose_exclusions(request_, remembered, site, rejection, excluded, messages):
    nodes = [node(f"n{i}", "DOWN" if i == 10 else "IDLE") for i in range(1, 11)]
    now, questions = time.time(), []
    entries = {name: Exclusion(name, reason, now - 7200, now + 60, "c") for name, reason in remembered.items()}
    result = choose_exclusions(JobRequest(**request_), entries, site,
                               cluster(*nodes, node("other", partitions=("debug",))),
                               lambda names: questions.append(names) or rejection)
    assert result == (excluded, messages)
    assert questions in ([], [excluded or ("n3",)])
