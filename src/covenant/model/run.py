"""A run: the agent's view of a task. What a durable agent has said, asked for and remembered. (Contract 18-24.)

A run has its task's id. What it gathers lies in numbered records of their own, so that a pause costs what it adds, and
nothing that was there before: entries, the steps in which the run went on, and the signals that wait for it. Values of
the agent's own are JSON that nobody here looks into.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final, Literal

from msgspec import UNSET, Raw, Struct, UnsetType

from covenant.model.message import Message
from covenant.model.task import Result, Task

RUN_PREFIX: Final = "run:"
STEP_PREFIX: Final = "step:"
ENTRY_PREFIX: Final = "entry:"
MARK_PREFIX: Final = "mark:"
SIGNAL_PREFIX: Final = "signal:"

MESSAGE: Final = "message"  # the name under which a plain message of the task's sender comes in
EFFECT: Final = "effect:"  # begins the names under which decisions about effects come in; nobody else uses it
NOTHING: Final = Raw(b"null")  # what a value is where there is none


class EntryRole(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL_RESULT = "tool_result"


class EntryType(StrEnum):
    MESSAGE = "message"
    LLM_CALL = "llm_call"
    INJECTION = "injection"
    COMPACTION = "compaction"  # stands for all that came before it
    BRANCH_SUMMARY = "branch_summary"


class RunStatus(StrEnum):
    """How a run looks to who asks: the two sorts of waiting are told apart, and so is what nobody can know."""

    QUEUED = "queued"
    RUNNING = "running"
    AWAITING_WORK = "awaiting_work"
    AWAITING_INPUT = "awaiting_input"
    EFFECT_IN_DOUBT = "effect_in_doubt"
    CHILD_IN_DOUBT = "child_in_doubt"
    WOKEN = "woken"  # to be taken up by a worker
    ENDED = "ended"


class Entry(Struct, gc=False, omit_defaults=True):
    """One thing that was said or done, for people to read and for the agent to go on from. Its parent is the number of
    another, 0 at the root; None is the one before it. The content of what the dialog holds already is there: `said` is
    its number, 0 the task's own message."""

    id: str
    role: EntryRole
    at_ms: int
    order: int
    parent: int | None = None
    content: Raw = NOTHING
    type: EntryType = EntryType.MESSAGE
    said: int | None = None
    turn: str | None = None


class EntryDraft(Struct, frozen=True, gc=False, omit_defaults=True):
    """An entry to be added. `says`: its text is shown to the task's sender, too. `key`: once in the life of the run."""

    id: str
    role: EntryRole
    content: Raw = NOTHING
    parent: int = 0
    type: EntryType = EntryType.MESSAGE
    said: int | None = None
    says: Message | None = None
    turn: str | None = None
    key: str | None = None


class Memo(
    Struct,
    frozen=True,
    gc=False,
    omit_defaults=True,
    rename={"key": "k", "value": "v", "entry": "e", "task": "t", "begun": "b"},  # there are many, and they are kept
):
    """What one operation of the agent came to, under the key of the operation. An entry or a task is named, and not
    told again. `begun`: an effect whose outcome is not known yet, by its name."""

    key: str
    value: Raw = NOTHING
    entry: int | None = None
    task: str | None = None
    begun: str | None = None


class Wait(Struct, frozen=True, gc=False, omit_defaults=True):
    """What a run waits for: the tasks, all of them or the first; or one of the signals; or a time."""

    tasks: frozenset[str] = frozenset()
    first: bool = False  # of the tasks is enough
    fail_fast: bool = False  # so is one that failed
    signals: tuple[str, ...] = ()  # names, or patterns
    until_ms: int | None = None
    doubt: str | None = None  # the effect that nobody knows the outcome of


class Step(Struct, gc=False, omit_defaults=True, rename={"memos": "m"}):
    """What a run remembers of one stretch between two waits."""

    order: int
    memos: tuple[Memo, ...] = ()


class Run(Struct, gc=False, omit_defaults=True):
    task_id: str
    agent: str
    begun_ms: int
    begun_order: int
    order: int
    step: int = 0
    step_lease: str | None = None  # under which the last step was made: said again, it is the same
    step_ms: int = 0  # when it was
    entries: int = 0
    leaf: int = 0
    checkpoints: int = 0
    state: Raw = NOTHING  # of the last checkpoint
    floor: int = 0  # the last step before that checkpoint: it is forgotten
    floor_entries: int = 0
    floor_leaf: int = 0
    swept: int = 0  # the last step that is gone
    wait: Wait | None = None
    left: int = 0  # how many of the tasks that it waits for are open
    resumes: int = 0  # after a crash, since the last step
    dead: str | None = None  # the incarnation that it was taken from then
    closed: bool = False
    is_swept: bool = False


class Mark(Struct, gc=False):
    """An entry that is to be there once."""

    entry: int
    digest: str
    order: int


class Signal(Struct, gc=False, omit_defaults=True):
    """Something that the run is to hear. One that came as a message is in the dialog: `said` is its number. What has
    been heard stays, without its value, where the sender gave it a key."""

    id: str
    name: str
    at_ms: int
    order: int
    value: Raw = NOTHING
    said: int | None = None
    taken: bool = False


