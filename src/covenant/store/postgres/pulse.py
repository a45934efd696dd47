"""Signs of life, and an ear for the others: on a connection and in a task of their own, which nothing else can hold up.

One who has given no sign for long is taken for dead by the others: its lanes are closed, and its sessions ended. Should
it live after all, it finds that out by its next beat, and goes on under a new name.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

import asyncpg
import msgspec

from covenant.model.error import ClockAstray, CovenantError
from covenant.store.postgres.connection import LOST, connect

if TYPE_CHECKING:
    from covenant.store.postgres.engine import Postgres

BEAT_S: Final = 2.0  # a sign of life, and a look at who else is there
SILENCE_BEATS: Final = 3  # without an answer, and the database counts as away
LAPSE_S: Final = 15.0  # so long silent, and a daemon is taken for dead
SKEW_MS_MAX: Final = 5_000  # between the clock here and the database's
_AGAIN_S: Final = 0.5
_NOW: Final = "(extract(epoch from clock_timestamp()) * 1000)::bigint"

# One statement: a sign of life, the end of those that gave none for long, and who leads from now on.
_BEAT: Final = f"""
    with alive as (
        update daemon set seen = clock_timestamp() where id = $1 and ended is null returning id
    ), silent as (
        update daemon set ended = clock_timestamp(), proof = 'silent'
        where ended is null and id <> $1 and seen < clock_timestamp() - $2::text::interval
        returning id, label
    ), closed as (
        update lane set closed = true where daemon in (select id from silent)
    )
    select 'time' as who, null as id, null as label, {_NOW} as now, null as leads
    union all select 'me', id, null, null, case when $3 then pg_try_advisory_lock($4, 3) end from alive
    union all select 'silent', id, label, null, null from silent
    union all select 'other', id, null, null, null from daemon
        where ended is null and id <> $1 and id not in (select id from silent)
"""
_END_SESSIONS: Final = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = $1"
_END_FORMER: Final = """
    select pg_terminate_backend(pid) from pg_stat_activity
    where application_name = $1 and pid <> pg_backend_pid() and pid in (
        select pid from pg_locks where locktype = 'advisory' and (classid, objid) = ($2::integer::oid, 3::oid))
