"""The allocation of a job, from its environment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmdl.errors import InputError, PlacementError, UsageError
from slurmdl.slurm.jobs import expand_counts, is_srun_task, read_allocation


@pytest.mark.parametrize(("text", "counts"), [
    ("4", (4,)), ("2(x3)", (2, 2, 2)), ("2(x3),1", (2, 2, 2, 1)), ("16,8(x2),16", (16, 8, 8, 16))])
def test_expand_counts(text, counts):
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "2(3)", "2(x3", "2(x3)1", "-1", "2,,1", "1" * 5000,
                                  "2(x" + "9" * 5000 + ")"])
def test_expand_counts_of_invalid_text_is_an_input_error(text):
    with pytest.raises(InputError, match="COUNT"):
        expand_counts(text)


@pytest.mark.parametrize("text", ["2(x262145)", "1,2(x262144)", "2(x999999999)"])
def test_number_of_counts_is_bounded(text):
    with pytest.raises(InputError, match=r"^'.*': more than 262144 counts$"):
        expand_counts(text)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 20)), min_size=1, max_size=8))
def test_expand_counts_of_folded_counts(runs):
    text = ",".join(f"{count}(x{repeats})" if repeats > 1 else str(count) for count, repeats in runs)
    assert expand_counts(text) == tuple(count for count, repeats in runs for _ in range(repeats))


JOB = {"SLURM_JOB_ID": "71", "SLURM_JOB_NODELIST": "n[1-3],login", "SLURM_JOB_CPUS_PER_NODE": "2(x3),1",
       "SLURM_TASKS_PER_NODE": "1(x4)"}


def test_read_allocation():
    allocation = read_allocation(JOB)
    assert allocation.job_id == 71 and allocation.nodes == ("n1", "n2", "n3", "login")
    assert allocation.cpus_per_node == (2, 2, 2, 1) and allocation.tasks_per_node == (1, 1, 1, 1)


def test_task_counts_of_a_step_are_ignored():
    assert read_allocation({**JOB, "SLURM_TASKS_PER_NODE": "2"}).tasks_per_node == ()


def test_outside_a_job_is_a_usage_error():
    with pytest.raises(UsageError, match="not inside a job"):
        read_allocation({})


@pytest.mark.parametrize("change", [{"SLURM_JOB_NODELIST": ""}, {"SLURM_JOB_CPUS_PER_NODE": ""},
                                    {"SLURM_JOB_CPUS_PER_NODE": "2(x3)"}, {"SLURM_JOB_NODELIST": "n[3-1]"},
                                    {"SLURM_TASKS_PER_NODE": "many"}, {"SLURM_JOB_ID": "1_2"}])
def test_malformed_environment_is_a_placement_error(change):
    with pytest.raises(PlacementError):
        read_allocation({**JOB, **change})


@pytest.mark.parametrize(("step_id", "expected"), [
    ("0", True), ("17", True), ("4294967280", True),
    ("4294967291", False), ("4294967290", False), ("-5", False), ("-6", False), ("", False)])
def test_batch_script_and_interactive_step_are_no_tasks_of_srun(step_id, expected):
    """Slurm 26.05 prints the IDs of special steps as negative numbers."""
    assert is_srun_task({"SLURM_STEP_ID": step_id}) is expected
    assert not is_srun_task({})
