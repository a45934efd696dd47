"""What a client sees of a task while somebody works on it. (DESIGN 1, contract 14-17.)"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import structs

from covenant import Text
from covenant.a2a import wire as a
from covenant.a2a.fault import CONFLICT, GENERATION, INVALID_PARAMS, TASK_NOT_FOUND, TOO_LARGE, UNSUPPORTED, kind_of
from covenant.exchange.waits import Waits
from covenant.model import command as c
from covenant.model.error import CovenantError
from covenant.model.limits import CONTENT_BYTES_MAX, INTENT_TEXT_BYTES_MAX
from covenant.model.message import Message, Part
from covenant.model.protocol import StreamResponse
from covenant.model.record import Asks
from covenant.model.task import Result, Task
from covenant.rules.push import PUSHES_MAX
from covenant.serve.a2a.operations import CURSOR, KEY
from tests.a2a.conftest import Town, piece, says


def line(event: StreamResponse) -> tuple[int, str]:
    """One event of a stream, in short."""
    if event.task is not None:
        return int(event.task.generation), event.task.status.state.removeprefix("TASK_STATE_")
    if event.status_update is not None:
        return int(event.status_update.generation), event.status_update.status.state.removeprefix("TASK_STATE_")
    if event.artifact_update is not None:
        return int(event.artifact_update.generation), f"artifact {event.artifact_update.artifact.artifact_id}"
    return 0, "message"


async def refused(call: Any) -> Any:
    with pytest.raises(CovenantError) as told:
        await call
    return kind_of(told.value)


async def test_a_message_is_a_task_that_a_worker_leases(town: Town) -> None:
    task = await town.send()
    assert (task.status.state, task.generation) == ("TASK_STATE_SUBMITTED", "1")
    delivery = await town.lease()
    assert delivery.task.id == task.id
    assert delivery.task.intent_text == "draft the brief"
    assert delivery.task.message == says()
    await town.finish(delivery, Result.ok(delivery, [Text("done")]))
    done = await town.get(task.id)
    assert (done.status.state, done.generation) == ("TASK_STATE_COMPLETED", "4")
    assert done.artifacts[0].parts == (Part(text="done"),)


async def test_a_message_outside_of_a_conversation_begins_one_that_is_named_like_its_task(town: Town) -> None:
    first = await town.send()
    assert first.context_id == first.id
    assert (await town.lease()).task.context_id == first.id
    second = await town.send(says(context_id=first.context_id))
    assert (second.context_id, (await town.lease()).task.context_id) == (first.id, first.id)


@pytest.mark.parametrize("more", [0, 1, 1_000_000])
async def test_a_text_of_any_length_that_a_message_may_have_is_a_task(town: Town, more: int) -> None:
    text = "x" * (INTENT_TEXT_BYTES_MAX + more)
    task = await town.send(says(text))
    delivery = await town.lease()
    described = f"a message with {len(text)} bytes of text"
    assert delivery.task.intent_text == (described if more else text)
    assert delivery.task.message == says(text)
    assert (await town.get(task.id)).history[0].parts == (Part(text=text),)


async def test_a_message_beyond_its_own_bound_is_refused(town: Town) -> None:
    assert await refused(town.send(says("x" * CONTENT_BYTES_MAX))) is TOO_LARGE


async def test_each_mutation_is_one_event_and_one_generation(town: Town) -> None:
    """Contract 14: no gap, no repeat, in order; a stream that begins at the start is the whole story."""
    task = await town.send()
    delivery = await town.lease()
    await town.work(c.UpdateTask(None, delivery.lease_id, says("half way")))
    await town.work(c.AddArtifact(None, delivery.lease_id, piece("one")))
    await town.work(c.UpdateTask(None, delivery.lease_id, says("which colour?"), Asks.INPUT))
    await town.send(says("red", task_id=task.id))
    await town.work(c.AddArtifact(None, delivery.lease_id, piece(" two"), append=True, last=True))
    await town.finish(delivery, Result.ok(delivery, [Text("done")]))
    told = [line(event.response) for event in await town.events(task.id, after=1)]
    assert told == [
        (2, "WORKING"),
        (3, "WORKING"),
        (4, "artifact draft"),
        (5, "INPUT_REQUIRED"),
        (6, "WORKING"),
        (7, "artifact draft"),
        (8, "artifact result"),
        (9, "COMPLETED"),
    ]
    done = await town.get(task.id)
    assert [artifact.artifact_id for artifact in done.artifacts] == ["draft", "result"]
    assert done.artifacts[0].parts == (Part(text="one"), Part(text=" two"))
    assert [message.parts[0].text for message in done.history] == [
        "draft the brief",
        "half way",
        "which colour?",
        "red",
    ]


async def test_a_follow_up_is_input_for_the_holder_and_starts_no_second_run(town: Town) -> None:
    task = await town.send()
    delivery = await town.lease()
    await town.send(says("and another thing", task_id=task.id))
    from covenant.model.query import ListInputs

    heard = await town.exchange.ask(town.writer, ListInputs(town.writer.agent, delivery.lease_id))
    assert [entry.message.parts[0].text for entry in heard.inputs] == ["and another thing"]
    again = town.exchange.lease(town.writer, None, "worker-2")
    assert await town.exchange.take(town.writer, again, 0) == []


async def test_a_write_that_expects_another_generation_is_refused(town: Town) -> None:
    """Contract 16."""
    task = await town.send()
    assert await refused(town.send(says("late", task_id=task.id), if_generation_match=7)) is GENERATION
    await town.send(says("in time", task_id=task.id), if_generation_match="1")
    assert await refused(town.send(says("twice", task_id=task.id), if_generation_match=1)) is GENERATION


@pytest.mark.parametrize("expected", [2**53 + 1, str(2**53 + 1), 2**63 - 1, str(2**63 - 1), 0])
async def test_a_generation_that_the_task_will_never_have_is_another(town: Town, expected: int | str) -> None:
    task = await town.send()
    assert await refused(town.send(says("late", task_id=task.id), if_generation_match=expected)) is GENERATION


@pytest.mark.parametrize(
    "odd", ["\uff19", "1_0", " 1 ", "+1", "", "0x1", "1" * 5000, 2**63, str(2**63), 1.5, -(2**63) - 1]
)
async def test_what_is_no_number_is_no_generation(town: Town, odd: Any) -> None:
    task = await town.send()
    assert await refused(town.send(says("late", task_id=task.id), if_generation_match=odd)) is INVALID_PARAMS
    assert await refused(town.get(task.id, current_generation=odd)) is INVALID_PARAMS
    request = a.SubscribeToTask(id=task.id, metadata={CURSOR: odd})
    events = town.operations.subscribe(town.alice, town.agent, request)
    assert await refused(anext(events)) is INVALID_PARAMS


@pytest.mark.parametrize("odd", ["x", "-1", -1, 1.5, [1], {"at": 1}, True])
async def test_a_cursor_that_is_no_generation_is_refused_by_both_streams(town: Town, odd: Any) -> None:
    task = await town.send()
    request = a.SubscribeToTask(id=task.id, metadata={CURSOR: odd})
    again = a.SendMessage(message=says(), metadata={CURSOR: odd})
    streams = (
        town.operations.subscribe(town.alice, town.agent, request),
        town.operations.send_streaming(town.alice, town.agent, again, "k-1"),
    )
    for events in streams:
        assert await refused(anext(events)) is INVALID_PARAMS


async def test_of_two_writers_at_the_same_moment_one_wins(town: Town) -> None:
    task = await town.send()
    both = [town.send(says(f"writer {n}", task_id=task.id), if_generation_match=1) for n in range(2)]
    outcomes = await asyncio.gather(*both, return_exceptions=True)
    assert sum(isinstance(outcome, CovenantError) for outcome in outcomes) == 1
    assert (await town.get(task.id)).generation == "2"


async def test_a_first_message_under_the_same_key_is_the_same_task(town: Town) -> None:
    """Contract 17."""
    first = await town.send(key="k-1")
    assert (await town.send(key="k-1")).id == first.id
    assert (await town.send(key="k-2")).id != first.id
    assert await refused(town.send(says("other"), key="k-1")) is CONFLICT


async def test_a_key_is_of_one_caller_and_one_agent(town: Town) -> None:
    first = await town.send(key="k-1")
    request = a.SendMessage(message=says(), configuration=a.Configuration(return_immediately=True))
    theirs = await town.operations.send_message(town.writer, town.agent, request, "k-1")
    assert theirs.task is not None and theirs.task.id != first.id


async def test_a_message_to_a_task_is_added_once_under_its_key(town: Town) -> None:
    """Also when it was guarded, and when the task has ended since."""
    task = await town.send(key="k-1")
    more = says("more", task_id=task.id)
    for _ in range(3):
        now = await town.send(more, key="k-1", if_generation_match=1)
        assert (now.generation, len(now.history)) == ("2", 2)
    assert (await town.send(more, key="k-2")).generation == "3"
    assert await refused(town.send(says("other", task_id=task.id), key="k-1")) is CONFLICT
    await town.finish(await town.lease())
    assert (await town.send(more, key="k-1")).generation == "5"


async def test_a_key_says_something(town: Town) -> None:
    task = await town.send()
    for message in (says(), says(task_id=task.id)):
        assert await refused(town.send(message, key=" ")) is INVALID_PARAMS
        assert await refused(town.send(structs.replace(message, metadata={KEY: 5}))) is INVALID_PARAMS


async def test_a_first_message_that_is_retried_sets_its_webhook_once(town: Town) -> None:
    hook = a.PushSettings(url="http://hook", token="secret")
    for _ in range(3):
        task = await town.send(key="k-1", task_push_notification_config=hook)
    pushes = await town.operations.list_pushes(town.alice, town.agent, a.ListPushes(task_id=task.id))
    assert len(pushes.configs) == 1


async def test_a_message_with_a_webhook_that_cannot_be_makes_no_task(town: Town) -> None:
    for url in ("ftp://hook", "nonsense", "http://"):
        with pytest.raises(CovenantError):
            await town.send(task_push_notification_config=a.PushSettings(url=url))
    listing = await town.operations.list_tasks(town.alice, town.agent, a.ListTasks())
    assert listing.total_size == 0


async def test_a_message_whose_webhook_is_one_too_many_is_refused_with_it(town: Town) -> None:
    task = await town.send()
    for n in range(PUSHES_MAX):
        hook = a.PushSettings(task_id=task.id, id=f"hook {n}", url="http://hook")
        await town.operations.set_push(town.alice, town.agent, hook)
    more = town.send(says("more", task_id=task.id), task_push_notification_config=a.PushSettings(url="http://other"))
    assert await refused(more) is TOO_LARGE
    assert ((now := await town.get(task.id)).generation, len(now.history)) == ("1", 1)


async def test_a_webhook_that_comes_with_every_message_of_a_task_is_one(town: Town) -> None:
    hook = a.PushSettings(url="http://hook")
    task = await town.send(task_push_notification_config=hook)
    for n in range(2):
        await town.send(says(f"more {n}", task_id=task.id), task_push_notification_config=hook)
    pushes = await town.operations.list_pushes(town.alice, town.agent, a.ListPushes(task_id=task.id))
    assert len(pushes.configs) == 1


async def test_a_direct_reply_is_given_again_whatever_came_with_the_message(town: Town) -> None:
    """Contract 17."""
    town.replies()
    hook = a.PushSettings(url="http://hook")
    asked: dict[str, Any] = {"return_immediately": False, "task_push_notification_config": hook}
    sending = asyncio.ensure_future(town.send(key="k-1", **asked))
    delivery = await town.lease()
    hello = Message(message_id="r-1", role="ROLE_AGENT", parts=(Part(text="hello"),))
    await town.work(c.ReplyDirectly(None, delivery.lease_id, hello))
    assert await town.send(key="k-1", **asked) == await sending


async def test_a_poll_is_held_until_the_generation_is_higher(town: Town) -> None:
    """Contract 15."""
    task = await town.send()
    held = asyncio.ensure_future(town.get(task.id, current_generation="1"))
    await asyncio.sleep(0)
    assert not held.done()
    await town.lease()
    assert (await held).generation == "2"


async def test_a_blocking_send_waits_for_the_end_or_a_question(town: Town) -> None:
    sending = asyncio.ensure_future(town.send(return_immediately=False))
    delivery = await town.lease()
    await town.work(c.UpdateTask(None, delivery.lease_id, says("which colour?"), Asks.INPUT))
    asked = await sending
    assert asked.status.state == "TASK_STATE_INPUT_REQUIRED"
    sending = asyncio.ensure_future(town.send(says("red", task_id=asked.id), return_immediately=False))
    await asyncio.sleep(0)
    await town.finish(delivery)
    assert (await sending).status.state == "TASK_STATE_COMPLETED"


async def test_what_has_ended_takes_no_message_and_no_plain_subscription(town: Town) -> None:
    task = await town.send()
    await town.finish(await town.lease())
    assert await refused(town.send(says("more", task_id=task.id))) is UNSUPPORTED
    assert await refused(town.events(task.id)) is UNSUPPORTED
    assert [line(event.response) for event in await town.events(task.id, after=1)] == [(2, "WORKING"), (3, "COMPLETED")]


async def test_a_stream_gives_the_task_first_then_what_happens(town: Town) -> None:
    task = await town.send()
    stream = town.operations.subscribe(town.alice, town.agent, a.SubscribeToTask(id=task.id))
    assert line((await anext(stream)).response) == (1, "SUBMITTED")
    delivery = await town.lease()
    await town.finish(delivery, Result.error(delivery, "no paper"))
    told = [line(event.response) async for event in stream]
    assert told == [(2, "WORKING"), (3, "FAILED")]


async def test_a_wait_for_the_end_is_woken_by_nothing_else(town: Town) -> None:
    """That somebody has taken the task, and how far it is, is no reason to look again."""
    task = await town.send()
    settling = town.exchange.store.settle(task.id)
    woken = settling.send(None)
    delivery = await town.lease()
    await town.work(c.UpdateTask(None, delivery.lease_id, says("half way")))
    assert not woken.done()
    await town.finish(delivery)
    assert woken.done()
    with pytest.raises(StopIteration):
        settling.send(None)


async def test_a_wait_for_the_end_ends_with_its_time(town: Town) -> None:
    town.exchange.waits = Waits(1, wait_ms_max=20)
    assert (await town.send(return_immediately=False)).status.state == "TASK_STATE_SUBMITTED"


async def test_a_draining_daemon_answers_a_send_that_waits_with_the_task_as_it_is(town: Town) -> None:
    sending = asyncio.ensure_future(town.send(return_immediately=False))
    await town.lease()
    town.exchange.drain()
    assert (await sending).status.state == "TASK_STATE_WORKING"


async def test_a_stranger_does_not_see_the_task(town: Town) -> None:
    task = await town.send()
    operations = town.operations
    assert await refused(operations.get_task(town.writer, town.agent, a.GetTask(id="nonsense"))) is TASK_NOT_FOUND
    operator = town.exchange.authenticate("token")
    _, token = await town.exchange.enroll(operator, "carol@lab", None, ("a2a.send.*",))
    carol = town.exchange.authenticate(token)
    assert await refused(operations.get_task(carol, town.agent, a.GetTask(id=task.id))) is TASK_NOT_FOUND


async def test_a_task_is_seen_from_both_of_its_sides_and_listed_for_who_sent_it_by_the_protocol(town: Town) -> None:
    by_mailbox = Task(recipient=town.writer.agent, intent_text="by the mailbox")
    sent = await town.exchange.run(town.alice, town.exchange.send(town.alice, by_mailbox))
    task = await town.send()
    for task_id in (sent.task_id, task.id):
        assert (await town.get(task_id)).id == task_id
        seen = await town.operations.get_task(town.writer, town.agent, a.GetTask(id=task_id))
        assert seen.id == task_id
    assert await listed(town) == [task.id]


async def listed(town: Town) -> list[str]:
    listing = await town.operations.list_tasks(town.alice, town.agent, a.ListTasks())
    assert listing.total_size == len(listing.tasks)
    return [task.id for task in listing.tasks]


async def test_a_direct_reply_is_a_message_and_no_task(town: Town) -> None:
    """Nor was there one to be seen before."""
    town.replies()
    sending = asyncio.ensure_future(town.send(return_immediately=False))
    delivery = await town.lease()
    assert await listed(town) == []
    hello = Message(message_id="r-1", role="ROLE_AGENT", parts=(Part(text="hello"),))
    await town.work(c.ReplyDirectly(None, delivery.lease_id, hello))
    reply = await sending
    assert isinstance(reply, Message) and reply.parts == hello.parts
    assert reply.task_id is None and reply.context_id
    assert await refused(town.get(delivery.task.id)) is TASK_NOT_FOUND
    assert await listed(town) == []


async def test_a_task_that_may_yet_be_none_is_listed_when_it_is_seen_to_be_one(town: Town) -> None:
    town.replies()
    sending = asyncio.ensure_future(town.send(return_immediately=False))
    first = await town.lease()
    other = asyncio.ensure_future(town.send(return_immediately=False))
    second = await town.lease()
    await town.work(c.UpdateTask(None, second.lease_id, says("half way")))
    assert await listed(town) == [second.task.id]
    await town.get(first.task.id)
    assert await listed(town) == [second.task.id, first.task.id]
    await town.finish(first)
    assert await listed(town) == [first.task.id, second.task.id]
    await town.finish(second)
    await asyncio.gather(sending, other)


async def test_a_task_of_an_agent_that_does_not_reply_is_one_from_the_start(town: Town) -> None:
    sending = asyncio.ensure_future(town.send(return_immediately=False))
    delivery = await town.lease()
    assert await listed(town) == [delivery.task.id]
    await town.work(c.ReplyDirectly(None, delivery.lease_id, says("hello")))
    assert (await sending).status.message.parts == says("hello").parts


async def test_tasks_are_listed_by_their_last_status_and_paged_without_a_gap(town: Town) -> None:
    ids = [(await town.send(says(f"task {n}"))).id for n in range(7)]
    delivery = await town.lease()  # the oldest moves to the top
    assert delivery.task.id == ids[0]
    seen: list[str] = []
    token = ""
    while True:
        page = await town.operations.list_tasks(town.alice, town.agent, a.ListTasks(page_size=3, page_token=token))
        assert page.total_size == 7
        seen += [task.id for task in page.tasks]
        if len(seen) == 3:
            await town.lease()  # moves one that was not shown yet
        token = page.next_page_token
        if not token:
            break
    assert seen[0] == ids[0]
    assert set(seen) == set(ids)
