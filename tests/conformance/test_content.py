"""Content blocks are MCP's, and are carried whole, whatever members they have."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any, Final

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from covenant import (
    Audio,
    Image,
    Json,
    Limits,
    Mailbox,
    Resource,
    ResourceContents,
    ResourceLink,
    Result,
    Task,
    Text,
    read_block,
)
from covenant.rules.protocol import parts_of

from .support import Reopen, drain, keyed, plain, refused, take, uid

META: Final[dict[str, Any]] = {"example.com/id": [1, None, {"deep": 2**70}], "": ""}
ANNOTATIONS: Final[dict[str, Any]] = {
    "audience": ["user", "assistant"],
    "priority": 0.5,
    "lastModified": "2025-01-12T15:00:58Z",
    "later": True,
}
ICONS: Final[list[dict[str, Any]]] = [
    {"src": "https://example.com/i.png", "mimeType": "image/png", "sizes": ["48x48", "any"], "theme": "dark", "x": 1},
    {"src": "data:,"},
]
BLOCKS: Final[dict[str, dict[str, Any]]] = {
    "text": {"type": "text", "text": "x", "annotations": ANNOTATIONS, "_meta": META, "icons": ICONS, "later": None},
    "json": {"type": "json", "value": None, "annotations": {"priority": 7}, "_meta": META, "rest": {"type": "text"}},
    "image": {"type": "image", "data": "AAE=", "mimeType": "image/png", "_meta": META, "later": {"b": 1, "a": 2.5}},
    "audio": {"type": "audio", "data": "", "mimeType": "audio/wav", "annotations": ANNOTATIONS, "later": 2**70},
    "text resource": {
        "type": "resource",
        "resource": {"uri": 'file:///a,"b', "text": "", "mimeType": "text/plain", "_meta": META, "type": 1, "icons": 5},
        "annotations": ANNOTATIONS,
        "_meta": {},
        "uri": "not the inner one",
    },
    "blob resource": {"type": "resource", "resource": {"uri": "x:", "blob": "_-8", "later": [[]]}},
    "link": {
        "type": "resource_link",
        "uri": "file:///a",
        "name": "a",
        "title": "A",
        "description": "first",
        "mimeType": "text/plain",
        "size": 3,
        "annotations": ANNOTATIONS,
        "icons": ICONS,
        "_meta": META,
        "resource": "later",
    },
    "bare text": {"type": "text", "text": "x"},
    "bare link": {"type": "resource_link", "uri": "x:", "name": ""},
}
ALL: Final = list(BLOCKS.values())


def read(blocks: list[dict[str, Any]]) -> list[Any]:
    """The blocks as a program gets them that decodes an envelope."""
    return list(
        msgspec.json.decode(json.dumps({"task_id": "", "status": "ok", "content": blocks}), type=Result).content
    )


def written(envelope: Task | Result) -> Any:
    return json.loads(msgspec.json.encode(envelope))["content"]


async def exchanged(sender: Mailbox, worker: Mailbox, blocks: list[dict[str, Any]]) -> tuple[Any, Any]:
    """Return what a worker gets of a task with these blocks, and its sender of a result with them."""
    await sender.send_task(plain(worker, content=read(blocks)))
    delivery = await take(worker)
    await worker.send_result(Result.ok(delivery, delivery.task.content))
    return written(delivery.task), written((await drain(sender)).result)


@pytest.mark.parametrize("name", BLOCKS)
async def test_a_block_comes_back_whole(alice: Mailbox, bob: Mailbox, name: str) -> None:
    """Contract 1: nothing of what was acknowledged is lost: annotations, `_meta`, icons, and what has no name yet."""
    assert await exchanged(alice, bob, [BLOCKS[name]]) == ([BLOCKS[name]], [BLOCKS[name]])


async def test_blocks_are_whole_after_a_restart(alice: Mailbox, bob: Mailbox, reopen: Reopen) -> None:
    """Contract 1: as they were stored, so they are read, by every way there is to read a result."""
    for key in ("one", "two"):
        await alice.send_task(keyed(bob, key, id=uid(1 if key == "one" else 2), content=read(ALL)))
    await bob.send_result(Result.ok(await take(bob), read(ALL)))
    box = await reopen()
    alice, bob = box.of("alice@lab"), box.of("bob@lab")
    assert written((await take(bob)).task) == ALL
    assert written((await alice.get_task(uid(2))).task) == ALL
    assert written((await drain(alice)).result) == ALL
    kept = await alice.get_result(uid(1))
    assert kept is not None and written(kept.result) == ALL
    box = await reopen()
    assert written((await box.of("alice@lab").recent_results(10))[0].result) == ALL


async def test_a_follower_and_a_replay_get_blocks_whole(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 11: what comes from the leader or from the cache is what the holder said."""
    for number in (1, 2):
        await alice.send_task(keyed(bob, id=uid(number)))
    await bob.send_result(Result.ok(await take(bob), read(ALL)))
    await alice.send_task(keyed(bob, id=uid(3)))
    answers = [await drain(alice) for _ in range(3)]
    assert sorted(answer.task_id for answer in answers) == [uid(1), uid(2), uid(3)]
    assert [written(answer.result) for answer in answers] == [ALL] * 3


