"""Several things that are waited for at once: all of them, or whichever comes first. Which it was is remembered."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from covenant.agents import values
from covenant.agents.entries import Entries
from covenant.agents.error import AllTasksFailed, TaskFailed
from covenant.agents.lookout import Lookout
from covenant.agents.notes import Notes
from covenant.agents.pending import PendingTask, Selected, Settled, SignalWait, Timer
from covenant.agents.signals import Signals
from covenant.agents.tasks import Tasks
from covenant.agents.times import Times
from covenant.agents.waits import Waits
from covenant.model.error import Malformed
from covenant.model.run import Memo, Wait
from covenant.model.task import Result
from covenant.rules.run.pattern import matches


class Joins:
    def __init__(
        self,
        notes: Notes,
        times: Times,
        waits: Waits,
        lookout: Lookout,
        entries: Entries,
        tasks: Tasks,
        signals: Signals,
    ) -> None:
        self._notes = notes
        self._times = times
        self._waits = waits
        self._lookout = lookout
        self._entries = entries
        self._tasks = tasks
        self._signals = signals

    # --- all ----------------------------------------------------------------------------------------------

    async def join_all(self, pending: Sequence[PendingTask]) -> list[Any]:
        """All results in the order of the tasks; or, as soon as one fails, its `TaskFailed`."""
        if not pending:
            return []
        notes, tasks = self._notes, self._tasks
        key = notes.memory.key("join", [task.id for task in pending])
        memo = notes.memory.recall(key)
        if memo is None:
            outcomes, ids = notes.memory.outcomes, frozenset(task.id for task in pending)
            await self._waits.wait(Wait(tasks=ids, fail_fast=True), lambda: _joined(outcomes, ids))
            failed = _first_failed(outcomes, pending)
            notes.note(key, failed)
        else:
            failed = values.unraw(memo.value)
        if failed is not None:
            tasks.value_of(pending[failed], await tasks.outcome_of(pending[failed].id))
        return [tasks.value_of(task, await tasks.outcome_of(task.id)) for task in pending]

    async def join_all_settled(self, pending: Sequence[PendingTask]) -> list[Settled]:
        """How each of them ended, in the order of the tasks."""
        ids = frozenset(task.id for task in pending)
        outcomes = self._notes.memory.outcomes
        if not all(task_id in outcomes for task_id in ids):
            await self._waits.wait(Wait(tasks=ids), lambda: all(task_id in outcomes for task_id in ids))
        return [self._settled(task, outcomes[task.id]) for task in pending]

    def _settled(self, pending: PendingTask, result: Result) -> Settled:
        try:
            return Settled("completed", self._tasks.value_of(pending, result))
        except TaskFailed as failed:
            return Settled("canceled" if failed.is_canceled else "failed", error=failed)

    # --- the first that succeeds --------------------------------------------------------------------------

    async def select(self, pending: Sequence[PendingTask]) -> Selected:
        if not pending:
            raise Malformed("of no tasks none comes first", field="tasks")
        notes, tasks = self._notes, self._tasks
        key = notes.memory.key("select", [task.id for task in pending])
        memo = notes.memory.recall(key)
        if memo is not None:
            index = values.unraw(memo.value)
        else:
            index = await self._winner(pending)
            notes.note(key, index)
        if index < 0:
            raise AllTasksFailed([tasks.failure_of(task, await tasks.outcome_of(task.id)) for task in pending])
        value = tasks.value_of(pending[index], await tasks.outcome_of(pending[index].id))
        return Selected(index, value, tuple(task for at, task in enumerate(pending) if at != index))

    async def _winner(self, pending: Sequence[PendingTask]) -> int:
        """Its place; -1 when all have failed."""
        outcomes = self._notes.memory.outcomes

        def winner() -> int | None:
            for at, task in enumerate(pending):
                result = outcomes.get(task.id)
                if result is not None and result.status == "ok":
                    return at
            return -1 if all(task.id in outcomes for task in pending) else None

        while True:
            left = frozenset(task.id for task in pending if task.id not in outcomes)
            if left:
                await self._lookout.look(Wait(tasks=left, first=True))
            index = winner()
            if index is not None:
                return index
            left = frozenset(task.id for task in pending if task.id not in outcomes)
            await self._waits.wait(Wait(tasks=left, first=True), partial(_is_any_there, outcomes, left))

    # --- the first of anything ----------------------------------------------------------------------------

    async def any_of(self, things: Sequence[PendingTask | SignalWait | Timer]) -> Selected:
        if not things:
            raise Malformed("of nothing, nothing comes first", field="things")
        key = self._notes.memory.key("any", [_name(thing) for thing in things])
        memo = self._notes.memory.recall(key)
        if memo is None:
            memo = await self._first(key, things)
        heard = values.unraw(memo.value)
        index = heard["index"]
        if memo.entry is not None:
            self._entries.leaf = memo.entry
        rest = tuple(thing for at, thing in enumerate(things) if at != index)
        thing = things[index]
        if isinstance(thing, PendingTask):
            return Selected(index, self._tasks.value_of(thing, await self._tasks.outcome_of(thing.id)), rest)
        return Selected(index, await self._signals.heard_in(memo), rest)

    async def _first(self, key: str, things: Sequence[PendingTask | SignalWait | Timer]) -> Memo:
        outcomes = self._notes.memory.outcomes
        times = {
            at: self._times.until(f"{key}/{at}", thing.after_ms)
            for at, thing in enumerate(things)
            if isinstance(thing, Timer)
        }
        ids = {thing.id: at for at, thing in enumerate(things) if isinstance(thing, PendingTask)}
        patterns = {thing.name: at for at, thing in enumerate(things) if isinstance(thing, SignalWait)}
        until = min(times.values(), default=None)
        wait = Wait(tasks=frozenset(ids), first=True, signals=tuple(patterns), until_ms=until)
        left = frozenset(task_id for task_id in ids if task_id not in outcomes)
        if left:  # one may have ended unheard, before a time that is over or a signal that is here
            await self._lookout.look(Wait(tasks=left, first=True))
        found = await self._signals.hear(wait)
        if found is not None:
            index = next(at for pattern, at in patterns.items() if matches(pattern, found.name))
            return self._signals.take(key, found, index=index)
        done = [at for task_id, at in ids.items() if task_id in outcomes]
        index = min(done) if done else min(times, key=lambda at: times[at])
        return self._notes.note(key, {"index": index})


def _joined(outcomes: dict[str, Result], ids: frozenset[str]) -> bool:
    ended = [outcomes[task_id] for task_id in ids if task_id in outcomes]
    return len(ended) == len(ids) or any(result.status == "error" for result in ended)


def _is_any_there(outcomes: dict[str, Result], ids: frozenset[str]) -> bool:
    return any(task_id in outcomes for task_id in ids)


def _first_failed(outcomes: dict[str, Result], pending: Sequence[PendingTask]) -> int | None:
    for at, task in enumerate(pending):
        result = outcomes.get(task.id)
        if result is not None and result.status == "error":
            return at
    return None


def _name(thing: PendingTask | SignalWait | Timer) -> list[Any]:
    if isinstance(thing, PendingTask):
        return ["task", thing.id]
    return ["signal", thing.name] if isinstance(thing, SignalWait) else ["timer", thing.after_ms]
