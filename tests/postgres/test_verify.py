"""The log of several daemons is verified together, and whoever tampers with it by SQL is found out."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import msgspec
import pytest

from covenant import Limits, Mailbox
from covenant.exchange.realm import Realm
from covenant.serve.daemon import Daemon, Settings
from covenant.store.clock import ManualClock
from covenant.store.journal.line import Line, decode_line, encode
from covenant.store.postgres import verify as verifying
from covenant.store.postgres.connection import Where, connect
from covenant.store.postgres.engine import Postgres
from covenant.store.postgres.verify import StoreReport, verify
from tests.cli.support import run
from tests.conformance.support import DAY_MS, finish, plain, uid
from tests.daemons import OPERATOR_TOKEN
from tests.postgres import store_url
from tests.postgres.support import sql


class Two(NamedTuple):
    """Daemons on one store, each with one lane that has signed, and seen the other's head."""

    store: str
    first: Daemon
    second: Daemon

    def lane(self, which: int) -> int:
        store = (self.first, self.second)[which].store
        assert isinstance(store, Postgres)
        return store._lanes[0].id

    async def work(self, which: int, count: int = 3) -> None:
        """Refusals of strangers: each is a commit with a row."""
        for _ in range(count):
            await (self.first, self.second)[which].exchange.note_stranger("http")

    async def sign(self) -> None:
        for daemon in (self.first, self.second, self.first):
            await daemon.exchange.heads.sign()


async def started(store: str, clock: ManualClock | None = None) -> Daemon:
    """It signs when it is told to, and not by itself."""
    settings = Settings(store=f"{store}&lanes=1", http=None, ipc=None, limits=Limits())
    daemon = Daemon(settings, Realm.throwaway(), OPERATOR_TOKEN, clock)
    await daemon.exchange.open(OPERATOR_TOKEN)
    return daemon


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    store = store_url()
    first, second = await started(store), await started(store)
    both = Two(store, first, second)
    for which in (0, 1):
        await both.work(which)
    await both.sign()
    for which in (0, 1):
        await both.work(which)
    await both.sign()
    assert (await verified(store)).is_sound
    yield both
    for daemon in (first, second):
        await daemon.exchange.close()


async def verified(store: str, realm: tuple[str, ...] = ()) -> StoreReport:
    where = Where.of(store)
    connection = await connect(where)
    try:
        return await verify(connection, where.schema, realm)
    finally:
        await connection.close()


async def tampered(two: Two, statement: str, *values: Any) -> list[str]:
    async with sql(two.store) as connection:
        await connection.execute(statement, *values)
    report = await verified(two.store)
    assert not report.is_sound
    return report.damage


async def rows(two: Two, which: int) -> list[Any]:
    async with sql(two.store) as connection:
        return list(await connection.fetch("select * from log where lane = $1 order by seq", two.lane(which)))


async def test_a_store_of_two_daemons_is_sound_and_told_so(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "PAGE_ROWS", 2)
    report = await verified(two.store)
    assert [lane.lane for lane in report.lanes] == [two.lane(0), two.lane(1)] and report.damage == []
    assert report.commits == sum(lane.commits for lane in report.lanes) > 12
    assert [lane.signed_by for lane in report.lanes] == [
        two.first.exchange.realm.pubkey,
        two.second.exchange.realm.pubkey,
    ]
    assert all(lane.signed_until for lane in report.lanes) and report.anchors > report.signatures
    monkeypatch.setattr(verifying, "PAGE_BYTES", 1)  # a page holds a row at least
    assert msgspec.to_builtins(await verified(two.store)) == msgspec.to_builtins(report)
    done = run("audit", "verify", "--store", two.store, "--json")
    assert done.code == 0 and done.json["valid"] and done.json["report"]["commits"] == report.commits
    assert "is sound" in run("audit", "verify", "--store", two.store).out
    keys = [option for lane in report.lanes for option in ("--realm", str(lane.signed_by))]
    assert run("audit", "verify", "--store", two.store, *keys).code == 0
    assert "signed by another key" in run("audit", "verify", "--store", two.store, *keys[:2]).out


