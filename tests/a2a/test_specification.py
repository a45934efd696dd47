"""Every example of the A2A specification, sent to a daemon as it is printed, and its answer beside the printed one.

`specification.json` has the examples by section and number (`6.5#2` is the second of 6.5), what brings each about, what
had to be mended before it could be sent, and why. A test that an answer is alike: it has each member of the example,
of the same type; it has no member that the protocol does not know; and what is not free in it is equal.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest
import pytest_asyncio
from google.protobuf import json_format

from covenant import Result
from covenant.a2a.signature import payloads_of
from covenant.model import command as c
from covenant.model.error import Malformed
from covenant.model.message import Artifact, Part
from covenant.model.record import Asks
from covenant.model.view import Delivery
from covenant.serve.a2a.proto import POOL, SERVICE, class_of
from tests.a2a.bindings import Bindings, bindings
from tests.a2a.receiver import Receiver
from tests.a2a.served import agent_says
from tests.daemons import WORKING
from tests.until import until

SPECIFICATION: Final[dict[str, Any]] = json.loads(Path(__file__).with_name("specification.json").read_bytes())
EXCHANGES: Final[list[dict[str, Any]]] = SPECIFICATION["exchanges"]
CARDS: Final[list[dict[str, Any]]] = SPECIFICATION["cards"]
EXCHANGES_MIN: Final = 52
EXAMPLES_MIN: Final = 81
LEFT_OUT_MAX: Final = 5

FREE: Final = {"id", "taskId", "contextId", "messageId", "artifactId", "timestamp", "message", "description"}
TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
EXTENSIONS: Final = (
    "https://example.com/extensions/geolocation/v1",
    "https://standards.org/extensions/citations/v1",
)
SKILL: Final = {"id": "s", "name": "s", "description": "s", "tags": ["s"]}
CARD: Final = {
    "name": "Writer",
    "capabilities": {"extendedAgentCard": True, "extensions": [{"uri": uri} for uri in EXTENSIONS]},
    "extended": {"name": "Extended Agent with Additional Skills", "skills": [SKILL]},
}
Scene: TypeAlias = AsyncGenerator[dict[str, str], None]
module_loop = pytest.mark.asyncio(loop_scope="module")
numbers: Final = count()


class Play:
    """One example: a client of its own, and the worker."""

    def __init__(self, here: Bindings, who: str) -> None:
        self.here = here
        self.site = here.site
        self.who = who

    @property
    def token(self) -> str:
        return self.site.tokens[self.who]

    async def send(self, text: str = "Hello", **more: Any) -> str:
        """A task that nobody has taken yet."""
        message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": text}], **more}
        params = {"message": message, "configuration": {"returnImmediately": True}}
        answer = await self.here.call("JSONRPC", "SendMessage", params, who=self.who)
        return str(answer.result["task"]["id"])

    async def make(self, delivery: Delivery, artifact: Artifact) -> None:
        await self.site.work(c.AddArtifact(None, delivery.lease_id, artifact))

    async def finish(self, delivery: Delivery) -> None:
        await self.site.finish(delivery, Result.ok(delivery))

    async def complete(self, artifact: Artifact | None = None) -> None:
        delivery = await self.site.lease()
        if artifact is not None:
            await self.make(delivery, artifact)
        await self.finish(delivery)

    async def say(self, delivery: Delivery, text: str, asks: Asks | None = None) -> None:
        await self.site.work(c.UpdateTask(None, delivery.lease_id, agent_says(text), asks))


def piece(text: str, **more: Any) -> Artifact:
    return Artifact(artifact_id=more.pop("artifact_id", "a"), parts=(Part(text=text),), **more)


# --- what brings an example about: first what the request names, then what happens once it was sent --------------


async def nothing(play: Play) -> Scene:
    yield {}


async def weather(play: Play) -> Scene:
    yield {}
    await play.complete(piece("Today will be sunny with a high of 75°F", name="Weather Report"))


async def report(play: Play) -> Scene:
    yield {}
    await play.complete(piece("# Climate Change Report\n\n"))


async def flight(play: Play) -> Scene:
    yield {}
    await play.say(await play.site.lease(), "I need more details. Where would you like to fly from and to?", Asks.INPUT)


async def flight_asked(play: Play) -> Scene:
    task_id = await play.send("Book me a flight")
    delivery = await play.site.lease()
    await play.say(delivery, "Where would you like to fly from and to?", Asks.INPUT)
    yield {"task-uuid": task_id}
    await until(lambda: play.site.exchange.waits.total > 0)
    await play.finish(delivery)


async def in_a_context(play: Play, number: int) -> str:
    context_id = f"context-{next(numbers)}"
    for n in range(number):
        await play.send(f"task {n}", contextId=context_id)
    for _ in range(number):
        await play.complete()
    return context_id


async def five_in_a_context(play: Play) -> Scene:
    yield {"c295ea44-7543-4f78-b524-7a38915ad6e4": await in_a_context(play, 5)}


async def fifteen_in_a_context(play: Play) -> Scene:
    context_id = await in_a_context(play, 15)
    params = {"contextId": context_id, "pageSize": 2}
    first = await play.here.call("JSONRPC", "ListTasks", params, who=play.who)
    token = first.result["nextPageToken"]
    yield {"c295ea44-7543-4f78-b524-7a38915ad6e4": context_id, "base64-encoded-cursor-token": token}


async def analysis(play: Play) -> Scene:
    await play.send()
    await play.say(await play.site.lease(), "Processing your document analysis...")
    yield {}


async def working(play: Play) -> Scene:
    task_id = await play.send()
    await play.site.lease()
    yield {"task-uuid": task_id, "task-123": task_id, "{id}": task_id}


async def working_then_done(play: Play) -> Scene:
    task_id = await play.send()
    delivery = await play.site.lease()
    yield {"task-uuid": task_id}
    await until(lambda: play.site.exchange.waits.total > 0)
    await play.finish(delivery)


async def page_of_working(play: Play) -> Scene:
    context_id = f"context-{next(numbers)}"
    for _ in range(2):
        await play.send(contextId=context_id)
        await play.site.lease()
    params = {"contextId": context_id, "status": "TASK_STATE_WORKING", "pageSize": 1}
    token = (await play.here.call("JSONRPC", "ListTasks", params, who=play.who)).result["nextPageToken"]
    yield {"context-uuid": context_id, "=uuid": f"={context_id}", "cursor-token": token, "=cursor": f"={token}"}


async def at(play: Play, generation: int) -> tuple[str, Delivery]:
    task_id = await play.send()
    delivery = await play.site.lease()
    for _ in range(generation - 2):
        await play.say(delivery, "still at it")
    return task_id, delivery


async def held_at_3(play: Play) -> Scene:
    task_id, delivery = await at(play, 3)
    yield {"task-abc": task_id}
    await until(lambda: play.site.exchange.waits.total > 0)
    await play.say(delivery, "further")


async def held_at_5(play: Play) -> Scene:
    task_id, delivery = await at(play, 5)
    yield {"{id}": task_id}
    await until(lambda: play.site.exchange.waits.total > 0)
    await play.say(delivery, "further")


async def at_generation_5(play: Play) -> Scene:
    yield {"task-abc": (await at(play, 5))[0]}


async def faces(play: Play) -> Scene:
    yield {}
    url = "https://storage.example.com/processed/task-bbb/output.png?token=xyz"
    part = Part(url=url, filename="output.png", media_type="image/png")
    await play.complete(Artifact(artifact_id="a", name="processed_image_with_faces.png", parts=(part,)))


async def tickets(play: Play) -> Scene:
    yield {}
    (example,) = [one for one in EXCHANGES if one["at"][0] == "6.8#1"]
    await play.complete(piece(example["answer"]["body"]["task"]["artifacts"][0]["parts"][0]["text"]))


async def citations(play: Play) -> Scene:
    yield {}
    (example,) = [one for one in EXCHANGES if one["at"][0] == "4.6.2#2"]
    shown = example["answer"]["body"]["task"]["artifacts"][0]
    parts = tuple(Part(text=part["text"]) for part in shown["parts"])
    made = Artifact(
        artifact_id=shown["artifactId"],
        name=shown["name"],
        parts=parts,
        extensions=tuple(shown["extensions"]),
        metadata=shown["metadata"],
    )
    await play.complete(made)


SCENES: Final[dict[str, Callable[[Play], Scene]]] = {
    scene.__name__.replace("_", " "): scene
    for scene in (
        *(nothing, weather, report, flight, flight_asked, five_in_a_context, fifteen_in_a_context, analysis, working),
        *(working_then_done, page_of_working, held_at_3, held_at_5, at_generation_5, faces, tickets, citations),
    )
}


# --- the tests --------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def here() -> AsyncIterator[Bindings]:
    async with bindings(CARD, private_webhooks=True) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def play(here: Bindings) -> AsyncIterator[Play]:
    who = f"client{next(numbers)}"
    operator = here.site.exchange.operator()
    _, here.site.tokens[who] = await here.site.exchange.enroll(operator, f"{who}@lab", None, WORKING)
    found = Play(here, who)
    yield found
    await here.cancel_all(who)


def name_of(example: dict[str, Any]) -> str:
    return f"{example['at'][0]} {example['scene']}"


@module_loop
@pytest.mark.parametrize("example", EXCHANGES, ids=name_of)
async def test_an_example_is_answered_as_it_is_printed(play: Play, example: dict[str, Any]) -> None:
    async with aclosing(SCENES[example["scene"]](play)) as scene:
        names = await anext(scene)
        request = filled(example["request"], names, play)
        ask = by_grpc if "operation" in request else by_http
        asking = asyncio.ensure_future(ask(play, request))
        try:
            await anext(scene, None)
            async with asyncio.timeout(20):
                answer = await asking
        finally:
            asking.cancel()
    printed = filled(example["answer"], names, play)
    free = frozenset(example.get("free", ()))
    assert list(differences(printed, answer, free)) == []
    check_members(answer)


def filled(said: dict[str, Any], names: dict[str, str], play: Play) -> dict[str, Any]:
    """With the ids that there are in the place of those that are printed, and a token that is good."""
    text = re.sub(r'Bearer [^"]*', f"Bearer {play.token}", json.dumps(said))
    for name, real in names.items():
        text = text.replace(name, real)
    read: dict[str, Any] = json.loads(text)
    return read


async def by_http(play: Play, request: dict[str, Any]) -> dict[str, Any]:
    """The request of the example; with a token, which not all of them print."""
    headers = {name: value for name, value in request["headers"].items() if name != "Host"}
    headers.setdefault("Authorization", f"Bearer {play.token}")
    body = json.dumps(request["body"]).encode() if "body" in request else None
    url = f"{play.site.url}{request['path']}"
    async with play.site.client.stream(request["method"], url, headers=headers, content=body) as response:
        told = {"status": response.status_code, "headers": dict(response.headers)}
        if response.headers["content-type"] == "text/event-stream":
            events = [json.loads(line[6:]) async for line in response.aiter_lines() if line.startswith("data: ")]
            return {**told, "events": events}
        return {**told, "body": json.loads(await response.aread())}


async def by_grpc(play: Play, request: dict[str, Any]) -> dict[str, Any]:
    kind = SERVICE.methods_by_name[request["operation"]].input_type
    data = json_format.ParseDict(request["body"], class_of(kind)()).SerializeToString()
    answer = await play.here.rpc(request["operation"], data, list(request["metadata"].items()))
    return {"body": answer.result} if answer.code is None else {"code": answer.code, "details": answer.details}


def differences(printed: Any, answer: Any, free: frozenset[str], path: str = "", within: str = "") -> Iterator[str]:
    """Yield each place at which the answer is not like the example."""
    name = path.rpartition(".")[2]
    if type(printed) is not type(answer):
        yield f"{path}: {printed!r} is printed, {answer!r} is answered"
    elif isinstance(printed, dict):
        if name == "headers":
            printed = {header.lower(): value for header, value in printed.items()}
        for member, value in printed.items():
            here = f"{path}.{member}".removeprefix(".")
            if member not in answer:
                yield f"{here}: is missing"
            elif "jsonrpc" in printed and member == "id":
                yield from () if answer["id"] == value else (f"{here}: {value!r} is {answer['id']!r}",)
            else:
                yield from differences(value, answer[member], free, here, name)
    elif isinstance(printed, list):
        yield from _in_a_list(printed, answer, free, path, name)
    elif name == "timestamp" and "metadata" not in path:
        yield from () if TIME.fullmatch(answer) else (f"{path}: {answer!r} is no time",)
    elif name == "nextPageToken":
        yield from () if bool(printed) is bool(answer) else (f"{path}: {printed!r} is {answer!r}",)
    elif (name not in FREE or within == "metadata") and path not in free and printed != answer:
        yield f"{path}: {printed!r} is printed, {answer!r} is answered"


def _in_a_list(printed: list[Any], answer: list[Any], free: frozenset[str], path: str, name: str) -> Iterator[str]:
    """Item by item. Between the events of a stream there may be others, and details have no order."""
    if name not in ("events", "details", "data"):
        if len(printed) > len(answer):
            yield f"{path}: has {len(answer)} of {len(printed)}"
        for at, (item, given) in enumerate(zip(printed, answer, strict=False)):
            yield from differences(item, given, free, f"{path}[{at}]")
        return
    left = list(answer)
    for item in printed:
        like = [at for at, given in enumerate(left) if not any(differences(item, given, free))]
        if not like:
            yield f"{path}: nothing in {left} is like {item}"
            return
        left = left[like[0] + 1 :] if name == "events" else left


def check_members(answer: dict[str, Any]) -> None:
    """Raise if a task, a page of them, a message or an event has a member that the protocol does not know."""
    for told in answer.get("events", [answer.get("body")]):
        body = told.get("result", told) if isinstance(told, dict) else {}
        if "events" in answer:
            kind = "StreamResponse"
        elif "tasks" in body:
            kind = "ListTasksResponse"
        elif "task" in body:
            kind = "SendMessageResponse"
        elif "status" in body:
            kind = "Task"
        else:
            continue  # an error, whose details are compared whole, or a card, which has its owner's members
        json_format.ParseDict(body, class_of(POOL.FindMessageTypeByName(f"lf.a2a.v1.{kind}"))())


# --- what is no exchange ----------------------------------------------------------------------------------------


@module_loop
@pytest.mark.parametrize("example", CARDS, ids=lambda card: str(card["at"][0]))
async def test_a_card_is_served_as_it_is_printed(play: Play, example: dict[str, Any]) -> None:
    """A member that would be served otherwise is refused at publishing, by its name; all others are as printed."""
    agent = play.site.daemon.exchange.agent(f"{play.who}@lab")
    exchange, card = play.site.exchange, dict(example["card"])
    for _ in example["not_served"]:
        with pytest.raises(Malformed) as refusal:
            await exchange.run(exchange.operator(), c.PublishCard(None, agent, card))
        (named,) = [name for name in example["not_served"] if re.match(f"card: {name}\\b", str(refusal.value))]
        del card[named]
    await exchange.run(exchange.operator(), c.PublishCard(None, agent, card))
    request = {"method": "GET", "path": f"/agents/{play.who}@lab/.well-known/agent-card.json", "headers": {}}
    served = (await by_http(play, request))["body"]
    kept = dict(card)
    capabilities = kept.pop("capabilities")
    said = {name: value for name, value in capabilities.items() if name != "extensions"}
    assert {name: served.get(name) for name in kept} == kept
    assert {name: served["capabilities"][name] for name in said} == said
    assert served["capabilities"]["extensions"][:-1] == capabilities.get("extensions", [])
    assert set(example["not_served"]) - {"security"} <= set(served)  # which the daemon says itself, but for that of 0.3


def test_a_card_is_canonical_as_it_is_printed() -> None:
    printed = SPECIFICATION["canonical"]
    assert payloads_of(printed["card"])[0] == printed["form"].encode()


def test_a_required_member_that_is_empty_is_signed_wherever_it_stands() -> None:
    skill = {"id": "s", "name": "s", "description": "", "tags": [], "examples": []}
    extension = {"uri": "urn:a", "description": ""}
    card = {"name": "", "capabilities": {}, "skills": [skill], "provider": {"url": "", "organization": "o"}}
    form = json.loads(payloads_of(card)[0])
    assert form == {**card, "skills": [{"id": "s", "name": "s", "description": "", "tags": []}]}
    form = json.loads(payloads_of({"name": "n", "capabilities": {"extensions": [extension]}, "version": None})[0])
    assert form == {"name": "n", "capabilities": {"extensions": [{"uri": "urn:a"}]}}


@module_loop
async def test_a_signature_has_the_members_that_are_printed(play: Play) -> None:
    printed = SPECIFICATION["signature"]
    assert json.loads(_from_b64(printed["value"]["protected"])) == printed["header"]
    request = {"method": "GET", "path": "/.well-known/agent-card.json", "headers": {}}
    signatures = (await by_http(play, request))["body"]["signatures"]
    assert signatures
    for signature in signatures:
        assert set(signature) == set(printed["value"])
        header = json.loads(_from_b64(signature["protected"]))
        assert set(header) == set(printed["header"]) - {"jku"}  # which is optional
        assert header["typ"] == printed["header"]["typ"]


def _from_b64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


@module_loop
async def test_a_time_is_written_as_it_is_printed(play: Play) -> None:
    times = SPECIFICATION["times"]["values"]
    assert len(times) == 3
    assert all(TIME.fullmatch(time) for time in times)
    task = (await play.here.call("JSONRPC", "GetTask", {"id": await play.send()}, who=play.who)).result
    assert TIME.fullmatch(task["status"]["timestamp"])


@module_loop
async def test_a_webhook_is_posted_as_it_is_printed(play: Play) -> None:
    printed = SPECIFICATION["webhook"]
    scheme, _, credentials = printed["headers"]["Authorization"].partition(" ")
    receiver = Receiver()
    await receiver.start()
    try:
        task_id = await play.send()
        authentication = {"scheme": scheme, "credentials": credentials}
        config = {"taskId": task_id, "url": receiver.url("hook"), "authentication": authentication}
        created = await play.here.call("JSONRPC", "CreateTaskPushNotificationConfig", config, who=play.who)
        assert created.reason is None
        await play.complete()
        await receiver.until_told("hook", lambda told: 3 in told)
    finally:
        await receiver.stop()
    post = receiver.posts[-1]
    headers = {name.lower(): value for name, value in post.headers.items()}
    wanted = {name.lower(): value for name, value in printed["headers"].items() if name != "Host"}
    assert {name: headers.get(name) for name in wanted} == wanted
    assert list(differences(printed["body"], post.body, frozenset())) == []
    assert len(post.body) == 1  # exactly one of the four
    json_format.ParseDict(post.body, class_of(POOL.FindMessageTypeByName("lf.a2a.v1.StreamResponse"))())


# --- that none is missing ---------------------------------------------------------------------------------------


def test_every_example_of_the_specification_is_here() -> None:
    others = [SPECIFICATION[name]["at"] for name in ("canonical", "signature", "times", "webhook")]
    found = [at for example in (*EXCHANGES, *CARDS) for at in example["at"]] + [at for ats in others for at in ats]
    left_out = SPECIFICATION["left_out"]
    wanted = {f"{section}#{at}" for section, number in SPECIFICATION["sections"].items() for at in range(1, number + 1)}
    assert {*found, *left_out} == wanted
    assert not set(found) & set(left_out)
    assert len(wanted) >= EXAMPLES_MIN
    assert len(EXCHANGES) >= EXCHANGES_MIN
    assert len(left_out) <= LEFT_OUT_MAX
    assert all(left_out.values())


def test_what_was_mended_has_its_reason() -> None:
    reasons = [reason for example in EXCHANGES for reason in example.get("mended", [])]
    assert all(len(reason) > 10 for reason in reasons)
    assert {example["scene"] for example in EXCHANGES} == set(SCENES)


def test_an_answer_that_lacks_any_member_of_an_example_is_found() -> None:
    """And one in which any value is of another type. Else what is compared above could be nothing."""
    number = 0
    for example in EXCHANGES:
        answer = lowered(example["answer"])
        free = frozenset(example.get("free", ()))
        assert not list(differences(example["answer"], answer, free))
        for changed in changes(answer):
            assert list(differences(example["answer"], changed, free)), (example["at"], changed)
            number += 1
    assert number > 900


def lowered(answer: dict[str, Any]) -> dict[str, Any]:
    """The example as it would come: with the names of its headers in small letters, and times with milliseconds."""
    text = re.sub(r'"timestamp": "[^"]*"', '"timestamp": "2025-10-28T10:30:00.000Z"', json.dumps(answer))
    read: dict[str, Any] = json.loads(text)
    if "headers" in read:
        read["headers"] = {name.lower(): value for name, value in read["headers"].items()}
    return read


def changes(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield {other: kept for other, kept in value.items() if other != name}
            yield from ({**value, name: changed} for changed in changes(inner))
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield [kept for other, kept in enumerate(value) if other != at]
            yield from ([*value[:at], changed, *value[at + 1 :]] for changed in changes(inner))
    else:
        yield None if value is not None else 0
