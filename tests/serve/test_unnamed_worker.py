"""A client that names no worker is one and the same, whichever process answers it. (Contract 2, 3.)

It leases at one daemon, and goes on after a restart, or at another daemon of the same store. It says what a client of
the first protocol says: plain HTTP, and no `incarnation`, which our own clients add.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from covenant import Limits
from covenant.serve.daemon import Daemon
from tests.conformance.support import uid
from tests.daemons import OPERATOR_TOKEN, Realmful, start_daemon
from tests.postgres import store_url

TASK = uid(1)
DONE = [{"type": "text", "text": "done"}]


class Site:
    """The daemon that answers at the moment, and how another process takes its place."""

    def __init__(
        self, realm: Realmful, daemon: Daemon, http: aiohttp.ClientSession, other: Callable[[Daemon], Awaitable[Daemon]]
    ) -> None:
        self._tokens = {**realm.tokens, "operator": OPERATOR_TOKEN}
        self._daemon = daemon
        self._http = http
        self._other = other

    async def go_elsewhere(self) -> None:
        self._daemon = await self._other(self._daemon)

    async def call(self, name: str, method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {self._tokens[name]}"}
        async with self._http.request(method, f"{self._daemon.url}{path}", json=body, headers=headers) as response:
            return await response.json()

    async def post(self, name: str, status: str, query: str = "", **more: Any) -> Any:
        return await self.call(
            name, "POST", f"/a2a/results{query}", {"task_id": TASK, "status": status, "content": DONE, **more}
        )

    async def send(self) -> None:
        task = {"id": TASK, "recipient": {"display": "bob@lab"}, "intent_text": "draft"}
        assert (await self.call("alice@lab", "POST", "/a2a/tasks", task))["kind"] == "a2a_task_queued"

    async def leased(self) -> str:
        """A task of alice's that bob holds, by its lease."""
        await self.send()
        got = await self.call("bob@lab", "GET", "/a2a/tasks/next")
        assert (got["task"]["id"], got["attempt"]) == (TASK, 1)
        lease_id: str = got["lease_id"]
        return lease_id

    async def entry(self) -> Any:
        return (await self.call("operator", "GET", f"/a2a/tasks/{TASK}"))["entry"]


@pytest.fixture(params=["after a restart", "at another daemon"])
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    realm = Realmful()
    async with AsyncExitStack() as stack:

        async def started(store: str) -> Daemon:
            daemon = await start_daemon(store, Limits())
            stack.push_async_callback(daemon.stop)
            return daemon

        async def restarted(daemon: Daemon) -> Daemon:
            await daemon.stop()
            return await started(daemon.settings.store)

        async def another(daemon: Daemon) -> Daemon:
            return await started(daemon.settings.store)

        is_restart = request.param == "after a restart"
        first = await started(f"file:{tmp_path}/data" if is_restart else store_url())
        await realm.enroll(first)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Site(realm, first, http, restarted if is_restart else another)


async def test_its_results_need_no_lease(site: Site) -> None:
    await site.leased()
    await site.go_elsewhere()
    assert (await site.post("bob@lab", "partial"))["sequence"] == 1
    assert (await site.post("bob@lab", "ok"))["kind"] == "a2a_result_posted"
    await site.go_elsewhere()
    assert (await site.post("bob@lab", "ok"))["duplicate"]
    answers = [await site.call("alice@lab", "GET", "/a2a/results/next") for _ in range(2)]
    assert [answer["result"]["status"] for answer in answers] == ["partial", "ok"]


async def test_only_the_same_caller_without_a_name_holds_it(site: Site) -> None:
    """Neither the operator, nor a worker of the same peer that has a name."""
    await site.leased()
    await site.go_elsewhere()
    assert (await site.post("operator", "ok"))["code"] == "lease_required"
    assert (await site.post("bob@lab", "ok", "?incarnation=two"))["code"] == "lease_required"
    assert (await site.post("bob@lab", "ok"))["kind"] == "a2a_result_posted"


