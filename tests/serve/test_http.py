"""HTTP as somebody with curl sees it: the seeds' shapes to the letter, and what goes wrong with a status and a code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from io import BytesIO
from typing import Any

import aiohttp
import pytest

from covenant import AgentId, Limits
from covenant.exchange.bounds import Bounds
from covenant.model.peer import Caller
from covenant.serve.daemon import Daemon
from covenant.serve.places import PLACES
from covenant.serve.status import HTTP_STATUS
from tests.daemons import OPERATOR_TOKEN, Realmful, start_daemon
from tests.until import until

ALICE, BOB = AgentId.named("alice@lab"), AgentId.named("bob@lab")
ABSENT = "00000000-0000-4000-8000-000000000000"


class Site:
    """A daemon and a client that knows nothing but URLs and JSON."""

    def __init__(self, daemon: Daemon, tokens: dict[str, str], session: aiohttp.ClientSession) -> None:
        self.daemon = daemon
        self.tokens = {**tokens, "operator": OPERATOR_TOKEN}
        self.session = session

    async def call(
        self, who: str | None, method: str, path: str, body: Any = None, *, raw: bytes | None = None
    ) -> tuple[int, dict[str, Any]]:
        headers = {} if who is None else {"Authorization": f"Bearer {self.tokens.get(who, who)}"}
        data = None if raw is None and body is None else BytesIO(raw if raw is not None else json.dumps(body).encode())
        async with self.session.request(method, f"{self.daemon.url}{path}", data=data, headers=headers) as response:
            assert response.headers["Content-Type"] == "application/json"
            return response.status, json.loads(await response.read())


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    daemon = await start_daemon("memory:", Limits())
    realm = Realmful()
    await realm.enroll(daemon)
    async with aiohttp.ClientSession() as session:
        yield Site(daemon, realm.tokens, session)
    await daemon.stop()


def operator(site: Site) -> Caller:
    return site.daemon.exchange.authenticate(OPERATOR_TOKEN)


def task(**more: Any) -> dict[str, Any]:
    agent = {"display": BOB.display, "pubkey": BOB.pubkey}
    return {"recipient": agent, "intent_text": "do the thing", **more}


async def test_a_task_goes_round_in_the_shapes_of_the_seed(site: Site) -> None:
    """Contract 29: to the letter."""
    sender = {"display": ALICE.display, "pubkey": ALICE.pubkey}
    status, sent = await site.call("alice@lab", "POST", "/a2a/tasks", task(id=ABSENT, sender=sender))
    assert (status, sent) == (200, {"kind": "a2a_task_queued", "task_id": ABSENT, "generation": 1})
    status, taken = await site.call("bob@lab", "GET", "/a2a/tasks/next")
    assert status == 200
    assert taken["kind"] == "a2a_task_opt"
    assert taken["task"] == {**task(id=ABSENT, sender=sender)}
    assert (taken["attempt"], taken["generation"]) == (1, 2)
    assert await site.call("bob@lab", "GET", "/a2a/tasks/next") == (200, {"kind": "a2a_task_opt", "task": None})
    result = {"task_id": ABSENT, "status": "ok", "content": [{"type": "text", "text": "done"}]}
    posted = await site.call("bob@lab", "POST", "/a2a/results", {**result, "lease_id": taken["lease_id"]})
    assert posted == (200, {"kind": "a2a_result_posted", "task_id": ABSENT, "generation": 4})
    status, recent = await site.call("alice@lab", "GET", "/a2a/tasks/recent?limit=5")
    assert (recent["kind"], [item["id"] for item in recent["tasks"]]) == ("a2a_tasks", [ABSENT])
    status, queue = await site.call("alice@lab", "GET", "/a2a/queue?limit=5")
    assert (queue["kind"], len(queue["results"])) == ("a2a_queue", 1)
    status, drained = await site.call("alice@lab", "GET", "/a2a/results/next")
    assert drained["kind"] == "a2a_result_opt"
    assert drained["result"] == {**result, "lease_id": taken["lease_id"]}
    assert (drained["generation"], drained["attempt"]) == (4, 1)
    assert await site.call("alice@lab", "GET", "/a2a/results/next") == (200, {"kind": "a2a_result_opt", "result": None})
    status, results = await site.call("alice@lab", "GET", "/a2a/results/recent?limit=5")
    assert (results["kind"], len(results["results"])) == ("a2a_results", 1)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place.method} {place.path}")
@pytest.mark.parametrize("token", [None, "cov_wrong", ""], ids=["none", "wrong", "empty"])
async def test_every_verb_wants_a_valid_token(site: Site, place: Any, token: str | None) -> None:
    if place.path == "/version":
        return  # says nothing that is not public
    path = place.path.replace(f"{{{place.parameter}}}", ABSENT)
    status, answer = await site.call(token, place.method, path, {})
    assert (status, answer["kind"], answer["code"]) == (401, "error", "unauthenticated")


@pytest.mark.parametrize("name", ["limitt", "kind", "entry"])
async def test_a_parameter_that_a_route_does_not_have_is_refused(site: Site, name: str) -> None:
    """Contract 34: a misspelled filter would list everything."""
    places = [place for place in PLACES if place.path != "/version"]  # which reads nothing
    assert len(places) > 40
    for place in places:
        path = place.path.replace(f"{{{place.parameter}}}", ABSENT)
        status, answer = await site.call("alice@lab", place.method, f"{path}?{name}=x", {})
        assert (status, answer["code"], answer["field"]) == (400, "malformed", "query"), place
        assert f"no parameter is called '{name}' here; there are: " in answer["message"]


@pytest.mark.parametrize(
    ("method", "path", "raw", "status", "code"),
    [
        ("POST", "/a2a/tasks", b"{", 400, "malformed"),
        ("POST", "/a2a/tasks", b"", 400, "malformed"),
        ("POST", "/a2a/tasks", b"[]", 400, "malformed"),
        ("POST", "/a2a/tasks", b"\xff\xfe", 400, "malformed"),
        ("POST", "/a2a/tasks", b"[" * 100_000, 400, "malformed"),
        ("POST", "/a2a/tasks", json.dumps(task(intent_text=5)).encode(), 400, "malformed"),
        ("POST", "/a2a/tasks", json.dumps(task(intent_text=" ")).encode(), 400, "blank_text"),
        ("POST", "/a2a/tasks", json.dumps(task(id="7")).encode(), 400, "bad_id"),
        ("POST", "/a2a/tasks", b"x" * (9 * 1024 * 1024), 413, "too_large"),
        ("POST", "/a2a/results", b'{"task_id":"%b","status":"ok"}' % ABSENT.encode(), 404, "unknown_task"),
        ("GET", f"/a2a/tasks/{ABSENT}", None, 404, "unknown_task"),
        ("GET", "/a2a/tasks/nonsense", None, 400, "bad_id"),
        ("GET", "/a2a/queue?limit=many", None, 400, "malformed"),
        ("GET", "/a2a/queue?limit=1&limit=2", None, 400, "malformed"),
        ("GET", "/a2a/queue?limit=100000", None, 413, "too_large"),
        ("GET", "/a2a/queue?state=lost", None, 400, "malformed"),
        ("GET", "/a2a/queue?cursor=foreign", None, 400, "bad_cursor"),
        ("GET", "/a2a/nothing", None, 404, "unknown_route"),
        ("DELETE", "/a2a/tasks", None, 405, "wrong_method"),
        ("POST", f"/a2a/leases/{ABSENT}/heartbeat", b"", 404, "unknown_lease"),
        ("POST", f"/a2a/tasks/{ABSENT}/cancel", b'{"graceful":"yes"}', 400, "malformed"),
        ("DELETE", "/a2a/cache?entry_id=slot:x", None, 400, "malformed"),
        ("POST", "/a2a/compact", b"", 403, "missing_capability"),
    ],
)
async def test_what_is_wrong_gets_a_status_and_a_code(
    site: Site, method: str, path: str, raw: bytes | None, status: int, code: str
) -> None:
    """Contract 29: one error object, and a status that fits it."""
    got, answer = await site.call("alice@lab", method, path, raw=raw)
    assert (got, answer["kind"], answer["code"]) == (status, "error", code)
    assert answer["message"]
    assert (await site.call("operator", "GET", "/a2a/queue"))[1]["tasks"] == []


def test_every_code_has_a_status() -> None:
    """Contract 29."""
    from covenant.client.reply import _by_code

    assert set(HTTP_STATUS) == set(_by_code())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/capabilities", {"subject": "bob@lab", "action": "peers.list", "scope": {"uses": 1}}),
        ("/a2a/retry-stale", {"policy": {"enabled": True, "max_requeue": 1}}),
        (
            "/a2a/repair",
            {"task_id": ABSENT, "command": {"action": "force_error", "message": "x"}, "reason": "x", "x": 1},
        ),
        (
            "/a2a/repair",
            {"task_id": ABSENT, "command": {"action": "force_error", "message": "x", "lease": ABSENT}, "reason": "x"},
        ),
        (
            "/a2a/repair",
            {
                "task_id": ABSENT,
                "command": {"action": "requeue", "duplicate_risk": "idempotent", "lease": ABSENT},
                "reason": "x",
            },
        ),
    ],
    ids=["scope", "policy", "repair", "guard of force_error", "guard of requeue"],
)
async def test_a_bound_under_a_wrong_name_is_refused(site: Site, path: str, body: dict[str, Any]) -> None:
    """Contract 34: it would be a call without the bound."""
    status, answer = await site.call("operator", "POST", path, body)
    assert (status, answer["code"]) == (400, "malformed") and "unknown field" in answer["message"]


async def test_a_result_of_an_old_lease_and_a_second_result_are_conflicts(site: Site) -> None:
    await site.call("alice@lab", "POST", "/a2a/tasks", task(id=ABSENT))
    _, first = await site.call("bob@lab", "POST", "/a2a/tasks/next")
    request = {"task_id": ABSENT, "command": {"action": "requeue", "duplicate_risk": "operator_accepted"}}
    status, repaired = await site.call("operator", "POST", "/a2a/repair", {**request, "reason": "stuck"})
    assert (status, repaired["kind"], repaired["outcome"]["action"]) == (200, "a2a_repaired", "requeued")
    result = {"task_id": ABSENT, "status": "ok", "content": []}
    status, answer = await site.call("bob@lab", "POST", "/a2a/results", {**result, "lease_id": first["lease_id"]})
    assert (status, answer["code"]) == (409, "lease_superseded")
    _, second = await site.call("bob@lab", "GET", "/a2a/tasks/next")
    good = {**result, "lease_id": second["lease_id"]}
    assert (await site.call("bob@lab", "POST", "/a2a/results", good))[0] == 200
    assert (await site.call("bob@lab", "POST", "/a2a/results", good))[1]["duplicate"] is True
    status, answer = await site.call("bob@lab", "POST", "/a2a/results", {**good, "status": "error"})
    assert (status, answer["code"]) == (409, "result_conflict")


async def test_a_waiting_next_is_answered_when_work_comes(site: Site) -> None:
    waiting = asyncio.create_task(site.call("bob@lab", "GET", "/a2a/tasks/next?wait_ms=20000"))
    await until(lambda: site.daemon.exchange.waits.total > 0)
    await site.call("alice@lab", "POST", "/a2a/tasks", task(id=ABSENT))
    _, taken = await asyncio.wait_for(waiting, 10)
    assert taken["task"]["id"] == ABSENT


async def test_a_wait_ends_with_nothing_when_its_time_is_over(site: Site) -> None:
    assert await site.call("bob@lab", "GET", "/a2a/tasks/next?wait_ms=1") == (
        200,
        {"kind": "a2a_task_opt", "task": None},
    )


async def test_a_client_that_hangs_up_while_it_waits_has_taken_nothing(site: Site) -> None:
    waiting = asyncio.create_task(site.call("bob@lab", "GET", "/a2a/tasks/next?wait_ms=20000"))
    await until(lambda: site.daemon.exchange.waits.total > 0)
    waiting.cancel()
    async with asyncio.timeout(10):  # before the wait would be over by itself
        await until(lambda: site.daemon.exchange.waits.total == 0)
    await site.call("alice@lab", "POST", "/a2a/tasks", task(id=ABSENT))
    _, taken = await site.call("bob@lab", "GET", "/a2a/tasks/next")
    assert (taken["task"]["id"], taken["attempt"]) == (ABSENT, 1)


async def test_a_task_is_waited_for_by_its_generation(site: Site) -> None:
    await site.call("alice@lab", "POST", "/a2a/tasks", task(id=ABSENT))
    path = f"/a2a/tasks/{ABSENT}?current_generation=1&wait_ms=20000"
    waiting = asyncio.create_task(site.call("alice@lab", "GET", path))
    await until(lambda: site.daemon.exchange.waits.total > 0)
    await site.call("bob@lab", "GET", "/a2a/tasks/next")
    _, answer = await asyncio.wait_for(waiting, 10)
    assert (answer["kind"], answer["entry"]["generation"], answer["entry"]["state"]) == ("a2a_task", 2, "in_flight")


async def test_a_revoked_token_opens_nothing_and_ends_the_waits_of_its_peer(site: Site) -> None:
    waiting = asyncio.create_task(site.call("bob@lab", "GET", "/a2a/tasks/next?wait_ms=20000"))
    await until(lambda: site.daemon.exchange.waits.total > 0)
    status, gone = await site.call("operator", "DELETE", "/peers/bob@lab")
    assert (status, gone["kind"]) == (200, "peer_revoked")
    status, answer = await asyncio.wait_for(waiting, 10)
    assert status in (200, 401)
    assert answer.get("task") is None
    assert (await site.call("bob@lab", "GET", "/a2a/tasks/next"))[0] == 401


async def test_both_parties_may_be_named_by_their_labels(site: Site) -> None:
    """A sender is whoever came in, and may say so in the same words as it names its recipient."""
    site.tokens["dora@lab"] = (await site.daemon.exchange.enroll(operator(site), "dora@lab", None, ["a2a.send.*"]))[1]
    named = {"recipient": {"display": "bob@lab"}, "intent_text": "do the thing"}
    assert (await site.call("dora@lab", "POST", "/a2a/tasks", {**named, "sender": {"display": "dora@lab"}}))[0] == 200
    _, whoami = await site.call("dora@lab", "GET", "/whoami")
    _, taken = await site.call("bob@lab", "GET", "/a2a/tasks/next")
    assert taken["task"]["sender"] == {"display": "dora@lab", "pubkey": whoami["agent"]["pubkey"]}
    for other in ({"display": "bob@lab"}, {"display": "dora@lab", "pubkey": BOB.pubkey}, {"display": "dora"}):
        status, refused = await site.call("dora@lab", "POST", "/a2a/tasks", {**named, "sender": other})
        assert (status, refused["code"]) == (403, "sender_mismatch")


async def test_a_flood_is_told_to_come_back_later() -> None:
    daemon = await start_daemon("memory:", Limits(), bounds=Bounds(requests_per_s=1, burst=3))
    async with aiohttp.ClientSession() as session:
        site = Site(daemon, {}, session)
        answers = [await site.call("operator", "GET", "/whoami") for _ in range(5)]
        assert [status for status, _ in answers] == [200, 200, 200, 429, 429]
        async with session.get(f"{daemon.url}/whoami", headers={"Authorization": f"Bearer {OPERATOR_TOKEN}"}) as late:
            assert int(late.headers["Retry-After"]) >= 1
    await daemon.stop()


async def test_a_full_queue_is_429_and_other_recipients_are_not_touched() -> None:
    daemon = await start_daemon("memory:", Limits(queue_depth_max=2))
    realm = Realmful()
    await realm.enroll(daemon)
    async with aiohttp.ClientSession() as session:
        site = Site(daemon, realm.tokens, session)
        answers = [await site.call("alice@lab", "POST", "/a2a/tasks", task()) for _ in range(3)]
        assert [status for status, _ in answers] == [200, 200, 429]
        assert answers[2][1]["code"] == "queue_full"
        other = {"display": ALICE.display, "pubkey": ALICE.pubkey}
        assert (await site.call("alice@lab", "POST", "/a2a/tasks", task(recipient=other)))[0] == 200
    await daemon.stop()


async def test_a_body_that_never_ends_is_cut_off(site: Site) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 1024 * 1024

    headers = {"Authorization": f"Bearer {site.tokens['alice@lab']}"}
    try:
        async with site.session.post(f"{site.daemon.url}/a2a/tasks", data=endless(), headers=headers) as response:
            assert response.status == 413
    except aiohttp.ClientError:
        pass  # it was told, and hung up on, while it was still talking
    assert (await site.call("alice@lab", "GET", "/whoami"))[0] == 200


async def test_a_client_that_sends_half_a_body_blocks_nobody(site: Site) -> None:
    assert site.daemon.address is not None
    _, writer = await asyncio.open_connection(*site.daemon.address)
    writer.write(
        f"POST /a2a/tasks HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {site.tokens['alice@lab']}\r\n"
        "Content-Length: 1000\r\n\r\n{".encode()
    )
    await writer.drain()
    assert (await site.call("alice@lab", "GET", "/whoami"))[0] == 200
    writer.close()
    await writer.wait_closed()
    assert (await site.call("alice@lab", "POST", "/a2a/tasks", task()))[0] == 200


async def test_a_page_of_the_audit_ends_where_an_answer_is_full() -> None:
    daemon = await start_daemon("memory:", Limits(page_bytes_max=3000))
    realm = Realmful()
    await realm.enroll(daemon)
    async with aiohttp.ClientSession() as session:
        site = Site(daemon, realm.tokens, session)
        for number in range(6):
            _, sent = await site.call("alice@lab", "POST", "/a2a/tasks", task())
            reason = {"reason": f"{number}" * 1000}
            assert (await site.call("alice@lab", "POST", f"/a2a/tasks/{sent['task_id']}/cancel", reason))[0] == 200
        seen: list[int] = []
        cursor = ""
        while True:
            _, page = await site.call("operator", "GET", f"/audit?limit=1000{cursor}")
            assert len(json.dumps(page["rows"])) < 6000
            seen += [row["seq"] for row in page["rows"] if row["kind"] == "ended"]
            if page.get("cursor") is None:
                break
            cursor = f"&before={page['cursor']}"
    assert len(seen) == len(set(seen)) == 6
    await daemon.stop()
