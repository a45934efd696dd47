"""The idempotency policy, sentence by sentence, against real daemons: one that is killed, and two on one PostgreSQL."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import pytest

from covenant import AgentId, Idempotency, Mailbox, Task
from covenant.store.clock import ManualClock
from tests.cli.support import Client
from tests.seeds.conftest import Pair
from tests.seeds.daemon import Json, Peer, RealDaemon, idempotent
from tests.seeds.sentences import Sentences
from tests.until import PATIENCE_S

says = Sentences("000_idempotency_policy.txt")

VARIABLES: Final = {
    "COVENANT_A2A_AUTO_RETRY_SCHEDULER": "1",
    "COVENANT_A2A_AUTO_RETRY_INTERVAL_MS": "60000",
    "COVENANT_A2A_AUTO_RETRY_MIN_LEASE_AGE_MS": "300000",
    "COVENANT_A2A_AUTO_RETRY_MAX_ATTEMPTS": "3",
    "COVENANT_A2A_AUTO_RETRY_MAX_REQUEUES": "1",
    "COVENANT_A2A_AUTO_RETRY_SCAN_LIMIT": "100",
}
EVERYTHING: Final = {"min_lease_age_ms": 0, "scan_limit": 1000, "max_requeues": 50}


# --- the daemon ------------------------------------------------------------------------------------------


class Stale(NamedTuple):
    """Tasks whose lease is older than five minutes since before the daemon began."""

    first: str  # these two may be done twice
    second: str
    exhausted: str  # and this one, but it was tried three times
    unsafe: str
    silent: str  # declares nothing
    others: list[str]  # as many more that declare nothing as one pass looks at


class House(NamedTuple):
    daemon: RealDaemon
    alice: Peer
    worker: Peer
    stale: Stale


async def _prepare(daemon: RealDaemon) -> Stale:
    clock = ManualClock(time.time_ns() // 1_000_000 - 3 * 3_600_000)
    async with Mailbox.open(f"file:{daemon.home}/data", clock=clock) as box:
        alice, worker = box.of("alice@lab"), box.of("worker@lab")
        made = {}

        async def leased(name: str, idempotency: Idempotency | None) -> str:
            task = Task(recipient=worker.agent, intent_text=name, idempotency=idempotency)
            return (await alice.send_task(task)).task_id

        made["exhausted"] = await leased("exhausted", Idempotency("idempotent", "exhausted"))
        for _ in range(2):
            await worker.release(await worker.recv_task())
        await worker.recv_tasks(1)
        clock.advance(1)
        made["first"] = await leased("first", Idempotency("idempotent", "first"))
        made["second"] = await leased("second", Idempotency("idempotent", "second"))
        made["unsafe"] = await leased("unsafe", Idempotency("unsafe", "unsafe"))
        made["silent"] = await leased("silent", None)
        others = [await leased("other", None) for _ in range(100)]
        assert len(await worker.recv_tasks(100)) + len(await worker.recv_tasks(4)) == 104
        return Stale(**made, others=others)


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    daemon = RealDaemon()
    stale = asyncio.run(_prepare(daemon))
    daemon.start()
    alice, worker = (
        daemon.enroll(name=name, pubkey=AgentId.named(name).pubkey) for name in ("alice@lab", "worker@lab")
    )
    yield House(daemon, alice, worker, stale)
    daemon.close()


class Killed(NamedTuple):
    """Two peers and their tasks, as they were when the daemon was killed."""

    alice: Peer
    bob: Peer
    queued: str
    held: Json
    answered: str
    before: Json


@pytest.fixture(scope="module")
def killed(house: House) -> Killed:
    """Kill the daemon with SIGKILL and start it again with the retry scheduler, at a short interval."""
    alice, bob = house.daemon.enroll(), house.daemon.enroll()
    alice.send(bob, intent_text="held")
    held = bob.lease()
    answered = alice.send(bob, idempotency=idempotent("answered"))
    bob.lease()
    assert bob.post(answered, content=[{"type": "text", "text": "once"}]).status == 200
    queued = alice.send(bob, intent_text="queued")
    before = bob.entry(held["task"]["id"])
    house.daemon.kill()
    house.daemon.start(**{**VARIABLES, "COVENANT_A2A_AUTO_RETRY_INTERVAL_MS": "100"})
    return Killed(alice, bob, queued, held, answered, before)


def scan(operator: Peer, **policy: Any) -> Json:
    report: Json = operator.ok("POST", "/a2a/retry-stale", {"policy": {**EVERYTHING, **policy}})["report"]
    return report


def reasons(report: Json) -> dict[str, str]:
    return {skip["task_id"]: skip["reason"] for skip in report["skipped"]}


def ids(candidates: list[Json]) -> list[str]:
    return [candidate["task_id"] for candidate in candidates]


def until(is_there: Any) -> Any:
    """Wait until a daemon has done by itself what this looks for. Its scheduler tells nobody but the audit."""
    due = time.monotonic() + PATIENCE_S
    while not (found := is_there()):
        assert time.monotonic() < due
        time.sleep(0.02)
    return found


def requeue(operator: Peer, task_id: str, risk: str = "operator_accepted", **guard: Any) -> Json:
    command = {"action": "requeue", "duplicate_risk": risk, **guard}
    outcome: Json = operator.ok("POST", "/a2a/repair", {"task_id": task_id, "command": command, "reason": "it died"})[
        "outcome"
    ]
    return outcome


# --- attempts, duplicates, retries -------------------------------------------------------------------------


@says("Attempt. One lease and execution of a task.")
def test_an_attempt_is_one_lease(alice: Peer, bob: Peer) -> None:
    task_id = alice.send(bob)
    assert bob.entry(task_id)["attempt"] == 0
    assert bob.lease()["attempt"] == 1
    assert bob.post(task_id).status == 200
    assert bob.entry(task_id)["attempt"] == 1


@says(
    "Duplicate execution. A task is executed more than once (for example, the receiver crashes after performing work "
    "but before posting a result).",
    "Retry. Requeueing a task for another attempt without changing the task id.",
    "Never synthesize a new task id.",
    "Retries requeue the same task id and increment the attempt counter on the next lease.",
)
def test_a_retry_is_the_same_task_at_its_next_attempt(alice: Peer, bob: Peer, operator: Peer) -> None:
    """The first receiver was only slow: its result is refused, so that its sender gets one answer, not two."""
    task_id = alice.send(bob)
    first = bob.lease()
    assert requeue(operator, task_id) == {
        "task_id": task_id,
        "action": "requeued",
        "state": "queued",
        "attempt": 1,
        "generation": 3,
    }
    again = bob.lease()
    assert (again["task"], again["attempt"]) == (first["task"], 2)
    assert bob.post(task_id, lease_id=first["lease_id"]).body["code"] == "lease_superseded"
    assert bob.post(task_id, lease_id=again["lease_id"]).status == 200
    assert alice.drain()["result"]["task_id"] == task_id
    assert alice.ok("GET", "/a2a/results/next")["result"] is None


@says(
    "Make duplicate-work risk explicit and machine-checkable.",
    "Manual lease repair already requires an explicit duplicate-risk posture (idempotent vs operator_accepted).",
    "Manual repair still uses operator_accepted as an explicit human posture.",
)
def test_a_requeue_says_its_posture(alice: Peer, bob: Peer, operator: Peer) -> None:
    task_id = alice.send(bob)
    bob.lease()
    for command in ({"action": "requeue"}, {"action": "requeue", "duplicate_risk": "unsafe"}):
        wanted = {"task_id": task_id, "command": command, "reason": "it died"}
        assert operator.refused("POST", "/a2a/repair", wanted) == (400, "malformed")
    assert "--duplicate-risk" in operator.cli("a2a", "requeue", task_id, "--reason", "it died", code=2).err
    assert requeue(operator, task_id, "operator_accepted")["action"] == "requeued"
    bob.lease()
    done = operator.cli.json("a2a", "requeue", task_id, "--reason", "it died", "--duplicate-risk", "idempotent")
    assert done["outcome"]["state"] == "queued"
    rows = [(row["action"], row["duplicate_risk"], row["declared"]) for row in operator.rows(task_id, "repair")]
    assert rows == [("requeue", "operator_accepted", "unsafe"), ("requeue", "idempotent", "unsafe")]


# --- what a task declares ----------------------------------------------------------------------------------


@says(
    "Tasks may carry explicit idempotency metadata in the A2ATask envelope.",
    "The daemon validates that a present key is non-empty, persists the metadata, and returns it through queue/status "
    "surfaces.",
)
@pytest.mark.parametrize("safety", ["idempotent", "unsafe"])
def test_what_a_task_declares_is_checked_and_shown(alice: Peer, bob: Peer, safety: str) -> None:
    for blank in ("", "  ", "\t"):
        task = alice.task(bob, idempotency={"duplicate_safety": safety, "key": blank})
        assert alice.refused("POST", "/a2a/tasks", task) == (400, "blank_text")
        assert alice.ipc("send_a2a_task", task=task)["code"] == "blank_text"
    declared = {"duplicate_safety": safety, "key": f"order-{safety}"}
    task_id = alice.send(bob, idempotency=declared)
    shown = [
        alice.ok("GET", "/a2a/queue?limit=10")["tasks"][0]["task"],
        alice.ok("GET", "/a2a/tasks/recent?limit=10")["tasks"][0],
        alice.ipc("a2a_queue", limit=10)["tasks"][0]["task"],
        alice.cli.json("a2a", "status")["tasks"][0]["task"],
        alice.cli.json("a2a", "show", task_id)["entry"]["task"],
        bob.lease()["task"],
    ]
    assert [task["idempotency"] for task in shown] == [declared] * len(shown)


@says(
    "idempotent: executing the task multiple times with the same task id is safe.",
    "Any side effects must be keyed or conditional such that duplicates do not create new external effects.",
    "The idempotency key is a stable, caller-chosen key for the logical work unit.",
    "For tasks that call external systems that support explicit keys, senders should provide the same key so receivers "
    "can forward it consistently.",
    "Receivers may claim idempotent only when:",
    "persistent writes are conditional on the task id (or explicit idempotency key) so replays do not create new "
    "records;",
    "external calls that support idempotency keys receive the key consistently across retries;",
)
def test_every_attempt_is_handed_the_same_id_and_key(alice: Peer, bob: Peer, operator: Peer) -> None:
    """The obligations are the receiver's; the daemon hands it what it needs to keep them."""
    task_id = alice.send(bob, idempotency=idempotent("charge-4711"))
    seen = []
    for attempt in (1, 2, 3):
        got = bob.lease()
        seen.append((got["task"]["id"], got["task"]["idempotency"], got["attempt"]))
        if attempt < 3:
            requeue(operator, task_id, "idempotent")
    assert seen == [(task_id, idempotent("charge-4711"), attempt) for attempt in (1, 2, 3)]


