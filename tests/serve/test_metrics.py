"""The numbers are right, and they name nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from covenant import AgentId, Idempotency, Limits, Mailbox, OpenMailbox, Result, Task, Text
from covenant.model.error import CovenantError
from covenant.model.run import RunCommit, Wait
from covenant.serve.daemon import Daemon
from covenant.serve.metrics import BUCKETS_S, STALE_MS
from covenant.store.clock import ManualClock
from tests.daemons import OPERATOR_TOKEN, Realmful, start_daemon

LABELS: Final = {"verb", "status", "why", "what", "state", "le"}


class Numbers:
    """One look at the page."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self._samples[f"covenant_{name}", frozenset(labels.items())]

    def requests(self, verb: str, status: str = "2xx") -> float:
        return self("requests_total", verb=verb, status=status)

    @property
    def label_names(self) -> set[str]:
        return {label for _, labels in self._samples for label, _ in labels}


class Watched:
    def __init__(self, daemon: Daemon, session: aiohttp.ClientSession, tokens: dict[str, str]) -> None:
        self.daemon = daemon
        self.session = session
        self.tokens = tokens

    async def look(self) -> Numbers:
        async with self.session.get(f"{self.daemon.url}/metrics") as response:
            assert response.status == 200
            assert response.content_type == "text/plain"
            return Numbers(await response.text())

    async def until(self, what: str, count: int) -> Numbers:
        """A look at the moment when so many of these are open."""
        async with asyncio.timeout(10):
            while True:
                numbers = await self.look()
                if numbers("open", what=what) == count:
                    return numbers

    async def get(self, path: str, token: str = OPERATOR_TOKEN) -> int:
        async with self.session.get(
            f"{self.daemon.url}{path}", headers={"Authorization": f"Bearer {token}"}
        ) as response:
            await response.read()
            return response.status


@pytest.fixture
async def realm() -> Realmful:
    return Realmful()


@pytest.fixture
async def watched(tmp_path: Path, clock: ManualClock, realm: Realmful) -> AsyncIterator[Watched]:
    daemon = await start_daemon(f"file:{tmp_path / 'data'}", Limits(), clock)
    await realm.enroll(daemon)
    async with aiohttp.ClientSession() as session:
        yield Watched(daemon, session, realm.tokens)
    await daemon.stop()


@pytest.fixture(params=["http", "unix"])
async def box(request: pytest.FixtureRequest, watched: Watched, realm: Realmful) -> AsyncIterator[OpenMailbox]:
    async with realm.open(watched.daemon, request.param) as opened:
        yield opened


async def test_requests_are_counted_by_verb_and_status(watched: Watched, alice: Mailbox, bob: Mailbox) -> None:
    for _ in range(3):
        await alice.send_task(Task(recipient=bob.agent, intent_text="look"))
    with pytest.raises(CovenantError):
        await alice.send_task(Task(recipient=AgentId.named("nobody@lab"), intent_text="look"))
    numbers = await watched.look()
    assert numbers.requests("send_a2a_task") == 3
    assert numbers.requests("send_a2a_task", "4xx") == 1
    assert numbers.requests("send_a2a_task", "5xx") == 0
    assert numbers("request_seconds_count", verb="send_a2a_task") == 4
    assert numbers("request_seconds_bucket", verb="send_a2a_task", le="+Inf") == 4
    assert numbers("request_seconds_bucket", verb="send_a2a_task", le=str(BUCKETS_S[-1])) == 4
    assert 0 < numbers("request_seconds_sum", verb="send_a2a_task") < 4 * BUCKETS_S[-1]


async def test_what_reaches_no_verb_is_counted_apart(watched: Watched) -> None:
    assert await watched.get("/nowhere") == 404
    assert await watched.get("/whoami", token="cov_wrong") == 401
    numbers = await watched.look()
    assert numbers.requests("other", "4xx") == 2
    assert numbers.requests("whoami", "4xx") == 0


async def test_denials_are_counted(watched: Watched) -> None:
    assert await watched.get("/whoami", token="cov_wrong") == 401
    assert await watched.get("/peers", token=watched.tokens["alice@lab"]) == 403
    numbers = await watched.look()
    assert numbers("denials_total", why="unauthenticated") == 1
    assert numbers("denials_total", why="not_permitted") == 1


async def test_a_stranger_at_the_local_socket_is_counted_and_written_down(watched: Watched) -> None:
    with pytest.raises(CovenantError):
        await Mailbox.open(f"unix:{watched.daemon.settings.ipc}", token="cov_wrong")
    numbers = await watched.look()
    assert numbers("denials_total", why="unauthenticated") == 1
    assert numbers.requests("authenticate", "4xx") == 1
    rows = [row for logged in await watched.daemon.store.log_back(None, 5) for row in logged.audit]
    assert [row.reason for row in rows if row.kind == "authentication_failed"] == ["ipc"]