def changed(block: dict[str, Any]) -> list[dict[str, Any]]:
    """The block with one member of each sort more, less or other."""
    with_more = [{**block, "_meta": {"n": 1}}, {**block, "future": 1}, {**block, "future": {"a": [1, 2]}}]
    if block["type"] == "resource":
        with_more += [{**block, "resource": {**block["resource"], "future": 1}}]
    return [*with_more, {name: value for name, value in block.items() if name not in ("_meta", "later", "rest")}]


@pytest.mark.parametrize("name", ["text", "json", "image", "text resource", "link"])
async def test_another_member_makes_another_content(alice: Mailbox, bob: Mailbox, name: str) -> None:
    """Contract 3, 5, 11: it is the same only with every member; in whatever order they stand."""
    block = BLOCKS[name]
    turned: dict[str, Any] = dict(reversed(block.items()))
    await alice.send_task(keyed(bob, id=uid(1), content=read([block])))
    assert (await alice.send_task(keyed(bob, id=uid(1), content=read([turned])))).duplicate
    delivery = await take(bob)
    assert not (await bob.send_result(Result.ok(delivery, read([block])))).duplicate
    assert (await bob.send_result(Result.ok(delivery, read([turned])))).duplicate
    others = changed(block)
    assert len(others) >= 4
    for other in others:
        with refused("task_conflict"):
            await alice.send_task(keyed(bob, id=uid(1), content=read([other])))
        with refused("idempotency_conflict"):
            await alice.send_task(keyed(bob, id=uid(2), content=read([other])))
        with refused("result_conflict"):
            await bob.send_result(Result.ok(delivery, read([other])))


