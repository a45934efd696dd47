"""What an agent's function has in its hands. (Contract 18-24; seed 003.)

Nothing here needs a guard against being called again: what happened before is found, what did not happens now. What is
not awaited is only noted, and is committed with the next wait, all at once.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from covenant.agents import values
from covenant.agents.entries import AgentEntry
from covenant.agents.error import CheckpointUnread
from covenant.agents.pending import PendingTask, Selected, Settled, SignalWait, Timer
from covenant.agents.run import Run
from covenant.model.agent import AgentId
from covenant.model.message import Message, Part
from covenant.model.run import MESSAGE, EntryDraft, EntryRole, EntryType, Wait
from covenant.model.task import Task

_UNREAD = "this run has a checkpoint: look at ctx.state before doing anything, and go on from there"


class AgentContext:
    """Of one call of an agent's function."""

    def __init__(self, run: Run, state_type: Any) -> None:
        self._run = run
        self._state_type = state_type
        self._is_state_read = False

    # --- who and what -------------------------------------------------------------------------------------

    @property
    def run_id(self) -> str:
        return self._run.task.id

    @property
    def agent(self) -> AgentId:
        return self._run.task.recipient

    @property
    def sent(self) -> Task:
        """The task that this run is."""
        return self._run.task

    @property
    def resuming(self) -> bool:
        """Whether the function was called before for this run."""
        return self._run.hold.is_resuming

    @property
    def cancel_requested(self) -> bool:
        return self._run.hold.cancel_requested

    @property
    def state(self) -> Any:
        """What the last checkpoint kept; None when there is none."""
        self._is_state_read = True
        state = values.unraw(self._run.checkpoints.state)
        return state if state is None or self._state_type is None else values.typed(state, self._state_type)

    @property
    def checkpoints(self) -> int:
        return self._run.checkpoints.count

    def set_turn(self, turn: str | None) -> None:
        """Mark the entries that follow as belonging together."""
        if turn is not None:
            self._run.notes.check_name(turn, "turn")
        self._run.entries.turn = turn

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
        return await self._run.entries.append(draft, entered)

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
        return await self._run.entries.append(draft, entered, is_named=message is what)

    async def compact(self, summary: Any) -> str:
        """An entry that stands for all before it: `load_messages` begins with it."""
        return await self.append(EntryRole.SYSTEM, summary, type=EntryType.COMPACTION)

    async def branch(self, entry: AgentEntry | str) -> None:
        """Go on from an earlier entry: what follows is below that one. An id that several have is that of the first."""
        self._operate()
        await self._run.entries.branch(entry)

    async def load_messages(self, limit: int | None = None) -> list[AgentEntry]:
        """The way from the root, or from the last compaction, to where this run is; of it the last `limit`. Called
        again after a crash it is what it was then."""
        self._operate()
        return await self._run.entries.load(limit)

    # --- checkpoints --------------------------------------------------------------------------------------

    async def checkpoint(self, state: Any = None) -> None:
        """Commit, and forget what lies before: on resume the function finds `state`, and goes on from there."""
        self._operate()
        self._is_state_read = True
        await self._run.checkpoints.make(values.raw(state))

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
        tasks = self._run.tasks
        task_id = tasks.schedule(
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
        return PendingTask(self, task_id, kind, type if type is not None else tasks.output_type(kind))

    async def result_of(self, pending: PendingTask) -> Any:
        """What a task came to; or `TaskFailed`. The same as to await it."""
        self._operate()
        tasks = self._run.tasks
        return tasks.value_of(pending, await tasks.outcome_of(pending.id))

    async def join_all(self, tasks: Sequence[PendingTask]) -> list[Any]:
        """All results in the order of the tasks; or, as soon as one fails, its `TaskFailed`."""
        self._operate()
        return await self._run.joins.join_all(tasks)

    async def join_all_settled(self, tasks: Sequence[PendingTask]) -> list[Settled]:
        """How each of them ended, in the order of the tasks."""
        self._operate()
        return await self._run.joins.join_all_settled(tasks)

    async def select(self, tasks: Sequence[PendingTask]) -> Selected:
        """The first that succeeds, and the others. Which one it was is remembered. When all fail: `AllTasksFailed`."""
        self._operate()
        return await self._run.joins.select(tasks)

    async def cancel(self, pending: PendingTask) -> None:
        """End a task of this run, wherever it is."""
        self._operate()
        await self._run.waits.make_room()
        self._run.own.cancel(pending.id)
        self._run.tasks.cancel(pending.id)

    # --- signals ------------------------------------------------------------------------------------------

    async def wait_for_signal(self, name: str, *, timeout_ms: int | None = None, type: Any = None) -> Any:
        """The value of the next signal of this name, or that fits the pattern. When the time is over first:
        `TimeoutError`."""
        self._operate()
        return values.typed(await self._run.signals.next(name, timeout_ms), type)

    async def wait_for_message(self, *, timeout_ms: int | None = None) -> str:
        """The text of the next message of the task's sender. It has become an entry."""
        heard = await self.wait_for_signal(MESSAGE, timeout_ms=timeout_ms)
        return str(heard["text"]) if isinstance(heard, dict) and "text" in heard else str(heard)

    async def has_signal(self, name: str) -> bool:
        """Whether one waits; it stays where it is. Called again after a crash, the answer is the same."""
        self._operate()
        return await self._run.signals.has(name)

    async def drain_signals(self, pattern: str) -> list[Any]:
        """The values of all that wait now, oldest first."""
        self._operate()
        return await self._run.signals.drain(pattern)

    def signal(self, name: str) -> SignalWait:
        """For `any_of`."""
        return SignalWait(name)

    def timer(self, after_ms: int) -> Timer:
        """For `any_of`."""
        return Timer(after_ms)

    async def any_of(self, *things: PendingTask | SignalWait | Timer) -> Selected:
        """Whatever comes first of tasks (ended in any way), signals and times. Which it was is remembered."""
        self._operate()
        return await self._run.joins.any_of(things)

    # --- time, chance, effects ----------------------------------------------------------------------------

    async def sleep(self, ms: int) -> None:
        """Until so long after it was first reached."""
        self._operate()
        run = self._run
        until = run.times.until(run.notes.memory.key("sleep", ms), ms)
        if until > run.times.now_ms():
            await run.signals.hear(Wait(until_ms=until))

    async def now(self) -> int:
        """The time in Unix milliseconds: after a crash, what it was then."""
        self._operate()
        return await self._run.chance.now()

    async def random(self) -> float:
        """A number from 0 up to 1, remembered."""
        self._operate()
        return await self._run.chance.random()

    async def uuid(self) -> str:
        self._operate()
        return await self._run.chance.uuid()

    async def run(self, name: str, function: Callable[..., Any], *, idempotent: bool = False, type: Any = None) -> Any:
        """An effect inside the agent, and what it came to. Its start is committed before it: if nobody knows the
        outcome, somebody has to say (`effect_in_doubt`). With `idempotent` it is done again under the same key, which
        the function gets if it needs an argument."""
        self._operate()
        return values.typed(await self._run.effects.run(name, function, idempotent), type)

    # --- inside -------------------------------------------------------------------------------------------

    def _operate(self) -> None:
        """Before every operation: the function may have been put away, or gone on without looking."""
        self._run.hold.check_alive()
        if self._run.checkpoints.has_old and not self._is_state_read:
            raise CheckpointUnread(_UNREAD)


def _with_call(content: dict[str, Any], call_id: str | None) -> dict[str, Any]:
    return content if call_id is None else {**content, "toolCallId": call_id}
