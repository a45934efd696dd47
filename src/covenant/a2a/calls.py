"""The operations of the A2A protocol, one call each: what is asked, and what is answered, once."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from msgspec import Struct

from covenant.a2a import wire
from covenant.a2a.interface import GENERATION, Interface, abilities
from covenant.a2a.seen import Element, Task, TaskPage, read
from covenant.a2a.sse import Sent
from covenant.a2a.transport import Wire, transport_for


class Calls:
    """With what is known of the server: `is_numbered` until it shows that its generations are none."""

    def __init__(self, card: dict[str, Any], interface: Interface, wire_: Wire, extensions: Sequence[str]) -> None:
        said = abilities(card)
        self.streams = said.streams
        self.resumes = said.resumes
        self.is_numbered = True
        self.tenant = interface.tenant
        self._transport = transport_for(interface, wire_)
        wanted = dict.fromkeys([*extensions, *([GENERATION] if self.resumes else [])])
        self._headers = {"A2A-Version": interface.version}
        if wanted:
            self._headers["A2A-Extensions"] = ", ".join(wanted)

    async def call(
        self, operation: str, request: Struct, kind: type[Any], headers: dict[str, str] | None = None
    ) -> Any:
        data = await self._transport.call(operation, request, {**self._headers, **(headers or {})})
        return read(data, kind)

    async def send(self, request: wire.SendMessage, key: str | None) -> Element:
        element: Element = await self.call("SendMessage", request, Element, _keyed(key))
        return element

    def send_streaming(self, request: wire.SendMessage, key: str | None) -> AsyncGenerator[Sent, None]:
        return self._transport.stream("SendStreamingMessage", request, {**self._headers, **_keyed(key)})

    def subscribe(self, task_id: str, cursor: str | None) -> AsyncGenerator[Sent, None]:
        request = wire.SubscribeToTask(id=task_id, tenant=self.tenant)
        last = {} if cursor is None else {"Last-Event-ID": cursor}
        return self._transport.stream("SubscribeToTask", request, {**self._headers, **last})

    async def get(self, task_id: str, after: int | None = None, history_length: int | None = None) -> Task:
        known = after if self.is_numbered and after else None
        request = wire.GetTask(
            id=task_id,
            tenant=self.tenant,
            history_length=history_length,
            current_generation=None if known is None else str(known),
        )
        task: Task = await self.call("GetTask", request, Task)
        return task

    async def list(self, request: wire.ListTasks) -> TaskPage:
        page: TaskPage = await self.call("ListTasks", request, TaskPage)
        return page

    async def cancel(self, task_id: str) -> Task:
        task: Task = await self.call("CancelTask", wire.CancelTask(id=task_id, tenant=self.tenant), Task)
        return task


def _keyed(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Idempotency-Key": key}
