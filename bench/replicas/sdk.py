"""`python -m bench.replicas.sdk NAME DATABASE-URL STORE`: one replica of an agent on the official SDK, as it comes.

STORE is `plain` (DatabaseTaskStore) or `cluster` (VersionedDatabaseTaskStore with its event stream). It prints where it
listens, and serves until it is killed.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

import uvicorn
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.cluster import DatabaseTaskEventStream, VersionedDatabaseTaskStore
from a2a.server.events import EventQueue
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes
from a2a.server.tasks import DatabaseTaskStore, TaskUpdater
from a2a.types import AgentCapabilities, AgentCard, AgentInterface, AgentSkill, Part, Task, TaskState, TaskStatus
from sqlalchemy.ext.asyncio import create_async_engine
from starlette.applications import Starlette

from bench.replicas.work import PACE_S, PIECES, heard, piece


class Writer(AgentExecutor):
    """The SDK runs it once for each message; a message to a task that there is already is a follow-up."""

    def __init__(self, replica: str) -> None:
        self._replica = replica

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        assert context.task_id is not None and context.context_id is not None and context.message is not None
        work = TaskUpdater(event_queue, context.task_id, context.context_id)
        if context.current_task is None:
            status = TaskStatus(state=TaskState.TASK_STATE_SUBMITTED)
            task = Task(id=context.task_id, context_id=context.context_id, status=status, history=[context.message])
            await event_queue.enqueue_event(task)
        else:
            text = heard(self._replica, context.get_user_input())
            await work.add_artifact([Part(text=text)], artifact_id=text)
        await work.start_work()
        for number in range(PIECES):
            text = piece(self._replica, number)
            await work.add_artifact([Part(text=text)], artifact_id=text)
            await asyncio.sleep(PACE_S)
        await work.complete()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        assert context.task_id is not None and context.context_id is not None
        await TaskUpdater(event_queue, context.task_id, context.context_id).cancel()


async def serve(replica: str, database: str, store: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        card = AgentCard(
            name="writer",
            description="writes piece by piece",
            version="1.0.0",
            supported_interfaces=[AgentInterface(url=url, protocol_binding="JSONRPC", protocol_version="1.0")],
            capabilities=AgentCapabilities(streaming=True),
            default_input_modes=["text/plain"],
            default_output_modes=["text/plain"],
            skills=[AgentSkill(id="write", name="write", description="writes", tags=["write"])],
        )
        handler = DefaultRequestHandler(Writer(replica), agent_card=card, **await _stores(database, store))
        routes = [*create_agent_card_routes(card), *create_jsonrpc_routes(handler, "/")]
        print(url, flush=True)
        config = uvicorn.Config(Starlette(routes=routes), log_level="critical", lifespan="off")
        await uvicorn.Server(config).serve(sockets=[listener])


async def _stores(database: str, store: str) -> dict[str, Any]:
    engine = create_async_engine(database.replace("postgresql://", "postgresql+asyncpg://", 1))
    if store == "plain":
        plain = DatabaseTaskStore(engine)
        await plain.initialize()
        return {"task_store": plain}
    versioned, stream = VersionedDatabaseTaskStore(engine), DatabaseTaskEventStream(engine)
    await versioned.initialize()
    await stream.initialize()
    return {"task_store": versioned, "event_stream": stream}


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
