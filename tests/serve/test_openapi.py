"""The description of the API is complete, and what the daemon answers never lies outside of it."""

from __future__ import annotations

import copy
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import jsonschema_rs
import msgspec
import pytest

from covenant import AgentId, Limits, Task
from covenant.model.command import SendTask
from covenant.model.record import TaskState
from covenant.serve.daemon import Daemon
from covenant.serve.openapi import TAGS, description
from covenant.serve.page import HTML, POLICY
from covenant.serve.places import PLACES, Place
from covenant.serve.status import HTTP_STATUS
from tests.daemons import OPERATOR_TOKEN, Realmful, start_daemon
from tests.docs.shell import typed_beside_a_daemon
from tests.docs.support import names_in, page, rows

DOCUMENT: Final[dict[str, Any]] = msgspec.json.decode(msgspec.json.encode(description(Limits())))
PAGES: Final = ("/healthz", "/readyz", "/version", "/metrics", "/a2a/events", "/openapi.json", "/docs")
NOWHERE: Final = "00000000-0000-0000-0000-000000000000"
_OPEN: Final = ("Error",)  # may hold more than it says


class Described:
    """What the description says of answers. `is_closed`: a member that is not described is a fault, too."""

    def __init__(self, document: dict[str, Any], is_closed: bool = True) -> None:
        self._document = copy.deepcopy(document)
        self._validators: dict[tuple[str, str, int], jsonschema_rs.Draft202012Validator] = {}
        if is_closed:
            for name, schema in self._document["components"]["schemas"].items():
                if "properties" in schema and name not in _OPEN:
                    schema.setdefault("additionalProperties", False)  # a content block says that it is open

    def check(self, method: str, path: str, status: int, answer: Any) -> None:
        """Raises unless this may be the answer of this route."""
        key = (method, path, status)
        if key not in self._validators:
            self._validators[key] = jsonschema_rs.Draft202012Validator(self._schema(*key))
        self._validators[key].validate(answer)

    def _schema(self, method: str, path: str, status: int) -> dict[str, Any]:
        responses = self._document["paths"][path][method.lower()]["responses"]
        assert str(status) in responses, f"{method} {path} is not said to answer {status}"
        response = responses[str(status)]
        if "$ref" in response:
            response = self._document["components"]["responses"][response["$ref"].rpartition("/")[2]]
        return {**response["content"]["application/json"]["schema"], "components": self._document["components"]}


class Api:
    """A client that believes no answer before it was compared with the description."""

    def __init__(self, daemon: Daemon, tokens: dict[str, str], session: aiohttp.ClientSession) -> None:
        self.seen: set[tuple[str, str, int]] = set()
        self.daemon = daemon
        self._url = str(daemon.url)
        self._tokens = {**tokens, "operator": OPERATOR_TOKEN, "nobody": "cov_unknown"}
        self._session = session
        self._described = Described(DOCUMENT)

    def token(self, who: str) -> str:
        return self._tokens[who]

    async def call(self, who: str, method: str, path: str, body: Any = None, **members: str | int) -> tuple[int, Any]:
        """Members that are in the path go there, the others into the query."""
        place = path.format_map(members)
        query = {name.rstrip("_"): str(value) for name, value in members.items() if f"{{{name}}}" not in path}
        headers = {"Authorization": f"Bearer {self._tokens[who]}"}
        data = None if body is None else msgspec.json.encode(body)
        async with self._session.request(
            method, self._url + place, params=query, data=data, headers=headers
        ) as response:
            answer = await response.json()
            self._described.check(method, path, response.status, answer)
            self.seen.add((method, path, response.status))
            return response.status, answer

    async def ok(self, who: str, method: str, path: str, body: Any = None, **members: str | int) -> Any:
        status, answer = await self.call(who, method, path, body, **members)
        assert status == 200, answer
        return answer

    async def refused(self, code: str, who: str, method: str, path: str, body: Any = None, **members: str | int) -> Any:
        status, answer = await self.call(who, method, path, body, **members)
        assert (status, answer["code"]) == (HTTP_STATUS[code], code)
        return answer


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    daemon = await start_daemon(f"file:{tmp_path / 'data'}", Limits())
    realm = Realmful()
    await realm.enroll(daemon)
    async with aiohttp.ClientSession() as session:
        yield Api(daemon, realm.tokens, session)
    await daemon.stop()


