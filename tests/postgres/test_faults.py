"""A lane whose connection is ended by the server at any statement: whatever was acknowledged is there, and everything
is there once. (Contract 1, 3, 5; DESIGN 4.)"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from typing import Any, Final, Literal, TypeAlias, TypeVar

import asyncpg
import pytest

from covenant import Mailbox, OpenMailbox, Result
from covenant.model.error import StoreUnavailable
from covenant.store.postgres import engine as engines
from covenant.store.postgres import entry as entries
from covenant.store.postgres import lane as lanes
from covenant.store.postgres.connection import Where, connect
from tests.conformance.support import DONE, drain, keyed, plain, soon, take, uid
from tests.postgres import server_url, store_url

T = TypeVar("T")
When: TypeAlias = Literal["before", "after"]
_STATEMENTS: Final = 24  # more than one round of a task takes


class Knife:
    """Ends the session of a lane before or after one of its statements."""

    def __init__(self, admin: asyncpg.Connection[Any]) -> None:
        self._admin = admin
        self._left: int | None = None
        self._when: When = "before"
        self.only: str | None = None
        self.cut: list[str] = []
        self.is_down = False
        self._held: str | None = None
        self.is_held, self.go_on = asyncio.Event(), asyncio.Event()

    def set(self, left: int, when: When, only: str | None = None) -> None:
        self._left, self._when, self.only = left, when, only

    def hold(self, name: str) -> None:
        """A statement that is on its way, and not answered yet."""
        self._held = name

    def lay_down(self) -> None:
        self._left = None

    async def __call__(self, name: str, connection: asyncpg.Connection[Any], said: Awaitable[T]) -> T:
        is_now = self._left == 0 and self.only in (None, name)
        if self._left and self.only in (None, name):
            self._left -= 1
        if is_now and self._when == "before":
            await self._end(name, connection)
        if name == self._held:
            self.is_held.set()
            try:
                await self.go_on.wait()
            except asyncio.CancelledError:
                said.close()  # type: ignore[attr-defined]  # it was never begun
                raise
        answer = await said
        if is_now and self._when == "after":
            await self._end(name, connection)
            raise asyncpg.ConnectionDoesNotExistError("the answer was lost")
        return answer

    async def _end(self, name: str, connection: asyncpg.Connection[Any]) -> None:
        self._left = None
        self.cut.append(name)
        await self._admin.execute("select pg_terminate_backend($1, 5000)", connection.get_server_pid())


class Held:
    """A connection, or a statement of one, in reach of the knife."""

    def __init__(self, held: Any, connection: asyncpg.Connection[Any], knife: Knife, name: str = "") -> None:
        self._held = held
        self._connection = connection
        self._knife = knife
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._held, name)

    async def execute(self, sql: str, *values: Any) -> Any:
        return await self._knife(sql, self._connection, self._held.execute(sql, *values))

    async def fetch(self, *values: Any) -> Any:
        return await self._knife(self._name or str(values[0]), self._connection, self._held.fetch(*values))

    async def prepare(self, sql: str) -> Any:
        name = "load" if "load(" in sql else "save"
        prepared = await self._knife(f"prepare {name}", self._connection, self._held.prepare(sql))
        return Held(prepared, self._connection, self._knife, name)


@pytest.fixture
async def knife(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Knife]:
    admin = await asyncpg.connect(server_url())
    knife = Knife(admin)

    async def held(where: Where, **settings: str) -> Any:
        if knife.is_down:
            raise OSError("nobody is there")
        connection = await connect(where, **settings)
        return Held(connection, connection, knife)

    monkeypatch.setattr(lanes, "connect", held)
    yield knife
    await admin.close()


@pytest.fixture
async def box(knife: Knife) -> AsyncIterator[OpenMailbox]:
    async with Mailbox.open(f"{store_url()}&lanes=1") as box:
        yield box


async def events_of(box: OpenMailbox, key: str) -> list[str]:
    engine: Any = box._engine
    rows = await engine._reader.fetch("select seq from log order by seq")
    assert len({row["seq"] for row in rows}) == len(rows)
    commits = await engine.log_back(None, 10_000)
    return [type(event).__name__ for logged in reversed(commits) for event in logged.events if event.key == key]


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_round_of_a_task_is_done_once_whichever_statement_is_cut(
    box: OpenMailbox, knife: Knife, when: When
) -> None:
    alice, bob = box.of("alice@lab"), box.of("bob@lab")
    for number in range(_STATEMENTS):
        knife.set(number, when)
        sent = await soon(alice.send_task(keyed(bob, key=f"{number}", id=uid(number))))
        assert (sent.generation, sent.duplicate) == (1, False)
        delivery = await take(bob)
        assert (delivery.task.id, delivery.attempt, delivery.generation) == (uid(number), 1, 2)
        posted = await soon(bob.send_result(Result.ok(delivery, DONE)))
        assert (posted.generation, posted.duplicate) == (4, False)
        assert (await drain(alice)).task_id == uid(number)
        assert await events_of(box, uid(number)) == ["Sent", "Leased", "Answered", "Drained"]
    knife.lay_down()
    assert {"begin", "load", "save", "commit"} <= set(knife.cut)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_commit_of_which_nobody_can_tell_is_told_so_and_sent_again_it_is_there_once(
    box: OpenMailbox, knife: Knife, when: When, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "PATIENCE_S", 0.3)
    alice, bob = box.of("alice@lab"), box.of("bob@lab")
    knife.set(0, when, only="commit")
    knife.is_down = True
    with pytest.raises(StoreUnavailable) as refused:
        await soon(alice.send_task(plain(bob, id=uid(1))))
    assert refused.value.details["outcome"] == "unknown"
    knife.is_down = False
    sent = await soon(alice.send_task(plain(bob, id=uid(1))))
    assert sent.duplicate is (when == "after")
    assert await events_of(box, uid(1)) == ["Sent"]
    assert (await take(bob)).task.id == uid(1)


async def test_a_commit_that_was_never_asked_for_is_not_stored(
    box: OpenMailbox, knife: Knife, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "PATIENCE_S", 0.3)
    alice, bob = box.of("alice@lab"), box.of("bob@lab")
    knife.set(0, "before", only="save")
    knife.is_down = True
    with pytest.raises(StoreUnavailable) as refused:
        await soon(alice.send_task(plain(bob, id=uid(1))))
    assert refused.value.details["outcome"] == "not_stored"
    knife.is_down = False
    assert not (await soon(alice.send_task(plain(bob, id=uid(1))))).duplicate


@pytest.mark.parametrize("of", ["commit", "save"])
async def test_a_batch_that_was_cut_is_done_once(
    box: OpenMailbox, knife: Knife, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On what is loaded, which is committed by itself, and on memory, where the save is all."""
    alice, bob = box.of("alice@lab"), box.of("bob@lab")
    if of == "commit":
        monkeypatch.setattr(box._engine, "may_recall", lambda: False)
    for number, when in enumerate(("before", "after")):
        ids = [uid(100 * number + n) for n in range(50)]
        knife.set(0, when, only=of)  # type: ignore[arg-type]
        replies = await soon(alice.send_tasks([plain(bob, id=task_id) for task_id in ids]))
        assert not any(reply.duplicate for reply in replies)
        leased = await soon(bob.recv_tasks(100, wait_ms=0))
        assert [delivery.task.id for delivery in leased] == ids
    engine: Any = box._engine
    keys = Counter(event.key for logged in await engine.log_back(None, 10_000) for event in logged.events)
    assert set(keys.values()) == {2}
    assert knife.cut == [of, of]