TEXT: Final = {"type": "text", "text": "x"}
IMAGE: Final = {"type": "image", "data": "AAE=", "mimeType": "image/png"}
LINK: Final = {"type": "resource_link", "uri": "x:", "name": "n"}
FORBIDDEN: Final[dict[str, dict[str, Any]]] = {
    "image without base64": {**IMAGE, "data": "not base64!!"},
    "audio without base64": {**IMAGE, "type": "audio", "data": "A"},
    "image without a type": {"type": "image", "data": "AAE="},
    "blob without base64": {"type": "resource", "resource": {"uri": "x:", "blob": "é"}},
    "resource of nothing": {"type": "resource", "resource": {"uri": "x:"}},
    "resource of both": {"type": "resource", "resource": {"uri": "x:", "text": "", "blob": ""}},
    "resource without uri": {"type": "resource", "resource": {"text": ""}},
    "resource that is text": {"type": "resource", "resource": "x", "more": 1},
    "resource with odd meta": {"type": "resource", "resource": {"uri": "x:", "text": "", "_meta": 1}},
    "odd text": {"type": "text", "text": 5, "more": 1},
    "odd meta": {**TEXT, "_meta": []},
    "odd annotations": {**TEXT, "annotations": "user"},
    "odd audience": {**TEXT, "annotations": {"audience": ["system"]}},
    "audience of nothing": {**TEXT, "annotations": {"audience": None}},
    "audience of objects": {**LINK, "annotations": {"audience": [{}]}},
    "audience that is text": {**TEXT, "annotations": {"audience": "user"}},
    "priority above 1": {**TEXT, "annotations": {"priority": 1.01}},
    "priority below 0": {**IMAGE, "annotations": {"priority": -1}},
    "priority that is true": {**LINK, "annotations": {"priority": True}},
    "priority that is text": {**TEXT, "annotations": {"priority": "1"}},
    "odd modification": {**TEXT, "annotations": {"lastModified": 5}},
    "link without name": {"type": "resource_link", "uri": "x:"},
    "odd title": {**LINK, "title": 1},
    "odd size": {**LINK, "size": "1"},
    "odd icons": {**LINK, "icons": {}},
    "icon without src": {**LINK, "icons": [{"mimeType": "image/png"}]},
    "icon of odd type": {**LINK, "icons": [{"src": "x:", "mimeType": 1}]},
    "icon of odd sizes": {**LINK, "icons": [{"src": "x:", "sizes": "48x48"}]},
    "icon of odd theme": {**LINK, "icons": [{"src": "x:", "theme": "blue"}]},
    "icon that is text": {**LINK, "icons": ["x:"]},
    "unknown type": {"type": "video", "data": "AAE="},
    "no type": {"text": "x"},
    "odd type": {"type": {}, "text": "x"},
    "json without value": {"type": "json", "more": 1},
}


@pytest.mark.parametrize("name", FORBIDDEN)
async def test_what_mcp_forbids_is_refused(alice: Mailbox, bob: Mailbox, name: str) -> None:
    """Contract 29: bad input is refused as a whole, of a task as of a result; the lease stays."""
    with refused("malformed"):
        await alice.send_task(plain(bob, content=[Text("fine"), FORBIDDEN[name]]))
    await alice.send_task(plain(bob))
    delivery = await take(bob)
    with refused("malformed"):
        await bob.send_result(Result(delivery.task.id, "ok", [FORBIDDEN[name]], None, delivery.lease_id))  # type: ignore[list-item]
    await bob.send_result(Result.ok(delivery))


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("limits", [Limits(content_bytes_max=1000, content_depth_max=5)])
@pytest.mark.parametrize("name", ["_meta", "annotations", "future", "resource"])
async def test_the_bounds_hold_for_every_member(alice: Mailbox, bob: Mailbox, name: str) -> None:
    """Contract 1: what is carried along is bounded as the block itself."""

    def block(value: Any) -> dict[str, Any]:
        if name == "resource":
            return {"type": "resource", "resource": {"uri": "x:", "text": "", "future": value}}
        return {**TEXT, name: value if name == "future" else {"future": value}}

    within = 5 if name == "future" else 4
    assert (await exchanged(alice, bob, [block(nested(within))]))[1] == [block(nested(within))]
    with refused("malformed"):
        await alice.send_task(plain(bob, content=read([block(nested(within + 1))])))
    with refused("too_large"):
        await alice.send_task(plain(bob, content=read([block("x" * 1000)])))
    with refused("malformed"):
        await alice.send_task(plain(bob, content=[block(float("nan"))]))


def test_blocks_of_a_program_have_typed_members() -> None:
    """Contract 1: `extra` holds what has no member; a block with more is one of its type all the same."""
    text, resource = read_block(BLOCKS["text"]), read_block(BLOCKS["text resource"])
    assert isinstance(text, Text) and isinstance(resource, Resource)
    assert (text.text, text.annotations, text.meta) == ("x", ANNOTATIONS, META)
    assert text.extra == {"icons": ICONS, "later": None} and Text("x").extra == {}
    assert resource.resource.uri == 'file:///a,"b' and resource.extra == {"uri": "not the inner one"}
    assert resource.resource.extra == {"type": 1, "icons": 5}
    assert repr(text).endswith(f"extra={text.extra!r})") and "uri='file:///a,\"b'" in repr(resource)
    assert text == read_block(BLOCKS["text"]) != Text("x", ANNOTATIONS, META)
    assert read([BLOCKS["text"]]) == [text]


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_goes_to_another_process_whole(name: str) -> None:
    """As what a worker gets does that hands it to a pool of processes."""
    (block,) = read([BLOCKS[name]])
    for another in (pickle.loads(pickle.dumps(block)), copy.deepcopy(block)):
        assert another == block and type(another) is type(block)
        assert json.loads(msgspec.json.encode(another)) == BLOCKS[name]