def task_for(name: str, **members: Any) -> dict[str, Any]:
    agent = AgentId.named(name)
    return {"recipient": {"display": agent.display, "pubkey": agent.pubkey}, "intent_text": "look", **members}


def idempotent(key: str) -> dict[str, str]:
    return {"duplicate_safety": "idempotent", "key": key}


# --- the document ------------------------------------------------------------------------------------------


def methods_of(place: Place) -> tuple[str, ...]:
    return (place.method, *place.also)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place.method} {place.path}")
def test_every_verb_is_described(place: Place) -> None:
    for method in methods_of(place):
        operation = DOCUMENT["paths"][place.path][method.lower()]
        assert operation["summary"] == place.summary
        assert operation["tags"][0] in TAGS
        assert ("requestBody" in operation) == (place.body is not None)


def test_nothing_is_described_that_is_not_there() -> None:
    described = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    there = {(method, place.path) for place in PLACES for method in methods_of(place)}
    assert described == there | {("GET", path) for path in PAGES}


def test_every_operation_has_a_name_of_its_own() -> None:
    names = [o["operationId"] for methods in DOCUMENT["paths"].values() for o in methods.values()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place.method} {place.path}")
def test_every_member_of_a_request_has_its_place(place: Place) -> None:
    """In the path, in the query or in the body: nowhere else, and not twice."""
    operation = DOCUMENT["paths"][place.path][place.method.lower()]
    members = {field.encode_name for field in msgspec.structs.fields(place.request)} - {"id"}
    if place.path == "/version":
        return
    placed = [parameter["name"] for parameter in operation["parameters"]]
    if place.body == "*":
        placed += operation["requestBody"]["content"]["application/json"]["schema"]["properties"]
    elif place.body is not None:
        placed.append(place.body)
    assert sorted(placed) == sorted(members)


def test_every_code_is_described_under_its_status() -> None:
    for code, status in HTTP_STATUS.items():
        response = DOCUMENT["components"]["responses"][f"Error{status}"]
        assert code in response["content"]["application/json"]["schema"]["properties"]["code"]["enum"]


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_every_reference_leads_somewhere() -> None:
    for reference in set(references(DOCUMENT)):
        node = DOCUMENT
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]


def test_every_schema_is_used() -> None:
    used = {reference.rpartition("/")[2] for reference in references(DOCUMENT) if "/schemas/" in reference}
    assert set(DOCUMENT["components"]["schemas"]) == used


def test_the_bounds_are_those_in_force() -> None:
    document = description(Limits(page_max=7, batch_max=3))
    listing = document["paths"]["/a2a/queue"]["get"]["parameters"]
    assert next(p["schema"]["maximum"] for p in listing if p["name"] == "limit") == 7
    batch = document["paths"]["/a2a/tasks/next/batch"]["post"]["requestBody"]["content"]["application/json"]
    assert batch["schema"]["properties"]["limit"] == {"type": "integer", "minimum": 1, "maximum": 3}


# --- the answers -------------------------------------------------------------------------------------------


async def test_every_answer_is_as_described(api: Api) -> None:
    await one_task_to_its_end(api)
    await many_tasks_and_the_cache(api)
    await repair_and_retry(api)
    await a_dialog(api)
    await a_run(api)
    await who_may_do_what(api)
    await the_service(api)
    answered = {(method, path) for method, path, status in api.seen if status == 200}
    verbs = {(method, place.path) for place in PLACES for method in methods_of(place)}
    assert verbs - answered == set()


