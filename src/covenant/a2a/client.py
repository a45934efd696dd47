"""A client of any A2A server that loses nothing: not a first message whose answer was lost, not an event of a stream
that was cut, not an update that somebody else made in between.

What it needs for that is announced by the server's card (`urn:covenant:generation`) or told by the generations of its
tasks. With a server that has neither it still works, and says where something cannot be known: an outcome that is
unknown, a snapshot that missed something.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Final, TypeVar

import msgspec
from msgspec import structs

from covenant.a2a import wire
from covenant.a2a.calls import Calls
from covenant.a2a.fault import BAD_AGENT, Fault
from covenant.a2a.follower import Follower
from covenant.a2a.interface import Interface, card_url, pick
from covenant.a2a.patience import Patience, Pauses
from covenant.a2a.refusal import is_in_doubt
from covenant.a2a.seen import Element, Event, PushPage, Task, read
from covenant.a2a.signature import PublicKey, check_signed
from covenant.a2a.sse import Sent
from covenant.a2a.transport import Wire
from covenant.model.error import Malformed, Unreachable
from covenant.model.message import Message, Part
from covenant.model.push import Authentication

_CONNECT_S: Final = 10.0
_ANSWER_S: Final = 60.0
_PAGE: Final = 100

T = TypeVar("T")


class Client:
    """Made by `Client.connect`. `card` is the agent's, as it was read; `interface` the one that is used."""

    def __init__(
        self, card: dict[str, Any], interface: Interface, wire_: Wire, extensions: Sequence[str], patience: Patience
    ) -> None:
        self.card = card
        self.interface = interface
        self._wire = wire_
        self._calls = Calls(card, interface, wire_, extensions)
        self._patience = patience

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        token: str | None = None,
        keys: Sequence[PublicKey] | None = None,
        binding: str | None = None,
        extensions: Sequence[str] = (),
        patience: Patience | None = None,
        answer_s: float = _ANSWER_S,
    ) -> Connecting:
        """To be awaited, or entered. With keys, the card must be signed by one of them."""

        async def open_it() -> Client:
            wire_ = Wire(token, _CONNECT_S, answer_s)
            try:
                where = card_url(url)
                card = read(await wire_.read(where), dict[str, Any])
                if keys is not None:
                    check_signed(card, keys)
                return cls(card, pick(card, where, binding), wire_, extensions, patience or Patience())
            except BaseException:
                await wire_.close()
                raise

        return Connecting(open_it)

    async def close(self) -> None:
        await self._wire.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def resumes(self) -> bool:
        """Whether the server announces resumable streams and idempotency keys."""
        return self._calls.resumes

    @property
    def is_numbered(self) -> bool:
        """Whether the server's generations can be relied on, as far as has been seen."""
        return self._calls.is_numbered

    # --- sending ------------------------------------------------------------------------------------------------

    async def send(
        self,
        message: Message | str,
        *,
        task_id: str | None = None,
        context_id: str | None = None,
        idempotency_key: str | None = None,
        if_generation_match: int | None = None,
        blocking: bool = True,
        history_length: int | None = None,
        push: wire.PushSettings | None = None,
    ) -> Task | Message:
        """The task that the message led to, or the agent's direct reply. A first message goes under a key: if its
        answer is lost, and the server knows keys, it is sent again."""
        request = wire.SendMessage(
            message=_placed(message, task_id, context_id, idempotency_key),
            tenant=self._calls.tenant,
            configuration=_settings(blocking, if_generation_match, push, history_length),
        )
        key = _key(request.message, idempotency_key)
        reply = await self._deliver(lambda: self._calls.send(request, key), key)
        answer = reply.message or reply.task
        if answer is None:
            raise Fault(BAD_AGENT, "an answer with neither a task nor a message")
        return answer

    async def send_and_follow(
        self,
        message: Message | str,
        *,
        task_id: str | None = None,
        context_id: str | None = None,
        idempotency_key: str | None = None,
        if_generation_match: int | None = None,
        push: wire.PushSettings | None = None,
    ) -> AsyncGenerator[Event, None]:
        """All that happens to the task, from the task itself to its end; or the one message that is the reply."""
        request = wire.SendMessage(
            message=_placed(message, task_id, context_id, idempotency_key),
            tenant=self._calls.tenant,
            configuration=_settings(False, if_generation_match, push),
        )
        key = _key(request.message, idempotency_key)
        stream = await self._deliver(lambda: self._opened(request, key), key)
        follower = Follower(self._calls, self._patience, request.message.task_id or "")
        async with aclosing(follower.events(stream)) as events:
            async for event in events:
                yield event

    async def reply(self, task: Task, message: Message | str, *, blocking: bool = True) -> Task | Message:
        """A message to this task, if it still is as it was seen; otherwise `TaskGenerationMismatch`. A server without
        generations cannot see to that, and gets the message all the same."""
        guard = task.generation if self.is_numbered and task.generation > 0 else None
        return await self.send(
            message, task_id=task.id, context_id=task.context_id or None, if_generation_match=guard, blocking=blocking
        )

    async def _opened(self, request: wire.SendMessage, key: str | None) -> AsyncGenerator[Sent, None]:
        """The stream that a message opens, once it has begun to speak: until then the message may be lost."""
        if not self._calls.streams:
            return _said(await self._calls.send(request, key))
        stream = self._calls.send_streaming(request, key)
        try:
            return _again(await anext(stream), stream)
        except StopAsyncIteration:
            raise Unreachable("the stream ended before it said anything", outcome="unknown") from None

    async def _deliver(self, call: Callable[[], Awaitable[T]], key: str | None) -> T:
        """Again only where that cannot make a second task: what never left, and what the server knows by its key."""
        pauses = Pauses(self._patience)
        while True:
            try:
                return await call()
            except (Unreachable, Fault) as failed:
                if isinstance(failed, Fault) and not is_in_doubt(failed):
                    raise
                outcome = failed.details.setdefault("outcome", "unknown")
                failed.details["idempotency_key"] = key
                is_safe = outcome == "not_sent" or (key is not None and self.resumes)
                if not is_safe or pauses.taken >= self._patience.repeats_max:
                    raise
                least_s = failed.details.get("retry_after_s", 0.0)
            await pauses.pause(least_s)

    # --- looking ------------------------------------------------------------------------------------------------

    async def get(
        self, task_id: str, *, after_generation: int | None = None, history_length: int | None = None
    ) -> Task:
        """The task as it is. With a generation, the server holds the answer until there is a newer one, or until its
        patience ends: the task may be no further than before."""
        return await self._calls.get(task_id, after_generation, history_length)

    async def follow(self, task_id: str, after: int | None = None) -> AsyncGenerator[Event, None]:
        """What happens to the task until it ends, over any number of cuts: each event once, in order. Without `after`
        it begins with the task as it is; with it, behind that generation."""
        async with aclosing(Follower(self._calls, self._patience, task_id, after).events()) as events:
            async for event in events:
                yield event

    async def list(
        self,
        *,
        context_id: str | None = None,
        status: str | None = None,
        updated_after: str | None = None,
        history_length: int | None = None,
        include_artifacts: bool = False,
        page_size: int = _PAGE,
    ) -> AsyncGenerator[Task, None]:
        """Every task that this caller may see, page by page as they are asked for."""
        request = wire.ListTasks(
            tenant=self._calls.tenant,
            context_id=context_id,
            status=status,
            page_size=page_size,
            history_length=history_length,
            status_timestamp_after=updated_after,
            include_artifacts=include_artifacts,
        )
        while True:
            page = await self._calls.list(request)
            for task in page.tasks:
                yield task
            if not page.next_page_token or page.next_page_token == request.page_token:
                return
            request = structs.replace(request, page_token=page.next_page_token)

    async def cancel(self, task_id: str) -> Task:
        return await self._calls.cancel(task_id)

    async def extended_card(self) -> dict[str, Any]:
        request = wire.GetExtendedCard(tenant=self._calls.tenant)
        card: dict[str, Any] = await self._calls.call("GetExtendedAgentCard", request, dict[str, Any])
        return card

    # --- webhooks -----------------------------------------------------------------------------------------------

    async def set_push(
        self,
        task_id: str,
        url: str,
        *,
        config_id: str | None = None,
        token: str | None = None,
        authentication: Authentication | None = None,
    ) -> wire.PushSettings:
        request = wire.PushSettings(
            url=url,
            id=config_id,
            task_id=task_id,
            tenant=self._calls.tenant,
            token=token,
            authentication=authentication,
        )
        return await self._push("CreateTaskPushNotificationConfig", request)

    async def get_push(self, task_id: str, config_id: str) -> wire.PushSettings:
        request = wire.GetPush(task_id=task_id, id=config_id, tenant=self._calls.tenant)
        return await self._push("GetTaskPushNotificationConfig", request)

    async def list_pushes(self, task_id: str) -> AsyncGenerator[wire.PushSettings, None]:
        request = wire.ListPushes(task_id=task_id, tenant=self._calls.tenant)
        while True:
            page: PushPage = await self._calls.call("ListTaskPushNotificationConfigs", request, PushPage)
            for settings in page.configs:
                yield settings
            if not page.next_page_token or page.next_page_token == request.page_token:
                return
            request = structs.replace(request, page_token=page.next_page_token)

    async def delete_push(self, task_id: str, config_id: str) -> None:
        request = wire.DeletePush(task_id=task_id, id=config_id, tenant=self._calls.tenant)
        await self._calls.call("DeleteTaskPushNotificationConfig", request, Any)

    async def _push(self, operation: str, request: Any) -> wire.PushSettings:
        settings: wire.PushSettings = await self._calls.call(operation, request, wire.PushSettings)
        return settings