@says(
    "results are safe to post multiple times (posting the same result twice must not corrupt mailbox state).",
)
@pytest.mark.parametrize("with_lease", [True, False])
def test_the_same_result_twice_is_one_result(alice: Peer, bob: Peer, with_lease: bool) -> None:
    task_id = alice.send(bob, idempotency=idempotent("twice"))
    lease = bob.lease()
    named = {"lease_id": lease["lease_id"]} if with_lease else {}
    first, again = bob.post(task_id, **named), bob.post(task_id, **named)
    assert (first.status, again.status) == (200, 200) and again.body == {**first.body, "duplicate": True}
    assert alice.drain()["result"]["task_id"] == task_id
    assert bob.post(task_id, **named).body["duplicate"]
    assert alice.ok("GET", "/a2a/results/next")["result"] is None
    assert bob.post(task_id, content=[], **named).body["code"] == "result_conflict"


@says("If any step cannot be made idempotent, classify the task as operator_accepted.")
def test_what_is_not_idempotent_is_for_the_operator_to_accept(alice: Peer, bob: Peer, operator: Peer) -> None:
    """The envelope of the same text knows `unsafe` and `idempotent` alone, and the contract keeps to it: such a task is
    `unsafe`, and `operator_accepted` is what a repair of it says."""
    task = alice.task(bob, idempotency={"duplicate_safety": "operator_accepted", "key": "k"})
    assert alice.refused("POST", "/a2a/tasks", task) == (400, "malformed")
    task_id = alice.send(bob, idempotency={"duplicate_safety": "unsafe", "key": "k"})
    bob.lease()
    assert requeue(operator, task_id, "operator_accepted")["state"] == "queued"
    (row,) = operator.rows(task_id, "repair")
    assert (row["duplicate_risk"], row["declared"]) == ("operator_accepted", "unsafe")


