"""A worker: leases the tasks of one agent, does them, and answers; over any mailbox.

It never holds more than it can do at once, and shows from a thread of its own that it lives. A result is posted until
it is accepted or refused, however long the daemon is away. When it is told to stop, it finishes what it can and gives
back what it had to interrupt. What it lost by a crash stays in flight: only the operator or the retry gate knows
whether that may be done again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import inspect
import logging
import random
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Final, NoReturn, Protocol, TypeAlias, TypeVar

from msgspec import Struct, structs

from covenant.mailbox import Mailbox, said
from covenant.model.agent import AgentId
from covenant.model.command import BeatLease
from covenant.model.content import Content, Text
from covenant.model.error import (
    CovenantError,
    Draining,
    Internal,
    LeaseSuperseded,
    Malformed,
    NotPermitted,
    RateLimited,
    StoreClosed,
    StoreUnavailable,
    TaskTerminal,
    TooManyWaiters,
    Unauthenticated,
    UnknownLease,
    Unreachable,
)
from covenant.model.limits import TEXT_BYTES_MAX
from covenant.model.message import Artifact, Message, Part
from covenant.model.record import Asks
from covenant.model.task import DuplicateSafety, Result, Task
from covenant.model.view import Delivery, Input, LeaseStatus, Moved
from covenant.rules.envelope import check_text, check_time, seal_message, seal_result
from covenant.rules.protocol import parts_of
from covenant.store.clock import RandomIds
from covenant.store.engine import Engine

HEARTBEAT_MS: Final = 10_000
GRACE_MS: Final = 30_000

_LAST_WORDS_S: Final = 5.0  # for giving leases back at the end
_FIRST_DELAY_S: Final = 0.05
_DELAY_S_MAX: Final = 5.0
_BEATS_AT_ONCE: Final = 16

T = TypeVar("T")
Block: TypeAlias = Content | str
Piece: TypeAlias = Part | Block

_PASSING: Final = (Unreachable, StoreUnavailable, Draining, RateLimited, TooManyWaiters, Internal)
_LEASE_LOST: Final = (LeaseSuperseded, TaskTerminal, UnknownLease, Unauthenticated)  # to this worker, at least

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


class _Rejection(Struct, frozen=True):
    message: Message


class _Reply(Struct, frozen=True):
    message: Message


class Settled(Struct, frozen=True):
    """Returned by a handler that has dealt with its lease itself: there is nothing to be told."""


Returned: TypeAlias = Result | Message | Settled | Block | Sequence[Block] | None
Handler: TypeAlias = Callable[["WorkContext"], Returned | Awaitable[Returned]]

Outcome: TypeAlias = Result | Release | Settled | _Rejection | _Reply


class WorkContext:
    """A task in the hands of a handler. `cancel_requested` is as the last heartbeat heard it."""

    def __init__(self, delivery: Delivery, box: Mailbox, patience: _Patience) -> None:
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
        self._ending: _Rejection | _Reply | None = None

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
            result = Result.partial(self.delivery, _blocks(content), self._partials + 1)
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
        except _LEASE_LOST:
            return

    def reject(self, why: str | Message) -> NoReturn:
        """Refuse the task. This ends the handler."""
        self._end(_Rejection(seal_message(said(why), self._box.limits)))

    def reply(self, what: str | Message) -> NoReturn:
        """Let a message be the whole answer to an A2A client, without a task to be seen. Where there is one to be seen,
        it is the last word of that. This ends the handler."""
        self._end(_Reply(seal_message(said(what), self._box.limits)))

    def _end(self, ending: _Rejection | _Reply) -> NoReturn:
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
        except _LEASE_LOST as lost:
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


class Worker:
    """`async with Worker(box, handler):` works until the block ends; `await worker.run()` until `stop` is called."""

    def __init__(
        self,
        box: Mailbox,
        handler: Handler,
        concurrency: int = 1,
        heartbeat_ms: int = HEARTBEAT_MS,
        incarnation: str | None = None,
        *,
        grace_ms: int = GRACE_MS,
        kinds: Collection[str] | None = None,
    ) -> None:
        for name, value, least in (
            ("concurrency", concurrency, 1),
            ("heartbeat_ms", heartbeat_ms, 1),
            ("grace_ms", grace_ms, 0),
        ):
            if type(value) is not int or value < least:
                raise Malformed(f"{name} is a number from {least}", field=name)
        self.agent = box.agent
        self._opened = box
        self._handler = handler
        self._is_async = _is_async(handler)
        self._concurrency = concurrency
        self._heartbeat_ms = heartbeat_ms
        self._incarnation = incarnation
        self._grace_ms = grace_ms
        self._kinds = kinds
        self._stopping = asyncio.Event()
        self._is_up = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None  # while it runs
        self._running: asyncio.Task[None] | None = None
        self._receiving: asyncio.Task[list[Delivery]] | None = None
        self._jobs: set[asyncio.Task[None]] = set()
        self._begun: set[str] = set()  # the leases of these

    # --- life ---------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Worker:
        self._prepare()
        self._running = asyncio.create_task(self._serve())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._running is not None
        self.stop()
        await self._running

    async def run(self) -> None:
        """Until `stop` is called, or the mailbox refuses in a way that waiting does not mend."""
        self._prepare()
        await self._serve()

    async def up(self) -> None:
        """Until it receives; or it has failed, and says why."""
        assert self._running is not None
        waiting = asyncio.create_task(self._is_up.wait())
        await asyncio.wait({waiting, self._running}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._running.done():
            self._running.result()

    def stop(self) -> None:
        """Take nothing more, finish what is under way. From any thread, or from a signal handler of the loop."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stopping.set)

    def _prepare(self) -> None:
        if self._loop is not None:
            raise Malformed("this worker runs already")
        self._loop = asyncio.get_running_loop()
        self._stopping.clear()

    async def _serve(self) -> None:
        try:
            self._box = self._opened.of(self.agent, incarnation=self._incarnation or RandomIds().lease())
            line = await _line_of(self._box)
            self._patience = _Patience(self._box)
            async with self._pulse_on(line) as self._pulse:
                self._is_up.set()
                await self._work_on()
        finally:
            self._loop = None

    def _pulse_on(self, line: _Line) -> _Pulse:
        return _Pulse(line, self._heartbeat_ms)

    async def _work_on(self) -> None:
        grace_ms = self._grace_ms
        try:
            await self._lease_until_stopped()
        except asyncio.CancelledError:
            grace_ms = 0
            raise
        finally:
            await asyncio.gather(self._take_nothing_more(), self._finish(grace_ms))

    # --- leasing ------------------------------------------------------------------------------------------

    async def _lease_until_stopped(self) -> None:
        while not self._stopping.is_set():
            room = self._concurrency - len(self._jobs)
            if room < 1:
                await self._stopped_or(*self._jobs)
                continue
            receive = partial(self._box.recv_tasks, min(room, self._box.limits.batch_max), kinds=self._kinds)
            self._receiving = asyncio.create_task(self._patience.until_answered(receive))
            await self._stopped_or(self._receiving)
            if self._receiving.done() and not self._stopping.is_set():
                receiving, self._receiving = self._receiving, None
                for delivery in receiving.result():
                    self.begin(delivery)

    async def _stopped_or(self, *others: asyncio.Task[Any]) -> None:
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({stopped, *others}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()

    def begin(self, delivery: Delivery) -> None:
        """Work on a lease, however this worker got it; once, also if it was told of it twice."""
        if delivery.lease_id in self._begun:
            return
        self._begun.add(delivery.lease_id)
        job = asyncio.create_task(self._work(self.context_of(delivery)))
        self._jobs.add(job)
        job.add_done_callback(partial(self._end, delivery.lease_id))

    def _end(self, lease_id: str, job: asyncio.Task[None]) -> None:
        self._jobs.discard(job)
        self._begun.discard(lease_id)

    def context_of(self, delivery: Delivery) -> WorkContext:
        return WorkContext(delivery, self._box, self._patience)

    def holding(self, ctx: WorkContext) -> AbstractContextManager[None]:
        """Signs of life for a lease beside those that it works on itself."""
        return self._pulse.holding(ctx)

    async def patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Until the mailbox has answered, however long it is away. The call may be repeated."""
        return await self._patience.until_answered(call)

    async def _take_nothing_more(self) -> None:
        """A receive that is cancelled takes nothing; one that was quicker than that is given back."""
        receiving, self._receiving = self._receiving, None
        if receiving is None:
            return
        receiving.cancel()
        await asyncio.wait([receiving])
        if not receiving.cancelled() and receiving.exception() is None:
            for delivery in receiving.result():
                await self._give_back(delivery)

    async def _finish(self, grace_ms: int) -> None:
        try:
            if self._jobs and grace_ms:
                await asyncio.wait(self._jobs, timeout=grace_ms / 1000)
        finally:  # who is cancelled while it waits leaves no handler behind
            await self._interrupt()

    async def _interrupt(self) -> None:
        for job in self._jobs:
            job.cancel()
        if self._jobs:
            _, left = await asyncio.wait(self._jobs, timeout=2 * _LAST_WORDS_S)
            if left:
                log.error("%d handlers do not let themselves be canceled and are left behind", len(left))

    # --- one task -----------------------------------------------------------------------------------------

    async def _work(self, ctx: WorkContext) -> None:
        with self._pulse.holding(ctx):
            try:
                outcome = await self._outcome_of(ctx)
            except asyncio.CancelledError:
                await self._interrupted(ctx)
                return
            ctx._is_done = True
            if outcome is not None:
                await self._settle(ctx, outcome)

    async def _outcome_of(self, ctx: WorkContext) -> Outcome | None:
        """What the handler has made of it: its last word, or else what it returned."""
        try:
            outcome: Outcome | None = await self._returned_by(ctx)
        except (Ended, BaseExceptionGroup):
            if ctx._ending is None:
                raise
            return ctx._ending
        return ctx._ending or outcome

    async def _returned_by(self, ctx: WorkContext) -> Result | Release | Settled | None:
        """Whatever goes wrong in there is an answer, too; unless it is that nobody wants one any more."""
        try:
            returned = await self._handle(ctx)
            if isinstance(returned, Settled):
                return returned
            return seal_result(_result_of(returned, ctx.delivery), self._box.limits)
        except Release as release:
            return release
        except asyncio.CancelledError as canceled:
            job = asyncio.current_task()
            if job is not None and job.cancelling():
                raise
            return self._error(ctx, canceled)
        except Exception as failed:
            if ctx._is_lost and _tells_of_loss(failed):
                return None
            log.warning("the handler failed on task %s", ctx.task.id, exc_info=failed)
            return self._error(ctx, failed)

    async def _handle(self, ctx: WorkContext) -> Any:
        if self._is_async:
            returned: Any = self._handler(ctx)
        else:
            returned = await in_thread(lambda: self._handler(ctx))
        return await returned if inspect.isawaitable(returned) else returned

    def _error(self, ctx: WorkContext, failed: BaseException) -> Result:
        message = str(failed).strip() or type(failed).__name__
        limit = self._box.limits.text_bytes_max
        return Result.error(ctx.delivery, message.encode(errors="replace")[:limit].decode(errors="ignore"))

    async def _settle(self, ctx: WorkContext, outcome: Outcome) -> None:
        try:
            await self._patience.until_answered(lambda: self._tell(ctx, outcome))
        except CovenantError as refusal:
            log.warning("the outcome of task %s was refused: %s (%s)", ctx.task.id, refusal, refusal.code)
        except asyncio.CancelledError:
            log.error("task %s is done, but nobody could be told: its lease stays in flight", ctx.task.id)

    async def _tell(self, ctx: WorkContext, outcome: Outcome) -> None:
        match outcome:
            case Settled():
                pass
            case Release():
                await self._box.release(ctx.lease_id, reason=outcome.reason, not_before_ms=outcome.not_before_ms)
            case _Rejection():
                await self._box.reject(ctx.lease_id, outcome.message)
            case _Reply():
                await self._reply(ctx, outcome.message)
            case _:
                await self._box.send_result(outcome)

    async def _reply(self, ctx: WorkContext, message: Message) -> None:
        """What came by the mailbox is a task for its sender: there the message is its result."""
        try:
            await self._box.reply(ctx.lease_id, message)
        except NotPermitted:
            await self._box.send_result(structs.replace(Result.ok(ctx.delivery), message=message))

    async def _interrupted(self, ctx: WorkContext) -> None:
        """A function in a thread cannot be interrupted, and what goes on must not be begun by somebody else; nor must
        what was cut off half-way and may not be done twice."""
        if not self._is_async:
            log.error("task %s is still being worked on in its thread: its lease stays in flight", ctx.task.id)
        elif ctx.task.is_idempotent:
            await self._give_back(ctx.delivery)
        else:
            log.error("task %s was cut off and is unsafe to do twice: its lease stays in flight", ctx.task.id)

    async def _give_back(self, delivery: Delivery) -> None:
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._patience.until_answered(lambda: self._box.release(delivery, reason="worker stopped"))
        except (CovenantError, TimeoutError) as failed:
            log.warning("task %s could not be given back: %s", delivery.task.id, failed or "no answer")


# --- what a handler returns --------------------------------------------------------------------------------


def _is_async(handler: Handler) -> bool:
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


def _result_of(returned: Any, delivery: Delivery) -> Result:
    if returned is None:
        return Result.ok(delivery)
    if isinstance(returned, Result):
        if returned.task_id != delivery.task.id or returned.status == "partial":
            raise ValueError("a handler returns the final result of its own task")
        return structs.replace(returned, lease_id=delivery.lease_id)
    if isinstance(returned, Message):
        return structs.replace(Result.ok(delivery), message=returned)
    if isinstance(returned, (str, list, tuple, Content)):
        return Result.ok(delivery, _blocks(returned))
    kind = type(returned).__name__
    raise TypeError(f"a handler returns text, content blocks, a Message, a Result or None, not {kind}")


def _tells_of_loss(failed: BaseException) -> bool:
    if isinstance(failed, BaseExceptionGroup):
        return all(_tells_of_loss(inner) for inner in failed.exceptions)
    return isinstance(failed, _LEASE_LOST)


def _blocks(content: Block | Sequence[Block]) -> tuple[Content, ...]:
    blocks = content if isinstance(content, (list, tuple)) else (content,)
    return tuple(Text(block) if isinstance(block, str) else block for block in blocks)


def _artifact(what: Piece | Sequence[Piece], name: str | None, artifact_id: str | None, append: bool) -> Artifact:
    known = artifact_id or name
    if append and known is None:
        raise ValueError("append to which artifact? name it, or give its id")
    pieces = what if isinstance(what, (list, tuple)) else (what,)
    parts = (piece if isinstance(piece, Part) else parts_of(_blocks(piece))[0] for piece in pieces)
    return Artifact(artifact_id=known or RandomIds().lease(), parts=tuple(parts), name=name)


async def in_thread(work: Callable[[], T]) -> T:
    """In a thread of its own, which does not keep the process from ending."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # from here on nobody can cancel it
    context = contextvars.copy_context()

    def run() -> None:
        try:
            outcome = context.run(work)
        except BaseException as failed:
            is_usual = isinstance(failed, (Exception, Ended)) and not isinstance(failed, StopIteration)
            future.set_exception(failed if is_usual else RuntimeError(f"the handler raised {failed!r}"))
        else:
            future.set_result(outcome)

    threading.Thread(target=run, name="covenant-handler", daemon=True).start()
    return await asyncio.wrap_future(future)


# --- patience ----------------------------------------------------------------------------------------------


class _Patience:
    """Asks again while the other side is away. Whatever goes through here may be repeated."""

    def __init__(self, box: Mailbox) -> None:
        self._engine: Any = box._engine
        self._is_away = False

    async def until_answered(self, call: Callable[[], Awaitable[T]]) -> T:
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                answer = await call()
            except (*_PASSING, StoreClosed) as failed:
                if isinstance(failed, StoreClosed) and self._is_closed():
                    raise
                self._say(failed)
                wait_s = max(delay_s * random.uniform(0.5, 1), failed.details.get("retry_after_ms", 0) / 1000)
                await asyncio.sleep(min(wait_s, _DELAY_S_MAX))
                delay_s = min(2 * delay_s, _DELAY_S_MAX)
            else:
                self._is_away = False
                return answer

    def _is_closed(self) -> bool:
        """A daemon that was closed comes back; a box in this process does not."""
        return bool(getattr(self._engine, "is_closed", True))

    def _say(self, failed: CovenantError) -> None:
        """Once, as long as it lasts."""
        if not self._is_away:
            log.warning("waiting for the mailbox: %s (%s)", failed, failed.code)
        self._is_away = True


# --- signs of life -----------------------------------------------------------------------------------------


class _Line(Protocol):
    """How the thread of the heartbeats reaches the mailbox."""

    async def beat(self, lease_id: str) -> LeaseStatus: ...
    async def close(self) -> None: ...


class _OwnLine:
    """A connection of its own to the daemon: it works while the handlers block their loop."""

    def __init__(self, engine: Engine, agent: AgentId) -> None:
        self._engine = engine
        self._agent = agent

    async def beat(self, lease_id: str) -> LeaseStatus:
        status: LeaseStatus = await self._engine.run(BeatLease(self._agent, lease_id))
        return status

    async def close(self) -> None:
        await self._engine.close()


class _BorrowedLine:
    """A store in this process lives on the loop of the handlers: all that another thread can do is ask that loop."""

    def __init__(self, box: Mailbox) -> None:
        self._box = box
        self._loop = asyncio.get_running_loop()

    async def beat(self, lease_id: str) -> LeaseStatus:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._box.heartbeat(lease_id), self._loop))

    async def close(self) -> None:
        pass