async def one_task_to_its_end(api: Api) -> None:
    nothing = await api.ok("bob@lab", "GET", "/a2a/tasks/next", wait_ms=1)
    assert nothing["task"] is None
    content = [
        {"type": "text", "text": "é", "_meta": {"a": 1}, "future": [None]},
        {"type": "json", "value": {"n": [1, None, 2.5]}},
    ]
    sent = await api.ok("alice@lab", "POST", "/a2a/tasks", task_for("bob@lab", content=content, parent=NOWHERE))
    task_id = sent["task_id"]
    lease = await api.ok("bob@lab", "GET", "/a2a/tasks/next")
    assert lease["task"]["content"] == content
    await api.ok("bob@lab", "POST", "/a2a/leases/{lease_id}/heartbeat", {}, lease_id=lease["lease_id"])
    await api.ok("bob@lab", "POST", "/a2a/leases/{lease_id}/release", {"reason": "late"}, lease_id=lease["lease_id"])
    await api.refused(
        "lease_superseded", "bob@lab", "POST", "/a2a/leases/{lease_id}/heartbeat", {}, lease_id=lease["lease_id"]
    )
    lease = await api.ok("bob@lab", "POST", "/a2a/tasks/next", incarnation="two")
    answer = {"task_id": task_id, "lease_id": lease["lease_id"]}
    await api.ok(
        "bob@lab", "POST", "/a2a/results", {**answer, "status": "partial", "content": content}, incarnation="two"
    )
    await api.ok("bob@lab", "POST", "/a2a/results", {**answer, "status": "ok"})
    await api.ok("alice@lab", "GET", "/a2a/queue", state="result_pending")
    await api.ok("alice@lab", "GET", "/a2a/results/next")
    await api.ok("alice@lab", "POST", "/a2a/results/next")
    await api.ok("alice@lab", "GET", "/a2a/results/{task_id}", task_id=task_id)
    await api.ok("alice@lab", "GET", "/a2a/results/recent")
    await api.ok("operator", "GET", "/a2a/tasks/{task_id}", task_id=task_id, current_generation=1, wait_ms=1)
    await api.ok("alice@lab", "GET", "/a2a/tasks/{task_id}/tree", task_id=NOWHERE)
    await api.ok("alice@lab", "GET", "/a2a/tasks/{task_id}/why", task_id=task_id)
    await api.refused("unknown_task", "carol@lab", "GET", "/a2a/tasks/{task_id}", task_id=task_id)
    await api.refused("bad_id", "alice@lab", "GET", "/a2a/tasks/{task_id}", task_id="x")


async def many_tasks_and_the_cache(api: Api) -> None:
    tasks = [task_for("bob@lab", idempotency=idempotent("k")), task_for("nobody@lab"), task_for("bob@lab")]
    batch = await api.ok("alice@lab", "POST", "/a2a/tasks/batch", {"tasks": tasks})
    assert ["error" in item for item in batch["items"]] == [False, True, False]
    await api.ok("alice@lab", "POST", "/a2a/tasks", tasks[0])
    for state in TaskState:
        if state is TaskState.RESOLVED:
            await api.refused("malformed", "operator", "GET", "/a2a/queue", state=state)
        else:
            await api.ok("operator", "GET", "/a2a/queue", state=state)
    await api.ok("operator", "GET", "/a2a/queue", state="in_flight", min_lease_age_ms=0, deadline_within_ms=5)
    await api.refused("malformed", "operator", "GET", "/audit", row="nosuch")
    leased = await api.ok("bob@lab", "POST", "/a2a/tasks/next/batch", {"limit": 10, "receipt": "r"})
    await api.ok("bob@lab", "POST", "/a2a/give-back", {"receipt": "r"})
    leased = await api.ok("bob@lab", "POST", "/a2a/tasks/next/batch", {"limit": 10, "receipt": "s"})
    await api.refused("malformed", "bob@lab", "GET", "/a2a/results/next", receipt="s")
    for lease in leased["deliveries"]:
        answer = {"task_id": lease["task"]["id"], "lease_id": lease["lease_id"], "status": "ok"}
        await api.ok("bob@lab", "POST", "/a2a/results", answer)
        await api.refused("result_conflict", "bob@lab", "POST", "/a2a/results", {**answer, "error_message": "no"})
    await api.ok("alice@lab", "POST", "/a2a/tasks", tasks[0])
    await api.ok("alice@lab", "POST", "/a2a/results/next/batch", {"limit": 10})
    cached = await api.ok("operator", "GET", "/a2a/cache", limit=1)
    entry = cached["entries"][0]["id"]
    await api.ok("operator", "DELETE", "/a2a/cache", entry_id=entry, reason="old")
    await api.refused("unknown_task", "operator", "DELETE", "/a2a/cache", entry_id=entry, reason="old")
    await api.ok("alice@lab", "GET", "/a2a/tasks/recent", limit=3)
    await api.refused("too_large", "alice@lab", "GET", "/a2a/tasks/recent", limit=10**6)


