"""Tasks from the command line, each command for a person and for a program."""

from __future__ import annotations

import json
import re
import signal
import uuid
from pathlib import Path

import pytest

from tests.cli.conftest import SILENT_H, Served
from tests.cli.support import Client, serving


def leased(bob: Client, covenant: Client, intent: str) -> tuple[str, str]:
    """A task of the operator's that bob holds, and its lease."""
    sent = covenant.json("a2a", "send", "bob", intent)["task_id"]
    got = bob.json("a2a", "next")
    assert got["task"]["id"] == sent
    return sent, got["lease_id"]


def test_a_task_goes_there_and_its_result_comes_back(bob: Client) -> None:
    said = bob.text("a2a", "send", "bob", "draft the brief")
    task_id = said.split()[1]
    assert said == f"sent {task_id}\n"

    got = bob.text("a2a", "next", "--wait", "20")
    assert "draft the brief" in got and task_id in got
    lease_id = next(line.split()[1] for line in got.splitlines() if line.startswith("lease"))
    assert f"a2a post {task_id} --lease-id {lease_id} --text TEXT" in got

    assert f"go on with {task_id}" in bob.text("a2a", "heartbeat", lease_id)
    assert "posted partial result 1" in bob.text("a2a", "post", task_id, "--lease-id", lease_id, "--partial", "half")
    posted = bob.json("a2a", "post", task_id, "--lease-id", lease_id, "--text", "all of it")
    assert posted["kind"] == "a2a_result_posted" and posted["task_id"] == task_id

    waiting = bob.json("why", task_id)
    assert waiting["reason"] == "waits_to_be_drained" and "bob@local to receive it" in waiting["explanation"]
    assert waiting.get("command") is None  # no look at it moves it
    assert "half" in bob.text("a2a", "results", "--next")
    drained = bob.json("a2a", "results", "--next", "--wait", "20")
    assert drained["kind"] == "a2a_result_opt" and drained["result"]["task_id"] == task_id
    assert bob.text("a2a", "results", "--next") == "no result waits\n"
    assert task_id in bob.text("a2a", "results", "--recent", "5")

    shown = bob.text("a2a", "show", task_id)
    assert "resolved, answered" in shown and "all of it" in shown and "bob → bob" in shown
    assert bob.json("a2a", "show", task_id)["entry"]["state"] == "resolved"


def test_what_is_said_of_a_task_is_sent(covenant: Client, bob: Client) -> None:
    task_id, parent = str(uuid.uuid4()), str(uuid.uuid4())
    options = ("--id", task_id, "--kind", "brief", "--key", "brief-42", "--deadline-in", "5m", "--parent", parent)
    sent = covenant.json("a2a", "send", "bob", "draft", *options)
    assert sent == {"kind": "a2a_task_queued", "task_id": task_id, "generation": 1}

    got = bob.json("a2a", "next")
    task = got["task"]
    assert (task["task_kind"], task["parent"]) == ("brief", parent)
    assert task["idempotency"] == {"duplicate_safety": "idempotent", "key": "brief-42"}
    assert task["deadline_ms"] > 1_700_000_000_000

    blocks = json.dumps([{"type": "json", "value": {"pages": 3}}])
    bob("a2a", "post", task_id, "--lease-id", got["lease_id"], "--file", "-", stdin=blocks)
    again = covenant.json("a2a", "send", "bob", "draft", "--kind", "brief", "--key", "brief-42", "--wait")
    assert again["replayed"] and again["result"]["content"] == [{"type": "json", "value": {"pages": 3}}]

    drawn = covenant.text("a2a", "tree", parent)
    assert drawn.splitlines()[0] == f"{parent}  (no task here)"
    assert drawn.splitlines()[1].startswith(f"└─ {task_id}  answered  bob")
    assert covenant.json("a2a", "tree", parent)["size"] == 2


