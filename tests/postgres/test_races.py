"""Two engines on one database, at the same things at the same moment: what one of them was told holds for both.
(Contract 2, 3, 11, 14, 26, 28.)"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, Final

import pytest

from covenant import AgentId, CovenantError, Mailbox, OpenMailbox, Result, TaskState
from covenant.model import command as c
from covenant.model import query as q
from covenant.model.audit import Logged
from covenant.model.event import CardWithdrawn
from covenant.model.peer import Caller, Capability, Grant, Role, Scope
from covenant.rules.evolve import CREATING
from covenant.store.postgres.engine import Postgres
from tests.conformance.support import DONE, drain, keyed, plain, soon, take, uid
from tests.postgres import store_url
from tests.postgres.support import WAITING, sql

ALICE, BOB = AgentId.named("alice@lab"), AgentId.named("bob@lab")
_ROUNDS: Final = 25


@pytest.fixture(params=["known", "unnoticed"])
async def both(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[OpenMailbox, OpenMailbox]]:
    """Unnoticed, each of them takes itself for alone, and decides on what it remembers."""
    if request.param == "unnoticed":
        monkeypatch.setattr(Postgres, "is_alone", True)
    url = f"{store_url()}&lanes=2"
    async with AsyncExitStack() as stack:
        one, other = [await stack.enter_async_context(Mailbox.open(url)) for _ in range(2)]
        yield one, other
        check_numbers(await whole_log(one))


def engine_of(box: OpenMailbox) -> Any:
    return box._engine


async def whole_log(box: OpenMailbox) -> list[Logged]:
    """From its end, which shows all that is committed."""
    commits: list[Logged] = []
    before = None
    while more := await engine_of(box).log_back(before, 1000):
        commits += more
        before = more[-1].seq
    return commits[::-1]


def check_numbers(commits: list[Logged]) -> None:
    """No number twice; those of one record only grow, and each names the one before it."""
    numbers = [number for logged in commits for number in range(logged.seq, logged.last + 1)]
    assert len(set(numbers)) == len(numbers)
    last: dict[str, int] = {}
    for logged in commits:
        for at, event in enumerate(logged.events):
            if type(event) not in (*CREATING, CardWithdrawn) and logged.prev:  # a card keeps its number
                assert logged.prev[at] in (last.get(event.key, 0), 0), logged
        for at, event in enumerate(logged.events):
            last[event.key] = logged.seq + at


async def test_of_two_sends_under_one_key_one_leads(both: tuple[OpenMailbox, OpenMailbox]) -> None:
    one, other = both
    for number in range(_ROUNDS):
        sends = (box.of(ALICE).send_task(keyed(one.of(BOB), key=f"key {number}")) for box in both for _ in range(3))
        replies = await soon(asyncio.gather(*sends))
        leaders = [reply.task_id for reply in replies if reply.follows is None]
        assert len(leaders) == 1
        assert {reply.follows for reply in replies if reply.task_id not in leaders} == set(leaders)
        delivery = await take(other.of(BOB))
        assert delivery.task.id == leaders[0]
        assert await one.of(BOB).try_recv_task_for() is None
        await one.of(BOB).send_result(Result.ok(delivery, DONE))
        answered = [await drain(both[at % 2].of(ALICE)) for at in range(6)]
        assert {answer.task_id for answer in answered} == {reply.task_id for reply in replies}


async def test_a_bounded_grant_is_used_as_often_as_it_allows(both: tuple[OpenMailbox, OpenMailbox]) -> None:
    engines = [engine_of(box) for box in both]
    callers = [Caller(agent, Role.PEER, f"token {agent}") for agent in (ALICE, BOB)]
    for caller in callers:
        await engines[0].run(c.EnrollPeer(None, caller.agent, Role.PEER, caller.token))
    for number in range(8):
        capability = Capability(uid(number), ALICE, "a2a.send.bob@lab", BOB, 1, Scope(max_uses=3))
        await engines[number % 2].run(c.GrantCapability(None, Grant(capability, "")))
        calls = [c.Call(callers[0], c.SendTask(ALICE, plain(both[0].of(BOB)))) for _ in range(10)]
        replies = await soon(
            asyncio.gather(*(engines[at % 2].run(call) for at, call in enumerate(calls)), return_exceptions=True)
        )
        refused = [reply for reply in replies if isinstance(reply, CovenantError)]
        assert {refusal.code for refusal in refused} <= {"missing_capability", "scope_mismatch"}
        assert len(replies) - len(refused) == 3
    tasks = await both[0].recent_tasks(1000)
    assert len(tasks) == 24


async def test_a_revocation_holds_at_the_next_commit_of_the_other(both: tuple[OpenMailbox, OpenMailbox]) -> None:
    first, second = (engine_of(box) for box in both)
    caller = Caller(ALICE, Role.PEER, "token")
    for agent in (ALICE, BOB):
        await first.run(c.EnrollPeer(None, agent, Role.PEER, "token" if agent is ALICE else "other"))
    for number in range(_ROUNDS):
        capability = Capability(uid(number), ALICE, "a2a.send.bob@lab", BOB, 1)
        await first.run(c.GrantCapability(None, Grant(capability, "")))
        call = c.Call(caller, c.SendTask(ALICE, plain(both[0].of(BOB))))
        await second.run(call)
        await first.run(c.RevokeCapability(None, uid(number), "enough"))
        with pytest.raises(CovenantError, match="no grant"):
            await second.run(call)


async def test_a_card_that_is_published_again_is_the_same_everywhere(both: tuple[OpenMailbox, OpenMailbox]) -> None:
    first, second = (engine_of(box) for box in both)
    await first.run(c.EnrollPeer(None, BOB, Role.PEER, "token"))
    for engine, name in ((first, "one"), (second, "two"), (first, "three")):
        await engine.run(c.PublishCard(None, BOB, {"name": name}))
        for asked in (first, second):
            card = await asked.ask(q.GetCard(None, BOB.pubkey))
            assert card.card["name"] == name
    await first.run(c.WithdrawCard(None, BOB))
    assert await second.ask(q.GetCard(None, BOB.pubkey)) is None


async def test_no_task_is_leased_twice_and_none_is_left(both: tuple[OpenMailbox, OpenMailbox]) -> None:
    count = 300
    await both[0].of(ALICE).send_tasks([plain(both[0].of(BOB), id=uid(number)) for number in range(count)])
    taken: list[str] = []

    async def work(box: OpenMailbox) -> None:
        while len(taken) < count:
            leased = await box.of(BOB).recv_tasks(3, wait_ms=0)
            taken.extend(delivery.task.id for delivery in leased)
            await asyncio.sleep(0)

    await soon(asyncio.gather(*(work(box) for box in both for _ in range(4))))
    assert sorted(taken) == [uid(number) for number in range(count)]


async def test_a_task_is_canceled_or_answered_and_never_both(both: tuple[OpenMailbox, OpenMailbox]) -> None:
    one, other = both
    ends: Counter[str] = Counter()
    for number in range(2 * _ROUNDS):
        await one.of(ALICE).send_task(plain(one.of(BOB), id=uid(number)))
        delivery = await take(other.of(BOB))
        canceled, posted = await soon(
            asyncio.gather(
                both[number % 2].of(ALICE).cancel_task(uid(number), reason="why"),
                both[1 - number % 2].of(BOB).send_result(Result.ok(delivery, DONE)),
                return_exceptions=True,
            )
        )
        refused = [reply for reply in (canceled, posted) if isinstance(reply, CovenantError)]
        assert [refusal.code for refusal in refused] == ["task_terminal"]
        entry = await one.get_task(uid(number))
        assert entry.outcome == ("answered" if refused == [canceled] else "canceled")
        assert entry.generation == (4 if refused == [canceled] else 3)
        assert entry.state is TaskState.RESULT_PENDING
        assert (await drain(other.of(ALICE))).task_id == uid(number)
        ends[str(entry.outcome)] += 1


async def test_who_follows_the_log_sees_every_commit_once(both: tuple[OpenMailbox, OpenMailbox]) -> None:
    sends = 400
    seen: list[Logged] = []
    done = asyncio.Event()

    async def write(at: int) -> None:
        box = both[at % 2].of(ALICE)
        for number in range(sends // 8):
            await box.send_task(plain(both[0].of(BOB), id=uid(1000 * at + number)))

    async def follow(box: OpenMailbox) -> list[Logged]:
        found: list[Logged] = []
        while len(found) < sends or not done.is_set():
            found += await engine_of(box).log(found[-1].last if found else 0, 7)
            await asyncio.sleep(0)
        return found

    followers = [asyncio.create_task(follow(box)) for box in both]
    await soon(asyncio.gather(*(write(at) for at in range(8))))
    done.set()
    for follower in followers:
        seen = await soon(follower)
        assert [logged.seq for logged in seen] == [logged.seq for logged in await whole_log(both[0])]
        assert len(seen) == sends


async def test_a_lane_that_was_closed_never_gets_another_line(both: tuple[OpenMailbox, OpenMailbox]) -> None:
    one, other = both
    alice, bob = one.of(ALICE), one.of(BOB)
    await asyncio.gather(*(alice.send_task(plain(bob)) for _ in range(20)))
    engine = engine_of(one)
    name = engine.member.id
    fetch = engine_of(other)._reader.fetch
    await fetch("update daemon set ended = clock_timestamp(), proof = 'silent' where id = $1", name)
    await fetch("update lane set closed = true where daemon = $1", name)
    of_lanes = "select lane, count(*) as lines from log join lane on lane.id = lane where daemon = $1 group by lane"
    before = {row["lane"]: row["lines"] for row in await fetch(of_lanes, name)}
    await soon(asyncio.gather(*(alice.send_task(plain(bob)) for _ in range(20))))
    assert {row["lane"]: row["lines"] for row in await fetch(of_lanes, name)} == before
    assert engine.member.id != name
    assert len(await other.recent_tasks(1000)) == 40
    assert len(await whole_log(other)) == 40


async def test_what_was_given_back_while_a_receive_waited_stands_behind_what_is_older(
    both: tuple[OpenMailbox, OpenMailbox],
) -> None:
    """One of its batch waits for a record: what stood first when that began may stand elsewhere when it ends."""
    one, other = both
    alice, bob = one.of(ALICE), one.of(BOB)
    await alice.send_tasks([plain(bob, id=uid(number)) for number in range(3)])
    held = await take(bob)
    async with sql(f"{engine_of(one).where.dsn}&schema={engine_of(one).where.schema}") as owner:
        async with owner.transaction():
            await owner.execute("select from record where key = $1 for update", uid(0))
            posting = asyncio.create_task(bob.send_result(Result.ok(held, DONE)))
            receiving = asyncio.create_task(bob.recv_tasks(1, wait_ms=0))
            async with asyncio.timeout(10):
                while not await owner.fetchval(WAITING, engine_of(one).member.session):
                    pass
            away = other.of(BOB)
            await away.release(await take(away), reason="not now")
        await soon(posting)
        assert [delivery.task.id for delivery in await soon(receiving)] == [uid(2)]
