"""The official SDK's client, unmodified, over both HTTP bindings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from a2a.client import A2ACardResolver, Client, ClientConfig, ClientFactory
from a2a.client.client import ClientCallContext
from a2a.types import (
    CancelTaskRequest,
    DeleteTaskPushNotificationConfigRequest,
    GetExtendedAgentCardRequest,
    GetTaskPushNotificationConfigRequest,
    GetTaskRequest,
    ListTaskPushNotificationConfigsRequest,
    ListTasksRequest,
    Message,
    Part,
    Role,
    SendMessageRequest,
    SubscribeToTaskRequest,
    TaskPushNotificationConfig,
    TaskState,
)
from a2a.utils.errors import TaskNotCancelableError, TaskNotFoundError, UnsupportedOperationError

from covenant import Text
from covenant.model import command as c
from covenant.model.record import Asks
from covenant.model.task import Result
from covenant.serve.a2a.directory import DIRECT_REPLY
from tests.a2a.served import Site, agent_says, start_site

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Pair:
    """A site, and the SDK's client of its agent."""

    def __init__(self, site: Site, streaming: Client, blocking: Client) -> None:
        self.site = site
        self.streaming = streaming
        self.blocking = blocking

    async def send(self, text: str = "draft the brief", at_once: bool = True, **more: Any) -> Any:
        request = SendMessageRequest(message=says(text, **more))
        request.configuration.return_immediately = at_once
        (answer,) = [event async for event in self.blocking.send_message(request)]
        return answer


def says(text: str, **more: Any) -> Message:
    return Message(message_id="m-1", role=Role.ROLE_USER, parts=[Part(text=text)], **more)


