"""The A2A protocol's view of a task: a projection of its record, and of what happened to it. (DESIGN 1.)

Nothing is kept for the protocol twice: a snapshot is told from the record and what was said and made beside it, an
event from the commit in which it happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

from msgspec import structs

from covenant.model import event as e
from covenant.model.audit import Logged
from covenant.model.content import Audio, Content, Image, Json, Resource, ResourceLink, Text
from covenant.model.message import Artifact, Message, Part, agent_says
from covenant.model.protocol import ArtifactUpdate, State, Status, StatusUpdate, StreamResponse, TaskShown, Update
from covenant.model.record import Asks, Chunk, Outcome, Said, TaskRecord, chunk_key, part_key, said_key
from covenant.model.record import Part as Partial
from covenant.model.task import Result, Task
from covenant.rules.context import View
from covenant.rules.dialog import context_of
from covenant.rules.evolve import steps_of

HISTORY_DEFAULT: Final = 100
RESULT_ARTIFACT: Final = "result"
_ENDED: Final = {
    Outcome.CANCELED: State.CANCELED,
    Outcome.REJECTED: State.REJECTED,
    Outcome.FORCED: State.FAILED,
    Outcome.DEADLINE_EXCEEDED: State.FAILED,
}
_ASKS: Final = {None: State.WORKING, Asks.INPUT: State.INPUT_REQUIRED, Asks.AUTH: State.AUTH_REQUIRED}


# --- the task as it is ---------------------------------------------------------------------------------------


def state_of(record: TaskRecord) -> State:
    if record.outcome is None:
        return State.SUBMITTED if record.lease is None else _ASKS[record.asks]
    assert record.result is not None
    return _end_state(record.outcome, record.result)


def _end_state(outcome: Outcome, result: Result) -> State:
    if outcome is Outcome.ANSWERED:
        return State.COMPLETED if result.status == "ok" else State.FAILED
    return _ENDED[outcome]


def shown(record: TaskRecord, view: View, history: int | None = None, artifacts: bool = True) -> TaskShown:
    return TaskShown(
        id=record.task.id,
        context_id=context_of(record),
        status=_status_of(record, view),
        artifacts=_artifacts_of(record, view) if artifacts else (),
        history=_history_of(record, view, history),
        generation=str(record.generation),
    )


def _status_of(record: TaskRecord, view: View) -> Status:
    message: Message | None = None
    if record.result is not None:
        message = _last_words(record.result)
    elif record.note:
        said = view.get(said_key(record.task.id, record.note))
        message = said.message if isinstance(said, Said) else None
    return Status(state_of(record), time_of(record.status_ms), _placed(message, record))


def _last_words(result: Result) -> Message | None:
    """What the agent said at the end; an error speaks for itself."""
    if result.message is not None or result.status == "ok":
        return result.message
    return agent_says(f"{result.task_id}-error", result.error_message or "error")


def _placed(message: Message | None, record: TaskRecord) -> Message | None:
    """A message of the agent belongs to its task, whatever the agent has put there."""
    if message is None:
        return None
    return structs.replace(message, task_id=record.task.id, context_id=context_of(record))


def _history_of(record: TaskRecord, view: View, length: int | None) -> tuple[Message, ...]:
    """The newest messages, oldest first."""
    length = HISTORY_DEFAULT if length is None else length
    if length == 0:
        return ()
    first = max(1, record.said - length + 1)
    said = [view.get(said_key(record.task.id, number)) for number in range(first, record.said + 1)]
    messages = [kept.message for kept in said if isinstance(kept, Said)]
    if len(messages) < length:
        messages.insert(0, first_message(record.task))
    return tuple(structs.replace(m, task_id=record.task.id, context_id=context_of(record)) for m in messages)


def first_message(task: Task) -> Message:
    """What the client sent; for a task that came by the mailbox, the same in the protocol's words."""
    if task.message is not None:
        return task.message
    parts = (Part(text=task.intent_text), *parts_of(task.content))
    return Message(message_id=task.id, role="ROLE_USER", parts=parts)


def _artifacts_of(record: TaskRecord, view: View) -> tuple[Artifact, ...]:
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
    found = [structs.replace(artifact, parts=tuple(parts)) for artifact, parts in made.values()]
    if record.result is not None and record.result.content and not record.direct:
        found.append(_result_artifact(record.result))
    return tuple(found)