"""

log = logging.getLogger("covenant.store")


def session_of(daemon_id: str) -> str:
    """What the sessions of a daemon are called in the database."""
    return f"covenant {daemon_id}"


async def name_session(connection: asyncpg.Connection[Any], name: str) -> None:
    await connection.execute("select set_config('application_name', $1, false)", name)


class Pulse:
    def __init__(self, engine: Postgres) -> None:
        self._engine = engine
        self._ears: asyncpg.Connection[Any] | None = None
        self._stirred = asyncio.Event()
        self._answered_s = 0.0
        self.leads = False  # it does what one daemon does for all, as long as this connection lives
        self.companions = 1
        self._skew_ms = 0  # by which the clock here was ahead, beyond what the way to the database may take
        self._was_astray = False
        self._compared: tuple[float, int] | None = None  # when that was: by the clock that never jumps, and by ours

    @property
    def is_answered(self) -> bool:
        """The database has answered of late."""
        return asyncio.get_running_loop().time() - self._answered_s < SILENCE_BEATS * BEAT_S

    async def open(self) -> None:
        self._ears = await connect(self._engine.where, application_name=self._engine.member.session)
        self._ears.add_termination_listener(lambda _: self._stirred.set())
        await self._ears.add_listener(self._engine.channel, self._hear)
        # One that died without a word lives on at the server, and would lead there for nobody.
        await self._end(self._ears, _END_FORMER, self._engine.member.session, self._engine.space)
        await self._beat(self._ears)

    def close(self) -> None:
        self.leads = False
        if self._ears is not None:
            self._ears.terminate()
        self._ears = None

    async def work(self) -> None:
        is_told = False
        while True:
            try:
                async with asyncio.timeout(_AGAIN_S if self._ears is None else BEAT_S):
                    await self._stirred.wait()
            except TimeoutError:
                pass
            self._stirred.clear()
            try:
                if self._ears is None or self._ears.is_closed():
                    self.close()
                    await self.open()
                    self._engine.waking.wake_all()
                else:
                    await self._beat(self._ears)
                is_told = False
            except (*LOST, asyncpg.PostgresError, CovenantError) as lost:
                log.log(logging.INFO if is_told else logging.WARNING, "no sign of life can be given: %s", lost)
                is_told = True
                self.close()

    async def _beat(self, ears: asyncpg.Connection[Any]) -> None:
        engine = self._engine
        name = engine.member.id
        # One that is no daemon has none of that work to do, and one with a wrong clock would do it at the wrong time.
        is_candidate = not self.leads and engine.member.pubkey is not None and not self.is_astray
        before_ms = engine.now()
        found = await ears.fetch(
            _BEAT, name, f"{LAPSE_S} seconds", is_candidate, engine.space, timeout=SILENCE_BEATS * BEAT_S
        )
        self._answered_s = asyncio.get_running_loop().time()
        rows: dict[str, list[Any]] = {"time": [], "me": [], "silent": [], "other": []}
        for row in found:
            rows[row["who"]].append(row)
        await self._compare(ears, before_ms, rows["time"][0]["now"])
        self.companions = 1 + len(rows["other"])
        if not rows["me"]:
            await self._return(ears, name)
        elif rows["me"][0]["leads"]:
            self.leads = True
            engine.hooks.lead()
        for row in rows["silent"]:
            log.warning("daemon %s (%s) has been silent for long: it is taken for dead", row["id"], row["label"])
            await self._end(ears, _END_SESSIONS, session_of(row["id"]))  # it may be frozen with locks

    @property
    def skew_ms(self) -> int:
        """By which the clock here is ahead: as it was found, and as it has jumped since."""
        if self._compared is None:
            return 0
        at_s, at_ms = self._compared
        passed_ms = (asyncio.get_running_loop().time() - at_s) * 1000
        return round(self._skew_ms + self._engine.now() - at_ms - passed_ms)

    @property
    def is_astray(self) -> bool:
        """What goes by the clock is left to others."""
        return abs(self.skew_ms) > SKEW_MS_MAX

    async def check_clock(self, connection: asyncpg.Connection[Any]) -> None:
        """Refuse to begin with a clock that would end, expire and bury for all at the wrong time."""
        before_ms = self._engine.now()
        self._learn_skew(before_ms, await connection.fetchval(f"select {_NOW}"))
        self.must_be_on_time()

    def must_be_on_time(self) -> None:
        if self.is_astray:
            raise ClockAstray(self._told_skew(), skew_ms=self.skew_ms)

    async def _compare(self, ears: asyncpg.Connection[Any], before_ms: int, there_ms: int) -> None:
        was_astray = self._was_astray
        self._learn_skew(before_ms, there_ms)
        self._was_astray = is_astray = self.is_astray
        if is_astray and not was_astray:
            log.error("%s: what goes by the clock is left to others", self._told_skew())
        elif was_astray and not is_astray:
            log.warning("the clock is right again")
        if is_astray and self.leads:
            self.leads = False
            await ears.fetch("select pg_advisory_unlock($1, 3)", self._engine.space)

    def _learn_skew(self, before_ms: int, there_ms: int) -> None:
        """The database looked at its clock some time between two looks at ours."""
        if self._engine.is_wall_clock:
            after_ms = self._engine.now()
            self._skew_ms = max(before_ms - there_ms, 0) + min(after_ms - there_ms, 0)
            self._compared = (asyncio.get_running_loop().time(), after_ms)

    def _told_skew(self) -> str:
        side = "ahead of" if self.skew_ms > 0 else "behind"
        return (
            f"the clock is {abs(self.skew_ms) / 1000:.1f} s {side} the database's, and may be {SKEW_MS_MAX // 1000} s"
        )

    async def _return(self, ears: asyncpg.Connection[Any], name: str) -> None:
        """The others took this daemon for dead, or the store has forgotten it."""
        self._engine.member.rename(name)
        await self._engine.member.register(ears)
        await name_session(ears, self._engine.member.session)
        self._engine.tell_of_me()

    async def _end(self, ears: asyncpg.Connection[Any], sql: str, *of: Any) -> None:
        try:
            await ears.fetch(sql, *of)
        except asyncpg.InsufficientPrivilegeError as refused:
            log.warning("sessions of a daemon that is gone could not be ended: %s", refused)

    def _hear(self, connection: Any, pid: int, channel: str, payload: str) -> None:
        try:
            who, is_trust, readied, answered, changed = msgspec.json.decode(payload)
        except (msgspec.MsgspecError, ValueError):
            self._engine.waking.wake_all()
            return
        if who == self._engine.member.id:
            return
        self.companions = max(2, self.companions)
        if readied is None:
            self._engine.waking.wake_all()
        self._engine.rung(readied or (), answered or (), changed or (), is_trust)
