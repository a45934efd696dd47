"""The conversation about a task: more input from its sender, and what its holder has to say before the end.

A message to a task that somebody works on is input for that holder, in order; it never starts a second run. Every act
here is one mutation: the generation moves by one. (Contract 14, 16; DESIGN 1.)
"""

from __future__ import annotations

from collections.abc import Iterator

from covenant.model import event as e
from covenant.model.agent import AgentId
from covenant.model.command import AddArtifact, AddMessage, RejectTask, ReplyDirectly, ShowTask, UpdateTask
from covenant.model.error import (
    ContextMismatch,
    GenerationMismatch,
    Malformed,
    NotPermitted,
    TaskTerminal,
    TooLarge,
    UnknownTask,
)
from covenant.model.limits import Limits
from covenant.model.message import Message
from covenant.model.protocol import GENERATION_MAX
from covenant.model.record import Asks, Outcome, Said, TaskRecord, TaskState, chunk_key, said_key
from covenant.model.task import Result
from covenant.model.view import Input, Moved
from covenant.rules.cache import keep_answer, succession
from covenant.rules.context import Commit, Context, View
from covenant.rules.envelope import (
    check_count,
    check_flag,
    check_id,
    check_key,
    digest_of_message,
    seal_artifact,
    seal_spoken,
)
from covenant.rules.lease import held
from covenant.rules.push import brought
from covenant.rules.run.signal import message_signal
from covenant.rules.send_key import send_key, sent_under
from covenant.rules.sight import task_of_lease, visible_task

MESSAGES_MAX = 2**31


def add_message(command: AddMessage, view: View, ctx: Context) -> Commit:
    """Input for the holder, or for whoever will be: in the commit that checked the generation."""
    task_id = check_id(command.task_id, "task_id")
    record = visible_task(task_id, command.by, view, ctx)
    message = seal_spoken(command.message, "ROLE_USER", ctx.limits)
    if record.direct:
        raise UnknownTask(f"no task {task_id}", task_id=task_id)
    if command.by is not None and command.by.pubkey != record.sender:
        raise NotPermitted("only the sender of a task adds to it", task_id=task_id)
    place, digest = None, ""
    if command.key is not None:
        caller = "" if command.by is None else command.by.pubkey
        place, digest = send_key(caller, record.recipient, command.key, ctx, task_id), digest_of_message(message)
        if sent_under(place, digest, view, ctx) is not None:
            return Commit((), Moved(task_id, record.generation))
    if message.context_id is not None and message.context_id != context_of(record):
        raise ContextMismatch(f"task {task_id} belongs to another context", task_id=task_id)
    if command.if_generation is not None:
        expected = command.if_generation
        if type(expected) is not int or abs(expected) > GENERATION_MAX + 1:
            raise Malformed("ifGenerationMatch is a number of 64 bits", field="ifGenerationMatch")
        if expected != record.generation:  # one that no task ever has is another, too
            raise GenerationMismatch(
                f"task {task_id} is at generation {record.generation}, not {expected}",
                task_id=task_id,
                expected=expected,
                current=record.generation,
            )
    if record.outcome is not None:
        raise TaskTerminal(f"task {task_id} has ended: {record.outcome}", task_id=task_id, outcome=record.outcome)
    if record.waits_on is not None:
        raise NotPermitted("it waits for the result of another task, which would not hear of this", task_id=task_id)
    if record.heard >= ctx.limits.messages_max:
        raise _too_many(ctx)
    said = e.Said(said_key(task_id, record.said + 1), message)
    generation = record.generation + 1
    asks: Asks | None = None
    signaled: list[e.Event] = []
    if record.is_run:
        signaled, is_awaited = message_signal(message, record.said + 1, record, view, ctx)
        asks = None if is_awaited else record.asks
    messaged = e.Messaged(task_id, record.state is TaskState.QUEUED, asks)
    hook = () if command.push is None else brought(command.push, task_id, generation, view.pushes(task_id), ctx)
    taken = () if place is None else (e.KeyTaken(place, task_id, digest),)
    return Commit((messaged, said, *signaled, *taken, *hook), Moved(task_id, generation))


