"""A server of the A2A protocol in the hand of a test: it counts well, badly or not at all, loses answers, and cuts its
streams at the byte that it is told.

What happens to its one task is written down beforehand. `position` says how much of it has happened.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from aiohttp import web

from covenant.a2a.client import Client
from covenant.a2a.interface import GENERATION, pick
from covenant.a2a.patience import Patience
from covenant.a2a.transport import Wire
from covenant.model.error import Unreachable

TASK = "task-1"
ERROR_INFO = "type.googleapis.com/google.rpc.ErrorInfo"


async def at_once(_: float) -> None:
    await asyncio.sleep(0)


HASTY = Patience(sleep=at_once)


class Reply(msgspec.Struct):
    body: bytes
    status: int = 200
    content_type: str = "application/json"
    headers: dict[str, str] = {}
    is_cut: bool = False


class Fake:
    """`steps` are the kinds of what happens: s(tatus), q(uestion), a(rtifact), c(hunk of the last artifact); then it
    completes."""

    def __init__(self, steps: str = "sacc", resumes: bool = True, streams: bool = True) -> None:
        self.resumes = resumes
        self.streams = streams
        self.generation = "counts"  # or zero, or repeats
        self.ids = resumes  # of the events of its streams
        self.skips: set[int] = set()  # generations that no stream brings
        self.cuts: list[int] = []  # after how many bytes the next streams are cut
        self.away: list[int] = []  # how much happens while nobody listens, after each cut
        self.closings = 0  # streams that end at the first question
        self.silences = 0  # streams that end without a word
        self.reads: list[int] = []  # how far the next answers to a read are
        self.forgets = False  # what its cursors mean
        self.replays = False  # every stream tells everything
        self.losses = 0  # answers to messages that get lost
        self.refusals: list[int] = []  # with which status the next calls are refused
        self.log = self._told(steps)
        self.position = 1
        self.tasks: dict[str, str] = {}  # by key
        self.made = 0
        self.calls: list[tuple[str, dict[str, Any], dict[str, str]]] = []

    @property
    def card(self) -> dict[str, Any]:
        extensions = [{"uri": GENERATION}] if self.resumes else []
        return {
            "name": "fake",
            "capabilities": {"streaming": self.streams, "extensions": extensions},
            "supportedInterfaces": [{"url": "/rpc", "protocolBinding": "JSONRPC", "protocolVersion": "1.0"}],
        }

    def calls_of(self, method: str) -> list[tuple[dict[str, Any], dict[str, str]]]:
        return [(params, headers) for name, params, headers in self.calls if name == method]

    # --- what happens -------------------------------------------------------------------------------------------

    def _told(self, steps: str) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = [{"statusUpdate": self._status(1, "SUBMITTED")}]
        made = 0
        for number, step in enumerate(steps, 2):
            if step in "sq":
                told.append({"statusUpdate": self._status(number, "WORKING" if step == "s" else "INPUT_REQUIRED")})
                continue
            made += step == "a" or not made
            artifact = {"artifactId": f"artifact-{made}", "parts": [{"text": f"piece {number}"}]}
            append = step == "c" and any(
                element.get("artifactUpdate", {}).get("artifact", {}).get("artifactId") == f"artifact-{made}"
                for element in told
            )
            told.append({"artifactUpdate": {"artifact": artifact, "append": append}})
        told.append({"statusUpdate": self._status(len(steps) + 2, "COMPLETED")})
        return told

    def _status(self, number: int, state: str) -> dict[str, Any]:
        message = {"messageId": f"said-{number}", "role": "ROLE_AGENT", "parts": [{"text": f"step {number}"}]}
        return {"status": {"state": f"TASK_STATE_{state}", "message": message}}

    def _number(self, generation: int) -> dict[str, str]:
        if self.generation == "zero":
            return {}
        return {"generation": "7" if self.generation == "repeats" else str(generation)}

    def element(self, generation: int) -> dict[str, Any]:
        [(kind, told)] = self.log[generation - 1].items()
        return {kind: {"taskId": TASK, "contextId": "c-1", **told, **self._number(generation)}}

    def snapshot(self, generation: int) -> dict[str, Any]:
        status: Any = None
        artifacts: dict[str, dict[str, Any]] = {}
        for element in self.log[:generation]:
            if "statusUpdate" in element:
                status = element["statusUpdate"]["status"]
                continue
            update = element["artifactUpdate"]
            made = update["artifact"]
            known = artifacts.get(made["artifactId"])
            if known is not None and update["append"]:
                made = {**made, "parts": [*known["parts"], *made["parts"]]}
            artifacts[made["artifactId"]] = made
        shown = {"id": TASK, "contextId": "c-1", "status": status, "artifacts": list(artifacts.values())}
        return {**shown, **self._number(generation)}

    @property
    def end(self) -> int:
        return len(self.log)

    def first(self) -> bytes:
        """What a stream begins with."""
        return self._sent(1, self.position, {"task": self.snapshot(self.position)})

    def size(self) -> int:
        """Of a whole stream."""
        return len(self.first()) + sum(len(event) for event in self._after(1, self.position))

    # --- what it answers ----------------------------------------------------------------------------------------

    def handle(self, body: bytes, headers: Mapping[str, str]) -> Reply:
        said = msgspec.json.decode(body)
        method, params = said["method"], said["params"]
        self.calls.append((method, params, {name.lower(): value for name, value in headers.items()}))
        if self.refusals:
            return Reply(b"<html>", self.refusals.pop(0), "text/html")
        if method == "SubscribeToTask":
            return self._subscribe(said["id"], self.calls[-1][2].get("last-event-id"))
        if method == "SendStreamingMessage":
            self._send()
            return Reply(b"", is_cut=True) if self._is_lost() else self._from_snapshot(said["id"])
        if method == "SendMessage":
            guard = params.get("configuration", {}).get("ifGenerationMatch")
            if guard is not None and int(guard) != self.position:
                info = {"expectedGeneration": guard, "currentGeneration": str(self.position)}
                return self._refuse(said["id"], -32010, "TASK_GENERATION_MISMATCH", info)
            self._send()
            shown = self._result(said["id"], {"task": self.snapshot(self.position)})
            return Reply(b"", is_cut=True) if self._is_lost() else shown
        if method == "GetTask":
            return self._result(said["id"], self.snapshot(self.reads.pop(0) if self.reads else self.position))
        return self._refuse(said["id"], -32601, "METHOD_NOT_FOUND", {})

    def _send(self) -> None:
        """One task for each key."""
        _, params, headers = self.calls[-1]
        key = headers.get("idempotency-key", "")
        if params["message"].get("taskId") is None and (not key or not self.resumes or key not in self.tasks):
            self.made += 1
            self.tasks[key] = TASK

    def _is_lost(self) -> bool:
        self.losses -= 1
        return self.losses >= 0

    def _subscribe(self, number: Any, cursor: str | None) -> Reply:
        if self.silences:
            self.silences -= 1
            return Reply(b"", content_type="text/event-stream")
        if self.forgets and cursor is not None:
            return self._refuse(number, -32602, "INVALID_PARAMS", {})
        if self.replays:
            return self._stream(number, self._after(number, 0))
        if cursor is not None and self.resumes:
            seen = int(cursor)
            return self._stream(number, self._after(number, seen), seen)
        if self.position >= self.end:
            return self._refuse(number, -32004, "UNSUPPORTED_OPERATION", {})
        return self._from_snapshot(number)

    def _from_snapshot(self, number: Any) -> Reply:
        first = self._sent(number, self.position, {"task": self.snapshot(self.position)})
        return self._stream(number, [first, *self._after(number, self.position)], self.position - 1)

    def _after(self, number: Any, seen: int) -> list[bytes]:
        return [
            b"" if at in self.skips else self._sent(number, at, self.element(at))
            for at in range(seen + 1, self.end + 1)
        ]

    def _sent(self, number: Any, at: int, element: dict[str, Any]) -> bytes:
        data = msgspec.json.encode({"jsonrpc": "2.0", "id": number, "result": element})
        return (b"id: %d\n" % at if self.ids else b"") + b"data: " + data + b"\n\n"

    def _stream(self, number: Any, events: list[bytes], before: int = 0) -> Reply:
        """What a stream has told has happened, and something more while nobody listens."""
        asking = next((at for at, event in enumerate(events) if b"INPUT_REQUIRED" in event), None)
        if self.closings and asking is not None:
            self.closings -= 1
            self.position = max(self.position, before + asking + 1)
            return Reply(b"".join(events[: asking + 1]), content_type="text/event-stream")
        whole = b"".join(events)
        if not self.cuts:
            self.position = self.end
            return Reply(whole, content_type="text/event-stream")
        cut = self.cuts.pop(0)
        told, size = before, 0
        for event in events:
            if size >= cut:
                break
            told, size = told + 1, size + len(event)
        away = self.away.pop(0) if self.away else 0
        self.position = min(self.end, max(self.position, told) + away)
        return Reply(whole[:cut], content_type="text/event-stream", is_cut=True)

    def _result(self, number: Any, result: Any) -> Reply:
        return Reply(msgspec.json.encode({"jsonrpc": "2.0", "id": number, "result": result}))

    def _refuse(self, number: Any, code: int, reason: str, metadata: dict[str, str]) -> Reply:
        detail = {"@type": ERROR_INFO, "reason": reason, "domain": "a2a-protocol.org", "metadata": metadata}
        error = {"code": code, "message": reason, "data": [detail]}
        return Reply(msgspec.json.encode({"jsonrpc": "2.0", "id": number, "error": error}))


# --- reached without a network, or over one ---------------------------------------------------------------------


class _Content:
    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    async def iter_any(self) -> AsyncIterator[bytes]:
        body = self._reply.body
        for at in range(0, len(body), 100):
            yield body[at : at + 100]
        if self._reply.is_cut:
            raise Unreachable("cut", outcome="unknown")


class _Response:
    def __init__(self, reply: Reply) -> None:
        self.status = reply.status
        self.content_type = reply.content_type
        self.headers = reply.headers
        self.content = _Content(reply)


class FakeWire(Wire):
    """The lines between a client and a fake, without sockets."""

    def __init__(self, fake: Fake) -> None:
        super().__init__("token", 1, 1)
        self._fake = fake

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], query: Mapping[str, str]
    ) -> AsyncIterator[Any]:
        yield _Response(self._fake.handle(body or b"", headers))


def client_of(fake: Fake) -> Client:
    return Client(fake.card, pick(fake.card, "http://fake"), FakeWire(fake), (), HASTY)


@contextlib.asynccontextmanager
async def serving(fake: Fake) -> AsyncIterator[str]:
    """The fake on a real socket; its address."""

    async def rpc(request: web.Request) -> web.StreamResponse:
        reply = fake.handle(await request.read(), request.headers)
        response = web.StreamResponse(status=reply.status, headers=reply.headers)
        response.content_type = reply.content_type
        if not reply.is_cut or reply.body:
            await response.prepare(request)
            await response.write(reply.body)
        if reply.is_cut:
            assert request.transport is not None
            request.transport.close()
        return response

    async def card(request: web.Request) -> web.Response:
        told = fake.card
        told["supportedInterfaces"][0]["url"] = f"{address}/rpc"
        return web.json_response(told)

    app = web.Application()
    app.router.add_post("/rpc", rpc)
    app.router.add_get("/.well-known/agent-card.json", card)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield address
    finally:
        await runner.cleanup()