def test_what_goes_along_with_a_task_is_sent(covenant: Client, bob: Client) -> None:
    def sent(*options: str, stdin: str | None = None) -> object:
        covenant("a2a", "send", "bob", "draft", *options, stdin=stdin)
        return bob.json("a2a", "next")["task"].get("content")

    assert sent("--data", '["Bergen", {"nights": 2}]') == [{"type": "json", "value": ["Bergen", {"nights": 2}]}]
    assert sent("--data", "Bergen") == [{"type": "json", "value": "Bergen"}]
    blocks = [{"type": "text", "text": "Bergen"}]
    assert sent("--file", "-", stdin=json.dumps(blocks)) == blocks
    both = covenant("a2a", "send", "bob", "draft", "--data", "1", "--file", "-", code=2)
    assert "give one of --data and --file" in both.err
    assert "no content blocks" in covenant("a2a", "send", "bob", "draft", "--file", "-", stdin="[1]", code=2).err


def test_blocks_from_a_file_go_along_whole(covenant: Client, bob: Client) -> None:
    """As MCP has them, with members that this program does not know."""
    block = {"type": "text", "text": "x", "_meta": {"a": 1}, "future": [2]}
    kept = covenant.json("peers", "enroll", "filer", "--grant", "a2a.respond.*")
    filer = Client(covenant.home, kept["token"])
    covenant("a2a", "send", "filer", "one", "--file", "-", stdin=json.dumps(block))
    got = filer.json("a2a", "next")
    assert got["task"]["content"] == [block]
    filer("a2a", "post", got["task"]["id"], "--lease-id", got["lease_id"], "--file", "-", stdin=json.dumps([block]))
    assert covenant.json("a2a", "results", "--task", got["task"]["id"])["result"]["content"] == [block]
    wrong = covenant("a2a", "send", "filer", "two", "--file", "-", stdin='{"type":"video"}', code=2)
    assert "holds no content blocks" in wrong.err


def test_a_wait_without_an_ok_exits_with_1(covenant: Client, bob: Client) -> None:
    sent = covenant.json("a2a", "send", "bob", "nobody works", "--wait", "0.1", code=1)
    assert sent["result"] is None
    got = bob.json("a2a", "next")
    task_id = got["task"]["id"]
    assert bob.text("a2a", "post", task_id, "--lease-id", got["lease_id"], "--error", "no paper") == (
        f"posted the result of {task_id}\n"
    )
    assert covenant.text("a2a", "results", "--task", task_id) == f"result of {task_id}: error, attempt 1\nno paper\n"


def test_a_wait_shows_the_result_of_its_own_task_and_takes_none(bob: Client) -> None:
    """Another result waits longer, and stays for whoever receives it."""
    first = bob.json("a2a", "send", "bob", "the first")["task_id"]
    lease_id = bob.json("a2a", "next")["lease_id"]
    bob("a2a", "post", first, "--lease-id", lease_id, "--text", "first answer")

    task_id = str(uuid.uuid4())
    with bob.running("a2a", "send", "bob", "the second", "--id", task_id, "--wait") as waiting:
        got = bob.json("a2a", "next", "--wait", "20")
        assert got["task"]["id"] == task_id
        bob("a2a", "post", task_id, "--lease-id", got["lease_id"], "--text", "second answer")
        said = waiting.rest()
    assert said.code == 0 and f"result of {task_id}: ok\nsecond answer\n" in said.out and "first" not in said.out
    assert "still waits to be received" in said.out
    assert [bob.json("a2a", "results", "--next")["result"]["task_id"] for _ in range(2)] == [first, task_id]
    assert "not received" in " ".join(bob.text("a2a", "send", "--help").split())


def test_who_gives_up_waiting_is_told_which_task_it_was(bob: Client) -> None:
    with bob.running("a2a", "send", "bob", "slowly", "--wait") as waiting:
        task_id = bob.json("a2a", "next", "--wait", "20")["task"]["id"]
        waiting.signal(signal.SIGINT)
        said = waiting.rest()
    assert said.code == 130 and f"a2a watch {task_id}" in said.err