async def repair_and_retry(api: Api) -> None:
    for key in ("one", "two"):
        await api.ok("alice@lab", "POST", "/a2a/tasks", task_for("bob@lab", idempotency=idempotent(key)))
    leased = await api.ok("bob@lab", "POST", "/a2a/tasks/next/batch", {"limit": 2})
    first, second = (delivery["task"]["id"] for delivery in leased["deliveries"])
    await api.ok("alice@lab", "GET", "/a2a/tasks/{task_id}/why", task_id=first)
    requeue = {"task_id": first, "command": {"action": "requeue", "duplicate_risk": "idempotent"}, "reason": "gone"}
    await api.refused("missing_capability", "bob@lab", "POST", "/a2a/repair", requeue)
    await api.ok("operator", "POST", "/a2a/repair", requeue)
    await api.refused("not_leased", "operator", "POST", "/a2a/repair", requeue)
    await api.ok("operator", "POST", "/a2a/retry-stale", {"policy": {"min_lease_age_ms": 0}, "scheduled": True})
    await api.ok("operator", "POST", "/a2a/retry-stale", {"policy": {"min_lease_age_ms": 0, "enabled": True}})
    await api.ok("alice@lab", "POST", "/a2a/tasks/{task_id}/cancel", {"reason": "enough"}, task_id=second)
    await api.ok("bob@lab", "GET", "/a2a/tasks/next")
    force = {"task_id": first, "command": {"action": "force_error", "message": "no"}, "reason": "gone"}
    await api.ok("operator", "POST", "/a2a/repair", force)
    await api.ok("alice@lab", "GET", "/a2a/tasks/{task_id}/why", task_id=first)


