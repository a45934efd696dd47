"""The agent that the A2A conformance kit (TCK) talks to, with its daemon.

    python examples/tck_agent.py [HOST:PORT [gRPC HOST:PORT]]        # default: 127.0.0.1:9999 and 127.0.0.1:9998

The kit says by the start of a message's id what the agent is to do with it. The agent is a worker like any other, and
reaches the daemon over HTTP. Two things are special: the kit knows no tokens, so who has none is let in as a guest;
and its webhooks are on this machine, which the daemon would not call otherwise.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Awaitable, Callable

from covenant import CovenantError, Mailbox, Result, WorkContext, Worker
from covenant.exchange.realm import Realm
from covenant.model.command import PublishCard
from covenant.model.message import Artifact, Part, agent_says
from covenant.serve.a2a.directory import DIRECT_REPLY
from covenant.serve.daemon import Daemon, Settings

CARD = {
    "name": "tck",
    "description": "does what the conformance kit asks of an agent",
    "capabilities": {"extensions": [{"uri": DIRECT_REPLY, "description": "may answer with a message"}]},
    "extended": {"description": "does what the conformance kit asks of an agent, and says so to those it knows"},
}
AT_ONCE = 500  # many of the kit's tasks are left waiting for an answer
LONG_S = 4.0  # twice as long as the kit waits for the next event of a stream
FILE = Part(raw=base64.b64encode(b"content of the file").decode(), filename="output.txt", media_type="text/plain")
LINK = Part(url="https://example.com/output.txt", filename="output.txt", media_type="text/plain")
DATA = Part(data={"key": "value", "count": 42}, media_type="application/json")


async def work(ctx: WorkContext) -> Result:
    """Message by message, until one of them is none that asks for another."""
    message = ctx.message
    assert message is not None
    while message.message_id.startswith("tck-input-required"):
        message = await ctx.ask("What else?")
    starts = (start for start in ACTS if message.message_id.startswith(start))
    start = max(starts, key=len, default=None)
    if start is not None:
        await ACTS[start](ctx)
    return Result(ctx.task.id, "ok", lease_id=ctx.lease_id, message=agent_says(ctx.lease_id, "Hello from TCK"))


def makes(part: Part) -> Callable[[WorkContext], Awaitable[None]]:
    async def make(ctx: WorkContext) -> None:
        await ctx.artifact(Artifact(artifact_id="output", name="output", parts=(part,)))

    return make


def streams(part: Part) -> Callable[[WorkContext], Awaitable[None]]:
    async def stream(ctx: WorkContext) -> None:
        await ctx.update("working")
        await makes(part)(ctx)

    return stream


async def stream_in_chunks(ctx: WorkContext) -> None:
    await ctx.update("working")
    name = await ctx.artifact("chunk-1 ", name="output")
    await ctx.artifact("chunk-2", artifact_id=name, append=True, last=True)


async def take_long(ctx: WorkContext) -> None:
    await ctx.update("working")
    await asyncio.sleep(LONG_S)


async def reply(ctx: WorkContext) -> None:
    ctx.reply("Direct message response")


async def reject(ctx: WorkContext) -> None:
    ctx.reject("rejected")


ACTS: dict[str, Callable[[WorkContext], Awaitable[None]]] = {
    "tck-message-response": reply,
    "tck-reject-task": reject,
    "tck-artifact-text": makes(Part(text="Generated text content")),
    "tck-artifact-file": makes(FILE),
    "tck-artifact-file-url": makes(LINK),
    "tck-artifact-data": makes(DATA),
    "tck-stream-001": streams(Part(text="Stream hello from TCK")),
    "tck-stream-003": streams(Part(text="Stream task lifecycle")),
    "tck-stream-ordering-001": streams(Part(text="Ordered output")),
    "tck-stream-artifact-text": streams(Part(text="Streamed text content")),
    "tck-stream-artifact-file": streams(FILE),
    "tck-stream-artifact-chunked": stream_in_chunks,
    "test-resubscribe-message-id": take_long,
}


async def serve(http: str = "127.0.0.1:9999", grpc: str = "127.0.0.1:9998") -> None:
    settings = Settings(store="memory:", http=http, grpc=grpc, default_agent="tck", private_webhooks=True)
    daemon = Daemon(settings, Realm.throwaway(), "the operator's token")
    await daemon.start()
    token = await enroll(daemon)
    try:
        async with Mailbox.open(str(daemon.url), token=token) as box, Worker(box, work, AT_ONCE, grace_ms=0):
            print(f"the agent is at {daemon.url}", flush=True)
            await asyncio.Event().wait()
    finally:
        await daemon.stop()


async def enroll(daemon: Daemon) -> str:
    """The worker, whose token this is, with its card; and the guest."""
    exchange = daemon.exchange
    operator = exchange.operator()
    _, token = await exchange.enroll(operator, "tck", None, ["a2a.respond.*"])
    _, guest_token = await exchange.enroll(operator, "guest", None, ["a2a.send.*", "a2a.cancel.*"])
    known, guest = exchange.authenticate, exchange.authenticate(guest_token)
    exchange.authenticate = lambda token: known(token) if token else guest  # type: ignore[method-assign]
    await exchange.run(operator, PublishCard(None, known(token).agent, CARD))
    return token


if __name__ == "__main__":
    try:
        asyncio.run(serve(*sys.argv[1:]))
    except KeyboardInterrupt:
        pass
    except CovenantError as refusal:
        sys.exit(f"{refusal.code}: {refusal}")
