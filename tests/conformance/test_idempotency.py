"""What a sender declares about doing a task twice, and what the mailbox makes of it."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from covenant import (
    ForceError,
    Idempotency,
    Limits,
    Mailbox,
    OpenMailbox,
    Outcome,
    RepairRequest,
    Result,
    SkipReason,
    TaskState,
    Text,
)
from covenant.mailbox import said
from covenant.model.limits import ERROR_TTL_MS
from covenant.store.clock import ManualClock

from .support import (
    DONE,
    YEAR_MS,
    Reopen,
    answer_next,
    decisions,
    drain,
    drain_many,
    finish,
    keyed,
    nothing_back_for,
    nothing_for,
    plain,
    refused,
    requeue,
    stale,
    take,
    uid,
)

pytestmark = pytest.mark.write_ahead

WAYS_TO_FAIL = ["canceled", "forced", "deadline_exceeded"]


async def end_badly(box: OpenMailbox, sender: Mailbox, worker: Mailbox, clock: ManualClock, how: str) -> None:
    """Bring the leased or queued task 1, whose deadline is in 1000 ms, to an end without an answer."""
    if how == "canceled":
        await sender.cancel_task(uid(1))
    elif how == "forced":
        await take(worker)
        await box.repair_task(RepairRequest(uid(1), ForceError("given up"), "stuck"))
    else:
        clock.advance(1001)
    answer = await drain(sender)
    assert (answer.task_id, answer.status) == (uid(1), "error")
    assert (await sender.get_task(uid(1))).outcome == Outcome(how)


# --- contract 10: the declaration ---------------------------------------------------------------------------


async def test_missing_metadata_is_unsafe(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 10: equal tasks without metadata are each done, never cached, never retried."""
    for number in (1, 2):
        await alice.send_task(plain(bob, id=uid(number)))
    assert (await answer_next(bob)).task.id == uid(1)
    assert (await take(bob)).task.id == uid(2)
    assert (await box.cached_results()).entries == []
    report = await box.retry_stale(stale())
    assert [skip.reason for skip in report.skipped] == [SkipReason.MISSING_IDEMPOTENCY]


