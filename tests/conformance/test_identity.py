"""A task id stands for one task; a key stands for one agent."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from covenant import AgentId, CovenantError, Idempotency, Json, Mailbox, OpenMailbox, Result, Sent, Task, Text
from covenant.model import agent

from .support import DONE, Reopen, drain, nothing_for, plain, refused, take, uid

pytestmark = pytest.mark.rules_only


async def test_the_same_send_again_is_the_same_task(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 5: who never heard the answer may send again, and the work is done once."""
    first = await alice.send_task(plain(bob, id=uid(1)))
    again = await alice.send_task(plain(bob, id=uid(1)))
    assert (first.duplicate, again.duplicate) == (False, True)
    assert (again.task_id, again.generation) == (first.task_id, 1)
    await take(bob)
    assert await nothing_for(bob)
    assert [task.id for task in await alice.recent_tasks()] == [uid(1)]


async def test_the_same_send_is_recognised_in_every_state(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 5: in flight, answered and drained, the answer tells where the task stands."""
    await alice.send_task(plain(bob, id=uid(1)))

    async def again() -> None:
        sent = await alice.send_task(plain(bob, id=uid(1)))
        assert sent.duplicate
        assert sent.generation == (await alice.get_task(uid(1))).generation

    delivery = await take(bob)
    await again()
    await bob.send_result(Result.ok(delivery, DONE))
    await again()
    await drain(alice)
    await again()
    assert await nothing_for(bob)


async def test_sends_of_one_id_at_once_make_one_task(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 5: of many at once, one is new."""
    sent = await asyncio.gather(*(alice.send_task(plain(bob, id=uid(1))) for _ in range(8)))
    assert sorted(reply.duplicate for reply in sent) == [False] + [True] * 7
    await take(bob)
    assert await nothing_for(bob)


async def test_one_id_twice_in_a_batch_is_one_task(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 5: the later one of a batch sees the earlier one."""
    replies = await alice.send_tasks([plain(bob, id=uid(1)), plain(bob, id=uid(1)), plain(bob, "else", id=uid(1))])
    assert [reply.duplicate for reply in replies if isinstance(reply, Sent)] == [False, True]
    assert [reply.code for reply in replies if isinstance(reply, CovenantError)] == ["task_conflict"]


@pytest.mark.parametrize(
    "change",
    [
        {"intent_text": "else"},
        {"task_kind": "kind"},
        {"content": (Text("else"),)},
        {"content": ()},
        {"recipient": AgentId.named("carol@lab")},
    ],
    ids=lambda change: "-".join(change),
)
async def test_one_id_with_other_content_is_a_conflict(alice: Mailbox, bob: Mailbox, change: dict[str, Any]) -> None:
    """Contract 5: the first task stands as it was sent."""
    same: dict[str, Any] = {"id": uid(1), "recipient": bob.agent, "intent_text": "work", "content": (Text("x"),)}
    await alice.send_task(Task(**same))
    with refused("task_conflict"):
        await alice.send_task(Task(**{**same, **change}))
    kept = (await take(bob)).task
    assert (kept.intent_text, kept.task_kind, kept.content) == ("work", None, (Text("x"),))
    assert await nothing_for(bob)


async def test_an_id_cannot_be_taken_over_by_another_sender(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 5: the sender is part of the content, so a result cannot be diverted."""
    await alice.send_task(plain(bob, id=uid(1)))
    with refused("task_conflict"):
        await carol.send_task(plain(bob, id=uid(1)))
    await bob.send_result(Result.ok(await take(bob), DONE))
    assert await carol.try_recv_result_for() is None
    assert (await drain(alice)).task_id == uid(1)


async def test_parent_and_deadline_are_not_content(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 5: the same send with another parent or deadline is the same send; the first ones stay."""
    await alice.send_task(plain(bob, id=uid(1), parent=uid(7)))
    assert (await alice.send_task(plain(bob, id=uid(1), parent=uid(8), deadline_ms=1))).duplicate
    kept = (await take(bob)).task
    assert (kept.parent, kept.deadline_ms) == (uid(7), None)


async def test_the_order_of_json_members_is_not_content(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 5: two writings of one JSON value are the same content."""
    await alice.send_task(plain(bob, id=uid(1), content=[Json({"a": 1, "b": [1, {"c": 2, "d": 3}]})]))
    again = plain(bob, id=uid(1), content=(Json({"b": [1, {"d": 3, "c": 2}], "a": 1}),))
    assert (await alice.send_task(again)).duplicate


async def test_the_same_send_is_recognised_after_a_restart(alice: Mailbox, bob: Mailbox, reopen: Reopen) -> None:
    """Contract 5: an id stays taken."""
    await alice.send_task(plain(bob, id=uid(1), content=[Json({"b": 1, "a": 2}), Text("x")]))
    box = await reopen()
    alice, bob = box.of("alice@lab"), box.of("bob@lab")
    assert (await alice.send_task(plain(bob, id=uid(1), content=[Json({"a": 2, "b": 1}), Text("x")]))).duplicate
    with refused("task_conflict"):
        await alice.send_task(plain(bob, "else", id=uid(1)))


async def test_an_id_in_capitals_is_the_same_id(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 5: an id has one canonical form, for every verb."""
    low, high = uid(0xABCDEF), uid(0xABCDEF).upper()
    await alice.send_task(plain(bob, id=low))
    assert (await alice.send_task(plain(bob, id=high))).duplicate
    assert (await alice.get_task(high)).task.id == low
    assert (await alice.task_tree(high)).root.entry is not None
    await take(bob)
    await bob.send_result(Result(high, "ok", DONE))
    answer = await alice.get_result(high)
    assert answer is not None
    assert answer.task_id == low


async def test_an_id_in_capitals_shows_the_late_results(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 5: the operator sees the same task, however the id is written."""
    low = uid(0xABCDEF)
    await alice.send_task(plain(bob, id=low))
    old = await take(bob)
    await bob.release(old)
    with refused("lease_superseded"):
        await bob.send_result(Result.ok(old, DONE))
    assert await box.get_task(low.upper()) == await box.get_task(low)


async def test_a_task_without_an_id_gets_its_own(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 5: equal content without an id is another task."""
    one, two = await alice.send_task(plain(bob)), await alice.send_task(plain(bob))
    assert one.task_id != two.task_id
    assert [(await take(bob)).task.id for _ in range(2)] == [one.task_id, two.task_id]


async def test_duplicate_safety_is_not_content(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 5: intent, kind, blocks, sender and recipient are the content, and nothing else is."""
    await alice.send_task(plain(bob, id=uid(1)))
    again = plain(bob, id=uid(1), idempotency=Idempotency("idempotent", "key"))
    assert (await alice.send_task(again)).duplicate


async def test_an_agent_is_its_key_whatever_its_label(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 5: a task to the right key arrives, and its result returns, under any label."""
    renamed = AgentId("robert@lab", bob.agent.pubkey)
    await alice.send_task(Task(id=uid(1), recipient=renamed, intent_text="work"))
    assert (await alice.send_task(plain(bob, id=uid(1)))).duplicate
    await bob.send_result(Result.ok(await take(bob), DONE))
    assert (await drain(box.of(AgentId("alicia@lab", alice.agent.pubkey)))).task_id == uid(1)


def test_what_is_far_too_long_to_be_an_agent_is_not_remembered() -> None:
    """Who is sound is found out once; what others make up must not fill the memory by that."""
    known = agent._is_sound.cache_info().currsize
    for odd in (AgentId("b" * 100_000 + "@lab", AgentId.named("bob@lab").pubkey), AgentId("bob@lab", "1" * 100_000)):
        with refused("bad_agent"):
            agent.check_agent(odd)
    assert agent._is_sound.cache_info().currsize == known


async def test_an_agent_without_a_key_is_whoever_has_the_label(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 25: where peers are enrolled, the one that was enrolled under it."""
    await alice.send_task(Task(id=uid(1), recipient=AgentId("bob@lab"), intent_text="work"))
    assert (await take(bob)).task.recipient == bob.agent
    with refused("bad_agent"):
        await alice.send_task(Task(recipient=AgentId("bob lab"), intent_text="work"))
    with refused("bad_agent"):
        await alice.send_task(Task(recipient="bob@lab", intent_text="work"))  # type: ignore[arg-type]  # that is the case


def test_a_label_without_a_host_is_the_same_word_with_a_key_and_without() -> None:
    key = AgentId.named("zoe@lab").pubkey
    assert AgentId("bob", key).display == AgentId("bob").display == AgentId.named("bob").display == "bob@local"
    read = msgspec.json.decode(b'{"display":"bob","pubkey":"%b"}' % key.encode(), type=AgentId)
    assert (read.display, read.pubkey) == ("bob@local", key)


async def test_nobody_sends_in_the_name_of_another(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 5: the sender is the caller."""
    with refused("sender_mismatch"):
        await alice.send_task(plain(bob, sender=bob.agent))
    with refused("not_permitted"):
        alice.of("bob@lab")


async def test_the_program_that_owns_the_store_names_the_sender(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, in_process: None
) -> None:
    """Contract 5: it is nobody itself. (Whoever comes in through a door is somebody: contract 25.)"""
    with refused("malformed"):
        await box.send_task(plain(bob))
    await box.send_task(plain(bob, sender=alice.agent))
    assert (await take(bob)).task.sender == alice.agent


def test_agents_are_compared_by_their_key_alone() -> None:
    """Contract 25: equal and unequal are each other's opposite, whatever the label says."""
    one = AgentId.named("alice@lab")
    other = AgentId("alicia@lab", one.pubkey)
    assert one == other
    assert (one != other) is False
    assert one != AgentId.named("bob@lab")
