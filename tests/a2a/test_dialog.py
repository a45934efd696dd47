"""The conversation about a task, at its edges: who may say what, when, and what stands afterwards. (Contract 2, 11, 12,
14, 16.)"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from covenant import CovenantError, Idempotency, Limits, RepairRequest, Requeue, Result, Task, Text
from covenant.model import command as c
from covenant.model import query as q
from covenant.model.error import (
    ContextMismatch,
    LeaseSuperseded,
    Malformed,
    NotPermitted,
    TaskTerminal,
    TooLarge,
    UnknownLease,
    UnknownTask,
)
from covenant.model.message import Message, Part
from covenant.model.protocol import State
from covenant.model.push import PushConfig
from covenant.model.record import Asks, Outcome, TaskState
from covenant.model.repair import RetryPolicy
from covenant.rules.dialog import intent_of
from covenant.rules.protocol import state_of
from covenant.rules.query import answer
from tests.a2a.stage import ADA, BOB, CYD, Stage, artifact, message


@pytest.fixture
def stage() -> Stage:
    return Stage()


def inputs(stage: Stage, lease: str, after: int = 0) -> list[str | None]:
    found = answer(q.ListInputs(BOB, lease, after), stage.state, stage.ctx)
    return [entry.message.parts[0].text for entry in found.inputs]


def say(stage: Stage, task_id: str, text: str = "more", **facts: Any) -> int:
    moved: int = stage.run(c.AddMessage(ADA, task_id, message(text, **facts))).generation
    return moved


# --- messages ------------------------------------------------------------------------------------------------


def test_what_is_too_long_for_an_intent_is_described_and_not_cut() -> None:
    limits = Limits(intent_text_bytes_max=64)
    told = {
        "x" * 64: "x" * 64,
        "x" * 65: "a message with 65 bytes of text",
        "é" * 32: "é" * 32,
        "é" * 32 + "x": "a message with 65 bytes of text",
    }
    assert {text: intent_of(message(text), limits) for text in told} == told
    two = Message(message_id="m", role="ROLE_USER", parts=(Part(text="x" * 32), Part(text="y" * 32)))
    assert intent_of(two, limits) == "a message with 65 bytes of text"  # with the line between them
    file = Message(message_id="m", role="ROLE_USER", parts=(Part(url="https://x.test/" + "x" * 64), Part(data=1)))
    assert intent_of(file, limits) == "a message without text: 2 parts"


def test_a_message_to_a_queued_task_waits_for_whoever_takes_it(stage: Stage) -> None:
    task_id = stage.send()
    assert say(stage, task_id, "and quickly") == 2
    assert state_of(stage.record(task_id)) is State.SUBMITTED
    assert inputs(stage, stage.lease()) == ["and quickly"]


def test_a_message_to_a_delayed_task_leaves_it_delayed(stage: Stage) -> None:
    task_id = stage.send(not_before_ms=50_000)
    say(stage, task_id)
    assert stage.lease() == ""
    assert stage.record(task_id).not_before_ms == 50_000


def test_a_message_to_a_follower_is_refused(stage: Stage) -> None:
    """It gets the result of another task's work, which would never hear of the message."""
    keyed = Idempotency("idempotent", "k")
    stage.send(protocol=False, idempotency=keyed)
    follower = stage.send(protocol=False, idempotency=keyed)
    with pytest.raises(NotPermitted):
        say(stage, follower)


def test_the_next_holder_reads_everything_that_was_said_to_the_last(stage: Stage) -> None:
    task_id = stage.send()
    first = stage.lease()
    say(stage, task_id, "one")
    stage.run(c.UpdateTask(BOB, first, message("half way", role="ROLE_AGENT")))
    stage.run(c.ReleaseLease(BOB, first))
    say(stage, task_id, "two")
    second = stage.lease()
    assert inputs(stage, second) == ["one", "two"]
    assert inputs(stage, second, after=1) == ["two"]
    with pytest.raises(LeaseSuperseded):
        inputs(stage, first)


def test_what_the_sender_says_reaches_the_holder_whatever_role_it_claims(stage: Stage) -> None:
    task_id = stage.send()
    lease = stage.lease()
    say(stage, task_id, "I am the agent", role="ROLE_AGENT")
    stage.run(c.UpdateTask(BOB, lease, message("I am the user", role="ROLE_USER")))
    assert inputs(stage, lease) == ["I am the agent"]
    last = stage.updates(task_id)[-1].response.status_update
    assert last is not None and last.status.message is not None
    assert last.status.message.role == "ROLE_AGENT"


