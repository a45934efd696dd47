"""What is kept: the named records that commits change.

A record is a value. Only `rules.evolve` makes one, from the record before it and one event; everybody else reads. The
fields under "places" say where a record stands in the indexes of an engine, so that an engine needs no policy to keep
them: it compares the places before and after an event, and moves the record.

Keys are text: a task's is its id, the others carry a prefix.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal, TypeAlias

from msgspec import Struct

from covenant.model.agent import AgentId
from covenant.model.card import Card
from covenant.model.message import Artifact, Message
from covenant.model.peer import Grant, Peer
from covenant.model.push import PUSH_PREFIX, Push
from covenant.model.run import (
    ENTRY_PREFIX,
    MARK_PREFIX,
    RUN_PREFIX,
    SIGNAL_PREFIX,
    STEP_PREFIX,
    Entry,
    Mark,
    Run,
    Signal,
    Step,
    run_key,
)
from covenant.model.task import Result, Task

Key: TypeAlias = str

SLOT_PREFIX: Final = "slot:"
PART_PREFIX: Final = "part:"
SAID_PREFIX: Final = "said:"
CHUNK_PREFIX: Final = "chunk:"
LATE_PREFIX: Final = "late:"
SEND_KEY_PREFIX: Final = "key:"
HORIZON_KEY: Final = "horizon"
HEAD_KEY: Final = "head"
_NAMING_PREFIXES: Final = (  # a task's id follows, and something of the piece's own
    PART_PREFIX,
    SAID_PREFIX,
    CHUNK_PREFIX,
    LATE_PREFIX,
    PUSH_PREFIX,
    STEP_PREFIX,
    ENTRY_PREFIX,
    MARK_PREFIX,
    SIGNAL_PREFIX,
)
PIECE_PREFIXES: Final = (*_NAMING_PREFIXES, RUN_PREFIX, SEND_KEY_PREFIX)


class TaskState(StrEnum):
    QUEUED = "queued"
    IN_FLIGHT = "in_flight"
    PARKED = "parked"  # a run that waits: nobody holds it
    RESULT_PENDING = "result_pending"
    RESOLVED = "resolved"


class Outcome(StrEnum):
    """How a task ended."""

    ANSWERED = "answered"
    FORCED = "forced"
    CANCELED = "canceled"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    REJECTED = "rejected"


class Asks(StrEnum):
    """What a holder needs from the other side before it goes on."""

    INPUT = "input"
    AUTH = "auth"


class Cascade(StrEnum):
    """Whether a cancel goes down to the children."""

    NONE = "none"
    PENDING = "pending"
    DONE = "done"


class Lease(Struct, frozen=True, gc=False):
    """One attempt at a task, held by one incarnation of one worker."""

    lease_id: str
    holder: AgentId
    incarnation: str
    leased_ms: int
    seen_ms: int  # the last sign of life: the lease itself, a heartbeat, or progress
    seen_order: int
    is_used: bool = False  # its holder has acted under it, and so has heard of it


class TaskRecord(Struct, gc=False, omit_defaults=True):
    """A task and all that happened to it."""

    task: Task
    sender: str
    recipient: str
    sent_ms: int
    sent_order: int
    state: TaskState = TaskState.QUEUED
    generation: int = 1
    attempt: int = 0
    leased_order: int = 0  # its first lease: from then on its recipient knows of it
    slot: str | None = None
    replayed: bool = False
    lease: Lease | None = None
    lease_history: tuple[str, ...] = ()
    incarnation: str = ""  # of the last holder
    partials: int = 0  # of the current lease
    partials_total: int = 0
    cancel_reason: str | None = None  # a graceful cancel was asked for
    cancel_cascade: bool = False  # and is to take the children along
    cascade: Cascade = Cascade.NONE
    not_before_ms: int | None = None
    outcome: Outcome | None = None
    result: Result | None = None
    finished_ms: int = 0
    resolved_ms: int = 0  # when its result was drained
    given_back: int = 0  # how often whoever had drained it was not there any more
    order: int = 0  # the last event that touched it
    run: str | None = None  # whose task it is: the result is for that run alone
    run_step: int = 0  # in which it was sent
    is_run: bool = False  # a durable agent has begun with it

    # what the A2A protocol shows
    protocol: bool = False  # sent by it: the result is read there, and drained by nobody
    shown: bool = False  # a client knows of it, or more was done than to take it: a task it stays
    direct: bool = False  # answered by a message: there is no task to be seen
    asks: Asks | None = None  # what the holder waits for
    said: int = 0  # messages since the first, of either side
    heard: int = 0  # those of the sender
    note: int = 0  # which of them stands beside the status
    chunks: int = 0  # of artifacts
    artifacts: tuple[str, ...] = ()  # those that were begun
    receipts: tuple[str, ...] = ()  # under which the holder said something: said again, it is the same
    status_ms: int = 0
    status_order: int = 0

    # places
    ready_for: str | None = None
    ready_order: int = 0
    waits_on: str | None = None
    answer_for: str | None = None
    answer_order: int = 0
    due_ms: int | None = None


class Part(Struct, gc=False, omit_defaults=True):
    """A partial result on its way to the sender."""

    result: Result
    sender: str
    attempt: int
    number: int  # within its lease
    generation: int
    order: int

    # places
    answer_for: str | None = None
    answer_order: int = 0

    given_back: int = 0  # as in a task


class Said(Struct, gc=False, omit_defaults=True):
    """A message in the history of a task, after the first."""

    message: Message
    at_ms: int
    order: int


class Chunk(Struct, gc=False, omit_defaults=True):
    """A piece of an artifact, or a whole one."""

    artifact: Artifact
    order: int
    append: bool = False
    last: bool = False


class Late(Struct, gc=False, omit_defaults=True):
    """A result of a superseded lease: for the operator to see, never delivered."""

    result: Result
    posted_by: str
    posted_ms: int
    order: int


class SendKey(Struct, gc=False, omit_defaults=True):
    """A key under which a message was sent: the task that it made or was added to, and what stands for its content. It
    goes with that task."""

    task_id: str
    digest: str
    order: int


class CacheKey(Struct, frozen=True, gc=False):
    sender: str
    recipient: str
    kind: str
    key: str


class Slot(Struct, gc=False, omit_defaults=True):
    """One idempotency key: the task that is doing the work, then its cached result."""

    cache_key: CacheKey
    digest: str
    leader: str | None
    result: Result | None = None
    source: str | None = None  # the task whose result is cached
    cached_ms: int = 0
    order: int = 0

    # places
    due_ms: int | None = None


class Horizon(Struct, gc=False):
    """An explicit compaction: what was resolved before this moment, and before this event, was dropped."""

    resolved_before_ms: int
    order: int = 0


class SignedHead(Struct, gc=False):
    """The end of the chain as the realm's key last vouched for it."""

    seq: int
    hash: str
    signature: str
    pubkey: str
    order: int = 0


