"""Moving in: a journal with everything in it is copied, and goes on where it was."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import pytest

from covenant import Limits, Mailbox, OpenMailbox, Result, Text
from covenant.exchange.follow import follow
from covenant.exchange.realm import Realm
from covenant.mailbox import OpenMailbox as _OpenMailbox
from covenant.model.error import CopyFailed, StoreLocked, StoreUnavailable
from covenant.model.peer import Demand
from covenant.model.run import Memo, Wait
from covenant.serve.daemon import Daemon, Settings
from covenant.store.clock import ManualClock
from covenant.store.journal.engine import Journal
from covenant.store.journal.snapshot import Saved
from covenant.store.postgres import connection as connections
from covenant.store.postgres import copy as copying
from covenant.store.postgres.copy import copy
from tests.cli.support import environment, run
from tests.conformance.runs import RUN, begin, entry, step
from tests.conformance.support import DAY_MS, all_entries, answer_next, drain, finish, keyed, plain, refused, take
from tests.daemons import OPERATOR_TOKEN
from tests.journal.support import SMALL, busy_run, dump, talkative_run
from tests.postgres import store_url
from tests.postgres.support import sql
from tests.postgres.test_verify import verified

KINDS = {str(kind.__struct_config__.tag) for kind in get_args(Saved)}


class Full(NamedTuple):
    """A journal that was closed, and what there was to be seen in it."""

    folder: Path
    clock: ManualClock
    realm: Realm
    records: dict[str, bytes]
    open: list[Any]
    trails: dict[str, list[Any]]  # of tasks of the protocol, all that a stream tells
    held: str  # a task that bob holds
    lease_id: str
    generation: int
    cached: str  # an idempotency key whose result is cached
    peer: str  # a token
    run_lease: str
    last: int


async def opened(store: str, clock: ManualClock, realm: Realm, limits: Limits = SMALL) -> Daemon:
    daemon = Daemon(Settings(store=store, http=None, ipc=None, limits=limits), realm, OPERATOR_TOKEN, clock)
    await daemon.exchange.open(OPERATOR_TOKEN)
    return daemon


def box_of(daemon: Daemon) -> OpenMailbox:
    return _OpenMailbox(daemon.store, "incarnation")  # type: ignore[arg-type]


async def trail_of(daemon: Daemon, task_id: str) -> list[Any]:
    """As far as the log reaches, up to now."""
    daemon.exchange.is_draining = True
    operator = daemon.exchange.authenticate(OPERATOR_TOKEN)
    found = [
        msgspec.to_builtins(update)
        async for seen in follow(daemon.exchange, operator, task_id, 0)
        for update in seen.updates
    ]
    daemon.exchange.is_draining = False
    return found


@pytest.fixture
async def full(tmp_path: Path) -> Full:
    folder, clock, realm = tmp_path / "data", ManualClock(), Realm.throwaway()
    daemon = await opened(f"file:{folder}", clock, realm)
    assert isinstance(daemon.store, Journal)
    box = box_of(daemon)
    operator = daemon.exchange.authenticate(OPERATOR_TOKEN)
    _, token = await daemon.exchange.enroll(operator, "eve", None, ("a2a.send.bob@lab",))
    await busy_run(box, clock, 4)
    clock.advance(8 * DAY_MS)
    await box.compact()
    await busy_run(box, clock, 6)
    await talkative_run(box, clock)
    ann, bob, carl, dora = (box.of(f"{name}@lab") for name in ("ann", "bea", "carl", "dora"))
    run, _ = await begin(carl, dora, step(1, memos=[Memo("one")], entries=[entry(1, key="once")]))
    await box.signal_run(RUN, "hurry", 1, key="k")
    await finish(ann, bob, keyed(bob, "remembered"))
    held = (await ann.send_task(plain(bob, "held"))).task_id
    delivery = await take(bob)
    await daemon.exchange.heads.sign()
    dialogs = [key for key, body in dump(box).items() if b'"protocol":true' in body and b'"task"' in body]
    shown = Full(
        folder,
        clock,
        realm,
        dump(box),
        msgspec.to_builtins(await all_entries(box)),
        {key: await trail_of(daemon, key) for key in dialogs},
        held,
        delivery.lease_id,
        (await box.get_task(held)).generation,
        "remembered",
        token,
        run.lease_id,
        daemon.store.state.order,
    )
    assert shown.trails
    await daemon.exchange.close()
    return shown


@pytest.fixture
async def moved(full: Full) -> AsyncIterator[tuple[Full, Daemon]]:
    store = store_url()
    await copy(full.folder, store)
    daemon = await opened(f"{store}&lanes=1", full.clock, full.realm)
    yield full, daemon
    await daemon.exchange.close()


async def test_every_kind_of_record_arrives_as_it_was(full: Full) -> None:
    store = store_url()
    report = await copy(full.folder, store)
    assert set(report.source.records) == KINDS and report.source == report.target
    assert sum(report.source.records.values()) == len(full.records)
    async with sql(store) as connection:
        rows = await connection.fetch("select key, body from record order by key")
        arrived = {row["key"]: msgspec.json.encode(msgspec.json.decode(row["body"]), order="sorted") for row in rows}
    assert arrived == full.records
    log = await verified(store)
    assert log.damage == [] and [lane.lane for lane in log.lanes] == [report.lane]
    assert log.lanes[0].head == report.source_head and log.lanes[0].signed_by == full.realm.pubkey
    assert log.signatures and log.lanes[0].pruned_until > 0  # segments had been dropped
    async with sql(store) as connection:
        assert await connection.fetchval("select count(*) from seam") > 1


async def test_a_copied_chain_is_guarded_like_any_other(full: Full) -> None:
    store = store_url()
    await copy(full.folder, store)
    async with sql(store) as connection:
        seam = await connection.fetchrow("select * from seam order by seq desc limit 1")
        await connection.execute("delete from seam where seq = $1", seam["seq"])
        assert (await verified(store)).damage
        await connection.execute("insert into seam values ($1, $2, $3)", *seam)
        assert (await verified(store)).is_sound
        await connection.execute("update anchor set pubkey = $1", Realm.throwaway().pubkey)
    assert "is not signed by a daemon" in (await verified(store)).damage[0]


async def test_what_was_open_is_open_and_streams_tell_the_same(moved: tuple[Full, Daemon]) -> None:
    full, daemon = moved
    assert msgspec.to_builtins(await all_entries(box_of(daemon))) == full.open
    for task_id, told in full.trails.items():
        assert await trail_of(daemon, task_id) == told


async def test_a_lease_is_answered_and_the_generation_goes_on(moved: tuple[Full, Daemon]) -> None:
    full, daemon = moved
    box = box_of(daemon)
    ann, bob = box.of("ann@lab"), box.of("bea@lab")
    posted = await bob.send_result(Result(full.held, "ok", (Text("done"),), None, full.lease_id))
    assert posted.generation == full.generation + 2
    answers = [await drain(ann) for _ in range(1)]
    assert full.held in [answer.task_id for answer in answers]
    with refused("task_terminal"):
        await bob.heartbeat(full.lease_id)
    (row, *_) = [row for row in reversed(await box.recent_audit(50)) if row.task_id == full.held]
    assert row.seq > full.last
    sent = await ann.send_task(keyed(bob, full.cached))
    assert sent.replayed
    await finish_run(box, full)
    assert (await verified_store(daemon)).damage == []


async def finish_run(box: OpenMailbox, full: Full) -> None:
    dora = box.of("dora@lab")
    loaded = await dora.load_run(full.run_lease)
    assert [memo.key for seen in loaded.steps for memo in seen.memos] == ["one"]
    standing = await dora.commit_run(full.run_lease, step(2, wait=Wait(signals=("hurry",))))
    assert [heard.name for heard in standing.signals] == ["hurry"] and not standing.parked
    result = Result(RUN, "ok", (Text("found"),), None, full.run_lease)
    assert (await dora.commit_run(full.run_lease, step(3, result=result))).ended


async def verified_store(daemon: Daemon) -> Any:
    await daemon.exchange.heads.sign()
    return await verified(daemon.settings.store)


async def test_peers_and_grants_hold_and_the_operator_is_the_same(moved: tuple[Full, Daemon]) -> None:
    full, daemon = moved
    eve = daemon.exchange.authenticate(full.peer)
    bob = box_of(daemon).of("bob@lab").agent
    await daemon.exchange.enroll(daemon.exchange.operator(), "bob@lab", bob.pubkey, ())
    grant, _ = await daemon.exchange.check(eve, eve.agent, Demand("a2a.send.bob@lab", "", bob))
    assert grant is not None
    assert daemon.exchange.operator().agent.pubkey == full.realm.pubkey


async def test_work_goes_on_from_end_to_end(moved: tuple[Full, Daemon]) -> None:
    full, daemon = moved
    box = box_of(daemon)
    await busy_run(box, full.clock, 4)
    await finish(box.of("new@lab"), box.of("newer@lab"), plain(box.of("newer@lab")))
    full.clock.advance(40 * DAY_MS)
    await box.compact()
    assert (await verified_store(daemon)).lanes[0].pruned_until < full.last  # nobody could have vouched for more yet
    await box.compact()
    assert (await verified_store(daemon)).lanes[0].pruned_until >= full.last
    await busy_run(box, full.clock, 1)
    assert (await verified_store(daemon)).damage == []


async def test_a_target_that_is_not_empty_is_refused(full: Full) -> None:
    store = store_url()
    async with Mailbox.open(store) as box:
        with pytest.raises(CopyFailed, match="in use, or not empty"):
            await copy(full.folder, store)
        await box.of("ann@lab").send_task(plain(box.of("bob@lab")))
    with pytest.raises(CopyFailed, match="in use, or not empty"):
        await copy(full.folder, store)


async def test_a_journal_that_is_in_use_is_refused(full: Full) -> None:
    async with Mailbox.open(f"file:{full.folder}"):
        with pytest.raises(StoreLocked):
            await copy(full.folder, store_url())


async def test_what_does_not_arrive_whole_is_not_kept(full: Full, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_url()
    whole = copying._Copy._put_records

    async def lossy(self: Any, batch: list[Any]) -> None:
        await whole(self, batch)
        await self._connection.execute("delete from record where key = $1", batch[0][0])

    with monkeypatch.context() as patched:
        patched.setattr(copying._Copy, "_put_records", lossy)
        with pytest.raises(CopyFailed, match="not what was sent"):
            await copy(full.folder, store)
    assert (await copy(full.folder, store)).is_whole


async def test_a_copy_whose_line_is_cut_at_its_end_is_not_said_to_be_not_stored(
    full: Full, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can tell whether the last word has arrived."""
    store, whole = store_url(), copying._Copy.run

    async def cut(self: Any) -> Any:
        report = await whole(self)
        async with sql(store) as other:
            await other.execute("select pg_terminate_backend($1)", self._connection.get_server_pid())
        return report

    monkeypatch.setattr(copying._Copy, "run", cut)
    with pytest.raises(StoreUnavailable) as lost:
        await copy(full.folder, store)
    assert lost.value.details["outcome"] == "unknown"


