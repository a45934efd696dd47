"""Cursors, keys, numbers and names that one daemon of a store has handed out are good at any other.

A client behind a proxy does not know which daemon answers. docs/postgres.md lists the few things that a daemon
keeps for itself; nothing else may depend on the process that answered.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import cycle
from typing import Any, Final

import aiohttp
import pytest

from covenant import Limits
from covenant.serve.daemon import Daemon
from tests.conformance.support import uid
from tests.daemons import OPERATOR_TOKEN, Realmful, start_daemon
from tests.postgres import store_url

PROTOCOL: Final = {"A2A-Version": "1.0", "Content-Type": "application/a2a+json"}
PARTS: Final = [{"text": "x"}]


class Proxy:
    """Each call goes to another daemon than the one before."""

    def __init__(self, daemons: list[Daemon], tokens: dict[str, str], http: aiohttp.ClientSession) -> None:
        self._daemons = cycle(daemons)
        self._tokens = tokens
        self._http = http

    def request(self, who: str, method: str, path: str, body: Any = None, **headers: str) -> Any:
        told = {"Authorization": f"Bearer {self._tokens[who]}", **headers}
        return self._http.request(method, f"{next(self._daemons).url}{path}", json=body, headers=told)

    async def call(self, who: str, method: str, path: str, body: Any = None, **headers: str) -> Any:
        async with self.request(who, method, path, body, **headers) as response:
            answer = await response.json(content_type=None)
            assert response.status == 200, answer
            return answer

    async def send(self, number: int, **members: Any) -> str:
        task = {"id": uid(number), "recipient": {"display": "bob@lab"}, "intent_text": "draft", **members}
        assert (await self.call("alice@lab", "POST", "/a2a/tasks", task))["task_id"] == uid(number)
        return uid(number)

    async def lease(self) -> Any:
        return await self.call("bob@lab", "GET", "/a2a/tasks/next")

    async def post(self, task_id: str, status: str = "ok", **members: Any) -> Any:
        return await self.call(
            "bob@lab", "POST", "/a2a/results", {"task_id": task_id, "status": status, "content": [], **members}
        )


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    realm, store = Realmful(), store_url()
    async with AsyncExitStack() as stack:
        daemons = []
        for _ in range(2):
            daemons.append(await start_daemon(store, Limits()))
            stack.push_async_callback(daemons[-1].stop)
        await realm.enroll(daemons[0])
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Proxy(daemons, {**realm.tokens, "operator": OPERATOR_TOKEN}, http)


def idempotent(key: str) -> dict[str, str]:
    return {"duplicate_safety": "idempotent", "key": key}


async def filled(proxy: Proxy) -> None:
    """Something for each listing, and nothing in any of them that moves by itself."""
    await proxy.call("operator", "POST", "/a2a/agents", {"name": "bob@lab", "card": {"name": "bob"}})
    await proxy.call("operator", "POST", "/a2a/agents", {"name": "carol@lab", "card": {"name": "carol"}})
    for number in range(1, 8):
        await proxy.send(number, idempotency=idempotent(f"{number}"))
    for number in range(1, 4):
        lease = (await proxy.lease())["lease_id"]
        await proxy.call("bob@lab", "POST", f"/a2a/leases/{lease}/commit", {"number": 1})
        if number < 3:
            await proxy.post(uid(number))
    for _ in range(2):
        await proxy.lease()
    for number in range(3):
        said = {"message": {"messageId": f"{number}", "role": "ROLE_USER", "parts": PARTS}}
        body = {**said, "configuration": {"returnImmediately": True}}
        await proxy.call("alice@lab", "POST", "/agents/bob@lab/message:send", body, **PROTOCOL)


LISTINGS: Final = {
    "tasks": ("alice@lab", "/a2a/queue?limit={}", "tasks", "cursor", 2),
    "leases": ("bob@lab", "/a2a/queue?state=in_flight&limit={}", "tasks", "cursor", 1),
    "results": ("alice@lab", "/a2a/queue?state=result_pending&limit={}", "results", "cursor", 1),
    "cache": ("alice@lab", "/a2a/cache?limit={}", "entries", "cursor", 1),
    "runs": ("bob@lab", "/runs?limit={}", "runs", "cursor", 1),
    "peers": ("operator", "/peers?limit={}", "peers", "cursor", 2),
    "grants": ("operator", "/capabilities?limit={}", "capabilities", "cursor", 2),
    "agents": ("alice@lab", "/a2a/agents?limit={}", "agents", "cursor", 1),
    "audit": ("operator", "/audit?limit={}", "rows", "before", 7),
    "protocol": ("alice@lab", "/agents/bob@lab/tasks?pageSize={}", "tasks", "pageToken", 1),
}
COMES_AS: Final = {"before": "cursor", "pageToken": "nextPageToken"}


async def test_a_page_goes_on_at_another_daemon(proxy: Proxy) -> None:
    await filled(proxy)
    for listing, (who, path, items, cursor, size) in LISTINGS.items():
        headers = PROTOCOL if listing == "protocol" else {}
        whole = (await proxy.call(who, "GET", path.format(100), **headers))[items]
        paged: list[Any] = []
        pages, after = 0, ""
        while True:
            page = await proxy.call(who, "GET", path.format(size) + after, **headers)
            paged += page[items]
            pages += 1
            if not (following := page.get(COMES_AS.get(cursor, cursor))):
                break
            after = f"&{cursor}={following}"
        assert paged == whole, listing
        assert pages >= 2 and len(whole) >= 2, listing


async def test_a_scan_for_stale_leases_goes_on_at_another_daemon(proxy: Proxy) -> None:
    await filled(proxy)
    found, cursor = [], None
    for _ in range(20):
        body = {"policy": {"min_lease_age_ms": 0, "scan_limit": 1}, "cursor": cursor}
        report = (await proxy.call("operator", "POST", "/a2a/retry-stale", body))["report"]
        found += [candidate["task_id"] for candidate in report["would_requeue"]]
        if (cursor := report["cursor"]) is None:
            break
    assert found == [uid(number) for number in (3, 4, 5)]


async def test_a_stream_goes_on_at_another_daemon(proxy: Proxy) -> None:
    await filled(proxy)

    async def events(count: int, **headers: str) -> list[tuple[str, str]]:
        path = "/a2a/events" if headers else "/a2a/events?after=0"
        heard: list[tuple[str, str]] = []
        async with proxy.request("alice@lab", "GET", path, **headers) as stream:
            last = ""
            async for raw in stream.content:
                line = raw.decode()
                if line.startswith("id: "):
                    last = line.removeprefix("id: ").strip()
                elif line.startswith("data: "):
                    heard.append((last, line))
                    if len(heard) == count:
                        break
        return heard

    whole = await events(20)
    resumed = await events(12, **{"Last-Event-ID": whole[7][0]})
    assert resumed == whole[8:]


async def test_what_is_repeated_at_another_daemon_is_done_once(proxy: Proxy) -> None:
    """Sends by their id, updates by their receipt, partials by their number, messages by their key, results as such."""
    await proxy.call("operator", "POST", "/a2a/agents", {"name": "bob@lab", "card": {"name": "bob"}})
    again = await proxy.send(1), await proxy.send(1)
    lease = (await proxy.lease())["lease_id"]
    assert (await proxy.lease())["task"] is None and again == (uid(1), uid(1))
    update = {"text": "half", "receipt": "one"}
    moved = [await proxy.call("bob@lab", "POST", f"/a2a/leases/{lease}/update", update) for _ in range(3)]
    assert [answer["generation"] for answer in moved] == [3, 3, 3]
    partials = [await proxy.post(uid(1), "partial", sequence=1) for _ in range(3)]
    assert [answer.get("duplicate", False) for answer in partials] == [False, True, True]
    said = {"message": {"messageId": "m", "role": "ROLE_USER", "parts": PARTS}}
    body, key = {**said, "configuration": {"returnImmediately": True}}, {**PROTOCOL, "Idempotency-Key": "k"}
    sent = [await proxy.call("alice@lab", "POST", "/agents/bob@lab/message:send", body, **key) for _ in range(3)]
    assert len({answer["task"]["id"] for answer in sent}) == 1
    results = [await proxy.post(uid(1)) for _ in range(3)]
    assert [answer.get("duplicate", False) for answer in results] == [False, True, True]
