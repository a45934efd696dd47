"""The operations of the A2A protocol, for every binding the same.

A binding decodes, calls one of these and encodes. A message to an agent is a task in its mailbox; everything that the
protocol shows of it is a projection of that one record.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import aclosing, suppress
from datetime import datetime
from time import monotonic
from typing import Any, Final

from msgspec import Struct, structs

from covenant.a2a import wire
from covenant.a2a.fault import (
    CONTENT_TYPE,
    INVALID_PARAMS,
    NO_PUSH,
    NOT_CANCELABLE,
    TASK_NOT_FOUND,
    UNSUPPORTED,
    Fault,
)
from covenant.a2a.names import INT64, whole
from covenant.exchange.exchange import Exchange
from covenant.exchange.follow import follow
from covenant.exchange.outcome import committed
from covenant.model import command as c
from covenant.model import query as q
from covenant.model.agent import AgentId
from covenant.model.error import CovenantError, TaskTerminal
from covenant.model.message import Message
from covenant.model.peer import Caller
from covenant.model.protocol import RESTARTED, State, StreamResponse, TaskShown
from covenant.model.push import PushConfig
from covenant.model.task import Task
from covenant.model.view import Dialog, DialogPage, Sent
from covenant.rules.dialog import intent_of
from covenant.rules.media import refused_type

PAGE_DEFAULT: Final = 50
PAGE_MAX: Final = 100
CURSOR: Final = "covenant/afterGeneration"  # in the metadata of a request, for clients that cannot set a header
KEY: Final = "covenant/idempotencyKey"  # in the metadata of a message, for clients that cannot set a header
REQUEST_METADATA: Final = "covenant/requestMetadata"  # in that of a message: what stood beside it in its request
OUTPUT_MODES: Final = "covenant/acceptedOutputModes"


class Agent(Struct, frozen=True):
    """An agent that the protocol reaches, and what its card says that it can do."""

    id: AgentId
    streams: bool = True
    pushes: bool = True
    replies: bool = False  # it may answer with a message: the first thing it does is waited for
    extensions: tuple[str, ...] = ()
    required: tuple[str, ...] = ()  # extensions without which it does not speak
    modes: tuple[str, ...] = ()  # the media types that it takes; empty if it takes all


class Event(Struct, frozen=True):
    """One element of a stream. `generation` is its id, from which a client resumes. `is_last` tells the end of the
    stream from a cut by a daemon that stops."""

    generation: int
    response: StreamResponse
    is_last: bool = False


class Operations:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    # --- sending ------------------------------------------------------------------------------------------

    async def send_message(
        self, caller: Caller, agent: Agent, request: wire.SendMessage, key: str | None = None
    ) -> wire.SendReply:
        """Waits for the end of the task, or for a question, unless it is told not to; at most for a bounded time."""
        settings = request.configuration
        if settings.history_length is not None:
            _check_history(settings.history_length)
        command = await self._command(caller, agent, request, _key(request, key))
        if not settings.return_immediately:
            done = await self._exchange.run_and_settle(caller, command)
        else:
            done = await self._exchange.run(caller, command)
            if agent.replies:
                with suppress(CovenantError):  # without a wait: it has been sent
                    await self._begin(caller, done.task_id, done.generation)
        with committed:
            dialog = await self._shown(caller, done.task_id, settings.history_length)
        if dialog.reply is not None:
            return wire.SendReply(message=dialog.reply)
        return wire.SendReply(task=dialog.task)

    async def send_streaming(
        self, caller: Caller, agent: Agent, request: wire.SendMessage, key: str | None = None, after: int | None = None
    ) -> AsyncGenerator[Event, None]:
        """Yield a task, then its events until it ends or waits for its sender; or the one message that is the answer.

        With `after`, the generation of the last event that the client has seen, the same message under the same key
        resumes its stream behind that event.
        """
        self._check_streams(agent)
        _check_history(request.configuration.history_length)
        request, after = _resuming(request, after)
        key = _key(request, key)
        if after and key is None:
            said = "Last-Event-ID goes with the Idempotency-Key of the message: without one this is another message"
            raise Fault(INVALID_PARAMS, said, field=CURSOR)
        with self._exchange.waits.one(caller.agent.pubkey):
            command = await self._command(caller, agent, request, key, after)
            done = await self._exchange.run(caller, command)
            if isinstance(done, Sent) and not done.duplicate:
                after = None if agent.replies else 0  # the task is new, whatever the cursor says
            if agent.replies:
                with suppress(CovenantError):  # as above
                    await self._begin(caller, done.task_id, done.generation, has_place=True)
            with committed:
                events = self._from_message(caller, agent, done.task_id, after, request.configuration.history_length)
                async with aclosing(events):
                    async for event in events:
                        yield event

    async def _from_message(
        self, caller: Caller, agent: Agent, task_id: str, after: int | None, history: int | None
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of a task up to its end, or to the next state in which it waits for its sender.

        `after` says where the stream begins. None: with the task as it is now. 0, for a new task: with the task as it
        was sent, even if a quick worker has changed it already, since clients look for questions and results in events
        and not in the first task. Else: behind that generation, without a snapshot.

        A message that answers a question moves the task on in its own commit, so a question that is open here was asked
        after the message; one before that has been answered and ends nothing.
        """
        dialog = await self._shown(caller, task_id, 0 if after else history, artifacts=not after)
        if after and after > dialog.generation:
            raise _not_that_far(task_id)
        if dialog.reply is not None:
            if not after or after < dialog.generation:
                yield Event(dialog.generation, StreamResponse(message=dialog.reply), is_last=True)
            return
        stops_at = dialog.generation if dialog.state.is_interrupted else None
        if after is not None and after == stops_at:
            return
        if after is None or dialog.generation == 1:
            events = self._from_snapshot(caller, agent, dialog)
        else:
            events = self._behind(caller, agent, task_id, after)
        async with aclosing(events):
            async for event in events:
                if history == 0:
                    event = _without_history(event)
                is_open = event.generation >= dialog.generation
                if event.generation == stops_at or (is_open and _interrupts(event.response)):
                    yield structs.replace(event, is_last=True)
                    return
                yield event

    async def _shown(self, caller: Caller, task_id: str, history: int | None, artifacts: bool = True) -> Dialog:
        """The message that is the whole answer, or the task. A task that was shown is not taken back."""
        dialog = await self._asked(caller, task_id, history, artifacts, direct=True)
        if dialog.is_hidden:
            await self._exchange.run(caller, c.ShowTask(self._exchange.by(caller), task_id))
            dialog = await self._asked(caller, task_id, history, artifacts, direct=True)
        return dialog

    async def _command(
        self, caller: Caller, agent: Agent, request: wire.SendMessage, key: str | None, after: int | None = None
    ) -> c.SendTask | c.AddMessage:
        """Return the command that makes a task of the message, or adds it to the task that it names.

        A cursor past that task is refused before the message is taken."""
        _check_types(agent, request.message)
        message, push = _whole(request), request.configuration.task_push_notification_config
        hook = None if push is None else self._hook(agent, push)
        guard = _number(request.configuration.if_generation_match, "ifGenerationMatch")
        if not message.task_id:
            task = Task(
                recipient=agent.id,
                intent_text=intent_of(message, self._exchange.store.context.limits),
                message=message,
                context_id=message.context_id or None,
            )
            return c.SendTask(caller.agent, task, protocol=True, shown=not agent.replies, push=hook, key=key)
        dialog = await self._dialog(caller, agent, message.task_id, 0, artifacts=False)
        if after and after > dialog.generation:
            raise _not_that_far(message.task_id)
        return c.AddMessage(self._exchange.by(caller), message.task_id, message, guard, hook, key)

    def _hook(self, agent: Agent, push: wire.PushSettings) -> PushConfig:
        self._check_pushes(agent)
        return _push_of(push)

    async def _begin(self, caller: Caller, task_id: str, generation: int, has_place: bool = False) -> None:
        """Until somebody has done more than take it."""
        exchange = self._exchange
        after = max(0, generation - 1)
        for left in _time_left(exchange.bounds.wait_ms_max):
            if exchange.is_draining:
                return
            entry = await exchange.watch(caller, task_id, after, left, has_place=has_place)
            if entry.outcome is not None or entry.asks is not None:
                return
            if not (await self._asked(caller, task_id, 0, False, True)).is_hidden:
                return
            after = entry.generation

    # --- looking ------------------------------------------------------------------------------------------

    async def get_task(self, caller: Caller, agent: Agent, request: wire.GetTask) -> TaskShown:
        """With the generation that the caller knows, held until there is a newer one, or the wait is over."""
        _check_history(request.history_length)
        known = _number(request.current_generation, "currentGeneration")
        dialog = await self._dialog(caller, agent, request.id, request.history_length)
        if known is not None and dialog.generation <= known and not dialog.state.is_terminal:
            await self._hold(caller, dialog.task.id, known)
            dialog = await self._dialog(caller, agent, request.id, request.history_length)
        return dialog.task

    async def _hold(self, caller: Caller, task_id: str, known: int) -> None:
        """Until the generation is higher. A watch also ends for other reasons, which are no news here."""
        exchange = self._exchange
        for left in _time_left(exchange.bounds.wait_ms_max):
            if exchange.is_draining:
                return
            entry = await exchange.watch(caller, task_id, known, left)
            if entry.generation > known or entry.outcome is not None:
                return

    async def list_tasks(self, caller: Caller, agent: Agent, request: wire.ListTasks) -> wire.TaskList:
        """Of an agent that may reply only what is sure to be a task."""
        size = PAGE_DEFAULT if request.page_size is None else request.page_size
        if not 1 <= size <= PAGE_MAX:
            raise Fault(INVALID_PARAMS, f"pageSize is from 1 to {PAGE_MAX}", field="pageSize")
        _check_history(request.history_length)
        query = q.ListDialogs(
            caller.agent,
            agent.id.pubkey,
            size,
            request.page_token or None,
            request.context_id or None,
            _state(request.status),
            _moment(request.status_timestamp_after),
            request.history_length,
            request.include_artifacts,
        )
        page: DialogPage = await self._exchange.ask(caller, query)
        return wire.TaskList(tasks=page.tasks, next_page_token=page.cursor or "", page_size=size, total_size=page.total)

    async def cancel_task(self, caller: Caller, agent: Agent, request: wire.CancelTask) -> TaskShown:
        task_id = await self._check_there(caller, agent, request.id)
        command = c.CancelTask(self._exchange.by(caller), task_id, "the client asked for it")
        try:
            await self._exchange.run(caller, command)
        except TaskTerminal as ended:
            raise Fault(NOT_CANCELABLE, ended.message, taskId=task_id) from None
        with committed:
            return (await self._dialog(caller, agent, request.id, None)).task

    async def subscribe(
        self, caller: Caller, agent: Agent, request: wire.SubscribeToTask, after: int | None = None
    ) -> AsyncGenerator[Event, None]:
        """Behind a generation that the caller has seen: everything that came after it, also of a task that has ended.
        Without one: the task as it is, then what happens to it."""
        self._check_streams(agent)
        with self._exchange.waits.one(caller.agent.pubkey):
            if after is None and request.metadata is not None:
                after = _cursor(request.metadata)
            resumes = after is not None and after > 0
            dialog = await self._dialog(caller, agent, request.id, None, artifacts=not resumes)
            task_id = dialog.task.id
            if after is not None and resumes:
                if after > dialog.generation:
                    raise _not_that_far(task_id)
                async for event in self._behind(caller, agent, task_id, after):
                    yield event
                return
            if dialog.state.is_terminal:
                raise Fault(UNSUPPORTED, f"task {task_id} has ended", taskId=task_id)
            async for event in self._from_snapshot(caller, agent, dialog):
                yield event

    async def _from_snapshot(self, caller: Caller, agent: Agent, dialog: Dialog) -> AsyncGenerator[Event, None]:
        yield Event(dialog.generation, StreamResponse(task=dialog.task), dialog.state.is_terminal)
        if not dialog.state.is_terminal:
            async for event in self._behind(caller, agent, dialog.task.id, dialog.generation):
                yield event

    async def _behind(self, caller: Caller, agent: Agent, task_id: str, after: int) -> AsyncGenerator[Event, None]:
        """Everything behind a generation. Where the log does not reach back so far, the task as it is comes in its
        place, and says so: also when it is the reader who has fallen behind."""
        while True:
            async for seen in follow(self._exchange, caller, task_id, after):
                if not seen.is_whole:
                    break
                for update in seen.updates:
                    yield Event(update.generation, update.response, update.ends)
            else:
                return
            now = await self._dialog(caller, agent, task_id, None)
            shown = structs.replace(now.task, metadata={RESTARTED: True})
            yield Event(now.generation, StreamResponse(task=shown), now.state.is_terminal)
            if now.state.is_terminal:
                return
            after = now.generation

    async def _check_there(self, caller: Caller, agent: Agent, task_id: str) -> str:
        return (await self._dialog(caller, agent, task_id, 0, artifacts=False)).task.id

    async def _dialog(
        self,
        caller: Caller,
        agent: Agent,
        task_id: str,
        history: int | None,
        direct: bool = False,
        artifacts: bool = True,
    ) -> Dialog:
        """A task of this caller with this agent; anything else is not there."""
        try:
            dialog = await self._asked(caller, task_id, history, artifacts, direct)
            if dialog.is_hidden and not direct:
                await self._exchange.run(caller, c.ShowTask(self._exchange.by(caller), task_id))
                dialog = await self._asked(caller, task_id, history, artifacts, direct)
        except CovenantError as refusal:
            if refusal.code == "bad_id":  # ids are ours: what does not look like one is not one
                raise Fault(TASK_NOT_FOUND, f"no task {task_id}", taskId=task_id) from None
            raise
        if dialog.recipient != agent.id:
            raise Fault(TASK_NOT_FOUND, f"no task {task_id}", taskId=task_id)
        return dialog

    def _asked(
        self, caller: Caller, task_id: str, history: int | None, artifacts: bool, direct: bool
    ) -> Coroutine[Any, Any, Dialog]:
        return self._exchange.ask(caller, q.GetDialog(self._exchange.by(caller), task_id, history, artifacts, direct))

    # --- webhooks -----------------------------------------------------------------------------------------

    async def set_push(self, caller: Caller, agent: Agent, request: wire.PushSettings) -> wire.PushSettings:
        self._check_pushes(agent)
        task_id = await self._check_there(caller, agent, request.task_id or "")
        config = _push_of(request, str(uuid.uuid4()))
        await self._exchange.run(caller, c.SetPush(self._exchange.by(caller), task_id, config))
        return _shown_push(config, task_id)

    async def get_push(self, caller: Caller, agent: Agent, request: wire.GetPush) -> wire.PushSettings:
        self._check_pushes(agent)
        task_id = await self._check_there(caller, agent, request.task_id)
        query = q.GetPush(self._exchange.by(caller), task_id, request.id)
        return _shown_push(await self._exchange.ask(caller, query), task_id)

    async def list_pushes(self, caller: Caller, agent: Agent, request: wire.ListPushes) -> wire.PushList:
        """All at once: there are never many."""
        self._check_pushes(agent)
        task_id = await self._check_there(caller, agent, request.task_id)
        configs = await self._exchange.ask(caller, q.ListPushes(self._exchange.by(caller), task_id))
        return wire.PushList(configs=[_shown_push(config, task_id) for config in configs])

    async def delete_push(self, caller: Caller, agent: Agent, request: wire.DeletePush) -> None:
        """Again changes nothing."""
        self._check_pushes(agent)
        task_id = await self._check_there(caller, agent, request.task_id)
        await self._exchange.run(caller, c.DropPush(self._exchange.by(caller), task_id, request.id))

    def _check_pushes(self, agent: Agent) -> None:
        if not agent.pushes:
            raise Fault(NO_PUSH, f"{agent.id.display} does not push")

    def _check_streams(self, agent: Agent) -> None:
        if not agent.streams:
            raise Fault(UNSUPPORTED, f"{agent.id.display} does not stream")