async def test_a_copy_that_was_made_is_told_though_its_tables_cannot_be_looked_over(
    full: Full, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the database tidies one of them up by itself."""
    store = store_url()
    await asyncio.to_thread(run, "db", "migrate", "--store", store)
    monkeypatch.setitem(connections._SETTINGS, "lock_timeout", "10ms")
    async with sql(store) as other, other.transaction():
        await other.execute("lock table record in share update exclusive mode")
        assert (await copy(full.folder, store)).is_whole


async def test_large_batches_are_split(full: Full, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "BATCH_ROWS", 3)
    monkeypatch.setattr(copying, "BATCH_BYTES", 1000)
    assert (await copy(full.folder, store_url())).is_whole


HALF_WAY = """
import asyncio, sys
from covenant.store.postgres import connection as connections
from covenant.store.postgres import copy as copying
async def stop(self):
    print("half", flush=True)
    await asyncio.sleep(3600)
copying._Copy._put_log = stop
asyncio.run(copying.copy(sys.argv[1], sys.argv[2]))
"""


async def test_killed_in_the_middle_the_target_is_empty_and_a_new_copy_starts_over(full: Full) -> None:
    store = store_url()
    process = subprocess.Popen(
        [sys.executable, "-c", HALF_WAY, str(full.folder), store],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdout is not None and process.stdout.readline() == "half\n"
    with pytest.raises(StoreUnavailable, match="being changed or filled by somebody"):
        await Mailbox.open(store)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    done = await asyncio.to_thread(run, "store", "copy", f"file:{full.folder}", store, "--json")
    assert done.code == 0, done
    report = done.json["report"]
    assert done.json["kind"] == "store_copied" and report["source"] == report["target"]
    assert run("store", "copy", f"file:{full.folder}", store, "--json").json["code"] == "copy_failed"


def test_the_command_tells_both_sides(tmp_path: Path) -> None:
    async def fill() -> None:
        async with Mailbox.open(f"file:{tmp_path}/data") as box:
            ann, bob = box.of("ann@lab"), box.of("bob@lab")
            await ann.send_task(plain(bob))
            await answer_next(bob)

    asyncio.run(fill())
    store = store_url()
    said = run("store", "copy", f"file:{tmp_path}/data", store).out
    assert "task  1       1" in said and said.count("(source)") == said.count("(target)") == 1
    assert "start on it with: covenant serve --store" in said
    assert run("store", "copy", f"file:{tmp_path}/nothing", store_url()).code == 1
    assert run("store", "copy", f"file:{tmp_path}/data", "memory:").code == 2
