"""What a caller may ask: one query, one answer, nothing changes.

`by` is the asking agent; None is the operator, or the program that owns the store.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from covenant.model.agent import AgentId
from covenant.model.peer import Demand
from covenant.model.protocol import State
from covenant.model.record import TaskState
from covenant.model.run import RunStatus, Wait


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


class GetDialog(_Query, frozen=True):
    """A task as the A2A protocol shows it. `direct`: also one that was answered by a message."""

    task_id: str
    history: int | None = None
    artifacts: bool = True
    direct: bool = False


class GetPlace(_Query, frozen=True):
    """Where a task stands in the log."""

    task_id: str


class ListDialogs(_Query, frozen=True):
    """The caller's tasks with one agent, the newest status first."""

    agent: str
    limit: int
    cursor: str | None = None
    context_id: str | None = None
    state: State | None = None
    since_ms: int | None = None
    history: int | None = None
    artifacts: bool = False


class ListInputs(_Query, frozen=True):
    """What the sender has said since the first message, for the holder; behind this number."""

    lease_id: str
    after: int = 0


class LoadRun(_Query, frozen=True):
    """For its holder, the steps behind this one."""

    lease_id: str
    after: int = 0


class LookAround(_Query, frozen=True):
    """For the holder of a run: what of this is there."""

    lease_id: str
    wait: Wait
    every: bool = False  # every signal that fits, and not the first for each pattern


class FindEntry(_Query, frozen=True):
    """For the holder of a run: the entry that was to be there once under this key."""

    lease_id: str
    key: str


class ListEntries(_Query, frozen=True):
    """The way from the root to a leaf, or to the last one; the newest, or those before a number."""

    task_id: str
    limit: int
    leaf: int | None = None
    before: int | None = None
    every: bool = False  # all there are, other branches too


class GetRun(_Query, frozen=True):
    task_id: str


class ListRuns(_Query, frozen=True):
    """Newest first."""

    limit: int
    status: RunStatus | None = None
    cursor: str | None = None


class GetPush(_Query, frozen=True):
    task_id: str
    config_id: str


class ListPushes(_Query, frozen=True):
    task_id: str


class GetPushed(_Query, frozen=True):
    """How far a task is, and how far each of its webhooks was told: for who tells them."""

    task_id: str


class GetCard(_Query, frozen=True):
    pubkey: str


class ListCards(_Query, frozen=True):
    limit: int
    cursor: str | None = None


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
    | GetDialog
    | GetPlace
    | ListDialogs
    | ListInputs
    | LoadRun
    | LookAround
    | FindEntry
    | ListEntries
    | GetRun
    | ListRuns
    | GetPush
    | ListPushes
    | GetPushed
    | GetCard
    | ListCards
)
