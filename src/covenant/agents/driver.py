"""One run in the hands of one worker: its function is called, and what it does is committed from wait to wait.

While the function waits for others the run is parked: no lease, no thread, only the function itself, which may be put
away at any time. When the run is taken up again it goes on where it stands, if it is still here; if not, it is called
from its first line, and finds everything that it did. (Contract 20, 22-24.)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any, Final, TypeVar

from msgspec import Raw, structs

from covenant.agents import values
from covenant.agents.context import AgentContext
from covenant.agents.definition import Agent, TaskFunction, called_with
from covenant.agents.entries import Entries
from covenant.agents.error import CancelRequested, Suspended
from covenant.agents.hold import LOST, Hold
from covenant.agents.host import Host
from covenant.agents.inbox import Inbox
from covenant.agents.lookout import Lookout
from covenant.agents.memory import Batch
from covenant.agents.notes import Notes
from covenant.agents.times import Times
from covenant.agents.waits import Waits
from covenant.model.agent import AgentId
from covenant.model.content import Content, Json
from covenant.model.error import (
    CovenantError,
    LeaseSuperseded,
    Malformed,
    NotPermitted,
    TaskConflict,
    UnknownPeer,
)
from covenant.model.run import (
    NOTHING,
    Memo,
    RunCommit,
    SignalSeen,
    Standing,
    Wait,
)
from covenant.model.task import Idempotency, Result, Task
from covenant.model.view import Delivery
from covenant.rules.content_key import digest_of_input, task_id, task_key
from covenant.rules.envelope import seal_result

T = TypeVar("T")

# Of these every other task for the same recipient would hear, too.
_OF_RECIPIENT: Final = (NotPermitted, UnknownPeer)
LINGER_S: Final = 0.01  # how long the result of a task of one's own waits for the next commit of its run
_INTENT_CHARS: Final = 200
_DIGEST_CHARS: Final = 24

log = logging.getLogger("covenant.agents")


class Left(Enum):
    """How a driver lets go of a lease."""

    PARKED = "parked"
    ENDED = "ended"
    LOST = "lost"
    STALE = "stale"  # the run went on elsewhere, or a task of it that was done here: what is here is of the past


class _Reduced(Exception):
    """A commit was refused for some of its tasks: without them it is to be tried again."""


class Driver:
    def __init__(self, definition: Agent, task: Task, host: Host) -> None:
        self.definition = definition
        self.task = task
        self.run_id = task.id
        self.agent: AgentId = task.recipient
        self.hold = Hold(task.id, host)
        self.notes = Notes(host.box)
        self.times = Times(host.clock, self.notes)
        self.inbox = Inbox()
        self.waits = Waits(self.hold, self.notes, self.inbox)
        self.lookout = Lookout(self.hold, self.notes, self.times, self.inbox, self.waits, self.drop)
        self.entries = Entries(self.hold, self.notes, self.times, self.lookout)
        self.state: Raw = NOTHING
        self.checkpoints = 0
        self.has_old_checkpoint = False
        self._host = host
        self._box = host.box
        self._digests: dict[str, str] = {}
        self._sent: dict[str, Task] = {}
        self._kinds: dict[str, str] = {}  # of the tasks that this worker has a function for
        self._canceled: set[str] = set()
        self.refused: dict[str, str] = {}  # tasks that the store did not take, and why
        self._lost_child: str | None = None  # a task that was done here, and was no longer ours to answer
        self._effects = 0  # under way
        self._own: dict[str, asyncio.Task[None]] = {}  # tasks that this worker does itself
        self._others: set[str] = set()  # tasks that somebody else has
        self._lingering: asyncio.TimerHandle | None = None
        self._telling: list[asyncio.Task[None]] = []
        self._function: asyncio.Task[Any] | None = None

    # --- under a lease ------------------------------------------------------------------------------------

    async def take(self, lease_id: str) -> Left:
        """Go on until the run waits for others, or ends, or is somebody else's."""
        self.hold.lease_id = lease_id
        self.hold.is_held = True
        try:
            if self._function is None:
                await self._load()
                self._function = asyncio.create_task(self._call())
                self._function.add_done_callback(self._hear_end)
            elif not await self._is_fresh():
                self.drop()
                return Left.STALE
            return await self._go_on()
        except LOST as lost:
            self.drop()
            if lost.details.get("task_id", self.run_id) != self.run_id:
                log.info("run %s is called anew: its task %s", self.run_id, lost)
                return Left.STALE
            log.info("run %s is no longer held here: %s", self.run_id, lost.code)
            return Left.LOST
        except BaseException:
            self.drop()
            raise
        finally:
            self.hold.is_held = False

    def drop(self) -> None:
        """Put the function away: it is not to do anything any more."""
        self.hold.is_dropped = True
        if self._lingering is not None:
            self._lingering.cancel()
        for own in self._own.values():
            own.cancel()
        if self._function is not None and not self._function.done():
            self._function.cancel()
        self.waits.drop()

    async def _load(self) -> None:
        after = 0
        while True:
            loaded = await self.hold.ask(partial(self._box.load_run, self.hold.lease_id, after))
            self.notes.memory.learn(loaded)
            if loaded.next is None:
                break
            after = loaded.next
        self.times.learn(loaded.now_ms)
        self.hold.learn(loaded)
        self.state, self.checkpoints = loaded.state, loaded.checkpoints
        self.has_old_checkpoint = loaded.checkpoints > 0
        self.entries.learn(loaded, self.task.message)

    async def _is_fresh(self) -> bool:
        """Whether the run stands where this function left it."""
        union = self.waits.union(self.notes.memory.outcomes) or Wait(until_ms=0)
        looked = structs.replace(union, tasks=union.tasks - self.notes.batch.tasks.keys())
        if not looked.tasks and not looked.signals and looked.until_ms is None:
            looked = Wait(until_ms=0)
        standing = await self.hold.ask(lambda: self._box.look_around(self.hold.lease_id, looked))
        if standing.number != self.hold.number:
            return False
        self.lookout.absorb(standing)
        return True

    async def _call(self) -> Any:
        arguments = called_with(self.definition, values.input_of(self.task))
        return await self.definition.function(AgentContext(self), *arguments)

    async def _go_on(self) -> Left:
        while True:
            assert self._function is not None
            await self.waits.until_still(self._function)
            if self._function.done():
                return await self._end(self._function)
            if self._telling or self._lost_child is not None:
                await self._told_results()
                continue
            wait = self._prepare()
            if wait is None and self.notes.batch.is_empty and not self.waits.is_commit_due:
                self.hold.news.clear()
                await self.hold.news.wait()
                continue
            waits = self.waits.all
            try:
                standing = await self._commit(wait)
            except _Reduced:
                continue
            if standing.parked:
                went_on = not self.notes.batch.is_empty or any(waiting not in waits for waiting in self.waits.all)
                if went_on or self._function.done():
                    self.hold.wake()  # while it was being parked
                return Left.PARKED
            is_asked = wait is not None and standing.cancel_requested
            if is_asked and not self.waits.is_told and not self.waits.is_any_there:
                self.waits.tell_cancel()

    def _hear_end(self, function: asyncio.Task[Any]) -> None:
        """A function that ends while the run is parked has waited for something of its own."""
        self.hold.news.set()
        if not self.hold.is_held and not self.hold.is_dropped:
            self.hold.wake()

    def _prepare(self) -> Wait | None:
        """What the next commit waits for. What this worker can do itself is begun instead of waited for."""
        awaited = self.waits.awaited
        wanted = {i for wait in awaited for i in wait.tasks if i not in self.notes.memory.outcomes}
        mine = {i for i in wanted if i in self._own or self._can_do(i)}
        only_mine = wanted == mine and all(not wait.signals and wait.until_ms is None for wait in awaited)
        if only_mine:
            begun, room = self.notes.batch.begins, self._box.limits.batch_max - len(self.notes.batch.begins)
            begun += [i for i in sorted(mine) if i not in self._own and i not in begun][:room]
        is_busy = self._own or self._effects or self.lookout.under_way
        if only_mine or is_busy or self.waits.flushing or self.notes.cancels_due:
            return None
        return self.waits.union(self.notes.memory.outcomes)

    def _can_do(self, child_id: str) -> bool:
        return child_id in self._kinds and child_id not in self._others

    # --- committing ---------------------------------------------------------------------------------------

    async def _commit(self, wait: Wait | None, result: Result | None = None) -> Standing:
        self._stop_lingering()
        await self._told_results()
        batch = self.notes.hand_over()
        flushed = self.waits.flushing
        self.waits.is_commit_due = False
        commit = batch.commit(self.hold.number + 1, self.entries.leaf, wait, result, self.waits.is_told)
        try:
            standing = await self._commit_once(commit)
        except LOST:
            raise
        except CovenantError as refusal:
            self._leave_out(refusal, batch, wait)
            raise _Reduced(f"{refusal.code}: {refusal.message}") from refusal
        self.hold.number = standing.number
        self.inbox.forget_taken(batch.takes, is_looking=self.lookout.under_way > 0)
        self.notes.batch.cancels += self.notes.cancels_due
        self.notes.cancels_due = []
        for waiting in flushed:
            waiting.go_on()
        self.lookout.absorb(standing)
        for child_id in batch.begins:
            lease_id = standing.leases.get(child_id)
            if lease_id is None:
                self._others.add(child_id)
            else:
                self._begin(child_id, lease_id, standing.attempts.get(child_id, 1), batch.tasks.get(child_id))
        return standing

    def _leave_out(self, refusal: CovenantError, batch: Batch, wait: Wait | None) -> None:
        """Raise it unless it is about tasks alone: those have failed then, and all else is still to be committed."""
        child_id = refusal.details.get("task_id")
        if child_id not in batch.tasks and (wait is None or child_id not in wait.tasks):
            raise refusal
        refused = [child_id]
        if isinstance(refusal, _OF_RECIPIENT) and child_id in batch.tasks:
            to = batch.tasks[child_id].recipient.pubkey
            refused = [i for i, task in batch.tasks.items() if task.recipient.pubkey == to]
        self.notes.take_back(batch)
        for child in refused:
            log.warning("run %s: task %s is not taken: %s (%s)", self.run_id, child, refusal, refusal.code)
            self._learn_refused(child, refusal.code, refusal.message)
            if child in self._sent:  # else a checkpoint has let go of it
                self._remember_refused(child, refusal)
        self.notes.cancels_due = [child for child in self.notes.cancels_due if child not in refused]

    def _remember_refused(self, child_id: str, refusal: CovenantError) -> None:
        declared = self._sent[child_id].idempotency
        assert declared is not None
        memo = Memo(declared.key, values.raw([self._digests[child_id], refusal.code, refusal.message]))
        self.notes.memory.keep(memo)
        self.notes.batch.leave_out(child_id, memo)

    def _learn_refused(self, child_id: str, code: str, message: str) -> None:
        self.refused[child_id] = code
        self.notes.memory.outcomes[child_id] = Result(child_id, "error", (), f"{code}: {message}")

    async def _commit_once(self, commit: RunCommit) -> Standing:
        self.hold.probe("before a commit")
        standing = await self.hold.ask(lambda: self._box.commit_run(self.hold.lease_id, commit))
        self.hold.probe("after a commit")
        return standing

    async def _end(self, function: asyncio.Task[Any]) -> Left:
        if self.hold.is_dropped:
            return Left.LOST
        failed = None if function.cancelled() else function.exception()
        if function.cancelled() or isinstance(failed, Suspended):
            result = self._error("the agent was canceled from inside")
        elif failed is not None:
            if not isinstance(failed, Exception):
                raise failed
            if self.hold.cancel_requested and isinstance(failed, CancelRequested):
                return await self._end_canceled()
            log.info("run %s failed", self.run_id, exc_info=failed)
            result = self._error(str(failed) or type(failed).__name__, failed)
        else:
            result = self._ok(function.result())
        await self._post_own()
        try:
            await self._commit_last(result)
        except LOST:
            raise
        except CovenantError as refused:
            self.notes.batch = Batch()
            self.entries.give_up()
            await self._commit(None, self._error(f"{refused.code}: {refused.message}"))
        return Left.ENDED

    async def _commit_last(self, result: Result) -> None:
        """Nobody can hear any more that a task was refused: the run itself ends with that."""
        while True:
            try:
                if self.notes.cancels_due:
                    await self._commit(None)
                await self._commit(None, result)
                return
            except _Reduced as reduced:
                result = result if result.status == "error" else self._error(str(reduced))

    async def _end_canceled(self) -> Left:
        """It has cleaned up: what it noted while doing so is kept, and the task ends as it was asked to."""
        while self.notes.cancels_due or not self.notes.batch.is_empty:
            with suppress(_Reduced):
                await self._commit(None)
        await self.hold.ask(lambda: self._box.release(self.hold.lease_id, reason="canceled"))
        return Left.ENDED

    def _ok(self, value: Any) -> Result:
        try:
            return Result(self.run_id, "ok", values.blocks_of(value))
        except (TypeError, ValueError, NotImplementedError) as wrong:
            return self._error(f"what the agent returned is no JSON: {wrong}")

    def _error(self, message: str, failed: BaseException | None = None) -> Result:
        text = message if failed is None else f"{type(failed).__name__}: {message}"
        limit = self._box.limits.text_bytes_max
        return Result(self.run_id, "error", (), text.encode(errors="replace")[:limit].decode(errors="ignore"))

    # --- tasks that this worker does itself ---------------------------------------------------------------

    def _begin(self, child_id: str, lease_id: str, attempt: int, sent: Task | None) -> None:
        task = sent or self._sent[child_id]
        delivery = Delivery(task, lease_id, attempt, 2 * attempt)
        function = self._host.tasks[self._kinds[child_id]]
        self._own[child_id] = asyncio.create_task(self._do(function, delivery))

    async def _do(self, function: TaskFunction, delivery: Delivery) -> None:
        """Its result goes with the next commit of the run: both are this worker's, and it is one sync for both."""
        child_id = delivery.task.id
        try:
            result = await self._host.do(function, delivery)
        finally:
            self._own.pop(child_id, None)
            self.hold.news.set()
        if result is None:
            self._others.add(child_id)  # to be done again later, by whoever leases it
            return
        if child_id in self._canceled:
            return  # however it ended: that it was canceled stands
        told = self._kept(result)
        self.notes.memory.outcomes[child_id] = told
        self.notes.batch.answers.append(told)
        if self._lingering is None:
            self._lingering = asyncio.get_running_loop().call_later(LINGER_S, self._linger_no_more)

    def _kept(self, result: Result) -> Result:
        """As it will be read when it is read again; or that it cannot be kept."""
        try:
            return seal_result(result, self._box.limits)
        except CovenantError as refused:
            message = f"{refused.code}: {refused.message}"
            return Result(result.task_id, "error", (), message, result.lease_id)

    def _linger_no_more(self) -> None:
        self._lingering = None
        if not self.hold.is_dropped and self.notes.batch.answers:
            self._telling.append(self.hold.beside(self._post_lingering()))

    async def _told_results(self) -> None:
        """What follows from a result must not be kept before the result is."""
        while self._telling:
            await asyncio.wait([self._telling.pop()])
        if self._lost_child is not None:
            raise LeaseSuperseded("its result was refused", task_id=self._lost_child)
        if self.hold.is_dropped:
            raise LeaseSuperseded("the run is no longer held here", task_id=self.run_id)

    async def _post_lingering(self) -> None:
        """The function takes its time: what is done is told meanwhile."""
        answers, self.notes.batch.answers = self.notes.batch.answers, []
        for result in answers:
            try:
                await self.hold.ask(partial(self._box.send_result, result))
            except CovenantError as refused:
                log.warning("the result of task %s was refused: %s", result.task_id, refused.code)
                self._lost_child = result.task_id
                self.hold.news.set()

    def _stop_lingering(self) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None

    async def _post_own(self) -> None:
        """What is still being done when the function ends is nobody's to wait for any more: it is finished first."""
        if self._own:
            await asyncio.wait(list(self._own.values()))

    # --- for the context ----------------------------------------------------------------------------------

    def chance(self, key: str) -> bytes:
        return self._host.chance(self._within_run(key))

    def _within_run(self, key: str) -> str:
        """The key of an operation for those outside. Behind a checkpoint the same operation is another."""
        return f"{self.run_id}:{self.checkpoints}:{key}"

    async def checkpoint(self, state: Raw) -> None:
        self.notes.check_value(state)
        self.notes.batch.checkpoint = state
        self.notes.batch.memos.clear()  # what comes while this is being committed lies behind it
        self.notes.memory.forget()
        self.state = state
        self.checkpoints += 1
        ended, waited, is_alone = list(self.notes.memory.outcomes), self.waits.count, not self.waits.all
        await self.waits.flush()
        if is_alone and self.waits.count == waited + 1:
            self._let_go(ended)

    def _let_go(self, ended: list[str]) -> None:
        """What has ended before a checkpoint is seldom asked for behind it; then the store tells it again. Not while
        another place in the function waits, which may be about to read it."""
        self.entries.forget()
        for child_id in ended:
            for known in (self.notes.memory.outcomes, self._digests, self._sent, self._kinds):
                known.pop(child_id, None)

    def schedule(
        self,
        kind: str,
        value: Any,
        *,
        recipient: AgentId | str | None,
        key: str | None,
        instance: str | int | None,
        timeout_ms: int | None,
        idempotent: bool | None,
        attempts: int | None,
        backoff_ms: int | None,
    ) -> str:
        content_key = task_key(self.run_id, kind, value, key=key, instance=instance)
        child_id = task_id(content_key)
        to = self._recipient(recipient)
        digest = digest_of_input([value, to.pubkey])[:_DIGEST_CHARS]
        memo = self.notes.memory.recall(content_key)
        noted = None if memo is None else values.unraw(memo.value)
        known = self._digests.get(child_id) or (noted[0] if isinstance(noted, list) else noted)
        if known is not None and known != digest:
            raise TaskConflict(
                f"the task {kind} has another input or recipient; instance= tells tasks apart", task_id=child_id
            )
        if isinstance(noted, list):
            self._learn_refused(child_id, *noted[1:])
        local = self._host.tasks.get(kind) if recipient is None else None
        if local is not None:
            self._kinds[child_id] = kind
        task = self._task(child_id, content_key, kind, value, to, local, timeout_ms, idempotent)
        if attempts is not None and attempts > 1 and not task.is_idempotent:
            raise Malformed("what may not be done twice has one attempt; say idempotent=True", field="attempts")
        if attempts is not None or backoff_ms is not None:
            task = _with_attempts(task, attempts, backoff_ms)
        asked = f"{content_key}#{self.notes.memory.count(content_key)}"
        if (memo is None and child_id not in self.notes.batch.tasks) or self.notes.memory.recall(f"{asked}/full"):
            self.notes.check_room(asked, self.notes.batch.tasks, "tasks")
        self._digests[child_id] = digest
        self._sent[child_id] = task
        if memo is None:
            self.notes.remember(Memo(content_key, values.raw(digest), task=child_id))
            self.notes.batch.tasks[child_id] = task
        return child_id

    def _recipient(self, named: AgentId | str | None) -> AgentId:
        if named is None:
            return self.agent
        return AgentId.named(named) if isinstance(named, str) else named

    def _task(
        self,
        child_id: str,
        content_key: str,
        kind: str,
        value: Any,
        to: AgentId,
        local: TaskFunction | None,
        timeout_ms: int | None,
        idempotent: bool | None,
    ) -> Task:
        safe = idempotent if idempotent is not None else local is not None and local.safety == "idempotent"
        shown = values.raw(value)
        self.notes.check_value(shown)
        text = bytes(shown)[:_INTENT_CHARS].decode(errors="ignore")
        return Task(
            id=child_id,
            sender=self.agent,
            recipient=to,
            intent_text=f"{kind} {text}",
            task_kind=kind,
            parent=self.run_id,
            deadline_ms=None if timeout_ms is None else self.times.now_ms() + timeout_ms,
            idempotency=Idempotency("idempotent" if safe else "unsafe", content_key),
            content=(Json(value),),
        )

    def output_type(self, kind: str) -> Any:
        local = self._host.tasks.get(kind)
        return None if local is None else local.output_type

    async def outcome_of(self, child_id: str) -> Result:
        outcomes = self.notes.memory.outcomes
        if child_id not in outcomes:
            await self.waits.wait(Wait(tasks=frozenset((child_id,))), lambda: child_id in outcomes)
        return outcomes[child_id]

    def cancel(self, child_id: str) -> None:
        own = self._own.get(child_id)
        if own is not None:
            own.cancel()
        if child_id in self.notes.memory.outcomes:
            return
        self._canceled.add(child_id)
        if child_id in self.notes.batch.tasks:
            self.notes.cancels_due.append(child_id)
        else:
            self.notes.batch.cancels.append(child_id)

    async def hear(self, patterns: tuple[str, ...], until: int | None, doubt: str | None = None) -> SignalSeen | None:
        """The oldest signal that fits, or None when the time is over."""
        wait = Wait(signals=patterns, until_ms=until, doubt=doubt)
        await self.waits.make_room()
        while True:  # another place may have been quicker to take what was there
            await self.waits.wait(wait, lambda: self.inbox.heard(patterns) is not None or self.times.is_over(until))
            heard = self.inbox.heard(patterns)
            if heard is None and self.times.is_over(until):
                await self.lookout.look(wait)  # it may have come before the time was over
                heard = self.inbox.heard(patterns)
            if heard is not None or self.times.is_over(until):
                return heard

    async def first_of(self, wait: Wait) -> SignalSeen | None:
        outcomes = self.notes.memory.outcomes

        def has_come() -> bool:
            return any(i in outcomes for i in wait.tasks) or self.inbox.heard(wait.signals) is not None

        def is_there() -> bool:
            return has_come() or self.times.is_over(wait.until_ms)

        await self.waits.make_room()
        while True:  # another place may have been quicker to take what was there
            await self.waits.wait(wait, is_there)
            if not has_come() and is_there():
                await self.lookout.look(wait)  # it may have come before the time was over
            if is_there():
                break
        if any(i in outcomes for i in wait.tasks):
            return None
        return self.inbox.heard(wait.signals)

    async def signals_like(self, pattern: str) -> list[SignalSeen]:
        if not self.hold.number or self.notes.batch.takes or self.notes.batch.entries:
            # A run hears what was said before it began once it has; and a commit takes so many.
            await self.waits.flush()
        looked = Wait(signals=(pattern,))
        standing = await self.lookout.look_up(lambda: self._box.look_around(self.hold.lease_id, looked, every=True))
        return [signal for signal in standing.signals if signal.id not in self.inbox.taken]

    async def perform(self, function: Callable[..., Any], key: str, idempotent: bool) -> dict[str, Any]:
        """An effect: what it returned, or how it failed."""
        self.hold.probe("an effect")
        self._effects += 1  # the run is held as long as it lasts
        try:
            outcome = {"value": values.plain(await self._host.perform(function, self._within_run(key), idempotent))}
            self.notes.check_value(values.raw(outcome))
            return outcome
        except Exception as failed:
            return {"error": f"{type(failed).__name__}: {failed}"}
        finally:
            self._effects -= 1
            self.hold.news.set()


def _with_attempts(task: Task, attempts: int | None, backoff_ms: int | None) -> Task:
    options: Content = Json({"covenant": {"attempts": attempts, "backoff_ms": backoff_ms}})
    return structs.replace(task, content=(*task.content, options))
