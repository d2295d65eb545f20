"""Traces of a replay: readers with good and bad input, and the Lublin-Feitelson generator."""

import gzip
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from slurmdl import files
from slurmdl.errors import InputError, UsageError
from slurmdl.history import traces
from slurmdl.history.accounting import read_job_records
from slurmdl.history.traces import parse_column_map, read_trace, trace_from_table

DATA = Path(__file__).parent / "data"
SWF_HEADER = "; MaxNodes: 64\n; MaxProcs: 256\n; UnixStartTime: 0\n"


def swf(submit, run, procs, requested=-1, limit=-1, status=1, user=7):
    return f"1 {submit} -1 {run} {procs} -1 -1 {requested} {limit} -1 {status} {user} 1 1 1 1 -1 -1\n"


def read(tmp_path, text, name="trace", **reading):
    path = tmp_path / name
    path.write_text(text)
    return read_trace(str(path), **reading)


def test_standard_workload_format(tmp_path):
    trace = read(tmp_path, SWF_HEADER + swf(10, 100, 9, limit=200) + swf(30, 50, -1, 4, user=8) + swf(40, 5, 8))
    assert trace.submit_s.tolist() == [0, 20, 30]
    assert trace.run_s.tolist() == [100, 50, 5]
    assert trace.limit_s.tolist() == [200, 50, 5]
    assert trace.nodes.tolist() == [3, 1, 2]  # 4 processors per node, whole nodes
    assert trace.user.tolist() == [0, 1, 0]
    assert "4 processors per node (MaxProcs / MaxNodes of the header)" in trace.notes[0]
    assert "2 jobs without a time limit: the run time is taken as the limit" in trace.notes
    assert read(tmp_path, SWF_HEADER + swf(1, 1, 9), cpus_per_node=2).nodes.tolist() == [5]


def test_bad_records_are_counted_named_and_skipped(tmp_path):
    text = SWF_HEADER + swf(50, 10, 4) + "1 2 3\n" + swf(-1, 10, 4) + swf(20, 10, 4) + swf(60, -1, 4) + \
        swf(60, 1e9, 4) + swf(60, 10, 0) + swf(61, 10, 4, status=3) + swf(70, 10, 4, limit=5) + "1 nan x\n"
    trace = read(tmp_path, text)
    assert trace.submit_s.tolist() == [0, 30, 50]
    notes = "\n".join(trace.notes)
    assert "2 records skipped, not 18 numbers: line 5, line 13" in notes
    assert "1 record skipped, no time of submission: line 6" in notes
    assert "2 records skipped, run time not above 0 s or above 366 days: line 8, line 9" in notes
    assert "1 record skipped, no nodes: line 10" in notes
    assert "1 record skipped, a part of a job: line 11" in notes
    assert "submission times go backwards at 1 record: sorted" in notes
    assert "1 job ran longer than the time limit" in notes


def test_jobs_larger_than_the_cluster_are_skipped(tmp_path):
    trace = read(tmp_path, "submit,run,nodes\n5,1,9\n10,10,2\n20,10,4\n30,10,1\n")
    kept = trace.without_jobs_above(3)
    assert kept.submit_s.tolist() == [0, 20]
    assert kept.notes[-1] == "2 jobs skipped: more than the cluster's 3 nodes, up to 9"
    with pytest.raises(InputError, match="no usable job: 4 jobs skipped"):
        trace.without_jobs_above(0)


ACME = """job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,queue,gpu_time
1,u1,2,16,128,Other,FAILED,2023-03-01 00:18:22+08:00,2023-03-01 00:18:54+08:00,2023-03-01 00:20:51+08:00,117,32,936
2,u2,1,8,128,Other,COMPLETED,2023-03-01 00:23:58+08:00,2023-03-01 00:24:11+08:00,2023-03-01 01:09:04+08:00,2693,13,1
3,u2,1,8,128,Other,CANCELLED,2023-03-01 00:24:58+08:00,,,0,0,0
"""