def _resuming(request: wire.SendMessage, after: int | None) -> tuple[wire.SendMessage, int | None]:
    """Return the request without a cursor in its metadata, and the cursor: that of the header, else of the metadata.

    A cursor of 0, before the first event, is None.
    """
    metadata = request.metadata
    if metadata is not None and CURSOR in metadata:
        after = _cursor(metadata) if after is None else after
        beside = {name: value for name, value in metadata.items() if name != CURSOR}
        request = structs.replace(request, metadata=beside)
    return request, after or None


def _not_that_far(task_id: str) -> Fault:
    return Fault(INVALID_PARAMS, f"task {task_id} is not that far", field=CURSOR)


def _without_history(event: Event) -> Event:
    if event.response.task is None:
        return event
    return structs.replace(event, response=StreamResponse(task=structs.replace(event.response.task, history=())))


def _interrupts(response: StreamResponse) -> bool:
    """Return whether the task waits for its sender from this event on."""
    told = response.status_update or response.task
    return told is not None and told.status.state.is_interrupted


def _whole(request: wire.SendMessage) -> Message:
    """The message with what was said beside it: a worker gets the message, and nothing else of the request."""
    message, beside, modes = request.message, request.metadata, request.configuration.accepted_output_modes
    if not beside and not modes:
        return message
    said = {name: value for name, value in ((REQUEST_METADATA, beside), (OUTPUT_MODES, modes)) if value}
    return structs.replace(message, metadata={**(message.metadata or {}), **said})