async def test_each_command_waits_as_long_as_it_would_alone(
    box: OpenMailbox, knife: Knife, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob = box.of("alice@lab"), box.of("bob@lab")
    knife.set(0, "before", only="load")
    knife.is_down = True
    monkeypatch.setattr(entries, "PATIENCE_S", 0.0)
    hasty = asyncio.ensure_future(alice.send_task(plain(bob, id=uid(1))))
    await asyncio.sleep(0)  # it is in the queue
    monkeypatch.setattr(entries, "PATIENCE_S", 30.0)
    patient = asyncio.ensure_future(alice.send_task(plain(bob, id=uid(2))))
    with pytest.raises(StoreUnavailable) as refused:
        await soon(hasty)
    assert refused.value.details["outcome"] == "not_stored"
    assert not patient.done()
    knife.is_down = False
    assert (await soon(patient)).task_id == uid(2)
    assert [delivery.task.id for delivery in await soon(bob.recv_tasks(10, wait_ms=0))] == [uid(2)]


async def test_a_store_that_is_closed_in_the_middle_of_a_commit_tells_how_it_ended(
    box: OpenMailbox, knife: Knife
) -> None:
    alice, bob = box.of("alice@lab"), box.of("bob@lab")
    knife.hold("commit")
    sending = asyncio.ensure_future(alice.send_task(plain(bob, id=uid(1))))
    await soon(knife.is_held.wait())
    closing = asyncio.ensure_future(box.close())
    await asyncio.sleep(0)  # it waits for the lane
    knife.go_on.set()
    assert (await soon(sending)).task_id == uid(1)
    await soon(closing)


async def test_a_commit_that_does_not_end_with_the_store_is_told_to_be_unknown(
    box: OpenMailbox, knife: Knife, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_ENDING_S", 0.01)
    alice, bob = box.of("alice@lab"), box.of("bob@lab")
    knife.hold("commit")
    sending = asyncio.ensure_future(alice.send_task(plain(bob, id=uid(1))))
    await soon(knife.is_held.wait())
    await soon(box.close())
    with pytest.raises(StoreUnavailable) as refused:
        await soon(sending)
    assert refused.value.details["outcome"] == "unknown"