class RunCommit(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Everything between two waits of a run. `begins` names tasks of it that its holder takes up on the spot, `answers`
    are the results of such. At the end there is a wait, the result, or nothing: then the run goes on."""

    number: int
    entries: Sequence[EntryDraft] = ()
    memos: Sequence[Memo] = ()
    tasks: Sequence[Task] = ()
    begins: Sequence[str] = ()
    answers: Sequence[Result] = ()
    cancels: Sequence[str] = ()
    takes: Sequence[str] = ()
    checkpoint: Raw | UnsetType = UNSET
    leaf: int = 0
    wait: Wait | None = None
    result: Result | None = None
    is_told: bool = False  # its function knows that a cancel is asked for, and waits to clean up


class SignalSeen(Struct, frozen=True, gc=False, omit_defaults=True):
    """A signal as its run hears it; `message` is what the task's sender said."""

    id: str
    name: str
    at_ms: int
    order: int  # among all that was committed: the lower is the older
    value: Raw = NOTHING
    said: int | None = None
    message: Message | None = None


class Standing(Struct, frozen=True, gc=False, omit_defaults=True):
    """How a run stands after a commit, or when its holder asks: what of that which it waits for is there. `leases` are
    those of the tasks that it takes up itself."""

    task_id: str
    number: int
    generation: int
    now_ms: int
    parked: bool = False
    ended: bool = False
    leases: dict[str, str] = {}
    attempts: dict[str, int] = {}  # of those
    outcomes: Sequence[Result] = ()
    signals: Sequence[SignalSeen] = ()
    cancel_requested: bool = False
    cancel_reason: str | None = None


class StepSeen(Struct, frozen=True, gc=False, omit_defaults=True):
    """A step as the next holder reads it: with the entries and the outcomes that its memos name."""

    number: int
    memos: Sequence[Memo]
    entries: dict[int, str] = {}
    outcomes: Sequence[Result] = ()


class RunLoaded(Struct, frozen=True, gc=False, omit_defaults=True):
    """A run as a new holder finds it, page by page: `next` is where the following page of steps begins."""

    task_id: str
    generation: int
    now_ms: int
    step: int = 0
    entries: int = 0
    leaf: int = 0
    checkpoints: int = 0
    state: Raw = NOTHING
    resumes: int = 0
    steps: Sequence[StepSeen] = ()
    next: int | None = None
    cancel_requested: bool = False
    cancel_reason: str | None = None


class EntrySeen(Struct, frozen=True, gc=False, omit_defaults=True):
    number: int
    id: str
    role: EntryRole
    at_ms: int
    parent: int = 0
    content: Raw = NOTHING
    type: EntryType = EntryType.MESSAGE
    turn: str | None = None
    message: Message | None = None


class EntryFound(Struct, frozen=True, gc=False):
    """Where an entry is that was to be there once, and what stands for its content."""

    number: int
    id: str
    digest: str


class EntryPage(Struct, frozen=True, gc=False):
    """Oldest first; `before` goes on with what lies before this page."""

    entries: Sequence[EntrySeen]
    before: int | None = None


class RunSeen(Struct, frozen=True, gc=False, omit_defaults=True):
    """A run for people. `awaits` and `doubts` name what it waits for, and what nobody knows the outcome of."""

    task_id: str
    status: RunStatus
    generation: int
    attempt: int
    agent: str
    begun_ms: int
    kind: str | None = None
    outcome: str | None = None
    error: str | None = None  # why it failed, in short
    step: int = 0
    entries: int = 0
    leaf: int = 0
    checkpoints: int = 0
    resumes: int = 0
    state: Raw = NOTHING
    lease_id: str | None = None
    incarnation: str | None = None
    heartbeat_ms: int | None = None
    since_ms: int | None = None  # its holder is at the step: it lives, and may yet hang
    awaits: Sequence[str] = ()
    until_ms: int | None = None
    doubts: Sequence[str] = ()
    signals: Sequence[str] = ()


class RunPage(Struct, frozen=True, gc=False):
    runs: Sequence[RunSeen]
    cursor: str | None = None


class Signaled(Struct, frozen=True, gc=False):
    """The answer to a signal. `duplicate`: it had been sent before; `started`: the run began with it."""

    task_id: str
    signal_id: str
    generation: int
    duplicate: bool = False
    started: bool = False


class Resumed(Struct, frozen=True, gc=False):
    """The answer to a resume: the lease under which the run goes on, or none when it waits for a worker, and the tasks
    that were given back."""

    task: Task
    lease_id: str
    attempt: int
    generation: int
    requeued: Sequence[str] = ()


Evidence = Literal["lapsed", "attested"]
Verdict = Literal["done", "failed", "retry"]


def run_key(task_id: str) -> str:
    return f"{RUN_PREFIX}{task_id}"


def step_key(task_id: str, number: int | Literal[""]) -> str:
    """Without a number, what all of a run's begin with; likewise the next."""
    return f"{STEP_PREFIX}{task_id}:{number}"


def entry_key(task_id: str, number: int | Literal[""]) -> str:
    return f"{ENTRY_PREFIX}{task_id}:{number}"


def mark_key(task_id: str, digest: str) -> str:
    return f"{MARK_PREFIX}{task_id}:{digest}"


def signal_key(task_id: str, signal_id: str) -> str:
    return f"{SIGNAL_PREFIX}{task_id}:{signal_id}"