def test_who_waits_is_told_what_happens(covenant: Client, bob: Client) -> None:
    task_id, lease_id = leased(bob, covenant, "take your time")
    with covenant.running("a2a", "watch", task_id) as watching, covenant.running("a2a", "watch", task_id) as other:
        assert "in flight" in watching.read_until("generation 2")
        other.read_until("generation 2")
        other.signal(signal.SIGINT)
        assert other.rest().code == 130

        assert "asked the holder" in covenant.text("a2a", "cancel", task_id, "--graceful", "--reason", "too dear")
        assert "cancel asked for" in watching.read_until("generation 2")
        assert bob.json("a2a", "heartbeat", lease_id)["cancel_reason"] == "too dear"
        assert covenant.json("a2a", "cancel", task_id, "--cascade")["state"] == "result_pending"
        ended = watching.rest()
        assert ended.code == 0 and "canceled" in ended.out
    assert covenant.json("a2a", "watch", task_id)["entry"]["outcome"] == "canceled"


def test_a_task_is_given_back(covenant: Client, bob: Client) -> None:
    task_id, lease_id = leased(bob, covenant, "not mine")
    assert bob.json("a2a", "release", lease_id, "--reason", "not mine")["task_id"] == task_id
    again = covenant.json("a2a", "next", "--for", "bob")
    assert (again["task"]["id"], again["attempt"]) == (task_id, 2)
    assert "gave back" in covenant.text("a2a", "release", again["lease_id"], "--reason", "later", "--delay", "30h")
    assert bob.text("a2a", "next") == "no task waits\n"
    story = covenant.text("why", task_id)
    assert "waits for its time: It is not to be handed out before" in story and "in 29 h" in story


def test_status_leads_with_what_is_stuck(covenant: Client, served: Served) -> None:
    said = covenant.text("a2a", "status", "--state", "in_flight", "--min-lease-age-ms", "300000", "-n", "50")
    assert re.fullmatch(r"with these filters: \d+ in flight; in all \d+ stale leases", said.splitlines()[0])
    assert served.stale.kept in said and "--duplicate-risk idempotent --reason REASON" in said
    assert "stale: no sign of life for more than 5 min." in said
    assert f"all at once: covenant --home {served.home} a2a retry-stale" in said

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
        "revoked",
    ]
    assert found["kind"] == "a2a_status"
    assert (found["limit"], found["min_lease_age_ms"], found["state_filter"]) == (1, 300000, "in_flight")
    assert len(found["tasks"]) == 1
    more = covenant.json("a2a", "status", "-n", "1", "--state", "in_flight", "--cursor", found["cursor"])
    assert more["tasks"] and more["tasks"] != found["tasks"]


def test_status_tells_of_every_stale_lease_however_far_down_it_stands(covenant: Client, served: Served) -> None:
    whole = covenant.text("a2a", "status", "--state", "in-flight", "--min-lease-age-ms", "300000", "-n", "50")
    (stale,) = re.findall(r"\d+ stale leases", whole)
    first, *rest = covenant.text("a2a", "status", "-n", "1").splitlines()
    assert first.startswith("on this page: ") and first.endswith(f"; in all {stale}")
    assert served.stale.kept in "".join(rest)
    assert any(line.endswith("a2a status --state in-flight --min-lease-age-ms 300000") for line in rest)

    queued = covenant.text("a2a", "status", "--state", "queued", "-n", "1")
    assert "stale" not in queued


def test_the_head_of_status_counts_everything_or_says_what_it_counts(home: Path) -> None:
    """No option changes the meaning of a number without changing its words."""
    with serving(home):
        covenant = Client(home)
        bob = Client(home, covenant.json("peers", "enroll", "bob", "--grant", "a2a.respond.*")["token"])

        def head(*filters: str) -> str:
            return covenant.text("a2a", "status", *filters).splitlines()[0]

        assert head() == "0 queued, 0 in flight, 0 stale leases, 0 results pending"
        for text in ("one", "two", "three"):
            covenant("a2a", "send", "bob", text)
        got = bob.json("a2a", "next")
        bob("a2a", "post", got["task"]["id"], "--lease-id", got["lease_id"], "--text", "done")
        bob("a2a", "next")
        assert head() == "1 queued, 1 in flight, 0 stale leases, 1 result pending"
        stale = "in all 0 stale leases"
        assert head("--min-lease-age-ms", "0") == (
            f"with these filters: 1 queued, 1 in flight, 1 result pending; {stale}"
        )
        assert head("--deadline-within-ms", "5") == (
            f"with these filters: 0 queued, 0 in flight, 1 result pending; {stale}"
        )
        assert head("--state", "in-flight") == f"with these filters: 1 in flight; {stale}"
        assert head("--state", "queued") == "with these filters: 1 queued"
        assert head("--state", "parked") == "with these filters: 0 parked"
        assert head("--state", "result-pending") == "with these filters: 1 result pending"
        assert head("-n", "1") == f"on this page: 0 queued, 1 in flight, 1 result pending; {stale}"
        both = head("-n", "1", "--min-lease-age-ms", "0")
        assert both == f"on this page, with these filters: 0 queued, 1 in flight, 1 result pending; {stale}"


