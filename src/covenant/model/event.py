"""What happened: one event, one key.

Events are what the journal keeps and what `rules.evolve` folds. A name here is part of the journal's format: it may
be joined by others, never changed.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from msgspec import Raw, Struct

from covenant.model.agent import AgentId
from covenant.model.message import Artifact, Message
from covenant.model.peer import Grant, Role
from covenant.model.push import PushConfig
from covenant.model.record import Asks, CacheKey, Key, Outcome
from covenant.model.run import NOTHING, EntryRole, EntryType, Memo, Wait
from covenant.model.task import Result, Task


class _Event(Struct, frozen=True, tag_field="type", omit_defaults=True, gc=False):
    key: Key


class Sent(_Event, frozen=True, tag="sent"):
    """A task came in: to be done, to follow the task that holds its slot, or to be answered from the cache."""

    task: Task
    slot: str | None = None
    follows: bool = False
    replayed: bool = False
    protocol: bool = False
    shown: bool = False  # its sender is shown the task, whatever comes of it
    run: str | None = None  # the run that sent it
    run_step: int = 0  # and in which step of it


class Leased(_Event, frozen=True, tag="leased"):
    """The holder is the task's recipient, or acts for it."""

    lease_id: str
    incarnation: str


class Unleased(_Event, frozen=True, tag="unleased"):
    """The receiver went away before the task reached it: it stands again where it stood."""


class Heartbeat(_Event, frozen=True, tag="heartbeat"):
    pass


class Requeued(_Event, frozen=True, tag="requeued"):
    """A lease ended without a result: repaired, retried or released."""

    lease_id: str
    cause: str
    reason: str
    not_before_ms: int | None = None


class Progressed(_Event, frozen=True, tag="progressed"):
    """A partial result was accepted; its content is in the part of the same commit."""


class Answered(_Event, frozen=True, tag="answered"):
    """The final result: of the holder, under its lease, or from the cache, without one."""

    result: Result


class Ended(_Event, frozen=True, tag="ended"):
    """The task ended without an answer of its holder."""

    outcome: Outcome
    result: Result
    cascade: bool = False


class CancelAsked(_Event, frozen=True, tag="cancel_asked"):
    reason: str
    cascade: bool = False


class CascadeAsked(_Event, frozen=True, tag="cascade_asked"):
    """The children of a task that has ended are to be canceled."""


class CascadeDone(_Event, frozen=True, tag="cascade_done"):
    pass


class Promoted(_Event, frozen=True, tag="promoted"):
    """A follower became the task to do."""


class Due(_Event, frozen=True, tag="due"):
    """`not_before_ms` has come."""


class Drained(_Event, frozen=True, tag="drained"):
    """The sender received the result: a part, or the final one. `again`: so often it had been given back before."""

    again: int = 0


class Undrained(_Event, frozen=True, tag="undrained"):
    """The receiver went away before the result reached it."""


class Parted(_Event, frozen=True, tag="parted"):
    result: Result
    sender: str
    attempt: int
    number: int
    generation: int
    kept: bool = False  # not handed to anybody: the protocol shows it


class Said(_Event, frozen=True, tag="said"):
    """A message of either side; what it means for the task is in the event beside it."""

    message: Message


class Shown(_Event, frozen=True, tag="shown"):
    """A client was shown the task."""


class Messaged(_Event, frozen=True, tag="messaged"):
    """The sender had more to say: input for the holder, present or to come."""

    queued: bool = False
    asks: Asks | None = None  # what is still waited for


class Updated(_Event, frozen=True, tag="updated"):
    """The holder told how far it is."""

    asks: Asks | None = None
    receipt: str | None = None


class Asked(_Event, frozen=True, tag="asked"):
    """The holder waits for the other side."""

    asks: Asks
    speaks: bool = False  # with a message
    receipt: str | None = None


class Chunked(_Event, frozen=True, tag="chunked"):
    """A piece of an artifact was accepted; it is in the chunk of the same commit."""

    begins: str | None = None  # the artifact of which this is the first piece
    receipt: str | None = None


class ChunkKept(_Event, frozen=True, tag="chunk_kept"):
    artifact: Artifact
    append: bool = False
    last: bool = False


class Replied(_Event, frozen=True, tag="replied"):
    """The holder answered with a message instead of doing a task."""

    result: Result


class PushSet(_Event, frozen=True, tag="push_set"):
    config: PushConfig
    after: int  # what came up to this generation is not told


class PushDropped(_Event, frozen=True, tag="push_dropped"):
    """Taken back, or told everything there was to tell."""


class PushDelivered(_Event, frozen=True, tag="push_delivered"):
    generation: int


class CardPublished(_Event, frozen=True, tag="card_published"):
    agent: AgentId
    card: dict[str, Any]


class CardWithdrawn(_Event, frozen=True, tag="card_withdrawn"):
    pass


class Stepped(_Event, frozen=True, tag="stepped"):
    """A run went on: so many entries more, and with `checkpoint` what lies before it is forgotten."""

    number: int
    lease_id: str
    entries: int = 0
    leaf: int = 0
    is_checkpoint: bool = False
    state: Raw = NOTHING


class StepKept(_Event, frozen=True, tag="step_kept"):
    memos: tuple[Memo, ...]


class StepDropped(_Event, frozen=True, tag="step_dropped"):
    pass


