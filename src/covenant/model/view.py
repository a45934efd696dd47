"""What callers get back: projections of records, never the records themselves."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from covenant.model.agent import AgentId
from covenant.model.content import Content
from covenant.model.message import Message
from covenant.model.protocol import State, TaskShown
from covenant.model.push import Push
from covenant.model.record import Asks, CacheKey, Outcome, TaskState
from covenant.model.task import Result, ResultStatus, Task


class Sent(Struct, frozen=True, gc=False):
    """The answer to a send. `duplicate`: this id was sent before; `replayed`: answered from the cache."""

    task_id: str
    generation: int
    duplicate: bool = False
    replayed: bool = False
    follows: str | None = None


class Delivery(Struct, frozen=True, gc=False):
    """A task with the lease under which it was handed over."""

    task: Task
    lease_id: str
    attempt: int
    generation: int


class Moved(Struct, frozen=True, gc=False):
    """A task and the generation that it has now."""

    task_id: str
    generation: int


class Dialog(Struct, frozen=True, gc=False):
    """A task as the A2A protocol shows it, with what stands beside it. `reply`: a message was all the answer;
    `is_hidden`: it may still come to that."""

    task: TaskShown
    generation: int
    state: State
    recipient: AgentId
    reply: Message | None = None
    is_hidden: bool = False


class Place(Struct, frozen=True, gc=False):
    """The last event of a task, the generation that it had then, and the conversation that it belongs to."""

    task_id: str
    order: int
    generation: int
    context_id: str


class Pushed(Struct, frozen=True, gc=False):
    """A task with its webhooks, secrets and all. `sender` is None when the task is gone; `is_direct`: it was answered
    by a message, and only of that is told."""

    sender: str | None
    generation: int
    is_over: bool
    pushes: Sequence[Push]
    is_direct: bool = False


class DialogPage(Struct, frozen=True, gc=False):
    tasks: list[TaskShown]
    total: int
    cursor: str | None = None


class Input(Struct, frozen=True, gc=False):
    """A message of the sender for whoever holds its task."""

    number: int
    message: Message


class Inputs(Struct, frozen=True, gc=False):
    """What the sender has said, behind a number; and whether it wants the work to end."""

    task_id: str
    generation: int
    inputs: list[Input]
    cancel_requested: bool = False
    cancel_reason: str | None = None


class Posted(Struct, frozen=True, gc=False):
    """The answer to a result. `duplicate`: the same result was there already."""

    task_id: str
    generation: int
    duplicate: bool = False
    sequence: int | None = None


class Answer(Struct, frozen=True, gc=False):
    """A result on its way to the sender, with what stands beside it."""

    result: Result
    generation: int
    attempt: int
    replayed: bool = False

    @property
    def task_id(self) -> str:
        return self.result.task_id

    @property
    def status(self) -> ResultStatus:
        return self.result.status

    @property
    def content(self) -> Sequence[Content]:
        return self.result.content

    @property
    def error_message(self) -> str | None:
        return self.result.error_message

    @property
    def is_final(self) -> bool:
        return self.result.status != "partial"


class QueueEntry(Struct, frozen=True, gc=False, omit_defaults=True):
    """One task with its state."""

    state: TaskState
    task: Task
    attempt: int
    generation: int
    sent_ms: int
    lease_id: str | None = None
    leased_to: AgentId | None = None
    leased_at_ms: int | None = None
    heartbeat_ms: int | None = None
    incarnation: str | None = None  # of the worker that holds it
    not_before_ms: int | None = None
    follows: str | None = None
    replayed: bool = False
    overdue: bool = False  # its deadline has passed
    cancel_requested: bool = False
    asks: Asks | None = None  # what the holder waits for
    outcome: Outcome | None = None
    finished_ms: int | None = None
    late_results: Sequence[Result] = ()
    of_run: bool = False  # a run asked for it, and hears its result


class QueuePage(Struct, frozen=True, gc=False):
    """`cursor` continues the listing of tasks; None means that it is complete."""

    tasks: list[QueueEntry]
    results: list[Answer]
    cursor: str | None = None


class TreeNode(Struct, frozen=True, gc=False):
    """A task and what hangs below it; `entry` is None for a root that is no task here."""

    id: str
    entry: QueueEntry | None
    children: list[TreeNode]


class Tree(Struct, frozen=True, gc=False):
    root: TreeNode
    size: int
    truncated: bool = False


class LeaseStatus(Struct, frozen=True, gc=False):
    """The answer to a heartbeat: go on, unless a cancel was asked for."""

    task_id: str
    lease_id: str
    attempt: int
    cancel_requested: bool = False
    cancel_reason: str | None = None


class Released(Struct, frozen=True, gc=False):
    task_id: str
    attempt: int
    generation: int


class Canceled(Struct, frozen=True, gc=False):
    """`state` is in_flight or parked when a graceful cancel has only asked the holder, or the run."""

    task_id: str
    state: TaskState
    generation: int


class QueueDepth(Struct, frozen=True, gc=False):
    """How many tasks are ready for one recipient."""

    recipient: AgentId
    depth: int


class CachedResult(Struct, frozen=True, gc=False):
    """One entry of the result cache; `id` is what `forget_cached` takes."""

    id: str
    cache_key: CacheKey
    result: Result
    source_task_id: str
    cached_ms: int
    expires_ms: int | None = None


class CachePage(Struct, frozen=True, gc=False):
    entries: list[CachedResult]
    cursor: str | None = None


class Compaction(Struct, frozen=True, gc=False):
    """What a compaction let go of."""

    tasks_dropped: int
    tombstones_dropped: int = 0
    segments_dropped: int = 0
    bytes_freed: int = 0