def show(command: ShowTask, view: View, ctx: Context) -> Commit:
    """Once is enough."""
    record = visible_task(check_id(command.task_id, "task_id"), command.by, view, ctx)
    done = record.shown or record.outcome is not None
    return Commit(() if done else (e.Shown(record.task.id),))


def update(command: UpdateTask, view: View, ctx: Context) -> Commit:
    """How far the holder is, or what it waits for. A sign of life, too."""
    record = _held(command.lease_id, command.by, view, ctx)
    asks, message = command.asks, command.message
    if asks is not None and type(asks) is not Asks:
        raise Malformed("asks is `input` or `auth`", field="asks")
    if asks is None and message is None:
        raise Malformed("an update says something", field="message")
    message = None if message is None else seal_spoken(message, "ROLE_AGENT", ctx.limits)
    task_id, receipt = record.task.id, command.receipt
    if _is_repeated(receipt, record, ctx) or _is_answered(command, record, view):
        return Commit((), Moved(task_id, record.generation))
    said = () if message is None else (_say(record, message, ctx),)
    moved = Moved(task_id, record.generation + 1)
    if asks is None:
        return Commit((e.Updated(task_id, record.asks, receipt), *said), moved)
    return Commit((e.Asked(task_id, asks, bool(said), receipt), *said), moved)


def _is_repeated(receipt: str | None, record: TaskRecord, ctx: Context) -> bool:
    """Whose answer was lost says it again, and has said it once. The first time may come last: it lay in a daemon that
    had no database, or that was frozen, while the holder went on by another."""
    if receipt is None:
        return False
    check_key(receipt, "receipt", ctx.limits.key_bytes_max)
    return receipt in record.receipts


def _is_answered(command: UpdateTask, record: TaskRecord, view: View) -> bool:
    """The sender was quicker: what it said while it was about to be asked is the answer."""
    if command.after is None:
        return False
    if command.asks is None:
        raise Malformed("`after` is of a question", field="after")
    after = check_count(command.after, "after", MESSAGES_MAX)
    return next(inputs_behind(after, record, view), None) is not None


def inputs_behind(after: int, record: TaskRecord, view: View) -> Iterator[Input]:
    for number, said in view.pieces(said_key(record.task.id, ""), after + 1, record.said):
        if isinstance(said, Said) and said.message.role == "ROLE_USER":
            yield Input(number, said.message)


def add_artifact(command: AddArtifact, view: View, ctx: Context) -> Commit:
    """A piece is added to what is there; the first of an artifact begins it, whatever the holder calls it."""
    record = _held(command.lease_id, command.by, view, ctx)
    check_flag(command.append, "append")
    check_flag(command.last, "last")
    artifact = seal_artifact(command.artifact, ctx.limits)
    if _is_repeated(command.receipt, record, ctx):
        return Commit((), Moved(record.task.id, record.generation))
    if record.chunks >= ctx.limits.chunks_max:
        raise TooLarge("the task has too many chunks", field="artifact", limit=ctx.limits.chunks_max)
    is_known = artifact.artifact_id in record.artifacts
    if not is_known and len(record.artifacts) >= ctx.limits.artifacts_max:
        raise TooLarge("the task has too many artifacts", field="artifact", limit=ctx.limits.artifacts_max)
    task_id = record.task.id
    append = command.append and is_known
    kept = e.ChunkKept(chunk_key(task_id, record.chunks + 1), artifact, append, command.last)
    chunked = e.Chunked(task_id, None if is_known else artifact.artifact_id, command.receipt)
    return Commit((chunked, kept), Moved(task_id, record.generation + 1))