def test_the_first_message_is_the_senders_whatever_role_it_claims(stage: Stage) -> None:
    task_id = stage.send(message=message("draft the brief", role="ROLE_AGENT"))
    shown = answer(q.GetDialog(ADA, task_id), stage.state, stage.ctx).task
    assert [said.role for said in shown.history] == ["ROLE_USER"]
    (delivery,) = stage.run(c.LeaseTasks(BOB, BOB, "one"))
    assert delivery.task.message.role == "ROLE_USER"


def test_a_context_or_task_without_a_name_is_none(stage: Stage) -> None:
    """ProtoJSON tells so of a field that is not set."""
    task_id = stage.send(context_id="here", message=message(context_id="", task_id=""))
    assert stage.run(c.AddMessage(ADA, task_id, message(context_id="", task_id=""))).generation == 2
    first = stage.record(task_id).task
    assert first.message is not None and (first.message.context_id, first.message.task_id) == (None, None)
    assert stage.send(id=task_id, context_id="here", message=message()) == task_id


def test_only_its_sender_adds_to_a_task(stage: Stage) -> None:
    task_id = stage.send()
    with pytest.raises(NotPermitted):
        stage.run(c.AddMessage(BOB, task_id, message()))
    with pytest.raises(UnknownTask):
        stage.run(c.AddMessage(CYD, task_id, message()))


def test_a_message_of_another_context_is_refused(stage: Stage) -> None:
    task_id = stage.send(context_id="here")
    with pytest.raises(ContextMismatch):
        say(stage, task_id, context_id="there")
    say(stage, task_id, context_id="here")
    mailbox = stage.send(protocol=False)
    say(stage, mailbox, context_id=mailbox)
    with pytest.raises(ContextMismatch):
        say(stage, mailbox, context_id="here")


def test_a_message_to_a_task_whose_cancel_was_asked_is_still_heard(stage: Stage) -> None:
    task_id = stage.send()
    lease = stage.lease()
    stage.run(c.CancelTask(ADA, task_id, "why", graceful=True))
    say(stage, task_id, "wait")
    assert inputs(stage, lease) == ["wait"]
    stage.run(c.ReleaseLease(BOB, lease))
    assert stage.record(task_id).outcome is Outcome.CANCELED
    with pytest.raises(TaskTerminal):
        say(stage, task_id)


def test_the_holder_cannot_use_up_what_the_sender_may_say() -> None:
    stage = Stage(Limits(messages_max=3))
    task_id = stage.send()
    lease = stage.lease()
    for _ in range(3):
        stage.run(c.UpdateTask(BOB, lease, message()))
    with pytest.raises(TooLarge):
        stage.run(c.UpdateTask(BOB, lease, message()))
    for _ in range(3):
        say(stage, task_id)
    with pytest.raises(TooLarge):
        say(stage, task_id)
    stage.run(c.PostResult(BOB, Result(task_id, "ok", (), None, lease), "one"))


def test_a_message_is_bounded_in_bytes_parts_and_depth(stage: Stage) -> None:
    task_id = stage.send()
    limits = stage.ctx.limits
    deep: Any = 1
    for _ in range(limits.content_depth_max + 1):
        deep = [deep]
    many = tuple(Part(text="x") for _ in range(limits.content_blocks_max + 1))
    odd: list[tuple[dict[str, Any], type[CovenantError]]] = [
        ({"parts": (Part(text="x" * limits.content_bytes_max),)}, TooLarge),
        ({"parts": many}, TooLarge),
        ({"parts": ()}, Malformed),
        ({"parts": (Part(text="x", url="http://x"),)}, Malformed),
        ({"parts": (Part(),)}, Malformed),
        ({"parts": (Part(data=deep),)}, Malformed),
        ({"parts": (Part(text="x", metadata={"deep": deep}),)}, Malformed),
        ({"parts": (Part(data=float("nan")),)}, Malformed),
        ({"metadata": {"deep": deep}}, Malformed),
        ({"message_id": " "}, CovenantError),
        ({"message_id": "m" * (limits.key_bytes_max + 1)}, TooLarge),
        ({"message_id": "\ud800"}, Malformed),
        ({"parts": (Part(text="\ud800"),)}, Malformed),
        ({"extensions": ("x" * limits.content_bytes_max,)}, TooLarge),
        ({"parts": None}, Malformed),
        ({"parts": (1,)}, Malformed),
        ({"parts": (Part(text=1),)}, Malformed),  # type: ignore[arg-type]
        ({"metadata": 7}, Malformed),
        ({"role": "ROLE_KING"}, Malformed),
    ]
    for fields, refusal in odd:
        with pytest.raises(refusal):
            stage.run(c.AddMessage(ADA, task_id, structs.replace(message(), **fields)))
    assert stage.record(task_id).generation == 1


