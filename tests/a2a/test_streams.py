"""The end of a stream and its resumption: SendStreamingMessage closes at a question, SubscribeToTask does not; both
resume behind an id that they gave. In three bindings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from covenant.agents import AgentContext, AgentWorker, agent
from covenant.model import command as c
from covenant.model.record import Asks
from covenant.model.view import Delivery
from covenant.serve.a2a.directory import DIRECT_REPLY
from tests.a2a.served import Site, agent_says, message, start_site
from tests.a2a.streams import BINDINGS, Heard, Refused, listen, whole

ASKS = {Asks.INPUT: "INPUT_REQUIRED", Asks.AUTH: "AUTH_REQUIRED"}
KEY = {"Idempotency-Key": "k-1"}
STOPS_S = 10  # a stream that should have ended is given up


@pytest.fixture(params=BINDINGS)
def binding(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def site(binding: str) -> AsyncIterator[Site]:
    async with opened(binding) as site:
        yield site


@asynccontextmanager
async def opened(binding: str, card: dict[str, Any] | None = None) -> AsyncIterator[Site]:
    """A daemon that serves gRPC only if it is asked for: that one takes its time to end."""
    async with httpx.AsyncClient(timeout=30) as client:
        site = await start_site(client, card, grpc="127.0.0.1:0" if binding == "GRPC" else None)
        yield site
        await site.daemon.stop()


async def ask(site: Site, delivery: Delivery, asks: Asks = Asks.INPUT) -> None:
    await site.work(c.UpdateTask(None, delivery.lease_id, agent_says("which colour?"), asks))


def sends(text: str = "draft the brief", **more: Any) -> dict[str, Any]:
    return {"message": message(text, **more)}


def keyed(key: Any) -> dict[str, Any]:
    """A message with its key in its metadata."""
    return sends(metadata={"covenant/idempotencyKey": key})


async def send(
    site: Site, binding: str, params: dict[str, Any], method: str = "SendStreamingMessage", **headers: str
) -> Heard:
    async with asyncio.timeout(STOPS_S):
        return await whole(site, binding, method, params, **headers)


async def asked(
    site: Site, binding: str, asks: Asks = Asks.INPUT, headers: dict[str, str] | None = None
) -> tuple[Heard, Delivery]:
    """A streamed message whose worker has asked something."""
    sending = asyncio.ensure_future(send(site, binding, sends(), **(headers or {})))
    delivery = await site.lease()
    await ask(site, delivery, asks)
    return await sending, delivery


def task_of(heard: Heard) -> str:
    return str(heard.events[0]["task"]["id"])


@pytest.mark.parametrize("asks", list(ASKS))
async def test_a_streamed_message_ends_at_a_question_and_names_its_last_event(
    site: Site, binding: str, asks: Asks
) -> None:
    heard, _ = await asked(site, binding, asks)
    assert heard.states[-1] == ASKS[asks]
    assert heard.last_id == str(heard.generations[-1]) == "3"


@pytest.mark.parametrize("resumes", [False, True])
async def test_a_subscription_stays_open_over_questions(site: Site, binding: str, resumes: bool) -> None:
    heard, delivery = await asked(site, binding)
    task_id = task_of(heard)
    headers = {"Last-Event-ID": heard.last_id} if resumes else {}
    stream = listen(site, binding, "SubscribeToTask", {"id": task_id}, **headers)
    async with asyncio.timeout(STOPS_S):
        first = asyncio.ensure_future(anext(stream))
        if not resumes:
            assert (await first).states == ["INPUT_REQUIRED"]
        await site.start("red", taskId=task_id)
        await ask(site, delivery)
        await site.start("light red", taskId=task_id)
        await site.finish(delivery)
        told = [await first, *[heard async for heard in stream]][-1]
    assert told.is_over
    assert told.states[-4:] == ["WORKING", "INPUT_REQUIRED", "WORKING", "COMPLETED"]
    assert told.generations == [*([] if resumes else [3]), 4, 5, 6, 7]


async def test_an_answer_streams_on_to_the_next_question_and_to_the_end(site: Site, binding: str) -> None:
    """The message moves the task on in its own commit, so the question that it answers does not end its stream."""
    first, delivery = await asked(site, binding)
    number = 0
    for turn in range(3):
        answering = asyncio.ensure_future(send(site, binding, sends(f"turn {turn}", taskId=task_of(first))))
        number = await _heard_behind(site, delivery, number)
        if turn < 2:
            await ask(site, delivery)
            assert (await answering).states == ["WORKING", "INPUT_REQUIRED"]
        else:
            await site.finish(delivery)
            assert (await answering).states == ["WORKING", "COMPLETED"]


async def _heard_behind(site: Site, delivery: Delivery, number: int) -> int:
    """The number of the next message that the worker hears."""
    inputs = (await site.exchange.listen(site.writer, delivery.lease_id, number, STOPS_S * 1000)).inputs
    assert len(inputs) == 1
    return inputs[0].number


async def test_an_answer_to_a_task_that_is_asked_again_at_once_ends_there(site: Site, binding: str) -> None:
    """The worker is quicker than the stream: its snapshot shows the next question already."""
    first, delivery = await asked(site, binding)
    run = site.exchange.run

    async def and_ask(caller: Any, command: Any) -> Any:
        done = await run(caller, command)
        if isinstance(command, c.AddMessage):
            await ask(site, delivery)
        return done

    site.exchange.run = and_ask  # type: ignore[method-assign]  # between the message and the snapshot
    heard = await send(site, binding, sends("red", taskId=task_of(first)))
    assert (heard.states, heard.generations, heard.last_id) == (["INPUT_REQUIRED"], [5], "5")


@pytest.mark.parametrize("history", [None, 0])
async def test_a_worker_that_is_quicker_than_the_stream_hides_no_event(
    site: Site, binding: str, history: int | None
) -> None:
    """Clients take the question or the result from the events behind the task, and pass over what is in the task."""
    run = site.exchange.run

    async def and_ask(caller: Any, command: Any) -> Any:
        done = await run(caller, command)
        if isinstance(command, c.SendTask):
            site.exchange.run = run  # type: ignore[method-assign]
            await ask(site, await site.lease())
        return done

    site.exchange.run = and_ask  # type: ignore[method-assign]  # between the message and the first look at its task
    params = {**sends(), "configuration": {} if history is None else {"historyLength": history}}
    heard = await send(site, binding, params)
    assert (heard.states, heard.generations) == (["SUBMITTED", "WORKING", "INPUT_REQUIRED"], [1, 2, 3])
    assert len(heard.events[0]["task"].get("history", ())) == (history is None)


async def test_a_streamed_message_still_ends_with_its_task(site: Site, binding: str) -> None:
    sending = asyncio.ensure_future(send(site, binding, sends()))
    delivery = await site.lease()
    await site.chunk(delivery, "one")
    await site.finish(delivery)
    heard = await sending
    assert heard.states[-1] == "COMPLETED"
    assert heard.last_id == str(heard.generations[-1])


async def test_a_cut_send_is_sent_again_with_its_key_and_goes_on_behind_the_last_event(
    site: Site, binding: str
) -> None:
    """The same POST again: what was missed, each once, in order, no snapshot."""
    async for heard in listen(site, binding, "SendStreamingMessage", sends(), **KEY):
        if not heard.is_over:
            assert heard.generations == [1]
            break  # the line is cut
    delivery = await site.lease()
    for text in ("one", "two", "three"):
        await site.chunk(delivery, text, append=text != "one")
    again = asyncio.ensure_future(send(site, binding, sends(), **KEY, **{"Last-Event-ID": "3"}))
    await site.finish(delivery)
    assert (await again).generations == [4, 5, 6]
    assert [next(iter(event)) for event in (await again).events] == ["artifactUpdate", "artifactUpdate", "statusUpdate"]
    for last, expected in (("1", [2, 3, 4, 5, 6]), ("5", [6]), ("6", [])):
        missed = await send(site, binding, sends(), **KEY, **{"Last-Event-ID": last})
        assert missed.generations == expected
    listing = await site.rpc("ListTasks")
    assert listing["totalSize"] == 1


async def test_a_send_that_is_resumed_ends_at_the_question_too(site: Site, binding: str) -> None:
    heard, delivery = await asked(site, binding, headers=KEY)
    for last, expected in (("1", [2, 3]), ("3", [])):
        assert (await send(site, binding, sends(), **KEY, **{"Last-Event-ID": last})).generations == expected
    assert (await send(site, binding, sends(), **KEY)).states == ["INPUT_REQUIRED"]  # without an id: the task as it is
    await site.chunk(delivery, "while it waits")
    assert (await send(site, binding, sends(), **KEY, **{"Last-Event-ID": "3"})).generations == [4]
    await site.start("red", taskId=task_of(heard))
    await site.finish(delivery)
    assert (await send(site, binding, sends(), **KEY, **{"Last-Event-ID": "3"})).generations == [4, 5, 6]


async def test_a_message_to_a_task_is_resumed_by_its_key_too(site: Site, binding: str) -> None:
    first, delivery = await asked(site, binding)
    more = sends("red", taskId=task_of(first))
    async for heard in listen(site, binding, "SendStreamingMessage", more, **KEY):
        if not heard.is_over:
            assert heard.generations == [4]
            break
    await site.chunk(delivery, "one")
    await site.finish(delivery)
    assert (await send(site, binding, more, **KEY, **{"Last-Event-ID": "4"})).generations == [5, 6]
    task = await site.rpc("GetTask", {"id": task_of(first)})
    assert [one["parts"][0]["text"] for one in task["history"] if one["role"] == "ROLE_USER"][1:] == ["red"]


async def test_a_question_that_was_answered_meanwhile_does_not_end_a_stream_that_is_resumed(
    site: Site, binding: str
) -> None:
    """Else the client hears a question that it has answered, and answers it again."""
    first, delivery = await asked(site, binding, headers=KEY)
    more = sends("red", taskId=task_of(first))
    answering = asyncio.ensure_future(
        send(site, binding, more, **{"Idempotency-Key": "k-2", "Last-Event-ID": "1"})
    )  # it has not seen the question in a stream
    await _heard_behind(site, delivery, 0)
    await ask(site, delivery)
    assert (await answering).states == ["WORKING", "INPUT_REQUIRED", "WORKING", "INPUT_REQUIRED"]
    again = ((sends(), KEY), (more, {"Idempotency-Key": "k-2"}))
    for params, key in again:
        missed = await send(site, binding, params, **key, **{"Last-Event-ID": "2"})
        assert (missed.generations, missed.last_id) == ([3, 4, 5], "5")
    await site.finish(delivery)
    for params, key in again:
        missed = await send(site, binding, params, **key, **{"Last-Event-ID": "2"})
        assert missed.states == ["INPUT_REQUIRED", "WORKING", "INPUT_REQUIRED", "COMPLETED"]


async def test_a_cursor_in_the_metadata_that_is_no_generation_is_refused(site: Site, binding: str) -> None:
    task = await site.start()
    asked = [("SendStreamingMessage", keyed("k-3"))]
    if binding != "GRPC":  # protobuf has no metadata there
        asked.append(("SubscribeToTask", {"id": task["id"]}))
    cursors: tuple[Any, ...] = ([1], {}, True, False, -1, -5, "-1", 1.5, "x", "", 1e300)
    for method, params in asked:
        for cursor in cursors:
            with pytest.raises(Refused) as refusal:
                await send(site, binding, {**params, "metadata": {"covenant/afterGeneration": cursor}}, method)
            assert refusal.value.reason == "INVALID_PARAMS", cursor
    assert (await site.rpc("ListTasks"))["totalSize"] == 1


@pytest.mark.parametrize("method", ["SendStreamingMessage", "SendMessage"])
async def test_a_blank_key_is_refused_in_a_header_and_in_the_metadata(site: Site, binding: str, method: str) -> None:
    """Else a client that believes its message safe to repeat makes two tasks."""
    for params, headers in ((sends(), {"Idempotency-Key": ""}), (keyed(""), {}), (keyed(" "), {}), (keyed(5), {})):
        with pytest.raises(Refused) as refusal:
            await send(site, binding, params, method, **headers)
        assert refusal.value.reason == "INVALID_PARAMS"
    assert (await site.rpc("ListTasks"))["totalSize"] == 0


async def test_an_id_without_a_key_is_refused_before_the_message_is_taken(site: Site, binding: str) -> None:
    """It would be another message, of which nothing can have been seen."""
    with pytest.raises(Refused) as refusal:
        await send(site, binding, sends(), **{"Last-Event-ID": "2"})
    assert refusal.value.reason == "INVALID_PARAMS"
    assert (await site.rpc("ListTasks"))["totalSize"] == 0
    task = await site.start()
    with pytest.raises(Refused):
        await send(site, binding, sends("more", taskId=task["id"]), **{"Last-Event-ID": "1"})
    assert (await site.rpc("GetTask", {"id": task["id"]}, **{"A2A-Version": "1.1"}))["generation"] == "1"


async def test_an_id_past_the_task_is_refused_before_the_message_is_taken(site: Site, binding: str) -> None:
    task = await site.start()
    with pytest.raises(Refused) as refusal:
        await send(site, binding, sends("more", taskId=task["id"]), **KEY, **{"Last-Event-ID": "7"})
    assert refusal.value.reason == "INVALID_PARAMS"
    assert (await site.rpc("GetTask", {"id": task["id"]}, **{"A2A-Version": "1.1"}))["generation"] == "1"


async def test_a_key_that_is_not_known_begins_with_the_task_whatever_was_seen(site: Site, binding: str) -> None:
    """The key has lapsed, or the first request never came: the stream shows the task that the message has made."""
    sending = asyncio.ensure_future(send(site, binding, sends(), **KEY, **{"Last-Event-ID": "7"}))
    await site.finish(await site.lease())
    heard = await sending
    assert heard.states[0] in ("SUBMITTED", "WORKING") and heard.states[-1] == "COMPLETED"
    with pytest.raises(Refused) as refusal:
        await send(site, binding, sends(), **KEY, **{"Last-Event-ID": "7"})
    assert refusal.value.reason == "INVALID_PARAMS"


async def test_a_direct_reply_is_brought_once_to_a_stream_that_is_resumed(binding: str) -> None:
    card = {"name": "writer", "capabilities": {"extensions": [{"uri": DIRECT_REPLY}]}}
    async with opened(binding, card) as site:
        sending = asyncio.ensure_future(send(site, binding, sends(), **KEY))
        delivery = await site.lease()
        await site.work(c.ReplyDirectly(None, delivery.lease_id, agent_says("hello")))
        heard = await sending
        assert [next(iter(event)) for event in heard.events] == ["message"]
        for last, expected in ((heard.last_id, 0), ("1", 1)):
            again = await send(site, binding, sends(), **KEY, **{"Last-Event-ID": last})
            assert len(again.events) == expected


async def test_a_client_without_headers_resumes_a_send_by_its_metadata(site: Site, binding: str) -> None:
    sending = asyncio.ensure_future(send(site, binding, keyed("k-2")))
    delivery = await site.lease()
    assert "covenant/requestMetadata" not in (delivery.task.message.metadata or {})  # type: ignore[union-attr]
    await site.finish(delivery)
    assert (await sending).generations[-1] == 3
    behind = {**keyed("k-2"), "metadata": {"covenant/afterGeneration": 2}}
    assert (await send(site, binding, behind)).generations == [3]


@agent("cautious")
async def cautious(ctx: AgentContext, opening: str) -> str:
    await ctx.wait_for_signal("approval")
    return f"did {opening}"


async def test_a_message_that_a_run_does_not_wait_for_ends_its_stream_with_the_question(
    site: Site, binding: str, tmp_path: Path
) -> None:
    """It has answered nothing: the client hears that at once, and not when somebody else has answered."""
    working = AgentWorker(site.url, agents=[cautious], token=site.tokens["writer"], home=str(tmp_path))
    async with working:
        first = await send(site, binding, sends("the work"))
        assert first.states[-1] == "INPUT_REQUIRED"
        beside = await send(site, binding, sends("by the way", taskId=task_of(first)))
        assert (beside.states, beside.generations) == (["INPUT_REQUIRED"], [first.generations[-1] + 1])
        approval = sends("yes", taskId=task_of(first), metadata={"signal": "approval"})
        assert (await send(site, binding, approval)).states[-1] == "COMPLETED"
