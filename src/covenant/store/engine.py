"""The store contract: what every engine offers, and nothing more.

An engine loads, calls the rules, makes the commit durable, indexes and wakes. It holds no policy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

from covenant.model.agent import AgentId
from covenant.model.audit import AuditRow, Logged
from covenant.model.card import Card
from covenant.model.command import Call, Command, CompactHistory, DrainResults, LeaseTasks
from covenant.model.daemon import DaemonView
from covenant.model.limits import Limits
from covenant.model.peer import Caller
from covenant.model.query import GetTask, ListInputs, Query
from covenant.model.record import Key
from covenant.model.view import Compaction, Inputs, QueueEntry
from covenant.rules.context import Context
from covenant.store.state import Tally

Place: TypeAlias = Callable[[Caller], AbstractContextManager[Any] | None]  # where a caller waits, if it may


class Engine(Protocol):
    """What a mailbox needs."""

    limits: Limits

    async def open(self) -> None: ...
    async def close(self) -> None: ...
    def run(self, command: Command) -> Coroutine[Any, Any, Any]:
        """Decide, commit, make durable; then the reply, or the refusal."""

    async def run_all(self, commands: Sequence[Command]) -> list[Any]:
        """The same for many that share the wait. Each stands for itself: a refusal is returned in its place."""

    async def take(self, command: LeaseTasks | DrainResults, wait_ms: int | None = None) -> list[Any]:
        """Run it until it brings something, or the wait is over. A caller that goes away has taken nothing."""

    async def ask(self, query: Query) -> Any:
        """Ask the state; the answer shows only what is durable."""

    async def watch(self, query: GetTask, after: int, wait_ms: int | None = None) -> QueueEntry:
        """The task once its generation is higher than `after`, or a cancel is asked for meanwhile; as it is when the
        wait ends or the task has ended."""

    async def listen(self, query: ListInputs, wait_ms: int | None = None, cancel_known: bool = False) -> Inputs:
        """What the sender has said, once it has said something; nothing when the wait ends, or a cancel is asked for
        that the caller does not know of. Who has lost its lease is told so."""

    async def compact(self, command: CompactHistory) -> Compaction: ...
    async def audit(self, limit: int) -> list[AuditRow]:
        """The newest rows, oldest first."""


class Notes(Protocol):
    """What one daemon leaves to the next: whole, or as it was before."""

    async def read(self) -> bytes | None: ...
    async def write(self, data: bytes) -> None: ...


class Store(Protocol):
    """What an exchange needs: the same for calls, whose caller is checked in the commit, and the log."""

    limits: Limits
    context: Context
    is_shared: bool  # other processes may have it open at the same time

    def join(self, pubkey: str, lost: Callable[[str], None]) -> None:
        """Before it is opened: the key of who opens it, and whom to tell of a peer that is trusted no more."""

    def keys(self) -> Collection[str]:
        """Of everybody who ever opened it: what they signed is genuine."""

    async def refresh(self) -> int:
        """Look whether others have changed whom to trust; the last event that did."""

    def leads(self) -> bool:
        """Whether it is for this process to do what one does for all."""

    def notes(self) -> Notes | None:
        """Where who leads leaves something to the next one; none where all of them are daemons of one home."""

    def companions(self) -> int:
        """How many processes have it open, this one included."""

    async def tally(self, leases_max: int) -> Tally:
        """How much is open."""

    async def daemons(self) -> Sequence[DaemonView]:
        """Who has it open, and who had of late; the youngest first."""

    async def open(self) -> None: ...
    async def close(self) -> None: ...
    def run(self, command: Command | Call) -> Coroutine[Any, Any, Any]: ...
    async def run_all(self, commands: Sequence[Command | Call]) -> list[Any]: ...
    async def take(
        self,
        command: LeaseTasks | DrainResults | Call,
        wait_ms: int | None = None,
        undoing: list[Command] | None = None,
    ) -> list[Any]:
        """`undoing` is filled with what gives back what was taken."""

    async def ask(self, query: Query, caller: Caller | None = None) -> Any: ...
    async def watch(
        self,
        query: GetTask,
        after: int,
        wait_ms: int | None = None,
        caller: Caller | None = None,
        cancel_known: bool | None = None,
    ) -> QueueEntry:
        """`cancel_known`: whether the caller knows of a cancel already; None takes it as it is now."""

    async def run_and_settle(self, command: Call, place: Place) -> Any:
        """Run it; then wait in this place, if there is one, until its task has ended or asks its sender for
        something."""

    async def settle(self, task_id: str) -> None:
        """Until the task has ended or asks its sender for something. That need not be durable."""

    async def listen(
        self,
        query: ListInputs,
        wait_ms: int | None = None,
        cancel_known: bool = False,
        caller: Caller | None = None,
    ) -> Inputs: ...
    async def compact(self, command: CompactHistory | Call) -> Compaction: ...
    def caller_of(self, token: str) -> Caller | None: ...
    def caller_at(self, pubkey: str) -> Caller | None:
        """The peer with this key, as it would come in now."""

    def agent_of(self, name: str) -> AgentId | None: ...
    def cards(self, pubkey: str | None = None) -> Sequence[Card]:
        """The card of this agent, or the first few, as far as memory knows: to find out whom a command is for."""

    def directory_mark(self) -> object:
        """Another one whenever a peer or a card has changed, as far as memory knows: what was found out about them
        holds as long as it is the same."""

    async def order_of(self, task_id: str) -> int: ...
    async def sent_at(self, task_id: str) -> int: ...
    def watch_pushes(self, tell: Callable[[str], None]) -> None:
        """Be told of the tasks with webhooks: of those there are, and of each that moves on, or gets or loses one. It
        is told before it is durable: who wants to act on it has to ask."""

    async def log_back(self, before: int | None, limit: int) -> list[Logged]:
        """Commits before this event, the newest first; only what is durable. There may be fewer than were asked for:
        only an empty answer is the end of the log."""

    async def log(self, after: int, limit: int) -> list[Logged]:
        """Commits behind this event, the oldest first; likewise."""

    async def log_end(self) -> int:
        """The last event that nothing can come before any more."""

    async def is_cut(self, after: int, first: int) -> bool:
        """Whether something is missing between two events that follow each other in the log."""

    async def log_trail(self, seq: int, key: Key, limit: int) -> list[Logged]:
        """Commits that touched this record, from the one that holds this event back, as far as the log reaches;
        likewise."""
