"""Jobs as `scontrol -o show job` prints them."""

import pytest

from slurmdl.errors import InputError, UsageError
from slurmdl.slurm.job_record import JobRecord, own_job_id, parse_job_records

LINE = ("JobId={id} {more}JobName=a JobState=RUNNING Reason=None UserId=me(1000) JobState=FAILED Requeue=1 "
        "Restarts=2 BatchFlag=1 Partition=main,gpu ReqNodeList=n1 ExcNodeList=n[3-4,7] NodeList=n[1-2] NumNodes=2-4 "
        "Command=/home/me/job.sh --x=(null) BatchFlag=0 ")


def test_fields_of_a_job():
    """A job whose name and arguments look like fields changes none."""
    assert parse_job_records(LINE.format(id=7, more=""), "7") == [
        JobRecord("7", "RUNNING", "None", True, True, 2, "me", ("main", "gpu"), ("n3", "n4", "n7"), ("n1",), 2)]


def test_components_of_a_heterogeneous_job():
    text = "\n".join(LINE.format(id=7 + i, more=f"HetJobId=7 HetJobOffset={i} ") for i in range(2))
    assert [job.job_id for job in parse_job_records(text, "7")] == ["7", "8"]


def test_array_needs_the_number_of_a_task():
    text = "\n".join(LINE.format(id=7 + i, more=f"ArrayJobId=7 ArrayTaskId={i} ") for i in range(2))
    with pytest.raises(UsageError, match=r"job 7 is an array; name one of its tasks, e\.g\. 7_0"):
        parse_job_records(text, "7")
    [task] = parse_job_records(text.splitlines()[1], "7_1")
    assert task.job_id == "7_1"


@pytest.mark.parametrize(("array_task", "job_id", "expected"), [
    ("3", "7", "7_3"),  # the last task that runs has the ID of the array
    ("3", "9", "7_3"), ("4-6%2", "7_5", "7_5")])
def test_one_task_of_an_array_has_an_id_of_its_own(array_task, job_id, expected):
    line = LINE.format(id=7, more=f"ArrayJobId=7 ArrayTaskId={array_task} ")
    assert parse_job_records(line, job_id)[0].job_id == expected


def test_pending_tasks_of_an_array_need_the_number_of_one():
    with pytest.raises(UsageError, match="job 7 is an array"):
        parse_job_records(LINE.format(id=7, more="ArrayJobId=7 ArrayTaskId=4-6%2 "), "7")


@pytest.mark.parametrize(("environ", "expected"), [
    ({}, ""), ({"SLURM_JOB_ID": "7"}, "7"),
    ({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, "7_3"),
    ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, "9")])
def test_own_job_id(environ, expected):
    assert own_job_id(environ) == expected


@pytest.mark.parametrize("text", ["", "slurm_load_jobs error", "JobId=7 JobState=RUNNING",
                                  LINE.format(id=7, more="").replace("NumNodes=2-4", "NumNodes=x")])
def test_malformed_output(text):
    with pytest.raises(InputError, match="scontrol show job 7: "):
        parse_job_records(text, "7")