async def a_dialog(api: Api) -> None:
    task_id = (await api.ok("alice@lab", "POST", "/a2a/tasks", task_for("bob@lab")))["task_id"]
    lease_id = (await api.ok("bob@lab", "GET", "/a2a/tasks/next"))["lease_id"]

    async def act(code: str, verb: str, body: Any) -> None:
        route = ("bob@lab", "POST", f"/a2a/leases/{{lease_id}}/{verb}", body)
        await (api.refused(code, *route, lease_id=lease_id) if code else api.ok(*route, lease_id=lease_id))

    parts = [{"text": "é"}, {"data": {"n": [1, None]}}, {"url": "https://x.test/", "mediaType": "text/plain"}]
    message = {"messageId": "m", "role": "ROLE_AGENT", "parts": parts, "metadata": {"a": 1}}
    await act("", "update", {"message": message})
    await act("malformed", "update", {})
    await act("malformed", "update", {"message": message, "text": "both"})
    await act("", "artifact", {"artifact": {"artifactId": "a", "parts": parts}, "append": True, "lastChunk": True})
    await act("malformed", "artifact", {"artifact": {"artifactId": "a", "parts": []}})
    await act("", "ask", {"asks": "auth", "text": "who are you?", "receipt": "r"})
    await act("malformed", "ask", {"asks": "money"})
    await api.ok("operator", "GET", "/a2a/tasks/{task_id}/why", task_id=task_id)
    await api.ok("alice@lab", "POST", "/a2a/tasks/{task_id}/message", {"message": message}, task_id=task_id)
    late = {"text": "late", "if_generation": 1}
    await api.refused("generation_mismatch", "alice@lab", "POST", "/a2a/tasks/{task_id}/message", late, task_id=task_id)
    heard = await api.ok("bob@lab", "GET", "/a2a/leases/{lease_id}/inputs", lease_id=lease_id, after=0, wait_ms=5)
    assert [one["message"]["parts"] for one in heard["inputs"]] == [parts]
    await act("not_permitted", "reply", {"text": "hello"})
    await act("", "reject", {"text": "not I"})

    card = {"name": "bob", "skills": [{"id": "door", "tags": ["paint"]}]}
    await api.ok("operator", "POST", "/a2a/agents", {"name": "bob@lab", "card": card})
    made = await api.ok("operator", "POST", "/a2a/agents", {"name": "carol@lab"})
    assert made["published"]["card"] == {"name": "carol", "description": "carol@lab, an agent of this realm"}
    page = await api.ok("alice@lab", "GET", "/a2a/agents", limit=1)
    assert [one["agent"]["display"] for one in page["agents"]] == ["bob@lab"]
    page = await api.ok("alice@lab", "GET", "/a2a/agents", limit=5, cursor=page["cursor"])
    assert [one["agent"]["display"] for one in page["agents"]] == ["carol@lab"] and "cursor" not in page
    await api.refused("bad_cursor", "alice@lab", "GET", "/a2a/agents", cursor="task:1")
    await api.refused("unknown_peer", "operator", "POST", "/a2a/agents", {"name": "nobody@lab"})
    assert (await api.ok("alice@lab", "GET", "/a2a/agents/{name}", name="bob@lab"))["published"]["card"] == card
    await api.ok("operator", "DELETE", "/a2a/agents/{name}", name="bob@lab")
    await api.refused("unknown_peer", "alice@lab", "GET", "/a2a/agents/{name}", name="bob@lab")
    await a_message_alone(api)


