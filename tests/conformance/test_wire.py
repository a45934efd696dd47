"""The words of the wire, and what is not let in."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from covenant import (
    AgentId,
    Content,
    ForceError,
    Idempotency,
    Json,
    Limits,
    Mailbox,
    OpenMailbox,
    Outcome,
    RepairRequest,
    Requeue,
    Result,
    Task,
    TaskState,
    Text,
)
from covenant.model.repair import RetryPolicy

from .support import DONE, drain, keyed, nothing_back_for, nothing_for, plain, refused, take, uid

pytestmark = pytest.mark.rules_only


def encoded(value: object) -> Any:
    return json.loads(msgspec.json.encode(value))


async def test_a_task_has_the_field_names_of_the_protocol(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 10: a task reads as the protocol writes it; what is absent is left out."""
    await alice.send_task(keyed(bob, id=uid(1), task_kind="kind", parent=uid(2), deadline_ms=2_000_000_000_000))
    assert encoded((await take(bob)).task) == {
        "id": uid(1),
        "sender": {"display": "alice@lab", "pubkey": alice.agent.pubkey},
        "recipient": {"display": "bob@lab", "pubkey": bob.agent.pubkey},
        "intent_text": "work",
        "task_kind": "kind",
        "parent": uid(2),
        "deadline_ms": 2_000_000_000_000,
        "idempotency": {"duplicate_safety": "idempotent", "key": "key"},
    }