async def test_unsafe_tasks_never_coalesce_cache_or_conflict(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 10: a key of an unsafe task is only shown."""
    unsafe = Idempotency("unsafe", "key")
    await alice.send_task(plain(bob, id=uid(1), task_kind="kind", idempotency=unsafe))
    await alice.send_task(plain(bob, "else", id=uid(2), task_kind="kind", idempotency=unsafe))
    assert [(await answer_next(bob)).task.id for _ in range(2)] == [uid(1), uid(2)]
    sent = await alice.send_task(plain(bob, id=uid(3), task_kind="kind", idempotency=unsafe))
    assert (sent.replayed, sent.follows) == (False, None)
    assert (await box.cached_results()).entries == []
    assert (await take(bob)).task.id == uid(3)


async def test_an_unsafe_task_does_not_touch_the_key_of_an_idempotent_one(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 10: under a cached key an unsafe task is still done."""
    await finish(alice, bob, keyed(bob, id=uid(1)))
    sent = await alice.send_task(plain(bob, id=uid(2), idempotency=Idempotency("unsafe", "key")))
    assert not sent.replayed
    assert (await take(bob)).task.id == uid(2)


@pytest.mark.parametrize("safety", ["unsafe", "idempotent"])
@pytest.mark.parametrize("key", ["", " ", "\t\n", "\u00a0\u2003"], ids=["empty", "blank", "controls", "unicode"])
async def test_a_blank_key_is_rejected(alice: Mailbox, bob: Mailbox, safety: str, key: str) -> None:
    """Contract 10: a key says something, in either class."""
    with refused("blank_text"):
        await alice.send_task(plain(bob, idempotency=Idempotency(safety, key)))  # type: ignore[arg-type]
    assert await alice.recent_tasks() == []
    assert await nothing_for(bob)


async def test_class_and_key_are_shown_everywhere(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 10: whoever sees the task sees what it declares."""
    declared = Idempotency("idempotent", "key")
    await alice.send_task(keyed(bob, id=uid(1)))
    assert (await take(bob)).task.idempotency == declared
    assert (await bob.get_task(uid(1))).task.idempotency == declared
    assert (await box.recent_tasks())[0].idempotency == declared
    assert (await box.task_queue()).tasks[0].task.idempotency == declared
    tree = await box.task_tree(uid(1))
    assert tree.root.entry is not None
    assert tree.root.entry.task.idempotency == declared


# --- contract 11: the cache ---------------------------------------------------------------------------------


async def test_a_cached_result_is_replayed_at_once(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 11: a hit is answered under its own id, never leased, and says so."""
    await finish(alice, bob, keyed(bob, id=uid(1)))
    sent = await alice.send_task(keyed(bob, id=uid(2)))
    assert (sent.replayed, sent.duplicate, sent.follows) == (True, False, None)
    assert await nothing_for(bob)
    answer = await drain(alice)
    assert (answer.task_id, answer.status, answer.replayed, answer.attempt) == (uid(2), "ok", True, 0)
    assert answer.content == DONE
    entry = await alice.get_task(uid(2))
    assert (entry.replayed, entry.outcome, entry.generation) == (True, Outcome.ANSWERED, sent.generation)
    assert not (await alice.get_task(uid(1))).replayed


async def test_what_was_said_with_a_result_is_said_to_followers_and_replays_too(
    alice: Mailbox, bob: Mailbox, reopen: Reopen
) -> None:
    """Contract 11: a message may be the whole answer. It belongs to the task that it is the answer to."""
    await alice.send_task(keyed(bob, id=uid(1)))
    await alice.send_task(keyed(bob, id=uid(2)))
    delivery = await take(bob)
    message = structs.replace(said("forty-two"), task_id=uid(1), context_id="talk")
    await bob.send_result(structs.replace(Result.ok(delivery), message=message))
    answers = await drain_many(alice, 2)
    assert [answer.result.message for answer in answers] == [
        message,
        structs.replace(message, task_id=None, context_id=None),
    ]
    alice = (await reopen()).of("alice@lab")
    assert (await alice.send_task(keyed(bob, id=uid(3)))).replayed
    assert (await drain(alice)).result == Result(uid(3), "ok", message=answers[1].result.message)


async def test_a_replay_sent_again_is_the_same_replay(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 11: a hit that is sent twice under one id is answered once."""
    await finish(alice, bob, keyed(bob, id=uid(1)))
    first = await alice.send_task(keyed(bob, id=uid(2)))
    again = await alice.send_task(keyed(bob, id=uid(2)))
    assert (again.duplicate, again.replayed, again.generation) == (True, True, first.generation)
    assert (await drain(alice)).task_id == uid(2)
    assert await nothing_back_for(alice)


async def test_a_replayed_task_cannot_be_answered(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 11: nobody held it, so nobody answers it."""
    await finish(alice, bob, keyed(bob, id=uid(1)))
    await alice.send_task(keyed(bob, id=uid(2)))
    with refused("task_terminal"):
        await bob.send_result(Result(uid(2), "ok", (Text("else"),)))
    assert (await drain(alice)).content == DONE


async def test_an_ok_result_is_cached_for_good(alice: Mailbox, bob: Mailbox, clock: ManualClock) -> None:
    """Contract 11: `ok` has no time limit."""
    await finish(alice, bob, keyed(bob))
    clock.advance(YEAR_MS)
    assert (await alice.send_task(keyed(bob))).replayed


@pytest.mark.parametrize(
    ("limits", "ttl_ms"), [(Limits(), ERROR_TTL_MS), (Limits(error_ttl_ms=500), 500)], ids=["default", "set"]
)
async def test_an_error_is_cached_for_a_short_time(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock, ttl_ms: int
) -> None:
    """Contract 11: an error is replayed within its TTL, and then the work is done again."""
    await alice.send_task(keyed(bob))
    await answer_next(bob, "error")
    await drain(alice)
    clock.advance(ttl_ms - 1)
    assert (await alice.send_task(keyed(bob))).replayed
    answer = await drain(alice)
    assert (answer.status, answer.error_message, answer.replayed) == ("error", "broken", True)
    clock.advance(2)
    assert (await box.cached_results()).entries == []
    assert not (await alice.send_task(keyed(bob, id=uid(3)))).replayed
    assert (await answer_next(bob)).task.id == uid(3)
    assert (await drain(alice)).status == "ok"
    assert (await alice.send_task(keyed(bob))).replayed


async def test_a_replay_does_not_prolong_an_error(alice: Mailbox, bob: Mailbox, clock: ManualClock) -> None:
    """Contract 11: the TTL counts from the result, not from its last reader."""
    await alice.send_task(keyed(bob))
    await answer_next(bob, "error")
    for _ in range(2):
        clock.advance(ERROR_TTL_MS // 2 - 1)
        assert (await alice.send_task(keyed(bob))).replayed
    clock.advance(3)
    assert not (await alice.send_task(keyed(bob))).replayed


@pytest.mark.parametrize("how", WAYS_TO_FAIL)
async def test_an_end_without_an_answer_is_never_cached(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock, how: str
) -> None:
    """Contract 11: forced, canceled and deadline errors say nothing about the work; it is done anew."""
    await alice.send_task(keyed(bob, id=uid(1), deadline_ms=clock.now_ms() + 1000))
    await end_badly(box, alice, bob, clock, how)
    assert (await box.cached_results()).entries == []
    sent = await alice.send_task(keyed(bob, "key", "work", id=uid(2)))
    assert (sent.replayed, sent.follows) == (False, None)
    assert (await take(bob)).task.id == uid(2)


@pytest.mark.parametrize("how", WAYS_TO_FAIL)
async def test_a_key_is_free_for_other_content_after_a_bad_end(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock, how: str
) -> None:
    """Contract 11: a key that holds neither work nor result conflicts with nothing."""
    await alice.send_task(keyed(bob, id=uid(1), task_kind="kind", deadline_ms=clock.now_ms() + 1000))
    await end_badly(box, alice, bob, clock, how)
    await alice.send_task(keyed(bob, intent="else", id=uid(2), task_kind="kind"))
    assert (await take(bob)).task.id == uid(2)


@pytest.mark.parametrize("cached", [False, True], ids=["open", "cached"])
async def test_the_same_key_with_other_content_is_a_conflict(alice: Mailbox, bob: Mailbox, cached: bool) -> None:
    """Contract 11: never a silent replay of something else, and nothing of the refused task is kept."""
    await alice.send_task(keyed(bob, id=uid(1), task_kind="kind"))
    if cached:
        await answer_next(bob)
        await drain(alice)
    for other in (
        keyed(bob, intent="else", id=uid(2), task_kind="kind"),
        keyed(bob, id=uid(2), task_kind="kind", content=(Text("more"),)),
    ):
        with refused("idempotency_conflict"):
            await alice.send_task(other)
    with refused("unknown_task"):
        await alice.get_task(uid(2))
    assert await nothing_back_for(alice)
    assert len(await alice.recent_tasks()) == 1
    same = await alice.send_task(keyed(bob, id=uid(3), task_kind="kind"))
    assert (same.replayed, same.follows) == (cached, None if cached else uid(1))


async def test_the_cache_key_is_sender_recipient_kind_and_key(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 11: any of the four apart, and it is other work."""
    await finish(alice, bob, keyed(bob, "key", task_kind="kind"))
    others = [
        (carol, keyed(bob, "key", task_kind="kind")),
        (alice, keyed(carol, "key", task_kind="kind")),
        (alice, keyed(bob, "key", task_kind="another")),
        (alice, keyed(bob, "another", task_kind="kind")),
    ]
    for sender, task in others:
        sent = await sender.send_task(task)
        assert (sent.replayed, sent.follows) == (False, None)
    assert (await alice.send_task(keyed(bob, "key", task_kind="kind"))).replayed


async def test_without_a_kind_the_intent_scopes_the_key(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 11: kind is the typed field; absent, the intent text."""
    await finish(alice, bob, keyed(bob, "key", "one"))
    assert not (await alice.send_task(keyed(bob, "key", "two"))).replayed
    assert (await alice.send_task(keyed(bob, "key", "one"))).replayed


async def test_parts_of_a_cache_key_do_not_run_together(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 11: kind and key are apart, whatever they contain."""
    await finish(alice, bob, keyed(bob, "b:c", task_kind="a"))
    sent = await alice.send_task(keyed(bob, "c", task_kind="a:b"))
    assert (sent.replayed, sent.follows) == (False, None)


async def test_deadline_and_parent_do_not_keep_tasks_apart(alice: Mailbox, bob: Mailbox, clock: ManualClock) -> None:
    """Contract 11: the same work for another parent, or with another deadline, is the same work."""
    await finish(alice, bob, keyed(bob, parent=uid(7)))
    assert (await alice.send_task(keyed(bob, parent=uid(8), deadline_ms=clock.now_ms() + 1))).replayed


async def test_the_cache_survives_a_restart(alice: Mailbox, bob: Mailbox, clock: ManualClock, reopen: Reopen) -> None:
    """Contract 11: entries, their TTL and their conflicts are there afterwards."""
    await finish(alice, bob, keyed(bob, "good", task_kind="kind"))
    await alice.send_task(keyed(bob, "bad"))
    await answer_next(bob, "error")
    await drain(alice)
    clock.advance(ERROR_TTL_MS - 10)
    box = await reopen()
    alice, bob = box.of("alice@lab"), box.of("bob@lab")
    assert (await alice.send_task(keyed(bob, "good", task_kind="kind"))).replayed
    assert (await alice.send_task(keyed(bob, "bad"))).replayed
    with refused("idempotency_conflict"):
        await alice.send_task(keyed(bob, "good", "else", task_kind="kind"))
    clock.advance(11)
    assert not (await alice.send_task(keyed(bob, "bad"))).replayed
    assert (await drain(alice)).content == DONE


async def test_an_operator_lists_and_forgets_cached_results(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 11: listed with what it stands for; forgotten with a reason, in the audit, and the work is done anew."""
    await finish(alice, bob, keyed(bob, id=uid(1), task_kind="kind"))
    (entry,) = (await box.cached_results()).entries
    assert (entry.source_task_id, entry.cached_ms, entry.expires_ms) == (uid(1), clock.now_ms(), None)
    assert (entry.cache_key.kind, entry.cache_key.key) == ("kind", "key")
    assert (entry.cache_key.sender, entry.cache_key.recipient) == (alice.agent.pubkey, bob.agent.pubkey)
    assert entry.result.content == DONE
    with refused("blank_text"):
        await box.forget_cached(entry.id, reason=" ")
    await box.forget_cached(entry.id, reason="it was wrong")
    row = (await decisions(box))[-1]
    assert (row.kind, row.action, row.task_id, row.reason) == ("cache", "forget", uid(1), "it was wrong")
    assert (await box.cached_results()).entries == []
    with refused("unknown_task"):
        await box.forget_cached(entry.id, reason="again")
    assert not (await alice.send_task(keyed(bob, task_kind="kind"))).replayed


async def test_cached_results_are_listed_to_their_parties_page_by_page(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, carol: Mailbox
) -> None:
    """Contract 11: complete, without repeats, and hidden from others."""
    for number in range(7):
        await finish(alice, bob, keyed(bob, str(number)))
    keys: list[str] = []
    cursor = None
    while True:
        page = await box.cached_results(3, cursor=cursor)
        keys += [entry.cache_key.key for entry in page.entries]
        cursor = page.cursor
        if cursor is None:
            break
    assert keys == [str(number) for number in range(7)]
    assert len((await bob.cached_results()).entries) == 7
    assert (await carol.cached_results()).entries == []


async def test_a_peer_cannot_forget_cached_results(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, carol: Mailbox
) -> None:
    """Contract 11: only the operator forgets, and who is no party does not learn that there is an entry."""
    await finish(alice, bob, keyed(bob))
    (entry,) = (await box.cached_results()).entries
    with refused("not_permitted"):
        await alice.forget_cached(entry.id, reason="mine")
    with refused("unknown_task"):
        await carol.forget_cached(entry.id, reason="not mine")
    assert (await alice.send_task(keyed(bob))).replayed


# --- contract 11: followers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("leased", [False, True], ids=["queued", "in_flight"])
async def test_a_second_send_follows_the_first(alice: Mailbox, bob: Mailbox, leased: bool) -> None:
    """Contract 11: it stays submitted under its own id, is not delivered, and gets the leader's result."""
    await alice.send_task(keyed(bob, id=uid(1)))
    leader = await take(bob) if leased else None
    sent = await alice.send_task(keyed(bob, id=uid(2)))
    assert (sent.task_id, sent.generation, sent.follows, sent.replayed) == (uid(2), 1, uid(1), False)
    leader = leader or await take(bob)
    assert await nothing_for(bob)
    entry = await alice.get_task(uid(2))
    assert (entry.state, entry.attempt, entry.generation) == (TaskState.QUEUED, 0, 1)
    await bob.send_result(Result.ok(leader, DONE))
    one, two = await drain_many(alice, 2)
    assert (one.task_id, one.replayed, one.content) == (uid(1), False, DONE)
    assert (two.task_id, two.replayed, two.content) == (uid(2), True, DONE)
    assert await nothing_for(bob)


async def test_a_follower_shows_whom_it_follows(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 11: by the id of its leader, in its status and when it is sent again."""
    await alice.send_task(keyed(bob, id=uid(1)))
    first = await alice.send_task(keyed(bob, id=uid(2)))
    again = await alice.send_task(keyed(bob, id=uid(2)))
    assert (first.follows, again.follows) == (uid(1), uid(1))
    assert (await alice.get_task(uid(2))).follows == uid(1)
    assert (await alice.get_task(uid(1))).follows is None


async def test_sends_of_one_key_at_once_are_done_once(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 11: of many at once one leads, and all are answered."""
    sent = await asyncio.gather(*(alice.send_task(keyed(bob)) for _ in range(8)))
    assert [reply.follows is None for reply in sent].count(True) == 1
    await answer_next(bob)
    assert await nothing_for(bob)
    answers = await drain_many(alice, 8)
    assert {answer.task_id for answer in answers} == {reply.task_id for reply in sent}


async def test_many_followers_are_all_answered(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 11: more followers than one step takes get the leader's result, each once, oldest first."""
    await alice.send_tasks([keyed(bob, id=uid(number)) for number in range(251)])
    await answer_next(bob)
    answers = await drain_many(alice, 251)
    assert [answer.task_id for answer in answers] == [uid(number) for number in range(251)]
    assert {answer.content for answer in answers} == {DONE}
    assert await nothing_back_for(alice)
    assert await nothing_for(bob)


async def test_followers_left_at_a_restart_are_answered(alice: Mailbox, bob: Mailbox, reopen: Reopen) -> None:
    """Contract 11: a result that had not reached all followers reaches them after the restart."""
    for start in (0, 1000, 2000):
        await alice.send_tasks([keyed(bob, id=uid(start + number)) for number in range(1000)])
    await answer_next(bob)
    box = await reopen()
    answers = await drain_many(box.of("alice@lab"), 3000)
    assert len({answer.task_id for answer in answers}) == 3000
    assert await nothing_for(box.of("bob@lab"))


async def test_followers_get_an_error_of_the_leader(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 11: an error that the holder posted is a result like any other."""
    await alice.send_tasks([keyed(bob, id=uid(1)), keyed(bob, id=uid(2))])
    await answer_next(bob, "error")
    assert [(answer.task_id, answer.error_message) for answer in await drain_many(alice, 2)] == [
        (uid(1), "broken"),
        (uid(2), "broken"),
    ]


async def test_a_leader_that_is_requeued_still_leads(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 11: another attempt of the leader is still its work."""
    await alice.send_tasks([keyed(bob, id=uid(1)), keyed(bob, id=uid(2))])
    await take(bob)
    await requeue(box, uid(1))
    delivery = await answer_next(bob)
    assert (delivery.task.id, delivery.attempt) == (uid(1), 2)
    assert {answer.task_id for answer in await drain_many(alice, 2)} == {uid(1), uid(2)}


async def test_a_canceled_follower_is_only_detached(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 11: its cancel is its own; leader and other followers go on."""
    await alice.send_tasks([keyed(bob, id=uid(number)) for number in (1, 2, 3)])
    await alice.cancel_task(uid(2))
    assert (await drain(alice)).task_id == uid(2)
    assert (await answer_next(bob)).task.id == uid(1)
    assert [(answer.task_id, answer.status) for answer in await drain_many(alice, 2)] == [
        (uid(1), "ok"),
        (uid(3), "ok"),
    ]
    assert await nothing_back_for(alice)


async def test_a_follower_whose_deadline_passes_is_only_detached(
    alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 11: its deadline is its own, also while the leader is in flight."""
    await alice.send_task(keyed(bob, id=uid(1)))
    await alice.send_task(keyed(bob, id=uid(2), deadline_ms=clock.now_ms() + 1000))
    leader = await take(bob)
    clock.advance(1001)
    expired = await drain(alice)
    assert (expired.task_id, expired.status) == (uid(2), "error")
    await bob.send_result(Result.ok(leader, DONE))
    assert (await drain(alice)).task_id == uid(1)
    assert await nothing_back_for(alice)


@pytest.mark.parametrize("how", WAYS_TO_FAIL)
async def test_the_oldest_follower_takes_over_from_a_leader_that_failed(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, clock: ManualClock, how: str
) -> None:
    """Contract 11: it becomes the task to do, and the others follow it."""
    await alice.send_task(keyed(bob, id=uid(1), deadline_ms=clock.now_ms() + 1000))
    await alice.send_tasks([keyed(bob, id=uid(2)), keyed(bob, id=uid(3))])
    await end_badly(box, alice, bob, clock, how)
    assert await nothing_back_for(alice)
    assert (await alice.send_task(keyed(bob, id=uid(4)))).follows == uid(2)
    heir = await take(bob)
    assert (heir.task.id, heir.attempt) == (uid(2), 1)
    assert await nothing_for(bob)
    await bob.send_result(Result.ok(heir, DONE))
    assert [(answer.task_id, answer.replayed) for answer in await drain_many(alice, 3)] == [
        (uid(2), False),
        (uid(3), True),
        (uid(4), True),
    ]


async def test_a_receiver_who_waits_gets_the_promoted_follower(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 11: work that a canceled leader leaves behind wakes a worker."""
    await alice.send_tasks([keyed(bob, id=uid(1)), keyed(bob, id=uid(2))])
    await take(bob)
    waiting = asyncio.create_task(take(bob))
    await asyncio.sleep(0)
    await alice.cancel_task(uid(1))
    assert (await waiting).task.id == uid(2)


async def test_a_delayed_follower_waits_for_its_time_when_it_leads(
    alice: Mailbox, bob: Mailbox, clock: ManualClock
) -> None:
    """Contract 11: what a follower asked for itself holds when it becomes the task to do."""
    await alice.send_task(keyed(bob, id=uid(1)))
    await alice.send_task(keyed(bob, id=uid(2), not_before_ms=clock.now_ms() + 1000))
    await alice.cancel_task(uid(1))
    assert await nothing_for(bob)
    clock.advance(1000)
    assert (await take(bob)).task.id == uid(2)


async def test_a_result_of_a_superseded_leader_is_not_cached(box: OpenMailbox, alice: Mailbox, bob: Mailbox) -> None:
    """Contract 11: only the result that counts is cached."""
    await alice.send_task(keyed(bob, id=uid(1)))
    old = await take(bob)
    await requeue(box, uid(1))
    with refused("lease_superseded"):
        await bob.send_result(Result.ok(old, [Text("stale")]))
    assert (await box.cached_results()).entries == []
    assert (await alice.send_task(keyed(bob))).follows == uid(1)


async def test_following_survives_a_restart(alice: Mailbox, bob: Mailbox, reopen: Reopen) -> None:
    """Contract 11: leader and follower are found again, and a canceled leader still has its heir."""
    await alice.send_tasks([keyed(bob, id=uid(number)) for number in (1, 2, 3)])
    box = await reopen()
    alice, bob = box.of("alice@lab"), box.of("bob@lab")
    await alice.cancel_task(uid(1))
    assert (await answer_next(bob)).task.id == uid(2)
    assert await nothing_for(bob)
    assert [answer.task_id for answer in await drain_many(alice, 3)] == [uid(1), uid(2), uid(3)]


async def test_a_cascade_over_followers_of_one_key_ends_them_all(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 11: children that follow one another are not promoted past their own cancel."""
    await alice.send_task(plain(bob, id=uid(100)))
    await alice.send_tasks([keyed(bob, id=uid(number), parent=uid(100)) for number in range(20)])
    await alice.cancel_task(uid(100), cascade=True)
    answers = await drain_many(alice, 21)
    assert len({answer.task_id for answer in answers}) == 21
    assert await nothing_for(bob)