async def a_run(api: Api) -> None:
    task_id = (await api.ok("alice@lab", "POST", "/a2a/tasks", task_for("bob@lab")))["task_id"]
    at = {"lease_id": (await api.ok("bob@lab", "GET", "/a2a/tasks/next", incarnation="one"))["lease_id"]}
    run = {"task_id": task_id}
    entries = [{"id": "e1", "role": "assistant", "content": {"n": [1, None]}, "key": "k", "turn": "t"}]
    memos = [{"k": "m", "v": {"x": 2**60}}, {"k": "e", "e": 1}]
    first = {"number": 1, "entries": entries, "memos": memos, "leaf": 1, "checkpoint": {"phase": 1}}
    commit = "/a2a/leases/{lease_id}/commit"
    await api.ok("bob@lab", "POST", commit, first, incarnation="one", **at)
    await api.refused("wrong_step", "bob@lab", "POST", commit, {"number": 5}, **at)
    await api.refused("malformed", "bob@lab", "POST", commit, {"number": "x"}, **at)
    loaded = await api.ok("bob@lab", "GET", "/a2a/leases/{lease_id}/run", after=0, **at)
    assert loaded["loaded"]["state"] == {"phase": 1}
    found = await api.ok("bob@lab", "GET", "/a2a/leases/{lease_id}/entry", key="k", **at)
    assert found["entry"]["number"] == 1
    assert (await api.ok("bob@lab", "GET", "/a2a/leases/{lease_id}/entry", key="none", **at))["entry"] is None
    told = {"name": "go", "value": {"deep": [1, {"é": None}]}, "key": "once"}
    await api.ok("alice@lab", "POST", "/runs/{task_id}/signal", told, **run)
    await api.refused("malformed", "alice@lab", "POST", "/runs/{task_id}/signal", {"name": "effect:x"}, **run)
    await api.refused("malformed", "alice@lab", "POST", "/runs/{task_id}/signal", {}, **run)
    seen = await api.ok("bob@lab", "POST", "/a2a/leases/{lease_id}/look", {"wait": {"signals": ["go"]}}, **at)
    assert seen["standing"]["signals"][0]["value"] == told["value"]
    dead = {"dead": "one", "evidence": "attested", "reason": "gone"}
    await api.refused(
        "not_proven_dead", "bob@lab", "POST", "/runs/{task_id}/resume", {**dead, "evidence": "lapsed"}, **run
    )
    resumed = await api.ok("bob@lab", "POST", "/runs/{task_id}/resume", {**dead, "incarnation": "two"}, **run)
    await api.refused("lease_superseded", "bob@lab", "POST", commit, {"number": 2}, **at)
    at = {"lease_id": resumed["lease_id"]}
    left = await api.ok("operator", "POST", "/runs/{task_id}/resume", {**dead, "dead": "two"}, **run)
    assert "lease_id" not in left
    assert (await api.ok("operator", "GET", "/runs/{task_id}", **run))["run"]["status"] == "woken"
    assert await api.ok("operator", "POST", "/runs/{task_id}/resume", {**dead, "dead": "two"}, **run) == left
    at = {"lease_id": (await api.ok("bob@lab", "GET", "/a2a/tasks/next"))["lease_id"]}
    doubt = {"number": 2, "leaf": 1, "wait": {"signals": ["effect:pay"], "doubt": "pay"}}
    await api.ok("bob@lab", "POST", commit, doubt, **at)
    await api.ok("alice@lab", "GET", "/a2a/tasks/{task_id}/why", task_id=task_id)
    page = await api.ok("alice@lab", "GET", "/runs", status="effect_in_doubt", limit=5)
    assert [one["task_id"] for one in page["runs"]] == [task_id]
    verdict = {"effect": "pay", "verdict": "done", "reason": "I looked", "value": {"paid": True}}
    await api.ok("bob@lab", "POST", "/runs/{task_id}/effect", verdict, **run)
    await api.refused("not_in_doubt", "bob@lab", "POST", "/runs/{task_id}/effect", verdict, **run)
    await api.ok("bob@lab", "POST", "/runs/{task_id}/wake", {}, **run)
    at = {"lease_id": (await api.ok("bob@lab", "GET", "/a2a/tasks/next"))["lease_id"]}
    await api.ok("bob@lab", "POST", commit, {"number": 3, "result": {"task_id": task_id, "status": "ok"}}, **at)
    shown = await api.ok("bob@lab", "GET", "/runs/{task_id}/entries", every="true", **run)
    assert [one["content"] for one in shown["entries"]] == [{"n": [1, None]}]
    started = {"name": "go", "start": task_for("bob@lab")}
    assert (await api.ok("alice@lab", "POST", "/runs/{task_id}/signal", started, task_id=NOWHERE))["started"]
    await api.refused("not_a_run", "alice@lab", "GET", "/runs/{task_id}", task_id=NOWHERE)
    await api.ok("bob@lab", "GET", "/a2a/tasks/next")


async def a_message_alone(api: Api) -> None:
    """Only what came by the A2A protocol is answered so."""
    exchange = api.daemon.exchange
    alice = exchange.authenticate(api.token("alice@lab"))
    task = Task(recipient=AgentId.named("bob@lab"), intent_text="hello?")
    await exchange.run(alice, SendTask(alice.agent, task, protocol=True))
    lease = await api.ok("bob@lab", "GET", "/a2a/tasks/next")
    at = {"lease_id": lease["lease_id"]}
    await api.ok("bob@lab", "POST", "/a2a/leases/{lease_id}/reply", {"text": "hello"}, **at)
    await api.refused("task_terminal", "bob@lab", "POST", "/a2a/leases/{lease_id}/reply", {"text": "hello"}, **at)


