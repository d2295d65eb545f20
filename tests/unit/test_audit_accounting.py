"""Records of sacct: columns, times, and records that cannot be used."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from slurmdl.audit.accounting import JobTable, read_accounting_file, read_job_records
from slurmdl.audit.sacct import parse_moment
from slurmdl.audit.timestamps import TimestampParser, parse_time_limit
from slurmdl.errors import InputError, UsageError

HEADER = "JobID|User|Partition|State|Submit|Start|End|Timelimit|NNodes|NCPUS|NodeList"
DATA = Path(__file__).parent / "data"
DAY = 1_714_521_600  # 2024-05-01, UTC


@pytest.fixture
def time_zone(monkeypatch):
    def set_zone(name: str) -> None:
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield set_zone
    monkeypatch.undo()
    time.tzset()


def record(job_id: str = "1", **fields: str) -> str:
    values = {"JobID": job_id, "User": "ada", "Partition": "main", "State": "COMPLETED", "Submit": str(DAY),
              "Start": str(DAY + 60), "End": str(DAY + 3660), "Timelimit": "02:00:00", "NNodes": "2", "NCPUS": "8",
              "NodeList": "n[1-2]", **fields}
    return "|".join(values[name] for name in HEADER.split("|"))


def read(*lines: str, header: str = HEADER) -> JobTable:
    return read_job_records([f"{line}\n" for line in (header, *lines)], "jobs.txt")


def problems(table: JobTable) -> dict[str, tuple[int, int, str]]:
    return {problem.kind: (problem.count, problem.line, problem.example) for problem in table.problems}


def test_values_of_a_record():
    table = read(record())
    assert (table.job_ids, table.users, table.partitions) == (("1",), ("ada",), ("main",))
    assert table.states == ("COMPLETED",)
    assert [array.tolist() for array in (table.submit_s, table.start_s, table.end_s, table.limit_s, table.nodes,
                                         table.cpus)] == [[DAY], [DAY + 60], [DAY + 3660], [7200], [2], [8]]
    assert table.hostlists[table.hostlist[0]] == "n[1-2]"
    assert table.problems == table.notes == ()


def test_columns_in_any_order_with_other_names_and_a_trailing_separator():
    table = read(f"n[1-3]|x|{DAY + 9}|{DAY}|7|3|", header="NODELIST|JobName|End|Start|JobIDRaw|AllocNodes|")
    assert (table.job_ids, table.start_s.tolist(), table.nodes.tolist()) == (("7",), [DAY], [3])
    assert table.notes == ("no column User, Partition, State, Submit, Timelimit, NCPUS: taken as unknown",)


def test_lines_before_the_header_and_a_second_header():
    lines = ["sacct: some warning", HEADER, record("1"), "NodeList|End|Start|JobID", f"n9|{DAY + 2}|{DAY}|2"]
    table = read_job_records([f"{line}\r\n" for line in lines], "jobs.txt")
    assert (table.job_ids, [table.hostlists[i] for i in table.hostlist]) == (("1", "2"), ["n[1-2]", "n9"])


def test_steps_are_skipped_and_tasks_components_and_runs_are_jobs():
    waiting = {"Start": "Unknown", "End": "Unknown", "NodeList": "None assigned"}
    table = read(record("1"), record("1.batch", User=""), record("1.0"), record("2_3"),
                 record("2_[4-9%2]", **waiting), record("3+0"), record("3+1"), record("4", State="REQUEUED"),
                 record("4", Start=str(DAY + 4000), End="Unknown", State="RUNNING"))
    assert table.job_ids == ("1", "2_3", "2_[4-9%2]", "3+0", "3+1", "4", "4")
    assert table.has_run.tolist() == [True, True, False, True, True, True, True]
    assert (table.start_s[2], table.end_s[6]) == (-1, -1)
    assert table.notes == ("2 components of heterogeneous jobs: each is taken as a job",)
    assert table.problems == ()


def test_real_output_of_sacct(time_zone):
    time_zone("UTC")
    table = read_accounting_file(str(DATA / "sacct-22.05.txt"))
    assert len(table) == 15
    assert table.problems == ()
    assert [table.job_ids[i] for i in np.flatnonzero(~table.has_run)] == ["13", "5_[5-9]"]
    assert [table.states[table.state[i]] for i in (2, 12, 13)] == ["REQUEUED", "RUNNING", "CANCELLED"]
    assert table.limit_s[[0, 1, 4, 13]].tolist() == [365 * 86_400, -1, 86_400, -1]
    assert table.nodes.tolist() == [4, 2, 3, 1, 8, 2, 1, 1, 2, 2, 2, 2, 3, 2, 1]
    assert (table.end_s[0] - table.start_s[0], table.start_s[0]) == (8, 1_795_721_441)
    assert (table.start_s[13] == -1, table.end_s[13] > 0) == (True, True)


def test_records_that_cannot_be_used_are_counted_and_named():
    table = read(record("1"), "2|ada|main", record("3") + "|more", record("x7"), record("4", Start="yesterday"),
                 record("5", End=str(DAY + 59)), record("6", NodeList="None assigned"), record("7", Submit="?"),
                 record("8", Submit=str(DAY + 61)), record("9", Timelimit="long"), "", record("9"))
    assert table.job_ids == ("1", "6", "7", "8", "9")
    assert problems(table) == {
        "fewer fields than the header": (1, 3, "2|ada|main"),
        "more fields than the header": (1, 4, record("3") + "|more"),
        "an unreadable JobID": (1, 5, "x7"),
        "an unreadable Start or End": (1, 6, f"yesterday, {DAY + 3660}"),
        "End before Start": (1, 7, f"{DAY + 60}, {DAY + 59}"),
        "a run time but no nodes": (1, 8, record("6", NodeList="None assigned")),
        "an unreadable Submit": (1, 9, "?"),
        "Start before Submit": (1, 10, f"{DAY + 61}, {DAY + 60}"),
        "an unreadable Timelimit": (1, 11, "long"),
        "the JobID and Start of another record": (1, 11, "9")}
    assert table.submit_s.tolist() == [DAY, DAY, -1, -1, DAY]
    assert str(table.problems[0]) == ("1 record with fewer fields than the header: not used; the first is line 3: "
                                      "'2|ada|main'")


def test_of_repeated_records_the_one_with_the_later_end_is_used():
    running, ended = record("1", End="Unknown", State="RUNNING"), record("1")
    for lines in ((running, ended), (ended, running)):
        table = read(*lines, record("2"))
        assert sorted(zip(table.job_ids, table.end_s.tolist(), strict=True)) == [("1", DAY + 3660), ("2", DAY + 3660)]


def test_rounded_number_of_nodes_is_counted_in_the_node_list():
    table = read(record("1", NNodes="1K", NodeList="n[1-1030]"), record("2", NNodes="", NodeList="n[1-2"))
    assert table.nodes.tolist() == [1030, 0]


@pytest.mark.parametrize(("lines", "message"), [
    ([], "no header with fields separated by '|'; expected the output of `sacct -a -X -P"),
    (["JobID|Start|End"], "no column NodeList"),
    ([record()], "no column JobID, Start, End, NodeList"),
    ([HEADER], "no usable record: none follows the header"),
    ([HEADER, "1|x"], "no usable record: 1 record with fewer fields"),
    ([HEADER, record(Start="12:30:10", End="May 01")], "set SLURM_TIME_FORMAT=standard for sacct"),
])
def test_errors(lines, message):
    with pytest.raises(InputError, match=r"^jobs\.txt") as raised:
        read_job_records([f"{line}\n" for line in lines], "jobs.txt")
    assert message in str(raised.value)


def test_file_errors_and_binary_files(tmp_path):
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 50)
    for path in (tmp_path / "missing", tmp_path, tmp_path / "binary", "a\0b"):
        with pytest.raises(InputError):
            read_accounting_file(str(path))


def test_names_that_are_not_utf_8(tmp_path):
    (tmp_path / "jobs").write_bytes(b"\xef\xbb\xbf" + HEADER.encode() + b"\n" + record(User="J?").encode().replace(
        b"J?", b"J\xf6rg") + b"\n")
    assert read_accounting_file(str(tmp_path / "jobs")).users == ("J�rg",)


def test_times_with_zone_and_epoch_are_equal_in_every_time_zone(time_zone):
    texts = [str(DAY + 45_296), "2024-05-01T12:34:56Z", "2024-05-01T14:34:56+0200", "2024-05-01T07:04:56-05:30"]
    for zone in ("UTC", "America/New_York"):
        time_zone(zone)
        parser = TimestampParser()
        # the second time from the cache
        assert [parser.parse(text) for text in texts * 2] == [DAY + 45_296] * 8
        assert not parser.has_local_times


def test_local_times_when_clocks_change(time_zone):
    time_zone("Europe/Berlin")
    spring = read(record(Start="2024-03-31T01:30:00", End="2024-03-31T03:30:00", Submit="2024-03-31T01:00:00"))
    assert (spring.end_s - spring.start_s).tolist() == [3600]
    autumn = read(record("1", Start="2024-10-27T02:50:00", End="2024-10-27T02:10:00", Submit="2024-10-27T01:59:59"),
                  record("2", Start="2024-10-27T02:10:00", End="2024-10-27T02:50:00", Submit="2024-10-27T02:55:00"),
                  record("3", Start="2024-10-27T01:30:00", End="2024-10-27T03:30:00", Submit="2024-10-27T01:00:00"))
    # at 3:00 of summer time it was 2:00 again; job 2 was submitted before that and started after it
    assert (autumn.end_s - autumn.start_s).tolist() == [1200, 2400, 10_800]
    assert (autumn.start_s - autumn.submit_s).tolist() == [3001, 900, 1800]
    assert autumn.problems == ()
    assert "Europe/Berlin" not in autumn.notes[0] and "CET/CEST" in autumn.notes[0]


@pytest.mark.parametrize("text", ["2024-13-01T00:00:00", "2024-05-01T25:00:00", "2024-05-01T00:61:00",
                                  "2024-05-01T00:00:61", "2024-05-01", "01/05/24", "9" * 12, "-5",
                                  "0001-01-01T00:00:00"])
def test_other_times_are_refused(text):
    parser = TimestampParser()
    parser.parse("2024-05-01T00:00:00")
    with pytest.raises(ValueError, match=r"time|range|must be|year|hour"):
        parser.parse(text)


def test_time_limits():
    assert [parse_time_limit(text) for text in ("UNLIMITED", "Partition_Limit", "", "00:00:30", "2-03:04:05")] == [
        -1, -1, -1, 30, 183_845]
    with pytest.raises(ValueError, match="no time limit"):
        parse_time_limit("30")


def test_moments_of_options(time_zone):
    time_zone("UTC")
    assert [parse_moment(text, "--since", DAY) for text in (
        "2024-05-01", "2024-05-01T00:01", "2024-05-01T00:00:02", str(DAY), "now", "now-2days", "now-1hour")] == [
        DAY, DAY + 60, DAY + 2, DAY, DAY, DAY - 172_800, DAY - 3600]
    for text in ("yesterday", "2024-05", "now+1day", ""):
        with pytest.raises(UsageError, match="expected a time such as"):
            parse_moment(text, "--since", DAY)
