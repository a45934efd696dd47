"""The A2A protocol's view of a task: a projection of its record, and of what happened to it. (DESIGN 1.)

Nothing is kept for the protocol twice: a snapshot is told from the record and what was said and made beside it, an
event from the commit in which it happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import sha256
from itertools import islice, takewhile
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

from msgspec import structs
from msgspec.json import encode

from covenant.model import event as e
from covenant.model.agent import AgentId
from covenant.model.audit import Logged
from covenant.model.content import (
    Audio,
    Content,
    Image,
    Json,
    Resource,
    ResourceLink,
    Text,
    is_plain_text,
    members_of,
)
from covenant.model.error import BadCursor, UnknownTask
from covenant.model.limits import Limits
from covenant.model.message import Artifact, Message, Part, agent_says
from covenant.model.protocol import ArtifactUpdate, State, Status, StatusUpdate, StreamResponse, TaskShown, Update
from covenant.model.query import GetDialog, GetPlace, ListDialogs, ListInputs
from covenant.model.record import Asks, Chunk, Outcome, Said, TaskRecord, TaskState, chunk_key, part_key, said_key
from covenant.model.record import Part as Partial
from covenant.model.task import Result, Task
from covenant.model.view import Dialog, DialogPage, Inputs, Place
from covenant.rules.context import Context, Lacks, Spent, View
from covenant.rules.dialog import MESSAGES_MAX, context_of, inputs_behind
from covenant.rules.envelope import check_count, check_id
from covenant.rules.evolve import steps_of
from covenant.rules.lease import held
from covenant.rules.page import Look, Room, as_far_as_shown
from covenant.rules.portable import canonical_base64, is_portable
from covenant.rules.retention import is_retained
from covenant.rules.sight import is_hidden, is_listed, task_of_lease, visible_task

HISTORY_DEFAULT: Final = 100
HISTORY_DEFAULT_LISTED: Final = 10
_BYTES_MAX: Final = 3 * 1024 * 1024  # clients of gRPC take 4 MiB, unless they say that they take more
_HISTORY_FIRST: Final = 16
_HISTORY_AT_ONCE_MAX: Final = 256
_HISTORY_MAX: Final = 2**31
_ORDER_MAX: Final = 2**59
_TOTAL_MAX: Final = 2**31 - 1  # which the protocol tells in 32 bits
RESULT_ARTIFACT: Final = "result"
_PLACED_CONTENTS: Final = ("uri", "mimeType", "text", "blob")  # members of a resource that go into the part itself
_ENDED: Final = {  # in tables: an enum takes its time to look a member up
    Outcome.ANSWERED: None,  # as its result says
    Outcome.CANCELED: State.CANCELED,
    Outcome.REJECTED: State.REJECTED,
    Outcome.FORCED: State.FAILED,
    Outcome.DEADLINE_EXCEEDED: State.FAILED,
}
_ANSWERED: Final = {"ok": State.COMPLETED, "error": State.FAILED}
_ASKS: Final = {None: State.WORKING, Asks.INPUT: State.INPUT_REQUIRED, Asks.AUTH: State.AUTH_REQUIRED}


# --- the task as it is ---------------------------------------------------------------------------------------


def state_of(record: TaskRecord) -> State:
    if record.outcome is None:
        return State.SUBMITTED if record.state is TaskState.QUEUED else _ASKS[record.asks]
    assert record.result is not None
    return _end_state(record.outcome, record.result)


def _end_state(outcome: Outcome, result: Result) -> State:
    return _ENDED[outcome] or _ANSWERED[result.status]


def shown(record: TaskRecord, view: View, limits: Limits, history: int, artifacts: bool = True) -> TaskShown:
    """Its artifacts are whole, however large: what comes later is added to them."""
    task_id, context_id = record.task.id, context_of(record)
    return TaskShown(
        id=task_id,
        context_id=context_id,
        status=_status_of(record, view, context_id),
        artifacts=_artifacts_of(record, view) if artifacts else (),
        history=_history_of(record, view, context_id, history, limits),
        generation=str(record.generation),
    )


def _status_of(record: TaskRecord, view: View, context_id: str) -> Status:
    message: Message | None = None
    result = record.result
    if result is not None:
        message = result.message if result.status == "ok" else _last_words(result)
    elif record.note:
        said = view.get(said_key(record.task.id, record.note))
        message = said.message if isinstance(said, Said) else None
    if message is not None:
        message = _placed(message, record.task.id, context_id)
    return Status(state_of(record), time_of(record.status_ms), message)


def _last_words(result: Result) -> Message | None:
    """What the agent said at the end; an error speaks for itself."""
    if result.message is not None or result.status == "ok":
        return result.message
    return agent_says(f"{result.task_id}-error", result.error_message or "error")


def _placed(message: Message | None, task_id: str | None, context_id: str) -> Message | None:
    """A message of the agent belongs to its task, whatever the agent has put there; one that is all the answer, to
    none."""
    if message is None:
        return None
    return structs.replace(message, role="ROLE_AGENT", task_id=task_id, context_id=context_id)


def _history_of(record: TaskRecord, view: View, context_id: str, length: int, limits: Limits) -> tuple[Message, ...]:
    """The newest messages that an answer has room for, oldest first."""
    if length == 0:
        return ()
    task_id = record.task.id
    if not record.said:
        return (structs.replace(first_message(record.task), task_id=task_id, context_id=context_id),)
    room = Room(limits, _BYTES_MAX)
    messages = list(takewhile(room.takes, islice(_newest_first(record, view, length), length)))[::-1]
    return tuple([structs.replace(message, task_id=task_id, context_id=context_id) for message in messages])


def _newest_first(record: TaskRecord, view: View, length: int) -> Iterator[Message]:
    """So many at least, as far as there are; a few at once, as each may be large, and then more."""
    last, count = record.said, min(length, _HISTORY_FIRST)
    while last:
        first = max(1, last - count + 1)
        for _, kept in reversed(view.pieces(said_key(record.task.id, ""), first, last)):
            if isinstance(kept, Said):
                yield kept.message
        last, count = first - 1, min(2 * count, _HISTORY_AT_ONCE_MAX)
    yield first_message(record.task)


def first_message(task: Task) -> Message:
    """What the client sent; for a task that came by the mailbox, the same in the protocol's words."""
    if task.message is not None:
        return task.message
    parts = (Part(text=task.intent_text), *parts_of(task.content))
    return Message(message_id=task.id, role="ROLE_USER", parts=parts)


