"""The client against the official SDK's server, as it is: it has no generations, no cursors and no keys."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping

import pytest
import uvicorn
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes, create_rest_routes
from a2a.server.tasks import InMemoryPushNotificationConfigStore, InMemoryTaskStore, TaskUpdater
from a2a.types import AgentCapabilities, AgentCard, AgentInterface, AgentSkill, Part, Task, TaskState, TaskStatus
from msgspec import Struct
from starlette.applications import Starlette

from covenant.a2a import Client, Event, Fault, Message, Patience, State
from covenant.a2a import Task as Seen
from covenant.a2a.fault import NOT_CANCELABLE, TASK_NOT_FOUND
from covenant.a2a.sse import Sent
from covenant.a2a.transport import Transport
from covenant.model.error import Unreachable

BINDINGS = ["JSONRPC", "HTTP+JSON"]


class Agent(AgentExecutor):
    """Does what the message says; `gate` holds it between two pieces of its work."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_inside = asyncio.Event()

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        assert context.task_id is not None and context.context_id is not None and context.message is not None
        work = TaskUpdater(event_queue, context.task_id, context.context_id)
        said = context.get_user_input()
        if said == "reply":
            await event_queue.enqueue_event(work.new_agent_message([Part(text="hello")]))
            return
        if context.current_task is None:
            status = TaskStatus(state=TaskState.TASK_STATE_SUBMITTED)
            await event_queue.enqueue_event(
                Task(id=context.task_id, context_id=context.context_id, status=status, history=[context.message])
            )
        if said == "ask":
            await work.requires_input(work.new_agent_message([Part(text="which one?")]))
            return
        await work.start_work()
        await work.add_artifact([Part(text="one ")], artifact_id="draft")
        self.is_inside.set()
        await self.gate.wait()
        await work.add_artifact([Part(text="two")], artifact_id="draft", append=True, last_chunk=True)
        await work.complete()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        assert context.task_id is not None and context.context_id is not None
        await TaskUpdater(event_queue, context.task_id, context.context_id).cancel()


@contextlib.asynccontextmanager
async def serving(agent: Agent) -> AsyncIterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # who connects before the server runs waits in line
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        card = AgentCard(
            name="sdk",
            description="as it comes",
            version="1",
            supported_interfaces=[
                AgentInterface(url=f"{url}/rpc", protocol_binding="JSONRPC", protocol_version="1.0"),
                AgentInterface(url=f"{url}/rest", protocol_binding="HTTP+JSON", protocol_version="1.0"),
            ],
            capabilities=AgentCapabilities(streaming=True, push_notifications=True),
            default_input_modes=["text/plain"],
            default_output_modes=["text/plain"],
            skills=[AgentSkill(id="s", name="s", description="s", tags=["s"])],
        )
        handler = DefaultRequestHandler(
            agent, InMemoryTaskStore(), card, push_config_store=InMemoryPushNotificationConfigStore()
        )
        routes = [
            *create_agent_card_routes(card),
            *create_jsonrpc_routes(handler, "/rpc"),
            *create_rest_routes(handler, path_prefix="/rest"),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), log_level="error", lifespan="off", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield url
        finally:
            agent.gate.set()
            server.should_exit = True
            await running


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture(params=BINDINGS)
async def client(request: pytest.FixtureRequest, agent: Agent) -> AsyncIterator[Client]:
    async with (
        serving(agent) as url,
        Client.connect(url, binding=request.param, patience=Patience(first_s=0.01)) as connected,
    ):
        yield connected


def text_of(events: list[Event]) -> str:
    """Of the artifact, as the events put it together."""
    text = ""
    for event in events:
        if event.task is not None:
            text = "".join(part.text or "" for artifact in event.task.artifacts for part in artifact.parts)
        elif event.artifact_update is not None:
            piece = "".join(part.text or "" for part in event.artifact_update.artifact.parts)
            text = text + piece if event.artifact_update.append else piece
    return text


async def test_a_task_is_sent_read_and_listed(client: Client) -> None:
    task = await client.send("draft")
    assert isinstance(task, Seen)
    assert task.state == State.COMPLETED and task.generation == 0
    assert text_of([Event(task=task)]) == "one two"
    again = await client.get(task.id, after_generation=3, history_length=1)
    assert (again.id, again.state, len(again.history)) == (task.id, State.COMPLETED, 1)
    await client.send("draft")
    await client.send("draft")
    assert len([listed async for listed in client.list(page_size=2)]) == 3
    assert [listed.id async for listed in client.list(context_id=task.context_id)] == [task.id]


