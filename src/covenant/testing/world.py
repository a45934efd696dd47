"""The world around one run that is killed and taken up again: its store, its clock, the others that it deals with, and
somebody who looks at what is in doubt.

The world does not die. It acts only when the run has come to rest, so that it does the same things in the same order
however often the worker has died in between. It keeps a log of its own of every task body and effect that was begun
and ended: by that, and not by what the store says, it judges what is in doubt, and notices what happened twice.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import re
from collections.abc import Callable, Sequence
from copy import copy
from hashlib import sha256
from pathlib import Path
from shutil import copytree
from typing import Any, Final

from msgspec import Struct

from covenant.agents import values
from covenant.agents.chance import fraction
from covenant.agents.definition import Agent, TaskFunction
from covenant.agents.local import CALLER, HOUSE
from covenant.mailbox import Mailbox
from covenant.model.agent import AgentId
from covenant.model.audit import Logged
from covenant.model.content import Json
from covenant.model.limits import Limits
from covenant.model.message import Message, Part
from covenant.model.query import GetDialog
from covenant.model.record import TaskRecord
from covenant.model.repair import RepairRequest, Requeue
from covenant.model.run import EFFECT, EntrySeen, Run, RunStatus, Step, run_key, step_key
from covenant.model.task import Result, Task
from covenant.model.view import Delivery
from covenant.store.clock import ManualClock, RandomIds
from covenant.store.embedded import Embedded
from covenant.store.journal.engine import Journal
from covenant.store.memory import Memory
from covenant.testing import script as s
from covenant.testing.rest import HOUSE_KEY, move_to, next_time
from covenant.worker import WorkContext

RUN_ID: Final = "5eed0000-0000-4000-8000-000000000001"
_MANY: Final = 1000
_NAMED: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9]\.[0-9]+(?:e-[0-9]+)?")
_ADVANCES_MAX: Final = 10_000


class Deed(Struct):
    """A task body or an effect, as the one who does it would remember it."""

    begun: int = 0
    is_judged: bool = False  # since it was last begun
    outcome: tuple[Any, BaseException | None] | None = None


class Moment(Struct, frozen=True):
    """The world as it is at one point of a life: what a death there would leave behind."""

    place: str
    order: int  # of the last event in the store
    now_ms: int
    told: int
    script: Sequence[s.Step]
    deeds: dict[str, Deed]
    drawn: frozenset[str]
    incarnation: str

    def is_like(self, other: Moment) -> bool:
        """Whether deaths at both leave the same behind."""
        return (self.order, self.now_ms, self.told, self.deeds) == (other.order, other.now_ms, other.told, other.deeds)


class World:
    def __init__(
        self,
        agent: Agent,
        input: Any,
        others: Sequence[TaskFunction],
        script: Sequence[s.Step],
        folder: Path | None,
        is_fresh: bool,
    ) -> None:
        self.clock = ManualClock()
        self.moved = asyncio.Event()
        self.faults: list[str] = []
        self.doubts = 0
        self.dead: set[str] = set()
        self._agent = agent
        self._input = input
        self._others = {function.name: function for function in others}
        self._script = list(script)
        self._told = 0
        self._folder = folder
        self._stores = 0
        self._is_fresh = is_fresh
        self._drawn: set[str] = set()
        self._deeds: dict[str, Deed] = {}

    # --- the store ----------------------------------------------------------------------------------------

    async def open(self) -> None:
        self.engine = self._engine()
        await self.engine.open()
        self._look_at_store()
        name, value = self._agent.name, values.plain(self._input)
        if isinstance(self._input, Message):
            task = Task(id=RUN_ID, recipient=self._house, intent_text=name, task_kind=name, message=self._input)
        else:
            task = Task(id=RUN_ID, recipient=self._house, intent_text=name, task_kind=name, content=(Json(value),))
        await self.box.of(CALLER).send_task(task)

    def moment(self, place: str, incarnation: str) -> Moment:
        return Moment(
            place,
            self.engine.state.order,
            self.clock.now_ms(),
            self._told,
            tuple(self._script),
            {key: copy(deed) for key, deed in self._deeds.items()},
            frozenset(self._drawn),
            incarnation,
        )

    async def open_at(self, moment: Moment, log: Sequence[Logged]) -> None:
        """As a death at that moment has left it: in memory, a store is what its log comes to."""
        move_to(self.clock, moment.now_ms)
        self.engine = self._engine()
        state = self.engine.state
        for logged in log:
            if logged.seq > moment.order:
                break
            if logged.events:
                state.apply(logged.events, logged.at)
            else:
                state.order += 1
        await self.engine.open()
        self._look_at_store()
        self._told = moment.told
        self._script = list(moment.script)
        self._deeds = {key: copy(deed) for key, deed in moment.deeds.items()}
        self._drawn = set(moment.drawn)
        self.dead.add(moment.incarnation)

    async def log(self) -> list[Logged]:
        assert isinstance(self.engine, Memory)
        return await self.engine.log(0, Limits().log_tail_max)

    async def close(self) -> None:
        await self.engine.close()

    def crash(self) -> None:
        """What the disk holds at this very moment is what there will be."""
        if self._folder is not None:
            self._stores += 1
            copytree(self._folder / str(self._stores - 1), self._folder / str(self._stores))

    async def reopen(self) -> None:
        """After a crash. Memory outlives its worker; a folder is opened anew."""
        if self._folder is not None:
            await self.engine.close()
            self.engine = self._engine()
            await self.engine.open()
            self._look_at_store()

    def _engine(self) -> Embedded:
        if self._folder is None:
            return Memory(Limits(), self.clock, RandomIds())
        return Journal(str(self._folder / str(self._stores)), Limits(), self.clock, RandomIds())

    def _look_at_store(self) -> None:
        self.box = Mailbox(self.engine, None, "world")
        self._house = AgentId.named(HOUSE)

    # --- what happens from outside ------------------------------------------------------------------------

    async def go_on(self) -> bool:
        """Do the next thing; False when there is none, or nobody left to do it for."""
        if self._record.outcome is not None:
            return await self._settle_orphans()
        if await self._judge() or await self._settle_orphans():
            return True
        if self._script:
            await self._play(self._script.pop(0))
            return True
        return await self._answer_one() or self._pass_on()

    @property
    def _record(self) -> TaskRecord:
        record = self.engine.state.get(RUN_ID)
        assert isinstance(record, TaskRecord)
        return record

    async def _play(self, step: s.Step) -> None:
        self._told += 1
        match step:
            case s.Tell():
                await self.box.of(CALLER).signal_run(RUN_ID, step.name, step.value, key=f"script-{self._told}")
            case s.Say():
                said = Message(message_id=f"said-{self._told}", role="ROLE_USER", parts=(Part(text=step.text),))
                await self.box.of(CALLER).add_message(RUN_ID, said)
            case s.Pass():
                self.clock.advance(step.ms)
            case s.Answer():
                await self._answer_one()

    def _pass_on(self) -> bool:
        when = next_time(self.engine, self.clock.now_ms())
        self._told += 1
        if when is None or self._told > _ADVANCES_MAX:
            return False
        move_to(self.clock, when)
        return True

    async def _answer_one(self) -> bool:
        for child in self.engine.state.children(RUN_ID, 0, _MANY):
            function = self._others.get(child.task.task_kind or "")
            if function is not None and child.recipient != HOUSE_KEY and child.ready_for is not None:
                box = self.box.of(child.task.recipient)
                delivery = await box.try_recv_task_for()
                assert delivery is not None
                await box.send_result(await _done(function, delivery))
                return True
        return False

    # --- what is in doubt ---------------------------------------------------------------------------------

    async def _judge(self) -> bool:
        """An effect that nobody knows the outcome of: if it was done, say so; if not, let it be done."""
        run = await self.box.get_run(RUN_ID) if self._record.is_run else None
        if run is None or run.status is not RunStatus.EFFECT_IN_DOUBT:
            return False
        kept = self.engine.state.get(run_key(RUN_ID))
        assert isinstance(kept, Run) and kept.wait is not None
        self.doubts += 1
        key = f"{RUN_ID}:{kept.checkpoints}:{kept.wait.signals[0].removeprefix(EFFECT)}"
        deed = self._deeds.setdefault(key, Deed())
        deed.is_judged = True
        effect = run.doubts[0]
        if deed.outcome is None:
            await self.box.judge_effect(RUN_ID, effect, "retry", reason="it has not been done")
        elif (failed := deed.outcome[1]) is not None:
            text = f"{type(failed).__name__}: {failed}"
            await self.box.judge_effect(RUN_ID, effect, "failed", reason="it failed", value=text)
        else:
            value = values.plain(deed.outcome[0])
            await self.box.judge_effect(RUN_ID, effect, "done", reason="it was done", value=value)
        return True

    async def _settle_orphans(self) -> bool:
        """A task that a dead worker holds goes back to the queue. Whoever takes it finds out whether it was done."""
        orphans = [
            record
            for record in self.engine.state.leases(0, _MANY, HOUSE_KEY)
            if record.task.id != RUN_ID and record.lease is not None and record.lease.incarnation in self.dead
        ]
        for orphan in orphans:
            self.doubts += 1
            self._deeds.setdefault(orphan.task.id, Deed()).is_judged = True
            if orphan.task.is_idempotent:
                self.faults.append(f"the task {orphan.task.task_kind} may be done twice, and was left with the dead")
            order = Requeue("operator_accepted")
            await self.box.repair_task(RepairRequest(orphan.task.id, order, "its worker is dead"))
        return bool(orphans)

    # --- what is done inside ------------------------------------------------------------------------------

    async def do(self, function: TaskFunction, work: WorkContext, value: Any) -> Any:
        """The body of a task."""
        task = work.task
        record = self.engine.state.get(task.id)
        if isinstance(record, TaskRecord) and record.result is not None:
            self.faults.append(f"the task {task.task_kind} was begun when its result was there")
        arguments = (work, value) if function.takes_context else (value,) if function.takes_input else ()
        return await self._deed(task.id, f"the task {task.task_kind}", task.is_idempotent, function.function, arguments)

    async def perform(self, function: Callable[..., Any], key: str, idempotent: bool) -> Any:
        """An effect."""
        if self._is_remembered(key.split(":", 2)[2]):
            self.faults.append(f"the effect {key} was begun when its outcome was remembered")
        parameters = inspect.signature(function).parameters.values()
        takes_key = any(parameter.default is inspect.Parameter.empty for parameter in parameters)
        return await self._deed(key, f"the effect {key}", idempotent, function, (key,) if takes_key else ())

    async def _deed(
        self, key: str, shown: str, is_safe: bool, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Any:
        deed = self._deeds.setdefault(key, Deed())
        if deed.begun and not is_safe:
            if not deed.is_judged:
                self.faults.append(f"{shown} was begun again, and nobody was asked")
            if deed.outcome is not None:
                return _told(deed.outcome)
        deed.begun += 1
        deed.is_judged = False
        try:
            made = function(*arguments)
            deed.outcome = (await made if inspect.isawaitable(made) else made, None)
        except Exception as failed:
            deed.outcome = (None, failed)
        return _told(deed.outcome)

    def _is_remembered(self, key: str) -> bool:
        run = self.engine.state.get(run_key(RUN_ID))
        if not isinstance(run, Run):
            return False
        steps = self.engine.state.pieces(step_key(RUN_ID, ""), run.floor + 1, run.step)
        memos = [memo for _, step in steps if isinstance(step, Step) for memo in step.memos if memo.key == key]
        return bool(memos) and values.unraw(memos[-1].value) is not None

    def chance(self, key: str) -> bytes:
        """The same for the same operation; or, to see that what was drawn is remembered, never the same."""
        drawn = os.urandom(16) if self._is_fresh else sha256(key.encode()).digest()[:16]
        self._drawn.add(repr(fraction(drawn)))
        return drawn

    # --- what there is in the end -------------------------------------------------------------------------

    async def outcome(self) -> dict[str, Any]:
        """Everything that anybody can see of the run, as JSON; ids and numbers of chance by where they come up."""
        record = self._record
        if not record.is_run:
            return {"status": record.state}
        seen = await self.box.get_run(RUN_ID)
        page = await self.box.run_entries(RUN_ID, _MANY, every=True)
        dialog = await self.engine.ask(GetDialog(None, RUN_ID))
        told = {
            "status": seen.status,
            "outcome": seen.outcome,
            "result": None if record.result is None else _answer(record.result),
            "state": values.unraw(seen.state),
            "checkpoints": seen.checkpoints,
            "leaf": seen.leaf,
            "awaits": list(seen.awaits),
            "until": seen.until_ms,
            "doubts": list(seen.doubts),
            "signals": list(seen.signals),
            "entries": [_entry(entry) for entry in page.entries],
            "said": [values.content_of(message) for message in dialog.task.history],
            "tasks": [self._child(child) for child in self.engine.state.children(RUN_ID, 0, _MANY)],
            "effects": sorted(key for key, deed in self._deeds.items() if deed.begun),
        }
        return self._named(told, {entry.id: entry.number for entry in page.entries})

    def _child(self, child: TaskRecord) -> dict[str, Any]:
        return {
            "id": child.task.id,
            "kind": child.task.task_kind,
            "input": values.input_of(child.task),
            "outcome": child.outcome,
            "result": None if child.result is None else _answer(child.result),
        }

    def _named(self, told: dict[str, Any], entry_ids: dict[str, int]) -> dict[str, Any]:
        """Ids that are made up, and numbers that are drawn, differ from run to run: what counts is where the same one
        comes up. Those of tasks are told by what is asked, and stay."""
        names = {entry_id: f"<entry {number}>" for entry_id, number in entry_ids.items()}
        names |= {child["id"]: child["id"] for child in told["tasks"]} | {RUN_ID: RUN_ID}
        known = len(names)

        def name(text: str) -> str:
            if text not in names and (text in self._drawn or not _is_fraction(text)):
                names[text] = f"<chance {len(names) - known + 1}>"
            return names.get(text, text)

        def walk(value: Any) -> Any:
            if isinstance(value, dict):
                return {walk(key): walk(inner) for key, inner in value.items()}
            if isinstance(value, list):
                return [walk(inner) for inner in value]
            if isinstance(value, str):
                return _NAMED.sub(lambda found: name(found[0]), value)
            return name(repr(value)) if isinstance(value, float) and repr(value) in self._drawn else value

        walked: dict[str, Any] = walk(values.plain(told))
        return walked


def _is_fraction(text: str) -> bool:
    return text[1] == "."


def _told(outcome: tuple[Any, BaseException | None]) -> Any:
    value, failed = outcome
    if failed is not None:
        raise failed
    return value


async def _done(function: TaskFunction, delivery: Delivery) -> Result:
    value = values.typed(values.input_of(delivery.task), function.input_type) if function.takes_input else None
    try:
        made = function.function(*((value,) if function.takes_input else ()))
        return Result.ok(delivery, values.blocks_of(await made if inspect.isawaitable(made) else made))
    except Exception as failed:
        return Result.error(delivery, f"{type(failed).__name__}: {failed}")


def _answer(result: Result) -> dict[str, Any]:
    return {"status": result.status, "value": values.value_of(result), "error": result.error_message}


def _entry(entry: EntrySeen) -> dict[str, Any]:
    content = values.unraw(entry.content) if entry.message is None else values.content_of(entry.message)
    return {
        "number": entry.number,
        "parent": entry.parent,
        "role": entry.role,
        "type": entry.type,
        "turn": entry.turn,
        "at": entry.at_ms,
        "content": content,
    }
