"""The client and our own daemon: nothing is lost between them, whatever the line does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from covenant import Text
from covenant.a2a import Client, Event, Fault, Patience, State, Task, TaskGenerationMismatch
from covenant.a2a.fault import BAD_AGENT, CONFLICT, NOT_CANCELABLE, TASK_NOT_FOUND, UNSUPPORTED
from covenant.a2a.interface import Interface
from covenant.a2a.transport import Wire
from covenant.exchange.realm import Realm
from covenant.model import command as c
from covenant.model.record import Asks
from covenant.model.task import Result
from covenant.serve.daemon import Daemon
from tests.a2a.cutter import cutting
from tests.a2a.served import Site, agent_says, hesitate, start_site
from tests.daemons import OPERATOR_TOKEN

BINDINGS = ["JSONRPC", "HTTP+JSON"]
QUICK = Patience(first_s=0.001, longest_s=0.05, failures_max=1000)


@pytest.fixture(params=BINDINGS)
async def client(request: pytest.FixtureRequest, site: Site) -> AsyncIterator[Client]:
    async with Client.connect(
        site.url, token=site.tokens["alice"], keys=[site.exchange.realm.pubkey], binding=request.param, patience=QUICK
    ) as connected:
        yield connected


def through(client: Client, url: str, token: str) -> Client:
    """The same client by another way."""
    interface = Interface(url, client.interface.binding, client.interface.version)
    return Client(client.card, interface, Wire(token, 5, 30), (), QUICK)


async def sent(client: Client, text: str = "draft the brief") -> Task:
    task = await client.send(text, blocking=False)
    assert isinstance(task, Task)
    return task


async def followed(client: Client, task_id: str, after: int | None = None) -> list[Event]:
    async with asyncio.timeout(30):
        return [event async for event in client.follow(task_id, after)]


async def test_a_task_is_followed_from_its_message_to_its_end(client: Client, site: Site) -> None:
    async def work() -> None:
        delivery = await site.lease()
        await site.chunk(delivery, "one ")
        await site.chunk(delivery, "two", append=True)
        await site.finish(delivery, Result.ok(delivery, [Text("done")]))

    working = asyncio.create_task(work())
    events = [event async for event in client.send_and_follow("draft")]
    await working
    first = events[0].generation
    assert [event.generation for event in events] == list(range(first, 7))
    assert events[0].task is not None and events[-1].is_last
    assert await followed(client, events[0].task.id, first) == events[1:]
    assert client.resumes and client.is_numbered


async def test_a_stream_that_ends_at_a_question_is_no_lost_line(client: Client, site: Site) -> None:
    """The follower subscribes behind it at once, without a pause: the answer may be under way already."""
    pauses: list[float] = []

    async def noted(seconds: float) -> None:
        pauses.append(seconds)

    patient = Client(client.card, client.interface, Wire(site.tokens["alice"], 5, 30), (), Patience(sleep=noted))

    async def work() -> None:
        delivery = await site.lease()
        await site.work(c.UpdateTask(None, delivery.lease_id, agent_says("which colour?"), Asks.INPUT))
        await site.exchange.listen(site.writer, delivery.lease_id, 0, 5_000)
        await site.finish(delivery)

    working = asyncio.create_task(work())
    events = []
    async with patient, asyncio.timeout(30):
        async for event in patient.send_and_follow("draft"):
            events.append(event)
            if event.status is not None and event.status.is_interrupted:
                await patient.send("red", task_id=event.task_id, blocking=False)
    await working
    states = [event.status.state for event in events if event.status is not None]
    assert states[-3:] == [State.INPUT_REQUIRED, State.WORKING, State.COMPLETED]
    assert [event.generation for event in events] == list(range(events[0].generation, 6))
    assert (pauses, any(event.missed for event in events)) == ([], False)


async def test_a_refusal_that_comes_after_the_stream_has_begun_is_heard(
    client: Client, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await sent(client)
    await site.finish(await site.lease())
    hesitate(site, monkeypatch, site.exchange.run)
    with pytest.raises(Fault) as told:
        [event async for event in client.send_and_follow("more", task_id=task.id)]
    assert told.value.kind is UNSUPPORTED


async def test_a_blocking_send_brings_the_end(client: Client, site: Site) -> None:
    sending = asyncio.create_task(client.send("draft"))
    delivery = await site.lease()
    await site.finish(delivery, Result.ok(delivery, [Text("done")]))
    task = await sending
    assert isinstance(task, Task) and task.state == State.COMPLETED
    assert task.artifacts[0].parts[0].text == "done" and task.generation == 4


async def test_a_read_is_held_until_there_is_something_new(client: Client, site: Site) -> None:
    task = await sent(client)
    waiting = asyncio.create_task(client.get(task.id, after_generation=task.generation))
    await site.lease()
    assert (await waiting).generation == task.generation + 1


async def test_of_two_replies_to_what_was_seen_one_is_refused(client: Client, site: Site) -> None:
    task = await sent(client)
    delivery = await site.lease()
    await site.work(c.UpdateTask(None, delivery.lease_id, agent_says("which?"), Asks.INPUT))
    seen = await client.get(task.id)
    assert seen.is_interrupted
    replies = await asyncio.gather(
        *(client.reply(seen, text, blocking=False) for text in ("this", "that")), return_exceptions=True
    )
    [refusal] = [reply for reply in replies if isinstance(reply, BaseException)]
    assert isinstance(refusal, TaskGenerationMismatch)
    assert (refusal.expected, refusal.current) == (seen.generation, seen.generation + 1)


async def test_the_same_key_is_the_same_task(client: Client) -> None:
    first, second = [await client.send("draft", idempotency_key="k-1", blocking=False) for _ in range(2)]
    assert isinstance(first, Task) and isinstance(second, Task) and first.id == second.id
    with pytest.raises(Fault) as refusal:
        await client.send("something else", idempotency_key="k-1", blocking=False)
    assert refusal.value.kind is CONFLICT


async def test_tasks_are_listed_and_canceled(client: Client, site: Site) -> None:
    ids = {(await sent(client)).id for _ in range(5)}
    assert {task.id async for task in client.list(page_size=2)} == ids
    one = ids.pop()
    assert (await client.cancel(one)).state == State.CANCELED
    assert [task.id async for task in client.list(status=State.CANCELED)] == [one]
    delivery = await site.lease()
    await site.finish(delivery)
    with pytest.raises(Fault) as refusal:
        await client.cancel(delivery.task.id)
    assert refusal.value.kind is NOT_CANCELABLE
    with pytest.raises(Fault) as refusal:
        await client.get("no-such-task")
    assert refusal.value.kind is TASK_NOT_FOUND


async def test_webhooks_and_the_extended_card(client: Client) -> None:
    task = await sent(client)
    await client.set_push(task.id, "https://example.org/hook", config_id="h-1", token="secret")
    assert (await client.get_push(task.id, "h-1")).token is None
    assert [settings.id async for settings in client.list_pushes(task.id)] == ["h-1"]
    await client.delete_push(task.id, "h-1")
    assert [settings.id async for settings in client.list_pushes(task.id)] == []
    assert (await client.extended_card())["name"] == "writer"


async def test_a_card_of_another_realm_is_not_trusted(site: Site) -> None:
    with pytest.raises(Fault) as refusal:
        await Client.connect(f"{site.url}/agents/writer@lab", keys=[Realm.throwaway().pubkey])
    assert refusal.value.kind is BAD_AGENT


async def test_a_send_whose_answer_never_arrives_makes_one_task(client: Client, site: Site) -> None:
    async with cutting(lambda: site.url) as (cutter, url):
        cutter.limits = iter([0, 1, 20, 100])
        other = through(client, url, site.tokens["alice"])
        async with other:
            task = await sent(other)
    assert cutter.cut == 4
    assert [listed.id async for listed in client.list()] == [task.id]


@pytest.mark.parametrize("seed", range(3))
async def test_a_stream_over_a_line_that_breaks_is_whole(client: Client, site: Site, seed: int) -> None:
    chance = random.Random(seed)
    task = await sent(client)

    async def work() -> None:
        delivery = await site.lease()
        for number in range(60):
            await site.chunk(delivery, f"piece {number}", append=number > 0)
            await asyncio.sleep(0)
        await site.finish(delivery)

    async with cutting(lambda: site.url) as (cutter, url), through(client, url, site.tokens["alice"]) as other:
        cutter.limits = iter([chance.randrange(4000) for _ in range(60)])
        working = asyncio.create_task(work())
        events = await followed(other, task.id, task.generation)
        await working
    assert cutter.cut > 3
    assert [event.generation for event in events] == list(range(2, 64))
    assert events == await followed(client, task.id, task.generation)


async def test_a_stream_goes_on_after_the_daemon_was_started_again(tmp_path: Path) -> None:
    async with httpx.AsyncClient() as http:
        site = await start_site(http, store=f"file:{tmp_path}/data")
        daemon = site.daemon
        async with Client.connect(site.url, token=site.tokens["alice"], patience=QUICK) as client:
            task = await sent(client)
            async with (
                cutting(lambda: str(daemon.url)) as (_, url),
                through(client, url, site.tokens["alice"]) as other,
            ):
                events: list[Event] = []
                async for event in other.follow(task.id, 0):
                    events.append(event)
                    if len(events) == 1:
                        await daemon.stop()
                        daemon = Daemon(daemon.settings, daemon.exchange.realm, OPERATOR_TOKEN)
                        await daemon.start()
                        site = Site(daemon, site.tokens, http)
                        await site.finish(await site.lease())
        await daemon.stop()
    assert [event.generation for event in events] == [1, 2, 3]
    assert not any(event.missed for event in events)
