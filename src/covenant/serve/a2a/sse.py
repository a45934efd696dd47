"""A stream of events over HTTP: server-sent events whose ids are generations.

Nothing is queued: each event is read from the log when the reader has taken the one before it. When there is nothing
to tell, a comment now and then keeps the way open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

import msgspec

from covenant.model.error import CovenantError, Internal
from covenant.model.protocol import StreamResponse
from covenant.serve.a2a.operations import Event
from covenant.serve.head import Headers
from covenant.serve.http import EVENT_STREAM, KEEP_AWAKE_S, Say, Stream

_REFUSED_BY_S: Final = 0.25
_COMMENT: Final = b":\n\n"
_encoder: Final = msgspec.json.Encoder()

log = logging.getLogger("covenant.a2a")


class Sse(Stream):
    """`first` is there, or on its way, before it is said that there is a stream."""

    def __init__(
        self,
        first: asyncio.Future[Event | None],
        rest: AsyncGenerator[Event, None],
        wrap: Callable[[StreamResponse], object],
        refuse: Callable[[CovenantError], bytes],
        more: Headers,
        keep_awake_s: float = KEEP_AWAKE_S,
    ) -> None:
        self.headers = [*EVENT_STREAM, *more]
        self._first = first
        self._rest = rest
        self._wrap = wrap
        self._refuse = refuse
        self._keep_awake_s = keep_awake_s
        self._said_s = 0.0

    async def tell(self, say: Say) -> None:
        now = asyncio.get_running_loop().time
        self._said_s = now()
        telling = asyncio.ensure_future(self._tell(say, now))
        try:
            while not telling.done():
                await asyncio.wait((telling,), timeout=self._said_s + self._keep_awake_s - now())
                if not telling.done() and now() >= self._said_s + self._keep_awake_s:
                    self._said_s = now()
                    await say(_COMMENT)
        finally:
            telling.cancel()
            await asyncio.wait((telling,))
        failed = telling.exception()
        if failed is not None:
            log.error("a stream could not be told", exc_info=failed)

    async def _tell(self, say: Say, now: Callable[[], float]) -> None:
        async with aclosing(self._rest), aclosing(self._texts()) as texts:
            async for text in texts:
                self._said_s = now()
                await say(text)

    async def _texts(self) -> AsyncGenerator[bytes, None]:
        """Each event; and what went wrong, if something did. That has no id: it is nothing to go on behind."""
        try:
            first = await self._first
            if first is not None:
                yield self._text(first)
                async for event in self._rest:
                    yield self._text(event)
        except CovenantError as refusal:
            log.info("a stream ended early: %s", refusal)
            yield b"data: %b\n\n" % self._refuse(refusal)
        except Exception as failed:
            log.error("a stream failed", exc_info=failed)
            yield b"data: %b\n\n" % self._refuse(Internal("something went wrong inside; it is in the daemon's log"))

    def _text(self, event: Event) -> bytes:
        return b"id: %d\ndata: %b\n\n" % (event.generation, _encoder.encode(self._wrap(event.response)))


async def opened(
    events: AsyncGenerator[Event, None],
    wrap: Callable[[StreamResponse], object],
    refuse: Callable[[CovenantError], bytes],
    more: Headers,
    keep_awake_s: float,
) -> Sse:
    """What is refused at once is refused in plain words. A stream that has nothing to tell yet begins all the same:
    who waits for it, and whatever stands in between, should see that there is one."""
    first = asyncio.ensure_future(_first_of(events))
    try:
        await asyncio.wait((first,), timeout=_REFUSED_BY_S)
    except asyncio.CancelledError:
        first.cancel()
        raise
    if first.done():
        first.result()
    return Sse(first, events, wrap, refuse, more, keep_awake_s)


async def _first_of(events: AsyncGenerator[Event, None]) -> Event | None:
    return await anext(events, None)
