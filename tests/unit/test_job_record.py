"""Jobs as squeue prints them."""

import pytest

from slurmdl.errors import InputError, UsageError
from slurmdl.slurm.job_record import JobRecord, own_job_id, parse_job_records

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


def test_components_of_a_heterogeneous_job():
    """squeue prints the leader last."""
    assert [job.job_id for job in parse(8, 7, het="7")] == ["7", "8"]
    assert [job.job_id for job in parse(8, job_id="7+1", het="7", shown="7+1")] == ["8"]


def test_array_needs_the_number_of_a_task():
    with pytest.raises(UsageError, match=r"job 7 is an array; name one of its tasks, e\.g\. 7_0"):
        parse(7, 8, array=7, task="0")
    [task] = parse(8, job_id="7_1", array=7, task="1")
    assert task.job_id == "7_1"


@pytest.mark.parametrize(("array_task", "job_id", "expected"), [
    ("3", "7", "7_3"),  # the last task that runs has the ID of the array
    ("3", "9", "7_3"), ("4-6%2", "7_5", "7_5")])
def test_one_task_of_an_array_has_an_id_of_its_own(array_task, job_id, expected):
    assert parse(7, array=7, task=array_task, job_id=job_id)[0].job_id == expected


def test_pending_tasks_of_an_array_need_the_number_of_one():
    with pytest.raises(UsageError, match="job 7 is an array"):
        parse(7, array=7, task="4-6%2")


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
