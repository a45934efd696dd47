"""Webhooks are told everything, in order, whatever becomes of the receiver or the daemon; and nobody is told their
secrets."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from covenant.a2a import wire as a
from covenant.exchange.exchange import Exchange
from covenant.exchange.history import story
from covenant.exchange.outbound import Turns
from covenant.exchange.pusher import FIRST_WAIT_MS, GIVE_UP_MS, UPDATES_PER_TURN, WAIT_MS_MAX, Pusher
from covenant.exchange.realm import Realm
from covenant.exchange.token import Keeper
from covenant.model import command as c
from covenant.model.agent import AgentId
from covenant.model.audit import AuditRow
from covenant.model.error import CovenantError
from covenant.model.limits import Limits
from covenant.model.message import Message, Part
from covenant.model.push import Authentication, PushConfig
from covenant.model.query import ListPushes
from covenant.rules.audit import rows_of
from covenant.serve.a2a.directory import agent_of
from covenant.serve.a2a.operations import Operations
from covenant.serve.daemon import Daemon, Settings
from covenant.serve.home import Home
from covenant.serve.why import reason_of
from covenant.store.clock import Clock, ManualClock, RandomIds, SystemClock
from covenant.store.registry import engine_for
from tests.a2a.conftest import WORKING, Town, piece, says
from tests.a2a.receiver import Endless, Receiver, never, once, status
from tests.until import until


class House(Town):
    """A town with a pusher."""

    pusher: Pusher
    clock: ManualClock

    async def hook(self, task_id: str, config: PushConfig, from_start: bool = True) -> None:
        await self.exchange.run(self.alice, c.SetPush(self.alice.agent, task_id, config, from_start))

    async def hooks(self, task_id: str) -> list[str]:
        found = await self.exchange.ask(self.alice, ListPushes(self.alice.agent, task_id))
        return [config.id for config in found]

    async def is_free(self, task_id: str) -> bool:
        return await self.hooks(task_id) == []

    async def rows(self, kind: str) -> list[AuditRow]:
        return [row for row in await all_rows(self.exchange) if row.kind == kind]

    async def passing(self, is_true: Callable[[], bool]) -> None:
        """Whenever somebody sleeps, the time has come that it sleeps for; until it is true."""

        def look() -> bool:
            sleeping = [due_ms for due_ms, _, timer in self.clock._timers if timer._callback is not None]
            if sleeping:
                self.clock.advance(min(sleeping) - self.clock.now_ms())
            return is_true()

        await until(look)

    async def chunks(self, lease_id: str, count: int) -> None:
        for number in range(count):
            await self.work(c.AddArtifact(None, lease_id, piece(f"{number} "), append=number > 0))


async def all_rows(exchange: Exchange) -> list[AuditRow]:
    return [row for logged in await exchange.store.log(0, 1000) for row in rows_of(logged)]


async def settle(url: str, clock: Clock, realm: Realm, operator: str | Keeper = "token", private: bool = True) -> House:
    """A store with the usual people in it: those who were there before come back."""
    ids = RandomIds()
    store: Any = engine_for(url, Limits(), clock, ids)
    exchange = Exchange(store, realm, clock, ids, private_webhooks=private)
    await exchange.open(operator)
    if exchange.store.agent_of("writer@lab") is None:
        for name in ("alice@lab", "writer@lab"):
            await exchange.enroll(exchange.operator(), name, AgentId.named(name).pubkey, WORKING)
    alice, writer = (exchange.store.caller_at(AgentId.named(name).pubkey) for name in ("alice@lab", "writer@lab"))
    assert alice is not None and writer is not None
    card = await exchange.run(exchange.operator(), c.PublishCard(None, writer.agent, {"name": "writer"}))
    return House(exchange, alice, writer, agent_of(card))


@asynccontextmanager
async def opened(url: str, clock: ManualClock, realm: Realm, **settings: Any) -> AsyncIterator[House]:
    house = await settle(url, clock, realm)
    house.clock = clock
    house.pusher = Pusher(house.exchange, clock, private=True, dice=lambda: 1.0, **settings)
    house.pusher.start()
    try:
        yield house
    finally:
        await house.pusher.stop()
        await house.exchange.close()


@pytest.fixture(params=["memory", "file"])
async def house(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> AsyncIterator[House]:
    url = "memory:" if request.param == "memory" else f"file:{tmp_path}/data"
    async with opened(url, clock, Realm.throwaway(), timeout_s=0.3) as house:
        yield house


# --- what is told --------------------------------------------------------------------------------------------


async def test_a_webhook_is_told_every_generation_in_order_and_then_dropped(house: House, receiver: Receiver) -> None:
    task = await house.send(
        task_push_notification_config=a.PushSettings(
            url=receiver.url("one"), token="t-1", authentication=Authentication("Bearer", "c-1")
        )
    )
    delivery = await house.lease()
    await house.chunks(delivery.lease_id, 3)
    await house.finish(delivery)
    await receiver.until("one", [1, 2, 3, 4, 5, 6])
    await until(lambda: house.is_free(task.id))
    first, *_, last = receiver.posts
    assert first.headers["Content-Type"] == "application/a2a+json"
    assert first.headers["Authorization"] == "Bearer c-1"
    assert first.headers["X-A2A-Notification-Token"] == "t-1"
    assert first.body["task"]["status"]["state"] == "TASK_STATE_SUBMITTED"
    assert last.body["statusUpdate"]["status"]["state"] == "TASK_STATE_COMPLETED"
    streamed = [msgspec.json.encode(event.response) for event in await house.events(task.id, after=1)]
    assert [post.body for post in receiver.posts[1:]] == [msgspec.json.decode(body) for body in streamed]


async def test_one_that_is_set_later_is_told_what_comes_after(house: House, receiver: Receiver) -> None:
    task = await house.send()
    delivery = await house.lease()
    await house.hook(task.id, receiver.hook("late"), from_start=False)
    await house.finish(delivery)
    await receiver.until("late", [3])
    await until(lambda: house.is_free(task.id))
    assert house.pusher.behind == 0


async def test_a_repeated_first_message_tells_its_webhook_nothing_again(house: House, receiver: Receiver) -> None:
    hook = a.PushSettings(url=receiver.url("one"))
    task = await house.send(key="k-1", task_push_notification_config=hook)
    await house.finish(await house.lease())
    await receiver.until("one", [1, 2, 3])
    await until(lambda: house.is_free(task.id))
    assert (await house.send(key="k-1", task_push_notification_config=hook)).id == task.id
    assert await house.is_free(task.id)


async def test_a_message_and_its_webhook_are_one_commit(house: House) -> None:
    task = await house.send(task_push_notification_config=a.PushSettings(url="https://a.example/"))
    more = says("more", task_id=task.id)
    await house.send(more, task_push_notification_config=a.PushSettings(url="https://b.example/"))
    kinds = [{type(event).__name__ for event in logged.events} for logged in await house.exchange.store.log(0, 1000)]
    assert [told for told in kinds if "PushSet" in told] == [{"Sent", "PushSet"}, {"Messaged", "Said", "PushSet"}]


async def test_of_what_is_answered_by_a_message_only_the_message_is_told(house: House, receiver: Receiver) -> None:
    house.replies()
    hook = a.PushSettings(url=receiver.url("one"))
    sending = asyncio.ensure_future(house.send(return_immediately=False, task_push_notification_config=hook))
    delivery = await house.lease()
    await until(lambda: house.exchange.store.state.pushed_tasks() == [delivery.task.id])  # type: ignore[attr-defined]
    hello = Message(message_id="r-1", role="ROLE_AGENT", parts=(Part(text="hello"),))
    await house.work(c.ReplyDirectly(None, delivery.lease_id, hello))
    assert isinstance(await sending, Message)
    await receiver.until("one", [0])
    assert receiver.posts[0].body["message"]["parts"] == [{"text": "hello"}]
    await until(lambda: house.exchange.store.state.pushed_tasks() == [])  # type: ignore[attr-defined]


async def test_a_task_that_is_shown_late_is_told_from_its_beginning(house: House, receiver: Receiver) -> None:
    house.replies()
    hook = a.PushSettings(url=receiver.url("one"))
    sending = asyncio.ensure_future(house.send(return_immediately=False, task_push_notification_config=hook))
    delivery = await house.lease()
    await house.exchange.run(house.alice, c.ShowTask(house.alice.agent, delivery.task.id))
    await receiver.until("one", [1, 2])
    await house.finish(delivery)
    await receiver.until("one", [1, 2, 3])
    await sending


async def test_no_header_is_sent_for_a_scheme_without_credentials(house: House, receiver: Receiver) -> None:
    task = await house.send()
    await house.hook(task.id, receiver.hook("one", authentication=Authentication("Bearer")))
    await receiver.until("one", [1])
    assert not {"Authorization", "X-A2A-Notification-Token", "Cookie"} & set(receiver.posts[0].headers)


async def test_a_webhook_that_is_taken_back_hears_no_more(house: House, receiver: Receiver) -> None:
    task = await house.send()
    for name in ("kept", "gone"):
        await house.hook(task.id, receiver.hook(name))
        await receiver.until(name, [1])
    await house.exchange.run(house.alice, c.DropPush(house.alice.agent, task.id, "gone"))
    await house.finish(await house.lease())
    await receiver.until("kept", [1, 2, 3])
    assert receiver.told("gone") == [1]


async def test_taking_it_back_ends_the_tries(house: House, receiver: Receiver) -> None:
    receiver.answers["down"] = [status(500)]
    task = await house.send()
    await house.hook(task.id, receiver.hook("down"))
    await until(lambda: house.pusher.counts.failed == 1)
    await house.exchange.run(house.alice, c.DropPush(house.alice.agent, task.id, "down"))
    await until(lambda: house.pusher.behind == 0)
    house.clock.advance(GIVE_UP_MS)
    assert receiver.told("down") == [1]
    assert await house.rows("push_given_up") == []


async def test_the_same_webhook_again_goes_on_and_another_in_its_place_begins(house: House, receiver: Receiver) -> None:
    task = await house.send()
    await house.hook(task.id, receiver.hook("one"))
    await receiver.until("one", [1])
    await until(lambda: house.pusher.behind == 0)
    await house.hook(task.id, receiver.hook("one"))
    await house.hook(task.id, PushConfig(id="one", url=receiver.url("two")))
    await receiver.until("two", [1])
    await house.finish(await house.lease())
    await receiver.until("two", [1, 2, 3])
    assert receiver.told("one") == [1]


async def test_a_note_about_a_webhook_does_not_touch_the_one_that_took_its_place(house: House) -> None:
    task = await house.send()
    await house.pusher.stop()
    await house.hook(task.id, PushConfig(id="one", url="https://a.example/"))
    old = house.exchange.store.state.pushes(task.id)[0].since  # type: ignore[attr-defined]
    await house.hook(task.id, PushConfig(id="one", url="https://b.example/"))
    for reason in (None, "timeout"):
        await house.exchange.store.run(c.NotePush(None, task.id, "one", old, 1, is_last=True, reason=reason))
    (push,) = house.exchange.store.state.pushes(task.id)  # type: ignore[attr-defined]
    assert (push.config.url, push.delivered) == ("https://b.example/", 0)


# --- what goes wrong -----------------------------------------------------------------------------------------


async def test_a_failure_is_tried_again_later_and_later_and_nothing_is_skipped(
    house: House, receiver: Receiver
) -> None:
    receiver.answers["one"] = [status(204), status(500), status(503), status(404)]
    task = await house.send()
    await house.hook(task.id, receiver.hook("one"))
    await house.finish(await house.lease())
    await house.passing(lambda: receiver.told("one") == [1, 2, 2, 2, 2, 3])
    times = [post.at_ms for post in receiver.posts if post.generation == 2]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps == [FIRST_WAIT_MS, 2 * FIRST_WAIT_MS, 4 * FIRST_WAIT_MS]
    await until(lambda: house.is_free(task.id))
    assert (house.pusher.counts.taken, house.pusher.counts.failed) == (3, 3)


async def test_who_does_not_lead_any_more_tells_nothing(
    house: House, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one tells it already."""
    receiver.answers["one"] = [status(500)]
    task = await house.send(task_push_notification_config=a.PushSettings(url=receiver.url("one")))
    await receiver.until("one", [1])
    monkeypatch.setattr(house.exchange.store, "leads", lambda: False)
    await house.passing(lambda: house.pusher.behind == 0)
    assert receiver.told("one") == [1] and not await house.is_free(task.id)


