"""A durable agent behind the A2A face: a client of the official SDK talks to it over any number of deaths of its
worker, and nothing is lost or said twice. (Contract 16, 20, 22-24.)"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import pytest
from a2a.client import A2ACardResolver, ClientConfig, ClientFactory
from a2a.client import Client as OfficialClient
from a2a.types import GetTaskRequest, Message, Part, Role, SendMessageRequest, TaskState

from covenant import Mailbox
from covenant.a2a import Event, TaskGenerationMismatch
from covenant.a2a.interface import JSONRPC, REST
from tests.a2a.house import House, housed
from tests.agents.talker import work
from tests.beings import Being

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PATIENCE_S = 60
LINES = ("one", "two", "three", "four", "bye")
NOWHERE = 0


def answers(text: str, turn: int) -> list[str]:
    return [f"you said {'-'.join(text)}", f"that was turn {turn}"]


TRANSCRIPT = [
    said
    for turn, line in enumerate(LINES, 1)
    for said in (("user", line), *(("agent", answer) for answer in answers(line, turn)))
]


async def speaks(line: Connection) -> None:
    """Until there is something to hear."""
    loop, heard = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(line.fileno(), heard.set)
    try:
        await heard.wait()
    finally:
        loop.remove_reader(line.fileno())


class Talk:
    """Between the official client and the agent."""

    def __init__(self, house: House, client: OfficialClient, home: Path) -> None:
        self._house = house
        self._client = client
        self._home = home
        self.task: Any = None

    def hire(self, dies_at: int = NOWHERE) -> Being:
        return Being(work, self._house.socket, self._house.tokens["writer"], str(self._home), dies_at)

    async def say(self, text: str) -> None:
        """Until the agent has answered, and waits for more or is done."""
        placed = {} if self.task is None else {"task_id": self.task.id, "context_id": self.task.context_id}
        message = Message(message_id=str(uuid.uuid4()), role=Role.ROLE_USER, parts=[Part(text=text)], **placed)
        (answer,) = [event async for event in self._client.send_message(SendMessageRequest(message=message))]
        self.task = answer.task

    async def say_while_dying(self, text: str, dies_at: int) -> bool:
        """One worker dies on the way to the answer, if the way is that long, and another goes on; whether it did."""
        saying = asyncio.create_task(self.say(text))
        dying = self.hire(dies_at)
        dead = asyncio.create_task(speaks(dying.line))
        await asyncio.wait((saying, dead), return_when=asyncio.FIRST_COMPLETED)
        was_in_time = dead.done()
        dead.cancel()
        await kill(dying)
        if was_in_time:
            successor = self.hire()
            await saying
            await kill(successor)
        await saying
        return was_in_time

    async def history(self) -> list[tuple[str, str]]:
        """As the client reads it."""
        task = await self._client.get_task(GetTaskRequest(id=self.task.id))
        said = list(task.history)
        last = task.status.message
        if last.message_id and last.message_id not in {message.message_id for message in said}:
            said.append(last)
        roles = {Role.ROLE_USER: "user", Role.ROLE_AGENT: "agent"}
        return [(roles[message.role], message.parts[0].text) for message in said]

    async def entries(self) -> list[tuple[str, str]]:
        """As the run has it."""
        async with Mailbox.open(self._house.socket) as operator:
            page = await operator.run_entries(self.task.id, 1000, every=True)
        assert all(entry.message is not None for entry in page.entries)
        roles = {"user": "user", "assistant": "agent"}
        return [(roles[entry.role], entry.message.parts[0].text or "") for entry in page.entries if entry.message]


async def kill(being: Being) -> None:
    being.kill()
    assert await being.end() == -9


@asynccontextmanager
async def talking(tmp_path: Path, binding: str = JSONRPC) -> AsyncIterator[Talk]:
    async with asyncio.timeout(PATIENCE_S), housed() as house:
        headers = {"Authorization": f"Bearer {house.tokens['alice']}"}
        async with httpx.AsyncClient(headers=headers, timeout=PATIENCE_S) as theirs:
            card = await A2ACardResolver(theirs, house.url).get_agent_card()
            config = ClientConfig(streaming=False, httpx_client=theirs, supported_protocol_bindings=[binding])
            yield Talk(house, ClientFactory(config).create(card), tmp_path / "worker")


async def events_of(house: House, task_id: str) -> list[Event]:
    async with house.client(JSONRPC, house.url) as client:
        return [event async for event in client.follow(task_id, after=1)]


@pytest.mark.parametrize("binding", [JSONRPC, REST])
async def test_five_turns_over_the_death_of_the_worker_between_any_two(tmp_path: Path, binding: str) -> None:
    """Contract 24."""
    async with talking(tmp_path, binding) as talk:
        for line in LINES:
            worker = talk.hire()
            await talk.say(line)
            is_last = line == LINES[-1]
            state = TaskState.TASK_STATE_COMPLETED if is_last else TaskState.TASK_STATE_INPUT_REQUIRED
            assert talk.task.status.state == state
            await kill(worker)
        assert talk.task.artifacts[0].parts[0].text == "5 turns"
        assert await talk.history() == TRANSCRIPT
        assert await talk.entries() == TRANSCRIPT


@pytest.mark.parametrize(
    "dies_at", [1, 2, 3, 4, 6, 9, *(pytest.param(n, marks=pytest.mark.soak) for n in (5, 7, 8, *range(10, 31)))]
)
async def test_five_turns_over_deaths_in_the_middle_of_each(tmp_path: Path, dies_at: int) -> None:
    """Contract 24."""
    async with talking(tmp_path) as talk:
        deaths = [await talk.say_while_dying(line, dies_at) for line in LINES]
        assert any(deaths)
        assert await talk.history() == TRANSCRIPT
        assert await talk.entries() == TRANSCRIPT
        events = await events_of(talk._house, talk.task.id)
    assert [event.generation for event in events] == list(range(2, len(events) + 2))
    statuses = [event.status_update.status for event in events if event.status_update is not None]
    told = [status.message.parts[0].text for status in statuses if status.message is not None]
    assert [text for text in told if text and text.startswith("you said")] == [
        answers(line, turn)[0] for turn, line in enumerate(LINES, 1)
    ]


async def test_of_two_clients_that_saw_the_same_only_one_is_heard(tmp_path: Path) -> None:
    async with talking(tmp_path) as talk:
        house = talk._house
        worker = talk.hire()
        await talk.say("one")
        async with house.client(JSONRPC, house.url) as first, house.client(REST, house.url) as second:
            seen = [await client.get(talk.task.id) for client in (first, second)]
            assert seen[0].generation == seen[1].generation
            replies = await asyncio.gather(
                first.reply(seen[0], "mine"), second.reply(seen[1], "no, mine"), return_exceptions=True
            )
        refused = [reply for reply in replies if isinstance(reply, BaseException)]
        assert [type(reply) for reply in refused] == [TaskGenerationMismatch]
        heard = "mine" if isinstance(replies[1], BaseException) else "no, mine"
        await talk.say("bye")
        await kill(worker)
        users = [text for who, text in await talk.history() if who == "user"]
        assert users == ["one", heard, "bye"]
        assert await talk.history() == await talk.entries()
