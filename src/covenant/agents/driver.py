"""One run in the hands of one worker: its function is called, and what it does is committed from wait to wait.

While the function waits for others the run is parked: no lease, no thread, only the function itself, which may be put
away at any time. When the run is taken up again it goes on where it stands, if it is still here; if not, it is called
from its first line, and finds everything that it did. (Contract 20, 22-24.)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sized
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from msgspec import Raw, structs

from covenant.agents import values
from covenant.agents.context import AgentContext, AgentEntry
from covenant.agents.definition import Agent, TaskFunction, called_with
from covenant.agents.error import CancelRequested, Suspended
from covenant.agents.memory import Batch, Memory, noted
from covenant.mailbox import Mailbox
from covenant.model.agent import AgentId
from covenant.model.content import Content, Json
from covenant.model.error import (
    CovenantError,
    LeaseSuperseded,
    Malformed,
    NotPermitted,
    TaskConflict,
    TaskTerminal,
    TooLarge,
    Unauthenticated,
    UnknownLease,
    UnknownPeer,
)
from covenant.model.run import (
    NOTHING,
    EntryDraft,
    EntryFound,
    EntryRole,
    EntrySeen,
    EntryType,
    Memo,
    RunCommit,
    SignalSeen,
    Standing,
    Wait,
)
from covenant.model.task import Idempotency, Result, Task
from covenant.model.view import Delivery
from covenant.rules.content_key import digest_of_input, task_id, task_key
from covenant.rules.envelope import check_text, seal_message, seal_result
from covenant.rules.run.entry import digest_of_entry
from covenant.rules.run.pattern import matches
from covenant.rules.run.value import check_value
from covenant.rules.run.wait import checked_wait
from covenant.store.clock import Clock

T = TypeVar("T")

LOST: Final = (LeaseSuperseded, TaskTerminal, UnknownLease, Unauthenticated)
# Of these every other task for the same recipient would hear, too.
_OF_RECIPIENT: Final = (NotPermitted, UnknownPeer)
LINGER_S: Final = 0.01  # how long the result of a task of one's own waits for the next commit of its run
_PAGE: Final = 1000
_INTENT_CHARS: Final = 200
_DIGEST_CHARS: Final = 24

log = logging.getLogger("covenant.agents")


class Left(Enum):
    """How a driver lets go of a lease."""

    PARKED = "parked"
    ENDED = "ended"
    LOST = "lost"
    STALE = "stale"  # the run went on elsewhere, or a task of it that was done here: what is here is of the past


class Host(Protocol):
    """What a driver needs of the worker around it."""

    box: Mailbox
    clock: Clock
    tasks: dict[str, TaskFunction]

    async def patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Until the mailbox has answered, however long it is away."""

    async def do(self, function: TaskFunction, delivery: Delivery) -> Result | None:
        """Do a task; None when it was given back for another attempt."""

    async def perform(self, function: Callable[..., Any], key: str, idempotent: bool) -> Any:
        """Do an effect, and get what it returned."""

    def chance(self, key: str) -> bytes:
        """Sixteen bytes for the operation under this key."""

    def probe(self, place: str) -> None:
        """Told of every step, for those who test what a crash there would do."""


class _Reduced(Exception):
    """A commit was refused for some of its tasks: without them it is to be tried again."""