class EntryKept(_Event, frozen=True, tag="entry_kept"):
    id: str
    role: EntryRole
    parent: int | None = None
    content: Raw = NOTHING
    kind: EntryType = EntryType.MESSAGE
    said: int | None = None
    turn: str | None = None


class Marked(_Event, frozen=True, tag="marked"):
    """An entry that is to be there once is there."""

    entry: int
    digest: str


class Begun(_Event, frozen=True, tag="begun"):
    """A durable agent has begun with the task."""


class RunBegun(_Event, frozen=True, tag="run_begun"):
    """Its run, then."""

    task_id: str
    agent: str


class RunWaits(_Event, frozen=True, tag="run_waits"):
    wait: Wait
    left: int


class TaskAwaited(_Event, frozen=True, tag="task_awaited"):
    """One of the tasks that a run waits for has ended."""


class RunResumed(_Event, frozen=True, tag="run_resumed"):
    """A run was taken from a worker that is dead."""

    dead: str | None = None


class RunClosed(_Event, frozen=True, tag="run_closed"):
    """Its task has ended."""


class RunSwept(_Event, frozen=True, tag="run_swept"):
    """What it had to remember up to this step is gone; with `is_done`, all that was only for the run itself."""

    swept: int
    is_done: bool = False


class Parked(_Event, frozen=True, tag="parked"):
    """The run waits, and its holder lets go of it. `restates`: its status changes by that."""

    asks: Asks | None = None
    until_ms: int | None = None
    restates: bool = False
    note: int = 0  # which of the messages of this commit stands beside the status


class Woken(_Event, frozen=True, tag="woken"):
    """What the run waited for is there, or its holder never heard of the lease: anybody may take it up."""

    restates: bool = False


class TakenUp(_Event, frozen=True, tag="taken_up"):
    """A run goes on under a new lease: no new attempt."""

    lease_id: str
    incarnation: str


class Signaled(_Event, frozen=True, tag="signaled"):
    name: str
    value: Raw = NOTHING
    said: int | None = None


class SignalTaken(_Event, frozen=True, tag="signal_taken"):
    """Its run has heard it; `keeps` its key."""

    keeps: bool = False


class LateKept(_Event, frozen=True, tag="late_kept"):
    result: Result
    posted_by: str


class KeyTaken(_Event, frozen=True, tag="key_taken"):
    """A message was sent under a key."""

    task_id: str
    digest: str


class SlotOpened(_Event, frozen=True, tag="slot_opened"):
    cache_key: CacheKey
    digest: str
    leader: str


class SlotLed(_Event, frozen=True, tag="slot_led"):
    """Another task took over the work."""

    leader: str


class SlotCached(_Event, frozen=True, tag="slot_cached"):
    source: str
    result: Result
    expires_ms: int | None = None


class SlotClosed(_Event, frozen=True, tag="slot_closed"):
    """No work and no result under this key any more: ended, expired or forgotten."""


class Compacted(_Event, frozen=True, tag="compacted"):
    resolved_before_ms: int


class Enrolled(_Event, frozen=True, tag="enrolled"):
    """A peer came in, or came back; of its token only the digest is known."""

    agent: AgentId
    role: Role
    token: str
    held: tuple[str, ...] = ()  # the actions that it is granted in the same commit


class ActionHeld(_Event, frozen=True, tag="action_held"):
    """A peer was granted an action for the first time, or the last grant of it was revoked."""

    action: str
    is_held: bool = True


class TokenRotated(_Event, frozen=True, tag="token_rotated"):
    token: str


class PeerRevoked(_Event, frozen=True, tag="peer_revoked"):
    pass


class Granted(_Event, frozen=True, tag="granted"):
    grant: Grant


class GrantUsed(_Event, frozen=True, tag="grant_used"):
    """One use of a grant that has a bound on them."""


class GrantRevoked(_Event, frozen=True, tag="grant_revoked"):
    pass


class GrantExpired(_Event, frozen=True, tag="grant_expired"):
    pass


class HeadSigned(_Event, frozen=True, tag="head_signed"):
    """The realm's key vouches for the chain up to here."""

    seq: int
    hash: str
    signature: str
    pubkey: str
    anchors: tuple[str, ...] = ()


Event: TypeAlias = (
    Sent
    | Leased
    | Unleased
    | Heartbeat
    | Requeued
    | Progressed
    | Answered
    | Ended
    | CancelAsked
    | CascadeAsked
    | CascadeDone
    | Promoted
    | Due
    | Drained
    | Undrained
    | Parted
    | Said
    | Shown
    | Messaged
    | Updated
    | Asked
    | Chunked
    | ChunkKept
    | Replied
    | PushSet
    | PushDropped
    | PushDelivered
    | CardPublished
    | CardWithdrawn
    | Stepped
    | StepKept
    | StepDropped
    | EntryKept
    | Marked
    | Begun
    | RunBegun
    | RunWaits
    | TaskAwaited
    | RunResumed
    | RunClosed
    | RunSwept
    | Parked
    | Woken
    | TakenUp
    | Signaled
    | SignalTaken
    | LateKept
    | SlotOpened
    | SlotLed
    | SlotCached
    | SlotClosed
    | Compacted
    | Enrolled
    | ActionHeld
    | TokenRotated
    | PeerRevoked
    | Granted
    | GrantUsed
    | GrantRevoked
    | GrantExpired
    | HeadSigned
    | KeyTaken
)
