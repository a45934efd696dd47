"""The A2A servers under load, each in a process of its own: a real daemon with a worker inside, and the official SDK's.

Both complete every message at once, with one artifact. The daemon makes three durable commits of it: sent, leased,
answered; the SDK keeps its tasks in memory, or in SQLite.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from bench.covenant_cycle import url_of
from bench.serve.daemon import _OPERATOR_TOKEN, _enrolled, _weight
from bench.serve.seats import Served, raise_open_files
from bench.work import REPLY, Figures
from covenant import Result, Text
from covenant.exchange.realm import Realm
from covenant.model import command as c
from covenant.model.peer import Caller
from covenant.serve.daemon import Daemon, Settings, keep_memory_steady
from covenant.serve.listener import listen
from covenant.serve.server import Server, config_for

_BATCH: Final = 128
_WORKERS: Final = 2  # while one waits for the disk, the other takes what has come
_BACKLOG: Final = 4096
_WAIT_MS: Final = 20_000


async def daemon(folder: Path, scheme: str, peers: int, turns: AsyncIterator[None]) -> AsyncIterator[Figures]:
    """With somebody at work."""
    async for figures in _serve(folder, scheme, peers, turns, works=True):
        yield figures


async def idle(folder: Path, scheme: str, peers: int, turns: AsyncIterator[None]) -> AsyncIterator[Figures]:
    """Nobody takes what is sent, unless somebody comes."""
    async for figures in _serve(folder, scheme, peers, turns, works=False):
        yield figures


async def _serve(
    folder: Path, scheme: str, peers: int, turns: AsyncIterator[None], works: bool
) -> AsyncIterator[Figures]:
    raise_open_files()
    with tempfile.TemporaryDirectory(prefix="cov-") as short:
        settings = Settings(store=url_of(folder / "data", scheme), http="127.0.0.1:0", ipc=Path(short) / "sock")
        serving = Daemon(settings, Realm.throwaway(), _OPERATOR_TOKEN)
        await serving.start()
        keep_memory_steady()
        seats = await _enrolled(serving, peers + 1)
        writer = serving.exchange.authenticate(seats[-1].token)
        operator = serving.exchange.authenticate(_OPERATOR_TOKEN)
        await serving.exchange.run(operator, c.PublishCard(None, writer.agent, {"name": "writer"}))
        working = [asyncio.create_task(_work(serving, writer)) for _ in range(_WORKERS if works else 0)]
        assert serving.address is not None
        Served(
            pid=os.getpid(),
            port=serving.address[1],
            socket=str(settings.ipc),
            seats=seats[:-1],
            worker=seats[-1],
            replies={},
        ).write(folder)
        yield _weight()
        async for _ in turns:
            yield _weight()
        for worker in working:
            worker.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        await serving.stop()


async def _work(serving: Daemon, writer: Caller) -> None:
    """Takes what there is, and answers it."""
    exchange = serving.exchange
    while True:
        lease = exchange.lease(writer, None, "bench", _BATCH)
        deliveries = await exchange.take(writer, lease, _WAIT_MS)
        results = [Result.ok(delivery, (Text(REPLY),)) for delivery in deliveries]
        await exchange.run_all(writer, [exchange.post(writer, result, "bench") for result in results])


# --- the official SDK --------------------------------------------------------------------------------------


async def sdk(folder: Path, store: str, peers: int, turns: AsyncIterator[None]) -> AsyncIterator[Figures]:
    """Its own recommended parts, on the same HTTP server with the same settings."""
    raise_open_files()
    app = await _sdk_app(folder, store)
    listening = listen("127.0.0.1", 0, _BACKLOG)
    server = Server(config_for(app, _BACKLOG))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    await server.is_up.wait()
    seats = Served.read(folder).seats if (folder / "served.json").exists() else []
    Served(pid=os.getpid(), port=listening.getsockname()[1], seats=seats, replies={}).write(folder)
    yield _weight()
    async for _ in turns:
        yield _weight()
    server.is_over.set()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


async def _sdk_app(folder: Path, store: str) -> Any:
    from a2a.server.agent_execution import AgentExecutor
    from a2a.server.request_handlers import DefaultRequestHandlerV2
    from a2a.server.routes import create_jsonrpc_routes
    from a2a.server.tasks import InMemoryTaskStore, TaskUpdater
    from a2a.types import AgentCapabilities, AgentCard, AgentInterface, AgentSkill, Part, Task, TaskState, TaskStatus
    from starlette.applications import Starlette

    class Writer(AgentExecutor):
        async def execute(self, context: Any, event_queue: Any) -> None:
            submitted = TaskStatus(state=TaskState.TASK_STATE_SUBMITTED)
            task = Task(id=context.task_id, context_id=context.context_id, status=submitted, history=[context.message])
            await event_queue.enqueue_event(task)
            updater = TaskUpdater(event_queue, context.task_id, context.context_id)
            await updater.add_artifact([Part(text=REPLY)], artifact_id="result")
            await updater.complete()

        async def cancel(self, context: Any, event_queue: Any) -> None:
            raise NotImplementedError

    card = AgentCard(
        name="writer",
        description="writes",
        version="1.0.0",
        supported_interfaces=[
            AgentInterface(url="http://127.0.0.1/", protocol_binding="JSONRPC", protocol_version="1.0")
        ],
        capabilities=AgentCapabilities(streaming=True),
        default_input_modes=["text/plain"],
        default_output_modes=["text/plain"],
        skills=[AgentSkill(id="write", name="write", description="writes", tags=["write"])],
    )
    tasks: Any = InMemoryTaskStore()
    if store == "sqlite":
        from a2a.server.tasks.database_task_store import DatabaseTaskStore
        from sqlalchemy.ext.asyncio import create_async_engine

        tasks = DatabaseTaskStore(create_async_engine(f"sqlite+aiosqlite:///{folder}/tasks.sqlite3"))
        await tasks.initialize()
    handler = DefaultRequestHandlerV2(agent_executor=Writer(), task_store=tasks, agent_card=card)
    return Starlette(routes=create_jsonrpc_routes(handler, "/"))
