"""What a caller may ask: one query, one answer, nothing changes.

`by` is the asking agent; None is the operator, or the program that owns the store.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from covenant.model.agent import AgentId
from covenant.model.peer import Demand
from covenant.model.record import TaskState


class _Query(Struct, frozen=True, gc=False):
    by: AgentId | None


class GetTask(_Query, frozen=True):
    task_id: str


class GetResult(_Query, frozen=True):
    task_id: str


class GetTree(_Query, frozen=True):
    """Below a task, or below an intent that is no task."""

    root: str


class RecentTasks(_Query, frozen=True):
    limit: int


class RecentResults(_Query, frozen=True):
    limit: int


class ListQueue(_Query, frozen=True):
    limit: int
    state: TaskState | None = None
    min_lease_age_ms: int | None = None
    deadline_within_ms: int | None = None
    cursor: str | None = None


class DeepQueues(_Query, frozen=True):
    """The recipients for whom more than so many tasks are ready."""

    over: int


class ListCached(_Query, frozen=True):
    limit: int
    cursor: str | None = None


class ListPeers(_Query, frozen=True):
    limit: int
    cursor: str | None = None


class ListGrants(_Query, frozen=True):
    """Those of one subject, or of everybody."""

    limit: int
    subject: str | None = None
    cursor: str | None = None


class CheckGrant(_Query, frozen=True):
    """Which grant of the subject, if any, covers this demand."""

    subject: str
    demand: Demand


Query: TypeAlias = (
    GetTask
    | GetResult
    | GetTree
    | RecentTasks
    | RecentResults
    | ListQueue
    | DeepQueues
    | ListCached
    | ListPeers
    | ListGrants
    | CheckGrant
)
