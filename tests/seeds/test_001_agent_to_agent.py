"""The agent-to-agent page, sentence by sentence, against real daemons: one is killed, and two share a PostgreSQL."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from covenant import AgentId, ForceError, Mailbox, RepairRequest, Result, Task, Text
from covenant.store.clock import ManualClock
from tests.seeds.conftest import Pair
from tests.seeds.daemon import Json, Peer, RealDaemon, idempotent, result
from tests.seeds.sentences import Sentences

says = Sentences("001_agent_to_agent.txt")

HOUR_MS: Final = 3_600_000
SURFACES: Final = pytest.mark.parametrize("surface", ["http", "ipc"])
ABSENT: Final = "00000000-0000-4000-8000-000000000000"


# --- the daemon ------------------------------------------------------------------------------------------


class House(NamedTuple):
    daemon: RealDaemon
    stale: str  # a task that was leased three hours ago


async def _prepare(daemon: RealDaemon) -> str:
    clock = ManualClock(time.time_ns() // 1_000_000 - 3 * HOUR_MS)
    async with Mailbox.open(f"file:{daemon.home}/data", clock=clock) as box:
        task = Task(recipient=AgentId("worker@lab"), intent_text="stale")
        await box.of("alice@lab").send_task(task)
        return (await box.of("worker@lab").recv_task()).task.id


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    daemon = RealDaemon()
    stale = asyncio.run(_prepare(daemon))
    daemon.start()
    yield House(daemon, stale)
    daemon.close()


def told(peer: Peer, surface: str, verb: str, **members: Any) -> Json:
    """The reply to a verb by its name in the text, on either surface."""
    kind, method, path, body = VERBS[verb]
    if surface == "ipc":
        return peer.ipc(kind, **members)
    query = "".join(f"?{name}={value}" for name, value in members.items() if name != body)
    return peer.http(method, path + query, members.get(body)).body


VERBS: Final = {
    "SendA2ATask": ("send_a2a_task", "POST", "/a2a/tasks", "task"),
    "TryRecvA2ATask": ("try_recv_a2a_task", "GET", "/a2a/tasks/next", ""),
    "RecentA2ATasks": ("recent_a2a_tasks", "GET", "/a2a/tasks/recent", ""),
    "PostA2AResult": ("post_a2a_result", "POST", "/a2a/results", "result"),
    "TryRecvA2AResult": ("try_recv_a2a_result", "GET", "/a2a/results/next", ""),
    "RecentA2AResults": ("recent_a2a_results", "GET", "/a2a/results/recent", ""),
    "A2AQueue": ("a2a_queue", "GET", "/a2a/queue", ""),
}


def has(reply: Json, **printed: Any) -> bool:
    """Whether the reply has the printed members; what the contract has added stands beside them."""
    return printed.items() <= reply.items()


def repaired(operator: Peer, task_id: str, command: Json, reason: str = "it died") -> tuple[int, Json]:
    return operator.http("POST", "/a2a/repair", {"task_id": task_id, "command": command, "reason": reason})


def checks(operator: Peer, actor: Peer) -> list[Json]:
    """The capability checks of one who called, oldest first."""
    rows = operator.ok("GET", f"/audit?limit=200&actor={actor.label}")["rows"]
    return [row for row in reversed(rows) if row["kind"] == "capability_check"]


# --- from one agent to another -----------------------------------------------------------------------------


@says(
    "Agent-to-agent (A2A) is the surface through which one Covenant agent dispatches a task to another, receives a "
    "result, and reconstructs a task graph across many such exchanges.",
    "A task is a request from one agent to another.",
    "A result is the response.",
)
@pytest.mark.parametrize("surface", ["http", "ipc", "cli"])
def test_a_task_goes_there_a_result_comes_back_and_the_graph_is_seen(alice: Peer, bob: Peer, surface: str) -> None:
    root = alice.task(bob)
    child = alice.task(bob, parent=root["id"])
    if surface == "cli":
        for task in (root, child):
            parent = () if task["parent"] is None else ("--parent", task["parent"])
            alice.cli.json("a2a", "send", bob.label, task["intent_text"], "--id", task["id"], *parent)
            lease = bob.cli.json("a2a", "next")["lease_id"]
            bob.cli.json("a2a", "post", task["id"], "--lease-id", lease, "--text", "done")
        drained = [alice.cli.json("a2a", "results", "--next")["result"] for _ in range(2)]
        tree = alice.cli.json("a2a", "tree", root["id"])["root"]
    else:
        for task in (root, child):
            assert has(told(alice, surface, "SendA2ATask", task=task), kind="a2a_task_queued", task_id=task["id"])
            assert told(bob, surface, "TryRecvA2ATask")["task"]["sender"] == alice.agent
            posted = told(bob, surface, "PostA2AResult", result=result(task["id"]))
            assert has(posted, kind="a2a_result_posted", task_id=task["id"])
        drained = [told(alice, surface, "TryRecvA2AResult")["result"] for _ in range(2)]
        path = f"/a2a/tasks/{root['id']}/tree"
        tree = (alice.ipc("get_a2a_tree", task_id=root["id"]) if surface == "ipc" else alice.ok("GET", path))["root"]
    assert [got["task_id"] for got in drained] == [root["id"], child["id"]]
    assert (tree["id"], [node["id"] for node in tree["children"]]) == (root["id"], [child["id"]])


@says(
    "The wire types are minimal; storage and routing are pluggable.",
    "The daemon holds one mailbox; agents send and receive through the daemon's IPC or HTTP surface.",
    "The Mailbox trait abstracts the queue between agents.",
)
def test_the_same_bytes_work_on_another_store_and_at_another_daemon(house: House, pair: Pair) -> None:
    """Sent over HTTP, received over the socket. On PostgreSQL each of the two calls goes to another daemon, and the
    result names no lease: its holder is the same peer wherever it asks."""
    for one, two in ((house.daemon, house.daemon), (pair.one, pair.two)):
        alice, bob = one.enroll(), one.enroll()
        task = alice.task(bob)
        assert alice.http("POST", "/a2a/tasks", task).body["task_id"] == task["id"]
        assert bob.at(two).ipc("try_recv_a2a_task")["task"]["id"] == task["id"]
        assert has(bob.ipc("post_a2a_result", result=result(task["id"])), kind="a2a_result_posted", task_id=task["id"])
        assert alice.at(two).drain()["result"]["task_id"] == task["id"]


@says(
    "Tasks form a tree via parent so an orchestrator can fan a root intent across child agents and reconstruct the "
    "result graph.",
    "An orchestrator receives a root intent, generates a set of child A2ATask envelopes (each with parent = "
    "root_intent.id), submits them via POST /a2a/tasks, and polls GET /a2a/results/next until results have been "
    "received for every dispatched child.",
)
def test_an_orchestrator_fans_out_and_collects(house: House, alice: Peer) -> None:
    root = str(uuid.uuid4())  # an intent, and no task here
    workers = [house.daemon.enroll() for _ in range(3)]
    dispatched = {alice.send(worker, parent=root, intent_text=f"part of {worker.label}") for worker in workers}
    for worker in workers:
        task = worker.lease()["task"]
        assert task["parent"] == root
        assert worker.post(task["id"], content=[{"type": "text", "text": worker.label}]).status == 200
    received: dict[str, str] = {}
    while len(received) < len(dispatched):
        got = alice.drain()["result"]
        received[got["task_id"]] = got["content"][0]["text"]
    assert set(received) == dispatched and set(received.values()) == {worker.label for worker in workers}
    assert alice.ok("GET", "/a2a/results/next")["result"] is None
    tree = alice.ok("GET", f"/a2a/tasks/{root}/tree")["root"]
    assert tree["entry"] is None and {node["id"] for node in tree["children"]} == dispatched


@says(
    "Two agents form a producer-consumer pipeline.",
    "The producer submits tasks tagged for the consumer's recipient; the consumer dequeues them via recv_task and "
    "posts results back.",
)
def test_a_producer_and_a_consumer(house: House, alice: Peer, bob: Peer) -> None:
    async def consume() -> list[str]:
        async with Mailbox.open(f"unix:{house.daemon.home}/sock", token=bob.token) as box:
            done = []
            for _ in range(5):
                lease = await box.recv_task()
                await box.send_result(Result.ok(lease, [Text(lease.task.intent_text.upper())]))
                done.append(lease.task.id)
            return done

    produced = [alice.send(bob, intent_text=f"part {number}") for number in range(5)]
    assert asyncio.run(consume()) == produced
    answers = [alice.drain()["result"] for _ in range(5)]
    assert [answer["task_id"] for answer in answers] == produced
    assert [answer["content"][0]["text"] for answer in answers] == [f"PART {number}" for number in range(5)]


# --- the two envelopes -------------------------------------------------------------------------------------


@says(
    "A2ATask {",
    "id:          uuid,",
    "sender:      AgentId,",
    "recipient:   AgentId,",
    'intent_text: "do the thing",',
    "parent:      uuid | null,",
    "deadline_ms: u64 | null,",
    "idempotency: {",
    'duplicate_safety: "unsafe" | "idempotent",',
    "key:              string",
    "} | null",
    "}",
)
@SURFACES
def test_a_task_has_these_members(alice: Peer, bob: Peer, surface: str) -> None:
    """Each comes back as it was sent. What is null is left out, which an envelope may do too."""
    safeties = (None, "unsafe", "idempotent")
    for parent, deadline_ms, safety in itertools.product((None, ABSENT), (None, 4_102_444_800_000), safeties):
        declared = None if safety is None else {"duplicate_safety": safety, "key": f"{parent} {deadline_ms}"}
        task = alice.task(bob, parent=parent, deadline_ms=deadline_ms, idempotency=declared)
        assert list(task) == ["id", "sender", "recipient", "intent_text", "parent", "deadline_ms", "idempotency"]
        told(alice, surface, "SendA2ATask", task=task)
        got = told(bob, surface, "TryRecvA2ATask")["task"]
        assert got == {name: value for name, value in task.items() if value is not None}


@says("A2ATask {", "id:          uuid,", "sender:      AgentId,", "recipient:   AgentId,")
@pytest.mark.parametrize(
    ("member", "value", "code"),
    [
        ("id", "not a uuid", "bad_id"),
        ("recipient", None, "malformed"),
        ("recipient", {"display": "no label", "pubkey": "0"}, "bad_agent"),
        ("intent_text", None, "malformed"),
        ("intent_text", " ", "blank_text"),
        ("parent", "not a uuid", "bad_id"),
        ("deadline_ms", -1, "malformed"),
        ("deadline_ms", "soon", "malformed"),
        ("idempotency", {"duplicate_safety": "perhaps", "key": "k"}, "malformed"),
        ("idempotency", {"duplicate_safety": "unsafe"}, "malformed"),
    ],
)
def test_a_member_of_another_type_is_refused(alice: Peer, bob: Peer, member: str, value: Any, code: str) -> None:
    task = {**alice.task(bob), member: value}
    assert alice.refused("POST", "/a2a/tasks", task) == (400, code)
    assert alice.ipc("send_a2a_task", task=task)["code"] == code


@says(
    "A2ATaskResult {",
    "task_id:       uuid,            // matches A2ATask.id",
    'status:        "ok" | "error" | "partial",',
    "content:       [ Content ],     // same Content blocks MCP uses",
    "error_message: string | null",
    "}",
)
@SURFACES
@pytest.mark.parametrize(("status", "message"), [("ok", None), ("error", "no paper"), ("partial", None)])
def test_a_result_has_these_members(alice: Peer, bob: Peer, surface: str, status: str, message: str | None) -> None:
    """`partial` is progress: the contract has it end nothing, and one final result follows."""
    content = [
        {"type": "text", "text": "a line"},
        {"type": "image", "data": "iVBORw0KGgo=", "mimeType": "image/png"},
        {"type": "resource_link", "uri": "file:///brief.md", "name": "brief"},
    ]
    task_id = alice.send(bob)
    told(bob, surface, "TryRecvA2ATask")
    answer = result(task_id, status, content=content, error_message=message)
    assert list(answer) == ["task_id", "status", "content", "error_message"]
    assert told(bob, surface, "PostA2AResult", result=answer)["task_id"] == task_id
    got = told(alice, surface, "TryRecvA2AResult")["result"]
    assert has(got, **{name: value for name, value in answer.items() if value is not None})
    is_over = status != "partial"
    assert bob.entry(task_id)["state"] == ("resolved" if is_over else "in_flight")
    if not is_over:
        assert bob.post(task_id).status == 200 and alice.drain()["result"]["status"] == "ok"


@says("A2ATaskResult {", 'status:        "ok" | "error" | "partial",')
def test_another_status_is_refused(alice: Peer, bob: Peer) -> None:
    task_id = alice.send(bob)
    bob.lease()
    for status in ("done", "OK", None):
        assert bob.refused("POST", "/a2a/results", result(task_id, str(status))) == (400, "malformed")
    assert bob.entry(task_id)["state"] == "in_flight"


# --- the trait ---------------------------------------------------------------------------------------------


@says(
    "trait Mailbox {",
    "async fn send_task(&self, task: A2ATask)         -> Result<()>;",
    "async fn recv_task(&self)                        -> Result<A2ATask>;",
    "async fn try_recv_task_for(&self, recipient)     -> Result<Option<A2ATask>>;",
    "async fn recent_tasks(&self, limit: usize)       -> Result<Vec<A2ATask>>;",
    "async fn task_queue(&self, limit: usize)         -> Result<Vec<A2ATaskQueueEntry>>;",
    "async fn repair_task(&self, request)             -> Result<A2ARepairOutcome>;",
    "async fn send_result(&self, result: A2ATaskResult)   -> Result<()>;",
    "async fn recv_result(&self)                          -> Result<A2ATaskResult>;",
    "async fn try_recv_result_for(&self, peer)             -> Result<Option<A2ATaskResult>>;",
    "async fn recent_results(&self, limit: usize)         -> Result<Vec<A2ATaskResult>>;",
    "The blocking recv_* variants are appropriate for in-process agents on long-lived connections.",
)
@pytest.mark.parametrize("scheme", ["http", "unix"])
async def test_the_mailbox_has_these_methods(house: House, scheme: str) -> None:
    daemon = house.daemon
    alice, bob = daemon.enroll(), daemon.enroll()
    url = f"http://{daemon.address}" if scheme == "http" else f"unix:{daemon.home}/sock"
    async with (
        Mailbox.open(url, token=alice.token) as sender,
        Mailbox.open(url, token=bob.token) as worker,
        Mailbox.open(url, token=daemon.operator.token) as operators,
    ):
        assert await worker.try_recv_task_for() is None and await sender.try_recv_result_for() is None
        waiting = asyncio.create_task(worker.recv_task())
        await sender.send_task(Task(id=(first := str(uuid.uuid4())), recipient=worker.agent, intent_text="first"))
        assert (await waiting).task.id == first
        answering = asyncio.create_task(sender.recv_result())
        await worker.send_result(Result.ok(await waiting, [Text("done")]))
        assert (await answering).task_id == first
        await sender.send_task(Task(id=(second := str(uuid.uuid4())), recipient=worker.agent, intent_text="second"))
        taken = await worker.try_recv_task_for(worker.agent)
        assert taken is not None and taken.task.id == second
        assert [entry.task.id for entry in (await sender.task_queue(1)).tasks] == [second]
        outcome = await operators.repair_task(RepairRequest(second, ForceError("lost"), "it died"))
        assert outcome.action == "forced_error"
        drained = await sender.try_recv_result_for(sender.agent)
        assert drained is not None and (drained.task_id, drained.error_message) == (second, "lost")
        assert [task.id for task in await sender.recent_tasks(2)] == [second, first]
        assert [answer.task_id for answer in await sender.recent_results(2)] == [second, first]


@says(
    "The non-blocking try_recv_* variants are appropriate for RPC-style callers that poll over a single round-trip.",
)
@SURFACES
def test_a_poll_is_answered_at_once(alice: Peer, bob: Peer, surface: str) -> None:
    assert told(bob, surface, "TryRecvA2ATask") == {"kind": "a2a_task_opt", "task": None}
    assert told(alice, surface, "TryRecvA2AResult") == {"kind": "a2a_result_opt", "result": None}


@says(
    "The non-consuming recent_* and task_queue variants support operator dashboards that inspect the queue without "
    "draining it.",
)
@SURFACES
def test_looking_takes_nothing(alice: Peer, bob: Peer, operator: Peer, surface: str) -> None:
    answered, waiting = alice.send(bob), alice.send(bob)
    bob.lease()
    bob.post(answered)
    looks = [("RecentA2ATasks", 2), ("RecentA2AResults", 1), ("A2AQueue", 10)]
    for peer in (alice, bob, operator):
        for verb, limit in looks:
            assert told(peer, surface, verb, limit=limit) == told(peer, surface, verb, limit=limit)
    assert bob.lease()["task"]["id"] == waiting and alice.drain()["result"]["task_id"] == answered


# --- the exchanges that are printed ------------------------------------------------------------------------


@says(
    "POST /a2a/tasks                   # body: A2ATask JSON",
    '→ 200 { "kind": "a2a_task_queued", "task_id": "uuid" }',
    "GET  /a2a/tasks/next              # leases the next queued task",
    '→ 200 { "kind": "a2a_task_opt", "task": { ... } | null }',
    "GET  /a2a/tasks/recent?limit=N    # non-consuming snapshot",
    '→ 200 { "kind": "a2a_tasks", "tasks": [ ... ] }',
    "POST /a2a/results                 # body: A2ATaskResult JSON",
    '→ 200 { "kind": "a2a_result_posted", "task_id": "uuid" }',
    "GET  /a2a/results/next            # drains the next queued result",
    '→ 200 { "kind": "a2a_result_opt", "result": { ... } | null }',
    "GET  /a2a/results/recent?limit=N  # non-consuming snapshot",
    '→ 200 { "kind": "a2a_results", "results": [ ... ] }',
    "GET  /a2a/queue?limit=N           # queued tasks, in-flight leases, pending results",
    '→ 200 { "kind": "a2a_queue", "tasks": [ ... ], "results": [ ... ] }',
    "Equivalent IPC variants exist: SendA2ATask, TryRecvA2ATask, RecentA2ATasks, PostA2AResult, TryRecvA2AResult, "
    "RecentA2AResults, A2AQueue.",
)
@SURFACES
def test_the_flow_through_a_daemon(alice: Peer, bob: Peer, surface: str) -> None:
    """The kinds of the socket are those of the replies, in the same spelling."""
    tasks = [alice.task(bob, intent_text=intent) for intent in ("answered", "held", "queued")]
    answered, held, queued = (task["id"] for task in tasks)
    for task in tasks:
        assert has(told(alice, surface, "SendA2ATask", task=task), kind="a2a_task_queued", task_id=task["id"])
    for task_id in (answered, held):
        got = told(bob, surface, "TryRecvA2ATask")
        assert (got["kind"], got["task"]["id"]) == ("a2a_task_opt", task_id)
    recent = told(alice, surface, "RecentA2ATasks", limit=2)
    assert (recent["kind"], [task["id"] for task in recent["tasks"]]) == ("a2a_tasks", [queued, held])
    posted = told(bob, surface, "PostA2AResult", result=result(answered))
    assert has(posted, kind="a2a_result_posted", task_id=answered)

    queue = told(alice, surface, "A2AQueue", limit=10)
    assert (queue["kind"], {entry["task"]["id"]: entry["state"] for entry in queue["tasks"]}) == (
        "a2a_queue",
        {held: "in_flight", queued: "queued"},
    )
    assert [pending["task_id"] for pending in queue["results"]] == [answered]
    results = told(alice, surface, "RecentA2AResults", limit=1)
    assert (results["kind"], [one["task_id"] for one in results["results"]]) == ("a2a_results", [answered])
    drained = told(alice, surface, "TryRecvA2AResult")
    assert (drained["kind"], drained["result"]["task_id"]) == ("a2a_result_opt", answered)
    assert told(alice, surface, "TryRecvA2AResult") == {"kind": "a2a_result_opt", "result": None}
    assert told(bob, surface, "TryRecvA2ATask")["task"]["id"] == queued
    assert told(bob, surface, "TryRecvA2ATask") == {"kind": "a2a_task_opt", "task": None}


@says(
    "The CLI status surface also has a one-object JSON mode for supervisors that need a stable queue snapshot.",
    "covenant a2a status --min-lease-age-ms 300000 --json",
    '→ { "kind": "a2a_status", "limit": 10, "min_lease_age_ms": 300000, "tasks": [ ... ], "results": [ ... ] }',
)
def test_the_status_is_one_object(house: House, alice: Peer, bob: Peer, operator: Peer) -> None:
    """A lease of three hours is in it, a fresh one is not."""
    answered, fresh = alice.send(bob), alice.send(bob)
    bob.lease(), bob.lease()
    bob.post(answered)
    status = operator.cli("a2a", "status", "--min-lease-age-ms", "300000", "--json").json
    assert has(status, kind="a2a_status", limit=10, min_lease_age_ms=300_000)
    held = {entry["task"]["id"] for entry in status["tasks"] if entry["state"] == "in_flight"}
    assert house.stale in held and fresh not in held
    assert operator.cli("a2a", "status", "--min-lease-age-ms", "300000", "--json").json == status
    assert alice.cli.json("a2a", "status")["results"][0]["task_id"] == answered


# --- leases and their repair -------------------------------------------------------------------------------


@says("A received task becomes an explicit in_flight lease.")
@SURFACES
def test_what_is_received_is_in_flight(alice: Peer, bob: Peer, surface: str) -> None:
    task_id = alice.send(bob)
    got = told(bob, surface, "TryRecvA2ATask")
    (entry,) = told(alice, surface, "A2AQueue")["tasks"]
    assert has(entry, state="in_flight", lease_id=got["lease_id"], leased_to=bob.agent, attempt=1)
    assert entry["task"]["id"] == task_id and entry["leased_at_ms"] <= time.time_ns() // 1_000_000


@says("Repair is explicit and operator-controlled.")
@SURFACES
def test_a_peer_repairs_nothing_by_itself(alice: Peer, bob: Peer, surface: str) -> None:
    task_id = alice.send(bob)
    bob.lease()
    wanted = {"task_id": task_id, "command": {"action": "force_error", "message": "x"}, "reason": "it died"}
    for peer in (alice, bob):
        said = (
            peer.ipc("repair_a2a_task", request=wanted)
            if surface == "ipc"
            else peer.http("POST", "/a2a/repair", wanted)[1]
        )
        assert said["code"] == "missing_capability"
    assert bob.entry(task_id)["state"] == "in_flight"


@says(
    "The mailbox supports two repair commands for in-flight tasks:",
    "requeue returns a leased task to queued, preserves the last attempt counter, and requires an explicit "
    "duplicate-work posture: idempotent or operator_accepted.",
    "force_error clears the lease and posts an error result for the original sender to drain.",
    "Daemon, HTTP, and CLI exposure exists for manual repair paths; automatic background retry remains disabled.",
)
@pytest.mark.parametrize("surface", ["http", "ipc", "cli"])
def test_the_two_repairs(alice: Peer, bob: Peer, operator: Peer, surface: str) -> None:
    def repair(task_id: str, command: Json) -> Json:
        wanted = {"task_id": task_id, "command": command, "reason": "it died"}
        if surface == "http":
            return operator.http("POST", "/a2a/repair", wanted).body
        if surface == "ipc":
            return operator.ipc("repair_a2a_task", request=wanted)
        action = command["action"].replace("_", "-")
        options = (word for name, value in command.items() if name != "action" for word in (f"--{name}", value))
        spelled = [word.replace("_", "-") for word in options]
        done = operator.cli("a2a", action, task_id, "--reason", "it died", *spelled, "--json", code=ends[task_id])
        answer: Json = done.json
        return answer

    task_id, waiting = alice.send(bob), alice.send(bob)
    ends = {task_id: 0, waiting: 1}
    bob.lease()
    for risk in ("idempotent", "operator_accepted"):
        outcome = repair(task_id, {"action": "requeue", "duplicate_risk": risk})["outcome"]
        assert has(outcome, task_id=task_id, action="requeued", state="queued")
        assert outcome["attempt"] == bob.entry(task_id)["attempt"] > 0 and "lease_id" not in bob.entry(task_id)
        assert repair(waiting, {"action": "requeue", "duplicate_risk": risk})["code"] == "not_leased"
        assert bob.lease()["task"]["id"] == waiting  # what was requeued stands behind it
        bob.ok("POST", f"/a2a/leases/{bob.entry(waiting)['lease_id']}/release", {})
        assert bob.lease()["attempt"] == outcome["attempt"] + 1
    forced = repair(task_id, {"action": "force_error", "message": "in doubt"})["outcome"]
    assert has(forced, action="forced_error", state="result_pending")
    assert "lease_id" not in bob.entry(task_id)
    assert has(alice.drain()["result"], task_id=task_id, status="error", error_message="in doubt", content=[])
    assert operator.ok("GET", "/audit?limit=10&row=a2a_auto_retry_scheduler_scan")["rows"] == []


@says(
    "Both commands require a non-empty reason and may include the observed lease_id as a guard against repairing a "
    "newer lease than the operator inspected.",
)
@pytest.mark.parametrize(
    "command", [{"action": "requeue", "duplicate_risk": "idempotent"}, {"action": "force_error", "message": "lost"}]
)
def test_a_repair_has_a_reason_and_perhaps_a_guard(alice: Peer, bob: Peer, operator: Peer, command: Json) -> None:
    task_id = alice.send(bob)
    seen = bob.lease()["lease_id"]
    for blank in ("", "  "):
        assert repaired(operator, task_id, command, blank)[1]["code"] == "blank_text"
    bob.ok("POST", f"/a2a/leases/{seen}/release", {})
    newer = bob.lease()["lease_id"]
    status, refusal = repaired(operator, task_id, {**command, "lease_id": seen})
    assert (status, refusal["code"], refusal["actual"]) == (409, "lease_mismatch", newer)
    assert bob.entry(task_id)["lease_id"] == newer
    assert repaired(operator, task_id, {**command, "lease_id": newer})[0] == 200


@says(
    "Tasks may carry optional idempotency metadata: duplicate safety plus a stable key.",
    "Missing metadata is treated as unsafe.",
    "The daemon persists and validates the metadata.",
    "An explicit retry-stale scan can requeue only stale idempotent tasks when the operator passes --enable; skipped "
    "tasks stay visible in the report.",
    "The explicit retry gate and opt-in scheduler can requeue stale in-flight tasks only when an operator enables "
    "bounded policy and the task carries idempotent duplicate-safety metadata.",
)
def test_a_scan_requeues_idempotent_tasks_when_it_is_enabled(pair: Pair) -> None:
    """Through the other daemon; the sentences of the policy have a file of their own."""
    alice, bob, operator = pair.one.enroll(), pair.one.enroll(), pair.two.operator
    assert alice.refused("POST", "/a2a/tasks", alice.task(bob, idempotency=idempotent(""))) == (400, "blank_text")
    safe, silent = alice.send(bob, idempotency=idempotent("k")), alice.send(bob)
    bob.lease(), bob.lease()
    bounds = ("--min-lease-age-ms", "0", "--scan-limit", "1000", "--max-requeues", "50")
    looked = operator.cli.json("a2a", "retry-stale", *bounds)["report"]
    assert safe in [one["task_id"] for one in looked["would_requeue"]] and looked["requeued"] == []
    assert bob.entry(safe)["state"] == "in_flight"
    done = operator.cli.json("a2a", "retry-stale", "--enable", *bounds)["report"]
    assert safe in [one["task_id"] for one in done["requeued"]]
    (skip,) = [skip for skip in done["skipped"] if skip["task_id"] == silent]
    assert skip["reason"] == "missing_idempotency"
    assert (bob.entry(safe)["state"], bob.entry(silent)["state"]) == ("queued", "in_flight")


# --- who may -----------------------------------------------------------------------------------------------


@says(
    "Both write paths are gated by capability tokens, audited via the standard CapabilityCheck event:",
    "SendA2ATask requires a2a.send.<recipient.display>.",
    "The audit row carries scope id a2a-send:<recipient>.",
)
@SURFACES
def test_a_send_needs_a_grant(house: House, bob: Peer, operator: Peer, surface: str) -> None:
    alice, carol = house.daemon.enroll(f"a2a.send.{bob.label}"), house.daemon.enroll(f"a2a.respond.{bob.label}")
    sent = told(alice, surface, "SendA2ATask", task=alice.task(bob))
    assert sent["kind"] == "a2a_task_queued"
    assert told(carol, surface, "SendA2ATask", task=carol.task(bob))["code"] == "missing_capability"
    for peer, passed in ((alice, True), (carol, False)):
        (row,) = checks(operator, peer)
        assert has(row, action=f"a2a.send.{bob.label}", scope_id=f"a2a-send:{bob.label}", passed=passed)
    assert "(missing_capability)" in carol.cli("a2a", "send", bob.label, "do the thing", code=1).err


@says(
    "PostA2AResult requires a2a.respond.<sender.display>, where sender is the original sender of the task identified "
    "by result.task_id.",
    "The audit row carries scope id a2a-respond:<task_id>.",
)
@SURFACES
def test_a_result_needs_a_grant(house: House, alice: Peer, operator: Peer, surface: str) -> None:
    other = house.daemon.enroll()
    bob, carol = (house.daemon.enroll(f"a2a.respond.{sender.label}") for sender in (alice, other))
    for worker, code in ((bob, None), (carol, "missing_capability")):
        task_id = alice.send(worker)
        worker.lease()
        said = told(worker, surface, "PostA2AResult", result=result(task_id))
        assert said.get("code") == code
        (row,) = checks(operator, worker)
        assert has(row, action=f"a2a.respond.{alice.label}", scope_id=f"a2a-respond:{task_id}", passed=code is None)


@says(
    "The daemon looks the sender up via the mailbox; results whose task_id was never dispatched through this daemon "
    "are rejected before the capability check, so the attacker cannot probe for granted caps with arbitrary task ids.",
)
@SURFACES
def test_an_unknown_task_tells_nothing_of_grants(house: House, alice: Peer, operator: Peer, surface: str) -> None:
    """Nor does a task of others: it is as unknown as one that is not there."""
    bob = house.daemon.enroll()
    theirs = alice.send(bob)
    granted, bare = house.daemon.enroll("a2a.respond.*"), house.daemon.enroll("a2a.send.nobody@lab")
    told_to = [
        told(peer, surface, "PostA2AResult", result=result(task_id))
        for peer in (granted, bare)
        for task_id in (ABSENT, theirs)
    ]
    for answer in told_to:
        answer["message"] = answer["message"].replace(theirs, ABSENT)
        answer["task_id"] = ABSENT
    assert [answer["code"] for answer in told_to] == ["unknown_task"] * 4
    assert all(answer == told_to[0] for answer in told_to)
    assert checks(operator, granted) == checks(operator, bare) == []


PINNED: Final = "6f1d0c52-8a0e-4a53-9b0b-3f3f5a0d7c11"


@says(
    "Non-empty A2A scopes are enforced at dispatch.",
    "peer_pubkey_b58 pins the counterparty, task_id pins one task, lease_id pins manual repair to one in-flight lease, "
    "and duplicate_risk pins requeue posture.",
)
def test_a_scope_narrows_a_grant(house: House, alice: Peer, bob: Peer, operator: Peer) -> None:
    def grant(peer: Peer, action: str, **scope: str) -> None:
        operator.ok("POST", "/capabilities", {"subject": peer.label, "action": action, "scope": scope})

    nobody = "a2a.cancel.nobody@lab"
    dan, eve, gil = (house.daemon.enroll(nobody) for _ in range(3))
    grant(dan, "a2a.send.*", peer_pubkey_b58=bob.agent["pubkey"])
    assert dan.http("POST", "/a2a/tasks", dan.task(bob)).status == 200
    assert dan.refused("POST", "/a2a/tasks", dan.task(eve)) == (403, "scope_mismatch")
    grant(dan, "a2a.send.*", task_id=PINNED)
    assert dan.refused("POST", "/a2a/tasks", dan.task(eve)) == (403, "scope_mismatch")
    assert dan.http("POST", "/a2a/tasks", {**dan.task(eve), "id": PINNED}).status == 200

    one, two = alice.send(eve), alice.send(eve)
    eve.lease(), eve.lease()
    grant(eve, "a2a.respond.*", task_id=one)
    assert (eve.post(two).body["code"], eve.post(one).status) == ("scope_mismatch", 200)

    repairs = {name: {"action": "requeue", "duplicate_risk": name} for name in ("idempotent", "operator_accepted")}
    three = alice.send(gil)
    lease = gil.lease()["lease_id"]
    grant(gil, "a2a.repair.requeue", lease_id=lease, duplicate_risk="idempotent")
    narrow = [
        repairs["idempotent"],  # names no lease
        {**repairs["idempotent"], "lease_id": ABSENT},
        {**repairs["operator_accepted"], "lease_id": lease},
    ]
    assert [repaired(gil, three, command)[1]["code"] for command in narrow] == ["scope_mismatch"] * 3
    assert repaired(gil, three, {"action": "force_error", "message": "x", "lease_id": lease})[1]["code"] == (
        "missing_capability"
    )
    assert repaired(gil, three, {**repairs["idempotent"], "lease_id": lease})[0] == 200
    again = gil.lease()["lease_id"]
    assert repaired(gil, three, {**repairs["idempotent"], "lease_id": again})[1]["code"] == "scope_mismatch"


@says("Read paths (TryRecv*, Recent*) are not gated.")
@SURFACES
def test_reading_needs_no_grant(house: House, alice: Peer, surface: str) -> None:
    """It needs a part in what is read: the contract shows a peer what it sent or received, and nothing else."""
    bare, stranger = (house.daemon.enroll("a2a.cancel.nobody@lab") for _ in range(2))
    task_id = alice.send(bare)
    for verb in ("RecentA2ATasks", "A2AQueue"):
        assert len(told(bare, surface, verb, limit=5)["tasks"]) == 1
        assert told(stranger, surface, verb, limit=5)["tasks"] == []
    assert told(stranger, surface, "TryRecvA2ATask")["task"] is None
    assert told(bare, surface, "TryRecvA2ATask")["task"]["id"] == task_id
    assert told(bare, surface, "RecentA2AResults", limit=5)["results"] == []
    assert told(bare, surface, "TryRecvA2AResult")["result"] is None


def nothing_waits(operator: Peer) -> None:
    """Take all that other tests have left in the queues."""
    while operator.ok("GET", "/a2a/tasks/next")["task"] is not None:
        pass
    while operator.ok("GET", "/a2a/results/next")["result"] is not None:
        pass


@says("Drain operations on the operator's own daemon are treated as local-trust actions.")
def test_the_operator_drains_for_everybody(alice: Peer, bob: Peer, operator: Peer) -> None:
    nothing_waits(operator)
    before = len(checks(operator, operator))
    task_id = alice.send(bob)
    bob.lease()
    bob.post(task_id)
    assert operator.cli.json("a2a", "results", "--next")["result"]["task_id"] == task_id
    assert alice.ok("GET", "/a2a/results/next")["result"] is None
    assert len(checks(operator, operator)) == before


@says(
    "Authentication. Both write paths are gated by capability tokens (a2a.send.<recipient> and a2a.respond.<sender>) "
    "checked against the daemon's local identity.",
    "The capability is not yet bound to the calling HTTP/IPC peer; per-call peer authentication is tracked separately.",
)
@SURFACES
def test_a_grant_is_its_holders_alone(house: House, alice: Peer, bob: Peer, operator: Peer, surface: str) -> None:
    """The contract has caught up: a call has a peer behind it, and only that peer's grants count. Each is signed by the
    realm, which is the daemon's identity."""
    bare = house.daemon.enroll("a2a.cancel.nobody@lab")
    granted = operator.ok("GET", f"/capabilities?limit=10&subject={alice.label}")["capabilities"]
    realm = operator.ok("GET", "/version")["realm"]
    assert [grant["granted_by"]["pubkey"] for grant in granted] == [realm, realm]
    assert told(bare, surface, "SendA2ATask", task=bare.task(bob))["code"] == "missing_capability"
    as_alice = {**bare.task(bob), "sender": alice.agent}
    assert told(bare, surface, "SendA2ATask", task=as_alice)["code"] == "sender_mismatch"
    task_id = alice.send(bob)
    bob.lease()
    assert told(alice, surface, "PostA2AResult", result=result(task_id))["code"] == "not_permitted"
    nobody = Peer(house.daemon, "cov_unknown", {})
    assert nobody.refused("POST", "/a2a/tasks", bare.task(bob)) == (401, "unauthenticated")


