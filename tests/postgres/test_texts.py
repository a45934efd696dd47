"""Texts that a database cannot hold: refused by the rules, so alike on every engine, and nobody else's trouble."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from covenant import AgentId, Limits, Mailbox, OpenMailbox
from covenant.model import command as c
from covenant.model import query as q
from covenant.model.error import InvalidInput, Malformed, StoreUnavailable
from covenant.model.push import PushConfig
from covenant.rules import query as queries
from covenant.serve import wire as w
from tests.conformance.support import keyed, plain
from tests.daemons import OPERATOR_TOKEN, start_daemon, url_of
from tests.postgres import store_url

ALICE, BOB = AgentId.named("alice@lab"), AgentId.named("bob@lab")
BAD = ["a\0b", "\0", "a\ud800"]


@pytest.fixture(params=["memory", "postgres"])
async def box(request: pytest.FixtureRequest) -> AsyncIterator[OpenMailbox]:
    async with Mailbox.open("memory:" if request.param == "memory" else store_url()) as box:
        yield box


@pytest.fixture(params=["memory", "postgres"])
async def daemon(request: pytest.FixtureRequest) -> AsyncIterator[OpenMailbox]:
    """The operator's box in one."""
    daemon = await start_daemon("memory:" if request.param == "memory" else store_url(), Limits())
    async with Mailbox.open(url_of(daemon, "unix"), token=OPERATOR_TOKEN) as box:
        yield box
    await daemon.stop()


@pytest.mark.parametrize("bad", BAD)
async def test_a_key_that_no_database_holds_is_malformed(box: OpenMailbox, bad: str) -> None:
    engine: Any = box._engine
    sent = await box.of(ALICE).send_task(plain(box.of(BOB)))
    config = PushConfig(id=bad, url="https://example.com/hook")
    asked = [
        engine.ask(q.GetPush(ALICE, sent.task_id, bad)),
        engine.run(c.DropPush(ALICE, sent.task_id, bad)),
        engine.run(c.SetPush(ALICE, sent.task_id, config)),
        engine.run(c.SignalRun(ALICE, sent.task_id, bad)),
        engine.run(c.SignalRun(ALICE, sent.task_id, "name", key=bad)),
        engine.run(c.SendTask(ALICE, plain(box.of(BOB)), key=bad)),
        engine.run(c.SendTask(ALICE, keyed(box.of(BOB), key=bad))),
        engine.run(c.ForgetCached(None, bad, "a reason")),
    ]
    beside: list[Any] = [box.of(ALICE).get_task(sent.task_id) for _ in range(5)]
    beside += [box.of(ALICE).send_task(plain(box.of(BOB))) for _ in range(5)]
    replies = await asyncio.gather(*asked, *beside, return_exceptions=True)
    assert [type(reply) for reply in replies[: len(asked)]] == [Malformed] * len(asked)
    assert not any(isinstance(reply, BaseException) for reply in replies[len(asked) :])


@pytest.mark.parametrize("bad", BAD)
async def test_a_daemon_refuses_the_same_before_it_looks(daemon: OpenMailbox, bad: str) -> None:
    engine: Any = daemon._engine
    with pytest.raises(Malformed):
        await engine.call(w.ForgetCached(entry_id=bad, reason="a reason"), w.Forgotten)


@pytest.mark.parametrize("bad", [-1, 2**63, 10**30, -(10**30)])
async def test_a_number_that_no_database_holds_is_refused(daemon: OpenMailbox, bad: int) -> None:
    engine: Any = daemon._engine
    with pytest.raises(InvalidInput) as refused:
        await engine.call(w.RecentAudit(before=bad), w.AuditReply)
    assert refused.value.details["field"] == "before"


async def test_a_question_that_cannot_be_answered_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the cause: here, a rule that looks for what the server refuses."""
    async with Mailbox.open(store_url()) as box:
        engine: Any = box._engine
        sent = await box.of(ALICE).send_task(plain(box.of(BOB)))
        monkeypatch.setitem(queries.ANSWER, q.GetPush, lambda query, view, ctx: view.get(query.config_id))
        asked = [engine.ask(q.GetPush(ALICE, sent.task_id, "a\0b"))]
        asked += [box.of(ALICE).get_task(sent.task_id) for _ in range(20)]
        replies: list[Any] = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(replies[0], StoreUnavailable)
        assert [reply.task.id for reply in replies[1:]] == [sent.task_id] * 20


async def test_a_kind_that_no_index_holds_is_found_by_it() -> None:
    long = random.Random(1).randbytes(4_000).hex()  # which the server cannot make shorter
    kinds = [f"{long}{number}" for number in range(2)]
    async with Mailbox.open(store_url(), limits=Limits(task_kind_bytes_max=10_000)) as box:
        alice, bob = box.of(ALICE), box.of(BOB)
        for kind in kinds:
            await alice.send_task(plain(bob, task_kind=kind))
        for kind in reversed(kinds):
            (found,) = await bob.recv_tasks(1, wait_ms=0, kinds=[kind])
            assert found.task.task_kind == kind
