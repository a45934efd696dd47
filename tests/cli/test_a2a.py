"""Tasks from the command line, each command for a person and for a program."""

from __future__ import annotations

import json
import signal
import uuid

from tests.cli.conftest import Served
from tests.cli.support import Client

MISSING = "00000000-0000-7000-8000-000000000000"


def leased(bob: Client, covenant: Client, intent: str, *options: str) -> tuple[str, str]:
    """A task of the operator's that bob holds, and its lease."""
    sent = covenant.json("a2a", "send", "bob", intent, *options)["task_id"]
    got = bob.json("a2a", "next")
    assert got["task"]["id"] == sent
    return sent, got["lease_id"]


def test_a_task_goes_there_and_its_result_comes_back(covenant: Client, bob: Client) -> None:
    said = covenant.text("a2a", "send", "bob", "draft the brief")
    task_id = said.split()[1]
    assert said == f"sent {task_id}\n"

    got = bob.text("a2a", "next", "--wait", "20")
    assert "draft the brief" in got and task_id in got
    lease_id = next(line.split()[1] for line in got.splitlines() if line.startswith("lease"))
    assert f"a2a post {task_id} --lease-id {lease_id} --text TEXT" in got

    assert f"go on with {task_id}" in bob.text("a2a", "heartbeat", lease_id)
    assert bob.json("a2a", "heartbeat", lease_id)["attempt"] == 1
    assert "posted partial result 1" in bob.text("a2a", "post", task_id, "--lease-id", lease_id, "--partial", "half")
    posted = bob.json("a2a", "post", task_id, "--lease-id", lease_id, "--text", "all of it")
    assert posted["kind"] == "a2a_result_posted" and posted["task_id"] == task_id

    assert covenant.json("a2a", "results", "--task", task_id)["result"]["content"] == [
        {"type": "text", "text": "all of it"}
    ]
    assert "half" in covenant.text("a2a", "results", "--next", "--for", "operator")
    drained = covenant.json("a2a", "results", "--next", "--for", "operator", "--wait", "20")
    assert drained["kind"] == "a2a_result_opt" and drained["result"]["task_id"] == task_id
    assert covenant.text("a2a", "results", "--next", "--for", "operator") == "no result waits\n"
    assert task_id in covenant.text("a2a", "results", "--recent", "5")
    assert task_id in [one["task_id"] for one in covenant.json("a2a", "results")["results"]]

    shown = covenant.text("a2a", "show", task_id)
    assert "resolved, answered" in shown and "all of it" in shown and "operator → bob" in shown
    assert covenant.json("a2a", "show", task_id)["entry"]["state"] == "resolved"


def test_what_is_said_of_a_task_is_sent(covenant: Client, bob: Client) -> None:
    task_id, parent = str(uuid.uuid4()), str(uuid.uuid4())
    options = ("--id", task_id, "--kind", "brief", "--key", "brief-42", "--deadline-in", "5m", "--parent", parent)
    sent = covenant.json("a2a", "send", "bob", "draft", *options)
    assert sent == {"kind": "a2a_task_queued", "task_id": task_id, "generation": 1}
    assert "it was there already" in covenant.text("a2a", "send", "bob", "draft", *options)

    got = bob.json("a2a", "next")
    task = got["task"]
    assert (task["task_kind"], task["parent"]) == ("brief", parent)
    assert task["idempotency"] == {"duplicate_safety": "idempotent", "key": "brief-42"}
    assert task["deadline_ms"] > 1_700_000_000_000

    blocks = json.dumps([{"type": "json", "value": {"pages": 3}}])
    bob("a2a", "post", task_id, "--lease-id", got["lease_id"], "--file", "-", stdin=blocks)
    again = covenant.json("a2a", "send", "bob", "draft", "--kind", "brief", "--key", "brief-42", "--wait")
    assert again["replayed"] and again["result"]["content"] == [{"type": "json", "value": {"pages": 3}}]
    assert '"pages": 3' in covenant.text(
        "a2a", "send", "bob", "draft", "--kind", "brief", "--key", "brief-42", "--wait"
    )

    drawn = covenant.text("a2a", "tree", parent)
    assert drawn.splitlines()[0] == f"{parent}  (no task here)"
    assert drawn.splitlines()[1].startswith(f"└─ {task_id}  answered  bob")
    assert covenant.json("a2a", "tree", parent)["size"] == 2

    cached = covenant.json("a2a", "cache", "list")["entries"][0]
    assert "brief-42" in covenant.text("a2a", "cache", "list") and cached["cache_key"]["key"] == "brief-42"
    assert cached["id"] in covenant.text("a2a", "cache", "forget", cached["id"], "--reason", "outdated")
    assert covenant.json("a2a", "cache", "list") == {"kind": "a2a_cache", "entries": []}


def test_a_wait_without_an_ok_exits_with_1(covenant: Client, bob: Client) -> None:
    sent = covenant("a2a", "send", "bob", "nobody works", "--wait", "0.1", "--json", code=1).json
    assert sent["result"] is None
    got = bob.json("a2a", "next")
    said = bob.text("a2a", "post", got["task"]["id"], "--lease-id", got["lease_id"], "--error", "no paper")
    assert said == f"posted the result of {got['task']['id']}\n"
    assert "no paper" in covenant.text("a2a", "results", "--task", got["task"]["id"])