def _artifacts_of(record: TaskRecord, view: View) -> tuple[Artifact, ...]:
    result = record.result
    final = None if result is None or not result.content else _result_artifact(result)
    if not record.chunks and not record.partials_total:
        return () if final is None else (final,)
    pieces = [*_chunks(record, view), *_partials(record, view)]
    if record.chunks and record.partials_total:
        pieces.sort(key=lambda piece: piece[0])
    made: dict[str, tuple[Artifact, list[Part]]] = {}
    for _, artifact, append in pieces:
        known = made.get(artifact.artifact_id)
        if append and known is not None:
            known[1].extend(artifact.parts)
        else:
            made[artifact.artifact_id] = (artifact, list(artifact.parts))
    if final is not None:
        made[final.artifact_id] = (final, list(final.parts))  # a piece of that name has been replaced by it
    return tuple(structs.replace(artifact, parts=tuple(parts)) for artifact, parts in made.values())


def _chunks(record: TaskRecord, view: View) -> Iterator[tuple[int, Artifact, bool]]:
    for _, chunk in view.pieces(chunk_key(record.task.id, ""), 1, record.chunks):
        if isinstance(chunk, Chunk):
            yield chunk.order, chunk.artifact, chunk.append


def _partials(record: TaskRecord, view: View) -> Iterator[tuple[int, Artifact, bool]]:
    for _, part in view.pieces(part_key(record.task.id, ""), 1, record.partials_total):
        if isinstance(part, Partial):
            yield part.order, _partial_artifact(part.result, part.attempt), part.number > 1


