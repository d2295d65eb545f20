"""The states of a job with bad, slow or lost nodes, each transition, and the table in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurmdl.job_states import TRANSITIONS, Facts, JobState, next_state

PAGE = Path(__file__).parents[2] / "docs/health.md"
BAD = {"has_bad_nodes": True}


@pytest.mark.parametrize(("state", "facts", "expected"), [
    ("preflight", {}, "run"),
    ("preflight", {"can_requeue": True, "on_bad_nodes": "wait"}, "run"),
    ("preflight", BAD | {"has_spare_nodes": True, "can_requeue": True}, "excluded"),
    ("preflight", BAD | {"can_requeue": True}, "requeued"),
    ("preflight", BAD | {"can_requeue": True, "on_bad_nodes": "run"}, "requeued"),
    ("preflight", BAD, "given up"),
    ("preflight", BAD | {"on_bad_nodes": "wait"}, "given up"),
    ("preflight", BAD | {"on_bad_nodes": "run"}, "run"),
    ("run", {}, "run"),
    ("run", {"has_slow_rank": True}, "slow"),
    ("run", {"has_lost_rank": True, "has_slow_rank": True}, "lost"),
    ("slow", {"has_slow_rank": True, "can_requeue": True}, "run"),
    ("slow", {"has_slow_rank": True, "on_slow": "exclude"}, "run"),
    ("slow", {"has_slow_rank": True, "on_slow": "exclude", "can_requeue": True}, "requeued"),
    ("lost", {"has_lost_rank": True, "others_continue": True, "can_requeue": True}, "excluded"),
    ("lost", {"has_lost_rank": True, "can_requeue": True}, "requeued"),
    ("lost", {"has_lost_rank": True}, "given up"),
    ("excluded", BAD, "run"),
    ("requeued", BAD, "preflight"),
    ("given up", BAD | {"can_requeue": True}, "given up"),
])
def test_next_state(state, facts, expected):
    assert next_state(JobState(state), Facts(**facts)) is JobState(expected)


def test_every_state_but_the_last_is_left():
    assert {transition.state for transition in TRANSITIONS} == set(JobState) - {JobState.GIVEN_UP}
    for state in {transition.state for transition in TRANSITIONS}:
        last = [transition for transition in TRANSITIONS if transition.state is state][-1]
        assert state is JobState.RUN or last.holds(Facts()) or last.holds(Facts(has_bad_nodes=True))


def test_documentation_has_the_table():
    rows = [(transition.state.value, transition.condition, transition.next.value) for transition in TRANSITIONS]
    found = re.findall(r"^\| (\w[\w ]*) \| (.+) \| (\w[\w ]*) \|$", PAGE.read_text(), re.MULTILINE)
    words = {state.value for state in JobState}
    assert [row for row in found if row[0] in words and row[2] in words] == rows
