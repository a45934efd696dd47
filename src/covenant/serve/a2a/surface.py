"""The A2A protocol over HTTP: JSON-RPC, HTTP+JSON and the cards, behind the daemon's one address.

Thin, like the mailbox's surface beside it: find out who asks whom for what, have it done, and say what came of it in
the words of the binding. Cards are public; everything else needs the exchange's token.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from email.utils import formatdate, parsedate_to_datetime
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import Struct

from covenant.a2a.fault import INVALID_PARAMS, MEDIA_TYPE, Fault
from covenant.model.error import CovenantError, Internal
from covenant.model.peer import Caller
from covenant.model.protocol import StreamResponse
from covenant.rules.whereabouts import Reached
from covenant.serve.a2a import dialect, jsonrpc, parameters, paths, rest, sse
from covenant.serve.a2a.calls import CALLS, Desk, Talk
from covenant.serve.a2a.directory import Directory, Shown
from covenant.serve.a2a.operations import Agent, Event, Operations
from covenant.serve.a2a.parameters import Parameters
from covenant.serve.a2a.paths import Spot
from covenant.serve.head import Headers
from covenant.serve.http import KEEP_AWAKE_S, Asked, Http, HungUp, Response, Stream, headers_of

_CACHE_CONTROL: Final = b"public, max-age=60"
_VERSION: Final = "A2A-Version"  # in a query
_encoder: Final = msgspec.json.Encoder()
_READ: Final = {
    name.encode(): name
    for name in (
        "a2a-version",
        "a2a-extensions",
        "idempotency-key",
        "last-event-id",
        "content-type",
        "accept",
        "if-none-match",
        "if-modified-since",
        "host",
    )
}

log = logging.getLogger("covenant.a2a")


class _Meaning(Struct, eq=False):
    """What a head says in the words of the protocol."""

    spot: Spot
    headers: dict[str, str]
    type: str
    reached: Reached
    said: Parameters | None = None  # once they were read


class Surface:
    def __init__(
        self, http: Http, operations: Operations, directory: Directory, keep_awake_s: float = KEEP_AWAKE_S
    ) -> None:
        self._http = http
        self._exchange = http.exchange
        self._directory = directory
        self._desk = Desk(operations, directory)
        self._keep_awake_s = keep_awake_s

    def answer(self, asked: Asked) -> Coroutine[Any, Any, Response | Stream] | None:
        head = asked.head
        meaning: _Meaning | None = head.meaning
        if meaning is None:
            if not paths.is_ours(head.path):
                return None
            headers = _read(head.headers)
            try:
                spot = paths.spot(head.method, head.path)
            except Exception as failed:
                return _refuse(asked, headers, failed)
            if head.fault is not None:
                return _refuse(asked, headers, head.fault, is_jsonrpc=spot.what == paths.JSONRPC)
            reached = Reached(headers.get("host"), head.local)
            meaning = head.meaning = _Meaning(spot, headers, _type(headers), reached)
        what = meaning.spot.what
        if what == paths.JSONRPC:
            return self._jsonrpc(asked, meaning)
        return self._card(asked, meaning) if what == paths.CARD else self._rest(asked, meaning)

    # --- the bindings -------------------------------------------------------------------------------------

    async def _jsonrpc(self, asked: Asked, meaning: _Meaning) -> Response | Stream:
        body = b""
        try:
            caller = self._http.caller_of(asked.head) or await self._http.authenticate(asked.head.headers)
            self._exchange.meter(caller)
            limit = self._exchange.bounds.body_bytes_max
            try:
                said = meaning.said or self._negotiate(asked, meaning)
            except Fault:
                with suppress(CovenantError):
                    body = await asked.body(limit)  # for nothing but the id of the call
                raise
            if meaning.type not in jsonrpc.TYPES:
                raise _wrong_type(meaning.type, jsonrpc.TYPES)
            come = asked.data
            body = come if come and len(come) <= limit else await asked.body(limit)
            usual = jsonrpc.read_usual(body)
            if usual is not None:
                call_id, call, request = usual
                asked.verb = call.request
            else:
                call_id, call, params = jsonrpc.read(body)
                asked.verb = call.request
                request = jsonrpc.request_of(call, params)
            name = meaning.spot.agent or meaning.spot.tenant or request.tenant or None
            agent = self._directory.at_hand(name) or await self._directory.find(name)
            talk = self._talk(caller, meaning, said, request, name, agent)
            request = dialect.heard(said, request)
            if call.stream is not None:
                events = call.stream(self._desk, talk, request)
                refuse = partial(jsonrpc.refused, call_id)
                return await self._stream(asked, talk, events, partial(jsonrpc.event, call_id), refuse)
            assert call.answer is not None
            result = await asked.while_there(call.answer(self._desk, talk, request))
            data = jsonrpc.answered(call_id, dialect.plain(result) if talk.is_plain else result)
            return Response(200, data, _told(talk) if talk.extensions else ())
        except HungUp:
            raise
        except Exception as failed:
            refusal = _refusal(asked, failed)
            status, data = jsonrpc.refused(jsonrpc.id_of(body), refusal)
            return Response(status, data, headers_of(refusal, status))

    async def _rest(self, asked: Asked, meaning: _Meaning) -> Response | Stream:
        head, spot, headers = asked.head, meaning.spot, meaning.headers
        try:
            caller = self._http.caller_of(head) or await self._http.authenticate(head.headers)
            self._exchange.meter(caller)
            said = meaning.said or self._negotiate(asked, meaning)
            query = rest.query_of(head.query)
            body = b""
            if head.method == "POST":
                body = await asked.body(self._exchange.bounds.body_bytes_max)
                if body and meaning.type not in rest.TYPES:
                    raise _wrong_type(meaning.type, rest.TYPES)
            call = CALLS[spot.what]
            asked.verb = call.request
            request = rest.request_of(call, head.method, spot, query, body)
            name = spot.agent or spot.tenant or request.tenant or None
            agent = self._directory.at_hand(name) or await self._directory.find(name)
            talk = self._talk(caller, meaning, said, request, name, agent)
            request = dialect.heard(said, request)
            if call.stream is not None:
                return await self._stream(asked, talk, call.stream(self._desk, talk, request), _bare, rest.refused)
            assert call.answer is not None
            result = await asked.while_there(call.answer(self._desk, talk, request))
            data = rest.answered(dialect.plain(result) if talk.is_plain else result)
            return Response(200, data, _told(talk), _answer_type(headers))
        except HungUp:
            raise
        except Exception as failed:
            return _refused(asked, headers, failed)

    def _negotiate(self, asked: Asked, meaning: _Meaning) -> Parameters:
        """Return the parameters. Raises Fault for a version that is not spoken, before the rest of the request is read.

        The version decides how everything else is read. Only the token is checked earlier, so that an unknown caller is
        refused, and counted, in the same way in every version.
        """
        said = meaning.said = parameters.read(meaning.headers, _version_in(asked.head.query))
        return said

    def _talk(
        self, caller: Caller, meaning: _Meaning, said: Parameters, request: Any, name: str | None, agent: Agent
    ) -> Talk:
        spot = meaning.spot
        if spot.agent:
            tenant: str | None = spot.tenant or request.tenant or None
            if tenant and self._exchange.key_of(tenant) != agent.id.pubkey:
                raise Fault(INVALID_PARAMS, f"the tenant {tenant} is not {agent.id.display}", field="tenant")
        extensions = parameters.check(said, agent)
        is_plain = not dialect.knows_generations(said, request)
        return Talk(caller, agent, name, said, extensions, is_plain, meaning.reached)

    async def _stream(
        self,
        asked: Asked,
        talk: Talk,
        events: AsyncGenerator[Event, None],
        bind: Callable[[StreamResponse], Any],
        refuse: Callable[[CovenantError], tuple[int, bytes]],
    ) -> Stream:
        wrap = (lambda told: bind(dialect.plain(told))) if talk.is_plain else bind
        opening = sse.opened(events, wrap, lambda refusal: refuse(refusal)[1], [*_told(talk)], self._keep_awake_s)
        return await asked.while_there(opening)

    # --- cards --------------------------------------------------------------------------------------------

    async def _card(self, asked: Asked, meaning: _Meaning) -> Response:
        try:
            shown = await self._directory.show(meaning.spot.agent, reached=meaning.reached)
        except Exception as failed:
            return _refused(asked, meaning.headers, failed)
        more = (
            (b"etag", shown.etag.encode()),
            (b"last-modified", formatdate(shown.modified_ms // 1000, usegmt=True).encode()),
            (b"cache-control", _CACHE_CONTROL),
        )
        if _is_known(shown, meaning.headers):
            return Response(304, b"", more)
        return Response(200, _encoder.encode(shown.card), more)


def _bare(told: StreamResponse) -> StreamResponse:
    return told


def _read(headers: Headers) -> dict[str, str]:
    """Those that mean something here."""
    return parameters.gathered((_READ[key], value.decode("latin-1")) for key, value in headers if key in _READ)


def _version_in(query: bytes) -> str | None:
    """Return the version that a query names. A query that does not read names none, and is refused later."""
    with suppress(Fault):
        return rest.query_of(query).get(_VERSION)
    return None


def _type(headers: dict[str, str]) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _answer_type(headers: dict[str, str]) -> bytes:
    return rest.type_of(_type(headers), headers.get("accept", ""))


def _wrong_type(given: str, types: frozenset[str]) -> Fault:
    return Fault(MEDIA_TYPE, f"Content-Type is {' or '.join(sorted(types))}", contentType=given)


def _told(talk: Talk) -> tuple[tuple[bytes, bytes], ...]:
    """Which of the extensions that were asked for are in force."""
    if not talk.extensions:
        return ()
    return ((b"a2a-extensions", ", ".join(talk.extensions).encode("latin-1")),)


def _is_known(shown: Shown, headers: dict[str, str]) -> bool:
    """Whether the client has this card already. A tag says it better than a time."""
    tags = headers.get("if-none-match")
    if tags is not None:
        return tags.strip() == "*" or shown.etag in [tag.strip().removeprefix("W/") for tag in tags.split(",")]
    since = headers.get("if-modified-since")
    if since is None:
        return False
    try:
        return parsedate_to_datetime(since).timestamp() >= shown.modified_ms // 1000
    except (ValueError, OverflowError):
        return False


def _refusal(asked: Asked, failed: Exception) -> CovenantError:
    if isinstance(failed, CovenantError):
        return failed
    log.error("a request failed: %s %s", asked.head.method, asked.head.path, exc_info=failed)
    return Internal("something went wrong inside; it is in the daemon's log")


def _refused(asked: Asked, headers: dict[str, str], failed: Exception) -> Response:
    refusal = _refusal(asked, failed)
    status, data = rest.refused(refusal)
    return Response(
        status, data, headers_of(refusal, status), rest.error_type_of(_type(headers), headers.get("accept", ""))
    )


async def _refuse(asked: Asked, headers: dict[str, str], failed: Exception, is_jsonrpc: bool = False) -> Response:
    """Refuse what HTTP itself forbids, with its status in either binding."""
    refused = _refused(asked, headers, failed)
    if is_jsonrpc:
        return Response(refused.status, jsonrpc.refused(None, _refusal(asked, failed))[1])
    return refused