def test_what_a_caller_changes_afterwards_does_not_change_what_was_said(stage: Stage) -> None:
    data: dict[str, Any] = {"colour": "red"}
    task_id = stage.send(message=Message(message_id="m", role="ROLE_USER", parts=(Part(data=data),)))
    say(stage, task_id, metadata=data)
    data["colour"] = "blue"
    delivery = stage.run(c.LeaseTasks(BOB, BOB, "one"))[0]
    assert delivery.task.message.parts[0].data == {"colour": "red"}
    delivery.task.message.parts[0].data["colour"] = "green"
    kept = stage.record(task_id).task.message
    assert kept is not None and kept.parts[0].data == {"colour": "red"}


def test_a_holder_gets_its_inputs_in_pages() -> None:
    stage = Stage(Limits(page_max=3))
    task_id = stage.send()
    lease = stage.lease()
    for n in range(5):
        stage.run(c.UpdateTask(BOB, lease, message("half way")))
        say(stage, task_id, f"{n}")
    assert inputs(stage, lease) == ["0", "1", "2"]
    assert inputs(stage, lease, after=6) == ["3", "4"]


# --- webhooks ------------------------------------------------------------------------------------------------


def test_the_same_webhook_again_is_not_told_everything_again(stage: Stage) -> None:
    """A retried message brings its webhook along; what was told stays told."""
    task_id = stage.send()
    hook = PushConfig(id="hook", url="http://hook", token="secret")
    stage.run(c.SetPush(ADA, task_id, hook, from_start=True))
    stage.run(c.NotePush(None, task_id, "hook", stage.state.pushes(task_id)[0].since, 1))
    assert stage.run(c.SetPush(ADA, task_id, hook, from_start=True)) == hook
    assert [push.delivered for push in stage.state.pushes(task_id)] == [1]
    stage.run(c.SetPush(ADA, task_id, structs.replace(hook, url="http://other"), from_start=True))
    assert [push.delivered for push in stage.state.pushes(task_id)] == [0]


def test_a_note_of_what_was_told_before_changes_nothing(stage: Stage) -> None:
    """A deliverer whose answer was lost says it again, and one that was slow says less than is known."""
    task_id = stage.send()
    stage.run(c.SetPush(ADA, task_id, PushConfig(id="hook", url="http://hook"), from_start=True))
    since = stage.state.pushes(task_id)[0].since
    orders = []
    for told in (2, 2, 1, 3):
        stage.run(c.NotePush(None, task_id, "hook", since, told))
        orders.append((stage.state.order, stage.state.pushes(task_id)[0].delivered))
    first = orders[0][0]
    assert orders == [(first, 2), (first, 2), (first, 2), (first + 1, 3)]


# --- questions -----------------------------------------------------------------------------------------------


def test_a_holder_whose_question_is_answered_has_its_time_again(stage: Stage) -> None:
    """Contract 12: it was not stale while it waited, and its time to work begins with the answer."""
    task_id = stage.send(protocol=False, idempotency=Idempotency("idempotent", "k"))
    lease = stage.lease()
    stage.run(c.UpdateTask(BOB, lease, message("which?"), Asks.INPUT))
    policy = RetryPolicy(enabled=True, min_lease_age_ms=1_000)
    stage.ctx.now += 60_000
    assert stage.run(c.RetryStale(None, policy)).requeued == []
    say(stage, task_id, "this one")
    assert stage.run(c.RetryStale(None, policy)).requeued == []
    stage.ctx.now += 60_000
    assert [one.task_id for one in stage.run(c.RetryStale(None, policy)).requeued] == [task_id]


