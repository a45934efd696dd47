"""An id that is used anew once it is forgotten: nothing of its former life is there, and nothing of the new one is
lost. (Contract 9.)

It makes no difference whether somebody has compacted the history in between.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import pytest

from covenant import Mailbox, OpenMailbox, Result, Task, Text
from covenant.model import command as c
from covenant.model import query as q
from covenant.model.limits import DEDUP_MS, RETENTION_MS
from covenant.model.message import Artifact, Part
from covenant.model.push import PushConfig
from covenant.model.run import Memo, RunStatus, Wait
from covenant.store.clock import ManualClock

from .runs import RUN, begin, entry, part, parts, plainly, raw, says, step
from .support import (
    DONE,
    Reopen,
    answer_next,
    drain,
    drain_many,
    finish,
    nothing_back_for,
    nothing_for,
    plain,
    refused,
    requeue,
    take,
    uid,
)

Pass: TypeAlias = Callable[[], Awaitable[None]]
GO = Wait(signals=("go",))
HOOK = PushConfig(id="hook", url="https://example.org/hook")


@pytest.fixture(params=["kept", "compacted"])
def forgotten(box: OpenMailbox, clock: ManualClock, request: pytest.FixtureRequest) -> Pass:
    """Time passes, until the id may be used anew."""

    async def go_by() -> None:
        clock.advance(DEDUP_MS + 1)
        if request.param == "compacted":
            await box.compact()

    return go_by


async def texts(worker: Mailbox, lease_id: str) -> list[str | None]:
    return [heard.message.parts[0].text for heard in (await worker.inputs(lease_id)).inputs]


# --- tasks -------------------------------------------------------------------------------------------------


async def test_partial_results_of_a_former_life_are_gone(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, forgotten: Pass
) -> None:
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    for text in ("one", "two"):
        await bob.send_result(Result.partial(delivery, [Text(text)]))
    await bob.send_result(Result.ok(delivery, DONE))
    await drain_many(alice, 3)
    await forgotten()
    await alice.send_task(plain(bob, "else", id=uid(1)))
    delivery = await take(bob)
    posted = await bob.send_result(Result.partial(delivery, [Text("other")]))
    assert posted.sequence == 1
    await box.compact()
    await bob.send_result(Result.ok(delivery, DONE))
    assert [answer.content for answer in await drain_many(alice, 2)] == [(Text("other"),), DONE]
    assert await nothing_back_for(alice)


async def test_messages_of_a_former_life_are_gone(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, forgotten: Pass
) -> None:
    await alice.send_task(plain(bob, id=uid(1)))
    for text in ("one", "two"):
        await alice.add_message(uid(1), text)
    await answer_next(bob)
    await drain(alice)
    await forgotten()
    await alice.send_task(plain(bob, "else", id=uid(1)))
    delivery = await take(bob)
    assert await texts(bob, delivery.lease_id) == []
    await alice.add_message(uid(1), "other")
    await box.compact()
    assert await texts(bob, delivery.lease_id) == ["other"]


async def test_late_results_of_a_former_life_are_gone(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, forgotten: Pass
) -> None:
    async def live(text: str) -> list[Any]:
        await alice.send_task(plain(bob, text, id=uid(1)))
        before = list((await box.get_task(uid(1))).late_results)
        slow = await take(bob)
        await requeue(box, uid(1))
        with refused("lease_superseded"):
            await bob.send_result(Result.ok(slow, [Text(text)]))
        await box.compact()
        await answer_next(bob)
        await drain(alice)
        kept = (await box.get_task(uid(1))).late_results
        return [before, *(late.content for late in kept)]

    assert await live("one") == [[], (Text("one"),)]
    await forgotten()
    assert await live("two") == [[], (Text("two"),)]


async def test_a_lease_of_a_former_life_is_unknown(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, forgotten: Pass
) -> None:
    await alice.send_task(plain(bob, id=uid(1)))
    slow = await take(bob)
    await requeue(box, uid(1))
    await answer_next(bob)
    await drain(alice)
    await forgotten()
    await alice.send_task(plain(bob, "else", id=uid(1)))
    with refused("unknown_lease"):
        await bob.heartbeat(slow)
    await take(bob)
    with refused("unknown_lease"):
        await bob.heartbeat(slow)


@pytest.mark.usefixtures("in_process")
async def test_pieces_of_artifacts_of_a_former_life_are_gone(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, forgotten: Pass
) -> None:
    async def live(*told: str) -> list[str | None]:
        task = Task(id=uid(1), recipient=bob.agent, intent_text=told[0])
        await box._engine.run(c.SendTask(alice.agent, task, protocol=True))
        delivery = await take(bob)
        for number, text in enumerate(told):
            piece = Artifact(artifact_id="draft", parts=(Part(text=text),))
            await bob.artifact(delivery, piece, append=number > 0)
        await box.compact()
        dialog = await box._engine.ask(q.GetDialog(alice.agent, uid(1)))
        await bob.send_result(Result.ok(delivery, ()))
        return [one.text for artifact in dialog.task.artifacts for one in artifact.parts]

    assert await live("one", "two", "three") == ["one", "two", "three"]
    await forgotten()
    assert await live("other") == ["other"]
    await forgotten()
    assert await live("and", "again") == ["and", "again"]


@pytest.mark.usefixtures("in_process")
async def test_webhooks_of_a_former_life_are_gone(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, forgotten: Pass
) -> None:
    """Also where the new life brings the very same one: that is its own, and is told from its beginning."""
    task = Task(id=uid(1), recipient=bob.agent, intent_text="work")

    async def live(push: PushConfig | None) -> list[tuple[str, int]]:
        await box._engine.run(c.SendTask(alice.agent, task, protocol=True, push=push))
        await box.compact()
        pushed = await box._engine.ask(q.GetPushed(None, uid(1)))
        for one in pushed.pushes:
            await box._engine.run(c.NotePush(None, uid(1), one.config.id, one.since, 1))
        delivery = await take(bob)
        await bob.send_result(Result.ok(delivery, DONE))
        return [(one.config.id, one.delivered) for one in pushed.pushes]

    assert await live(HOOK) == [("hook", 0)]
    await forgotten()
    assert await live(HOOK) == [("hook", 0)]
    await forgotten()
    assert await live(None) == []


@pytest.mark.usefixtures("in_process")
async def test_send_keys_of_a_former_life_are_free(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, forgotten: Pass
) -> None:
    async def live(text: str) -> None:
        task = Task(id=uid(1), recipient=bob.agent, intent_text=text)
        more = says(text)
        for is_again in (False, True):
            sent = await box._engine.run(c.SendTask(alice.agent, task, protocol=True, key="first"))
            assert (sent.task_id, sent.duplicate) == (uid(1), is_again)
            await box._engine.run(c.AddMessage(alice.agent, uid(1), more, key="more"))
            await box.compact()
        delivery = await take(bob)
        assert await texts(bob, delivery.lease_id) == [text]
        await bob.send_result(Result.ok(delivery, DONE))

    await live("one")
    await forgotten()
    await live("two")


@pytest.mark.usefixtures("in_process")
async def test_a_send_key_that_is_free_again_leads_to_another_task(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """And stays with that one, when the first is gone."""
    for number in (1, 2):
        task = Task(id=uid(number), recipient=bob.agent, intent_text="work")
        sent = await box._engine.run(c.SendTask(alice.agent, task, protocol=True, key="key"))
        assert (sent.task_id, sent.duplicate) == (uid(number), False)
        await answer_next(bob)
        clock.advance(RETENTION_MS + 1 if number == 1 else 1)
    await box.compact()
    again = Task(recipient=bob.agent, intent_text="work")
    sent = await box._engine.run(c.SendTask(alice.agent, again, protocol=True, key="key"))
    assert (sent.task_id, sent.duplicate) == (uid(2), True)


# --- runs --------------------------------------------------------------------------------------------------


async def test_a_run_of_a_former_life_is_gone(box: OpenMailbox, alice: Mailbox, bob: Mailbox, forgotten: Pass) -> None:
    """With its entries and their keys, its steps, and the signals that nobody heard."""
    first = step(1, entries=[entry(1, key="once"), entry(2, parent=1)], memos=[Memo("a", raw(1))], leaf=2)
    delivery, _ = await begin(alice, bob, first)
    await bob.commit_run(delivery, step(2, memos=[Memo("b", raw(2))]))
    await alice.signal_run(RUN, "go", 1, key="k")
    await alice.signal_run(RUN, "go", 2)
    await bob.commit_run(delivery, step(3, result=Result(RUN, "ok", DONE)))
    await drain(alice)
    await forgotten()

    await alice.send_task(plain(bob, "else", id=RUN))
    with refused("not_a_run"):
        await alice.get_run(RUN)
    delivery = await take(bob)
    assert await bob.find_entry(delivery, "once") is None
    loaded = await bob.load_run(delivery)
    assert (loaded.step, loaded.entries, list(loaded.steps)) == (0, 0, [])
    draft = entry(7, "other", key="once")
    await bob.commit_run(delivery, step(1, entries=[draft], memos=[Memo("c", raw(3))], leaf=1))
    assert (await bob.look_around(delivery, GO)).signals == []
    assert not (await alice.signal_run(RUN, "go", 3, key="k")).duplicate
    await box.compact()
    assert [one.id for one in (await bob.run_entries(RUN, every=True)).entries] == [draft.id]
    found = await bob.find_entry(delivery, "once")
    assert found is not None and found.number == 1
    loaded = await bob.load_run(delivery)
    assert [[memo.key for memo in one.memos] for one in loaded.steps] == [["c"]]
    assert [plainly(one.value) for one in (await bob.look_around(delivery, GO, every=True)).signals] == [3]


async def test_signals_to_a_run_that_never_began_are_gone(
    alice: Mailbox, bob: Mailbox, forgotten: Pass, box: OpenMailbox
) -> None:
    await alice.send_task(plain(bob, id=RUN))
    await alice.signal_run(RUN, "go", 1, key="k")
    await alice.cancel_task(RUN)
    await drain(alice)
    await forgotten()
    delivery, _ = await begin(alice, bob)
    assert (await bob.look_around(delivery, GO)).signals == []
    assert not (await alice.signal_run(RUN, "go", 2, key="k")).duplicate
    await box.compact()
    assert [plainly(one.value) for one in (await bob.look_around(delivery, GO)).signals] == [2]


async def test_a_run_begins_with_a_signal_under_an_id_that_is_forgotten(
    alice: Mailbox, bob: Mailbox, forgotten: Pass
) -> None:
    await finish(alice, bob, plain(bob, id=RUN))
    await forgotten()
    assert (await alice.signal_run(RUN, "go", 1, start=plain(bob, "else"))).started
    delivery = await take(bob)
    assert [plainly(one.value) for one in (await bob.look_around(delivery, GO)).signals] == [1]


async def test_a_run_sends_and_takes_up_a_task_under_an_id_that_is_forgotten(
    alice: Mailbox, bob: Mailbox, forgotten: Pass
) -> None:
    """Its own are made of what they ask for: somebody may have had such an id before."""
    await finish(alice, bob, plain(bob, id=uid(2)))
    await forgotten()
    delivery, standing = await begin(alice, bob, step(1, tasks=[part(2, bob)], begins=[uid(2)]))
    assert standing.attempts == {uid(2): 1}
    done = Result(uid(2), "ok", DONE, None, standing.leases[uid(2)])
    standing = await bob.commit_run(delivery, step(2, answers=[done], wait=Wait(tasks=parts(2))))
    assert [one.content for one in standing.outcomes] == [DONE]
    assert await nothing_for(bob)


# --- restarts ----------------------------------------------------------------------------------------------


async def test_a_former_life_does_not_come_back_with_a_restart(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, forgotten: Pass, reopen: Reopen
) -> None:
    delivery, _ = await begin(alice, bob, step(1, entries=[entry(1, key="once"), entry(2, parent=1)], leaf=2))
    await alice.add_message(RUN, "one")
    await alice.signal_run(RUN, "go", 1)
    await requeue(box, RUN)
    with refused("lease_superseded"):
        await bob.send_result(Result.ok(delivery, DONE))
    await alice.cancel_task(RUN)
    await drain(alice)
    await forgotten()
    box = await reopen()
    alice, bob = box.of("alice@lab"), box.of("bob@lab")
    delivery, _ = await begin(alice, bob, step(1, entries=[entry(3, key="other")], leaf=1))
    await alice.signal_run(RUN, "go", 2)
    for _ in range(2):
        box = await reopen()
        alice, bob = box.of("alice@lab"), box.of("bob@lab")
        assert [one.id for one in (await bob.run_entries(RUN, every=True)).entries] == [entry(3).id]
        assert await texts(box, delivery.lease_id) == []
        assert list((await box.get_task(RUN)).late_results) == []
        seen = await bob.get_run(RUN)
        assert (seen.status, seen.step, seen.signals) == (RunStatus.RUNNING, 1, ["go"])
        await box.compact()