def _time_left(wait_ms: int) -> Iterator[int]:
    """Of a request that waits, in whole milliseconds, until there is none; by a clock that nobody sets back."""
    end = monotonic() + wait_ms / 1000
    while (left_ms := round((end - monotonic()) * 1000)) > 0:
        yield left_ms


def _check_history(length: int | None) -> None:
    if length is not None and length < 0:
        raise Fault(INVALID_PARAMS, "historyLength is a number from 0", field="historyLength")


def _check_types(agent: Agent, message: Message) -> None:
    refused = refused_type(agent.modes, message.parts)
    if refused is not None:
        taken = ", ".join(agent.modes)
        raise Fault(CONTENT_TYPE, f"{agent.id.display} takes {taken}, not {refused}", mediaType=refused)


def _number(value: wire.Int64 | None, name: str) -> int | None:
    """Return a 64-bit number. It may be outside the range of generations: then it is before or behind all of them."""
    if value is None:
        return None
    try:
        return whole(value, INT64)
    except ValueError as wrong:
        raise Fault(INVALID_PARAMS, f"{name}: {wrong}", field=name) from None


def _cursor(metadata: dict[str, Any]) -> int | None:
    """Return the generation behind which a stream goes on, of a client that cannot set a header."""
    value = metadata.get(CURSOR)
    after = _number(value if value is None or type(value) in (int, float, str) else "", CURSOR)
    if after is not None and after < 0:
        raise Fault(INVALID_PARAMS, f"{CURSOR} is a generation", field=CURSOR)
    return after