async def _line_of(box: Mailbox) -> _Line:
    from covenant.client.engine import RemoteEngine  # late: whoever keeps a mailbox in a file needs none of it

    engine: Any = box._engine
    if isinstance(engine, RemoteEngine):
        return _OwnLine(await engine.again(box.agent), box.agent)
    return _BorrowedLine(box)


class _Pulse:
    """Gives signs of life for all that is held, from a thread with an event loop of its own."""

    def __init__(self, line: _Line, every_ms: int) -> None:
        self._line = line
        self._every_s = every_ms / 1000
        self._home = asyncio.get_running_loop()  # where the handlers are
        self._held: dict[str, WorkContext] = {}
        self._gate = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self._is_over = False
        self._is_lost = False
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="covenant-heartbeat", daemon=True)

    @contextmanager
    def holding(self, ctx: WorkContext) -> Iterator[None]:
        with self._gate:
            self._held[ctx.lease_id] = ctx
        try:
            yield
        finally:
            self._drop(ctx)

    def _drop(self, ctx: WorkContext) -> None:
        with self._gate:
            self._held.pop(ctx.lease_id, None)

    async def __aenter__(self) -> _Pulse:
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Waited for without blocking: a beat under way may need this very loop."""
        self._is_over = True
        if self._loop is not None and self._over is not None:
            self._loop.call_soon_threadsafe(self._over.set)
        await asyncio.wrap_future(self._ended)
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        finally:
            self._ended.set_result(None)

    async def _main(self) -> None:
        self._over = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if self._is_over:
            return
        beating = asyncio.create_task(self._beat_on())
        await self._over.wait()
        beating.cancel()
        await asyncio.wait([beating])
        await self._line.close()

    async def _beat_on(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            if self._home.is_closed():  # what is held there will never be worked on again
                assert self._over is not None
                self._over.set()
                return
            with self._gate:
                held = list(self._held.values())
            for at in range(0, len(held), _BEATS_AT_ONCE):
                await asyncio.gather(*(self._beat(ctx) for ctx in held[at : at + _BEATS_AT_ONCE]))

    async def _beat(self, ctx: WorkContext) -> None:
        try:
            ctx._hear(await self._line.beat(ctx.lease_id))
        except _LEASE_LOST as lost:
            self._drop(ctx)
            if not ctx._is_done:
                ctx._hear_lost(lost)
        except CovenantError as failed:
            if not self._is_lost:
                log.warning("heartbeats do not get through: %s (%s)", failed, failed.code)
            self._is_lost = True
        except Exception:
            log.exception("a heartbeat failed")
        else:
            self._is_lost = False