@pytest.fixture(params=["JSONRPC", "HTTP+JSON"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with httpx.AsyncClient() as client, httpx.AsyncClient() as theirs:
        site = await start_site(client)
        theirs.headers.update(site.auth("alice"))
        card = await A2ACardResolver(theirs, f"{site.url}/agents/writer@lab").get_agent_card()

        def made(streaming: bool) -> Client:
            config = ClientConfig(streaming=streaming, httpx_client=theirs, supported_protocol_bindings=[request.param])
            return ClientFactory(config).create(card)

        yield Pair(site, made(True), made(False))
        await site.daemon.stop()


async def test_it_sends_and_waits(pair: Pair) -> None:
    sending = asyncio.ensure_future(pair.send(at_once=False))
    delivery = await pair.site.lease()
    await pair.site.finish(delivery, Result.ok(delivery, [Text("the brief")]))
    task = (await sending).task
    assert task.status.state == TaskState.TASK_STATE_COMPLETED
    assert task.artifacts[0].parts[0].text == "the brief"


async def test_it_streams(pair: Pair) -> None:
    async def follow() -> list[Any]:
        request = SendMessageRequest(message=says("draft the brief"))
        return [event async for event in pair.streaming.send_message(request)]

    following = asyncio.ensure_future(follow())
    delivery = await pair.site.lease()
    await pair.site.work(c.UpdateTask(None, delivery.lease_id, agent_says("half way")))
    await pair.site.chunk(delivery, "one")
    await pair.site.finish(delivery)
    events = await following
    kinds = [event.WhichOneof("payload") for event in events]
    assert kinds[0] == "task" and kinds[-2:] == ["artifact_update", "status_update"]
    assert events[-1].status_update.status.state == TaskState.TASK_STATE_COMPLETED


async def test_it_gets_lists_and_cancels(pair: Pair) -> None:
    task = (await pair.send()).task
    assert (await pair.blocking.get_task(GetTaskRequest(id=task.id))).id == task.id
    listing = await pair.blocking.list_tasks(ListTasksRequest(page_size=10, status=TaskState.TASK_STATE_SUBMITTED))
    assert [one.id for one in listing.tasks] == [task.id] and listing.total_size == 1
    canceled = await pair.blocking.cancel_task(CancelTaskRequest(id=task.id))
    assert canceled.status.state == TaskState.TASK_STATE_CANCELED


async def test_it_subscribes_and_answers_a_question(pair: Pair) -> None:
    task = (await pair.send()).task
    delivery = await pair.site.lease()
    await pair.site.work(c.UpdateTask(None, delivery.lease_id, agent_says("which colour?"), Asks.INPUT))

    events = pair.streaming.subscribe(SubscribeToTaskRequest(id=task.id))
    assert (await anext(events)).task.status.message.parts[0].text == "which colour?"
    answered = (await pair.send("red", task_id=task.id)).task
    assert answered.context_id == task.context_id
    assert answered.status.state == TaskState.TASK_STATE_WORKING
    await pair.site.finish(delivery)
    states = [event.status_update.status.state async for event in events]
    assert states == [TaskState.TASK_STATE_WORKING, TaskState.TASK_STATE_COMPLETED]


async def test_it_resumes_a_stream_where_it_was_cut(pair: Pair) -> None:
    """Contract 17, with what the SDK lets one send beside a request."""
    task = (await pair.send()).task
    await pair.site.finish(await pair.site.lease())
    context = ClientCallContext(service_parameters={"Last-Event-ID": "1"})
    request = SubscribeToTaskRequest(id=task.id)
    events = [event async for event in pair.streaming.subscribe(request, context=context)]
    states = [event.status_update.status.state for event in events]
    assert states == [TaskState.TASK_STATE_WORKING, TaskState.TASK_STATE_COMPLETED]


async def test_it_sets_and_drops_webhooks(pair: Pair) -> None:
    task = (await pair.send()).task
    config = TaskPushNotificationConfig(task_id=task.id, id="h-1", url="https://example.com/hook", token="secret")
    made = await pair.blocking.create_task_push_notification_config(config)
    assert (made.id, made.task_id, made.token) == ("h-1", task.id, "")
    about = {"task_id": task.id, "id": "h-1"}
    found = await pair.blocking.get_task_push_notification_config(GetTaskPushNotificationConfigRequest(**about))
    assert found == made
    listing = await pair.blocking.list_task_push_notification_configs(
        ListTaskPushNotificationConfigsRequest(task_id=task.id)
    )
    assert list(listing.configs) == [made]
    await pair.blocking.delete_task_push_notification_config(DeleteTaskPushNotificationConfigRequest(**about))
    with pytest.raises(TaskNotFoundError):
        await pair.blocking.get_task_push_notification_config(GetTaskPushNotificationConfigRequest(**about))


async def test_it_reads_the_extended_card(pair: Pair) -> None:
    card = await pair.blocking.get_extended_agent_card(GetExtendedAgentCardRequest())
    assert card.name == "writer" and card.signatures


async def test_it_knows_the_errors(pair: Pair) -> None:
    with pytest.raises(TaskNotFoundError):
        await pair.blocking.get_task(GetTaskRequest(id="nonsense"))
    task = (await pair.send()).task
    await pair.site.finish(await pair.site.lease())
    with pytest.raises(TaskNotCancelableError):
        await pair.blocking.cancel_task(CancelTaskRequest(id=task.id))
    with pytest.raises(UnsupportedOperationError):
        await pair.send("more", task_id=task.id)
    with pytest.raises(UnsupportedOperationError):
        [event async for event in pair.streaming.subscribe(SubscribeToTaskRequest(id=task.id))]


async def test_it_gets_a_direct_message(pair: Pair) -> None:
    card = {"name": "writer", "capabilities": {"extensions": [{"uri": DIRECT_REPLY}]}}
    exchange = pair.site.exchange
    await exchange.run(exchange.operator(), c.PublishCard(None, pair.site.writer.agent, card))
    sending = asyncio.ensure_future(pair.send(at_once=False))
    delivery = await pair.site.lease()
    await pair.site.work(c.ReplyDirectly(None, delivery.lease_id, agent_says("hello")))
    assert (await sending).message.parts[0].text == "hello"