async def test_a_receiver_that_never_answers_is_cut_off(house: House, receiver: Receiver) -> None:
    receiver.answers["one"] = [never()]
    task = await house.send()
    await house.hook(task.id, receiver.hook("one"))
    await house.passing(lambda: receiver.told("one") == [1, 1])


async def test_a_receiver_that_is_not_there_is_told_when_it_comes(house: House, receiver: Receiver) -> None:
    await receiver.stop()
    task = await house.send()
    await house.hook(task.id, receiver.hook("one"))
    await house.passing(lambda: house.pusher.counts.failed == 3)
    back = Receiver()
    back.port = receiver.port
    await back.start()
    await house.passing(lambda: back.told("one") == [1])
    await back.stop()


async def test_a_redirect_is_not_followed(house: House, receiver: Receiver) -> None:
    receiver.answers["one"] = [status(307, Location=receiver.url("elsewhere"))]
    task = await house.send()
    await house.hook(task.id, receiver.hook("one"))
    await house.passing(lambda: receiver.told("one") == [1, 1])
    assert receiver.told("elsewhere") == []


async def test_a_huge_answer_is_not_read(house: House, receiver: Receiver) -> None:
    body = Endless()
    receiver.answers["one"] = [body]
    task = await house.send()
    await house.hook(task.id, receiver.hook("one"))
    await house.finish(await house.lease())
    await receiver.until("one", [1, 2, 3])
    await until(lambda: house.is_free(task.id))
    assert body.sent < 16 << 20  # what the sockets hold, and no more


