"""What happens, as it happens: the log as server-sent events, from any place in it.

A reader gets each event of the tasks that it sent or received once and in order: first what it has missed, then what
comes. Everything is read from the durable log, stretch by stretch, as fast as the reader takes it; nothing is queued
for anybody, and readers at the same place share one look at the log. An event is told with its small members, never
with what a task or a result carries.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, Protocol

import msgspec
from msgspec import Struct

from covenant.exchange.exchange import Exchange
from covenant.model import event as e
from covenant.model.audit import Logged
from covenant.model.error import BadCursor, Malformed, UnknownTask
from covenant.model.peer import Caller
from covenant.model.query import GetTask
from covenant.model.record import PART_PREFIX
from covenant.rules.audit import task_of
from covenant.serve.head import Headers
from covenant.serve.http import EVENT_STREAM, KEEP_AWAKE_S, Receive, Scope, Send, hung_up
from covenant.serve.routes import query_of
from covenant.store.engine import Store

PATH: Final = "/a2a/events"
_STRETCH: Final = 64  # commits that are read at once
_READERS_MAX: Final = 2  # of the log at the same time
_BREATH_S: Final = 0.02  # one look for all that is committed in this time
_PARTIES_MAX: Final = 100_000
_LAST_WORD_S: Final = 1.0

# What is told of an event besides its task. What is not here is nobody's task, or nobody's business.
TOLD: Final[dict[type, tuple[str, ...]]] = {
    e.Sent: ("follows", "replayed"),
    e.Leased: ("lease_id",),
    e.Unleased: (),
    e.Requeued: ("lease_id", "cause", "reason", "not_before_ms"),
    e.Progressed: (),
    e.Answered: (),
    e.Ended: ("outcome",),
    e.CancelAsked: ("reason", "cascade"),
    e.CascadeAsked: (),
    e.CascadeDone: (),
    e.Promoted: (),
    e.Due: (),
    e.Drained: (),
    e.Undrained: (),
    e.Parted: ("attempt", "generation"),
    e.Messaged: (),
    e.Updated: ("asks",),
    e.Asked: ("asks",),
    e.Chunked: (),
    e.Replied: (),
    e.Begun: (),
    e.Parked: ("asks", "until_ms"),
    e.Woken: (),
    e.TakenUp: ("lease_id",),
    e.LateKept: (),
}

log = logging.getLogger("covenant.events")


class Followed(Store, Protocol):
    """A store that says when its log has grown."""

    def growth(self) -> asyncio.Future[None]: ...


class _Parties(Struct, frozen=True, gc=False):
    """Who a task is between, from the event on with which it was sent: an id may be used anew by others."""

    since: int
    pubkeys: tuple[str, str]


class _Told(Struct, gc=False):
    seq: int
    task_id: str
    text: bytes
    parties: _Parties | None  # where the stretch itself tells them


class _Stretch(Struct, gc=False):
    """Commits that follow one another, as they are told; `growth` is done when more has come since."""

    first: int
    last: int
    told: list[_Told]
    growth: asyncio.Future[None]


class Events:
    def __init__(
        self,
        exchange: Exchange,
        store: Followed,
        authenticate: Callable[[Headers], Awaitable[Caller]],
        keep_awake_s: float = KEEP_AWAKE_S,
    ) -> None:
        self._exchange = exchange
        self._store = store
        self._authenticate = authenticate
        self._keep_awake_s = keep_awake_s
        self._readings: dict[int, asyncio.Task[_Stretch]] = {}
        self._turn = asyncio.Semaphore(_READERS_MAX)
        self._parties: dict[str, _Parties] = {}  # of the tasks seen of late, as they are between now
        self._open: dict[asyncio.Future[None], str] = {}  # how to end each stream, and whose it is
        exchange.trust.watch(self._end_of)

    @property
    def count(self) -> int:
        return len(self._open)

    def end(self) -> None:
        """Of all streams: the daemon is ending."""
        for ending in self._open:
            _finish(ending)

    def _end_of(self, pubkey: str) -> None:
        for ending, peer in self._open.items():
            if peer == pubkey:
                _finish(ending)

    # --- one stream ---------------------------------------------------------------------------------------

    async def page(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = await self._authenticate(scope["headers"])
        self._exchange.meter(caller)
        asked = _cursor_of(scope)
        end = await self._store.log_end()
        after = end if asked is None else asked
        with self._exchange.waits.one(caller.agent.pubkey):
            await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
            await _say(send, _gap(after, end) if after > end else _mark(after))
            ending: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._open[ending] = caller.agent.pubkey
            try:
                await self._stream(caller, min(after, end), ending, receive, send)
            finally:
                del self._open[ending]

    async def _stream(
        self, caller: Caller, after: int, ending: asyncio.Future[None], receive: Receive, send: Send
    ) -> None:
        """Until it is ended, or the reader has gone."""
        following = asyncio.create_task(self._follow(caller, after, send))
        gone = asyncio.create_task(hung_up(receive))
        try:
            await asyncio.wait((following, gone, ending), return_when=asyncio.FIRST_COMPLETED)
            is_there = not gone.done()
        finally:
            gone.cancel()
            following.cancel()
            await asyncio.wait([following])
        if not following.cancelled() and (failed := following.exception()) is not None:
            log.warning("a stream of events ended early", exc_info=failed)
        if is_there:
            with suppress(TimeoutError):  # a reader that takes nothing any more does not miss it
                async with asyncio.timeout(_LAST_WORD_S):
                    await send({"type": "http.response.body", "body": b""})

    async def _follow(self, caller: Caller, after: int, send: Send) -> None:
        now = asyncio.get_running_loop().time
        said = now()
        while not self._exchange.is_draining and self._store.caller_of(caller.token) is not None:
            stretch = await self._read(after)
            if stretch.last > after:
                text = _gap(after, stretch.first - 1) if await self._store.is_cut(after, stretch.first) else b""
                text += await self._text_for(caller, stretch)
                after = stretch.last
            else:
                text = b""
                await asyncio.wait([stretch.growth], timeout=max(0, said + self._keep_awake_s - now()))
                if stretch.growth.done():
                    await asyncio.sleep(_BREATH_S)
            if not text and now() >= said + self._keep_awake_s:
                text = _mark(after)
            if text:
                await _say(send, text)
                said = now()

    async def _text_for(self, caller: Caller, stretch: _Stretch) -> bytes:
        """What this caller is told of a stretch."""
        if caller.is_operator:
            return b"".join([told.text for told in stretch.told])
        pubkey = caller.agent.pubkey
        return b"".join([told.text for told in stretch.told if pubkey in await self._parties_of(told)])

    async def _parties_of(self, told: _Told) -> tuple[str, ...]:
        """Nobody, for what happened to a task whose id has been used anew since."""
        parties = told.parties or self._parties.get(told.task_id)
        if parties is None:
            try:
                entry = await self._store.ask(GetTask(None, told.task_id))
                keys = (entry.task.sender.pubkey, entry.task.recipient.pubkey)
                parties = _Parties(await self._store.sent_at(told.task_id), keys)
            except UnknownTask:
                parties = _Parties(0, ("", ""))
            self._remember(told.task_id, parties)
        return parties.pubkeys if parties.since <= told.seq else ()

    def _remember(self, task_id: str, parties: _Parties) -> None:
        known = self._parties.get(task_id)
        if known is not None and known.since > parties.since:
            return  # a reader far back has come by the one before
        if known is None and len(self._parties) >= _PARTIES_MAX:
            del self._parties[next(iter(self._parties))]
        self._parties[task_id] = parties

    # --- the log ------------------------------------------------------------------------------------------

    async def _read(self, after: int) -> _Stretch:
        """What follows this event; who asks for the same at the same time shares the answer."""
        reading = self._readings.get(after)
        if reading is None:
            reading = self._readings[after] = asyncio.create_task(self._stretch(after))
            reading.add_done_callback(lambda done: self._was_read(after, done))
        return await asyncio.shield(reading)

    def _was_read(self, after: int, done: asyncio.Task[_Stretch]) -> None:
        del self._readings[after]
        if not done.cancelled():
            done.exception()  # it may be that nobody waits for it any more

    async def _stretch(self, after: int) -> _Stretch:
        async with self._turn:
            growth = self._store.growth()  # before the look, so that nothing comes in between unseen
            commits = await self._store.log(after, _STRETCH)
            sent: dict[str, _Parties] = {}
            told = [told for logged in commits for told in self._tell(logged, after, sent)]
        if not commits:
            return _Stretch(after, after, told, growth)
        return _Stretch(commits[0].seq, commits[-1].last, told, growth)

    def _tell(self, logged: Logged, after: int, sent: dict[str, _Parties]) -> list[_Told]:
        told: list[_Told] = []
        for seq, event in enumerate(logged.events, logged.seq):
            members = TOLD.get(type(event))
            task_id = task_of(event)
            if members is None or task_id is None:
                continue
            if type(event) is e.Sent and event.task.sender is not None:
                sent[task_id] = _Parties(seq, (event.task.sender.pubkey, event.task.recipient.pubkey))
                self._remember(task_id, sent[task_id])
            if seq > after:
                text = _message(seq, task_id, event, members, logged)
                told.append(_Told(seq, task_id, text, sent.get(task_id)))
        return told


def _finish(ending: asyncio.Future[None]) -> None:
    if not ending.done():
        ending.set_result(None)


def _cursor_of(scope: Scope) -> int | None:
    """The last event that the reader has seen. One that comes back says so in a header, whatever its URL says."""
    members = query_of(scope["query_string"])
    other = next((name for name in members if name != "after"), None)
    if other is not None:
        raise Malformed(f"there is no parameter {other[:100]!r} here, only after", field="query")
    header = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"last-event-id"), None)
    cursors = [given for given in (header, members.get("after")) if given is not None]
    for given in cursors:
        if not (given.isascii() and given.isdigit()) or len(given) > 18:
            raise BadCursor("the last event is told by its number", cursor=given[:100])
    return int(cursors[0]) if cursors else None


# --- what goes out -----------------------------------------------------------------------------------------


async def _say(send: Send, text: bytes) -> None:
    await send({"type": "http.response.body", "body": text, "more_body": True})


def _mark(after: int) -> bytes:
    """A comment, and where to go on from: a reader that comes back need not look at all that did not concern it."""
    return b":\nid: %d\n\n" % after


def _gap(after: int, until: int) -> bytes:
    """What the log does not hold. It goes on behind `until`."""
    return b'id: %d\nevent: gap\ndata: {"after":%d,"next":%d}\n\n' % (until, after, until + 1)


def _message(seq: int, task_id: str, event: e.Event, members: tuple[str, ...], logged: Logged) -> bytes:
    kind = str(event.__struct_config__.tag)
    data: dict[str, Any] = {
        "seq": seq,
        "at_ms": logged.at,
        "type": kind,
        "task_id": task_id,
        "actor": logged.by,
        **_shown(event, members),
    }
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (seq, kind.encode(), msgspec.json.encode(data))


def _shown(event: e.Event, members: tuple[str, ...]) -> dict[str, Any]:
    """Its small members, and those of what it carries; what says nothing is left out."""
    shown = {name: getattr(event, name) for name in members}
    if isinstance(event, e.Sent):
        task = event.task
        shown |= {"sender": str(task.sender), "recipient": str(task.recipient), "parent": task.parent}
    if isinstance(event, (e.Answered, e.Ended, e.Parted, e.LateKept, e.Replied)):
        shown |= {"status": event.result.status, "lease_id": event.result.lease_id}
    if event.key.startswith(PART_PREFIX):
        shown["part"] = int(event.key.rpartition(":")[2])
    return {name: value for name, value in shown.items() if value is not None and value is not False}