# --- what stays --------------------------------------------------------------------------------------------


@says(
    "Routing. Peer-scoped receives only drain tasks addressed to the authenticated recipient.",
)
@SURFACES
def test_a_peer_receives_its_own(house: House, alice: Peer, bob: Peer, surface: str) -> None:
    carol = house.daemon.enroll()
    task_id = alice.send(bob)
    for peer in (carol, alice):
        assert told(peer, surface, "TryRecvA2ATask")["task"] is None
    other = carol.ipc("try_recv_a2a_task", **{"for": bob.label})
    assert other["code"] == carol.http("GET", f"/a2a/tasks/next?for={bob.label}").body["code"] == "not_permitted"
    assert told(bob, surface, "TryRecvA2ATask")["task"]["id"] == task_id


@says("Global FIFO receives remain available for in-process orchestrators.")
def test_whoever_receives_for_all_gets_the_oldest(house: House, alice: Peer, bob: Peer, operator: Peer) -> None:
    """In a program that has the store itself; and, as the operator, at a daemon."""
    nothing_waits(operator)
    carol = house.daemon.enroll()
    sent = [alice.send(to) for to in (bob, carol, bob)]
    assert [operator.lease()["task"]["id"] for _ in sent] == sent

    async def in_process() -> None:
        async with Mailbox.open("memory:") as box:
            ids = [
                (await box.of("a@lab").send_task(Task(recipient=AgentId(to), intent_text="x"))).task_id
                for to in ("b@lab", "c@lab", "b@lab")
            ]
            assert [(await box.recv_task()).task.id for _ in ids] == ids

    asyncio.run(in_process())