async def test_a_webhook_that_does_not_answer_in_the_end_is_given_up_with_a_row(
    house: House, receiver: Receiver
) -> None:
    receiver.answers["dead"] = [status(500)] * 10_000
    task = await house.send()
    await house.hook(task.id, receiver.hook("dead"))
    await house.passing(lambda: house.pusher.counts.given_up == 1)
    assert await house.hooks(task.id) == []
    (row,) = await house.rows("push_given_up")
    assert (row.actor, row.task_id, row.subject, row.reason) == ("system", task.id, "dead", "status_500")
    times = [post.at_ms for post in receiver.posts]
    assert times[-1] - times[0] >= GIVE_UP_MS > times[-2] - times[0]
    assert max(later - earlier for earlier, later in pairwise(times)) == WAIT_MS_MAX


async def test_a_day_in_which_nobody_tried_is_not_held_against_a_webhook(house: House, receiver: Receiver) -> None:
    """The machine was asleep, or its clock was set."""
    receiver.answers["one"] = [status(500)] * 2
    task = await house.send()
    await house.hook(task.id, receiver.hook("one"))
    await until(lambda: house.pusher.counts.failed == 1)
    await asyncio.sleep(0)
    house.clock.advance(GIVE_UP_MS)
    await house.passing(lambda: house.pusher.counts.given_up == 1 or receiver.told("one") == [1, 1, 1])
    assert house.pusher.counts.given_up == 0