def _chunks(record: TaskRecord, view: View) -> Iterator[tuple[int, Artifact, bool]]:
    for number in range(1, record.chunks + 1):
        chunk = view.get(chunk_key(record.task.id, number))
        if isinstance(chunk, Chunk):
            yield chunk.order, chunk.artifact, chunk.append


def _partials(record: TaskRecord, view: View) -> Iterator[tuple[int, Artifact, bool]]:
    for number in range(1, record.partials_total + 1):
        part = view.get(part_key(record.task.id, number))
        if isinstance(part, Partial) and part.result.content:
            yield part.order, _partial_artifact(part.result, part.attempt), part.number > 1


def _partial_artifact(result: Result, attempt: int) -> Artifact:
    return Artifact(artifact_id=f"partial-{attempt}", parts=parts_of(result.content))


def _result_artifact(result: Result) -> Artifact:
    return Artifact(artifact_id=RESULT_ARTIFACT, parts=parts_of(result.content))


def parts_of(content: Any) -> tuple[Part, ...]:
    return tuple(_part_of(block) for block in content)


def _part_of(block: Content) -> Part:
    """The blocks of a mailbox task or result, as the protocol's parts."""
    if isinstance(block, Text):
        return Part(text=block.text)
    if isinstance(block, Json):
        return Part(data=block.value)
    if isinstance(block, (Image, Audio)):
        return Part(raw=block.data, media_type=block.mime_type)
    if isinstance(block, ResourceLink):
        return Part(url=block.uri, filename=block.name, media_type=block.mime_type)
    assert isinstance(block, Resource)
    inner = block.resource
    uri = {"uri": inner.uri}
    if inner.blob is not None:
        return Part(raw=inner.blob, media_type=inner.mime_type, metadata=uri)
    return Part(text=inner.text or "", media_type=inner.mime_type, metadata=uri)


def time_of(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# --- what happened to it -------------------------------------------------------------------------------------


def steps_in(logged: Logged, task_id: str) -> int:
    """By how much a commit moved the generation of a task."""
    return sum(steps_of(event) for event in logged.events if event.key == task_id)


def updates_of(logged: Logged, record: TaskRecord, before: int) -> list[Update]:
    """What a commit did to a task whose generation was `before`, in the protocol's words."""
    updates: list[Update] = []
    generation = before
    for event in logged.events:
        if event.key != record.task.id:
            continue
        for response, ends in _responses(event, logged, record, generation):
            generation += 1
            updates.append(Update(generation, response, ends))
    return updates


def _responses(
    event: e.Event, logged: Logged, record: TaskRecord, before: int
) -> Iterator[tuple[StreamResponse, bool]]:
    task_id, context_id = record.task.id, context_of(record)

    def status(state: State, message: Message | None, generation: int) -> StreamResponse:
        shown = Status(state, time_of(logged.at), _placed(message, record))
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
            yield StreamResponse(task=_as_sent(event.task, logged.at, record)), False
        case e.Leased():
            yield status(State.WORKING, None, before + 1), False
        case e.Unleased() | e.Requeued():
            yield status(State.SUBMITTED, None, before + 1), False
        case e.Messaged():
            yield status(State.SUBMITTED if event.queued else State.WORKING, None, before + 1), False
        case e.Updated():
            yield status(_ASKS[event.asks], _said_in(logged, task_id), before + 1), False
        case e.Asked():
            yield status(_ASKS[event.asks], _said_in(logged, task_id) if event.speaks else None, before + 1), False
        case e.Chunked():
            kept = next(x for x in logged.events if type(x) is e.ChunkKept and x.key.startswith(f"chunk:{task_id}:"))
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
            yield StreamResponse(message=_placed(event.result.message, record)), True
        case _:
            return


def _said_in(logged: Logged, task_id: str) -> Message | None:
    prefix = said_key(task_id, 0)[:-1]
    return next((x.message for x in logged.events if type(x) is e.Said and x.key.startswith(prefix)), None)


def _as_sent(task: Task, at: int, record: TaskRecord) -> TaskShown:
    """The task in its first moment."""
    first = structs.replace(first_message(task), task_id=task.id, context_id=context_of(record))
    status = Status(State.SUBMITTED, time_of(at))
    return TaskShown(id=task.id, context_id=context_of(record), status=status, history=(first,), generation="1")