async def test_the_operator_that_receives_for_all_is_one_worker(site: Site) -> None:
    await site.send()
    assert (await site.call("operator", "GET", "/a2a/tasks/next"))["attempt"] == 1
    await site.go_elsewhere()
    assert (await site.post("bob@lab", "ok"))["code"] == "lease_required"
    assert (await site.post("operator", "ok"))["kind"] == "a2a_result_posted"


async def test_from_the_second_attempt_on_it_names_its_lease(site: Site) -> None:
    lease = await site.leased()
    await site.go_elsewhere()
    assert (await site.call("bob@lab", "POST", f"/a2a/leases/{lease}/release", {}))["attempt"] == 1
    again = await site.call("bob@lab", "GET", "/a2a/tasks/next")
    assert again["attempt"] == 2
    assert (await site.post("bob@lab", "ok"))["code"] == "lease_required"
    assert (await site.post("bob@lab", "ok", lease_id=again["lease_id"]))["kind"] == "a2a_result_posted"


async def test_all_that_a_holder_says_under_its_lease_is_taken(site: Site) -> None:
    lease = await site.leased()
    await site.go_elsewhere()
    said = [
        await site.call("bob@lab", "POST", f"/a2a/leases/{lease}/{verb}", body)
        for verb, body in (
            ("heartbeat", {}),
            ("update", {"text": "half of it"}),
            ("artifact", {"artifact": {"artifactId": "log", "parts": [{"text": "x"}]}}),
            ("ask", {"text": "which colour?"}),
        )
    ]
    said.append(await site.call("bob@lab", "GET", f"/a2a/leases/{lease}/inputs"))
    assert [answer.get("task_id") for answer in said] == [TASK] * 5, said
    assert (await site.entry())["lease_id"] == lease
    canceled = await site.call("alice@lab", "POST", f"/a2a/tasks/{TASK}/cancel", {"graceful": True, "reason": "late"})
    assert canceled["kind"] != "error"
    assert (await site.call("bob@lab", "POST", f"/a2a/leases/{lease}/heartbeat", {}))["cancel_reason"] == "late"
    await site.go_elsewhere()
    assert (await site.call("bob@lab", "POST", f"/a2a/leases/{lease}/release", {}))["task_id"] == TASK
    assert (await site.entry())["outcome"] == "canceled"


async def test_a_holder_rejects_what_it_holds(site: Site) -> None:
    """A cancel stays its sender's: a holder that will not do the work says so under its lease."""
    lease = await site.leased()
    await site.go_elsewhere()
    assert (await site.call("bob@lab", "POST", f"/a2a/tasks/{TASK}/cancel", {}))["code"] == "not_permitted"
    rejected = await site.call("bob@lab", "POST", f"/a2a/leases/{lease}/reject", {"text": "not mine"})
    assert rejected["task_id"] == TASK and (await site.entry())["outcome"] == "rejected"


async def test_a_run_of_a_worker_without_a_name_goes_on(site: Site) -> None:
    """Under its lease; and under another one once it is known to be dead, for a worker without a name too."""
    lease = await site.leased()
    first = await site.call("bob@lab", "POST", f"/a2a/leases/{lease}/commit", {"number": 1})
    await site.go_elsewhere()
    second = await site.call("bob@lab", "POST", f"/a2a/leases/{lease}/commit", {"number": 2})
    assert (first["standing"]["number"], second["standing"]["number"]) == (1, 2)
    for number in (1, 2):
        await site.go_elsewhere()
        run = (await site.call("bob@lab", "GET", f"/runs/{TASK}"))["run"]
        dead = {"dead": run["incarnation"], "evidence": "attested", "reason": "it crashed"}
        resumed = await site.call("bob@lab", "POST", f"/runs/{TASK}/resume", dead)
        assert resumed["kind"] != "error", resumed
        again = await site.call("bob@lab", "GET", "/a2a/tasks/next")
        assert again["task"]["id"] == TASK and again["lease_id"] != lease
        lease = again["lease_id"]
        assert (await site.call("bob@lab", "GET", f"/runs/{TASK}"))["run"]["resumes"] == number
