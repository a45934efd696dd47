"""The rules on their own: commands decided and folded in memory, with the log of it; and a client that puts a task
together from what it is told."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from covenant import AgentId, Limits, Task
from covenant.model import command as c
from covenant.model.audit import Logged
from covenant.model.error import CovenantError
from covenant.model.message import Artifact, Message, Part
from covenant.model.protocol import Status, StreamResponse, TaskShown, Update
from covenant.model.record import TaskRecord
from covenant.rules.context import Context
from covenant.rules.decide import decide
from covenant.rules.dialog import context_of
from covenant.rules.protocol import steps_in, updates_of
from covenant.store.clock import CountingIds
from covenant.store.state import State

ADA, BOB, CYD = (AgentId.named(name) for name in ("ada", "bob", "cyd"))


def message(text: str = "more", **facts: Any) -> Message:
    facts.setdefault("role", "ROLE_USER")
    return Message(message_id=facts.pop("message_id", "m-1"), parts=(Part(text=text),), **facts)


def artifact(text: str = "piece", name: str = "draft") -> Artifact:
    return Artifact(artifact_id=name, parts=(Part(text=text),))


class Stage:
    def __init__(self, limits: Limits | None = None) -> None:
        self.state = State()
        self.ctx = Context(1_000, CountingIds(), limits or Limits())
        self.log: list[Logged] = []

    def run(self, command: c.Command) -> Any:
        self.ctx.now += 1
        commit = decide(command, self.state, self.ctx)
        if commit.events:
            prev = self.state.orders_before(commit.events)
            self.log.append(Logged(self.state.order + 1, self.ctx.now, "someone", commit.events, prev, commit.audit))
            self.state.apply(commit.events, self.ctx.now)
            self.ctx.compaction = self.state.compaction
        for step in commit.then:
            self.run(step)
        if isinstance(commit.reply, CovenantError):
            raise commit.reply
        return commit.reply

    def send(self, protocol: bool = True, shown: bool = False, **facts: Any) -> str:
        facts.setdefault("message", message("draft the brief") if protocol else None)
        task = Task(recipient=BOB, intent_text="draft the brief", **facts)
        sent: str = self.run(c.SendTask(ADA, task, protocol, shown)).task_id
        return sent

    def lease(self) -> str:
        deliveries = self.run(c.LeaseTasks(BOB, BOB, "one"))
        return str(deliveries[0].lease_id) if deliveries else ""

    def record(self, task_id: str) -> TaskRecord:
        record = self.state.get(task_id)
        assert isinstance(record, TaskRecord)
        return record

    def updates(self, task_id: str) -> list[Update]:
        """Told forwards, from nothing."""
        found: list[Update] = []
        generation = 0
        for logged in self.log:
            found += updates_of(logged, task_id, context_of(self.record(task_id)), generation)
            generation += steps_in(logged, task_id)
        return found


class Client:
    """What a client of the protocol knows: a snapshot, changed by what it is told after it."""

    def __init__(self) -> None:
        self.task: TaskShown | None = None
        self.message: Message | None = None
        self.generations: list[int] = []

    def hear(self, response: StreamResponse, generation: int | None = None) -> None:
        if response.task is not None:
            self.task = response.task
            self.generations.append(int(response.task.generation))
        elif response.message is not None:
            self.message = response.message
            self.generations.append(generation or 0)
        else:
            assert self.task is not None
            update = response.status_update or response.artifact_update
            assert update is not None
            assert update.task_id == self.task.id
            assert update.context_id == self.task.context_id
            self.task = structs.replace(self.task, generation=update.generation)
            self.generations.append(int(update.generation))
            if response.status_update is not None:
                self.task = structs.replace(self.task, status=response.status_update.status)
            if response.artifact_update is not None:
                self._take(response.artifact_update.artifact, response.artifact_update.append)

    def _take(self, piece: Artifact, append: bool) -> None:
        assert self.task is not None
        assert piece.parts, "an artifact has parts"
        known = list(self.task.artifacts)
        at = next((at for at, made in enumerate(known) if made.artifact_id == piece.artifact_id), None)
        if at is None:
            assert not append, "nothing is there to be added to"
            known.append(piece)
        elif append:
            known[at] = structs.replace(known[at], parts=(*known[at].parts, *piece.parts))
        else:
            known[at] = piece
        self.task = structs.replace(self.task, artifacts=tuple(known))

    @property
    def seen(self) -> tuple[Status, tuple[Artifact, ...], str]:
        assert self.task is not None
        return seen(self.task)


def seen(task: TaskShown) -> tuple[Status, tuple[Artifact, ...], str]:
    """What events tell of; the history is told by the task alone."""
    return task.status, task.artifacts, task.generation