def _partial_artifact(result: Result, attempt: int) -> Artifact:
    """Progress without content is progress all the same, and an artifact has parts."""
    parts = parts_of(result.content) or (Part(text=result.error_message or ""),)
    return Artifact(artifact_id=f"partial-{attempt}", parts=parts)


def _result_artifact(result: Result) -> Artifact:
    return Artifact(artifact_id=RESULT_ARTIFACT, parts=parts_of(result.content))


def parts_of(content: Any) -> tuple[Part, ...]:
    """Return the blocks of a mailbox task or result as the protocol's parts."""
    if len(content) == 1 and is_plain_text(content[0]):  # as most are
        return (Part(text=content[0].text),)
    return tuple([_part_of(block) for block in content])


def _part_of(block: Content) -> Part:
    """Return a block as a part. Members that a part has no place for go into its metadata, under their own names."""
    if isinstance(block, Text):
        part, placed = Part(text=block.text), {"text"}
    elif isinstance(block, Json):
        part, placed = _json_part(block.value), {"value"}
    elif isinstance(block, (Image, Audio)):
        part, placed = _raw_part(block.data, block.mime_type), {"data", "mimeType"}
    elif isinstance(block, ResourceLink):
        part = Part(url=block.uri, filename=block.name, media_type=block.mime_type)
        placed = {"uri", "name", "mimeType"}
    else:
        return _resource_part(block)
    return _with_metadata(part, members_of(block), placed)


def _resource_part(block: Resource) -> Part:
    inner = block.resource
    if inner.blob is not None:
        part = _raw_part(inner.blob, inner.mime_type)
    else:
        part = Part(text=inner.text or "", media_type=inner.mime_type)
    members = {"uri": inner.uri, **members_of(block)}
    kept = {name: value for name, value in members_of(inner).items() if name not in _PLACED_CONTENTS}
    return _with_metadata(part, {**members, "resource": kept}, set() if kept else {"resource"})


def _with_metadata(part: Part, members: dict[str, Any], placed: set[str]) -> Part:
    metadata = {name: _portable(name, value) for name, value in members.items() if name not in placed}
    return structs.replace(part, metadata=metadata) if metadata else part


def _portable(name: str, value: Any) -> Any:
    """Return the value, or its JSON as text if protobuf cannot hold it."""
    return value if is_portable({name: value}) else encode(value).decode()


def _json_part(value: Any) -> Part:
    if is_portable(value):
        return Part(data=value)
    return Part(text=encode(value).decode(), media_type="application/json")


def _raw_part(data: str, media_type: str | None) -> Part:
    raw = canonical_base64(data)
    if raw is None:
        return Part(text=data)
    return Part(raw=raw, media_type=media_type)


def time_of(ms: int) -> str:
    return f"{_second_of(ms // 1000)}.{ms % 1000:03}Z"


