"""The servers under load, each in a process of its own: a real daemon, and the floor beside it.

The daemon keeps its journal on the disk, and every caller has a token and grants. The floor is the same HTTP server
with the same settings and nothing behind it: it reads the body and answers what the daemon would.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from bench.covenant_cycle import url_of
from bench.serve.seats import Seat, Served, raise_open_files
from bench.work import INTENT, REPLY, Figures
from covenant import AgentId, Result, Task, Text
from covenant.exchange.exchange import Exchange
from covenant.exchange.realm import Realm
from covenant.model import command as c
from covenant.model.peer import Caller
from covenant.serve import daemon as daemon_module
from covenant.serve import wire as w
from covenant.serve.daemon import Daemon, Settings, keep_memory_steady
from covenant.serve.listener import listen
from covenant.serve.places import PLACE_OF
from covenant.serve.server import Server, config_for
from covenant.serve.verbs.table import HANDLERS

_OPERATOR_TOKEN: Final = "cov_bench_operator"
_WORKING: Final = ("a2a.send.*", "a2a.respond.*", "a2a.cancel.*")
_BACKLOG: Final = 4096


class ExchangeWithoutDoor(Exchange):
    """For the benchmark alone: commands go to the store as if nobody had to be let in, and nothing is audited."""

    def run(self, caller: Caller, command: c.Command) -> Coroutine[Any, Any, Any]:
        return self.store.run(command)

    async def run_all(self, caller: Caller, commands: Sequence[c.Command]) -> list[Any]:
        return await self.store.run_all(commands)

    async def _take(
        self,
        caller: Caller,
        command: c.LeaseTasks | c.DrainResults,
        wait_ms: int,
        undoing: list[c.Command] | None = None,
    ) -> list[Any]:
        assert not self.is_draining and wait_ms == 0  # which is all that the load asks for
        return await self.store.take(command, 0, undoing)


async def daemon(
    folder: Path, scheme: str, peers: int, door: bool, turns: AsyncIterator[None]
) -> AsyncIterator[Figures]:
    """What it weighs: when it is up, and at each turn."""
    raise_open_files()
    if not door:
        vars(daemon_module)["Exchange"] = ExchangeWithoutDoor  # which the daemon will make
    with tempfile.TemporaryDirectory(prefix="cov-") as short:  # a socket's path is short
        path = Path(short) / "sock"
        settings = Settings(store=url_of(folder / "data", scheme), http="127.0.0.1:0", ipc=path)
        serving = Daemon(settings, Realm.throwaway(), _OPERATOR_TOKEN)
        await serving.start()
        keep_memory_steady()  # as `covenant serve` does
        seats = await _enrolled(serving, peers)
        replies, *_ = await asyncio.gather(*(_cycle(serving, seat) for seat in seats))
        checked = any(row.kind == "capability_check" for row in await serving.store.audit(20 * len(seats)))  # type: ignore[attr-defined]
        assert checked == door
        assert serving.address is not None
        port = serving.address[1]
        Served(pid=os.getpid(), port=port, socket=str(path), seats=seats, replies=replies).write(folder)
        yield _weight()
        async for _ in turns:
            yield _weight()
        await serving.stop()


async def _enrolled(serving: Daemon, peers: int) -> list[Seat]:
    operator = serving.exchange.authenticate(_OPERATOR_TOKEN)
    names = [f"p{number}@bench" for number in range(peers)]
    enrolled = await asyncio.gather(
        *(serving.exchange.enroll(operator, name, AgentId.named(name).pubkey, _WORKING) for name in names)
    )
    return [Seat(AgentId(view.display, view.pubkey), token) for view, token in enrolled]


async def _cycle(serving: Daemon, seat: Seat) -> dict[str, str]:
    """One cycle from within: so that each grant has been verified once, and the floor can answer in the same sizes."""
    exchange = serving.exchange
    caller = exchange.authenticate(seat.token)
    found: dict[str, str] = {}

    async def call(request: w.Request) -> Any:
        reply = await HANDLERS[type(request)](exchange, caller, request)
        found[PLACE_OF[type(request)].path] = msgspec.json.encode(reply).decode()
        return reply

    await call(w.SendTask(task=Task(recipient=seat.agent, intent_text=INTENT)))
    lent = await call(w.RecvTask())
    await call(w.PostResult(result=Result(lent.task.id, "ok", (Text(REPLY),), None, lent.lease_id)))
    await call(w.RecvResult())
    return found


def _weight() -> Figures:
    return {"rss_mib": psutil.Process().memory_info().rss / 1024 / 1024}


# --- the floor ---------------------------------------------------------------------------------------------


async def floor(folder: Path, beside: str, turns: AsyncIterator[None]) -> AsyncIterator[Figures]:
    """The server and its settings are the daemon's; the protocol is uvicorn's own, and stays that."""
    raise_open_files()
    model = Served.read(Path(beside))
    listening = listen("127.0.0.1", 0, _BACKLOG)
    bare = _Bare({path: reply.encode() for path, reply in model.replies.items()})
    server = Server(config_for(bare, _BACKLOG))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    await server.is_up.wait()
    Served(pid=os.getpid(), port=listening.getsockname()[1], seats=model.seats, replies=model.replies).write(folder)
    yield _weight()
    async for _ in turns:
        yield _weight()
    server.is_over.set()
    await serving


class _Bare:
    def __init__(self, replies: dict[str, bytes]) -> None:
        self._replies = {
            path: (
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(reply))],
                },
                {"type": "http.response.body", "body": reply},
            )
            for path, reply in replies.items()
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "POST":
            while (await receive()).get("more_body"):
                pass
        start, body = self._replies[scope["path"]]
        await send(start)
        await send(body)
