"""A task in the hands of a handler: what it is about, what can be said to its sender, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

from msgspec import Struct

from covenant.mailbox import Mailbox, said
from covenant.model.content import Content, Text
from covenant.model.error import (
    CovenantError,
    LeaseSuperseded,
    StoreClosed,
    TaskTerminal,
    Unauthenticated,
    UnknownLease,
)
from covenant.model.limits import TEXT_BYTES_MAX
from covenant.model.message import Artifact, Message, Part
from covenant.model.record import Asks
from covenant.model.task import DuplicateSafety, Result, Task
from covenant.model.view import Delivery, Input, LeaseStatus, Moved
from covenant.rules.envelope import check_text, check_time, seal_message
from covenant.rules.protocol import parts_of
from covenant.store.clock import RandomIds
from covenant.work.patience import Patience

T = TypeVar("T")
Block: TypeAlias = Content | str
Piece: TypeAlias = Part | Block

LEASE_LOST: Final = (LeaseSuperseded, TaskTerminal, UnknownLease, Unauthenticated)  # to this worker, at least

log = logging.getLogger("covenant.worker")


class Release(Exception):
    """Raised by a handler to give its task back: same id, next attempt, not before the time that it says."""

    def __init__(self, *, not_before_ms: int | None = None, reason: str = "released") -> None:
        super().__init__(reason)
        check_text(reason, "reason", TEXT_BYTES_MAX)
        self.reason = reason
        self.not_before_ms = None if not_before_ms is None else check_time(not_before_ms, "not_before_ms")


class Ended(BaseException):
    """Ends a handler that has said its last word. Not an Exception, so that `except Exception` lets it through; and
    what was said counts even if somebody catches this, too."""


class Rejection(Struct, frozen=True):
    message: Message


class Reply(Struct, frozen=True):
    message: Message


class Settled(Struct, frozen=True):
    """Returned by a handler that has dealt with its lease itself: there is nothing to be told."""


class WorkContext:
    """A task in the hands of a handler. `cancel_requested` is as the last heartbeat heard it."""

    def __init__(self, delivery: Delivery, box: Mailbox, patience: Patience) -> None:
        self.delivery = delivery
        self.cancel_requested = False
        self.cancel_reason: str | None = None
        self._box = box
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._asked = asyncio.Event()
        self._is_done = False  # the handler has ended: what becomes of the lease is no news to it
        self._is_lost = False  # the lease, to this worker
        self._partials = 0
        self._numbering = asyncio.Lock()
        self._saying = asyncio.Lock()
        self._hearing = asyncio.Lock()
        self._unread: deque[Input] = deque()
        self._read = 0  # the number of the last input that the handler got
        self._ending: Rejection | Reply | None = None

    @property
    def task(self) -> Task:
        return self.delivery.task

    @property
    def is_lost(self) -> bool:
        """Whether the lease is no longer this worker's."""
        return self._is_lost

    @property
    def text(self) -> str:
        return self.task.intent_text

    @property
    def content(self) -> Sequence[Content]:
        return self.task.content

    @property
    def message(self) -> Message | None:
        """What an A2A client sent, as it sent it; the text of it is in `text`, or how much there is where that is more
        than an intent may have."""
        return self.task.message

    @property
    def lease_id(self) -> str:
        return self.delivery.lease_id

    @property
    def attempt(self) -> int:
        return self.delivery.attempt

    @property
    def idempotency_key(self) -> str | None:
        """To be handed on to whatever the work touches, so that a second attempt finds the first."""
        return None if self.task.idempotency is None else self.task.idempotency.key

    @property
    def duplicate_safety(self) -> DuplicateSafety:
        return "unsafe" if self.task.idempotency is None else self.task.idempotency.duplicate_safety

    async def partial(self, content: Block | Sequence[Block]) -> None:
        """Progress, numbered, so that it arrives once however often it has to be posted."""
        async with self._numbering:
            result = Result.partial(self.delivery, blocks(content), self._partials + 1)
            await self._under_lease(lambda: self._box.send_result(result))
            self._partials += 1

    # --- the dialog ---------------------------------------------------------------------------------------

    async def update(self, what: str | Message) -> None:
        """Say how far the work is."""
        message = said(what)
        await self._say(lambda receipt: self._box.update(self.lease_id, message, receipt=receipt))

    async def artifact(
        self,
        what: Artifact | Piece | Sequence[Piece],
        *,
        name: str | None = None,
        artifact_id: str | None = None,
        append: bool = False,
        last: bool = False,
    ) -> str:
        """Hand over what was made, and get its id: that of the artifact, else its name, else a new one. With `append`
        it is a piece more of the artifact with this id or name; without, it takes the place of one."""
        made = what if isinstance(what, Artifact) else _artifact(what, name, artifact_id, append)
        await self._say(
            lambda receipt: self._box.artifact(self.lease_id, made, append=append, last=last, receipt=receipt)
        )
        return made.artifact_id

    async def ask(self, question: str | Message | None = None, *, asks: Asks | str = Asks.INPUT) -> Message:
        """The next thing that the sender says. It is asked only if it has said nothing that was not read yet: so a new
        attempt goes through the answers that an earlier one got. A cancel ends the wait by a `Release`, which gives
        the task back and so ends it."""
        message = None if question is None else said(question)
        await self._say(
            lambda receipt: self._box.ask(self.lease_id, message, asks=asks, after=self._read, receipt=receipt)
        )
        answer = await self._next_input()
        if answer is None:
            raise Release(reason=self.cancel_reason or "canceled")
        return answer

    async def inputs(self) -> AsyncIterator[Message]:
        """What the sender says, as it says it, until a cancel is asked for or the lease is lost in another way."""
        try:
            while (message := await self._next_input()) is not None:
                yield message
        except LEASE_LOST:
            return

    def reject(self, why: str | Message) -> NoReturn:
        """Refuse the task. This ends the handler."""
        self._end(Rejection(seal_message(said(why), self._box.limits)))

    def reply(self, what: str | Message) -> NoReturn:
        """Let a message be the whole answer to an A2A client, without a task to be seen. Where there is one to be seen,
        it is the last word of that. This ends the handler."""
        self._end(Reply(seal_message(said(what), self._box.limits)))

    def _end(self, ending: Rejection | Reply) -> NoReturn:
        self._ending = ending
        raise Ended

    async def _say(self, act: Callable[[str], Awaitable[Moved]]) -> None:
        """One thing after the other, each under a receipt, so that it is said once however often it has to be
        repeated."""
        receipt = RandomIds().lease()
        async with self._saying:
            await self._under_lease(lambda: act(receipt))

    async def _next_input(self) -> Message | None:
        """None when a cancel is asked for, and everything that was said before is read."""
        async with self._hearing:
            if not self._unread:
                await self._listen()
            if not self._unread:
                return None
            entry = self._unread.popleft()
            self._read = entry.number
            return entry.message

    async def _listen(self) -> None:
        heard = await self._under_lease(lambda: self._box.inputs(self.lease_id, self._read, None))
        self._unread.extend(heard.inputs)
        if heard.cancel_requested and not self.cancel_requested:
            self._hear_cancel(heard.cancel_reason or "canceled")

    # --- signs of life ------------------------------------------------------------------------------------

    async def heartbeat(self) -> LeaseStatus:
        """Ask now. The worker does so by itself, too."""
        status = await self._under_lease(lambda: self._box.heartbeat(self.lease_id))
        self._hear(status)
        return status

    async def canceled(self) -> None:
        """Wait until a cancel is asked for, or the lease is lost in another way."""
        await self._asked.wait()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """For a plain function, which cannot await: `ctx.wait(ctx.partial("half"))`."""
        if threading.get_ident() == self._thread:
            work.close()
            raise RuntimeError("on the event loop this would wait for itself: await it instead")
        try:
            waiting = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise StoreClosed("the event loop of this worker has ended") from None
        return waiting.result()

    async def _under_lease(self, act: Callable[[], Awaitable[T]]) -> T:
        try:
            return await self._patience.until_answered(act)
        except LEASE_LOST as lost:
            self._hear_lost(lost)
            raise

    def _hear_lost(self, lost: CovenantError) -> None:
        """From any thread. Told once, whoever finds out."""
        if not self._is_lost:
            log.info("the lease of task %s is lost: %s", self.task.id, lost.code)
        self._is_lost = True
        self._hear_cancel(lost.code)

    def _hear(self, status: LeaseStatus) -> None:
        if status.cancel_requested and not self.cancel_requested:
            self._hear_cancel(status.cancel_reason or "canceled")

    def _hear_cancel(self, reason: str) -> None:
        """From any thread. A handler that blocks the loop can see it, one that waits on the loop is woken."""
        self.cancel_reason = reason
        self.cancel_requested = True
        self._loop.call_soon_threadsafe(self._asked.set)


def blocks(content: Block | Sequence[Block]) -> tuple[Content, ...]:
    blocks = content if isinstance(content, (list, tuple)) else (content,)
    return tuple(Text(block) if isinstance(block, str) else block for block in blocks)


def _artifact(what: Piece | Sequence[Piece], name: str | None, artifact_id: str | None, append: bool) -> Artifact:
    known = artifact_id or name
    if append and known is None:
        raise ValueError("append to which artifact? name it, or give its id")
    pieces = what if isinstance(what, (list, tuple)) else (what,)
    parts = (piece if isinstance(piece, Part) else parts_of(blocks(piece))[0] for piece in pieces)
    return Artifact(artifact_id=known or RandomIds().lease(), parts=tuple(parts), name=name)