async def test_one_that_is_slow_or_dead_holds_up_nobody(house: House, receiver: Receiver) -> None:
    receiver.answers["slow"] = [never()] * 100
    receiver.answers["dead"] = [status(500)] * 100
    task = await house.send()
    for name in ("slow", "dead", "quick"):
        await house.hook(task.id, receiver.hook(name))
    await house.finish(await house.lease())
    await receiver.until("quick", [1, 2, 3])
    assert (await house.get(task.id)).status.state == "TASK_STATE_COMPLETED"
    assert set(receiver.told("slow") + receiver.told("dead")) == {1}


async def test_a_receiver_that_takes_its_time_is_told_in_order_while_others_go_on(
    house: House, receiver: Receiver
) -> None:
    moment = asyncio.Event()
    receiver.answers["slow"] = [once(moment)]
    house.pusher._outbound._timeout_s = 30
    slow, quick = await house.send(), await house.send(says("other"))
    await house.hook(slow.id, receiver.hook("slow"))
    await house.hook(quick.id, receiver.hook("quick"))
    for _ in range(2):
        await house.finish(await house.lease())
    await receiver.until("quick", [1, 2, 3])
    assert receiver.told("slow") == [1]
    moment.set()
    await receiver.until("slow", [1, 2, 3])


async def test_turns_are_bounded_of_all_and_of_each() -> None:
    turns = Turns(total=3, each=2)
    inside: list[str] = []
    ending = asyncio.Event()

    async def visit(name: str) -> None:
        async with turns.one(name):
            inside.append(name)
            await ending.wait()

    async with asyncio.TaskGroup() as group:
        for name in ("a", "a", "a", "b", "b"):
            group.create_task(visit(name))
        await until(lambda: len(inside) == 3)
        assert sorted(inside) == ["a", "a", "b"]
        ending.set()
    assert len(inside) == 5
    assert turns._gates == {}