def test_progress_is_drained_by_whoever_drains_the_result(stage: Stage) -> None:
    """Contract 4: that of a task of the mailbox by its sender; that of a task of the protocol by nobody."""
    for protocol, drained in ((True, []), (False, [("partial", 1), ("ok", None)])):
        task_id = stage.send(protocol)
        lease = stage.lease()
        stage.run(c.PostResult(BOB, Result(task_id, "partial", (Text("half"),), None, lease), "one"))
        stage.run(c.PostResult(BOB, Result(task_id, "ok", (Text("whole"),), None, lease), "one"))
        answers = stage.run(c.DrainResults(ADA, ADA, 10))
        assert [(one.result.status, one.result.sequence) for one in answers] == drained
        assert stage.run(c.DrainResults(None, None, 10)) == []


def test_a_question_is_gone_with_the_lease_under_which_it_was_asked(stage: Stage) -> None:
    task_id = stage.send()
    for leave in (
        lambda lease: c.ReleaseLease(BOB, lease),
        lambda lease: c.RepairTask(None, RepairRequest(task_id, Requeue("operator_accepted"), "why")),
        lambda lease: c.GiveBack(BOB, (lease,), ()),
    ):
        lease = stage.lease()
        stage.run(c.UpdateTask(BOB, lease, message("which?"), Asks.INPUT))
        assert state_of(stage.record(task_id)) is State.INPUT_REQUIRED
        stage.run(leave(lease))
        assert state_of(stage.record(task_id)) is State.SUBMITTED
    assert stage.record(task_id).attempt == 3  # a question is an act: whoever asked had the task


def test_a_deadline_passes_over_a_task_that_waits_for_an_answer(stage: Stage) -> None:
    task_id = stage.send(deadline_ms=5_000)
    lease = stage.lease()
    stage.run(c.UpdateTask(BOB, lease, None, Asks.AUTH))
    stage.ctx.now = 9_000
    stage.run(c.Expire(None))
    assert state_of(stage.record(task_id)) is State.AUTH_REQUIRED
    stage.run(c.ReleaseLease(BOB, lease))
    stage.run(c.Expire(None))
    assert stage.record(task_id).outcome is Outcome.DEADLINE_EXCEEDED


def test_an_update_leaves_a_question_open_and_a_message_answers_it(stage: Stage) -> None:
    task_id = stage.send()
    lease = stage.lease()
    stage.run(c.UpdateTask(BOB, lease, message("which?"), Asks.INPUT))
    stage.run(c.UpdateTask(BOB, lease, message("still waiting")))
    stage.run(c.AddArtifact(BOB, lease, artifact()))
    assert state_of(stage.record(task_id)) is State.INPUT_REQUIRED
    say(stage, task_id)
    assert state_of(stage.record(task_id)) is State.WORKING


# --- the end -------------------------------------------------------------------------------------------------


def test_a_rejected_leader_leaves_the_work_to_its_follower(stage: Stage) -> None:
    keyed = Idempotency("idempotent", "k")
    stage.send(protocol=False, idempotency=keyed)
    follower = stage.send(protocol=False, idempotency=keyed)
    stage.run(c.RejectTask(BOB, stage.lease(), message("no")))
    stage.lease()
    assert stage.record(follower).state is TaskState.IN_FLIGHT


def test_a_rejection_or_reply_that_is_repeated_is_answered_again(stage: Stage) -> None:
    """Contract 3, for whoever did not hear the answer; another one comes too late."""
    for end in (c.RejectTask, c.ReplyDirectly):
        task_id = stage.send()
        lease = stage.lease()
        first = stage.run(end(BOB, lease, message("no")))
        assert stage.run(end(BOB, lease, message("no"))) == first
        assert stage.record(task_id).generation == first.generation
        with pytest.raises(TaskTerminal):
            stage.run(end(BOB, lease, message("yes")))
        with pytest.raises(UnknownLease):
            stage.run(end(CYD, lease, message("no")))


def test_a_task_that_was_seen_is_completed_by_a_reply(stage: Stage) -> None:
    """It cannot be taken back: the reply is its last word."""
    task_id = stage.send()
    lease = stage.lease()
    stage.run(c.AddArtifact(BOB, lease, artifact()))
    stage.run(c.ReplyDirectly(BOB, lease, message("that was it")))
    record = stage.record(task_id)
    assert (record.direct, state_of(record)) == (False, State.COMPLETED)
    last = stage.updates(task_id)[-1].response.status_update
    assert last is not None and last.status.message is not None
    assert last.status.message.parts == (Part(text="that was it"),)


