"""Marks of job starts."""

import os
import time

from slurmdl.health.job_marks import count_marks, mark_path, write_mark

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