@pytest.mark.parametrize("by_url", [False, True])
@pytest.mark.parametrize(
    ("call", "code", "why"),
    [
        (("audit", "recent", "--kind", "nosuch"), "malformed", "no row is of kind 'nosuch'; there are a2a_auto_retry"),
        (("audit", "recent", "--actor", "no body"), "bad_agent", "'no body' is no name of an agent"),
        (("audit", "recent", "--task", "no-id"), "bad_id", "task_id must be a UUID"),
        (("a2a", "status", "--state", "queued", "--min-lease-age-ms", "1"), "malformed", "what is queued has none"),
    ],
)
def test_a_filter_that_can_never_match_is_refused_with_the_reason(
    covenant: Client, served: Served, by_url: bool, call: tuple[str, ...], code: str, why: str
) -> None:
    where = ("--url", served.url, "--token", served.token) if by_url else ()
    refusal = covenant(*where, *call, "--json", code=1).json
    assert refusal["code"] == code and why in refusal["message"]


def test_a_filter_of_the_audit_is_understood_on_every_surface(covenant: Client, served: Served) -> None:
    """`asker` is `asker@local`, an id may have capital letters; what is another's is refused, not left out."""
    enrolled = covenant.json("peers", "enroll", "asker", "--grant", "a2a.send.asker")
    asker = Client(covenant.home, enrolled["token"])
    task_id = asker.json("a2a", "send", "asker", "hi")["task_id"]
    for where in ((), ("--url", served.url, "--token", served.token)):
        found = covenant(*where, "audit", "recent", "--actor", "asker", "--task", task_id.upper(), "--json").json
        assert [row["kind"] for row in found["rows"]] == ["sent"]
    assert asker.json("audit", "recent", "--actor", "asker", "--kind", "capability_check")["rows"]
    assert asker.refused("audit", "recent", "--actor", "operator") == "missing_capability"


def test_a_stuck_lease_is_repaired(covenant: Client, served: Served) -> None:
    stale = served.stale
    story = covenant.text("why", stale.unsafe)
    assert "worker@lab holds attempt 1 (last sign of life: 20" in story and f", {SILENT_H} h ago)" in story
    assert f"to move it: covenant --home {served.home} a2a requeue {stale.unsafe}" in story
    assert not re.search(r"[0-9]{12,}", re.sub(r"[0-9a-f-]{36}", "", story))  # nobody reads Unix time
    told = covenant.json("why", stale.unsafe)
    assert str(told["entry"]["heartbeat_ms"]) in told["explanation"]
    assert (told["kind"], told["reason"], told["rows"][0]["kind"]) == ("a2a_story", "held", "sent")

    preview = covenant.text("a2a", "retry-stale")
    assert "would requeue 1, left alone" in preview and "missing_idempotency" in preview
    assert "nothing was changed; to do it: covenant --home" in preview
    report = covenant.json("a2a", "retry-stale", "--enable")
    assert report["kind"] == "a2a_auto_retry"
    assert [one["task_id"] for one in report["report"]["requeued"]] == [stale.gate]

    why = ("--reason", "the worker is gone")
    again = (*why, "--duplicate-risk", "operator-accepted")
    assert "queued again after attempt 1" in covenant.text("a2a", "requeue", stale.requeue_text, *again)
    guarded = ("a2a", "requeue", stale.requeue_json, *again, "--lease-id")
    assert covenant.refused(*guarded, str(uuid.uuid4())) == "lease_mismatch"
    outcome = covenant.json("a2a", "requeue", stale.requeue_json, *again)["outcome"]
    assert (outcome["action"], outcome["state"]) == ("requeued", "queued")

    told = covenant.text("a2a", "force-error", stale.force_text, *why, "--message", "see the bank")
    assert "ended with an error" in told and "see the bank" in told
    forced = covenant.json("a2a", "force-error", stale.force_json, *why, "--message", "gone")["outcome"]
    assert (forced["action"], forced["state"]) == ("forced_error", "result_pending")