@lru_cache(maxsize=64)
def _second_of(seconds: int) -> str:
    """What happens in the same second shares it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


# --- what may be asked ---------------------------------------------------------------------------------------


def get_dialog(query: GetDialog, view: View, ctx: Context) -> Dialog:
    record = _seen(query.task_id, query.by, view, ctx, query.direct)
    reply = None
    if record.direct:
        assert record.result is not None
        reply = _placed(record.result.message, None, context_of(record))
    history = HISTORY_DEFAULT if query.history is None else _length(query.history)
    task = shown(record, view, ctx.limits, history, query.artifacts)
    return Dialog(task, record.generation, task.status.state, record.task.recipient, reply, is_hidden(record))


def _length(history: int) -> int:
    return check_count(history, "historyLength", _HISTORY_MAX)


def get_place(query: GetPlace, view: View, ctx: Context) -> Place:
    record = _seen(query.task_id, query.by, view, ctx, True)
    return Place(record.task.id, record.order, record.generation, context_of(record))


def _seen(task_id: str, by: AgentId | None, view: View, ctx: Context, direct: bool) -> TaskRecord:
    """What was answered by a message is no task, except to who waits for the message."""
    record = visible_task(check_id(task_id, "id"), by, view, ctx)
    if record.direct and not direct:
        raise UnknownTask(f"no task {task_id}", task_id=task_id)
    return record


def list_inputs(query: ListInputs, view: View, ctx: Context) -> Inputs:
    """A new holder reads them all; one that has read some goes on behind those."""
    lease_id = check_id(query.lease_id, "lease_id")
    record = task_of_lease(lease_id, query.by, view, ctx)
    held(lease_id, record)
    after = check_count(query.after, "after", MESSAGES_MAX)
    room, cancel = Room(ctx.limits), record.cancel_reason
    fitting = takewhile(lambda entry: room.takes(entry.message), inputs_behind(after, record, view))
    inputs = list(islice(fitting, ctx.limits.page_max))
    return Inputs(record.task.id, record.generation, inputs, cancel is not None, cancel)


class _Spot(NamedTuple):
    """Where a listing goes on. First it goes down from the newest status. What moves meanwhile moves to the top, where
    pages have been already: so then it goes through what has moved since it began, in the order in which that was sent,
    which nothing changes."""

    moved: bool
    head: int  # the newest status when it began
    at: int  # a status, and then the sending of a task
    total: int


def list_dialogs(query: ListDialogs, view: View, ctx: Context) -> DialogPage:
    """The newest status first. Of what was there when the listing began none is missed; one may come twice. A page
    ends where it has no more room."""
    limit = check_count(query.limit, "pageSize", ctx.limits.page_max)
    assert query.by is not None
    sender, recipient = query.by.pubkey, query.agent
    spot = _spot_of(query)
    if spot is None:
        newest = view.dialogs(sender, recipient, _ORDER_MAX, 1)
        spot = _Spot(False, newest[0].status_order if newest else 0, _ORDER_MAX, 0)

    def chunk(at: int, count: int) -> Sequence[TaskRecord]:
        if spot.moved:
            return view.moved_dialogs(sender, recipient, spot.head, at, count)
        return view.dialogs(sender, recipient, at, count)

    place = attrgetter("sent_order" if spot.moved else "status_order")
    found, at, more = _scan(chunk, place, spot.at, limit, lambda record: _passes(record, query, ctx), ctx)
    total = spot.total
    if query.cursor is None:
        total = max(len(found), _total(query, view, ctx)) if more else len(found)
    fitting = _fitting(found, query, view, ctx)
    if len(fitting) < len(found):
        at, more = found[len(fitting) - 1][0], True
    if more:
        following: _Spot | None = spot._replace(at=at, total=total)
    elif not spot.moved and query.cursor is not None and _has_moved(sender, recipient, spot.head, view):
        following = _Spot(True, spot.head, 0, total)
    else:
        following = None
    tasks = [task for _, task in sorted(fitting, key=itemgetter(0), reverse=True)]
    return DialogPage(tasks, total, None if following is None else _cursor_of(following, query))


def _has_moved(sender: str, recipient: str, since: int, view: View) -> bool:
    """Whether any has; where nothing more is shown, there may be."""
    try:
        return bool(view.moved_dialogs(sender, recipient, since, 0, 1))
    except Spent:
        return True


def _fitting(
    found: Sequence[tuple[int, TaskRecord]], query: ListDialogs, view: View, ctx: Context
) -> list[tuple[int, TaskShown]]:
    """The first of them, as many as a page has room for, each with its status."""
    room = Room(ctx.limits, _BYTES_MAX)
    history = HISTORY_DEFAULT_LISTED if query.history is None else _length(query.history)
    fitting: list[tuple[int, TaskShown]] = []
    lacks = Lacks()
    for _, record in found:
        with lacks:
            task = shown(record, view, ctx.limits, history, query.artifacts)
            if not room.takes(task):
                break
            fitting.append((record.status_order, task))
        if lacks.is_enough:
            break
    lacks.settle()
    return fitting


def _scan(
    chunk: Callable[[int, int], Sequence[TaskRecord]],
    place: Callable[[TaskRecord], int],
    at: int,
    limit: int,
    passes: Callable[[TaskRecord], bool],
    ctx: Context,
) -> tuple[list[tuple[int, TaskRecord]], int, bool]:
    """The next that pass, each with its place; where to go on, and whether there is more. It looks only so far, and
    then there may be."""
    found: list[tuple[int, TaskRecord]] = []
    scanned = 0
    look = Look(ctx.limits)
    try:
        while scanned < ctx.limits.scan_max:
            look.goes_on()
            asked = look.at_once
            records = chunk(at, asked)
            for record in records:
                if passes(record):
                    if len(found) == limit:
                        return found, at, True
                    found.append((place(record), record))
                at = place(record)
            scanned += len(records)
            if len(records) < asked:
                return found, at, False
            look.saw(records)
    except Spent:
        pass
    return found, at, True


def _cursor_of(spot: _Spot, query: ListDialogs) -> str:
    return ".".join([*(str(int(number)) for number in spot), _mark_of(query)])


def _spot_of(query: ListDialogs) -> _Spot | None:
    cursor = query.cursor
    if cursor is None:
        return None
    *numbers, mark = cursor.split(".") if isinstance(cursor, str) else [""]
    if mark != _mark_of(query) or not all(n.isascii() and n.isdigit() and len(n) < 19 for n in numbers):
        raise BadCursor("this cursor does not belong to this listing", cursor=cursor)
    if len(numbers) != 4 or int(numbers[0]) > 1 or int(numbers[3]) > _TOTAL_MAX:
        raise BadCursor("this cursor does not belong to this listing", cursor=cursor)
    moved, head, at, total = map(int, numbers)
    return _Spot(bool(moved), head, at, total)


def _mark_of(query: ListDialogs) -> str:
    """Of the two whose tasks are listed, and which of them: a cursor that was mixed up would lead to nothing, or into
    the middle."""
    assert query.by is not None
    listing = (query.by.pubkey, query.agent, query.context_id, query.state, query.since_ms)
    return sha256(encode(listing)).hexdigest()[:8]


def _total(query: ListDialogs, view: View, ctx: Context) -> int:
    """How many there are before paging: with filters, counted as far as a page may look."""
    assert query.by is not None
    if query.context_id is None and query.state is None and query.since_ms is None:
        return view.dialog_count(query.by.pubkey, query.agent)
    records = _dialogs_of(query, view, ctx.limits.scan_max)
    return sum(_passes(record, query, ctx) for record in as_far_as_shown(records))


def _dialogs_of(query: ListDialogs, view: View, limit: int) -> Iterator[TaskRecord]:
    assert query.by is not None
    yield from view.dialogs(query.by.pubkey, query.agent, _ORDER_MAX, limit)


def _passes(record: TaskRecord, query: ListDialogs, ctx: Context) -> bool:
    return (
        is_listed(record)
        and is_retained(record, ctx)
        and (query.context_id is None or context_of(record) == query.context_id)
        and (query.state is None or state_of(record) is query.state)
        and (query.since_ms is None or record.status_ms >= query.since_ms)
    )


# --- what happened to it -------------------------------------------------------------------------------------


def steps_in(logged: Logged, task_id: str) -> int:
    """By how much a commit moved the generation of a task."""
    return sum(steps_of(event) for event in logged.events if event.key == task_id)


def updates_of(logged: Logged, task_id: str, context_id: str, before: int) -> list[Update]:
    """What a commit did to a task whose generation was `before`, in the protocol's words."""
    updates: list[Update] = []
    generation = before
    for event in logged.events:
        if event.key != task_id:
            continue
        for response, ends in _responses(event, logged, task_id, context_id, generation):
            generation += 1
            updates.append(Update(generation, response, ends))
    return updates