def test_a_task_that_only_changed_hands_is_still_answered_by_a_reply(stage: Stage) -> None:
    task_id = stage.send()
    stage.run(c.GiveBack(BOB, (stage.lease(),), ()))
    stage.run(c.ReleaseLease(BOB, stage.lease()))
    stage.run(c.ReplyDirectly(BOB, stage.lease(), message("hello")))
    assert stage.record(task_id).direct


def test_what_came_by_the_mailbox_is_not_answered_by_a_message(stage: Stage) -> None:
    stage.send(protocol=False)
    with pytest.raises(NotPermitted):
        stage.run(c.ReplyDirectly(BOB, stage.lease(), message("hello")))


def test_the_mailbox_shows_what_was_answered_by_a_message(stage: Stage) -> None:
    """To the protocol there was no task. The mailbox keeps the record that there was: for its parties and the operator
    it is a resolved task like any other."""
    task_id = stage.send()
    stage.run(c.ReplyDirectly(BOB, stage.lease(), message("hello")))
    for by in (None, ADA, BOB):
        entry = answer(q.GetTask(by, task_id), stage.state, stage.ctx)
        assert (entry.state, entry.outcome) == (TaskState.RESOLVED, Outcome.ANSWERED)
        assert [task.id for task in answer(q.RecentTasks(by, 10), stage.state, stage.ctx)] == [task_id]
        assert answer(q.ListQueue(by, 10), stage.state, stage.ctx).tasks == []
        with pytest.raises(UnknownTask):
            answer(q.GetDialog(by, task_id), stage.state, stage.ctx)
    page = answer(q.ListDialogs(ADA, BOB.pubkey, 10), stage.state, stage.ctx)
    assert (page.tasks, page.total) == ([], 0)


def test_a_lease_under_which_something_was_said_is_released_and_not_undone(stage: Stage) -> None:
    task_id = stage.send()
    used = stage.lease()
    stage.run(c.UpdateTask(BOB, used, message("half way")))
    stage.run(c.GiveBack(BOB, (used,), ()))
    assert (stage.record(task_id).attempt, stage.record(task_id).state) == (1, TaskState.QUEUED)
    unused = stage.lease()
    say(stage, task_id)  # the sender's act, not the holder's
    stage.run(c.GiveBack(BOB, (unused,), ()))
    assert stage.record(task_id).attempt == 1


def test_a_canceled_protocol_task_takes_its_children_along(stage: Stage) -> None:
    parent = stage.send()
    stage.lease()
    child = stage.run(c.SendTask(BOB, Task(recipient=CYD, intent_text="part of it", parent=parent))).task_id
    stage.run(c.CancelTask(ADA, parent, "why", cascade=True))
    assert stage.record(child).outcome is Outcome.CANCELED
    assert stage.record(parent).cascade == "done"


def test_a_keyed_task_of_the_protocol_stays_one(stage: Stage) -> None:
    """First, as a follower, and as a hit in the cache."""
    keyed = Idempotency("idempotent", "k")
    first, follower = stage.send(idempotency=keyed), stage.send(idempotency=keyed)
    lease = stage.lease()
    stage.run(c.PostResult(BOB, Result(first, "ok", (Text("x"),), None, lease), "one"))
    hit = stage.send(idempotency=keyed)
    for task_id in (first, follower, hit):
        record = stage.record(task_id)
        assert (record.protocol, record.state) == (True, TaskState.RESOLVED)
    assert stage.run(c.DrainResults(ADA, ADA, 10)) == []


def test_a_task_has_a_bounded_number_of_artifacts_and_pieces() -> None:
    stage = Stage(Limits(artifacts_max=2, chunks_max=4))
    stage.send()
    lease = stage.lease()
    for name in ("a", "b", "a", "b"):
        stage.run(c.AddArtifact(BOB, lease, artifact("x", name), append=True))
    for name in ("a", "c"):
        with pytest.raises(TooLarge):
            stage.run(c.AddArtifact(BOB, lease, artifact("x", name)))