def reject(command: RejectTask, view: View, ctx: Context) -> Commit:
    """The holder will not do it. Somebody else who waits for the same work gets it to do."""
    message = seal_spoken(command.message, "ROLE_AGENT", ctx.limits)
    lease_id = check_id(command.lease_id, "lease_id")
    record = task_of_lease(lease_id, command.by, view, ctx)
    if _has_said(record, lease_id, Outcome.REJECTED, message):
        return Commit((), Moved(record.task.id, record.generation))
    held(lease_id, record)
    task_id = record.task.id
    result = Result(task_id, "error", (), f"rejected: {text_of(message)}", lease_id, None, message)
    ended = e.Ended(task_id, Outcome.REJECTED, result)
    return Commit((ended, *succession(record, view)), Moved(task_id, record.generation + 1))


def reply(command: ReplyDirectly, view: View, ctx: Context) -> Commit:
    """A message is all the answer there is, to what came by the protocol. Where somebody has seen a task already, or
    others wait for its result, it cannot be taken back: there the message is its last word."""
    message = seal_spoken(command.message, "ROLE_AGENT", ctx.limits)
    record = task_of_lease(check_id(command.lease_id, "lease_id"), command.by, view, ctx)
    if _has_said(record, command.lease_id, Outcome.ANSWERED, message):
        return Commit((), Moved(record.task.id, record.generation))
    held(command.lease_id, record)
    task_id = record.task.id
    if not record.protocol:
        raise NotPermitted("only what came by the A2A protocol is answered by a message", task_id=task_id)
    result = Result(task_id, "ok", (), None, command.lease_id, None, message)
    moved = Moved(task_id, record.generation + 1)
    if not record.shown and record.slot is None:
        return Commit((e.Replied(task_id, result),), moved)
    cached, then = keep_answer(record, result, view, ctx)
    return Commit((e.Answered(task_id, result), *cached), moved, then=tuple(then))


def _has_said(record: TaskRecord, lease_id: str, outcome: Outcome, message: Message) -> bool:
    """The same end again, by the same holder: it did not hear the answer."""
    result = record.result
    return record.outcome is outcome and result is not None and (result.lease_id, result.message) == (lease_id, message)


def _held(lease_id: str, by: AgentId | None, view: View, ctx: Context) -> TaskRecord:
    lease_id = check_id(lease_id, "lease_id")
    record = task_of_lease(lease_id, by, view, ctx)
    held(lease_id, record)
    return record


def _say(record: TaskRecord, message: Message, ctx: Context) -> e.Said:
    """What the holder says. It has its own share of what a task may gather."""
    if record.said - record.heard >= ctx.limits.messages_max:
        raise _too_many(ctx)
    return e.Said(said_key(record.task.id, record.said + 1), message)


def _too_many(ctx: Context) -> TooLarge:
    return TooLarge("the task has too many messages", field="message", limit=ctx.limits.messages_max)


def context_of(record: TaskRecord) -> str:
    """The conversation of a task. One that came by the mailbox is a conversation of its own."""
    return record.task.context_id or record.task.id


def intent_of(message: Message, limits: Limits) -> str:
    """What a message is about, for the task that is made of it. What is too long for that is described and not cut, as
    half of what was said may be the opposite of it; the whole is in the message, which goes with the task."""
    text = text_of(message)
    size = len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
    if size <= limits.intent_text_bytes_max:
        return text
    if _texts(message):
        return f"a message with {size} bytes of text"
    return f"a message without text: {len(message.parts)} parts"


def text_of(message: Message) -> str:
    """What a message says to somebody who reads only text; a description where it has none."""
    if len(message.parts) == 1 and (text := message.parts[0].text) and not text.isspace():
        return text
    texts = _texts(message)
    if texts:
        return "\n".join(texts)
    kinds = [part.filename or part.media_type or part.url or ("file" if part.raw else "data") for part in message.parts]
    return f"a message without text: {', '.join(kinds)}"


def _texts(message: Message) -> list[str]:
    return [part.text for part in message.parts if part.text and not part.text.isspace()]
