"""Message tags."""

from __future__ import annotations

from enum import IntEnum


class Tag(IntEnum):
    """Tags of messages that may be in flight at the same time."""

    #: step messages of every strategy, and the last bucket of allreduce; a rank that has ended probes for it
    STEP = 0
    PUSH = 1
    SHARD_BACKUP = 2
    CHECKPOINT = 3
    ASYNC_PS = 4
    WORK_REQUEST = 5
    WORK_GRANT = 6
    STEP_TIME = 7
    #: of the watchdog
    ROLL_CALL = 8
    ROLL_ANSWER = 9
    #: of the backend torch, sent when a rank ends
    END_OF_RANK = 999
    #: first of the tags of allreduce buckets
    FIRST_BUCKET = 10
    #: never sent
    UNUSED = 1000
    #: first of the tags of exchanges that overlap with steps, one for each piece of the model
    FIRST_OVERLAPPED = 2000
