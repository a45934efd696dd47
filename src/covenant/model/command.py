"""What a caller asks for: one command, one commit.

`by` is the acting agent; None is the operator, or the program that owns the store.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from msgspec import Raw, Struct

from covenant.model.agent import AgentId
from covenant.model.message import Artifact, Message
from covenant.model.peer import Caller, Grant, Role
from covenant.model.push import PushConfig
from covenant.model.record import Asks, Key
from covenant.model.repair import RepairRequest, RetryPolicy
from covenant.model.run import NOTHING, Evidence, RunCommit, Verdict
from covenant.model.task import Result, Task


class _Command(Struct, frozen=True, gc=False):
    by: AgentId | None


class SendTask(_Command, frozen=True):
    """`protocol`: its sender is an A2A client, which reads the task instead of draining a result. `shown`: it is shown
    the task at once, so that a message alone can no longer be the answer. `push`: where it is told of everything.
    `key`: sent again under it, it is the same task."""

    task: Task
    protocol: bool = False
    shown: bool = False
    push: PushConfig | None = None
    key: str | None = None


class ShowTask(_Command, frozen=True):
    """The client is about to be shown the task: from now on it is one, however it is answered."""

    task_id: str


class AddMessage(_Command, frozen=True):
    """The sender has more to say. `push`: where it wants to be told of what comes of it. `key`: said again under it, it
    was said once."""

    task_id: str
    message: Message
    if_generation: int | None = None
    push: PushConfig | None = None
    key: str | None = None


class UpdateTask(_Command, frozen=True):
    """The holder tells how far it is; or, with `asks`, what it waits for. With `after`, it asks only if its sender has
    said nothing behind that number. Under the same `receipt` it has said it once."""

    lease_id: str
    message: Message | None = None
    asks: Asks | None = None
    after: int | None = None
    receipt: str | None = None


class AddArtifact(_Command, frozen=True):
    lease_id: str
    artifact: Artifact
    append: bool = False
    last: bool = False
    receipt: str | None = None


class RejectTask(_Command, frozen=True):
    """The holder will not do it."""

    lease_id: str
    message: Message


class ReplyDirectly(_Command, frozen=True):
    """The holder answers with a message, and there was no task."""

    lease_id: str
    message: Message


class LeaseTasks(_Command, frozen=True):
    """For one recipient, or the oldest of all when it is None. `kinds`: of these alone; an empty name stands for tasks
    without a kind."""

    recipient: AgentId | None
    incarnation: str
    limit: int = 1
    kinds: frozenset[str] | None = None


class PostResult(_Command, frozen=True):
    result: Result
    incarnation: str


class DrainResults(_Command, frozen=True):
    peer: AgentId | None
    limit: int = 1


class GiveBack(_Command, frozen=True):
    """Undo leases and drains whose caller has gone away before it heard of them. A result is named with how often it
    had been given back before: done again, this does not take it from whoever drained it next."""

    leases: tuple[str, ...]
    results: tuple[tuple[Key, int], ...]


class BeatLease(_Command, frozen=True):
    lease_id: str


class ReleaseLease(_Command, frozen=True):
    lease_id: str
    reason: str = "released"
    not_before_ms: int | None = None


class CancelTask(_Command, frozen=True):
    task_id: str
    reason: str
    graceful: bool = False
    cascade: bool = False


class RepairTask(_Command, frozen=True):
    request: RepairRequest


class RetryStale(_Command, frozen=True):
    policy: RetryPolicy
    cursor: str | None = None
    scheduled: bool = False


class ForgetCached(_Command, frozen=True):
    slot: str
    reason: str


class CompactHistory(_Command, frozen=True):
    """Let go of tasks that were resolved longer ago than this; None takes the retention in force."""

    older_than_ms: int | None = None


class CommitRun(_Command, frozen=True):
    """Everything that a run did since its last commit. Under the same lease and number it was done once."""

    lease_id: str
    commit: RunCommit
    incarnation: str


class ResumeRun(_Command, frozen=True):
    """Take a run from a worker that is dead: its incarnation is named, and how that is known. Without an incarnation
    that takes it over, whoever of the agent's workers comes next does."""

    task_id: str
    incarnation: str | None
    dead: str
    evidence: Evidence
    reason: str