class _Waiting:
    """One place in the function that waits."""

    def __init__(self, wait: Wait | None, is_there: Callable[[], bool]) -> None:
        self.wait = wait  # None: for a commit
        self.is_there = is_there
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Driver:
    def __init__(self, definition: Agent, task: Task, host: Host) -> None:
        self.definition = definition
        self.task = task
        self.run_id = task.id
        self.agent: AgentId = task.recipient
        self.memory = Memory()
        self.batch = Batch()
        self.taken: set[str] = set()  # signals that the store may still tell of
        self._spent: set[str] = set()  # of these, those that it has been told are taken
        self._looks = 0  # under way: the run is held meanwhile; what they bring may be older than the last commit
        self.leaf = 0
        self.state: Raw = NOTHING
        self.checkpoints = 0
        self.has_old_checkpoint = False
        self.is_resuming = False
        self.cancel_requested = False
        self._host = host
        self._box = host.box
        self._lease_id = ""
        self._number = 0
        self._entries = 0
        self._inbox: dict[str, SignalSeen] = {}
        self._entry_numbers: dict[str, int] = {}
        self._known: dict[int, AgentEntry] = {}
        self._once: dict[str, EntryFound] = {}  # entries by their key
        self._digests: dict[str, str] = {}
        self._sent: dict[str, Task] = {}
        self._kinds: dict[str, str] = {}  # of the tasks that this worker has a function for
        self._cancels_due: list[str] = []  # of tasks that are about to be sent
        self._canceled: set[str] = set()
        self.refused: dict[str, str] = {}  # tasks that the store did not take, and why
        self._lost_child: str | None = None  # a task that was done here, and was no longer ours to answer
        self._effects = 0  # under way
        self._is_told = False  # that a cancel is asked for
        self._aside: set[asyncio.Future[Any]] = set()
        self._waits: list[_Waiting] = []
        self._waited = 0  # how often
        self._commits_due = False
        self._own: dict[str, asyncio.Task[None]] = {}  # tasks that this worker does itself
        self._others: set[str] = set()  # tasks that somebody else has
        self._lingering: asyncio.TimerHandle | None = None
        self._telling: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()
        self._offset_ms = 0
        self._store_now = 0
        self._function: asyncio.Task[Any] | None = None
        self._is_dropped = False
        self._is_held = False

    # --- under a lease ------------------------------------------------------------------------------------

    async def take(self, lease_id: str) -> Left:
        """Go on until the run waits for others, or ends, or is somebody else's."""
        self._lease_id = lease_id
        self._is_held = True
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
            self._is_held = False

    def drop(self) -> None:
        """Put the function away: it is not to do anything any more."""
        self._is_dropped = True
        if self._lingering is not None:
            self._lingering.cancel()
        for own in self._own.values():
            own.cancel()
        if self._function is not None and not self._function.done():
            self._function.cancel()
        for waiting in self._waits:
            if not waiting.future.done():
                waiting.future.cancel()

    def hear_cancel(self) -> None:
        self.cancel_requested = True
        self._news.set()

    async def _load(self) -> None:
        after = 0
        while True:
            loaded = await self._ask(partial(self._box.load_run, self._lease_id, after))
            self.memory.learn(loaded)
            if loaded.next is None:
                break
            after = loaded.next
        self._learn_time(loaded.now_ms)
        self._number, self._entries = loaded.step, loaded.entries
        self.leaf, self.state, self.checkpoints = loaded.leaf, loaded.state, loaded.checkpoints
        self.has_old_checkpoint = loaded.checkpoints > 0
        self.is_resuming = loaded.step > 0
        self.cancel_requested = loaded.cancel_requested
        self._entry_numbers = {entry_id: number for number, entry_id in self.memory.entry_ids.items()}
        if not self.is_resuming and self.task.message is not None:
            first = EntryDraft(self.task.message.message_id, EntryRole.USER, said=0)
            self.enter(None, first, values.content_of(self.task.message), None)
        elif self.task.message is not None and not self.checkpoints:
            self.leaf = 1  # the message that it began with

    async def _is_fresh(self) -> bool:
        """Whether the run stands where this function left it."""
        union = self._union() or Wait(until_ms=0)
        looked = structs.replace(union, tasks=union.tasks - self.batch.tasks.keys())
        if not looked.tasks and not looked.signals and looked.until_ms is None:
            looked = Wait(until_ms=0)
        standing = await self._ask(lambda: self._box.look_around(self._lease_id, looked))
        if standing.number != self._number:
            return False
        self._absorb(standing)
        return True

    async def _call(self) -> Any:
        arguments = called_with(self.definition, values.input_of(self.task))
        return await self.definition.function(AgentContext(self), *arguments)

    async def _go_on(self) -> Left:
        while True:
            await self._until_still()
            assert self._function is not None
            if self._function.done():
                return await self._end(self._function)
            if self._telling or self._lost_child is not None:
                await self._told_results()
                continue
            wait = self._prepare()
            if wait is None and self.batch.is_empty and not self._commits_due:
                self._news.clear()
                await self._news.wait()
                continue
            waits = list(self._waits)
            try:
                standing = await self._commit(wait)
            except _Reduced:
                continue
            if standing.parked:
                went_on = not self.batch.is_empty or any(waiting not in waits for waiting in self._waits)
                if went_on or self._function.done():
                    self._wake()  # while it was being parked
                return Left.PARKED
            if wait is not None and standing.cancel_requested and not self._is_told and not self._is_any_there():
                self._cancel_waits()

    def _hear_end(self, function: asyncio.Task[Any]) -> None:
        """A function that ends while the run is parked has waited for something of its own."""
        self._news.set()
        if not self._is_held and not self._is_dropped:
            self._wake()

    async def _until_still(self) -> None:
        """Until every place in the function waits for something that is not there, or the function has ended."""
        assert self._function is not None
        while not self._function.done():
            self._resolve()
            if self._waits or self._commits_due:
                self._news.clear()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                if not self._news.is_set():
                    return
            else:
                self._news.clear()
                await self._news.wait()

    def _resolve(self) -> None:
        """Let those go on whose thing is there."""
        for waiting in [w for w in self._waits if w.future.done() or (w.wait is not None and w.is_there())]:
            self._waits.remove(waiting)
            if not waiting.future.done():
                waiting.future.set_result(None)
            self._news.set()

    def _is_any_there(self) -> bool:
        return any(waiting.wait is not None and waiting.is_there() for waiting in self._waits)

    def _cancel_waits(self) -> None:
        """Once: what the function then does to clean up may wait like anything else."""
        self._is_told = True
        for waiting in [w for w in self._waits if w.wait is not None]:
            self._waits.remove(waiting)
            if not waiting.future.done():
                waiting.future.set_exception(CancelRequested("the sender asked for an end"))

    def _prepare(self) -> Wait | None:
        """What the next commit waits for. What this worker can do itself is begun instead of waited for."""
        awaited = [waiting.wait for waiting in self._waits if waiting.wait is not None]
        wanted = {i for wait in awaited for i in wait.tasks if i not in self.memory.outcomes}
        mine = {i for i in wanted if i in self._own or self._can_do(i)}
        only_mine = wanted == mine and all(not wait.signals and wait.until_ms is None for wait in awaited)
        if only_mine:
            begun, room = self.batch.begins, self._box.limits.batch_max - len(self.batch.begins)
            begun += [i for i in sorted(mine) if i not in self._own and i not in begun][:room]
        goes_on = any(waiting.wait is None for waiting in self._waits)  # as soon as this is committed
        if only_mine or goes_on or self._own or self._effects or self._looks or self._cancels_due:
            return None
        return self._union()

    def _can_do(self, child_id: str) -> bool:
        return child_id in self._kinds and child_id not in self._others

    def _union(self) -> Wait | None:
        """All that any place in the function waits for; the first of it is enough to look again. An effect in doubt is
        decided before anything else goes on."""
        waits = [waiting.wait for waiting in self._waits if waiting.wait is not None]
        if not waits:
            return None
        doubted = next((wait for wait in waits if wait.doubt is not None), None)
        if doubted is not None:
            return doubted
        ended = self.memory.outcomes  # an answer may carry a part of what is there: the rest is asked for
        tasks = frozenset(i for wait in waits for i in wait.tasks if i not in ended)
        if len(waits) == 1:
            only = waits[0]
            if not only.first:  # of more than one wait may name, the others come next
                tasks = frozenset(sorted(tasks)[: self._box.limits.batch_max])
            return Wait(tasks, only.first, only.fail_fast, only.signals, only.until_ms)
        signals = tuple(dict.fromkeys(name for wait in waits for name in wait.signals))
        times = [wait.until_ms for wait in waits if wait.until_ms is not None]
        return Wait(tasks, True, False, signals, min(times, default=None))

    # --- committing ---------------------------------------------------------------------------------------

    async def _commit(self, wait: Wait | None, result: Result | None = None) -> Standing:
        self._stop_lingering()
        await self._told_results()
        batch, self.batch = self.batch, Batch()
        flushed = [waiting for waiting in self._waits if waiting.wait is None]
        self._commits_due = False
        commit = batch.commit(self._number + 1, self.leaf, wait, result, self._is_told)
        try:
            standing = await self._commit_once(commit)
        except LOST:
            raise
        except CovenantError as refusal:
            self._leave_out(refusal, batch, wait)
            raise _Reduced(f"{refusal.code}: {refusal.message}") from refusal
        self._number = standing.number
        self._forget_taken(batch.takes)
        self.batch.cancels += self._cancels_due
        self._cancels_due = []
        for waiting in flushed:
            if not waiting.future.done():
                waiting.future.set_result(None)
        self._absorb(standing)
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
        batch.put_before(self.batch)
        self.batch = batch
        for child in refused:
            log.warning("run %s: task %s is not taken: %s (%s)", self.run_id, child, refusal, refusal.code)
            self._learn_refused(child, refusal.code, refusal.message)
            if child in self._sent:  # else a checkpoint has let go of it
                self._remember_refused(child, refusal)
        self._cancels_due = [child for child in self._cancels_due if child not in refused]

    def _remember_refused(self, child_id: str, refusal: CovenantError) -> None:
        declared = self._sent[child_id].idempotency
        assert declared is not None
        memo = Memo(declared.key, values.raw([self._digests[child_id], refusal.code, refusal.message]))
        self.memory.keep(memo)
        self.batch.leave_out(child_id, memo)

    def _learn_refused(self, child_id: str, code: str, message: str) -> None:
        self.refused[child_id] = code
        self.memory.outcomes[child_id] = Result(child_id, "error", (), f"{code}: {message}")

    def _forget_taken(self, takes: list[str]) -> None:
        """Under the same key, a signal may come again when the store has forgotten the first."""
        self._spent.update(takes)
        for signal_id in takes:
            self._inbox.pop(signal_id, None)
        if not self._looks:
            self.taken -= self._spent
            self._spent.clear()

    async def _commit_once(self, commit: RunCommit) -> Standing:
        self._host.probe("before a commit")
        standing = await self._ask(lambda: self._box.commit_run(self._lease_id, commit))
        self._host.probe("after a commit")
        return standing

    def _absorb(self, standing: Standing) -> None:
        self._learn_time(standing.now_ms)
        self.memory.outcomes.update((result.task_id, result) for result in standing.outcomes)
        self._inbox.update((signal.id, signal) for signal in standing.signals if signal.id not in self.taken)
        self.cancel_requested = self.cancel_requested or standing.cancel_requested

    def _learn_time(self, now_ms: int) -> None:
        self._store_now = now_ms
        self._offset_ms = now_ms - self._host.clock.now_ms()

    async def _end(self, function: asyncio.Task[Any]) -> Left:
        if self._is_dropped:
            return Left.LOST
        failed = None if function.cancelled() else function.exception()
        if function.cancelled() or isinstance(failed, Suspended):
            result = self._error("the agent was canceled from inside")
        elif failed is not None:
            if not isinstance(failed, Exception):
                raise failed
            if self.cancel_requested and isinstance(failed, CancelRequested):
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
            self.batch = Batch()
            self._entries = -1  # what was refused is not there: nothing more is counted
            self.leaf = 0
            await self._commit(None, self._error(f"{refused.code}: {refused.message}"))
        return Left.ENDED

    async def _commit_last(self, result: Result) -> None:
        """Nobody can hear any more that a task was refused: the run itself ends with that."""
        while True:
            try:
                if self._cancels_due:
                    await self._commit(None)
                await self._commit(None, result)
                return
            except _Reduced as reduced:
                result = result if result.status == "error" else self._error(str(reduced))

    async def _end_canceled(self) -> Left:
        """It has cleaned up: what it noted while doing so is kept, and the task ends as it was asked to."""
        while self._cancels_due or not self.batch.is_empty:
            with suppress(_Reduced):
                await self._commit(None)
        await self._ask(lambda: self._box.release(self._lease_id, reason="canceled"))
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

    async def _ask(self, call: Callable[[], Awaitable[T]]) -> T:
        return await self._host.patiently(call)

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
            self._news.set()
        if result is None:
            self._others.add(child_id)  # to be done again later, by whoever leases it
            return
        if child_id in self._canceled:
            return  # however it ended: that it was canceled stands
        told = self._kept(result)
        self.memory.outcomes[child_id] = told
        self.batch.answers.append(told)
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
        if not self._is_dropped and self.batch.answers:
            self._telling.append(self._beside(self._post_lingering()))

    async def _told_results(self) -> None:
        """What follows from a result must not be kept before the result is."""
        while self._telling:
            await asyncio.wait([self._telling.pop()])
        if self._lost_child is not None:
            raise LeaseSuperseded("its result was refused", task_id=self._lost_child)
        if self._is_dropped:
            raise LeaseSuperseded("the run is no longer held here", task_id=self.run_id)

    def _beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._aside.add(task)
        task.add_done_callback(self._aside.discard)
        return task

    async def _post_lingering(self) -> None:
        """The function takes its time: what is done is told meanwhile."""
        answers, self.batch.answers = self.batch.answers, []
        for result in answers:
            try:
                await self._ask(partial(self._box.send_result, result))
            except CovenantError as refused:
                log.warning("the result of task %s was refused: %s", result.task_id, refused.code)
                self._lost_child = result.task_id
                self._news.set()

    def _stop_lingering(self) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None

    async def _post_own(self) -> None:
        """What is still being done when the function ends is nobody's to wait for any more: it is finished first."""
        if self._own:
            await asyncio.wait(list(self._own.values()))

    # --- for the context ----------------------------------------------------------------------------------

    def check_alive(self) -> None:
        if self._is_dropped:
            raise Suspended
        self._host.probe("an operation")

    def now_ms(self) -> int:
        return self._host.clock.now_ms() + self._offset_ms

    def chance(self, key: str) -> bytes:
        return self._host.chance(self._within_run(key))

    def _within_run(self, key: str) -> str:
        """The key of an operation for those outside. Behind a checkpoint the same operation is another."""
        return f"{self.run_id}:{self.checkpoints}:{key}"

    def note(self, key: str, value: Any) -> Memo:
        memo = noted(key, value)
        self.remember(memo)
        return memo

    def remember(self, memo: Memo) -> None:
        self._check_value(memo.value)
        self.memory.keep(memo)
        self.batch.memos.append(memo)

    def _check_room(self, key: str | None, noted: Sized, what: str) -> None:
        """Refuse what the next commit would not carry. That depends on when the last one was: so the operation is
        refused again when it comes again in another call of the function."""
        limit, full_key = self._box.limits.batch_max, f"{key}/full"
        was_full = self.memory.recall(full_key) is not None
        if not was_full and len(noted) < limit:
            return
        if not was_full and key is not None:
            self.remember(Memo(full_key))
        raise TooLarge(f"a commit has at most {limit} {what}: wait for something in between", field=what, limit=limit)

    async def make_room(self) -> None:
        """What is heard may become an entry, and must not be refused then; nor is there an operation that could be
        refused for each thing that is noted."""
        batch = self.batch
        most = max(len(batch.entries), len(batch.memos), len(batch.cancels) + len(self._cancels_due))
        if most >= self._box.limits.batch_max:
            await self.flush()

    def check_name(self, name: str, what: str) -> None:
        check_text(name, what, self._box.limits.key_bytes_max)

    def _check_value(self, value: Raw) -> None:
        if value is NOTHING:
            return
        body, limits = bytes(value), self._box.limits
        if len(body) > limits.content_bytes_max or body.count(b"[") + body.count(b"{") > limits.content_depth_max:
            check_value(value, "value", limits)

    def enter(self, key: str | None, draft: EntryDraft, content: Any, turn: str | None) -> str:
        self._check_room(key, self.batch.entries, "entries")
        self._check_value(draft.content)
        if self._entries >= self._box.limits.entries_max:
            raise TooLarge("the run has too many entries", field="entries", limit=self._box.limits.entries_max)
        if draft.says is not None:
            seal_message(draft.says, self._box.limits)
        self._entries += 1
        number = self._entries
        parent, self.leaf = self.leaf, number
        self.batch.entries.append(
            EntryDraft(draft.id, draft.role, draft.content, parent, draft.type, draft.said, draft.says, turn, draft.key)
        )
        self.memory.entry_ids[number] = draft.id
        self._entry_numbers[draft.id] = number
        self._known[number] = AgentEntry(draft.id, draft.role, content, draft.type, number, parent, self.now_ms(), turn)
        if key is not None:
            self.remember(Memo(key, entry=number))
        if draft.key is not None:
            self._once[draft.key] = EntryFound(number, draft.id, digest_of_entry(draft))
        return draft.id

    async def find_entry(self, key: str) -> EntryFound | None:
        """The entry that was added under a key, also if it is not committed yet."""
        found = self._once.get(key)
        if found is None and self.is_resuming:
            found = await self._look_up(lambda: self._box.find_entry(self._lease_id, key))
        if found is not None:
            self._once[key] = found
            self.memory.entry_ids[found.number] = found.id
            self._entry_numbers[found.id] = found.number
        return found

    async def number_of(self, entry_id: str) -> int:
        number = self._entry_numbers.get(entry_id)
        if number is None and self._number:
            await self._fetch(self._entries, None, every=True)
            number = self._entry_numbers.get(entry_id)
        if number is None:
            raise Malformed(f"no entry {entry_id} in this run", field="entry")
        return number

    async def path_to(self, leaf: int, limit: int | None) -> list[AgentEntry]:
        path: list[AgentEntry] = []
        at = leaf
        while at > 0 and (limit is None or len(path) < limit):
            entry = self._known.get(at)
            if entry is None:
                await self._fetch(at, None if limit is None else limit - len(path))
                entry = self._known[at]
            path.append(entry)
            if entry.type is EntryType.COMPACTION:
                break
            at = entry.parent
        return path[::-1]

    async def _fetch(self, leaf: int, limit: int | None, *, every: bool = False) -> None:
        """The stored part of a way, from an entry back; or of everything."""
        before: int | None = leaf
        left = limit
        while before is not None and (left is None or left > 0):
            size = _PAGE if left is None else min(_PAGE, left)
            page = await self._ask(partial(self._box.run_entries, self.run_id, size, before=before, every=every))
            for entry in page.entries:
                self._known[entry.number] = entry_of(entry)
                self._entry_numbers[entry.id] = entry.number
            left = None if left is None else left - len(page.entries)
            before = page.before

    async def checkpoint(self, state: Raw) -> None:
        self._check_value(state)
        self.batch.checkpoint = state
        self.batch.memos.clear()  # what comes while this is being committed lies behind it
        self.memory.forget()
        self.state = state
        self.checkpoints += 1
        ended, waited, is_alone = list(self.memory.outcomes), self._waited, not self._waits
        await self.flush()
        if is_alone and self._waited == waited + 1:
            self._let_go(ended)

    def _let_go(self, ended: list[str]) -> None:
        """What has ended before a checkpoint is seldom asked for behind it; then the store tells it again. Not while
        another place in the function waits, which may be about to read it."""
        self._known.clear()
        self._entry_numbers.clear()
        self.memory.entry_ids.clear()
        for child_id in ended:
            for known in (self.memory.outcomes, self._digests, self._sent, self._kinds):
                known.pop(child_id, None)

    async def flush(self) -> None:
        """Until everything so far is committed."""
        waiting = _Waiting(None, lambda: False)
        self._waits.append(waiting)
        self._commits_due = True
        await self._wait_in(waiting)

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
        memo = self.memory.recall(content_key)
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
        asked = f"{content_key}#{self.memory.count(content_key)}"
        if (memo is None and child_id not in self.batch.tasks) or self.memory.recall(f"{asked}/full"):
            self._check_room(asked, self.batch.tasks, "tasks")
        self._digests[child_id] = digest
        self._sent[child_id] = task
        if memo is None:
            self.remember(Memo(content_key, values.raw(digest), task=child_id))
            self.batch.tasks[child_id] = task
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
        self._check_value(shown)
        text = bytes(shown)[:_INTENT_CHARS].decode(errors="ignore")
        return Task(
            id=child_id,
            sender=self.agent,
            recipient=to,
            intent_text=f"{kind} {text}",
            task_kind=kind,
            parent=self.run_id,
            deadline_ms=None if timeout_ms is None else self.now_ms() + timeout_ms,
            idempotency=Idempotency("idempotent" if safe else "unsafe", content_key),
            content=(Json(value),),
        )

    def output_type(self, kind: str) -> Any:
        local = self._host.tasks.get(kind)
        return None if local is None else local.output_type

    async def outcome_of(self, child_id: str) -> Result:
        outcomes = self.memory.outcomes
        if child_id not in outcomes:
            await self.wait(Wait(tasks=frozenset((child_id,))), lambda: child_id in outcomes)
        return outcomes[child_id]

    def cancel(self, child_id: str) -> None:
        own = self._own.get(child_id)
        if own is not None:
            own.cancel()
        if child_id in self.memory.outcomes:
            return
        self._canceled.add(child_id)
        if child_id in self.batch.tasks:
            self._cancels_due.append(child_id)
        else:
            self.batch.cancels.append(child_id)

    async def look(self, wait: Wait) -> None:
        """See what is there, without waiting: of what has been committed."""
        sent = frozenset(i for i in wait.tasks if i not in self.batch.tasks)
        if wait.signals and (not self._number or self.batch.takes):
            await self.flush()  # a run hears what was said before it began once it has; and the next when it took one
        if sent or wait.signals:
            looked = Wait(sent, wait.first, wait.fail_fast, wait.signals, wait.until_ms)
            self._absorb(await self._look_up(lambda: self._box.look_around(self._lease_id, looked)))

    async def _look_up(self, call: Callable[[], Awaitable[T]]) -> T:
        """Ask the store as the holder of the run: another place in the function may have parked it. Who has lost it is
        put away, and not told of an error that its code could catch."""
        self._looks += 1
        try:
            if not self._is_held:
                await self.flush()
            return await self._ask(call)
        except LOST as lost:
            self.drop()
            raise Suspended from lost
        finally:
            self._looks -= 1
            self._news.set()

    async def hear(self, patterns: tuple[str, ...], until: int | None, doubt: str | None = None) -> SignalSeen | None:
        """The oldest signal that fits, or None when the time is over."""
        wait = Wait(signals=patterns, until_ms=until, doubt=doubt)
        await self.make_room()
        while True:  # another place may have been quicker to take what was there
            await self.wait(wait, lambda: self._heard(patterns) is not None or self._is_over(until))
            heard = self._heard(patterns)
            if heard is None and self._is_over(until):
                await self.look(wait)  # it may have come before the time was over
                heard = self._heard(patterns)
            if heard is not None or self._is_over(until):
                return heard

    async def first_of(self, wait: Wait) -> SignalSeen | None:
        outcomes = self.memory.outcomes

        def has_come() -> bool:
            return any(i in outcomes for i in wait.tasks) or self._heard(wait.signals) is not None

        def is_there() -> bool:
            return has_come() or self._is_over(wait.until_ms)

        await self.make_room()
        while True:  # another place may have been quicker to take what was there
            await self.wait(wait, is_there)
            if not has_come() and is_there():
                await self.look(wait)  # it may have come before the time was over
            if is_there():
                break
        if any(i in outcomes for i in wait.tasks):
            return None
        return self._heard(wait.signals)

    def _heard(self, patterns: tuple[str, ...]) -> SignalSeen | None:
        fitting = [
            s for s in self._inbox.values() if s.id not in self.taken and any(matches(p, s.name) for p in patterns)
        ]
        return min(fitting, key=lambda signal: signal.order, default=None)

    def _is_over(self, until: int | None) -> bool:
        return until is not None and self._store_now >= until

    async def signals_like(self, pattern: str) -> list[SignalSeen]:
        if not self._number or self.batch.takes or self.batch.entries:
            await self.flush()  # a run hears what was said before it began once it has; and a commit takes so many
        looked = Wait(signals=(pattern,))
        standing = await self._look_up(lambda: self._box.look_around(self._lease_id, looked, every=True))
        return [signal for signal in standing.signals if signal.id not in self.taken]

    async def wait(self, wait: Wait, is_there: Callable[[], bool]) -> None:
        if wait.signals or wait.until_ms is not None or wait.first:
            checked_wait(wait, self._box.limits)
        if wait.signals:
            self._inbox.clear()  # what was seen and left: there may be an older one that fits
        if wait.tasks and is_there():
            return
        waiting = _Waiting(wait, is_there)
        self._waits.append(waiting)
        await self._wait_in(waiting)

    async def _wait_in(self, waiting: _Waiting) -> None:
        self._host.probe("a wait")
        self._waited += 1
        self._news.set()
        if not self._is_held:
            self._wake()
        try:
            await waiting.future
        finally:
            if waiting in self._waits:
                self._waits.remove(waiting)
        if self._is_dropped:
            raise Suspended

    def _wake(self) -> None:
        """Another place in the function has more to do while the run is parked."""

        async def wake() -> None:
            try:
                await self._ask(lambda: self._box.wake_run(self.run_id))
            except CovenantError as refused:
                log.info("run %s could not be woken: %s", self.run_id, refused.code)

        self._beside(wake())

    async def perform(self, function: Callable[..., Any], key: str, idempotent: bool) -> dict[str, Any]:
        """An effect: what it returned, or how it failed."""
        self._host.probe("an effect")
        self._effects += 1  # the run is held as long as it lasts
        try:
            outcome = {"value": values.plain(await self._host.perform(function, self._within_run(key), idempotent))}
            self._check_value(values.raw(outcome))
            return outcome
        except Exception as failed:
            return {"error": f"{type(failed).__name__}: {failed}"}
        finally:
            self._effects -= 1
            self._news.set()


def entry_of(seen: EntrySeen) -> AgentEntry:
    content = values.unraw(seen.content) if seen.message is None else values.content_of(seen.message)
    return AgentEntry(seen.id, seen.role, content, seen.type, seen.number, seen.parent, seen.at_ms, seen.turn)


def _with_attempts(task: Task, attempts: int | None, backoff_ms: int | None) -> Task:
    options: Content = Json({"covenant": {"attempts": attempts, "backoff_ms": backoff_ms}})
    return structs.replace(task, content=(*task.content, options))