# --- the cache ---------------------------------------------------------------------------------------------


@says(
    "When an idempotent task posts a result, the mailbox stores a cached payload keyed by sender, recipient, current "
    "task kind, and idempotency key.",
    "Add an explicit typed task-kind field for cache scoping.",
)
def test_the_cache_has_four_keys(house: House, alice: Peer, bob: Peer) -> None:
    """The intent is the kind of a task that names none."""
    brief: Json = {"task_kind": "brief", "idempotency": idempotent("k")}
    first = alice.send(bob, **brief)
    bob.lease()
    assert bob.post(first).status == 200
    carol = house.daemon.enroll()
    others: list[tuple[Peer, Peer, Json]] = [
        (carol, bob, brief),
        (alice, carol, brief),
        (alice, bob, {**brief, "task_kind": "letter"}),
        (alice, bob, {"idempotency": idempotent("k"), "intent_text": "another thing"}),
        (alice, bob, {**brief, "idempotency": idempotent("other")}),
        (alice, bob, {**brief, "idempotency": {"duplicate_safety": "unsafe", "key": "k"}}),
        (alice, bob, {**brief, "idempotency": None}),
    ]
    sent = [sender.ok("POST", "/a2a/tasks", sender.task(to, **members)) for sender, to, members in others]
    assert [reply.get("replayed", False) for reply in sent] == [False] * len(others)
    same = alice.ok("POST", "/a2a/tasks", alice.task(bob, **brief))
    assert same["replayed"]
    (entry,) = alice.ok("GET", "/a2a/cache")["entries"]
    assert entry["source_task_id"] == first