class WakeRun(_Command, frozen=True):
    """The agent itself has more to do in a run that waits."""

    task_id: str


class SignalRun(_Command, frozen=True):
    """Under the same `key` of the same sender it is heard once. With `start`, the run begins with it."""

    task_id: str
    name: str
    value: Raw = NOTHING
    key: str | None = None
    start: Task | None = None


class JudgeEffect(_Command, frozen=True):
    """Say what became of an effect that was begun, and of which nobody knows the outcome."""

    task_id: str
    effect: str
    verdict: Verdict
    reason: str
    value: Raw = NOTHING


class EnrollPeer(_Command, frozen=True):
    """With its first grants, already signed."""

    agent: AgentId
    role: Role
    token: str  # its digest
    grants: tuple[Grant, ...] = ()


class RotateToken(_Command, frozen=True):
    pubkey: str
    token: str


class RevokePeer(_Command, frozen=True):
    pubkey: str
    reason: str


class GrantCapability(_Command, frozen=True):
    grant: Grant


class RevokeCapability(_Command, frozen=True):
    grant_id: str
    reason: str


class SignHead(_Command, frozen=True):
    seq: int
    hash: str
    signature: str
    pubkey: str
    anchors: tuple[str, ...] = ()  # how far other chains of the same store were, each as lane:seq:hash


class UseRight(_Command, frozen=True):
    """Before something is read that only this action shows."""

    action: str


class NoteRefusal(_Command, frozen=True):
    """Write down what was refused before there was a caller, or how often somebody was refused in silence."""

    kind: str
    reason: str | None = None
    subject: str | None = None
    count: int = 0


class SetPush(_Command, frozen=True):
    """`from_start`: it is told everything, also what came before it was set."""

    task_id: str
    config: PushConfig
    from_start: bool = False


class DropPush(_Command, frozen=True):
    task_id: str
    config_id: str


class NotePush(_Command, frozen=True):
    """A webhook, as it was set by the event `since`, was told as far as this; with `is_last` there is nothing more to
    come. With a reason it is given up."""

    task_id: str
    config_id: str
    since: int
    generation: int
    is_last: bool = False
    reason: str | None = None


class PublishCard(_Command, frozen=True):
    agent: AgentId
    card: dict[str, Any]


class WithdrawCard(_Command, frozen=True):
    agent: AgentId


class SettleSlot(_Command, frozen=True):
    """Step: give the cached result to the next followers."""

    slot: str


class CancelChildren(_Command, frozen=True):
    """Step: cancel the next children of a canceled task."""

    task_id: str
    after: int = 0


class SweepRun(_Command, frozen=True):
    """Step: let go of what a run remembers no more."""

    task_id: str
    after: int = 0


class EndGrants(_Command, frozen=True):
    """Step: end the next grants of a revoked peer."""

    pubkey: str


class Expire(_Command, frozen=True):
    """Step: what is due now."""


Command: TypeAlias = (
    SendTask
    | ShowTask
    | AddMessage
    | UpdateTask
    | AddArtifact
    | RejectTask
    | ReplyDirectly
    | LeaseTasks
    | PostResult
    | DrainResults
    | GiveBack
    | BeatLease
    | ReleaseLease
    | CancelTask
    | RepairTask
    | RetryStale
    | ForgetCached
    | CompactHistory
    | CommitRun
    | ResumeRun
    | WakeRun
    | SignalRun
    | JudgeEffect
    | EnrollPeer
    | RotateToken
    | RevokePeer
    | GrantCapability
    | RevokeCapability
    | UseRight
    | SetPush
    | DropPush
    | NotePush
    | PublishCard
    | WithdrawCard
    | SignHead
    | NoteRefusal
    | SettleSlot
    | CancelChildren
    | SweepRun
    | EndGrants
    | Expire
)


class Call(Struct, frozen=True, gc=False):
    """A command of somebody who came through the door."""

    caller: Caller
    command: Command

    @property
    def by(self) -> AgentId:
        return self.caller.agent
