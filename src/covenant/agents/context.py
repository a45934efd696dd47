"""What an agent's function has in its hands. (Contract 18-24; seed 003.)

Nothing here needs a guard against being called again: what happened before is found, what did not happens now. What is
not awaited is only noted, and is committed with the next wait, all at once.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from covenant.agents import values
from covenant.agents.entries import AgentEntry
from covenant.agents.error import (
    AllTasksFailed,
    CheckpointUnread,
    EffectFailed,
    TaskFailed,
)
from covenant.agents.pending import PendingTask, Selected, Settled, SignalWait, Timer
from covenant.model.agent import AgentId
from covenant.model.error import Malformed
from covenant.model.message import Message, Part
from covenant.model.run import (
    EFFECT,
    MESSAGE,
    EntryDraft,
    EntryRole,
    EntryType,
    Memo,
    SignalSeen,
    Wait,
)
from covenant.model.task import Result, Task
from covenant.rules.run.pattern import matches

if TYPE_CHECKING:
    from covenant.agents.driver import Driver

_UNREAD = "this run has a checkpoint: look at ctx.state before doing anything, and go on from there"


class AgentContext:
    """Of one call of an agent's function."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._is_state_read = False

    # --- who and what -------------------------------------------------------------------------------------

    @property
    def run_id(self) -> str:
        return self._driver.run_id

    @property
    def agent(self) -> AgentId:
        return self._driver.agent

    @property
    def sent(self) -> Task:
        """The task that this run is."""
        return self._driver.task

    @property
    def resuming(self) -> bool:
        """Whether the function was called before for this run."""
        return self._driver.hold.is_resuming

    @property
    def cancel_requested(self) -> bool:
        return self._driver.hold.cancel_requested

    @property
    def state(self) -> Any:
        """What the last checkpoint kept; None when there is none."""
        self._is_state_read = True
        state = values.unraw(self._driver.checkpoints.state)
        kind = self._driver.definition.state_type
        return state if state is None or kind is None else values.typed(state, kind)

    @property
    def checkpoints(self) -> int:
        return self._driver.checkpoints.count

    def set_turn(self, turn: str | None) -> None:
        """Mark the entries that follow as belonging together."""
        if turn is not None:
            self._driver.notes.check_name(turn, "turn")
        self._driver.entries.turn = turn

    # --- entries ------------------------------------------------------------------------------------------

    async def append(
        self,
        role: EntryRole | str,
        content: Any,
        *,
        type: EntryType | str = EntryType.MESSAGE,
        key: str | None = None,
    ) -> str:
        """Add an entry below the last one, and get its id. With `key`, it is there once in the life of the run."""
        draft = EntryDraft(str(uuid.uuid4()), EntryRole(role), values.raw(content), type=EntryType(type), key=key)
        entered = values.plain(content)
        self._operate()
        return await self._driver.entries.append(draft, entered)

    async def append_tool_call(self, name: str, input: Any, *, call_id: str | None = None) -> str:
        content = {"tool_name": name, "input": values.plain(input)}
        return await self.append(EntryRole.ASSISTANT, _with_call(content, call_id))

    async def append_tool_result(self, name: str, output: Any, *, call_id: str | None = None) -> str:
        content = {"tool_name": name, "output": values.plain(output)}
        return await self.append(EntryRole.TOOL_RESULT, _with_call(content, call_id))

    async def say(self, what: str | Message, *, key: str | None = None) -> str:
        """An entry of the agent that the sender of its task sees at once."""
        entry_id = str(uuid.uuid4())
        if isinstance(what, str):
            message = Message(message_id=entry_id, role="ROLE_AGENT", parts=(Part(text=what),))
        else:
            message, entry_id = what, what.message_id
        draft = EntryDraft(entry_id, EntryRole.ASSISTANT, says=message, key=key)
        entered = values.content_of(message)
        self._operate()
        return await self._driver.entries.append(draft, entered)

    async def compact(self, summary: Any) -> str:
        """An entry that stands for all before it: `load_messages` begins with it."""
        return await self.append(EntryRole.SYSTEM, summary, type=EntryType.COMPACTION)

    async def branch(self, entry: AgentEntry | str) -> None:
        """Go on from an earlier entry: what follows is below that one."""
        self._operate()
        await self._driver.entries.branch(entry.id if isinstance(entry, AgentEntry) else entry)

    async def load_messages(self, limit: int | None = None) -> list[AgentEntry]:
        """The way from the root, or from the last compaction, to where this run is; of it the last `limit`. Called
        again after a crash it is what it was then."""
        self._operate()
        return await self._driver.entries.load(limit)

    # --- checkpoints --------------------------------------------------------------------------------------

    async def checkpoint(self, state: Any = None) -> None:
        """Commit, and forget what lies before: on resume the function finds `state`, and goes on from there."""
        self._operate()
        self._is_state_read = True
        await self._driver.checkpoints.make(values.raw(state))

    # --- tasks --------------------------------------------------------------------------------------------

    def task(
        self,
        kind: str,
        input: Any = None,
        *,
        recipient: AgentId | str | None = None,
        key: str | None = None,
        instance: str | int | None = None,
        timeout_ms: int | None = None,
        idempotent: bool | None = None,
        attempts: int | None = None,
        backoff_ms: int | None = None,
        type: Any = None,
    ) -> PendingTask:
        """A task of this run, to be awaited or joined: for another agent, or for this one's own task functions. The
        same kind and input is the same task; `instance` tells intended duplicates apart, `key` takes the place of the
        input."""
        self._operate()
        task_id = self._driver.tasks.schedule(
            kind,
            values.plain(input),
            recipient=recipient,
            key=key,
            instance=instance,
            timeout_ms=timeout_ms,
            idempotent=idempotent,
            attempts=attempts,
            backoff_ms=backoff_ms,
        )
        output = type if type is not None else self._driver.tasks.output_type(kind)
        return PendingTask(self, task_id, kind, output)

    async def result_of(self, pending: PendingTask) -> Any:
        """What a task came to; or `TaskFailed`. The same as to await it."""
        self._operate()
        result = await self._driver.tasks.outcome_of(pending.id)
        return self._driver.tasks.value_of(pending, result)

    async def join_all(self, tasks: Sequence[PendingTask]) -> list[Any]:
        """All results in the order of the tasks; or, as soon as one fails, its `TaskFailed`."""
        self._operate()
        if not tasks:
            return []
        driver = self._driver
        key = driver.notes.memory.key("join", [pending.id for pending in tasks])
        memo = driver.notes.memory.recall(key)
        if memo is None:
            ids = frozenset(pending.id for pending in tasks)
            await driver.waits.wait(Wait(tasks=ids, fail_fast=True), lambda: _joined(driver.notes.memory.outcomes, ids))
            failed = _first_failed(driver.notes.memory.outcomes, tasks)
            driver.notes.note(key, failed)
        else:
            failed = values.unraw(memo.value)
        if failed is not None:
            self._driver.tasks.value_of(tasks[failed], await driver.tasks.outcome_of(tasks[failed].id))
        return [self._driver.tasks.value_of(pending, await driver.tasks.outcome_of(pending.id)) for pending in tasks]

    async def join_all_settled(self, tasks: Sequence[PendingTask]) -> list[Settled]:
        """How each of them ended, in the order of the tasks."""
        self._operate()
        ids = frozenset(pending.id for pending in tasks)
        outcomes = self._driver.notes.memory.outcomes
        if not all(task_id in outcomes for task_id in ids):
            await self._driver.waits.wait(Wait(tasks=ids), lambda: all(task_id in outcomes for task_id in ids))
        return [self._settled(pending, outcomes[pending.id]) for pending in tasks]

    def _settled(self, pending: PendingTask, result: Result) -> Settled:
        try:
            return Settled("completed", self._driver.tasks.value_of(pending, result))
        except TaskFailed as failed:
            return Settled("canceled" if failed.is_canceled else "failed", error=failed)

    async def select(self, tasks: Sequence[PendingTask]) -> Selected:
        """The first that succeeds, and the others. Which one it was is remembered. When all fail: `AllTasksFailed`."""
        self._operate()
        if not tasks:
            raise Malformed("of no tasks none comes first", field="tasks")
        driver = self._driver
        key = driver.notes.memory.key("select", [pending.id for pending in tasks])
        memo = driver.notes.memory.recall(key)
        if memo is not None:
            index = values.unraw(memo.value)
        else:
            index = await self._select(tasks)
            driver.notes.note(key, index)
        outcomes = [await driver.tasks.outcome_of(pending.id) for pending in tasks] if index < 0 else []
        if index < 0:
            ended = zip(tasks, outcomes, strict=True)
            raise AllTasksFailed([self._driver.tasks.failure_of(pending, result) for pending, result in ended])
        value = self._driver.tasks.value_of(tasks[index], await driver.tasks.outcome_of(tasks[index].id))
        return Selected(index, value, tuple(pending for at, pending in enumerate(tasks) if at != index))

    async def _select(self, tasks: Sequence[PendingTask]) -> int:
        outcomes = self._driver.notes.memory.outcomes

        def winner() -> int | None:
            for at, pending in enumerate(tasks):
                result = outcomes.get(pending.id)
                if result is not None and result.status == "ok":
                    return at
            return -1 if all(pending.id in outcomes for pending in tasks) else None

        while True:
            left = frozenset(pending.id for pending in tasks if pending.id not in outcomes)
            if left:
                await self._driver.lookout.look(Wait(tasks=left, first=True))
            index = winner()
            if index is not None:
                return index
            left = frozenset(pending.id for pending in tasks if pending.id not in outcomes)
            await self._driver.waits.wait(
                Wait(tasks=left, first=True),
                partial(_is_any_there, outcomes, left),
            )

    async def cancel(self, pending: PendingTask) -> None:
        """End a task of this run, wherever it is."""
        self._operate()
        await self._driver.waits.make_room()
        self._driver.own.cancel(pending.id)
        self._driver.tasks.cancel(pending.id)

    # --- signals ------------------------------------------------------------------------------------------

    async def wait_for_signal(self, name: str, *, timeout_ms: int | None = None, type: Any = None) -> Any:
        """The value of the next signal of this name, or that fits the pattern. When the time is over first:
        `TimeoutError`."""
        self._operate()
        driver = self._driver
        key = driver.notes.memory.key("signal", name)
        memo = driver.notes.memory.recall(key)
        if memo is None:
            memo = await self._hear(key, name, timeout_ms)
        heard = values.unraw(memo.value)
        if heard is None:
            raise TimeoutError(f"no signal {name} in {timeout_ms} ms")
        if memo.entry is not None:
            driver.entries.leaf = memo.entry
        return values.typed(heard.get("value"), type)

    async def wait_for_message(self, *, timeout_ms: int | None = None) -> str:
        """The text of the next message of the task's sender. It has become an entry."""
        heard = await self.wait_for_signal(MESSAGE, timeout_ms=timeout_ms)
        return str(heard["text"]) if isinstance(heard, dict) and "text" in heard else str(heard)

    async def _hear(self, key: str, name: str, timeout_ms: int | None) -> Memo:
        driver = self._driver
        until = None if timeout_ms is None else self._driver.times.until(f"{key}/until", timeout_ms)
        signal = await driver.hear((name,), until)
        if signal is None:
            return driver.notes.note(key, None)
        return self._take(key, signal)

    def _take(self, key: str, signal: SignalSeen, **more: Any) -> Memo:
        """The signal is consumed in the commit that remembers it; a message becomes an entry in the same."""
        driver = self._driver
        heard: dict[str, Any] = {"name": signal.name, **more}
        entry: int | None = None
        if signal.message is not None:
            content = values.content_of(signal.message)
            heard["value"] = content
            draft = EntryDraft(signal.message.message_id, EntryRole.USER, said=signal.said)
            driver.entries.enter(None, draft, content)
            entry = driver.entries.leaf
        else:
            heard["value"] = values.unraw(signal.value)
        memo = Memo(key, values.raw(heard), entry)
        driver.notes.remember(memo)
        driver.notes.batch.takes.append(signal.id)
        driver.inbox.taken.add(signal.id)
        return memo

    async def has_signal(self, name: str) -> bool:
        """Whether one waits; it stays where it is. Called again after a crash, the answer is the same."""
        self._operate()
        driver = self._driver
        key = driver.notes.memory.key("peek", name)
        memo = driver.notes.memory.recall(key)
        if memo is None:
            memo = driver.notes.note(key, bool(await driver.signals_like(name)))
        return bool(values.unraw(memo.value))

    async def drain_signals(self, pattern: str) -> list[Any]:
        """The values of all that wait now, oldest first."""
        self._operate()
        driver = self._driver
        key = driver.notes.memory.key("drain", pattern)
        memo = driver.notes.memory.recall(key)
        if memo is None:
            drained = [
                values.unraw(self._take(f"{key}/{at}", signal).value)["value"]
                for at, signal in enumerate(await driver.signals_like(pattern))
            ]
            memo = driver.notes.note(key, drained)
            driver.notes.remember(Memo(f"{key}/leaf", values.raw(driver.entries.leaf)))
        else:
            leaf = driver.notes.memory.recall(f"{key}/leaf")
            driver.entries.leaf = driver.entries.leaf if leaf is None else values.unraw(leaf.value)
        return list(values.unraw(memo.value))

    def signal(self, name: str) -> SignalWait:
        """For `any_of`."""
        return SignalWait(name)

    def timer(self, after_ms: int) -> Timer:
        """For `any_of`."""
        return Timer(after_ms)

    async def any_of(self, *things: PendingTask | SignalWait | Timer) -> Selected:
        """Whatever comes first of tasks (ended in any way), signals and times. Which it was is remembered."""
        self._operate()
        if not things:
            raise Malformed("of nothing, nothing comes first", field="things")
        driver = self._driver
        names = [_name(thing) for thing in things]
        key = driver.notes.memory.key("any", names)
        memo = driver.notes.memory.recall(key)
        if memo is None:
            memo = await self._first(key, things)
        heard = values.unraw(memo.value)
        index = heard["index"]
        if memo.entry is not None:
            driver.entries.leaf = memo.entry
        rest = tuple(thing for at, thing in enumerate(things) if at != index)
        thing = things[index]
        if isinstance(thing, PendingTask):
            return Selected(index, self._driver.tasks.value_of(thing, await driver.tasks.outcome_of(thing.id)), rest)
        return Selected(index, heard.get("value"), rest)

    async def _first(self, key: str, things: Sequence[PendingTask | SignalWait | Timer]) -> Memo:
        driver = self._driver
        outcomes = driver.notes.memory.outcomes
        times = {
            at: self._driver.times.until(f"{key}/{at}", thing.after_ms)
            for at, thing in enumerate(things)
            if isinstance(thing, Timer)
        }
        ids = {thing.id: at for at, thing in enumerate(things) if isinstance(thing, PendingTask)}
        patterns = {thing.name: at for at, thing in enumerate(things) if isinstance(thing, SignalWait)}
        until = min(times.values(), default=None)
        wait = Wait(tasks=frozenset(ids), first=True, signals=tuple(patterns), until_ms=until)
        left = frozenset(task_id for task_id in ids if task_id not in outcomes)
        if left:  # one may have ended unheard, before a time that is over or a signal that is here
            await driver.lookout.look(Wait(tasks=left, first=True))
        found = await driver.first_of(wait)
        if isinstance(found, SignalSeen):
            index = next(at for pattern, at in patterns.items() if matches(pattern, found.name))
            return self._take(key, found, index=index)
        done = [at for task_id, at in ids.items() if task_id in outcomes]
        index = min(done) if done else min(times, key=lambda at: times[at])
        return driver.notes.note(key, {"index": index})

    # --- time, chance, effects ----------------------------------------------------------------------------

    async def sleep(self, ms: int) -> None:
        """Until so long after it was first reached."""
        self._operate()
        until = self._driver.times.until(self._driver.notes.memory.key("sleep", ms), ms)
        if until > self._driver.times.now_ms():
            await self._driver.hear((), until)

    async def now(self) -> int:
        """The time in Unix milliseconds: after a crash, what it was then."""
        return int(await self._once("now", lambda key: self._driver.times.now_ms()))

    async def random(self) -> float:
        """A number from 0 up to 1, remembered."""
        return float(await self._once("random", lambda key: _fraction(self._driver.chance(key))))

    async def uuid(self) -> str:
        return str(await self._once("uuid", lambda key: str(uuid.UUID(bytes=self._driver.chance(key), version=4))))

    async def _once(self, operation: str, make: Callable[[str], Any]) -> Any:
        self._operate()
        key = self._driver.notes.memory.key(operation, None)
        memo = self._driver.notes.memory.recall(key)
        if memo is None:
            await self._driver.waits.make_room()
            memo = self._driver.notes.note(key, make(key))
        return values.unraw(memo.value)

    async def run(self, name: str, function: Callable[..., Any], *, idempotent: bool = False, type: Any = None) -> Any:
        """An effect inside the agent, and what it came to. Its start is committed before it: if nobody knows the
        outcome, somebody has to say (`effect_in_doubt`). With `idempotent` it is done again under the same key, which
        the function gets if it needs an argument."""
        self._operate()
        driver = self._driver
        key = driver.notes.memory.key("run", name)
        count = key.partition("#")[2]
        shown = f"{name}#{count}" if count else name
        driver.notes.check_name(shown, "name")
        memo = driver.notes.memory.recall(key)
        if memo is not None and memo.begun is not None and not idempotent:
            memo = await self._judged(key, shown)
        if memo is None or memo.begun is not None:
            memo = await self._perform(key, shown, function, idempotent)
        outcome = values.unraw(memo.value)
        if "error" in outcome:
            raise EffectFailed(name, outcome["error"])
        return values.typed(outcome.get("value"), type)

    async def _perform(self, key: str, shown: str, function: Callable[..., Any], idempotent: bool) -> Memo:
        driver = self._driver
        await driver.waits.make_room()
        if not idempotent:
            driver.notes.remember(Memo(key, begun=shown))
            await driver.waits.flush()
        outcome = await driver.perform(function, key, idempotent)
        memo = driver.notes.note(key, outcome)
        if not idempotent:
            await driver.waits.flush()
        return memo

    async def _judged(self, key: str, shown: str) -> Memo | None:
        """Nobody knows what became of it: wait until somebody says. None is: do it again."""
        driver = self._driver
        signal = await driver.hear((f"{EFFECT}{key}",), None, doubt=shown)
        assert signal is not None
        driver.notes.batch.takes.append(signal.id)
        driver.inbox.taken.add(signal.id)
        said = values.unraw(signal.value)
        if said["verdict"] == "retry":
            return None
        told = said.get("value")
        outcome = {"value": told} if said["verdict"] == "done" else {"error": str(told or "failed")}
        return driver.notes.note(key, outcome)

    # --- inside -------------------------------------------------------------------------------------------

    def _operate(self) -> None:
        """Before every operation: the function may have been put away, or gone on without looking."""
        self._driver.hold.check_alive()
        if self._driver.checkpoints.has_old and not self._is_state_read:
            raise CheckpointUnread(_UNREAD)


def _fraction(chance: bytes) -> float:
    """As many bits as a float has behind the point."""
    return (int.from_bytes(chance[:8]) >> 11) / (1 << 53)


def _with_call(content: dict[str, Any], call_id: str | None) -> dict[str, Any]:
    return content if call_id is None else {**content, "toolCallId": call_id}


def _joined(outcomes: dict[str, Result], ids: frozenset[str]) -> bool:
    ended = [outcomes[task_id] for task_id in ids if task_id in outcomes]
    return len(ended) == len(ids) or any(result.status == "error" for result in ended)


def _is_any_there(outcomes: dict[str, Result], ids: frozenset[str]) -> bool:
    return any(task_id in outcomes for task_id in ids)


def _first_failed(outcomes: dict[str, Result], tasks: Sequence[PendingTask]) -> int | None:
    for at, pending in enumerate(tasks):
        result = outcomes.get(pending.id)
        if result is not None and result.status == "error":
            return at
    return None


def _name(thing: PendingTask | SignalWait | Timer) -> list[Any]:
    if isinstance(thing, PendingTask):
        return ["task", thing.id]
    return ["signal", thing.name] if isinstance(thing, SignalWait) else ["timer", thing.after_ms]