async def test_the_rows_of_all_lanes_are_exported(two: Two) -> None:
    exported = run("audit", "export", "--store", two.store, "--json").json["rows"]
    assert [row["seq"] for row in exported] == sorted(row["seq"] for row in exported)
    assert sum(row["kind"] == "authentication_failed" for row in exported) == 12
    after = exported[-3]["seq"]
    later = run("audit", "export", "--store", two.store, "--after", str(after)).out.splitlines()
    assert [msgspec.json.decode(row) for row in later] == exported[-2:]


async def test_a_line_that_was_changed_is_found(two: Two) -> None:
    row = (await rows(two, 0))[3]
    edited = bytes(row["lines"]).replace(b"authentication_failed", b"authentication_faked!")
    assert edited != bytes(row["lines"])
    damage = await tampered(two, "update log set lines = $1 where seq = $2", edited, row["seq"])
    assert damage == [
        f"lane {two.lane(0)}: at event {row['seq']} something was changed, or what stood before it is gone"
    ]
    told = run("audit", "verify", "--store", two.store, "--json")
    assert told.code == 1 and not told.json["valid"] and told.json["report"]["damage"] == damage


async def test_a_line_that_no_longer_reads_is_found(two: Two) -> None:
    row = (await rows(two, 1))[2]
    damage = await tampered(two, "update log set lines = 'nonsense' where seq = $1", row["seq"])
    assert f"lane {two.lane(1)}: what stands at event {row['seq']} is not a commit" in damage


async def test_rows_taken_from_the_middle_are_found(two: Two) -> None:
    taken = (await rows(two, 0))[2:4]
    after = (await rows(two, 0))[4]
    damage = await tampered(two, "delete from log where seq = any($1)", [row["seq"] for row in taken])
    assert (
        f"lane {two.lane(0)}: at event {after['seq']} something was changed, or what stood before it is gone" in damage
    )


async def test_two_rows_that_changed_places_are_found(two: Two) -> None:
    one, other = (await rows(two, 1))[2:4]
    damage = await tampered(
        two,
        "update log set lines = case seq when $1 then $3::bytea else $4::bytea end where seq in ($1, $2)",
        one["seq"],
        other["seq"],
        other["lines"],
        one["lines"],
    )
    assert any(f"event {other['seq']}" in told and f"lane {two.lane(1)}" in told for told in damage)


async def test_a_tail_that_was_cut_off_is_found_by_who_had_seen_it(two: Two) -> None:
    """The lane's own row is put back with it: in itself, the chain is whole."""
    kept, cut = (await rows(two, 1))[1], (await rows(two, 1))[2]
    async with sql(two.store) as connection:
        await connection.execute("delete from log where lane = $1 and seq >= $2", two.lane(1), cut["seq"])
        mark = bytes(kept["lines"])[-67:-3].decode()
        await connection.execute("update lane set seq = $1, hash = $2 where id = $3", kept["last"], mark, two.lane(1))
    damage = (await verified(two.store)).damage
    assert damage and all(
        told.startswith(f"lane {two.lane(1)}: lane {two.lane(0)} has seen its head") for told in damage
    )


async def test_a_tail_that_was_cut_off_alone_does_not_end_where_it_should(two: Two) -> None:
    last = (await rows(two, 0))[-1]
    damage = await tampered(two, "delete from log where seq = $1", last["seq"])
    assert any(f"lane {two.lane(0)}: it ends at event" in told for told in damage)


async def test_a_lane_that_is_gone_is_missed(two: Two) -> None:
    async with sql(two.store) as connection:
        await connection.execute("delete from log where lane = $1", two.lane(1))
        await connection.execute("delete from lane where id = $1", two.lane(1))
    damage = (await verified(two.store)).damage
    assert damage and all(told.startswith(f"lane {two.lane(1)}: ") for told in damage)


