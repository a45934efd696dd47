"""Who waits in a store for something that others do: for work, for results, for the end of what it has sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

from covenant import CovenantError, Idempotency, Limits, Result, Task, Text
from covenant.a2a import wire as a
from covenant.exchange.token import digest_of, make_token
from covenant.exchange.waits import Waits
from covenant.model import command as c
from covenant.model.error import StoreUnavailable
from covenant.model.peer import Caller
from covenant.model.record import Asks
from covenant.store.engine import Store
from covenant.store.postgres.engine import Postgres
from tests.a2a.conftest import Town, says
from tests.a2a.towns import place
from tests.conformance.support import soon, uid
from tests.until import until

SUBMITTED: Final = "TASK_STATE_SUBMITTED"


@pytest.fixture
def limits() -> Limits:
    return Limits()


@pytest.fixture(params=["memory", "file", "postgresql"])
async def town(request: pytest.FixtureRequest, tmp_path: Path, limits: Limits) -> AsyncIterator[Town]:
    async with place(request.param, tmp_path, limits).opened() as town:
        yield town


def waiting_in(store: Store) -> int:
    """Those who wait now, or look whether they have to."""
    there: Any = store
    waking = there.waking if isinstance(store, Postgres) else None
    everywhere = there._waiters if waking is None else (waking.ready, waking.answers, waking.changes)
    return sum(waiters._waiting for waiters in everywhere)


async def begun(store: Store, work: Any, already: int = 0) -> asyncio.Task[Any]:
    """Until it waits."""
    beginning: asyncio.Task[Any] = asyncio.ensure_future(work)
    await until(lambda: waiting_in(store) == already + 1)
    return beginning


async def rotated(town: Town, who: Caller) -> Caller:
    """The same peer under its next token; who came in under the last one waits on, and does not know."""
    token = make_token()
    await town.exchange.store.run(c.RotateToken(None, who.agent.pubkey, digest_of(token)))
    return town.exchange.authenticate(token)


def keyed(town: Town, number: int) -> c.SendTask:
    idempotency = Idempotency("idempotent", "key")
    task = Task(id=uid(number), recipient=town.agent.id, intent_text="work", idempotency=idempotency)
    return c.SendTask(town.alice.agent, task)


# --- who is refused when it is woken ----------------------------------------------------------------------


async def test_a_receiver_that_is_refused_when_it_is_woken_leaves_the_task_to_the_next(town: Town) -> None:
    """Contract 26: its token is worth nothing any more; the work is there all the same."""
    store = town.exchange.store
    first = await begun(store, store.take(c.Call(town.writer, town.exchange.lease(town.writer, None, "worker-1"))))
    writer = await rotated(town, town.writer)
    second = await begun(store, store.take(c.Call(writer, town.exchange.lease(writer, None, "worker-2"))), 1)
    task = await town.send()
    with pytest.raises(CovenantError) as refused:
        await soon(first)
    assert refused.value.code == "unauthenticated"
    assert [delivery.task.id for delivery in await soon(second)] == [task.id]


async def test_a_receiver_of_another_kind_is_not_woken_for_what_one_that_is_refused_leaves(town: Town) -> None:
    store = town.exchange.store

    def lease(who: Caller, *kinds: str) -> c.Call:
        return c.Call(who, town.exchange.lease(who, None, "worker-1", kinds=frozenset(kinds)))

    first = await begun(store, store.take(lease(town.writer, "saw")))
    writer = await rotated(town, town.writer)
    digging = await begun(store, store.take(lease(writer, "dig")), 1)
    sawing = await begun(store, store.take(lease(writer, "saw")), 2)
    task = Task(id=uid(1), recipient=town.agent.id, intent_text="work", task_kind="saw")
    await town.exchange.run(town.alice, c.SendTask(town.alice.agent, task))
    with pytest.raises(CovenantError):
        await soon(first)
    assert [delivery.task.id for delivery in await soon(sawing)] == [uid(1)]
    assert not digging.done()
    digging.cancel()


async def test_who_drains_and_is_refused_when_it_is_woken_leaves_the_result_to_the_next(town: Town) -> None:
    store, x = town.exchange.store, town.exchange
    task = Task(id=uid(1), recipient=town.agent.id, intent_text="work")
    await x.run(town.alice, c.SendTask(town.alice.agent, task))
    delivery = await town.lease()
    first = await begun(store, store.take(c.Call(town.alice, c.DrainResults(town.alice.agent, town.alice.agent, 1))))
    alice = await rotated(town, town.alice)
    second = await begun(store, store.take(c.Call(alice, c.DrainResults(alice.agent, alice.agent, 1))), 1)
    await town.finish(delivery)
    with pytest.raises(CovenantError) as refused:
        await soon(first)
    assert refused.value.code == "unauthenticated"
    assert [answer.result.task_id for answer in await soon(second)] == [uid(1)]


# --- for the end of what was sent -------------------------------------------------------------------------


async def test_a_send_is_answered_with_the_end_of_its_task(town: Town) -> None:
    sending = await begun(town.exchange.store, town.send(return_immediately=False))
    await town.finish(await town.lease())
    assert (await soon(sending)).status.state == "TASK_STATE_COMPLETED"
    assert (town.exchange.waits.total, waiting_in(town.exchange.store)) == (0, 0)


async def test_a_message_for_a_task_that_waits_for_one_is_answered_with_the_next_question(town: Town) -> None:
    store = town.exchange.store
    sending = await begun(store, town.send(return_immediately=False))
    delivery = await town.lease()
    await town.work(c.UpdateTask(None, delivery.lease_id, says("which one?"), Asks.INPUT))
    asked = await soon(sending)
    assert asked.status.state == "TASK_STATE_INPUT_REQUIRED"
    again = await begun(store, town.send(says("that one", task_id=asked.id), return_immediately=False))
    await town.work(c.UpdateTask(None, delivery.lease_id, says("sure?"), Asks.INPUT))
    assert (await soon(again)).status.state == "TASK_STATE_INPUT_REQUIRED"


async def test_a_send_that_is_repeated_after_the_end_does_not_wait(town: Town) -> None:
    task = await town.send(key="key")
    await town.finish(await town.lease())
    again = await soon(town.send(key="key", return_immediately=False))
    assert (again.id, again.status.state) == (task.id, "TASK_STATE_COMPLETED")


async def test_a_follower_is_answered_with_the_end_of_its_leader(town: Town) -> None:
    x = town.exchange
    leading = await begun(x.store, x.run_and_settle(town.alice, keyed(town, 1)))
    following = await begun(x.store, x.run_and_settle(town.alice, keyed(town, 2)), 1)
    replayed = x.run_and_settle(town.alice, keyed(town, 3))
    delivery = await town.lease()
    await town.finish(delivery, Result(uid(1), "ok", (Text("done"),), None, delivery.lease_id))
    assert (await soon(leading)).task_id == uid(1)
    assert (await soon(following)).follows == uid(1)
    assert (await soon(replayed)).replayed
    assert waiting_in(x.store) == 0


async def test_a_follower_whose_leader_is_canceled_waits_on_for_itself(town: Town) -> None:
    x = town.exchange
    leading = await begun(x.store, x.run_and_settle(town.alice, keyed(town, 1)))
    following = await begun(x.store, x.run_and_settle(town.alice, keyed(town, 2)), 1)
    await x.run(town.alice, c.CancelTask(town.alice.agent, uid(1), "enough"))
    await soon(leading)
    assert (await town.lease()).task.id == uid(2)
    assert not following.done()
    await x.run(town.alice, c.CancelTask(town.alice.agent, uid(2), "enough"))
    await soon(following)


async def test_a_caller_that_goes_away_while_it_waits_has_sent_all_the_same(town: Town) -> None:
    store = town.exchange.store
    sending = await begun(store, town.send(key="key", return_immediately=False))
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert (town.exchange.waits.total, waiting_in(store)) == (0, 0)
    delivery = await town.lease()
    assert (await town.send(key="key")).id == delivery.task.id


@pytest.mark.parametrize("limits", [Limits(waiters_max=1)], ids=["one"])
async def test_a_send_is_answered_at_once_where_too_many_wait(town: Town, limits: Limits) -> None:
    store = town.exchange.store
    first = await begun(store, town.send(return_immediately=False))
    second = await soon(town.send(return_immediately=False))
    assert second.status.state == SUBMITTED
    assert town.exchange.waits.total == 1
    await town.finish(await town.lease())
    assert (await soon(first)).status.state == "TASK_STATE_COMPLETED"
    assert (await town.lease()).task.id == second.id


async def test_a_wait_for_the_end_ends_with_its_time_on_every_engine(town: Town) -> None:
    town.exchange.waits = Waits(1, wait_ms_max=20)
    assert (await soon(town.send(return_immediately=False))).status.state == SUBMITTED
    assert (town.exchange.waits.total, waiting_in(town.exchange.store)) == (0, 0)


async def test_a_wait_that_fails_does_not_take_back_what_was_sent(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract 1: it is durable, and its answer says so; who looks for the end has to look again."""

    async def fail(task_id: str) -> None:
        raise StoreUnavailable("it does not answer", outcome="not_stored")

    monkeypatch.setattr(town.exchange.store, "settle", fail)
    sent = await soon(town.send(return_immediately=False))
    assert sent.status.state == SUBMITTED
    assert (await town.lease()).task.id == sent.id


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "at its end"])
async def test_who_cannot_be_shown_what_it_has_sent_is_not_told_that_it_was_not_stored(
    town: Town, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """Who believed that would send it again, and it would be done twice."""

    async def fail(*asked: object) -> None:
        raise StoreUnavailable("it does not answer", outcome="not_stored")

    with monkeypatch.context() as away:
        away.setattr(town.exchange.store, "ask", fail)
        away.setattr(town.exchange, "waits", Waits(0, wait_ms_max=20_000))
        with pytest.raises(StoreUnavailable) as refused:
            await soon(town.send(return_immediately=at_once))
    assert refused.value.details["outcome"] == "unknown"
    assert (await town.lease()).task.message is not None


async def test_who_cannot_be_shown_what_it_has_canceled_is_not_told_that_it_was_not_stored(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*asked: object) -> None:
        raise StoreUnavailable("it does not answer", outcome="not_stored")

    store, task_id = town.exchange.store, (await town.send()).id
    run = store.run
    with monkeypatch.context() as away:

        async def run_and_leave(command: Any) -> Any:
            done = await run(command)
            away.setattr(store, "ask", fail)
            return done

        away.setattr(store, "run", run_and_leave)
        with pytest.raises(StoreUnavailable) as refused:
            await town.operations.cancel_task(town.alice, town.agent, a.CancelTask(id=task_id))
    assert refused.value.details["outcome"] == "unknown"
    assert (await town.get(task_id)).status.state == "TASK_STATE_CANCELED"


async def test_a_stream_that_cannot_go_on_does_not_say_that_what_began_it_was_not_stored(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*asked: object) -> None:
        raise StoreUnavailable("it does not answer", outcome="not_stored")

    request = a.SendMessage(message=says())
    events = town.operations.send_streaming(town.alice, town.agent, request)
    first = await soon(anext(events))
    with monkeypatch.context() as away:
        away.setattr(town.exchange.store, "ask", fail)
        with pytest.raises(StoreUnavailable) as refused:
            await soon(anext(events))
    assert refused.value.details["outcome"] == "unknown"
    assert first.response.task is not None
    assert (await town.lease()).task.id == first.response.task.id


async def test_a_store_that_is_closed_ends_the_wait_of_a_send(town: Town) -> None:
    """It has been sent; what became of it is not known here any more."""
    x = town.exchange
    command = c.SendTask(town.alice.agent, Task(id=uid(1), recipient=town.agent.id, intent_text="work"))
    sending = await begun(x.store, x.run_and_settle(town.alice, command))
    await x.store.close()
    assert (await soon(sending)).task_id == uid(1)
