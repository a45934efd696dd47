"""Agents in one process: the same engine, no daemon. (Contract 20-24.)

`run_local` is a run from beginning to end: called again in the same folder after a crash, with the same input, it is
the same run, and goes on. `Local` is the house behind it, for runs that want to be signaled.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final

from covenant.agents import values
from covenant.agents.definition import Agent, TaskFunction, check_defined
from covenant.agents.entries import AgentEntry, entry_of
from covenant.agents.error import RunFailed, RunInDoubt
from covenant.agents.worker import CONCURRENCY, WARM_MAX, AgentWorker, nothing
from covenant.mailbox import Mailbox, OpenMailbox
from covenant.model.agent import AgentId
from covenant.model.content import Json
from covenant.model.error import Malformed, NotARun
from covenant.model.limits import Limits
from covenant.model.message import Message, Part
from covenant.model.record import Outcome, TaskState
from covenant.model.run import RunSeen, RunStatus, Signaled, Verdict
from covenant.model.task import Task
from covenant.model.view import QueueEntry
from covenant.rules.content_key import canonical
from covenant.rules.context import Ids
from covenant.rules.dialog import intent_of
from covenant.store.clock import Clock, SystemClock

CALLER: Final = "caller@local"
HOUSE: Final = "agents@local"
_RUNS: Final = uuid.UUID("8f0a3ab8-9c40-5f0e-9b52-5f1f6d1b7e55")
_INTENT_CHARS: Final = 200
_DOUBT_CHECK_MS: Final = 1000

log = logging.getLogger("covenant.agents")


class RunHandle:
    """A run of a house that is open."""

    def __init__(self, house: Local, run_id: str, output_type: Any) -> None:
        self._house = house
        self.id = run_id
        self._output_type = output_type

    async def result(self) -> Any:
        """What the agent returned. When it failed: `RunFailed`; when it cannot go on by itself: `RunInDoubt`."""
        entry = await self._until(lambda _: False)
        answer = await self._house.caller.get_result(self.id)
        assert answer is not None
        if entry.outcome is not Outcome.ANSWERED or answer.status == "error":
            raise RunFailed(self.id, answer.error_message or "error", values.value_of(answer.result))
        return values.typed(values.value_of(answer.result), self._output_type)

    async def wants_input(self) -> bool:
        """Wait until the run asks for something (True), or has ended. When it cannot go on by itself: `RunInDoubt`."""
        return (await self._until(lambda entry: entry.asks is not None)).outcome is None

    async def _until(self, is_enough: Callable[[QueueEntry], bool]) -> QueueEntry:
        entry = await self._house.caller.wait_generation(self.id, 0)
        while entry.outcome is None and not is_enough(entry):
            await self._house.check_doubt(self.id)
            entry = await self._house.caller.wait_generation(self.id, entry.generation, wait_ms=_DOUBT_CHECK_MS)
        return entry

    async def entries(self) -> list[AgentEntry]:
        """The way from the root to where the run is, as far as it is committed."""
        box, found = self._house.box, list[AgentEntry]()
        before: int | None = None
        while True:
            page = await box.run_entries(self.id, box.limits.page_max, before=before)
            found[:0] = [entry_of(entry) for entry in page.entries]
            before = page.before
            if before is None:
                return found

    async def say(self, message: Message | str) -> None:
        """A message to the run, as a client of the A2A protocol sends it: it is what `wait_for_message` waits for, or
        the signal that it names in its metadata."""
        await self._house.caller.add_message(self.id, message)

    async def signal(self, name: str, value: Any = None, *, key: str | None = None) -> Signaled:
        """Tell the run something, under a name; under the same key it is told once."""
        return await self._house.caller.signal_run(self.id, name, values.plain(value), key=key)

    async def cancel(self, reason: str = "canceled by its caller", *, graceful: bool = False) -> None:
        await self._house.caller.cancel_task(self.id, reason=reason, graceful=graceful)

    async def judge(self, effect: str, verdict: Verdict, *, reason: str, value: Any = None) -> None:
        await self._house.box.judge_effect(self.id, effect, verdict, reason=reason, value=values.plain(value))

    async def status(self) -> RunSeen:
        return await self._house.box.get_run(self.id)


class Local:
    """`async with Local("file:./run", agents=[…], tasks=[…]) as house: run = await house.start(agent, input)`."""

    _worker_type: Callable[..., AgentWorker] = AgentWorker

    def __init__(
        self,
        store: str = "memory:",
        *,
        agents: Sequence[Agent],
        tasks: Sequence[TaskFunction] = (),
        limits: Limits | None = None,
        clock: Clock | None = None,
        ids: Ids | None = None,
        concurrency: int = CONCURRENCY,
        warm_max: int = WARM_MAX,
        probe: Callable[[str], None] = nothing,
        box: Mailbox | None = None,
    ) -> None:
        if box is not None and (store != "memory:" or limits is not None or ids is not None):
            raise Malformed("a box that is open has its store, its limits and its ids", field="box")
        self._store = store
        self._given = box
        self._opened: OpenMailbox | None = None
        self._options: dict[str, Any] = {"limits": limits, "clock": clock, "ids": ids}
        self._agents = agents
        self._tasks = tasks
        self._concurrency = concurrency
        self._warm_max = warm_max
        self._clock = clock or SystemClock()
        self._probe = probe
        for one in (*agents, *tasks):
            check_defined(one)
        self._types = {agent.name: agent.output_type for agent in agents}
        self._done_here = {agent.name for agent in agents} | {task.name for task in tasks}
        self._undone: set[str | None] = set()  # kinds that nobody does here, and that was said

    async def __aenter__(self) -> Local:
        if self._given is None:
            self._opened = Mailbox.open(self._store, **self._options)
            self.box: Mailbox = await self._opened.__aenter__()
        else:
            self.box = self._given
        try:
            await self._move_in()
        except BaseException:  # nobody would close it
            await self._close()
            raise
        return self

    async def _move_in(self) -> None:
        self.caller = self.box.of(CALLER)
        self.agent = AgentId.named(HOUSE)
        self.worker = self._worker_type(
            self.box.of(self.agent),
            agents=self._agents,
            tasks=self._tasks,
            concurrency=self._concurrency,
            warm_max=self._warm_max,
            clock=self._clock,
            probe=self._probe,
        )
        await self.worker.__aenter__()
        try:
            await self.worker.take_all_over()
        except BaseException as failed:
            await self.worker.__aexit__(type(failed), failed, None)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.worker.__aexit__(kind, error, trace)
        finally:
            await self._close()

    async def _close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    async def start(
        self,
        agent: Agent | str,
        input: Any = None,
        *,
        message: Message | str | None = None,
        run_id: str | None = None,
    ) -> RunHandle:
        """Begin a run, or find the one with this id. Without an id every call begins another. With a `message` instead
        of an input it begins as one that a client of the A2A protocol sends: what was said is the first entry."""
        if message is not None and input is not None:
            raise Malformed("a run begins with an input or with a message", field="message")
        run_id = run_id or str(uuid.uuid4())
        task = self._task(agent, input, run_id) if message is None else self._spoken(agent, message, run_id)
        await self.caller.send_task(task)
        return self.find(agent, task.id)

    def find(self, agent: Agent | str, run_id: str) -> RunHandle:
        return RunHandle(self, run_id, self._types.get(_name(agent)))

    async def signal_or_start(
        self,
        agent: Agent | str,
        run_id: str,
        name: str,
        value: Any = None,
        *,
        input: Any = None,
        key: str | None = None,
    ) -> RunHandle:
        """Tell the run something; if there is none, it begins with it."""
        start = self._task(agent, input, run_id)
        await self.caller.signal_run(run_id, name, values.plain(value), key=key, start=start)
        return self.find(agent, run_id)

    def _task(self, agent: Agent | str, input: Any, run_id: str) -> Task:
        name, value = _name(agent), values.plain(input)
        text = bytes(values.raw(value))[:_INTENT_CHARS].decode(errors="ignore")
        return Task(
            id=run_id, recipient=self.agent, intent_text=f"{name} {text}", task_kind=name, content=(Json(value),)
        )

    def _spoken(self, agent: Agent | str, what: Message | str, run_id: str) -> Task:
        """The same text under the same id is the same message: a program that is started again says it again."""
        name = _name(agent)
        if isinstance(what, str):
            message_id = str(uuid.uuid5(_RUNS, run_id))
            what = Message(message_id=message_id, role="ROLE_USER", parts=(Part(text=what),))
        intent = intent_of(what, self.box.limits)
        return Task(id=run_id, recipient=self.agent, intent_text=intent, task_kind=name, message=what)

    async def check_doubt(self, run_id: str) -> None:
        """Raise if the run waits for what only a person can tell. Here, everything that a former process held is
        known to be held by nobody."""
        try:
            run = await self.caller.get_run(run_id)
        except NotARun:
            return
        if run.status is RunStatus.EFFECT_IN_DOUBT:
            raise RunInDoubt(run_id, list(run.doubts))
        if run.status not in (RunStatus.AWAITING_WORK, RunStatus.CHILD_IN_DOUBT):
            return
        doubts = []
        for awaited in run.awaits:
            task_id = awaited.removeprefix("task ")
            if task_id != awaited and await self._is_orphaned(task_id):
                doubts.append(awaited)
        if doubts:
            raise RunInDoubt(run_id, doubts)

    async def _is_orphaned(self, task_id: str) -> bool:
        """In a house there is one worker: what its agent was given and this one has not got, a former one had."""
        entry = await self.box.get_task(task_id)
        if entry.task.recipient != self.agent:
            return False
        if entry.state is TaskState.QUEUED:
            self._tell_of_undone(entry.task.task_kind)
        return entry.state is TaskState.IN_FLIGHT and entry.incarnation != self.worker.incarnation

    def _tell_of_undone(self, kind: str | None) -> None:
        """Once for each kind: who forgot a function would wait for ever, and not know for what."""
        if kind in self._done_here or kind in self._undone:
            return
        self._undone.add(kind)
        log.warning("no function here does tasks of the kind %r: name it in tasks=[…]", kind)


async def run_local(
    agent: Agent,
    input: Any = None,
    *,
    store: str = "memory:",
    tasks: Sequence[TaskFunction] = (),
    key: str | None = None,
    **options: Any,
) -> Any:
    """One run from beginning to end. In a store that lasts, the same agent and input (or the same `key`) is the same
    run: it goes on where it was, or its result is returned again."""
    check_defined(agent)
    value = values.plain(input)
    named = canonical([agent.name, key] if key is not None else [agent.name, None, value])
    run_id = str(uuid.uuid5(_RUNS, named.decode()))
    async with Local(store, agents=[agent], tasks=tasks, **options) as house:
        handle = await house.start(agent, input, run_id=run_id)
        return await handle.result()


def _name(agent: Agent | str) -> str:
    return agent if isinstance(agent, str) else agent.name
