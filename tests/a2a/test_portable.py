"""What one binding takes, every other shows: bytes in one spelling, values that protobuf has room for."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import json, structs

from covenant.a2a import wire as a
from covenant.model import command as c
from covenant.model import query as q
from covenant.model.content import Content, Image, Json, Text
from covenant.model.error import Malformed, TaskConflict, TooLarge
from covenant.model.limits import Limits
from covenant.model.message import Artifact, Message, Part
from covenant.model.protocol import TaskShown
from covenant.model.task import Result
from covenant.rules.envelope import seal_message
from covenant.rules.query import answer
from covenant.serve.a2a.codec import Writer
from covenant.serve.a2a.proto import SERVICE, class_of
from tests.a2a.stage import ADA, BOB, Stage, message

BYTES = bytes([0xFB, 0xFF, 0xFE, 0x00])
CANONICAL = base64.b64encode(BYTES).decode()
SPELLINGS = ("+//+AA==", "+//+AA", "-__-AA==", "-__-AA")
NO_BASE64 = ("!!!", "x", "AAAAA", "+//+AA=", "+//+AA===", "=", "+//+ AA==", "+//+AA==\n", "é")


def with_part(part: Part) -> Message:
    return structs.replace(message(), parts=(part,))


def lists(depth: int) -> Any:
    return [lists(depth - 1)] if depth else 0


def objects(depth: int) -> Any:
    return {"a": objects(depth - 1)} if depth else 0


def shown(stage: Stage) -> list[TaskShown]:
    page = answer(q.ListDialogs(ADA, BOB.pubkey, 10, None, artifacts=True), stage.state, stage.ctx)
    tasks: list[TaskShown] = page.tasks
    return tasks


def over_grpc(stage: Stage) -> Any:
    """The list as a client of protobuf reads it."""
    kind = SERVICE.methods_by_name["ListTasks"].output_type
    tasks = shown(stage)
    reply = a.TaskList(tasks=tasks, next_page_token="", page_size=10, total_size=len(tasks))
    return class_of(kind).FromString(Writer(kind).write(reply)).tasks


@pytest.mark.parametrize("raw", SPELLINGS)
def test_bytes_are_kept_in_one_spelling_whoever_sends_them(raw: str) -> None:
    stage = Stage()
    first = stage.send(message=with_part(Part(raw=raw)))
    stage.run(c.AddMessage(ADA, first, with_part(Part(raw=raw))))
    lease = stage.lease()
    stage.run(c.AddArtifact(BOB, lease, Artifact(artifact_id="a", parts=(Part(raw=raw),))))
    stage.run(c.UpdateTask(BOB, lease, with_part(Part(raw=raw))))
    (task,) = shown(stage)
    said = [*task.history, task.artifacts[0], task.status.message]
    assert [entry.parts[0].raw for entry in said if entry is not None] == [CANONICAL] * 5
    (seen,) = over_grpc(stage)
    assert [entry.parts[0].raw for entry in (*seen.history, *seen.artifacts)] == [BYTES] * 4


def test_the_same_bytes_in_another_spelling_are_the_same_message() -> None:
    stage = Stage()
    task_id = "0190a0a0-0000-7000-8000-000000000001"
    assert {stage.send(id=task_id, message=with_part(Part(raw=raw))) for raw in SPELLINGS} == {task_id}


@pytest.mark.parametrize(
    "said",
    [
        lambda whole: with_part(Part(data={"n": [whole(2), {"m": whole(0)}], "x": 0.5})),
        lambda whole: with_part(Part(text="a", metadata={"n": whole(2)})),
        lambda whole: structs.replace(message(), metadata={"n": whole(2**53)}),
        lambda whole: with_part(Part(text="a", filename=None if whole is int else "", media_type=None)),
    ],
)
def test_the_same_message_by_another_binding_is_the_same_message(said: Callable[[Any], Message]) -> None:
    """The official client writes whole numbers as doubles into JSON; and protobuf has no empty names."""
    stage = Stage()
    task_id = "0190a0a0-0000-7000-8000-000000000001"
    assert {stage.send(id=task_id, message=said(whole)) for whole in (int, float)} == {task_id}
    for whole in (int, float):
        stage.run(c.AddMessage(ADA, task_id, said(whole), None, None, "key"))
    (task,) = shown(stage)
    assert len(task.history) == 2


@pytest.mark.parametrize(("one", "other"), [(2, 2.5), (2**53, 2**53 + 1), (1, True), (0, None), ("", None)])
def test_numbers_that_differ_are_other_messages(one: Any, other: Any) -> None:
    stage = Stage()
    task_id = stage.send(message=with_part(Part(data=one)))
    with pytest.raises(TaskConflict):
        stage.send(id=task_id, message=with_part(Part(data=other)))


@pytest.mark.parametrize("raw", NO_BASE64)
def test_what_is_no_base64_is_refused(raw: str) -> None:
    stage = Stage()
    with pytest.raises(Malformed, match="base64"):
        stage.send(message=with_part(Part(raw=raw)))
    task_id = stage.send()
    with pytest.raises(Malformed, match="base64"):
        stage.run(c.AddMessage(ADA, task_id, with_part(Part(raw=raw))))
    with pytest.raises(Malformed, match="base64"):
        stage.run(c.AddArtifact(BOB, stage.lease(), Artifact(artifact_id="a", parts=(Part(raw=raw),))))


@pytest.mark.parametrize("value", [lists(47), objects(31), [objects(30)] * 3, 10**308, -(2**1023), 2**64, 1e308])
def test_what_protobuf_has_room_for_is_taken_and_shown(value: Any) -> None:
    stage = Stage()
    stage.send(message=with_part(Part(data=value)))
    lease = stage.lease()
    stage.run(c.UpdateTask(BOB, lease, with_part(Part(data=value))))
    stage.run(c.AddArtifact(BOB, lease, Artifact(artifact_id="a", parts=(Part(data=value),))))
    assert len(over_grpc(stage)) == 1


@pytest.mark.parametrize("value", [lists(48), objects(32), [lists(60)], 10**400, -(10**400), {"a": [10**309]}])
def test_what_protobuf_has_no_room_for_is_refused(value: Any) -> None:
    stage = Stage()
    task_id = stage.send()
    lease = stage.lease()
    for part in (Part(data=value), Part(text="see there", metadata={"a": value})):
        with pytest.raises(Malformed):
            stage.send(message=with_part(part))
        with pytest.raises(Malformed):
            stage.run(c.AddMessage(ADA, task_id, with_part(part)))
        with pytest.raises(Malformed):
            stage.run(c.AddArtifact(BOB, lease, Artifact(artifact_id="a", parts=(part,))))
    with pytest.raises(Malformed):
        stage.send(message=structs.replace(message(), metadata={"a": value}))


@pytest.mark.parametrize(
    "block",
    [
        Json(lists(60)),
        Json(10**400),
        Image("-__-AA", "image/png"),
        Text("beside it"),
    ],
)
def test_what_the_mailbox_takes_beyond_that_is_shown_as_text(block: Content) -> None:
    """The mailbox knows nothing of protobuf, and one odd result must not hide the others."""
    stage = Stage()
    task_id = stage.send()
    lease = stage.lease()
    stage.run(c.PostResult(BOB, Result(task_id, "partial", (block,), None, lease), "one"))
    stage.run(c.PostResult(BOB, Result(task_id, "ok", (block,), None, lease), "one"))
    (seen,) = over_grpc(stage)
    parts = [artifact.parts[0] for artifact in seen.artifacts]
    assert len(parts) == 2
    if isinstance(block, Image) and block.data == "-__-AA":
        assert {part.raw for part in parts} == {BYTES}
    else:
        assert all(part.text for part in parts)


BARE = Message(message_id="m", role="ROLE_USER", parts=(Part(text="a \x00 text"),))


@pytest.mark.parametrize(
    "said",
    [
        BARE,
        structs.replace(BARE, context_id="c", task_id="t"),
        structs.replace(BARE, parts=(Part(text="é"),)),
        structs.replace(BARE, parts=(Part(text="a"), Part(text="b"))),
        structs.replace(BARE, metadata={"a": [1]}),
        structs.replace(BARE, extensions=("e",), reference_task_ids=("r",)),
        structs.replace(BARE, parts=(Part(text="", filename="f", media_type="text/plain"),)),
        structs.replace(BARE, parts=(Part(data=None),)),
    ],
)
def test_a_message_is_sealed_as_it_reads_back(said: Message) -> None:
    assert seal_message(said, Limits()) == json.decode(json.encode(said), type=Message)


@pytest.mark.parametrize(
    "wrong",
    [
        {"role": "ROLE_NOBODY"},
        {"context_id": 5},
        {"task_id": "\ud800"},
        {"context_id": "\ud800"},
        {"extensions": 5},
        {"reference_task_ids": None},
        {"metadata": "text"},
        {"parts": (Part(text=5),)},  # type: ignore[arg-type]
        {"parts": (Part(text="\ud800"),)},
        {"parts": (Part(text="a", filename=5),)},  # type: ignore[arg-type]
        {"parts": (Part(text="a", url="u"),)},
        {"parts": (Part(text="a", raw="YQ=="),)},
        {"parts": (Part(text="a", data=1),)},
        {"parts": (Part(text="a", data=None),)},
        {"parts": (Part(text="a", metadata="text"),)},  # type: ignore[arg-type]
        {"parts": (Part(text="a", media_type=5),)},  # type: ignore[arg-type]
        {"parts": (Part(),)},
    ],
)
def test_a_message_that_would_not_read_back_is_malformed(wrong: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        seal_message(structs.replace(BARE, **wrong), Limits())


@pytest.mark.parametrize("text", ["x" * 1000, "\x00" * 200, "é" * 500])
def test_a_text_is_measured_as_it_is_written(text: str) -> None:
    said = structs.replace(BARE, parts=(Part(text=text),))
    size = len(json.encode(said))
    assert seal_message(said, Limits(content_bytes_max=size)) == said
    with pytest.raises(TooLarge):
        seal_message(said, Limits(content_bytes_max=size - 1))