def test_what_is_kept_can_be_let_go(covenant: Client) -> None:
    listed = covenant.text("a2a", "cache", "list")
    assert "cached-1" in listed and "cached-2" in listed
    cached = [one for one in covenant.json("a2a", "cache", "list")["entries"] if "cached" in one["cache_key"]["key"]]
    assert covenant.text("a2a", "cache", "forget", cached[0]["id"], "--reason", "old") == f"forgot {cached[0]['id']}\n"
    assert covenant.json("a2a", "cache", "forget", cached[1]["id"], "--reason", "old")["entry_id"] == cached[1]["id"]
    assert covenant.text("a2a", "compact", "--older-than", "7d") == "let go of 0 tasks\n"
    assert covenant.json("a2a", "compact") == {"kind": "a2a_compacted", "dropped": 0}


def test_a_worker_asks_and_the_sender_answers(covenant: Client, bob: Client) -> None:
    task_id, lease_id = leased(bob, covenant, "paint the door")
    assert f"told the sender of {task_id}, generation 3" in bob.text("a2a", "update", lease_id, "sanding")
    bob("a2a", "artifact", lease_id, "sanded", "--name", "log")
    made = bob.json("a2a", "artifact", lease_id, "oiled", "--name", "log", "--append", "--last")
    assert made == {"kind": "a2a_moved", "task_id": task_id, "generation": 5}
    assert bob.text("a2a", "inputs", lease_id) == "nothing was said\n"
    assert "asked the sender" in bob.text("a2a", "ask", lease_id, "which colour?")

    assert "waits for input from operator" in covenant.text("a2a", "show", task_id)
    assert "needs input" in covenant.text("a2a", "status", "--state", "in_flight", "-n", "50")
    story = covenant.text("why", task_id)
    assert "waiting for input: bob@local holds attempt 1" in story and "it has asked for input." in story
    assert f"a2a say {task_id} TEXT" in story
    assert covenant.json("why", task_id)["reason"] == "waiting_for_input"

    assert covenant.refused("a2a", "say", task_id, "late", "--if-generation", "1") == "generation_mismatch"
    assert "told the holder of" in covenant.text("a2a", "say", task_id, "red\x1b")
    assert bob.text("a2a", "inputs", lease_id, "--wait", "20") == "3  red\\x1b\n"
    assert bob.json("a2a", "inputs", lease_id, "--after", "3")["inputs"] == []
    assert covenant.json("why", task_id)["reason"] == "held"

    bob("a2a", "ask", lease_id, "--auth")
    assert "it has asked for an authorisation." in covenant.text("why", task_id)
    covenant("a2a", "cancel", task_id, "--graceful", "--reason", "too dear")
    assert "stop: a cancel" in bob.text("a2a", "inputs", lease_id, "--after", "3", "--wait")
    assert bob.refused("a2a", "reply", lease_id, "hello") == "not_permitted"
    assert f"rejected {task_id}" in bob.text("a2a", "reject", lease_id, "no red left")
    assert "rejected: no red left" in covenant.text("a2a", "results", "--task", task_id)


def test_who_waits_for_an_answer_is_not_stuck(covenant: Client, served: Served) -> None:
    """However long the answer takes."""
    task_id = served.stale.asks
    said = covenant.text("a2a", "status", "--state", "in_flight", "-n", "100")
    (line,) = (line for line in said.splitlines() if line.startswith(task_id))
    assert "needs input" in line and "stale" not in line
    listed = covenant.json("a2a", "status", "--min-lease-age-ms", "300000", "--state", "in_flight", "-n", "100")
    assert task_id not in [entry["task"]["id"] for entry in listed["tasks"]]
    skipped = covenant.json("a2a", "retry-stale")["report"]["skipped"]
    assert {skip["reason"] for skip in skipped if skip["task_id"] == task_id} == {"waiting_for_input"}