def test_a_block_is_never_changed() -> None:
    """A stored one is lent to many readers."""
    contents = ResourceContents("x:", text="")
    bare = [Text("x"), Json(1), Image("", ""), Audio("", ""), Resource(contents), ResourceLink("x:", "n"), contents]
    for block in (*bare, *read(ALL)):
        with pytest.raises(AttributeError, match="immutable"):
            block.meta = {}


def test_a_part_shows_every_member_of_its_block() -> None:
    """Contract 10: what has no place in a part of the protocol stands in its metadata, under its own name."""
    text, value, image, _, resource, blob, link, bare, _ = parts_of(read(ALL))
    shown: dict[str, Any] = {"example.com/id": [1, None, {"deep": 2**70}], "": ""}
    assert (text.text, text.metadata) == (
        "x",
        {"annotations": ANNOTATIONS, "_meta": shown, "icons": ICONS, "later": None},
    )
    assert value.data is None and value.metadata is not None
    assert value.metadata.keys() == {"annotations", "_meta", "rest"}
    assert (image.raw, image.media_type) == ("AAE=", "image/png")
    assert image.metadata == {"_meta": shown, "later": {"b": 1, "a": 2.5}}
    assert resource.metadata == {
        "uri": "not the inner one",
        "annotations": ANNOTATIONS,
        "_meta": {},
        "resource": {"_meta": shown, "type": 1, "icons": 5},
    }
    assert (blob.raw, blob.metadata) == ("/+8=", {"uri": "x:", "resource": {"later": [[]]}})
    assert link.metadata is not None
    assert link.metadata.keys() == {"title", "description", "size", "annotations", "icons", "_meta", "resource"}
    assert (bare.text, bare.metadata) == ("x", None)
    (huge,) = parts_of(read([{**TEXT, "future": 10**400}]))
    assert huge.metadata == {"future": str(10**400)}


SCALARS: Final = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
VALUES: Final = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner))
MEMBERS: Final = st.dictionaries(st.text(), VALUES, max_size=3)
KNOWN: Final = [
    {
        name: value
        for name, value in block.items()
        if name in ("type", "text", "value", "data", "mimeType", "uri", "name")
    }
    for block in (BLOCKS["text"], BLOCKS["json"], IMAGE, {**IMAGE, "type": "audio"}, LINK)
]


NAMED: Final = {
    "uri",
    "name",
    "text",
    "blob",
    "mimeType",
    "_meta",
    "annotations",
    "icons",
    "title",
    "description",
    "size",
}


@st.composite
def whole(draw: st.DrawFn, known: dict[str, Any]) -> dict[str, Any]:
    """These members and others, in any order."""
    more = {name: value for name, value in draw(MEMBERS).items() if name not in NAMED}
    meta = draw(st.none() | MEMBERS)
    members = {**more, **known, **({} if meta is None else {"_meta": meta})}
    return dict(draw(st.permutations(list(members.items()))))


@st.composite
def resource(draw: st.DrawFn) -> dict[str, Any]:
    said = {draw(st.sampled_from(["text", "blob"])): "AAAA"}
    return draw(whole({"type": "resource", "resource": draw(whole({"uri": draw(st.text()), **said}))}))


BLOCK: Final = st.sampled_from(KNOWN).flatmap(whole) | resource()


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(blocks=st.lists(BLOCK, min_size=1, max_size=4))
async def test_any_block_comes_back_whole(alice: Mailbox, bob: Mailbox, blocks: list[dict[str, Any]]) -> None:
    """Contract 1: whatever members a block has, and whatever JSON they hold."""
    assert await exchanged(alice, bob, blocks) == (blocks, blocks)