async def test_a_chain_that_was_made_anew_has_no_good_signature(two: Two) -> None:
    """Somebody changes a line and makes all that follows fit, heads too: only the key is missing."""
    forger = Realm.throwaway()
    mark = b"0" * 64
    forged: list[tuple[int, str]] = []
    for number, row in enumerate(await rows(two, 0)):
        lines = b""
        for raw in bytes(row["lines"]).rstrip(b"\n").split(b"\n"):
            line = decode_line(raw.replace(b"http", b"smtp") if number == 2 else raw, "", 0)
            lines_, mark = encode(_resigned(line, forged, forger), mark)
            lines += lines_
        forged.append((row["last"], mark.decode()))
        async with sql(two.store) as connection:
            await connection.execute("update log set lines = $1 where seq = $2", lines, row["seq"])
            await connection.execute("update lane set hash = $1 where id = $2", mark.decode(), two.lane(0))
    damage = (await verified(two.store)).damage
    assert any("was signed by another key" in told for told in damage)
    async with sql(two.store) as connection:
        await connection.execute(
            "update daemon set pubkey = $1 where id = (select daemon from lane where id = $2)",
            forger.pubkey,
            two.lane(0),
        )
    damage = (await verified(two.store)).damage  # whoever has seen the old heads still tells
    assert damage and all(f"lane {two.lane(1)} has seen its head" in told for told in damage)


def _resigned(line: Line, heads: list[tuple[int, str]], forger: Realm) -> Line:
    events = []
    for event in line.events:
        known = dict(heads).get(getattr(event, "seq", -1))
        if known is not None:
            signature = forger.sign_head(event.seq, known)  # type: ignore[union-attr]
            event = msgspec.structs.replace(event, hash=known, signature=signature, pubkey=forger.pubkey)
        events.append(event)
    return msgspec.structs.replace(line, events=events)


async def test_a_forged_signature_is_not_good(two: Two) -> None:
    """The key is right, the signature is of something else."""
    signed = [row for row in await rows(two, 0) if b"head_signed" in bytes(row["lines"])][-1]
    (line,) = (decode_line(raw, "", 0) for raw in bytes(signed["lines"]).rstrip(b"\n").split(b"\n"))
    (event,) = line.events
    other = two.first.exchange.realm.sign_head(event.seq + 1, event.hash)  # type: ignore[union-attr]
    before = [row for row in await rows(two, 0) if row["seq"] < signed["seq"]][-1]
    forged = msgspec.structs.replace(line, events=[msgspec.structs.replace(event, signature=other)])
    lines, mark = encode(forged, bytes(before["lines"])[-67:-3])
    async with sql(two.store) as connection:
        await connection.execute("delete from log where lane = $1 and seq > $2", two.lane(0), signed["seq"])
        await connection.execute("update log set lines = $1 where seq = $2", lines, signed["seq"])
        await connection.execute(
            "update lane set hash = $1, seq = $2 where id = $3", mark.decode(), signed["last"], two.lane(0)
        )
    damage = (await verified(two.store)).damage
    assert f"lane {two.lane(0)}: the signature under event {event.seq} is not good" in damage  # type: ignore[union-attr]


async def test_an_index_that_tells_another_story_than_the_lines_is_found(two: Two) -> None:
    row = (await rows(two, 0))[2]
    damage = await tampered(two, "update log set marks = 'x-y:1' where seq = $1", row["seq"])
    assert damage == [f"lane {two.lane(0)}: the row at event {row['seq']} says other things than its commits"]


async def test_what_retention_has_taken_is_vouched_for_by_a_signed_anchor() -> None:
    store = store_url()
    clock = ManualClock()
    first, second = await started(store, clock), await started(store, clock)
    two = Two(store, first, second)
    await two.work(0)
    await two.work(1)
    await two.sign()
    clock.advance(8 * DAY_MS)
    await two.work(0)
    await two.sign()
    assert isinstance(first.store, Postgres)
    await first.store.housekeeper.tidy()
    report = await verified(store)
    assert report.damage == [] and all(lane.pruned_until for lane in report.lanes)
    damage = await tampered(two, "update anchor set seq = seq + 1 where lane = $1", two.lane(1))
    assert f"lane {two.lane(1)}: that it was pruned up to event" in damage[0]
    for daemon in (first, second):
        await daemon.exchange.close()