def test_csv_with_a_column_map(tmp_path):
    by_run = read(tmp_path, ACME, columns=parse_column_map("submit=submit_time,run=duration,nodes=node_num"))
    by_end = read(tmp_path, ACME, columns=parse_column_map("submit=submit_time,start=start_time,end=end_time,"
                                                           "nodes=node_num"))
    by_gpu = read(tmp_path, ACME, columns=parse_column_map("submit=submit_time,run=duration,gpus=gpu_num"),
                  gpus_per_node=4)
    assert by_run.run_s.tolist() == by_end.run_s.tolist() == [117, 2693]
    assert by_run.submit_s.tolist() == [0, 336]
    assert (by_run.nodes.tolist(), by_gpu.nodes.tolist()) == ([2, 1], [4, 2])
    assert "1 record skipped, an unreadable time or number: line 4" in by_end.notes


@pytest.mark.parametrize(("text", "columns", "message"), [
    ("a,b\n1,2\n", "", "expected columns submit, run .* the header has a, b"),
    ("submit,run,nodes\n1,2\nx,1,1\n", "", "1 record skipped, not 3 fields: line 2; 1 record skipped, an unread"),
    ("submit,run,nodes\n", "", "no usable job"),
    ("", "", "expected columns"),
    ("submit,run,n\n1,2,3\n", "nodes=size", "no column 'size'")])
def test_unusable_csv(tmp_path, text, columns, message):
    with pytest.raises(InputError, match=message):
        read(tmp_path, text, columns=parse_column_map(columns))


def test_usage_errors_of_columns(tmp_path):
    with pytest.raises(UsageError, match="expected FIELD=COLUMN"):
        parse_column_map("size=nodes")
    with pytest.raises(UsageError, match="--gpus-per-node: needed"):
        read(tmp_path, "submit,run,gpus\n1,2,3\n")


def test_sacct_records(tmp_path):
    header = "JobID|User|Partition|State|Submit|Start|End|Timelimit|NNodes|NCPUS|NodeList\n"
    rows = ["1|ann|p|COMPLETED|1000|1010|1070|00:02:00|2|8|n[1-2]",
            "2_1|bob|p|COMPLETED|1005|1010|1020|UNLIMITED|1|4|n3",
            "3|bob|p|NODE_FAIL|1006|1011|1021|00:01:00|1|4|n3", "3|bob|p|COMPLETED|1022|1030|1040|00:01:00|1|4|n4",
            "4|bob|p|PENDING|1007|Unknown|Unknown|00:01:00|9|4|None assigned",
            "5|bob|p|RUNNING|1008|1009|Unknown|00:01:00|1|4|n5"]
    trace = trace_from_table(read_job_records([header, *(f"{row}\n" for row in rows)], "x"))
    assert trace.submit_s.tolist() == [0, 5, 6, 22]
    assert trace.limit_s.tolist() == [120, 10, 60, 60]
    assert trace.nodes.tolist() == [2, 1, 1, 1]
    notes = "\n".join(trace.notes)
    for note in ("1 record of requeued jobs: each run is a job", "1 array task: each is a job",
                 "1 record skipped, never started: job 4", "1 record skipped, still running: job 5"):
        assert note in notes
    assert len(read(tmp_path, header + rows[0])) == 1


def test_json_of_sacct(tmp_path):
    text, from_json = (read_trace(str(DATA / f"sacct-24.11.5.{suffix}")) for suffix in ("txt", "json.gz"))
    for name in ("submit_s", "run_s", "limit_s", "nodes", "user"):
        assert getattr(text, name).tolist() == getattr(from_json, name).tolist()
    for content, message in (('\n{"a": 1}', r"trace:2: JSON without jobs; expected the output of `sacct --json`"),
                             ("[]", r"'\[' instead of '{'\); expected the output of `sacct --json`")):
        with pytest.raises(InputError, match=message):
            read(tmp_path, content)


def test_compressed_and_unreadable_files(tmp_path):
    path = tmp_path / "log.swf.gz"
    path.write_bytes(gzip.compress((SWF_HEADER + swf(1, 1, 1)).encode()))
    assert len(read_trace(str(path))) == 1
    path.write_bytes(b"\x1f\x8b broken")
    for name in (str(path), str(tmp_path), str(tmp_path / "missing"), "a\0b"):
        with pytest.raises(InputError, match="is damaged" if name == str(path) else "cannot be read"):
            read_trace(name)