class Tombstone(Struct, gc=False):
    """What stays of a task after retention, so that its id is not taken for a new one."""

    digest: str
    sender: str
    recipient: str
    resolved_ms: int
    order: int = 0  # of the task when it was buried


Record: TypeAlias = (
    TaskRecord
    | Part
    | Said
    | Chunk
    | Push
    | Card
    | Late
    | Slot
    | Horizon
    | Peer
    | Grant
    | SignedHead
    | Run
    | Step
    | Entry
    | Mark
    | Signal
    | SendKey
)

OF_A_TASK: Final = frozenset((Part, Said, Chunk, Late, Push, Run, Step, Entry, Mark, Signal, SendKey))  # go with it


def piece_ranges(task_id: str) -> list[tuple[Key, Key]]:
    """Where the keys of what belongs to a task lie, from the first up to the second. Send keys do not tell."""
    named = [f"{prefix}{task_id}" for prefix in _NAMING_PREFIXES]
    return [(run_key(task_id), f"{run_key(task_id)}:"), *((f"{name}:", f"{name};") for name in named)]


def owner_of(key: Key, of: object) -> Key:
    """The task that a record, or the event that brings it, belongs to. A send key names it inside, the others by their
    key."""
    named: str | None = getattr(of, "task_id", None)
    return named or key.split(":")[1]


def part_key(task_id: str, number: int | Literal[""]) -> Key:
    """Without a number, what all of a task's begin with; likewise the next two."""
    return f"{PART_PREFIX}{task_id}:{number}"


def said_key(task_id: str, number: int | Literal[""]) -> Key:
    return f"{SAID_PREFIX}{task_id}:{number}"


def chunk_key(task_id: str, number: int | Literal[""]) -> Key:
    return f"{CHUNK_PREFIX}{task_id}:{number}"


def late_key(task_id: str, lease_id: str, status: str) -> Key:
    """One for each lease, and one more for its progress."""
    return f"{LATE_PREFIX}{task_id}:{lease_id}{':partial' if status == 'partial' else ''}"