async def test_tasks_are_counted_where_they_stand(
    watched: Watched, clock: ManualClock, alice: Mailbox, bob: Mailbox
) -> None:
    once = Idempotency("idempotent", "k")
    for _ in range(3):
        await alice.send_task(Task(recipient=bob.agent, intent_text="look"))
    for _ in range(2):
        await alice.send_task(Task(recipient=bob.agent, intent_text="look", idempotency=once))
    await alice.send_task(Task(recipient=bob.agent, intent_text="later", not_before_ms=clock.now_ms() + 1000))
    delivery = await bob.recv_task()
    numbers = await watched.look()
    assert _standing(numbers) == {"queued": 5, "in_flight": 1, "result_pending": 0}
    queued = {why: numbers("tasks_queued", why=why) for why in ("ready", "following", "delayed")}
    assert queued == {"ready": 3, "following": 1, "delayed": 1}
    await bob.send_result(Result.partial(delivery, [Text("half")]))
    await bob.send_result(Result.ok(delivery))
    numbers = await watched.look()
    assert _standing(numbers) == {"queued": 5, "in_flight": 0, "result_pending": 1}
    assert numbers("results_pending") == 2  # the partial one too
    await alice.recv_results(2)
    numbers = await watched.look()
    assert _standing(numbers) == {"queued": 5, "in_flight": 0, "result_pending": 0}
    assert numbers("results_pending") == 0


async def test_runs_that_wait_are_counted(watched: Watched, alice: Mailbox, bob: Mailbox) -> None:
    async def parked() -> dict[str, float]:
        numbers = await watched.look()
        waiting = {why: numbers("runs_parked", why=why) for why in ("waiting", "woken")}
        return {**waiting, **{state: numbers("tasks", state=state) for state in ("parked", "in_flight", "queued")}}

    for _ in range(2):
        task_id = (await alice.send_task(Task(recipient=bob.agent, intent_text="look"))).task_id
        await bob.commit_run(await bob.recv_task(), RunCommit(number=1, wait=Wait(signals=("go",))))
    assert await parked() == {"waiting": 2, "woken": 0, "parked": 2, "in_flight": 0, "queued": 0}
    await alice.signal_run(task_id, "go")
    assert await parked() == {"waiting": 1, "woken": 1, "parked": 2, "in_flight": 0, "queued": 0}
    delivery = await bob.recv_task()
    assert await parked() == {"waiting": 1, "woken": 0, "parked": 1, "in_flight": 1, "queued": 0}
    await bob.commit_run(delivery, RunCommit(number=2, result=Result(task_id, "ok", ())))
    assert await parked() == {"waiting": 1, "woken": 0, "parked": 1, "in_flight": 0, "queued": 0}


def _standing(numbers: Numbers) -> dict[str, float]:
    return {state: numbers("tasks", state=state) for state in ("queued", "in_flight", "result_pending")}


async def test_silent_leases_are_told(watched: Watched, clock: ManualClock, alice: Mailbox, bob: Mailbox) -> None:
    numbers = await watched.look()
    assert numbers("lease_oldest_seconds") == numbers("leases_stale") == 0
    leases = []
    for _ in range(2):
        await alice.send_task(Task(recipient=bob.agent, intent_text="look"))
        leases.append(await bob.recv_task())
    clock.advance(STALE_MS)
    numbers = await watched.look()
    assert numbers("lease_oldest_seconds") == STALE_MS / 1000
    assert numbers("leases_stale") == 0
    clock.advance(1)
    assert (await watched.look())("leases_stale") == 2
    await bob.heartbeat(leases[0])
    assert (await watched.look())("leases_stale") == 1


async def test_who_waits_for_input_is_not_silent(
    watched: Watched, clock: ManualClock, alice: Mailbox, bob: Mailbox
) -> None:
    for _ in range(2):
        await alice.send_task(Task(recipient=bob.agent, intent_text="look"))
    await bob.ask(await bob.recv_task(), "where?")
    await bob.recv_task()
    clock.advance(STALE_MS + 1000)
    numbers = await watched.look()
    assert numbers("lease_oldest_seconds") == STALE_MS / 1000 + 1
    assert numbers("leases_stale") == 1


async def test_the_journal_tells_what_it_did(watched: Watched, alice: Mailbox, bob: Mailbox) -> None:
    before = await watched.look()
    await alice.send_task(Task(recipient=bob.agent, intent_text="look"))
    after = await watched.look()
    for name in ("commits", "events", "syncs", "bytes"):
        assert after(f"journal_{name}_total") > before(f"journal_{name}_total")
    for name in ("archived", "snapshots", "reopened"):
        assert after(f"journal_{name}_total") == 0


async def test_what_is_open_is_counted(watched: Watched, box: OpenMailbox) -> None:
    waiting = asyncio.create_task(box.of("carol@lab").recv_task())
    numbers = await watched.until("waits", 1)
    assert numbers("open", what="http_connections") >= 1
    waiting.cancel()
    await asyncio.wait([waiting])
    await watched.until("waits", 0)


async def test_connections_of_the_local_socket_are_counted(watched: Watched, realm: Realmful) -> None:
    assert (await watched.look())("open", what="ipc_connections") == 0
    async with realm.open(watched.daemon, "unix"):
        assert (await watched.look())("open", what="ipc_connections") == 1
    await watched.until("ipc_connections", 0)


async def test_nobody_is_named(watched: Watched, alice: Mailbox, bob: Mailbox) -> None:
    sent = await alice.send_task(Task(recipient=bob.agent, intent_text="sesame"))
    await bob.recv_task()
    numbers = await watched.look()
    assert numbers.label_names <= LABELS
    for name in ("alice", "bob", alice.agent.pubkey, sent.task_id, "sesame"):
        assert name not in numbers.text


async def test_a_store_without_a_journal_has_none_of_its_numbers() -> None:
    daemon = await start_daemon("memory:", Limits())
    async with aiohttp.ClientSession() as session:
        numbers = await Watched(daemon, session, {}).look()
    await daemon.stop()
    assert "covenant_journal" not in numbers.text
    assert numbers("tasks", state="queued") == 0