def test_memory_of_a_trace_is_bounded(tmp_path, monkeypatch):
    """A small compressed file may hold any number of lines."""
    path = tmp_path / "log"  # compression is recognized by the content
    path.write_bytes(gzip.compress((SWF_HEADER + swf(1, 1, 1) * 1000).encode()))
    assert path.stat().st_size < 1000
    assert len(read_trace(str(path))) == 1000
    monkeypatch.setattr(traces, "MAX_LINES", 500)
    with pytest.raises(InputError, match=r"log: more than 500 lines; expected a shorter period"):
        read_trace(str(path))
    monkeypatch.setattr(files, "MAX_UNPACKED_BYTES", 10_000)
    with pytest.raises(InputError, match=r"log: unpacks to more than .* GiB; expected the records of a shorter"):
        read_trace(str(path))


def test_load_is_scaled_by_the_times_between_submissions(tmp_path):
    trace = read(tmp_path, "submit,run,nodes\n0,10,2\n5,10,2\n10,10,2\n")
    assert trace.load(4) == pytest.approx(1.5)
    scaled = trace.scaled_to_load(0.5, 4)
    assert scaled.load(4) == pytest.approx(0.5)
    assert scaled.submit_s.tolist() == [0, 15, 30]


def test_generated_sizes_and_run_times_have_the_published_means():
    generator = np.random.default_rng(0)
    sizes = traces.draw_sizes(generator, 40_000, 128)
    several = sizes[sizes > 1]
    assert (sizes == 1).mean() == pytest.approx(0.244, abs=0.01)
    # log2: 86 % uniform from 0.8 to 4.5, 14 % from 4.5 to 7; rounding hardly moves the mean
    assert np.log2(several).mean() == pytest.approx(0.86 * 2.65 + 0.14 * 5.75, abs=0.06)
    is_power = (several & (several - 1)) == 0
    # the others hit a power by chance when they are rounded, mostly small ones
    assert 0.576 < is_power.mean() < 0.8
    run = np.log(traces.draw_run_times(generator, np.ones(40_000, np.int64)))
    first = 0.78 - 0.0054
    assert run.mean() == pytest.approx(first * 4.2 * 0.94 + (1 - first) * 312 * 0.03, abs=0.05)
    # the first gamma no longer contributes to jobs of 150 nodes
    large = np.log(traces.draw_run_times(generator, np.full(5000, 150)))
    assert large.mean() == pytest.approx(312 * 0.03, abs=0.05)
    assert large.std() == pytest.approx(0.03 * 312 ** 0.5, abs=0.03)


def test_generated_arrivals_follow_the_day():
    weights = traces.daily_weights()
    assert weights.sum() == pytest.approx(1)
    # the mode of the gamma, (8.1737 - 1) x 3.9631 half hours after the cycle begins at 5:30
    assert abs(int(weights.argmax()) - (traces.CYCLE_BEGIN + (8.1737 - 1) * 3.9631) % 48) <= 1
    trace = traces.generate_lublin_trace(8000, 128, 0.5, 3)
    assert (np.diff(trace.submit_s) >= 0).all()
    hours = np.bincount((trace.submit_s % 86400 // 1800).astype(int), minlength=48)
    assert np.corrcoef(hours, weights)[0, 1] > 0.9


def test_generated_trace_is_deterministic_and_has_its_load():
    first, same, other = (traces.generate_lublin_trace(500, 64, 0.8, seed) for seed in (1, 1, 2))
    assert (first.submit_s == same.submit_s).all() and (first.limit_s == same.limit_s).all()
    assert not (first.run_s == other.run_s).all()
    assert first.load(64) == pytest.approx(0.8) and (first.limit_s >= first.run_s).all()
    with pytest.raises(UsageError, match="expected a number from 2"):
        traces.generate_lublin_trace(1, 64, 0.8, 0)


def test_a_pipe_can_be_read(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=("\n" + SWF_HEADER + swf(1, 1, 1),))
    writer.start()
    assert len(read_trace(str(path))) == 1
    writer.join()


@pytest.mark.parametrize("kind", ["", "sacct", "swf", "csv"])
def test_random_bytes_are_an_input_error(tmp_path, kind):
    generator = np.random.default_rng(0)
    path = tmp_path / "trace"
    for sample in (generator.bytes(3000), b'"' + b"x," * 90_000, b"[" * 50_000, b"submit,run,nodes\n1e400,-1,1e99\n"):
        path.write_bytes(sample)
        with pytest.raises(InputError):
            read_trace(str(path), kind)