async def test_a_result_has_the_field_names_of_the_protocol(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 3: a result reads as the protocol writes it."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    await bob.send_result(Result.error(delivery, "broken", [Text("a"), Json({"b": 1})]))
    assert encoded((await drain(alice)).result) == {
        "task_id": uid(1),
        "status": "error",
        "content": [{"type": "text", "text": "a"}, {"type": "json", "value": {"b": 1}}],
        "error_message": "broken",
        "lease_id": delivery.lease_id,
    }


async def test_a_result_without_content_has_an_empty_list() -> None:
    """Contract 3: `content` is a list in the protocol, never absent."""
    assert encoded(Result(uid(1), "ok")) == {"task_id": uid(1), "status": "ok", "content": []}


async def test_states_and_outcomes_are_stable_words() -> None:
    """Contract 2: programs read them."""
    assert [state.value for state in TaskState] == ["queued", "in_flight", "parked", "result_pending", "resolved"]
    assert {outcome.value for outcome in Outcome} == {
        "answered",
        "forced",
        "canceled",
        "deadline_exceeded",
        "rejected",
    }


async def test_a_queue_entry_shows_a_lease_only_where_there_is_one(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox
) -> None:
    """Contract 2: state and attempt always; the lease while there is one."""
    await alice.send_task(plain(bob, id=uid(1)))
    queued = encoded(await box.get_task(uid(1)))
    assert (queued["state"], queued["attempt"], queued["generation"]) == ("queued", 0, 1)
    assert not {"lease_id", "leased_to", "leased_at_ms"} & queued.keys()
    await take(bob)
    held = encoded(await box.get_task(uid(1)))
    assert (held["state"], held["leased_to"]["display"]) == ("in_flight", "bob@lab")
    assert {"lease_id", "leased_at_ms"} <= held.keys()


async def test_repair_commands_are_tagged_by_their_action() -> None:
    """Contract 13: requests and outcomes read as the protocol writes them."""
    requeue = RepairRequest(uid(1), Requeue("operator_accepted", uid(2)), "why")
    assert encoded(requeue) == {
        "task_id": uid(1),
        "command": {"action": "requeue", "duplicate_risk": "operator_accepted", "lease_id": uid(2)},
        "reason": "why",
    }
    force = RepairRequest(uid(1), ForceError("given up"), "why")
    assert encoded(force)["command"] == {"action": "force_error", "message": "given up"}
    for request in (requeue, force):
        assert msgspec.json.decode(msgspec.json.encode(request), type=RepairRequest) == request


async def test_a_policy_is_complete_on_the_wire_and_may_be_empty_in_a_request() -> None:
    """Contract 12: five bounds, each with its default."""
    assert encoded(RetryPolicy()) == {
        "enabled": False,
        "min_lease_age_ms": 300_000,
        "max_attempts": 3,
        "max_requeues": 1,
        "scan_limit": 100,
    }
    assert msgspec.json.decode(b"{}", type=RetryPolicy) == RetryPolicy()


async def test_unknown_members_are_ignored(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 1: a newer peer may say more than this one understands."""
    agent = {"display": "bob@lab", "pubkey": bob.agent.pubkey, "future": 1}
    body = {
        "id": uid(1),
        "recipient": agent,
        "intent_text": "work",
        "priority": 5,
        "idempotency": {"duplicate_safety": "idempotent", "key": "key", "future": True},
        "content": [{"type": "text", "text": "a"}],
    }
    await alice.send_task(msgspec.json.decode(json.dumps(body), type=Task))
    delivery = await take(bob)
    assert (delivery.task.idempotency, delivery.task.content) == (Idempotency("idempotent", "key"), (Text("a"),))
    result = {"task_id": uid(1), "status": "ok", "content": [{"type": "text", "text": "done"}], "future": {}}
    await bob.send_result(msgspec.json.decode(json.dumps(result), type=Result))
    assert (await drain(alice)).content == DONE


@pytest.mark.parametrize(
    "body",
    [
        {"intent_text": "work"},
        {"recipient": {"pubkey": "x"}, "intent_text": "work"},
        {"recipient": {"display": "bob@lab", "pubkey": 5}, "intent_text": "work"},
        {"recipient": {"display": "bob@lab", "pubkey": "x"}, "intent_text": 5},
        {"recipient": {"display": "bob@lab", "pubkey": "x"}, "intent_text": "x", "content": [{"type": "odd"}]},
        {
            "recipient": {"display": "bob@lab", "pubkey": "x"},
            "intent_text": "x",
            "idempotency": {"duplicate_safety": "IDEMPOTENT", "key": "k"},
        },
    ],
    ids=["no recipient", "no label", "odd key", "odd intent", "odd content", "odd class"],
)
async def test_a_task_of_another_shape_does_not_decode(body: dict[str, Any]) -> None:
    """Contract 10: missing members, wrong types and unknown words are no task."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(json.dumps(body), type=Task)


WRONG_TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "blank intent": ("blank_text", {"intent_text": " \n"}),
    "empty intent": ("blank_text", {"intent_text": ""}),
    "odd intent": ("malformed", {"intent_text": 5}),
    "broken unicode": ("malformed", {"intent_text": "\ud800"}),
    "long intent": ("too_large", {"intent_text": "x" * 1001}),
    "long in bytes": ("too_large", {"intent_text": "é" * 501}),
    "blank kind": ("blank_text", {"task_kind": "  "}),
    "odd kind": ("malformed", {"task_kind": 1}),
    "long kind": ("too_large", {"task_kind": "x" * 101}),
    "bad id": ("bad_id", {"id": "one"}),
    "odd id": ("bad_id", {"id": 5}),
    "braced id": ("bad_id", {"id": "{" + uid(1) + "}"}),
    "id with a newline": ("bad_id", {"id": uid(1) + "\n"}),
    "bad parent": ("bad_id", {"parent": "root"}),
    "bad recipient": ("bad_agent", {"recipient": "bob@lab"}),
    "short key": ("bad_agent", {"recipient": AgentId("bob@lab", "abc")}),
    "no name": ("bad_agent", {"recipient": AgentId("@lab", AgentId.named("bob@lab").pubkey)}),
    "two hosts": ("bad_agent", {"recipient": AgentId("b@o@b", AgentId.named("bob@lab").pubkey)}),
    "odd sender": ("bad_agent", {"sender": "alice@lab"}),
    "negative deadline": ("malformed", {"deadline_ms": -1}),
    "odd deadline": ("malformed", {"deadline_ms": "soon"}),
    "true deadline": ("malformed", {"deadline_ms": True}),
    "fractional deadline": ("malformed", {"deadline_ms": 1.5}),
    "endless deadline": ("malformed", {"deadline_ms": 2**60}),
    "odd delay": ("malformed", {"not_before_ms": -5}),
    "odd idempotency": ("malformed", {"idempotency": {"key": "k"}}),
    "odd class": ("malformed", {"idempotency": Idempotency("maybe", "k")}),  # type: ignore[arg-type]
    "odd idempotency key": ("malformed", {"idempotency": Idempotency("unsafe", 5)}),  # type: ignore[arg-type]
    "long idempotency key": ("too_large", {"idempotency": Idempotency("unsafe", "k" * 101)}),
    "text as content": ("malformed", {"content": "text"}),
    "odd block": ("malformed", {"content": [5]}),
    "odd text": ("malformed", {"content": [Text(5)]}),  # type: ignore[arg-type]
    "odd value": ("malformed", {"content": [Json(object())]}),
    "no number": ("malformed", {"content": [Json(float("nan"))]}),
    "infinite": ("malformed", {"content": [Json([float("inf")])]}),
    "many blocks": ("too_large", {"content": [Text("x")] * 11}),
    "long text": ("too_large", {"content": [Text("x" * 2001)]}),
    "long json": ("too_large", {"content": [Json("x" * 2001)]}),
    "long together": ("too_large", {"content": [Text("x" * 1000)] * 3}),
}

SMALL = Limits(
    intent_text_bytes_max=1000,
    task_kind_bytes_max=100,
    key_bytes_max=100,
    text_bytes_max=100,
    content_blocks_max=10,
    content_bytes_max=2000,
    batch_max=10,
)


@pytest.mark.parametrize("limits", [SMALL], ids=["small"])
@pytest.mark.parametrize("case", WRONG_TASKS)
async def test_a_wrong_task_is_refused_and_not_kept(box: OpenMailbox, alice: Mailbox, bob: Mailbox, case: str) -> None:
    """Contract 10: a typed refusal with a stable code, and nothing stored."""
    code, change = WRONG_TASKS[case]
    fields: dict[str, Any] = {"id": uid(1), "recipient": bob.agent, "intent_text": "work", **change}
    with refused(code):
        await alice.send_task(Task(**fields))
    assert await box.recent_tasks() == []
    assert await nothing_for(bob)
    assert not (await alice.send_task(plain(bob, id=uid(1)))).duplicate


@pytest.mark.parametrize("limits", [SMALL], ids=["small"])
async def test_what_is_just_within_its_limits_is_accepted(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 10: a limit is the largest that is allowed."""
    await alice.send_task(
        plain(
            bob,
            "é" * 500,
            task_kind="x" * 100,
            idempotency=Idempotency("idempotent", "k" * 100),
            content=[Text("x" * 2000)],
        )
    )
    assert (await take(bob)).task.intent_text == "é" * 500


@pytest.mark.parametrize("wrong", [None, "task", {"intent_text": "work"}, Result(uid(1), "ok")], ids=repr)
async def test_what_is_no_task_is_malformed(alice: Mailbox, wrong: Any) -> None:
    """Contract 10: also from a program."""
    with refused("malformed"):
        await alice.send_task(wrong)


WRONG_RESULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "odd status": ("malformed", {"status": "done"}),
    "no status": ("malformed", {"status": None}),
    "odd message": ("malformed", {"error_message": 5}),
    "long message": ("too_large", {"error_message": "x" * 101}),
    "odd content": ("malformed", {"content": "done"}),
    "many blocks": ("too_large", {"content": [Text("x")] * 11}),
    "bad task id": ("bad_id", {"task_id": "one"}),
    "bad lease id": ("bad_id", {"lease_id": "lease"}),
    "sequence zero": ("malformed", {"status": "partial", "sequence": 0}),
    "odd sequence": ("malformed", {"status": "partial", "sequence": "1"}),
}


@pytest.mark.parametrize("limits", [SMALL], ids=["small"])
@pytest.mark.parametrize("case", WRONG_RESULTS)
async def test_a_wrong_result_is_refused_and_the_lease_stays(alice: Mailbox, bob: Mailbox, case: str) -> None:
    """Contract 3: a typed refusal with a stable code, and nothing delivered."""
    await alice.send_task(plain(bob, id=uid(1)))
    delivery = await take(bob)
    code, change = WRONG_RESULTS[case]
    fields: dict[str, Any] = {"task_id": uid(1), "status": "ok", "lease_id": delivery.lease_id, **change}
    with refused(code):
        await bob.send_result(Result(**fields))
    assert await nothing_back_for(alice)
    assert (await bob.get_task(uid(1))).generation == delivery.generation
    assert (await bob.heartbeat(delivery)).attempt == 1


@pytest.mark.parametrize("wrong", [None, "ok", {"status": "ok"}], ids=repr)
async def test_what_is_no_result_is_malformed(bob: Mailbox, wrong: Any) -> None:
    """Contract 3: also from a program."""
    with refused("malformed"):
        await bob.send_result(wrong)


async def test_a_number_keeps_all_its_digits(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 1: an integer of any size arrives as it was sent."""
    await alice.send_task(plain(bob, content=[Json([2**53 + 1, -(2**63), 2**70])]))
    assert (await take(bob)).task.content == (Json([2**53 + 1, -(2**63), 2**70]),)


@pytest.mark.parametrize("limits", [SMALL], ids=["small"])
async def test_a_batch_is_bounded(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 1: a batch over its limit is refused as a whole."""
    with refused("too_large"):
        await alice.send_tasks([plain(bob) for _ in range(11)])
    assert await alice.recent_tasks() == []
    with refused("too_large"):
        await bob.recv_tasks(11)
    for limit in (0, -1, "1"):
        with refused("malformed"):
            await bob.recv_tasks(limit, wait_ms=0)  # type: ignore[arg-type]


async def test_bad_ids_are_refused_by_every_verb(box: OpenMailbox) -> None:
    """Contract 5: an id that can be none is told apart from one that is unknown."""
    calls = (box.get_task, box.get_result, box.task_tree, box.cancel_task, box.heartbeat, box.release)
    for call in calls:
        for wrong in ("one", "", uid(1) + "0", uid(1).replace("-", ""), 5):
            with refused("bad_id"):
                await call(wrong)  # type: ignore[arg-type]


async def test_an_error_reads_as_one_object(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 5: kind, stable code, message, and what a program may want to know."""
    await alice.send_task(plain(bob, id=uid(1)))
    with refused("task_conflict") as caught:
        await alice.send_task(plain(bob, "else", id=uid(1)))
    wire = caught.value.to_wire()
    assert (wire["kind"], wire["code"], wire["task_id"]) == ("error", "task_conflict", uid(1))
    assert wire["message"]


async def test_what_was_sent_cannot_be_changed_afterwards(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 5: the mailbox keeps what it acknowledged, whatever becomes of the caller's objects."""
    value: dict[str, Any] = {"n": [1]}
    blocks: list[Content] = [Json(value), Text("a")]
    await alice.send_task(plain(bob, id=uid(1), content=blocks))
    value["n"].append(2)
    blocks.clear()
    assert (await take(bob)).task.content == (Json({"n": [1]}), Text("a"))


async def test_a_result_that_was_received_cannot_change_the_kept_one(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 8: reading again shows what was posted, whatever the first reader did to its copy."""
    await alice.send_task(plain(bob, id=uid(1)))
    await bob.send_result(Result.ok(await take(bob), [Json({"n": [1]})]))
    block = (await drain(alice)).content[0]
    assert isinstance(block, Json)
    block.value["n"].append(2)
    kept = await alice.get_result(uid(1))
    assert kept is not None
    assert kept.content == (Json({"n": [1]}),)