@says("A later task with the same cache key receives a replayed result immediately instead of being leased again.")
@pytest.mark.parametrize("surface", ["http", "ipc", "cli"])
def test_a_repeat_is_answered_from_the_cache(alice: Peer, bob: Peer, surface: str) -> None:
    first = alice.send(bob, task_kind="brief", idempotency=idempotent("k"))
    bob.lease()
    assert bob.post(first).status == 200
    answer = alice.drain()["result"]
    again = alice.task(bob, task_kind="brief", idempotency=idempotent("k"))
    if surface == "http":
        sent = alice.ok("POST", "/a2a/tasks", again)
    elif surface == "ipc":
        sent = alice.ipc("send_a2a_task", task=again)
    else:
        options = ("--kind", "brief", "--key", "k", "--id", again["id"])
        sent = alice.cli.json("a2a", "send", bob.label, again["intent_text"], *options)
    assert (sent["kind"], sent["task_id"], sent["replayed"]) == ("a2a_task_queued", again["id"], True)
    assert bob.ok("GET", "/a2a/tasks/next")["task"] is None
    replayed = alice.drain()
    assert replayed["replayed"] and replayed["attempt"] == 0
    assert replayed["result"]["content"] == answer["content"] and replayed["result"]["task_id"] == again["id"]


# --- the retry gate ----------------------------------------------------------------------------------------


@pytest.fixture
def far(pair: Pair) -> tuple[Peer, Peer, Peer]:
    """A sender at one daemon; a receiver and the operator at the other."""
    return pair.one.enroll(), pair.one.enroll().at(pair.two), pair.two.operator


