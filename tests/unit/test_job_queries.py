"""Jobs: the allocation in the environment, and records as squeue prints them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmdl.errors import InputError, PlacementError, UsageError
from slurmdl.slurm.jobs import (
    Allocation,
    JobRecord,
    expand_counts,
    fold_counts,
    is_srun_task,
    own_job_id,
    parse_job_records,
    read_allocation,
)


@pytest.mark.parametrize(("text", "expected"), [
    ("4", (4,)), ("2(x3)", (2, 2, 2)), ("2(x3),1", (2, 2, 2, 1)), ("16,8(x2),16", (16, 8, 8, 16)),
    *((text, "COUNT") for text in (
        "", "x", "2(3)", "2(x3", "2(x3)1", "-1", "2,,1", "1" * 5000, "2(x" + "9" * 5000 + ")")),
    *((text, "': more than 262144 counts") for text in ("2(x262145)", "1,2(x262144)", "2(x999999999)"))])
def test_expand_counts(text, expected):
    if isinstance(expected, tuple):
        assert expand_counts(text) == expected
    else:
        with pytest.raises(InputError, match=expected):
            expand_counts(text)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 20)), min_size=1, max_size=8))
def test_expand_counts_of_folded_counts(runs):
    counts = tuple(count for count, repeats in runs for _ in range(repeats))
    assert expand_counts(fold_counts(counts)) == counts
    text = ",".join(f"{count}(x{repeats})" for count, repeats in runs)
    assert expand_counts(text) == counts


JOB = {"SLURM_JOB_ID": "71", "SLURM_JOB_NODELIST": "n[1-3],login", "SLURM_JOB_CPUS_PER_NODE": "2(x3),1",
       "SLURM_TASKS_PER_NODE": "1(x4)"}


def test_read_allocation():
    allocation = read_allocation(JOB)
    assert allocation.job_id == 71 and allocation.nodes == ("n1", "n2", "n3", "login")
    assert allocation.cpus_per_node == (2, 2, 2, 1) and allocation.tasks_per_node == (1, 1, 1, 1)
    assert allocation.restricted_to({"n2", "login"}) == Allocation(71, ("n2", "login"), (2, 1))
    assert read_allocation({**JOB, "SLURM_TASKS_PER_NODE": "2"}).tasks_per_node == ()  # of a step


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"SLURM_JOB_ID": ""}, UsageError, "not inside a job"),
    *((change, PlacementError, "SLURM_JOB_NODELIST, SLURM_JOB_CPUS_PER_NODE: missing") for change in (
        {"SLURM_JOB_NODELIST": ""}, {"SLURM_JOB_CPUS_PER_NODE": ""}, {"SLURM_JOB_ID": "1_2"})),
    ({"SLURM_JOB_CPUS_PER_NODE": "2(x3)"}, PlacementError, "does not fit the job's 4 nodes"),
    ({"SLURM_JOB_NODELIST": "n[3-1]"}, PlacementError, "low bound"),
    ({"SLURM_TASKS_PER_NODE": "many"}, PlacementError, "expected COUNT")])
def test_malformed_environment(change, error, message):
    with pytest.raises(error, match=message):
        read_allocation({**JOB, **change})


@pytest.mark.parametrize(("step_id", "expected"), [
    ("0", True), ("17", True), ("4294967280", True),
    ("4294967291", False), ("4294967290", False), ("-5", False), ("-6", False), ("", False)])
def test_batch_script_and_interactive_step_are_no_tasks_of_srun(step_id, expected):
    """Slurm 26.05 prints the IDs of special steps as negative numbers."""
    assert is_srun_task({"SLURM_STEP_ID": step_id}) is expected
    assert not is_srun_task({})


#: formats of Slurm 22.05; the name, comment and command of a job are not in them
LINE = "{id}|{shown}|{array}|{task}|RUNNING|main,gpu|n[3-4,7]|n1|2|n[1-2]|n1|None"
LONG_LINE = "{id}|{het}|1|1|2                   "


def parse(*ids: int, job_id: str = "7", array: int | str = "", task: str = "N/A", het: str = "N/A",
          shown: str = "") -> list[JobRecord]:
    lines = [LINE.format(id=i, shown=shown or i, array=array or i, task=task) for i in ids]
    return parse_job_records("\n".join(lines), "\n".join(LONG_LINE.format(id=i, het=het) for i in ids), job_id)


def test_fields_of_a_job():
    assert parse(7) == [JobRecord("7", "RUNNING", "None", True, True, 2, ("main", "gpu"), ("n3", "n4", "n7"), ("n1",),
                                  2, ("n1", "n2"), "n1")]


@pytest.mark.parametrize(("ids", "fields", "expected"), [
    ((8, 7), {"het": "7"}, ["7", "8"]),  # squeue prints the leader of a heterogeneous job last
    ((8,), {"job_id": "7+1", "het": "7", "shown": "7+1"}, ["8"]),
    ((8,), {"job_id": "7_1", "array": 7, "task": "1"}, ["7_1"]),
    ((7,), {"job_id": "7", "array": 7, "task": "3"}, ["7_3"]),  # the last task that runs has the ID of the array
    ((7,), {"job_id": "9", "array": 7, "task": "3"}, ["7_3"]),
    ((7,), {"job_id": "7_5", "array": 7, "task": "4-6%2"}, ["7_5"]),
    ((7,), {"array": 7, "task": "4-6%2"}, "job 7 is an array"),
    ((7, 8), {"array": 7, "task": "0"}, r"job 7 is an array; name one of its tasks, e\.g\. 7_0"),
])
def test_ids_of_components_and_array_tasks(ids, fields, expected):
    if isinstance(expected, list):
        assert [job.job_id for job in parse(*ids, **fields)] == expected
    else:
        with pytest.raises(UsageError, match=expected):
            parse(*ids, **fields)


@pytest.mark.parametrize(("environ", "expected"), [
    ({}, ""), ({"SLURM_JOB_ID": "7"}, "7"),
    ({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, "7_3"),
    ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, "9")])
def test_own_job_id(environ, expected):
    assert own_job_id(environ) == expected


@pytest.mark.parametrize(("text", "long_text"), [
    ("", ""), ("slurm_load_jobs error", LONG_LINE), ("7|RUNNING", LONG_LINE), (LINE.format(
        id=7, shown=7, array=7, task="N/A"), LONG_LINE.format(id=8, het="N/A")),
    (LINE.format(id=7, shown=7, array=7, task="N/A").replace("|2|n", "|x|n"), LONG_LINE.format(id=7, het="N/A"))])
def test_malformed_output(text, long_text):
    with pytest.raises(InputError, match="squeue --jobs=7: "):
        parse_job_records(text, long_text, "7")
