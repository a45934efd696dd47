"""Random conversations against a mailbox and against a small model of what the protocol shows of them: every reply, and
after every step every task, its history, the listing and the trail of each must be the same; over restarts and lost
files, too. (DESIGN 1, contract 14-17.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from tests.model.machine import Machine, counted, run
from tests.postgres import store_for

from covenant import AgentId, CovenantError, Limits, Result, Task, Text
from covenant.model import command as c
from covenant.model import query as q
from covenant.model.message import Artifact, Message, Part
from covenant.model.record import Asks
from covenant.model.view import Dialog, DialogPage, Input
from covenant.rules.protocol import updates_of
from covenant.store.journal.archive import FILE
from covenant.store.postgres.listing import of_shelf
from covenant.store.postgres.rows import READY

LIMITS = Limits(
    segment_bytes=4096,
    snapshot_every_bytes=8192,
    finished_tail_max=3,
    archive_batch=3,
    messages_max=6,
    chunks_max=8,
    artifacts_max=2,
)
ADA, BOB = AgentId.named("ada"), AgentId.named("bob")
words = st.sampled_from(("red", "green", "blue"))
asked = st.sampled_from((None, Asks.INPUT, Asks.AUTH))


def says(text: str) -> Message:
    return Message(message_id="m", role="ROLE_USER", parts=(Part(text=text),))


class Talk:
    """One task as its client should see it."""

    def __init__(self, text: str, shown: bool) -> None:
        self.state = "SUBMITTED"
        self.generation = 1
        self.history = [text]
        self.inputs: list[tuple[int, str]] = []
        self.told = 0  # by the holder
        self.note: str | None = None
        self.artifacts: dict[str, list[str]] = {}
        self.pieces = 0
        self.lease: str | None = None
        self.shown = shown
        self.direct = False

    @property
    def is_over(self) -> bool:
        return self.state in ("COMPLETED", "FAILED", "CANCELED", "REJECTED")

    @property
    def is_listed(self) -> bool:
        """Not while it may yet be answered by a message alone."""
        return not self.direct and (self.shown or self.is_over)

    def turn(self, state: str, note: str | None = None, by: int = 1) -> None:
        self.state, self.note = state, note
        self.generation += by

    def end(self, state: str, note: str | None, by: int = 1) -> None:
        self.turn(state, note, by)
        self.lease = None


class Conversations(Machine):
    limits = LIMITS

    def __init__(self) -> None:
        super().__init__()
        self.talks: dict[str, Talk] = {}
        self.queue: list[str] = []
        self.moved: list[str] = []  # by their last status, the newest last

    def run(self, command: c.Command) -> Any:
        """The reply, or the code of the refusal."""
        engine: Any = self.box._engine
        try:
            return self.wait(engine.run(command))
        except CovenantError as refusal:
            return refusal.code

    def ask(self, query: q.Query) -> Any:
        engine: Any = self.box._engine
        return self.wait(engine.ask(query))

    def some(self, data: st.DataObject, held: bool = False) -> str:
        found = [i for i, talk in self.talks.items() if not held or talk.lease is not None]
        return data.draw(st.sampled_from(found), label="task")

    def restated(self, task_id: str) -> None:
        self.moved.remove(task_id)
        if not self.talks[task_id].direct:
            self.moved.append(task_id)

    # --- the sender ---------------------------------------------------------------------------------------

    @initialize(held=st.integers(1, 3))
    @counted
    def begin(self, held: int) -> None:
        """With something held: a program may have no step that leases."""
        for _ in range(held):
            self.send("red", True)
            self.lease()
        self.send("red", True)

    @rule(text=words, shown=st.booleans())
    @counted
    def send(self, text: str, shown: bool) -> None:
        task = Task(recipient=BOB, intent_text=text, message=says(text), context_id="talk")
        task_id = self.run(c.SendTask(ADA, task, protocol=True, shown=shown)).task_id
        self.talks[task_id] = Talk(text, shown)
        self.queue.append(task_id)
        self.moved.append(task_id)

    @rule(data=st.data(), text=words, off=st.sampled_from((None, 0, 0, 1, -1)))
    @counted
    def add(self, data: st.DataObject, text: str, off: int | None) -> None:
        task_id = self.some(data)
        talk = self.talks[task_id]
        guard = None if off is None else max(0, talk.generation + off)
        got = self.run(c.AddMessage(ADA, task_id, says(text), guard))
        if talk.direct:
            assert got == "unknown_task"
        elif guard is not None and guard != talk.generation:
            assert got == "generation_mismatch"
        elif talk.is_over:
            assert got == "task_terminal"
        elif len(talk.inputs) >= LIMITS.messages_max:
            assert got == "too_large"
        else:
            talk.history.append(text)
            talk.inputs.append((len(talk.history) - 1, text))
            talk.turn("SUBMITTED" if talk.lease is None else "WORKING")
            talk.shown = True
            self.restated(task_id)
            assert got.generation == talk.generation

    @rule(data=st.data())
    @counted
    def show(self, data: st.DataObject) -> None:
        task_id = self.some(data)
        assert self.run(c.ShowTask(ADA, task_id)) is None
        self.talks[task_id].shown = True

    @rule(data=st.data())
    @counted
    def cancel(self, data: st.DataObject) -> None:
        task_id = self.some(data)
        talk = self.talks[task_id]
        got = self.run(c.CancelTask(ADA, task_id, "why"))
        if talk.is_over:
            assert got == "task_terminal" if talk.state != "CANCELED" else got.generation == talk.generation
            return
        if task_id in self.queue:
            self.queue.remove(task_id)
        talk.end("CANCELED", "canceled: why")
        self.restated(task_id)

    # --- the holder ---------------------------------------------------------------------------------------

    @rule()
    @counted
    def lease(self) -> None:
        got = self.run(c.LeaseTasks(BOB, BOB, "one"))
        assert [delivery.task.id for delivery in got] == self.queue[:1]
        for delivery in got:
            talk = self.talks[self.queue.pop(0)]
            talk.lease = delivery.lease_id
            talk.turn("WORKING")
            assert delivery.generation == talk.generation
            self.restated(delivery.task.id)

    def holding(self, data: st.DataObject) -> tuple[str, Talk, str]:
        task_id = self.some(data, held=True)
        talk = self.talks[task_id]
        assert talk.lease is not None
        return task_id, talk, talk.lease

    @rule(data=st.data(), text=st.none() | words, asks=asked)
    @precondition(lambda self: any(talk.lease for talk in self.talks.values()))
    @counted
    def update(self, data: st.DataObject, text: str | None, asks: Asks | None) -> None:
        task_id, talk, lease = self.holding(data)
        got = self.run(c.UpdateTask(BOB, lease, None if text is None else says(text), asks))
        if text is None and asks is None:
            assert got == "malformed"
        elif text is not None and talk.told >= LIMITS.messages_max:
            assert got == "too_large"
        else:
            state = {None: talk.state, Asks.INPUT: "INPUT_REQUIRED", Asks.AUTH: "AUTH_REQUIRED"}[asks]
            talk.turn(state, text)
            if text is not None:
                talk.history.append(text)
                talk.told += 1
            talk.shown = True
            self.restated(task_id)
            assert got.generation == talk.generation

    @rule(data=st.data(), text=words, name=st.sampled_from("abc"), append=st.booleans())
    @precondition(lambda self: any(talk.lease for talk in self.talks.values()))
    @counted
    def piece(self, data: st.DataObject, text: str, name: str, append: bool) -> None:
        _, talk, lease = self.holding(data)
        got = self.run(c.AddArtifact(BOB, lease, Artifact(artifact_id=name, parts=(Part(text=text),)), append))
        if talk.pieces >= LIMITS.chunks_max or (name not in talk.artifacts and len(talk.artifacts) >= 2):
            assert got == "too_large"
            return
        talk.pieces += 1
        talk.artifacts[name] = [*(talk.artifacts.get(name, []) if append else []), text]
        talk.generation += 1
        talk.shown = True
        assert got.generation == talk.generation

    @rule(data=st.data(), given_back=st.booleans())
    @precondition(lambda self: any(talk.lease for talk in self.talks.values()))
    @counted
    def release(self, data: st.DataObject, given_back: bool) -> None:
        task_id, talk, lease = self.holding(data)
        self.run(c.ReleaseLease(BOB, lease) if not given_back else c.GiveBack(BOB, (lease,), ()))
        talk.lease = None
        talk.turn("SUBMITTED")
        self.restated(task_id)
        ready = self.ready()
        assert set(ready) == {*self.queue, task_id}
        self.queue = ready  # given back unused, it stands where it stood: the mailbox's own model knows where

    def ready(self) -> list[str]:
        engine: Any = self.box._engine
        return [record.task.id for record in engine.state.ready(BOB.pubkey, 100)]

    @rule(data=st.data(), text=words, how=st.sampled_from(("ok", "error", "content", "reject", "reply")))
    @precondition(lambda self: any(talk.lease for talk in self.talks.values()))
    @counted
    def finish(self, data: st.DataObject, text: str, how: str) -> None:
        task_id, talk, lease = self.holding(data)
        if how == "reject":
            got = self.run(c.RejectTask(BOB, lease, says(text)))
            talk.end("REJECTED", text)
        elif how == "reply":
            got = self.run(c.ReplyDirectly(BOB, lease, says(text)))
            talk.direct = not talk.shown
            talk.end("COMPLETED", text)
        elif how == "error":
            got = self.run(c.PostResult(BOB, Result(task_id, "error", (), text, lease), "one"))
            talk.end("FAILED", text)
        else:
            content = (Text(text),) if how == "content" else ()
            got = self.run(c.PostResult(BOB, Result(task_id, "ok", content, None, lease), "one"))
            if content:
                talk.artifacts["result"] = [text]
            talk.end("COMPLETED", None, 1 + len(content))
        self.restated(task_id)
        assert got.generation == talk.generation
        again = self.run(c.UpdateTask(BOB, lease, says("late")))
        assert again in ("task_terminal", "unknown_lease")  # the archive does not tell whose lease it was

    # --- what is seen -------------------------------------------------------------------------------------

    @invariant()
    def everything_is_as_it_should_be(self) -> None:
        for task_id, talk in self.talks.items():
            if talk.direct:
                with pytest.raises(CovenantError):
                    self.ask(q.GetDialog(ADA, task_id))
                reply = self.ask(q.GetDialog(ADA, task_id, direct=True)).reply
                assert reply.parts[0].text == talk.note
                continue
            dialog: Dialog = self.ask(q.GetDialog(ADA, task_id))
            task = dialog.task
            assert task.status.state.removeprefix("TASK_STATE_") == talk.state
            assert task.generation == str(talk.generation)
            note = task.status.message
            assert (None if note is None else note.parts[0].text) == talk.note
            assert [message.parts[0].text for message in task.history] == talk.history
            made = {one.artifact_id: [part.text for part in one.parts] for one in task.artifacts}
            assert made == talk.artifacts
            if talk.lease is not None:
                inputs: list[Input] = self.ask(q.ListInputs(BOB, talk.lease)).inputs
                assert [(one.number, one.message.parts[0].text) for one in inputs] == talk.inputs
        page: DialogPage = self.ask(q.ListDialogs(ADA, BOB.pubkey, 100))
        listed = [task_id for task_id in reversed(self.moved) if self.talks[task_id].is_listed]
        assert [task.id for task in page.tasks] == listed
        assert page.total == len(listed)

    @rule(data=st.data())
    @counted
    def the_trail_is_whole(self, data: st.DataObject) -> None:
        task_id = self.some(data)
        talk = self.talks[task_id]
        place = self.ask(q.GetPlace(ADA, task_id))
        engine: Any = self.box._engine
        seq, generation, generations = place.order, place.generation, []
        while generation > 0:
            commits = self.wait(engine.log_trail(seq, task_id, 3))
            assert commits
            for logged in commits:
                moved = len(updates_of(logged, task_id, "talk", 0))
                generation -= moved
                updates = updates_of(logged, task_id, "talk", generation)
                generations += [update.generation for update in reversed(updates)]
                seq = logged.previous(task_id)
        assert generations == list(range(talk.generation, 0, -1))

    @rule(span=st.sampled_from((1, 1000)))
    @counted
    def let_time_pass(self, span: int) -> None:
        self.clock.advance(span)


class StoredConversations(Conversations):
    url = "file:{folder}"

    @rule(archive=st.booleans(), snapshots=st.booleans())
    @counted
    def restart(self, archive: bool, snapshots: bool) -> None:
        self.wait(self.box.close())
        for pattern in (f"{FILE}*",) * archive + ("snapshot-*",) * snapshots:
            for path in Path(self.folder.name).glob(pattern):
                path.unlink()
        self.wait(self.open())


class SharedConversations(Conversations):
    async def address(self) -> str:
        return await store_for(self.folder.name)

    def ready(self) -> list[str]:
        engine: Any = self.box._engine
        found = self.wait(engine._reader.fetch(*of_ready(BOB.pubkey)))
        return [row["key"] for row in found]

    @rule()
    @counted
    def restart(self) -> None:
        self.wait(self.box.close())
        self.wait(self.open())


def of_ready(recipient: str) -> tuple[Any, ...]:
    sql, values = of_shelf(READY, recipient, -1, 100)
    return (sql, *values)


MACHINES = [
    pytest.param(Conversations, 60, 5, id="memory"),  # enough programs for a floor: each has some of the steps only
    pytest.param(StoredConversations, 20, 0, id="file"),
    pytest.param(SharedConversations, 4, 0, id="postgresql"),
]


def bounds(examples: int, steps: int) -> settings:
    health = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=health, print_blob=True
    )


@pytest.mark.parametrize(("machine", "examples", "least"), MACHINES)
def test_conversations_are_as_the_model_says(machine: type[Conversations], examples: int, least: int) -> None:
    run(machine, bounds(examples, steps=40), least)


@pytest.mark.soak
def test_conversations_on_a_shared_store_are_as_the_model_says_for_long() -> None:
    run(SharedConversations, bounds(examples=100, steps=80), least=10)