@says(
    "covenant a2a retry-stale is disabled by default and reports what it would do unless the operator passes --enable.",
)
def test_without_enable_the_gate_only_reports(far: tuple[Peer, Peer, Peer]) -> None:
    """It says exactly what it would do, not only that it is off."""
    alice, bob, operator = far
    safe, silent = alice.send(bob, idempotency=idempotent("k")), alice.send(bob)
    bob.lease(), bob.lease()
    usual = operator.cli.json("a2a", "retry-stale")["report"]
    assert (usual["policy"]["enabled"], usual["requeued"]) == (False, [])
    bounds = ("--min-lease-age-ms", "0", "--scan-limit", "1000", "--max-requeues", "50")
    would = operator.cli.json("a2a", "retry-stale", *bounds)["report"]
    assert safe in ids(would["would_requeue"]) and reasons(would)[silent] == "missing_idempotency"
    assert (bob.entry(safe)["state"], would["requeued"], operator.rows(safe, "repair")) == ("in_flight", [], [])
    done = operator.cli.json("a2a", "retry-stale", "--enable", *bounds)["report"]
    assert ids(done["requeued"]) == ids(would["would_requeue"]) and done["would_requeue"] == []
    assert bob.entry(safe)["state"] == "queued"


@says(
    "Operators can repair stale leases explicitly, and a disabled-by-default retry scan can requeue only stale tasks "
    "that declare idempotent duplicate safety and carry a non-empty key.",
    "Prevent silent duplicate side effects when automation requeues.",
    "Keep retries visible via attempt counters and audit rows.",
    "unsafe: duplicate execution may cause external effects.",
    "The system must not automatically requeue these tasks.",
    "The automated retry gate only accepts task metadata marked idempotent.",
    "Retry only tasks marked idempotent.",
    "Skip tasks without a non-empty idempotency key.",
    "Make retry decisions observable via auto_requeue audit rows and skipped-task report entries.",
)
def test_the_gate_requeues_what_may_be_done_twice_and_nothing_else(far: tuple[Peer, Peer, Peer]) -> None:
    """The work was handed out by one daemon, and another one decides. A key is never empty: it was refused."""
    alice, bob, operator = far
    safe = alice.send(bob, intent_text="safe", idempotency=idempotent("k"))
    unsafe = alice.send(bob, intent_text="unsafe", idempotency={"duplicate_safety": "unsafe", "key": "k"})
    silent = alice.send(bob, intent_text="silent")
    leases = [bob.lease() for _ in range(3)]

    disabled = scan(operator)
    assert disabled["policy"]["enabled"] is False and disabled["requeued"] == []
    assert bob.entry(safe)["state"] == "in_flight"

    report = scan(operator, enabled=True)
    assert safe in ids(report["requeued"]) and not {unsafe, silent} & set(ids(report["requeued"]))
    assert {task_id: reasons(report)[task_id] for task_id in (unsafe, silent)} == {
        unsafe: "unsafe_duplicate_safety",
        silent: "missing_idempotency",
    }
    assert [alice.entry(task_id)["state"] for task_id in (safe, unsafe, silent)] == ["queued", "in_flight", "in_flight"]
    (row,) = operator.rows(safe, "repair")
    assert (row["action"], row["lease_id"], row["attempt"]) == ("auto_requeue", leases[0]["lease_id"], 1)
    assert [operator.rows(task_id, "repair") for task_id in (unsafe, silent)] == [[], []]
    again = bob.lease()
    assert (again["task"]["id"], again["attempt"]) == (safe, 2)
    assert requeue(operator, unsafe)["action"] == "requeued"


@says(
    "The retry gate is effectively a daemon-initiated requeue, so it must use task metadata and must never bypass this "
    "classification.",
)
def test_no_word_of_a_caller_makes_an_unsafe_task_safe_for_the_gate(far: tuple[Peer, Peer, Peer]) -> None:
    alice, bob, operator = far
    safe, unsafe = alice.send(bob, idempotency=idempotent("k")), alice.send(bob)
    bob.lease(), bob.lease()
    wider = {"policy": {"enabled": True, "duplicate_risk": "operator_accepted"}}
    assert operator.refused("POST", "/a2a/retry-stale", wider) == (400, "malformed")
    report = scan(operator, enabled=True)
    assert safe in ids(report["requeued"]) and reasons(report)[unsafe] == "missing_idempotency"
    (row,) = operator.rows(safe, "repair")
    assert (row["duplicate_risk"], row["declared"]) == ("idempotent", "idempotent")
    assert alice.refused("POST", "/a2a/retry-stale", {"policy": {"enabled": True}})[0] == 403


