"""The frame of every rule: what it sees, what it is given, and what it hands back.

A rule is pure. It reads records through a `View`, takes time and fresh ids from its `Context`, and returns a `Commit`
or raises a refusal. A view that does not hold a record yet raises `Need`; the engine loads it and asks again, which
is sound because nothing has happened in between. One that has loaded as much of a listing as it may raises `Spent`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from msgspec import Struct, field

from covenant.model.agent import AgentId
from covenant.model.audit import AuditRow
from covenant.model.card import Card
from covenant.model.command import Call, Command, NotePush, NoteRefusal, SignHead
from covenant.model.event import Event
from covenant.model.limits import Limits
from covenant.model.peer import OPERATOR, Caller, Demand, Grant, Peer
from covenant.model.push import Push
from covenant.model.record import Horizon, Key, Late, Record, Slot, TaskRecord, Tombstone
from covenant.model.run import Signal

T = TypeVar("T")

_AT_ONCE: Final = 1000  # keys and listings


class Ids(Protocol):
    """Fresh ids. `task` ids sort by time, so that archives stay dense; the others are random."""

    def task(self) -> str: ...
    def lease(self) -> str: ...


def _anything(grant: Grant) -> bool:
    return True


def _written(caller: str) -> int:
    return 0


class Way(Struct, frozen=True, gc=False):
    """How a sender was let through to a recipient: the same again, as long as no peer and no grant is touched."""

    order: int  # of the last event that had touched one
    demand: Demand
    grant: Grant
    rows: tuple[AuditRow, ...]  # of the checks that it took


class Context(Struct, gc=False):
    """What a rule is given. Asked again for the same command, an engine gives the same ids."""

    now: int
    ids: Ids
    limits: Limits
    compaction: Horizon | None = None  # the last explicit one
    granted: str | None = None  # the action for which the door has let this command in
    may_requeue: Callable[[TaskRecord], bool] | None = None  # what the grants behind the retry gate reach
    is_genuine: Callable[[Grant], bool] = _anything  # whether the realm signed it
    refused: Callable[[str], int] = _written  # how many of a caller were not written down before; -1: nor is this one
    recalled: dict[tuple[str, str, str | None], tuple[int, Grant]] = field(default_factory=dict)  # see rules.grant
    ways: dict[tuple[str, str, str], Way] = field(default_factory=dict)  # see rules.door
    recv_gate: bool = False  # whether a recipient must have agreed to its senders
    private_webhooks: bool = False  # whether a webhook may be on this machine, or in its network


class Need(Exception):
    """The view lacks these keys or listings."""

    def __init__(self, *wanted: Any) -> None:
        super().__init__(wanted)
        self.wanted = wanted


class Lacks:
    """What the view lacks, gathered while a rule goes on to what it would look at next: asked for one by one, each
    would have all before it decided again. Nothing may be made of what was gone over before it is `settled`, and
    nobody is refused on it."""

    def __init__(self) -> None:
        self._wanted: list[Any] = []

    @property
    def is_enough(self) -> bool:
        """For one look: where a rule may not come to all that is ahead, it goes no further."""
        return len(self._wanted) >= _AT_ONCE

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> bool:
        if isinstance(error, Need):
            self._wanted += error.wanted
            return True
        if isinstance(error, Exception):
            self.settle()
        return False

    def settle(self) -> None:
        if self._wanted:
            raise Need(*self._wanted)


def each(do: Callable[[T], Any], them: Iterable[T]) -> None:
    """What the view lacks for any of them is asked for at once."""
    lacks = Lacks()
    for one in them:
        with lacks:
            do(one)
    lacks.settle()


class Spent(Exception):
    """A listing goes on, and the view has shown of it as much as is held for one question: its page ends here."""


class View(Protocol):
    """The records as the commits before this one left them. Listings come in their order, oldest first."""

    def get(self, key: Key) -> Record | Tombstone | None: ...
    def task_of_lease(self, lease_id: str) -> Key | None:
        """The task that a lease, present or past, belongs to."""

    def ready(self, recipient: str | None, limit: int) -> Sequence[TaskRecord]: ...
    def ready_of(self, recipient: str | None, kinds: frozenset[str], limit: int) -> Sequence[TaskRecord]:
        """Those of these kinds, however many others stand before them."""

    def answers(self, peer: str | None, limit: int) -> Sequence[Key]:
        """Results that wait to be drained by this peer, or by anyone."""

    def followers(self, slot: Key, limit: int) -> Sequence[TaskRecord]: ...
    def children(self, parent: str, after: int, limit: int, agent: str | None = None) -> Sequence[TaskRecord]:
        """All of them, or those that an agent sent or received."""

    def leases(self, after: int, limit: int, agent: str | None = None) -> Sequence[TaskRecord]:
        """Tasks in flight, all or an agent's, by their last sign of life."""

    def due(self, now: int, limit: int) -> Sequence[Key]: ...
    def tasks(self, agent: str | None, after: int, limit: int) -> Sequence[TaskRecord]:
        """Tasks that an agent sent or received, in the order in which they were sent. All that are open are there."""

    def recent(self, agent: str | None, before: int | None, limit: int) -> Sequence[TaskRecord]:
        """The same, newest first, finished ones too; `before` is where an earlier listing stopped."""

    def pending(self, agent: str | None, after: int, limit: int) -> Sequence[Key]:
        """Results that wait to be drained by this agent, or by anyone, oldest first."""

    def slots(self, after: int, limit: int, agent: str | None = None) -> Sequence[tuple[Key, Slot]]:
        """Cached results, all or those between an agent and others, by the event that cached them."""

    def late(self, task_id: str) -> Sequence[Late]: ...
    def pieces(self, prefix: Key, first: int, last: int) -> Sequence[tuple[int, Record]]:
        """The records under a prefix that are numbered from first to last, with their numbers."""

    def dialogs(self, sender: str, recipient: str, before: int, limit: int) -> Sequence[TaskRecord]:
        """Tasks of the A2A protocol between these two, the newest status first."""

    def moved_dialogs(self, sender: str, recipient: str, since: int, after: int, limit: int) -> Sequence[TaskRecord]:
        """Those of them that were there at an event and have a newer status, in the order in which they were sent;
        `after` is where an earlier listing stopped."""

    def signals(self, task_id: str, limit: int, taken: bool = False) -> Sequence[Signal]:
        """Those that wait for a run, oldest first; with `taken`, those of which only the key is left, too."""

    def signal_count(self, task_id: str) -> int:
        """How many wait for a run."""

    def heard(self, task_id: str, limit: int) -> Sequence[Signal]:
        """Those of a run of which only the key is left, the first that was heard first."""

    def pushes(self, task_id: str) -> Sequence[Push]:
        """By the event that set them."""

    def cards(self, after: int, limit: int) -> Sequence[Card]:
        """By the event that published them."""

    def dialog_count(self, sender: str, recipient: str) -> int:
        """How many there are; a few that are being archived may count twice."""

    def depth(self, recipient: str) -> int:
        """How many tasks are ready for it."""

    def deep(self, over: int) -> Sequence[tuple[TaskRecord, int]]:
        """For each recipient with more ready tasks than that: the oldest of them, and how many there are."""

    @property
    def trust_order(self) -> int:
        """The last event that touched a peer or a grant."""

    def grants(self, subject: str, action: str) -> Mapping[str, Mapping[str, Grant]]:
        """The open grants of just this action: by what they are pinned to, by their id."""

    def peer_named(self, display: str) -> str | None:
        """The key that a label belongs to."""

    def caller_of(self, digest: str) -> Caller | None:
        """The peer whose token is good now."""

    def peers(self, after: int, limit: int) -> Sequence[Peer]:
        """Everybody who was ever enrolled, by the event that last touched them."""

    def all_grants(self, subject: str | None, after: int, limit: int) -> Sequence[Grant]:
        """Open grants, by the event that last touched them."""


class Commit(Struct, gc=False):
    """What changes, what the caller hears, and what has to follow. A reply that is an error is raised once the
    commit is durable."""

    events: tuple[Event, ...]
    reply: Any = None
    audit: tuple[AuditRow, ...] = ()
    then: tuple[Command, ...] = ()
    fresh: Key | None = None  # a task's id that nothing is known under: an engine need not look again


def acting(command: Command | Call) -> AgentId | None:
    """For whom it is done; None is the operator."""
    if type(command) is Call:
        return None if command.caller.is_operator else command.caller.agent
    return command.by


def actor(command: Command | Call) -> str:
    """Who the log says it was."""
    if type(command) is Call:
        caller = command.caller
        return "operator" if caller.role is OPERATOR else caller.agent.display
    if command.by is not None:
        return command.by.display
    return "system" if type(command) in (SignHead, NoteRefusal, NotePush) else "operator"