async def who_may_do_what(api: Api) -> None:
    await api.ok("operator", "POST", "/peers", {"display": "dan@lab", "grants": ["a2a.send.*"]})
    await api.refused("peer_conflict", "operator", "POST", "/peers", {"display": "dan@lab"})
    await api.ok("operator", "GET", "/peers", limit=2)
    await api.ok("operator", "POST", "/peers/rotate", {"peer": "dan@lab"})
    scope = {"max_uses": 3, "duplicate_risk": "idempotent"}
    grant = {"subject": "dan@lab", "action": "a2a.repair.requeue", "scope": scope, "delegable": True}
    granted = await api.ok("operator", "POST", "/capabilities", grant)
    await api.refused("too_large", "operator", "POST", "/capabilities", {**grant, "expires_ms": 2**60})
    await api.ok("operator", "GET", "/capabilities", subject="dan@lab")
    await api.ok("operator", "GET", "/capabilities/check", action="a2a.repair.requeue", subject="dan@lab")
    await api.ok("alice@lab", "GET", "/capabilities/check", action="a2a.send.bob@lab", counterparty="bob@lab")
    await api.refused("bad_action", "operator", "POST", "/capabilities", {"subject": "dan@lab", "action": "all"})
    await api.ok("operator", "DELETE", "/capabilities/{grant_id}", grant_id=granted["capability"]["id"])
    await api.ok("operator", "DELETE", "/peers/{peer}", peer="dan@lab", reason="left")
    await api.refused("unknown_peer", "operator", "DELETE", "/peers/{peer}", peer="erin@lab")
    await api.ok("operator", "GET", "/audit", limit=1000)
    await api.ok("alice@lab", "GET", "/audit", limit=5)


async def the_service(api: Api) -> None:
    await api.ok("operator", "GET", "/daemons")
    await api.ok("operator", "GET", "/whoami")
    await api.refused("unauthenticated", "nobody", "GET", "/whoami")
    await api.ok("operator", "POST", "/a2a/compact", {"older_than_ms": 0})
    await api.refused("malformed", "operator", "POST", "/a2a/compact", {"older_than_ms": "now"})
    for path in ("/version", "/healthz", "/readyz"):
        await api.ok("nobody", "GET", path)
    assert await api.ok("nobody", "GET", "/openapi.json") == DOCUMENT


# --- the page to try it ------------------------------------------------------------------------------------


async def test_the_page_loads_nothing_from_elsewhere_and_says_so(api: Api) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{api._url}/docs") as response:
        assert response.status == 200
        assert response.headers["content-security-policy"] == POLICY
        text = await response.text()
    assert text.encode() == HTML
    assert "default-src 'none'" in POLICY and "unsafe" not in POLICY
    assert re.findall(r"(?:src|href)=[\"'](?!data:,|#)", text) == []
    assert re.findall(r"\son[a-z]+=|\sstyle=|https?://", text) == []
    assert text.count("<script") == text.count("<style") == 1


# --- docs/http.md ------------------------------------------------------------------------------------------


def test_the_table_of_routes_is_the_one_that_is_served() -> None:
    listed = [route for row in rows(page("http.md")) for route in names_in(row[0]) if "/" in route]
    there = {f"{method} {place.path}" for place in PLACES for method in methods_of(place)}
    assert sorted(listed) == sorted(there | {f"GET {path}" for path in PAGES})


def test_the_table_of_routes_says_what_a_body_is() -> None:
    told = {route: names_in(row[1]) for row in rows(page("http.md")) for route in names_in(row[0]) if "/" in route}
    for place in PLACES:
        assert told[f"{place.method} {place.path}"] == ([] if place.body is None else [place.body]), place.path


def test_the_table_of_statuses_is_the_one_in_force() -> None:
    told = {code: int(row[0]) for row in rows(page("http.md")) if row[0].isdigit() for code in names_in(row[1])}
    assert told == HTTP_STATUS


async def test_every_metric_has_its_row(api: Api) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{api._url}/metrics") as response:
        families = re.findall(r"^# TYPE (\S+) (\w+)", await response.text(), re.MULTILINE)
    told = [(names_in(row[0])[0], row[1]) for row in rows(page("http.md")) if row[0].startswith("`covenant_")]
    assert sorted(told) == sorted(families)


async def test_the_examples_of_the_page_run(tmp_path: Path) -> None:
    said = await typed_beside_a_daemon("http.md", tmp_path)
    assert said.count('"kind":"a2a_result_opt"') == 2
    assert 'covenant_tasks{state="queued"}' in said
