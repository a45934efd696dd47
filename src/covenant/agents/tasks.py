"""The tasks of a run: how one is asked for, and what it came to. (Contract 19.)

The same kind and input is the same task. It is sent with the next commit; one that the store does not take has failed,
and that is remembered in its place.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import structs

from covenant.agents import values
from covenant.agents.definition import TaskFunction
from covenant.agents.error import TaskFailed, TaskRefused
from covenant.agents.hold import Hold
from covenant.agents.notes import Notes
from covenant.agents.pending import PendingTask
from covenant.agents.times import Times
from covenant.agents.waits import Waits
from covenant.model.agent import AgentId
from covenant.model.content import Content, Json
from covenant.model.error import CovenantError, Malformed, TaskConflict
from covenant.model.run import Memo, Wait
from covenant.model.task import Idempotency, Result, Task
from covenant.rules.content_key import digest_of_input, task_id, task_key

_INTENT_CHARS: Final = 200
_DIGEST_CHARS: Final = 24


class Tasks:
    def __init__(
        self, agent: AgentId, hold: Hold, notes: Notes, times: Times, waits: Waits, functions: dict[str, TaskFunction]
    ) -> None:
        self._agent = agent
        self._hold = hold
        self._notes = notes
        self._times = times
        self._waits = waits
        self._functions = functions
        self._digests: dict[str, str] = {}
        self._sent: dict[str, Task] = {}
        self._kinds: dict[str, str] = {}  # of those that this worker has a function for
        self._refused: dict[str, str] = {}  # those that the store did not take, and why
        self._canceled: set[str] = set()

    # --- asking for one -----------------------------------------------------------------------------------

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
        notes = self._notes
        content_key = task_key(self._hold.run_id, kind, value, key=key, instance=instance)
        child_id = task_id(content_key)
        to = self._recipient(recipient)
        digest = digest_of_input([value, to.pubkey])[:_DIGEST_CHARS]
        memo = notes.memory.recall(content_key)
        noted = None if memo is None else values.unraw(memo.value)
        known = self._digests.get(child_id) or (noted[0] if isinstance(noted, list) else noted)
        if known is not None and known != digest:
            raise TaskConflict(
                f"the task {kind} has another input or recipient; instance= tells tasks apart", task_id=child_id
            )
        if isinstance(noted, list):
            self._learn_refused(child_id, *noted[1:])
        local = self._functions.get(kind) if recipient is None else None
        if local is not None:
            self._kinds[child_id] = kind
        task = self._task(child_id, content_key, kind, value, to, local, timeout_ms, idempotent)
        if attempts is not None and attempts > 1 and not task.is_idempotent:
            raise Malformed("what may not be done twice has one attempt; say idempotent=True", field="attempts")
        if attempts is not None or backoff_ms is not None:
            task = _with_attempts(task, attempts, backoff_ms)
        size = len(msgspec.json.encode(task.content))
        asked = f"{content_key}#{notes.memory.count(content_key)}"
        if (memo is None and child_id not in notes.batch.tasks) or notes.memory.recall(f"{asked}/full"):
            notes.check_room(asked, notes.batch.tasks, "tasks", size)
        self._digests[child_id] = digest
        self._sent[child_id] = task
        if memo is None:
            notes.remember(Memo(content_key, values.raw(digest), task=child_id))
            notes.batch.tasks[child_id] = task
            notes.batch.bytes += size
        return child_id

    def _recipient(self, named: AgentId | str | None) -> AgentId:
        if named is None:
            return self._agent
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
        self._notes.check_value(shown)
        text = bytes(shown)[:_INTENT_CHARS].decode(errors="ignore")
        return Task(
            id=child_id,
            sender=self._agent,
            recipient=to,
            intent_text=f"{kind} {text}",
            task_kind=kind,
            parent=self._hold.run_id,
            deadline_ms=None if timeout_ms is None else self._times.now_ms() + timeout_ms,
            idempotency=Idempotency("idempotent" if safe else "unsafe", content_key),
            content=(Json(value),),
        )

    def cancel(self, child_id: str) -> None:
        notes = self._notes
        if child_id in notes.memory.outcomes:
            return
        self._canceled.add(child_id)
        if child_id in notes.batch.tasks:
            notes.cancels_due.append(child_id)
        else:
            notes.batch.cancels.append(child_id)

    # --- what it came to ----------------------------------------------------------------------------------

    async def outcome_of(self, child_id: str) -> Result:
        outcomes = self._notes.memory.outcomes
        if child_id not in outcomes:
            await self._waits.wait(Wait(tasks=frozenset((child_id,))), lambda: child_id in outcomes)
        return outcomes[child_id]

    def value_of(self, pending: PendingTask, result: Result) -> Any:
        if result.status == "error":
            raise self.failure_of(pending, result)
        return values.typed(values.value_of(result), pending.output_type)

    def failure_of(self, pending: PendingTask, result: Result) -> TaskFailed:
        message, code = result.error_message or "error", self._refused.get(pending.id)
        if code is not None:
            return TaskRefused(pending.id, pending.kind, message, code)
        return TaskFailed(pending.id, pending.kind, message)

    def output_type(self, kind: str) -> Any:
        local = self._functions.get(kind)
        return None if local is None else local.output_type

    # --- for the worker that has the run ------------------------------------------------------------------

    def sent(self, child_id: str) -> Task:
        return self._sent[child_id]

    def is_local(self, child_id: str) -> bool:
        """Whether this worker has a function for it."""
        return child_id in self._kinds

    def function_of(self, child_id: str) -> TaskFunction:
        return self._functions[self._kinds[child_id]]

    def is_canceled(self, child_id: str) -> bool:
        return child_id in self._canceled

    def refuse(self, child_id: str, refusal: CovenantError) -> None:
        """The store does not take it: it has failed, and the next commit says so instead of sending it."""
        self._learn_refused(child_id, refusal.code, refusal.message)
        if child_id not in self._sent:
            return  # a checkpoint has let go of it
        declared = self._sent[child_id].idempotency
        assert declared is not None
        memo = Memo(declared.key, values.raw([self._digests[child_id], refusal.code, refusal.message]))
        self._notes.memory.keep(memo)
        self._notes.batch.leave_out(child_id, memo)

    def _learn_refused(self, child_id: str, code: str, message: str) -> None:
        self._refused[child_id] = code
        self._notes.memory.outcomes[child_id] = Result(child_id, "error", (), f"{code}: {message}")

    def forget(self, ended: list[str]) -> None:
        for child_id in ended:
            for known in (self._notes.memory.outcomes, self._digests, self._sent, self._kinds):
                known.pop(child_id, None)


def _with_attempts(task: Task, attempts: int | None, backoff_ms: int | None) -> Task:
    options: Content = Json({"covenant": {"attempts": attempts, "backoff_ms": backoff_ms}})
    return structs.replace(task, content=(*task.content, options))