def _key(request: wire.SendMessage, header: str | None) -> Any:
    """Return the key under which a message is sent: the header's, else that in its metadata, of whatever type."""
    return header if header is not None else (request.message.metadata or {}).get(KEY)


def _state(name: str | None) -> State | None:
    if not name or name == "TASK_STATE_UNSPECIFIED":
        return None
    try:
        return State(name)
    except ValueError:
        raise Fault(INVALID_PARAMS, f"no such state: {name}", field="status") from None


def _moment(text: str | None) -> int | None:
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise Fault(
            INVALID_PARAMS, "statusTimestampAfter is a time in ISO 8601", field="statusTimestampAfter"
        ) from None
    if moment.tzinfo is None:
        raise Fault(INVALID_PARAMS, "statusTimestampAfter needs a time zone", field="statusTimestampAfter")
    return int(moment.timestamp() * 1000)


def _push_of(settings: wire.PushSettings, made: str = "") -> PushConfig:
    """Without an id of its own it gets the one that was made for it."""
    return PushConfig(
        id=settings.id or made,
        url=settings.url,
        token=settings.token or None,
        authentication=settings.authentication,
        protocol_version=settings.protocol_version,
    )


def _shown_push(config: PushConfig, task_id: str) -> wire.PushSettings:
    """Without its secrets: who set them knows them, and nobody else should."""
    hidden = config.authentication
    if hidden is not None:
        hidden = structs.replace(hidden, credentials=None)
    return wire.PushSettings(id=config.id, task_id=task_id, url=config.url, authentication=hidden)
