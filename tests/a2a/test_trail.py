"""What a client is told of a task, against the task itself: over any life, each mutation once, and the sum of what was
told is what there is. (Contract 14, 17.)"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from covenant import CovenantError, ForceError, Idempotency, RepairRequest, Requeue, Result, Text
from covenant.model import command as c
from covenant.model.record import Asks
from covenant.rules.evolve import steps_of
from covenant.rules.protocol import shown, state_of
from tests.a2a.stage import ADA, BOB, Client, Stage, artifact, message, seen
from tests.floors import reached, reaches

texts = st.sampled_from(("x", "y"))
names = st.sampled_from(("draft", "result", "partial-1", "notes"))
contents = st.sampled_from(((), (Text("x"),), (Text("x"), Text("y"))))


class Life:
    """Whatever may happen to a task, tried in any order; what the rules refuse changes nothing."""

    def __init__(self, data: st.DataObject, protocol: bool) -> None:
        self.stage = Stage()
        self.data = data
        idempotency = None if protocol else Idempotency("idempotent", "k")
        self.task_id = self.stage.send(protocol, idempotency=idempotency)
        self.acts: tuple[Callable[[], c.Command], ...] = (
            lambda: c.LeaseTasks(BOB, BOB, "one"),
            lambda: c.LeaseTasks(BOB, BOB, "one"),
            lambda: c.AddMessage(ADA, self.task_id, message(data.draw(texts))),
            lambda: c.UpdateTask(BOB, self.lease, message(data.draw(texts))),
            lambda: c.UpdateTask(BOB, self.lease, data.draw(st.sampled_from((None, message()))), Asks.INPUT),
            lambda: c.UpdateTask(BOB, self.lease, message(), Asks.AUTH),
            lambda: self.chunk(),
            lambda: self.chunk(),
            lambda: c.PostResult(BOB, self.result("partial"), "one"),
            lambda: c.PostResult(BOB, self.result("partial"), "one"),
            lambda: c.BeatLease(BOB, self.lease),
            lambda: c.ReleaseLease(BOB, self.lease),
            lambda: c.GiveBack(BOB, (self.lease,), ()),
            lambda: c.CancelTask(ADA, self.task_id, "why", graceful=True),
            lambda: c.RepairTask(
                None, RepairRequest(self.task_id, data.draw(st.sampled_from((Requeue("operator_accepted"),))), "why")
            ),
        )
        self.ends: tuple[Callable[[], c.Command], ...] = (
            lambda: c.PostResult(BOB, self.result("ok"), "one"),
            lambda: c.PostResult(BOB, self.result("error"), "one"),
            lambda: c.RejectTask(BOB, self.lease, message("no")),
            lambda: c.ReplyDirectly(BOB, self.lease, message("hello")),
            lambda: c.CancelTask(ADA, self.task_id, "why", cascade=True),
            lambda: c.RepairTask(None, RepairRequest(self.task_id, ForceError("given up"), "why")),
        )

    @property
    def lease(self) -> str:
        lease = self.stage.record(self.task_id).lease
        return "44444444-4444-4444-8444-444444444444" if lease is None else lease.lease_id

    def chunk(self) -> c.Command:
        piece = artifact(self.data.draw(texts), self.data.draw(names))
        return c.AddArtifact(BOB, self.lease, piece, self.data.draw(st.booleans()), self.data.draw(st.booleans()))

    def result(self, status: str) -> Result:
        said = self.data.draw(st.sampled_from((None, message("bye")))) if status != "partial" else None
        why = "boom" if status == "error" else None
        return Result(self.task_id, status, self.data.draw(contents), why, self.lease, None, said)  # type: ignore[arg-type]

    def step(self, act: Callable[[], c.Command]) -> None:
        try:
            self.stage.run(act())
        except CovenantError:
            return


@reaches(moved=10, ended=10)
@given(st.data(), st.booleans(), st.integers(1, 14), st.booleans())
def test_what_a_client_is_told_adds_up_to_the_task(data: st.DataObject, protocol: bool, steps: int, ends: bool) -> None:
    life = Life(data, protocol)
    for _ in range(steps):
        life.step(data.draw(st.sampled_from(life.acts)))
    if ends:
        life.step(data.draw(st.sampled_from(life.ends)))
    record = life.stage.record(life.task_id)
    if record.generation > 3:
        reached("moved")
    if record.outcome is not None:
        reached("ended")
    check_client(life)


@reaches(direct=15)
@given(st.data(), st.integers(0, 4))
def test_what_a_client_is_told_of_a_direct_reply_is_the_message(data: st.DataObject, steps: int) -> None:
    life = Life(data, protocol=True)
    lease, beat = life.acts[0], life.acts[10]
    for _ in range(steps):  # nothing of it shows
        life.step(lease if data.draw(st.booleans()) else beat)
    life.step(lease)
    life.step(lambda: c.ReplyDirectly(BOB, life.lease, message("hello")))
    if life.stage.record(life.task_id).direct:
        reached("direct")
    check_client(life)


def check_client(life: Life) -> None:
    """The client puts the task together from its events."""
    stage, task_id = life.stage, life.task_id
    record = stage.record(task_id)
    events = [event for logged in stage.log for event in logged.events if event.key == task_id]
    assert record.generation == sum(map(steps_of, events))
    updates = stage.updates(task_id)
    assert [update.generation for update in updates] == list(range(1, record.generation + 1))
    assert [update.ends for update in updates[:-1]] == [False] * (len(updates) - 1)
    assert updates[-1].ends == (record.outcome is not None)
    client = Client()
    for update in updates:
        client.hear(update.response, update.generation)
    assert client.generations == list(range(1, record.generation + 1))
    if record.direct:
        assert client.message is not None and client.message.parts == message("hello").parts
        return
    assert client.task is not None and client.task.status.state is state_of(record)
    assert client.seen == seen(shown(record, stage.state, stage.ctx.limits, 0))