@says(
    "Bound retry behavior with explicit maximum attempts, maximum requeues, minimum lease age, and scan limits.",
)
def test_the_gate_has_four_bounds(far: tuple[Peer, Peer, Peer]) -> None:
    alice, bob, operator = far
    tasks = [alice.send(bob, intent_text=f"{number}", idempotency=idempotent(f"{number}")) for number in range(3)]
    for _ in tasks:
        bob.lease()
    young = operator.cli.json("a2a", "retry-stale", "--scan-limit", "1000")["report"]
    assert [reasons(young)[task_id] for task_id in tasks] == ["lease_too_young"] * 3
    tried = scan(operator, max_attempts=1)
    assert [reasons(tried)[task_id] for task_id in tasks] == ["max_attempts_reached"] * 3
    assert set(tasks) <= set(tried["exhausted"])
    for bound in (0, 1):
        few = scan(operator, max_requeues=bound)
        assert len(few["would_requeue"]) == bound
        assert [reasons(few)[task_id] for task_id in tasks[bound:]] == ["limit_reached"] * (3 - bound)
    assert [scan(operator, scan_limit=limit)["considered"] for limit in (1, 2)] == [1, 2]


# --- a kill, and the scheduler -----------------------------------------------------------------------------


@says(*(f"{name}={value}" for name, value in VARIABLES.items()))
def test_each_variable_of_the_scheduler_is_read(house: House) -> None:
    """A start with a bad value ends, and names the variable; what a good one does is held below."""
    for name in VARIABLES:
        done = Client(house.daemon.home)("serve", code=2, **{**VARIABLES, name: "often"})
        assert name in done.err and "(bad_setting)" in done.err


@says(
    "Covenant A2A is a durable, explicitly leased queue.",
    "It does not automatically redeliver leased work after restart.",
)
def test_after_a_kill_what_was_held_is_held_and_what_waited_waits(killed: Killed) -> None:
    _, bob, queued, held, _, before = killed
    assert bob.entry(held["task"]["id"]) == before and before["state"] == "in_flight"
    assert bob.entry(queued)["state"] == "queued"
    assert bob.lease()["task"]["id"] == queued
    assert bob.ok("GET", "/a2a/tasks/next")["task"] is None
    assert bob.post(held["task"]["id"]).status == 200


@says("JSONL-backed mailboxes persist cache entries in the event log.")
def test_after_a_kill_the_cache_is_there(house: House, killed: Killed) -> None:
    alice, bob = killed.alice, killed.bob
    lines = [
        json.loads(line)
        for segment in sorted((house.daemon.home / "data").glob("journal-*.jsonl"))
        for line in segment.read_text().splitlines()
    ]
    assert any("once" in json.dumps(line) for line in lines)
    again = alice.ok("POST", "/a2a/tasks", alice.task(bob, idempotency=idempotent("answered")))
    assert again["replayed"]
    result = alice.ok("GET", f"/a2a/results/{again['task_id']}")["result"]
    assert result["content"] == [{"type": "text", "text": "once"}]


@says(
    "The daemon can run the same retry gate on a timer through an explicit environment opt-in.",
    "Every scheduler pass records an a2a_auto_retry_scheduler_scan audit summary.",
    "Actual mutations still produce per-task auto_requeue repair rows.",
    "Add periodic retry scheduling that reuses the existing retry gate.",
    *(f"{name}={value}" for name, value in VARIABLES.items()),
)
def test_the_scheduler_runs_the_gate_within_its_bounds(house: House, killed: Killed, operator: Peer) -> None:
    """With the values that are printed, but for the interval: 100 ms are soon over."""
    stale = house.stale
    until(lambda: operator.rows(stale.second, "repair"))
    second, first = scans(operator)[-2:]
    assert [first["actor"], first.get("reason")] == ["operator", None]
    assert [row["counts"]["considered"] for row in (first, second)] == [100, 100]  # SCAN_LIMIT
    assert [row["counts"]["requeued"] for row in (first, second)] == [1, 1]  # MAX_REQUEUES
    assert first["counts"]["skipped.limit_reached"] == 1
    assert first["counts"]["exhausted"] == 1 and operator.entry(stale.exhausted)["attempt"] == 3  # MAX_ATTEMPTS
    assert operator.rows(stale.exhausted, "repair") == []
    for task_id in (stale.first, stale.second):
        (row,) = operator.rows(task_id, "repair")
        assert (row["action"], row["duplicate_risk"], row["declared"]) == ("auto_requeue", "idempotent", "idempotent")
        assert operator.entry(task_id)["state"] == "queued"
    assert [operator.entry(task_id)["state"] for task_id in (stale.unsafe, stale.silent)] == ["in_flight"] * 2
    assert second["at_ms"] - first["at_ms"] >= 100  # INTERVAL_MS