async def test_an_id_that_was_buried_and_is_past_its_time_can_be_used_anew() -> None:
    clock = ManualClock()
    async with Mailbox.open(store_url(), clock=clock) as box:
        ann, bob = box.of("ann@lab"), box.of("bob@lab")
        await finish(ann, bob, plain(bob, id=uid(1)))
        clock.advance(8 * DAY_MS)
        await box.compact()
        clock.advance(40 * DAY_MS)
        await finish(ann, bob, plain(bob, "something else", id=uid(1)))


async def test_retention_takes_only_the_beginning_of_a_chain_whatever_the_clocks_say() -> None:
    store = store_url()
    clock = ManualClock()
    daemon = await started(store, clock)
    await daemon.exchange.heads.sign()
    now = clock.now_ms()
    async with sql(store) as connection:
        await connection.execute("update log set at = $1 where seq = (select max(seq) from log)", now - 8 * DAY_MS)
        assert isinstance(daemon.store, Postgres)
        count = await connection.fetchval("select count(*) from log")
        await daemon.store.housekeeper.tidy()
        assert await connection.fetchval("select count(*) from log") == count
    await daemon.exchange.close()


async def test_daemons_that_are_long_gone_leave_with_their_lanes() -> None:
    store = store_url()
    clock = ManualClock(time.time_ns() // 1_000_000)
    first, gone = await started(store, clock), await started(store, clock)
    two = Two(store, first, gone)
    left = two.lane(1)
    async with Mailbox.open(f"{store}&lanes=1", clock=clock) as box:
        await box.of("ann@lab").send_task(plain(box.of("bob@lab")))
    for which in (0, 1):
        await two.work(which)
    await two.sign()
    await gone.exchange.close()
    assert isinstance(first.store, Postgres)
    clock.advance(6 * DAY_MS)
    await two.work(0)
    await first.exchange.heads.sign()
    await first.store.housekeeper.tidy()
    async with sql(store) as connection:
        counts = "select (select count(*) from daemon), (select count(*) from lane)"
        assert tuple(await connection.fetchrow(counts) or ()) == (3, 3)
        clock.advance(2 * DAY_MS)
        await first.store.housekeeper.tidy()
        assert [row["id"] for row in await connection.fetch("select id from lane")] == [two.lane(0)]
        keys = {row["pubkey"] for row in await connection.fetch("select pubkey from daemon")}
        assert keys == {first.exchange.realm.pubkey, gone.exchange.realm.pubkey}  # what it signed stays genuine
    report = await verified(store)
    assert report.damage == [] and [lane.lane for lane in report.lanes] == [two.lane(0)] != [left]
    row = (await rows(two, 0))[0]
    damage = await tampered(two, "update log set lines = $1 where seq = $2", row["lines"][:-70], row["seq"])
    assert any(f"lane {two.lane(0)}" in told for told in damage)
    await first.exchange.close()


@pytest.mark.parametrize("is_hidden", [False, True])
async def test_a_lane_that_was_cut_off_by_hand_stays_to_tell_of_it(is_hidden: bool) -> None:
    store = store_url()
    clock = ManualClock(time.time_ns() // 1_000_000)
    first, gone = await started(store, clock), await started(store, clock)
    two = Two(store, first, gone)
    left = two.lane(1)
    await two.work(1)
    await two.sign()
    await gone.exchange.close()
    async with sql(store) as connection:
        await connection.execute("delete from log where lane = $1", left)
        if is_hidden:
            await connection.execute(
                """insert into anchor select id, seq, hash, (select pubkey from daemon where id = l.daemon), 'forged'
                   from lane l where id = $1""",
                left,
            )
    clock.advance(8 * DAY_MS)
    await two.work(0)
    await first.exchange.heads.sign()
    assert isinstance(first.store, Postgres)
    await first.store.housekeeper.tidy()
    assert any(told.startswith(f"lane {left}: ") for told in (await verified(store)).damage)
    await first.exchange.close()