def log_of(home: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (home / "data").glob("journal-*.jsonl")}


@says("Persistence. The daemon uses an append-only JSONL mailbox.")
def test_the_log_only_grows(house: House, alice: Peer, bob: Peer) -> None:
    before = log_of(house.daemon.home)
    task_id = alice.send(bob)
    bob.lease()
    bob.post(task_id)
    after = log_of(house.daemon.home)
    assert all(after[name].startswith(lines) for name, lines in before.items())
    new = b"".join(after[name][len(before.get(name, b"")) :] for name in sorted(after))
    assert new.count(task_id.encode()) >= 3 and all(line.startswith(b"{") for line in new.splitlines())


@says(
    "Queued tasks, in-flight leases, sender lookup state, and pending results replay after restart.",
    "Leases survive daemon restart and are not automatically redelivered; operators inspect them through the "
    "queue-status surface and repair them explicitly when needed.",
    "Retry posture. A2A delivery avoids automatic redelivery of leased tasks after restart.",
)
def test_after_a_kill_everything_is_where_it_was(house: House, alice: Peer, bob: Peer, operator: Peer) -> None:
    """The holder goes on as the text has it: it names no lease, and is the one that it was."""
    pending, held, lost, queued = (alice.send(bob, intent_text=what) for what in ("pending", "held", "lost", "queued"))
    leases = {task_id: bob.lease()["lease_id"] for task_id in (pending, held, lost)}
    bob.post(pending)
    before = alice.ok("GET", "/a2a/queue?limit=10")
    house.daemon.kill()
    house.daemon.start()
    assert alice.ok("GET", "/a2a/queue?limit=10") == before
    assert bob.lease()["task"]["id"] == queued
    assert bob.ok("GET", "/a2a/tasks/next")["task"] is None
    assert bob.ok("POST", f"/a2a/leases/{leases[held]}/heartbeat", {})["task_id"] == held
    assert bob.post(held).status == 200
    assert {alice.drain()["result"]["task_id"] for _ in range(2)} == {pending, held}
    seen = {entry["task"]["id"]: entry for entry in operator.cli.json("a2a", "status", "--limit", "100")["tasks"]}
    assert seen[lost]["lease_id"] == leases[lost]
    assert repaired(operator, lost, {"action": "requeue", "duplicate_risk": "operator_accepted"})[0] == 200
    assert bob.lease()["attempt"] == 2