async def test_a_revoked_sender_hears_no_more(house: House, receiver: Receiver) -> None:
    task = await house.send()
    await house.hook(task.id, receiver.hook("one"))
    await receiver.until("one", [1])
    await house.exchange.trust.revoke_peer(house.exchange.operator(), house.alice.agent.pubkey, "left")
    await house.lease()
    await until(lambda: house.pusher.counts.given_up == 1)
    assert receiver.told("one") == [1]
    (row,) = await house.rows("push_given_up")
    assert row.reason == "sender_revoked"


async def test_who_is_further_behind_than_the_log_gets_the_task_as_it_is(
    house: House, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    from covenant.exchange import follow

    monkeypatch.setattr(follow, "_STEPS_MAX", 3)
    monkeypatch.setattr(follow, "_COMMITS_AT_ONCE", 2)
    receiver.answers["one"] = [status(500)]
    task = await house.send()
    await house.hook(task.id, receiver.hook("one"))
    await until(lambda: house.pusher.counts.failed == 1)
    delivery = await house.lease()
    await house.chunks(delivery.lease_id, 10)
    for lines in house.pusher._lines.values():
        lines["one"].steps = None
    await house.passing(lambda: receiver.told("one") == [1, 12])
    assert receiver.posts[-1].body["task"]["metadata"] == {"covenant/restarted": True}
    await house.finish(delivery)
    await receiver.until("one", [1, 12, 13])


# --- restarts ------------------------------------------------------------------------------------------------


async def test_after_a_restart_it_goes_on_where_it_was(tmp_path: Path, clock: ManualClock, receiver: Receiver) -> None:
    realm = Realm.throwaway()
    url = f"file:{tmp_path}/data"
    receiver.answers["one"] = [status(204), status(204), status(500)]
    async with opened(url, clock, realm) as house:
        task = await house.send()
        await house.hook(task.id, receiver.hook("one"))
        await house.hook(task.id, receiver.hook("idle"), from_start=False)
        delivery = await house.lease()
        await house.chunks(delivery.lease_id, 1)
        await until(lambda: house.pusher.counts.failed == 1)
    async with opened(url, clock, realm) as house:
        await receiver.until("one", [1, 2, 3, 3])
        await house.finish(delivery)
        await receiver.until("one", [1, 2, 3, 3, 4])
        await receiver.until("idle", [2, 3, 4])
        await until(lambda: house.is_free(task.id))
    async with opened(url, clock, realm) as house:
        assert house.pusher.behind == 0


async def test_an_orderly_end_waits_for_the_post_that_is_under_way(
    tmp_path: Path, clock: ManualClock, receiver: Receiver
) -> None:
    realm = Realm.throwaway()
    url = f"file:{tmp_path}/data"
    moment = asyncio.Event()
    receiver.answers["one"] = [once(moment)]
    async with opened(url, clock, realm) as house:
        task = await house.send()
        await house.hook(task.id, receiver.hook("one"))
        await receiver.until("one", [1])
        asyncio.get_running_loop().call_soon(moment.set)
    async with opened(url, clock, realm) as house:
        await house.lease()
        await receiver.until("one", [1, 2])


async def test_a_store_that_was_away_is_followed_again(tmp_path: Path, clock: ManualClock, receiver: Receiver) -> None:
    async with opened(f"file:{tmp_path}/data", clock, Realm.throwaway()) as house:
        task = await house.send()
        await house.hook(task.id, receiver.hook("one"))
        await receiver.until("one", [1])
        await until(lambda: house.pusher.behind == 0)
        await house.exchange.store.close()
        await house.exchange.store.open()
        await house.finish(await house.lease())
        await house.passing(lambda: receiver.told("one") == [1, 2, 3])
        await until(lambda: house.is_free(task.id))


def serve(home: Path) -> subprocess.Popen[str]:
    options = ("--http", "127.0.0.1:0", "--ipc", "off", "--private-webhooks")
    command = [sys.executable, "-m", "covenant", "serve", "--home", str(home), *options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)


async def test_a_daemon_killed_between_a_post_and_its_note_repeats_and_leaves_no_gap(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.make()
    house = await settle(f"file:{home.data}", SystemClock(), home.realm(), home.tokens)
    receiver = Receiver()
    await receiver.start()
    task = await house.send()
    await house.hook(task.id, receiver.hook("one"))
    delivery = await house.lease()
    await house.chunks(delivery.lease_id, 50)
    await house.finish(delivery)
    await house.exchange.close()
    last = 53
    deaths = [1, 20, 21, last]  # it dies with this generation told and not noted
    ended = asyncio.Event()

    def take(post: Any) -> None:
        if deaths and post.generation == deaths[0]:
            deaths.pop(0)
            daemon.send_signal(signal.SIGKILL)
            ended.set()

    receiver.on_post = take
    while deaths:
        ended.clear()
        daemon = serve(home.folder)
        async with asyncio.timeout(30):
            await ended.wait()
        await asyncio.to_thread(daemon.wait)
    daemon = serve(home.folder)
    try:
        await receiver.until_told("one", lambda told: told.count(last) == 2)
    finally:
        daemon.terminate()
        await asyncio.to_thread(daemon.wait)
        await receiver.stop()
    told = receiver.told("one")
    assert list(dict.fromkeys(told)) == list(range(1, last + 1)), "a generation is missing or out of order"
    for before, after in pairwise(told):
        assert after == before + 1 or before - UPDATES_PER_TURN < after <= before
    house = await settle(f"file:{home.data}", SystemClock(), home.realm(), home.tokens)
    assert await house.is_free(task.id)
    await house.exchange.close()


async def test_a_webhook_to_this_machine_is_not_called_unless_that_is_allowed(
    tmp_path: Path, clock: ManualClock, receiver: Receiver
) -> None:
    """Also one that was set while it was."""
    realm, url = Realm.throwaway(), f"file:{tmp_path}/data"
    house = await settle(url, clock, realm)
    task = await house.send()
    await house.hook(task.id, receiver.hook("one"))
    await house.exchange.close()
    daemon = Daemon(Settings(store=url, http=None), realm, "token", clock)
    await daemon.start()
    await until(lambda: daemon.pusher.counts.failed == 1)
    await daemon.stop()
    assert receiver.posts == []
    daemon = Daemon(Settings(store=url, http=None, private_webhooks=True), realm, "token", clock)
    await daemon.start()
    await receiver.until("one", [1])
    await daemon.stop()


# --- secrets -------------------------------------------------------------------------------------------------


async def test_nobody_is_shown_a_secret_of_a_webhook(
    clock: ManualClock, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    realm = Realm.throwaway()
    daemon = Daemon(Settings(store="memory:", http="127.0.0.1:0", private_webhooks=True), realm, "token", clock)
    await daemon.start()
    exchange = daemon.exchange
    for name in ("alice@lab", "writer@lab"):
        await exchange.enroll(exchange.operator(), name, AgentId.named(name).pubkey, WORKING)
    alice = exchange.store.caller_at(AgentId.named("alice@lab").pubkey)
    assert alice is not None
    writer = AgentId.named("writer@lab")
    agent = agent_of(await exchange.run(exchange.operator(), c.PublishCard(None, writer, {"name": "writer"})))
    operations = Operations(exchange)
    receiver.answers["hidden-path"] = [status(500)] * 10_000
    settings = a.PushSettings(
        id="w-1",
        url=receiver.url("hidden-path"),
        token="hidden-token",
        authentication=Authentication("Bearer", "hidden-credentials"),
    )
    reply = await operations.send_message(
        alice,
        agent,
        a.SendMessage(
            message=says(),
            configuration=a.Configuration(return_immediately=True, task_push_notification_config=settings),
        ),
    )
    assert reply.task is not None
    task_id = reply.task.id
    by_id = await operations.get_push(alice, agent, a.GetPush(task_id=task_id, id="w-1"))
    assert by_id.authentication == Authentication("Bearer")
    again = msgspec.structs.replace(settings, task_id=task_id, id="w-2")
    set_again = await operations.set_push(alice, agent, again)
    listing = await operations.list_pushes(alice, agent, a.ListPushes(task_id=task_id))
    assert len(listing.configs) == 2
    shown: list[Any] = [reply, *(without_url(one) for one in (by_id, set_again, *listing.configs))]
    with pytest.raises(CovenantError) as told:
        await operations.set_push(alice, agent, msgspec.structs.replace(again, token="hidden-token\n"))
    shown += [told.value.to_wire(), repr(PushConfig(id="w", url=again.url, token=again.token))]
    await until(lambda: daemon.pusher.counts.failed == 1)

    def is_given_up() -> bool:
        clock.advance(120_000)
        return daemon.pusher.counts.given_up == 1

    await until(is_given_up)
    await exchange.take(exchange.operator(), exchange.lease(exchange.operator(), None, "worker"), 0)
    entry, rows, _ = await story(exchange, exchange.operator(), task_id)
    shown += [entry, rows, reason_of(entry), await all_rows(exchange), await pages(daemon)]
    text = "\n".join(one if isinstance(one, str) else msgspec.json.encode(one).decode() for one in shown)
    await daemon.stop()
    for word in ("push_given_up", "push_set", "covenant_webhooks_given_up_total 1.0"):
        assert word in text
    assert "hidden" not in text
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("covenant")]
    assert any("is given up" in line for line in ours)
    assert not [line for line in ours if "hidden" in line]


def without_url(settings: a.PushSettings) -> a.PushSettings:
    """Its owner sees where it leads."""
    return msgspec.structs.replace(settings, url="")


async def pages(daemon: Daemon) -> str:
    """The numbers, and all events there were up to the first lease."""
    head = {"Authorization": "Bearer token"}
    events = b""
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{daemon.url}/metrics") as response:
            numbers = await response.text()
        async with session.get(f"{daemon.url}/a2a/events?after=0", headers=head) as response, asyncio.timeout(10):
            while b"event: leased" not in events:
                events += await response.content.readany()
    return numbers + events.decode()