@says("COVENANT_A2A_AUTO_RETRY_MIN_LEASE_AGE_MS=300000")
def test_the_scheduler_leaves_a_young_lease_alone(killed: Killed, house: House, operator: Peer) -> None:
    alice, bob = house.daemon.enroll(), house.daemon.enroll()
    task_id = alice.send(bob, idempotency=idempotent("young"))
    bob.lease()
    until(lambda: any(row["counts"].get("skipped.lease_too_young") for row in scans(operator)))
    assert (bob.entry(task_id)["state"], operator.rows(task_id, "repair")) == ("in_flight", [])


def scans(operator: Peer) -> list[Json]:
    """The summaries of the passes, the newest first."""
    rows: list[Json] = operator.ok("GET", "/audit?limit=1000&row=a2a_auto_retry_scheduler_scan")["rows"]
    return rows


@says("It does not bypass the a2a.repair.requeue capability gate.")
def test_the_scheduler_needs_the_operators_grant(house: House, killed: Killed, operator: Peer) -> None:
    grants = operator.ok("GET", f"/capabilities?limit=200&subject={operator.label}")["capabilities"]
    reaching = [grant for grant in grants if grant["action"] in ("a2a.repair.requeue", "a2a.repair.*")]
    assert reaching
    for grant in reaching:
        operator.ok("DELETE", f"/capabilities/{grant['id']}")
    until(lambda: scans(operator)[0].get("reason") == "missing_capability")
    for grant in reaching:
        operator.ok("POST", "/capabilities", {"subject": operator.label, "action": grant["action"]})
    until(lambda: scans(operator)[0].get("reason") is None)


@says(
    "Task compaction removes resolved task history but keeps cache entries, so future duplicates can still "
    "short-circuit after restart.",
)
def test_a_compaction_keeps_the_cache_over_a_kill(house: House, alice: Peer, bob: Peer, operator: Peer) -> None:
    first = alice.send(bob, idempotency=idempotent("kept"))
    bob.lease()
    assert bob.post(first).status == 200
    alice.drain()
    assert operator.cli.json("a2a", "compact", "--older-than", "0s")["dropped"] >= 1
    assert alice.refused("GET", f"/a2a/tasks/{first}") == (404, "unknown_task")
    house.daemon.kill()
    house.daemon.start()
    assert alice.ok("POST", "/a2a/tasks", alice.task(bob, idempotency=idempotent("kept")))["replayed"]
    assert bob.ok("GET", "/a2a/tasks/next")["task"] is None


# --- the text itself ---------------------------------------------------------------------------------------

says.state_nothing(
    "a heading",
    "A2A idempotency policy",
    "Terms",
    "Policy goals",
    "Task metadata",
    "Idempotency class",
    "Idempotency key",
    "Receiver-side result cache",
    "Explicit retry gate",
    "Periodic scheduler",
    "Receiver obligations",
    "Relationship to manual repair",
    "Follow-up work",
    "Related",
)
says.state_nothing(
    "names another page",
    "Agent-to-agent — A2A envelopes and mailbox surface.",
    "Live coverage — boundary test inventory.",
)


def test_every_sentence_has_a_test() -> None:
    assert (says.without_a_test(), says.both()) == ([], [])
    assert says.marked() <= set(globals()) and len(says.all) == 64
