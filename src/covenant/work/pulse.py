"""Signs of life for what is held, from a thread with an event loop of its own: handlers may block theirs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from covenant.mailbox import Mailbox
from covenant.model.agent import AgentId
from covenant.model.command import BeatLease
from covenant.model.error import CovenantError
from covenant.model.view import LeaseStatus
from covenant.store.engine import Engine
from covenant.work.context import LEASE_LOST, WorkContext

_BEATS_AT_ONCE: Final = 16

log = logging.getLogger("covenant.worker")


class Line(Protocol):
    """How the thread of the heartbeats reaches the mailbox."""

    async def beat(self, lease_id: str) -> LeaseStatus: ...
    async def close(self) -> None: ...


class OwnLine:
    """A connection of its own to the daemon: it works while the handlers block their loop."""

    def __init__(self, engine: Engine, agent: AgentId) -> None:
        self._engine = engine
        self._agent = agent

    async def beat(self, lease_id: str) -> LeaseStatus:
        status: LeaseStatus = await self._engine.run(BeatLease(self._agent, lease_id))
        return status

    async def close(self) -> None:
        await self._engine.close()


class BorrowedLine:
    """A store in this process lives on the loop of the handlers: all that another thread can do is ask that loop."""

    def __init__(self, box: Mailbox) -> None:
        self._box = box
        self._loop = asyncio.get_running_loop()

    async def beat(self, lease_id: str) -> LeaseStatus:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._box.heartbeat(lease_id), self._loop))

    async def close(self) -> None:
        pass


async def line_of(box: Mailbox) -> Line:
    from covenant.client.engine import RemoteEngine  # late: whoever keeps a mailbox in a file needs none of it

    engine: Any = box._engine
    if isinstance(engine, RemoteEngine):
        return OwnLine(await engine.again(box.agent), box.agent)
    return BorrowedLine(box)


class Pulse:
    """Gives signs of life for all that is held, from a thread with an event loop of its own."""

    def __init__(self, line: Line, every_ms: int) -> None:
        self._line = line
        self._every_s = every_ms / 1000
        self._home = asyncio.get_running_loop()  # where the handlers are
        self._held: dict[str, WorkContext] = {}
        self._gate = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self._is_over = False
        self._is_lost = False
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="covenant-heartbeat", daemon=True)

    @contextmanager
    def holding(self, ctx: WorkContext) -> Iterator[None]:
        with self._gate:
            self._held[ctx.lease_id] = ctx
        try:
            yield
        finally:
            self._drop(ctx)

    def _drop(self, ctx: WorkContext) -> None:
        with self._gate:
            self._held.pop(ctx.lease_id, None)

    async def __aenter__(self) -> Pulse:
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Waited for without blocking: a beat under way may need this very loop."""
        self._is_over = True
        if self._loop is not None and self._over is not None:
            self._loop.call_soon_threadsafe(self._over.set)
        await asyncio.wrap_future(self._ended)
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        finally:
            self._ended.set_result(None)

    async def _main(self) -> None:
        self._over = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if self._is_over:
            return
        beating = asyncio.create_task(self._beat_on())
        await self._over.wait()
        beating.cancel()
        await asyncio.wait([beating])
        await self._line.close()

    async def _beat_on(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            if self._home.is_closed():  # what is held there will never be worked on again
                assert self._over is not None
                self._over.set()
                return
            with self._gate:
                held = list(self._held.values())
            for at in range(0, len(held), _BEATS_AT_ONCE):
                await asyncio.gather(*(self._beat(ctx) for ctx in held[at : at + _BEATS_AT_ONCE]))

    async def _beat(self, ctx: WorkContext) -> None:
        try:
            ctx._hear(await self._line.beat(ctx.lease_id))
        except LEASE_LOST as lost:
            self._drop(ctx)
            if not ctx._is_done:
                ctx._hear_lost(lost)
        except CovenantError as failed:
            if not self._is_lost:
                log.warning("heartbeats do not get through: %s (%s)", failed, failed.code)
            self._is_lost = True
        except Exception:
            log.exception("a heartbeat failed")
        else:
            self._is_lost = False
