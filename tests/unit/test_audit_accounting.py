"""Records of sacct: columns, times, and records that cannot be used."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import random
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from slurmdl import files
from slurmdl.errors import InputError, UsageError
from slurmdl.history import accounting, sacct_format
from slurmdl.history.accounting import JobTable, read_accounting_file, read_accounting_stream, read_job_records
from slurmdl.history.sacct_format import TimestampParser, parse_moment, parse_time_limit

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


def rows(table: JobTable) -> list[tuple[object, ...]]:
    """All values of the records that ran, by job and start."""
    return sorted((table.job_ids[i], table.users[table.user[i]], table.partitions[table.partition[i]],
                   table.states[table.state[i]], *(int(column[i]) for column in (
                       table.submit_s, table.start_s, table.end_s, table.limit_s, table.nodes, table.cpus)),
                   table.hostlists[table.hostlist[i]]) for i in np.flatnonzero(table.has_run).tolist())


def read_bytes(content: bytes) -> JobTable:
    return read_accounting_stream(io.BufferedReader(io.BytesIO(content)), "jobs")


def json_job(job_id: int = 1, **values: object) -> dict[str, object]:
    times = {"submission": DAY, "start": DAY + 60, "end": DAY + 3660, "limit": {"set": True, "number": 120}}
    return {"job_id": job_id, "user": "ada", "partition": "main", "nodes": "n[1-2]", "allocation_nodes": 2,
            "state": {"current": ["COMPLETED"]}, "time": times, "steps": [],
            "tres": {"allocated": [{"type": "cpu", "count": 8}], "requested": []}, **values}


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
                 record("2_[4-9%2]", **waiting), record("3+0"), record("900_0+1"), record("4", State="REQUEUED"),
                 record("4", Start=str(DAY + 4000), End="Unknown", State="RUNNING"))
    assert table.job_ids == ("1", "2_3", "2_[4-9%2]", "3+0", "900_0+1", "4", "4")
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


@pytest.mark.parametrize("release", ["22.05.8", "24.11.5", "26.05.5"])
def test_real_json_has_the_records_of_the_real_text(release, time_zone):
    time_zone("UTC")
    text, from_json = (read_accounting_file(str(DATA / f"sacct-{release}.{suffix}")) for suffix in ("txt", "json.gz"))
    expected = rows(text)
    if release == "22.05.8":  # it names the users of associations only
        expected = [(row[0], "", *row[2:]) for row in expected]
    assert rows(from_json) == expected and len(expected) == 11
    assert text.problems == from_json.problems == ()
    assert sorted(text.job_ids)[1:3] == ["10_[5-9]", "11"] and sorted(from_json.job_ids)[1:3] == ["10_[0x3E0]", "11"]
    assert [from_json.nodes[from_json.job_ids.index(job)] for job in ("10_[0x3E0]", "11")] == [4, 4]
    # job 2 is named a|b,c;d^e
    assert text.notes[-1] == "1 record with the delimiter in JobName: read as one field; the first is line 3"


def test_values_of_json():
    infinite, unset = {"set": False, "infinite": True, "number": 0}, {"set": False, "infinite": False, "number": 7}
    array = {"job_id": 5, "task_id": {"set": True, "number": 0}, "task": ""}
    het = {"job_id": 7, "job_offset": {"set": True, "number": 1}}
    times = {"submission": DAY, "start": {"set": True, "number": DAY + 1}, "end": 0}
    jobs = [json_job(6, array=array, het={"job_id": 0, "job_offset": unset}, user=None, association={"user": "bob"}),
            json_job(8, array={"job_id": 0, "task_id": unset}, het=het, time={**times, "limit": infinite}),
            json_job(8, array=array, het={"job_id": 900, "job_offset": 0}, state={"current": "CANCELLED"}),
            json_job(9, time={**times, "start": 2**32 - 2, "limit": 2**32 - 1}, nodes="", tres=None,
                     user="a\x1fb\n\ud800"),
            json_job(10, state={"current": ["PENDING", "REQUEUED"]})]
    table = read_bytes(json.dumps({"meta": {"jobs": []}, "jobs": jobs, "errors": []}).encode())
    assert table.job_ids == ("5_0", "7+1", "5_0+0", "9", "10")
    assert [table.users[i] for i in table.user] == ["bob", "ada", "ada", "a?b??", "ada"]
    assert [table.states[i] for i in table.state] == ["COMPLETED", "COMPLETED", "CANCELLED", "COMPLETED", "REQUEUED"]
    assert (table.start_s[[0, 1, 3]].tolist(), table.end_s[[0, 1]].tolist()) == ([DAY + 60, DAY + 1, -1],
                                                                               [DAY + 3660, -1])
    assert (table.limit_s.tolist(), table.cpus.tolist()) == ([7200, -1, 7200, -1, 7200], [8, 8, 8, 0, 8])
    assert table.notes == ("2 components of heterogeneous jobs: each is taken as a job",)


@pytest.mark.parametrize("indent", [None, 2])
def test_json_is_read_in_pieces_of_any_size(indent, monkeypatch):
    content = json.dumps({"jobs": [json_job(i, name='a"}]{|' * (i % 3)) for i in range(1, 60)]}, indent=indent)
    monkeypatch.setattr(sacct_format, "_CHUNK_CHARS", 7)
    monkeypatch.setattr(accounting, "_MAX_LINE_CHARS", 7)
    # two outputs, one after the other
    table = read_bytes(b"\xef\xbb\xbf\n" + f"{content}\n{content}\n".encode())
    assert table.job_ids == tuple(map(str, range(1, 60)))
    assert problems(table)["the JobID and Start of another record"] == (59, 4 if indent else 2, "1")


def test_memory_of_json_does_not_grow_with_its_steps():
    job = json.dumps(json_job(steps=[{"name": "x" * 200_000}]))

    class Jobs(io.RawIOBase):
        """A long output that does not exist as a whole."""

        def __init__(self) -> None:
            self.pieces = itertools.chain(['{"jobs": ['], (f"{job}," for _ in range(100)), [f"{job}]}}"])
            self.rest = b""

        def readable(self) -> bool:
            return True

        def readinto(self, buffer) -> int:
            self.rest = self.rest or next(self.pieces, "").encode()
            count = min(len(buffer), len(self.rest))
            buffer[:count], self.rest = self.rest[:count], self.rest[count:]
            return count

    tracemalloc.start()
    try:
        table = read_accounting_stream(io.BufferedReader(Jobs()), "jobs")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(table) == 1 and peak < 10e6 < 101 * len(job)


@pytest.mark.parametrize(("content", "message"), [
    ('{"jobs": [{"job_id": 1, "nodes": "n1"}]}', "jobs:1: a job without time and nodes; expected the output"),
    ('{\n"jobs": [1]}', "jobs:2: a job without time and nodes; expected the output of `sacct --json`"),
    ('{"nodes": []}', "jobs:1: JSON without jobs; expected the output of `sacct --json`"),
    ('{"jobs": {}}', "no usable record: none follows the header"),
    ('[{"jobs": []}]', "jobs:1: not readable as JSON ('[' instead of '{'); expected"),
    ('{"jobs": []} x', "jobs:1: not readable as JSON ('x' instead of '{'); expected"),
    ('{"jobs": []', "jobs:1: not readable as JSON (ends early); expected"),
    ('{"jobs": [{"job_id": 1, "na', "jobs:1: not readable as JSON (ends early); expected"),
    ('{"jobs": [{"job_id": tru}' + " " * 50, "jobs:1: not readable as JSON (Expecting value); expected"),
    ('{"a":' + "[" * 200_000, "jobs:1: not readable as JSON (nested too deeply); expected"),
    ('{"jobs": [' + '{"time": {}, "nodes": "n1"}]}', "no usable record: 1 record with an unreadable JobID"),
])
def test_json_that_is_not_of_sacct(content, message):
    with pytest.raises(InputError) as raised:
        read_bytes(content.encode())
    assert message in str(raised.value)


def test_one_value_of_json_is_bounded(monkeypatch):
    monkeypatch.setattr(sacct_format, "_MAX_VALUE_CHARS", 5_000)
    monkeypatch.setattr(sacct_format, "_CHUNK_CHARS", 1_000)
    monkeypatch.setattr(accounting, "_MAX_LINE_CHARS", 1_000)
    with pytest.raises(InputError, match="a value of more than 5,000 characters"):
        read_bytes(json.dumps({"jobs": [json_job(name="x" * 20_000)]}).encode())


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "^", "~|~", ":", "#"])
def test_other_delimiters(delimiter):
    # times are in epoch seconds, but a colon occurs in the time limit
    limit = "02:00:00" if delimiter != ":" else "UNLIMITED"
    lines = [HEADER, record("1", NodeList="n[1,4-5],m2", NNodes="4", Timelimit=limit), record("1.0", Timelimit=limit),
             record("2", State="CANCELLED by 7", Timelimit=limit)]
    table = read_job_records([f"{line.replace('|', delimiter)}\n" for line in lines], "jobs.txt")
    assert (table.job_ids, table.hostlists, table.problems) == (("1", "2"), ("n[1,4-5],m2", "n[1-2]"), ())
    assert table.notes == ()


def named(name: str, job_id: str, delimiter: str, **fields: str) -> str:
    job, _, rest = record(job_id, **fields).partition("|")
    return f"{job}|{name}|{rest}".replace("|", delimiter).replace(name.replace("|", delimiter), name)


@pytest.mark.parametrize("delimiter", ["|", ",", ";", "\t", "^"])
def test_a_job_name_with_the_delimiter_is_one_field(delimiter):
    header = HEADER.replace("JobID|", "JobID|JobName|").replace("|", delimiter)
    names = ("train", delimiter, f"a{delimiter}b", f"{DAY}{delimiter}{DAY}", delimiter * 3)
    lines = [named(name, str(i + 1), delimiter, NodeList="n[1,3]") for i, name in enumerate(names)]
    table = read(*lines, named(f"x{delimiter}y", "3.batch", delimiter), header=header)
    assert (table.job_ids, table.users, table.hostlists) == (("1", "2", "3", "4", "5"), ("ada",), ("n[1,3]",))
    assert table.problems == ()
    assert table.notes == ("4 records with the delimiter in JobName: read as one field; the first is line 3",)


def test_a_delimiter_in_one_of_several_texts_is_counted_if_it_has_no_single_meaning():
    header = f"{HEADER}|Comment|JobName"
    lines = [f"{record('1')}|x|y", f"{record('2')}|x|y|z"]
    table = read(*lines, header=header)
    assert table.job_ids == ("1",)
    assert problems(table)["more fields than the header"] == (1, 3, lines[1])
    # the user between the two texts says which of them has it
    header = f"Comment|User|JobName|{HEADER}".replace("JobID|User|", "JobID|")
    rest = record("3").replace("|ada|", "|")
    table = read(f"x|a b|ada|y|{rest}", f"x|ada|y|z|{rest.replace('3|', '4|', 1)}", header=header)
    assert (table.job_ids, table.users) == (("3",), ("ada",))


def test_no_record_of_random_names_is_lost_without_a_word():
    generator = random.Random(5)
    for delimiter in "|,;^\t":
        header = HEADER.replace("JobID|", "JobID|JobName|").replace("|", delimiter)
        names = ["".join(generator.choices(f"a1{delimiter}[]-.", k=generator.randrange(1, 9))) for _ in range(200)]
        lines = [named("@", str(i + 1), delimiter, NodeList="n[1,3],m1", NNodes="3").replace("@", name, 1)
                 for i, name in enumerate(names)]
        table = read(*lines, header=header)
        assert len(table) + sum(problem.count for problem in table.problems) == 200
        assert len(table) > 190 and table.hostlists == ("n[1,3],m1",) and table.users == ("ada",)


def test_gzip_of_text_and_its_bounds(tmp_path, monkeypatch):
    content = "\n".join([HEADER, *(record(str(i)) for i in range(1, 200))]).encode()
    (tmp_path / "jobs.gz").write_bytes(gzip.compress(content[:5000]) + gzip.compress(content[5000:]))
    assert len(read_accounting_file(str(tmp_path / "jobs.gz"))) == 199
    for damaged in (gzip.compress(content)[:-10], gzip.compress(content)[:300],
                    gzip.compress(content)[:-6] + b"abcdef", b"\x1f\x8b\x07"):
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(InputError, match="damaged: is damaged"):
            read_accounting_file(str(tmp_path / "damaged"))
    monkeypatch.setattr(files, "MAX_UNPACKED_BYTES", 10_000)
    with pytest.raises(InputError, match=r"unpacks to more than .* GiB; expected the records of a shorter"):
        read_accounting_file(str(tmp_path / "jobs.gz"))


def test_number_of_records_is_bounded(monkeypatch):
    monkeypatch.setattr(accounting, "_MAX_RECORDS", 2)
    assert len(read(record("1"), record("2"), record("2.0"))) == 2
    with pytest.raises(InputError, match=r"jobs\.txt:4: more than 2 records; expected a shorter period"):
        read(record("1"), record("2"), record("3"))


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
    ([], "jobs.txt: is empty; expected the output of `sacct -a -X -P"),
    (["JobID    User   Start  End  NodeList"], "columns that are separated by blanks; expected the output of `sacct"),
    (["a;b;c"], "no header of sacct; expected the output of `sacct -a -X -P"),
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
    texts = [str(DAY + 45_296), "2024-05-01T12:34:56Z", "2024-05-01T14:34:56+0200", "2024-05-01T07:04:56-05:30",
             "2024-05-01 12:34:56Z", "2024-05-01 14:34:56 +02:00", "2024-05-01T11:34:56-01"]
    for zone in ("UTC", "America/New_York"):
        time_zone(zone)
        parser = TimestampParser()
        # the second time from the cache
        assert [parser.parse(text) for text in texts * 2] == [DAY + 45_296] * 14
        assert not parser.has_local_times


def test_local_times_with_a_blank(time_zone):
    time_zone("Europe/Berlin")
    first, second = (read(record("1", Submit=f"2024-10-27{t}01:59:59", Start=f"2024-10-27{t}02:50:00",
                                 End=f"2024-10-27{t}02:10:00")) for t in "T ")
    assert rows(first) == rows(second) and second.end_s - second.start_s == [1200]
    assert first.notes == second.notes


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
    with pytest.raises(ValueError, match="not a time limit"):
        parse_time_limit("30")


def test_moments_of_options(time_zone):
    time_zone("UTC")
    assert [parse_moment(text, "--since", DAY) for text in (
        "2024-05-01", "2024-05-01T00:01", "2024-05-01T00:00:02", str(DAY), "now", "now-2days", "now-1hour")] == [
        DAY, DAY + 60, DAY + 2, DAY, DAY, DAY - 172_800, DAY - 3600]
    for text in ("yesterday", "2024-05", "now+1day", ""):
        with pytest.raises(UsageError, match="expected a time such as"):
            parse_moment(text, "--since", DAY)