def test_who_waits_is_told_what_happens(covenant: Client, bob: Client) -> None:
    task_id, lease_id = leased(bob, covenant, "take your time")
    with covenant.running("a2a", "watch", task_id) as watching, covenant.running("a2a", "watch", task_id) as other:
        assert "in flight" in watching.read_until("generation 2")
        other.read_until("generation 2")
        other.signal(signal.SIGINT)
        assert other.rest().code == 130

        assert "asked the holder" in covenant.text("a2a", "cancel", task_id, "--graceful", "--reason", "too dear")
        assert "cancel asked for" in watching.read_until("generation 2")
        assert "stop: " in bob.text("a2a", "heartbeat", lease_id)
        assert covenant.json("a2a", "cancel", task_id, "--cascade")["state"] == "result_pending"
        ended = watching.rest()
        assert ended.code == 0 and "canceled" in ended.out
    assert covenant.json("a2a", "watch", task_id)["entry"]["outcome"] == "canceled"


def test_a_task_is_given_back(covenant: Client, bob: Client) -> None:
    task_id, lease_id = leased(bob, covenant, "not mine")
    assert bob.json("a2a", "release", lease_id, "--reason", "not mine")["task_id"] == task_id
    again = covenant.json("a2a", "next", "--for", "bob")
    assert (again["task"]["id"], again["attempt"]) == (task_id, 2)
    assert "gave back" in covenant.text("a2a", "release", again["lease_id"], "--reason", "later", "--delay", "1h")
    assert bob.text("a2a", "next") == "no task waits\n"
    assert "not before" in covenant.text("a2a", "show", task_id)
    story = covenant.text("why", task_id)
    assert "waits for its time: It is not to be handed out before" in story and "in 59 min" in story


def test_status_leads_with_what_is_stuck(covenant: Client, served: Served) -> None:
    stale = served.stale
    said = covenant.text("a2a", "status", "--state", "in_flight", "--min-lease-age-ms", "300000")
    assert said.splitlines()[0] == "0 queued, 3 in flight, 3 stale leases, 0 results pending"
    assert f"a2a requeue {stale.safe} --lease-id" in said and "--duplicate-risk idempotent" in said
    assert "worker@lab has given no sign of life for 10 min" in said

    found = covenant.json("a2a", "status", "-n", "1", "--state", "in-flight", "--min-lease-age-ms", "300000")
    assert list(found) == [
        "kind",
        "limit",
        "min_lease_age_ms",
        "deadline_within_ms",
        "state_filter",
        "tasks",
        "results",
        "cursor",
    ]
    assert found["kind"] == "a2a_status"
    assert (found["limit"], found["min_lease_age_ms"], found["state_filter"]) == (1, 300000, "in_flight")
    rest = covenant.json("a2a", "status", "--state", "in_flight", "--cursor", found["cursor"])
    assert {entry["task"]["id"] for entry in (*found["tasks"], *rest["tasks"])} >= set(stale)


def test_a_stuck_lease_is_repaired(covenant: Client, bob: Client, served: Served) -> None:
    stale = served.stale
    story = covenant.text("why", stale.unsafe)
    assert "worker@lab holds attempt 1 (last sign of life 10 min ago)" in story
    assert f"to move it: covenant --home {served.home} a2a requeue {stale.unsafe}" in story
    told = covenant.json("why", stale.unsafe)
    assert (told["kind"], told["reason"], told["rows"][0]["kind"]) == ("a2a_story", "held", "sent")

    preview = covenant.text("a2a", "retry-stale", "--max-requeues", "5")
    assert "would requeue 2, left alone" in preview and "missing_idempotency" in preview
    assert "nothing was changed; to do it:" in preview
    report = covenant.json("a2a", "retry-stale", "--enable")
    assert report["kind"] == "a2a_auto_retry"
    assert [one["task_id"] for one in report["report"]["requeued"]] == [stale.safe]

    again = ("--reason", "the worker is gone", "--duplicate-risk")
    assert "queued again after attempt 1" in covenant.text("a2a", "requeue", stale.spare, *again, "idempotent")
    told = covenant.text("a2a", "force-error", stale.unsafe, "--reason", "in doubt", "--message", "see the bank")
    assert "ended with an error" in told and "see the bank" in told

    task_id, lease_id = leased(bob, covenant, "and stuck again")
    guarded = ("--lease-id", str(uuid.uuid4()))
    assert covenant.refused("a2a", "requeue", task_id, *again, "operator-accepted", *guarded) == "lease_mismatch"
    outcome = covenant.json("a2a", "requeue", task_id, *again, "operator-accepted", "--lease-id", lease_id)["outcome"]
    assert (outcome["action"], outcome["state"]) == ("requeued", "queued")
    assert bob.json("a2a", "next")["attempt"] == 2
    forced = covenant.json("a2a", "force-error", task_id, "--reason", "enough", "--message", "gone")["outcome"]
    assert (forced["action"], forced["state"]) == ("forced_error", "result_pending")


def test_history_is_let_go(covenant: Client) -> None:
    assert covenant.text("a2a", "compact", "--older-than", "0").startswith("let go of ")
    assert covenant.json("a2a", "compact", "--older-than", "7d") == {"kind": "a2a_compacted", "dropped": 0}