async def test_a_direct_reply_is_a_message(client: Client) -> None:
    message = await client.send("reply")
    assert isinstance(message, Message) and message.parts[0].text == "hello"
    events = [event async for event in client.send_and_follow("reply")]
    assert [event.message is not None for event in events] == [True]


async def test_a_task_is_followed_from_its_message_to_its_end(client: Client) -> None:
    events = [event async for event in client.send_and_follow("draft")]
    assert events[0].task is not None and events[-1].is_last
    assert text_of(events) == "one two"
    assert not any(event.missed for event in events)
    assert not client.is_numbered


async def test_a_follower_that_comes_late_misses_nothing_of_the_state(client: Client, agent: Agent) -> None:
    agent.gate.clear()
    task = await client.send("draft", blocking=False)
    assert isinstance(task, Seen)
    await agent.is_inside.wait()
    events: list[Event] = []
    async for event in client.follow(task.id):
        events.append(event)
        agent.gate.set()
    assert text_of(events) == "one two" and events[-1].is_last
    ended = [event async for event in client.follow(task.id)]
    assert [event.task is not None and event.is_last for event in ended] == [True]


class Cutting:
    """A transport whose streams break off after so many elements, one number for each stream."""

    def __init__(self, inner: Transport, after: list[int]) -> None:
        self._inner = inner
        self._after = after

    async def call(self, operation: str, request: Struct, headers: Mapping[str, str]) -> bytes:
        return await self._inner.call(operation, request, headers)

    async def stream(self, operation: str, request: Struct, headers: Mapping[str, str]) -> AsyncGenerator[Sent, None]:
        left = self._after.pop(0) if self._after else -1
        async with contextlib.aclosing(self._inner.stream(operation, request, headers)) as sent:
            async for element in sent:
                if left == 0:
                    break
                left -= 1
                yield element
        if left == 0:
            raise Unreachable("cut", outcome="unknown")


async def test_a_snapshot_after_a_cut_is_shown_only_if_it_shows_something(client: Client, agent: Agent) -> None:
    client._calls._transport = Cutting(client._calls._transport, [3, 0, 1])
    agent.gate.clear()

    async def follow() -> list[Event]:
        return [event async for event in client.send_and_follow("draft")]

    following = asyncio.create_task(follow())
    await agent.is_inside.wait()
    agent.gate.set()
    events = await following
    assert text_of(events) == "one two"
    assert sum(event.is_last for event in events) == 1
    told = [event for event in events if event.task is None]
    assert len(told) == len(set(map(repr, told)))
    assert any(event.missed for event in events)  # it went on while nobody listened


async def test_a_question_is_answered_without_a_guard(client: Client) -> None:
    task = await client.send("ask")
    assert isinstance(task, Seen) and task.is_interrupted
    done = await client.reply(task, "draft")
    assert isinstance(done, Seen) and (done.id, done.state) == (task.id, State.COMPLETED)


async def test_a_question_ends_a_stream_and_not_the_following(client: Client) -> None:
    """That server ends the stream of the message there; the subscription behind it brings the rest."""
    events: list[Event] = []
    async with asyncio.timeout(30):
        async for event in client.send_and_follow("ask"):
            events.append(event)
            if event.status is not None and event.status.is_interrupted:
                await client.send("draft", task_id=event.task_id, blocking=False)
    assert events[-1].is_last
    assert sum(event.status is not None and event.status.is_interrupted for event in events) == 1


async def test_a_task_is_canceled_once(client: Client) -> None:
    task = await client.send("ask")
    assert isinstance(task, Seen)
    assert (await client.cancel(task.id)).state == State.CANCELED
    with pytest.raises(Fault) as refusal:
        await client.cancel(task.id)
    assert refusal.value.kind is NOT_CANCELABLE
    with pytest.raises(Fault) as refusal:
        await client.get("no-such-task")
    assert refusal.value.kind is TASK_NOT_FOUND
    with pytest.raises(Fault) as refusal:
        await anext(client.follow("no-such-task"))
    assert refusal.value.kind is TASK_NOT_FOUND


async def test_webhooks_are_kept_listed_and_deleted(client: Client) -> None:
    task = await client.send("ask")
    assert isinstance(task, Seen)
    kept = await client.set_push(task.id, "https://example.org/hook", config_id="h-1", token="t")
    assert kept.id == "h-1"
    assert (await client.get_push(task.id, "h-1")).url == "https://example.org/hook"
    assert [settings.id async for settings in client.list_pushes(task.id)] == ["h-1"]
    await client.delete_push(task.id, "h-1")
    assert [settings.id async for settings in client.list_pushes(task.id)] == []