def _responses(
    event: e.Event, logged: Logged, task_id: str, context_id: str, before: int
) -> Iterator[tuple[StreamResponse, bool]]:
    def status(state: State, message: Message | None, generation: int) -> StreamResponse:
        shown = Status(state, time_of(logged.at), _placed(message, task_id, context_id))
        return StreamResponse(
            status_update=StatusUpdate(task_id=task_id, context_id=context_id, status=shown, generation=str(generation))
        )

    def artifact(piece: Artifact, append: bool, last: bool) -> StreamResponse:
        return StreamResponse(
            artifact_update=ArtifactUpdate(
                task_id=task_id,
                context_id=context_id,
                artifact=piece,
                append=append,
                last_chunk=last,
                generation=str(before + 1),
            )
        )

    match event:
        case e.Sent():
            yield StreamResponse(task=_as_sent(event.task, logged.at, context_id)), False
        case e.Leased():
            yield status(State.WORKING, None, before + 1), False
        case e.Unleased() | e.Requeued():
            yield status(State.SUBMITTED, None, before + 1), False
        case e.Messaged():
            yield status(State.SUBMITTED if event.queued else _ASKS[event.asks], None, before + 1), False
        case e.Updated():
            yield status(_ASKS[event.asks], _said_after(event, logged, task_id), before + 1), False
        case e.Asked():
            message = _said_after(event, logged, task_id) if event.speaks else None
            yield status(_ASKS[event.asks], message, before + 1), False
        case e.Parked() if event.restates:
            yield status(_ASKS[event.asks], _said_in(logged, said_key(task_id, event.note)), before + 1), False
        case e.Woken() if event.restates:
            yield status(State.WORKING, None, before + 1), False
        case e.Chunked():
            kept = next(x for x in logged.events if type(x) is e.ChunkKept and x.key.startswith(chunk_key(task_id, "")))
            yield artifact(kept.artifact, kept.append, kept.last), False
        case e.Progressed():
            parted = next(x for x in logged.events if type(x) is e.Parted and x.result.task_id == task_id)
            yield artifact(_partial_artifact(parted.result, parted.attempt), parted.number > 1, False), False
        case e.Answered():
            if event.result.content:
                yield artifact(_result_artifact(event.result), False, True), False
            state = _end_state(Outcome.ANSWERED, event.result)
            yield status(state, _last_words(event.result), before + steps_of(event)), True
        case e.Ended():
            yield status(_end_state(event.outcome, event.result), _last_words(event.result), before + 1), True
        case e.Replied():
            yield StreamResponse(message=_placed(event.result.message, None, context_id)), True
        case _:
            return


def _said_after(event: e.Event, logged: Logged, task_id: str) -> Message | None:
    """What was said with an event stands behind it."""
    prefix = said_key(task_id, "")
    place = next(at for at, other in enumerate(logged.events) if other is event)
    behind = logged.events[place + 1 :]
    return next((x.message for x in behind if type(x) is e.Said and x.key.startswith(prefix)), None)


def _said_in(logged: Logged, key: str) -> Message | None:
    return next((x.message for x in logged.events if type(x) is e.Said and x.key == key), None)


def _as_sent(task: Task, at: int, context_id: str) -> TaskShown:
    """The task in its first moment."""
    first = structs.replace(first_message(task), task_id=task.id, context_id=context_id)
    status = Status(State.SUBMITTED, time_of(at))
    return TaskShown(id=task.id, context_id=context_id, status=status, history=(first,), generation="1")
