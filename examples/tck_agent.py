"""The agent that the A2A conformance kit (TCK) talks to, served by a daemon in this process.

    python examples/tck_agent.py [HOST:PORT] [store URL]        # default: 127.0.0.1:9999, memory:

The kit says by the start of a message's id what the agent is to do with it. Here the agent is a worker like any other:
it leases tasks, works on several at once, and acts on its leases. The kit knows no tokens, so whoever calls is let in
as one guest; nothing else is special.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Awaitable, Callable

from covenant import CovenantError, Result
from covenant.exchange.realm import Realm
from covenant.model import command as c
from covenant.model.message import Artifact, Message, Part
from covenant.model.peer import Caller
from covenant.model.query import ListInputs
from covenant.model.record import Asks
from covenant.model.view import Delivery
from covenant.serve.a2a.directory import DIRECT_REPLY
from covenant.serve.daemon import Daemon, Settings

CARD = {
    "name": "tck",
    "description": "does what the conformance kit asks of an agent",
    "capabilities": {"extensions": [{"uri": DIRECT_REPLY, "description": "may answer with a message"}]},
    "extended": {"description": "does what the conformance kit asks of an agent, and says so to those it knows"},
}
LONG_S = 4.0  # twice as long as the kit waits for the next event of a stream
FILE = Part(raw=base64.b64encode(b"content of the file").decode(), filename="output.txt", media_type="text/plain")
LINK = Part(url="https://example.com/output.txt", filename="output.txt", media_type="text/plain")
DATA = Part(data={"key": "value", "count": 42}, media_type="application/json")


class Task:
    """One task in the hands of this worker."""

    def __init__(self, daemon: Daemon, worker: Caller, delivery: Delivery) -> None:
        self._exchange = daemon.exchange
        self._worker = worker
        self._delivery = delivery
        self._lease_id = delivery.lease_id
        self._read = 0
        self._spoken = 0

    async def work(self) -> None:
        """Message by message, until one of them ends it."""
        message = self._delivery.task.message
        assert message is not None
        try:
            while not await self._act(message):
                message = await self._next()
        except CovenantError as refusal:
            if refusal.code not in ("task_terminal", "lease_superseded", "unknown_lease", "not_leased"):
                raise  # else it was canceled meanwhile

    async def _act(self, message: Message) -> bool:
        """Whether that was the end of the task."""
        starts = (start for start in ACTS if message.message_id.startswith(start))
        act = ACTS[max(starts, key=len, default="tck-complete-task")]
        return await act(self)

    async def _next(self) -> Message:
        """Behind a question: what the client says next."""
        generation = self._delivery.generation
        while True:
            inputs = await self._exchange.ask(self._worker, ListInputs(self._worker.agent, self._lease_id, self._read))
            if inputs:
                self._read = inputs[0].number
                message: Message = inputs[0].message
                return message
            entry = await self._exchange.watch(self._worker, self._delivery.task.id, generation, 25_000)
            generation = entry.generation

    # --- what it can be asked for ---------------------------------------------------------------------

    async def complete(self) -> bool:
        return await self._end(self._says("Hello from TCK"))

    async def ask(self) -> bool:
        await self._do(c.UpdateTask(None, self._lease_id, self._says("What else?"), Asks.INPUT))
        return False

    async def reply(self) -> bool:
        await self._do(c.ReplyDirectly(None, self._lease_id, self._says("Direct message response")))
        return True

    async def reject(self) -> bool:
        await self._do(c.RejectTask(None, self._lease_id, self._says("rejected")))
        return True

    async def take_long(self) -> bool:
        await self._say("working")
        await asyncio.sleep(LONG_S)
        return await self._end()

    async def make_in_chunks(self) -> bool:
        await self._say("working")
        await self._make(Part(text="chunk-1 "))
        await self._make(Part(text="chunk-2"), append=True)
        return await self._end()

    async def make(self, part: Part) -> bool:
        await self._make(part)
        return await self._end()

    async def stream(self, part: Part) -> bool:
        await self._say("working")
        return await self.make(part)

    async def _make(self, part: Part, append: bool = False) -> None:
        artifact = Artifact(artifact_id="output", name="output", parts=(part,))
        await self._do(c.AddArtifact(None, self._lease_id, artifact, append, last=append))

    async def _say(self, text: str) -> None:
        await self._do(c.UpdateTask(None, self._lease_id, self._says(text)))

    async def _end(self, message: Message | None = None) -> bool:
        result = Result(self._delivery.task.id, "ok", lease_id=self._lease_id, message=message)
        await self._do(self._exchange.post(self._worker, result, "tck"))
        return True

    async def _do(self, command: c.Command) -> None:
        await self._exchange.run(self._worker, command)

    def _says(self, text: str) -> Message:
        self._spoken += 1
        return Message(message_id=f"{self._lease_id}-{self._spoken}", role="ROLE_AGENT", parts=(Part(text=text),))


def making(part: Part) -> Callable[[Task], Awaitable[bool]]:
    return lambda task: task.make(part)


def streaming(part: Part) -> Callable[[Task], Awaitable[bool]]:
    return lambda task: task.stream(part)


ACTS: dict[str, Callable[[Task], Awaitable[bool]]] = {
    "tck-complete-task": Task.complete,
    "tck-input-required": Task.ask,
    "tck-message-response": Task.reply,
    "tck-reject-task": Task.reject,
    "tck-artifact-text": making(Part(text="Generated text content")),
    "tck-artifact-file": making(FILE),
    "tck-artifact-file-url": making(LINK),
    "tck-artifact-data": making(DATA),
    "tck-stream-001": streaming(Part(text="Stream hello from TCK")),
    "tck-stream-002": Task.complete,
    "tck-stream-003": streaming(Part(text="Stream task lifecycle")),
    "tck-stream-ordering-001": streaming(Part(text="Ordered output")),
    "tck-stream-artifact-text": streaming(Part(text="Streamed text content")),
    "tck-stream-artifact-file": streaming(FILE),
    "tck-stream-artifact-chunked": Task.make_in_chunks,
    "test-resubscribe-message-id": Task.take_long,
}


async def serve(address: str, store: str) -> None:
    daemon = Daemon(Settings(store=store, http=address, default_agent="tck"), Realm.throwaway(), "the operator's token")
    await daemon.start()
    exchange = daemon.exchange
    operator = exchange.operator()
    _, guest_token = await exchange.enroll(operator, "guest", None, ["a2a.send.*", "a2a.cancel.*"])
    _, worker_token = await exchange.enroll(operator, "tck", None, ["a2a.respond.*"])
    guest, worker = exchange.authenticate(guest_token), exchange.authenticate(worker_token)
    await exchange.run(operator, c.PublishCard(None, worker.agent, CARD))
    exchange.authenticate = lambda token: guest  # type: ignore[method-assign]
    print(f"the agent is at {daemon.url}", flush=True)
    working: set[asyncio.Task[None]] = set()
    try:
        while True:
            for delivery in await exchange.take(worker, exchange.lease(worker, None, "tck", 16), 25_000):
                task = asyncio.create_task(Task(daemon, worker, delivery).work())
                working.add(task)
                task.add_done_callback(working.discard)
    finally:
        for task in working:
            task.cancel()
        await daemon.stop()


if __name__ == "__main__":
    try:
        asyncio.run(serve(*[*sys.argv[1:], *("127.0.0.1:9999", "memory:")[len(sys.argv) - 1 :]]))
    except KeyboardInterrupt:
        pass
    except CovenantError as refusal:
        sys.exit(f"{refusal.code}: {refusal}")
