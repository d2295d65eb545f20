"""Jobs as `scontrol -o show job` prints them."""

import pytest

from slurmdl.errors import InputError, UsageError
from slurmdl.slurm.job_record import JobRecord, parse_job_records

LINE = ("JobId={id} {more}JobName=a JobState=RUNNING UserId=me(1000) JobState=FAILED Requeue=1 Restarts=2 "
        "BatchFlag=1 Reboot=0 Partition=main,gpu ReqNodeList=n1 ExcNodeList=n[3-4,7] NodeList=n[1-2] NumNodes=2-4 "
        "Command=/home/me/job.sh --x=(null) BatchFlag=0 ")


def test_fields_of_a_job():
    """A job whose name and arguments look like fields changes none."""
    assert parse_job_records(LINE.format(id=7, more=""), "7") == [
        JobRecord("7", "RUNNING", True, True, 2, "me", ("main", "gpu"), ("n3", "n4", "n7"), ("n1",), 2)]


def test_components_of_a_heterogeneous_job():
    text = "\n".join(LINE.format(id=7 + i, more=f"HetJobId=7 HetJobOffset={i} ") for i in range(2))
    assert [job.job_id for job in parse_job_records(text, "7")] == ["7", "8"]


def test_array_needs_the_number_of_a_task():
    text = "\n".join(LINE.format(id=7 + i, more=f"ArrayJobId=7 ArrayTaskId={i} ") for i in range(2))
    with pytest.raises(UsageError, match=r"job 7 is an array; name one of its tasks, e\.g\. 7_0"):
        parse_job_records(text, "7")
    [task] = parse_job_records(text.splitlines()[1], "7_1")
    assert task.job_id == "8"


@pytest.mark.parametrize("text", ["", "slurm_load_jobs error", "JobId=7 JobState=RUNNING",
                                  LINE.format(id=7, more="").replace("NumNodes=2-4", "NumNodes=x")])
def test_malformed_output(text):
    with pytest.raises(InputError, match="scontrol show job 7: "):
        parse_job_records(text, "7")