class Connecting:
    """`await` it for a client to close, or enter it."""

    def __init__(self, open_it: Callable[[], Awaitable[Client]]) -> None:
        self._open = open_it
        self._client: Client | None = None

    def __await__(self) -> Generator[Any, None, Client]:
        return self._open().__await__()

    async def __aenter__(self) -> Client:
        self._client = await self._open()
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._client is not None
        await self._client.close()


def _placed(message: Message | str, task_id: str | None, context_id: str | None, key: str | None) -> Message:
    """What is said in the call counts before what stands in the message. A text under the same key is the same message,
    whoever sends it again."""
    if isinstance(message, str):
        message_id = uuid.uuid4() if key is None else uuid.uuid5(uuid.NAMESPACE_OID, f"covenant.message:{key}")
        message = Message(message_id=str(message_id), role="ROLE_USER", parts=(Part(text=message),))
    return structs.replace(message, task_id=task_id or message.task_id, context_id=context_id or message.context_id)


def _settings(
    blocking: bool, guard: int | None, push: wire.PushSettings | None, history_length: int | None = None
) -> wire.Configuration:
    return wire.Configuration(
        task_push_notification_config=push,
        history_length=history_length,
        return_immediately=not blocking,
        if_generation_match=None if guard is None else str(guard),
    )


def _key(message: Message, given: str | None) -> str | None:
    """A first message has one. Another belongs to a task already: what guards it is the generation."""
    if message.task_id and given is not None:
        raise Malformed("an idempotency key is for a first message", field="idempotency_key")
    return None if message.task_id else given or str(uuid.uuid4())


async def _again(first: Sent, rest: AsyncGenerator[Sent, None]) -> AsyncGenerator[Sent, None]:
    async with aclosing(rest):
        yield first
        async for sent in rest:
            yield sent


async def _said(element: Element) -> AsyncGenerator[Sent, None]:
    """One answer, as a stream of one."""
    yield Sent(msgspec.json.encode(element), None)