def test_a_holder_goes_on_at_another_daemon(pair: Pair) -> None:
    """The same over two daemons of one store: results, sign of life, and what the next attempt needs."""
    alice, bob = pair.one.enroll(), pair.one.enroll()
    task_id = alice.send(bob)
    lease = bob.lease()["lease_id"]
    elsewhere = bob.at(pair.two)
    assert elsewhere.ok("POST", f"/a2a/leases/{lease}/heartbeat", {})["task_id"] == task_id
    assert elsewhere.post(task_id, "partial").body["sequence"] == 1
    assert elsewhere.ok("POST", f"/a2a/leases/{lease}/release", {})["attempt"] == 1
    assert bob.lease()["attempt"] == 2
    assert elsewhere.post(task_id).body["code"] == "lease_required"
    assert elsewhere.post(task_id, lease_id=bob.entry(task_id)["lease_id"]).status == 200


# --- the text itself ---------------------------------------------------------------------------------------

says.state_nothing(
    "a heading",
    "Agent-to-agent",
    "Wire types",
    "Mailbox",
    "Lease repair",
    "Daemon-mediated flow",
    "Capability gating",
    "Orchestration patterns",
    "Fan-out",
    "Pipeline",
    "Implementation notes",
    "Related",
)
says.state_nothing(
    "names another page",
    "See A2A idempotency policy.",
    "See Local IPC for the full request/ response shapes.",
)


def test_every_sentence_has_a_test() -> None:
    assert (says.without_a_test(), says.both()) == ([], [])
    assert says.marked() <= set(globals()) and len(says.all) == 104
