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
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Final, TypeAlias, TypeVar

from msgspec import structs

from covenant.mailbox import Mailbox
from covenant.model.content import Content
from covenant.model.error import (
    CovenantError,
    Malformed,
    NotPermitted,
)
from covenant.model.message import Message
from covenant.model.task import Result
from covenant.model.view import Delivery
from covenant.rules.envelope import seal_result
from covenant.store.clock import RandomIds
from covenant.work.context import LEASE_LOST, Block, Ended, Rejection, Release, Reply, Settled, WorkContext, blocks
from covenant.work.patience import Patience
from covenant.work.pulse import Line, Pulse, line_of

__all__ = ["Ended", "Handler", "Release", "Settled", "WorkContext", "Worker", "in_thread"]

HEARTBEAT_MS: Final = 10_000
GRACE_MS: Final = 30_000

_LAST_WORDS_S: Final = 5.0  # for giving leases back at the end

T = TypeVar("T")


log = logging.getLogger("covenant.worker")


Returned: TypeAlias = Result | Message | Settled | Block | Sequence[Block] | None
Handler: TypeAlias = Callable[["WorkContext"], Returned | Awaitable[Returned]]

Outcome: TypeAlias = Result | Release | Settled | Rejection | Reply


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
        self._is_told_to_stop = False  # by whichever thread, also before it runs
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
        try:
            await self._running
        finally:
            self._is_told_to_stop = False  # it may have ended before

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
        """Take nothing more, finish what is under way. From any thread, or from a signal handler of the loop. One that
        does not run yet ends as soon as it does."""
        self._is_told_to_stop = True  # before the look at the loop: whoever sets that looks at this
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stopping.set)

    def _prepare(self) -> None:
        if self._loop is not None:
            raise Malformed("this worker runs already")
        self._loop = asyncio.get_running_loop()
        self._stopping.clear()
        if self._is_told_to_stop:
            self._stopping.set()

    async def _serve(self) -> None:
        try:
            self._box = self._opened.of(self.agent, incarnation=self._incarnation or RandomIds().lease())
            line = await line_of(self._box)
            self._patience = Patience(self._box)
            async with self._pulse_on(line) as self._pulse:
                self._is_up.set()
                await self._work_on()
        finally:
            self._loop = None
            self._is_told_to_stop = False

    def _pulse_on(self, line: Line) -> Pulse:
        return Pulse(line, self._heartbeat_ms)

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
        except BaseException as failed:
            has_ended = ctx._ending is not None and not isinstance(failed, Exception)
            if has_ended or not is_own_failure(failed):
                raise
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
            case Rejection():
                await self._box.reject(ctx.lease_id, outcome.message)
            case Reply():
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
        return Result.ok(delivery, blocks(returned))
    kind = type(returned).__name__
    raise TypeError(f"a handler returns text, content blocks, a Message, a Result or None, not {kind}")


def _tells_of_loss(failed: BaseException) -> bool:
    if isinstance(failed, BaseExceptionGroup):
        return all(_tells_of_loss(inner) for inner in failed.exceptions)
    return isinstance(failed, LEASE_LOST)


def is_own_failure(failed: BaseException) -> bool:
    """Whether a handler has failed by itself, with whatever it raised: nobody has ended it, nor the process."""
    if isinstance(failed, asyncio.CancelledError):
        job = asyncio.current_task()
        return job is None or not job.cancelling()
    return not isinstance(failed, (Ended, KeyboardInterrupt, SystemExit))


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
