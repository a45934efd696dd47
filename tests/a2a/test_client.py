"""The client against a server that does what a test tells it, good and bad."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric import rsa as RSA
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from covenant.a2a import Client, Event, Fault, Patience, State, Task, TaskGenerationMismatch, transport
from covenant.a2a.fault import AWAY, BAD_AGENT, INTERNAL, INVALID_PARAMS, UNAUTHENTICATED, VERSION
from covenant.a2a.interface import card_url, pick
from covenant.a2a.refusal import refused
from covenant.a2a.seen import Element, read
from covenant.a2a.signature import b64, check_signed, payloads_of
from covenant.a2a.sse import Parser
from covenant.exchange.realm import Realm
from covenant.model.error import Malformed, Unreachable
from covenant.serve.a2a.directory import sign_card
from tests.a2a.fake import HASTY, TASK, Fake, FakeWire, Reply, client_of, serving
from tests.floors import reached, reaches

STEPS = st.text("sac", min_size=0, max_size=8)
CUTS = st.lists(st.integers(0, 2500), max_size=6)
AWAY_FOR = st.lists(st.integers(0, 3), max_size=6)


async def followed(fake: Fake, after: int | None = None) -> list[Event]:
    return [event async for event in client_of(fake).follow(TASK, after)]


def said(element: dict[str, Any], missed: bool = False) -> Event:
    """What the server says, as the follower sees it."""
    seen: Element = read(msgspec.json.encode(element), Element)
    return Event(**structs.asdict(seen), missed=missed)


def element(fake: Fake, at: int) -> Event:
    return said(fake.element(at))


def snapshot(fake: Fake, at: int, missed: bool = False) -> Event:
    return said({"task": fake.snapshot(at)}, missed)


def put_together(events: list[Event]) -> tuple[str, dict[str, list[Any]]]:
    """What somebody holds who did what the events say."""
    state, parts = "", {}
    for event in events:
        if event.task is not None:
            state = event.task.state
            parts = {artifact.artifact_id: list(artifact.parts) for artifact in event.task.artifacts}
        elif event.status_update is not None:
            state = event.status_update.status.state
        elif event.artifact_update is not None:
            update = event.artifact_update
            kept = parts.get(update.artifact.artifact_id, []) if update.append else []
            parts[update.artifact.artifact_id] = [*kept, *update.artifact.parts]
    return state, parts


# --- following ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("resumes", "closings", "pauses"), [(True, 1, 0), (False, 1, 0), (False, 6, 5)])
async def test_a_stream_that_ends_at_a_question_is_gone_on_with_at_once(
    resumes: bool, closings: int, pauses: int
) -> None:
    """If every stream ends there, the follower comes back ever more slowly."""
    fake, paused = Fake("sqsa", resumes), []
    fake.closings = closings

    async def noted(seconds: float) -> None:
        paused.append(seconds)

    client = Client(fake.card, pick(fake.card, "http://fake"), FakeWire(fake), (), Patience(sleep=noted))
    events = [event async for event in client.send_and_follow("draft")]
    assert [event.generation for event in events] == [1, 2, 3, 4, 5, 6]
    assert not any(event.missed for event in events)
    assert len(paused) == pauses
    assert all(later > earlier / 2 for earlier, later in pairwise(paused))
    assert len(fake.calls_of("SubscribeToTask")) == closings


@given(STEPS, CUTS, AWAY_FOR)
async def test_a_stream_cut_anywhere_is_put_together_again(steps: str, cuts: list[int], away: list[int]) -> None:
    fake = Fake(steps)
    fake.cuts, fake.away = cuts, away
    events = await followed(fake)
    first = events[0].generation
    assert events == [snapshot(fake, first), *(element(fake, at) for at in range(first + 1, fake.end + 1))]


@given(STEPS, CUTS, AWAY_FOR, st.data())
async def test_a_follower_goes_on_behind_any_generation(
    steps: str, cuts: list[int], away: list[int], data: st.DataObject
) -> None:
    fake = Fake(steps)
    fake.cuts, fake.away = cuts, away
    after = fake.position = data.draw(st.integers(1, fake.end))
    assert await followed(fake, after) == [element(fake, at) for at in range(after + 1, fake.end + 1)]


@reaches(snapshot=20, missed=10, element=50)
@given(STEPS, CUTS, AWAY_FOR, st.sets(st.integers(2, 8)))
async def test_a_server_that_counts_but_does_not_resume_is_mended_by_snapshots_that_say_so(
    steps: str, cuts: list[int], away: list[int], skips: set[int]
) -> None:
    fake = Fake(steps, resumes=False)
    fake.cuts, fake.away, fake.skips = cuts, away, skips
    events = await followed(fake)
    for before, event in zip([None, *events], events, strict=False):
        known = 0 if before is None else before.generation
        assert event.generation > known
        at, missed = event.generation, known > 0 and event.generation > known + 1
        reached("missed" if missed else "snapshot" if event.task else "element")
        assert event == (snapshot(fake, at, missed) if event.task else element(fake, at))
    assert events[-1].is_last and events[-1].generation == fake.end


@pytest.mark.parametrize("generation", ["zero", "repeats"])
@given(STEPS, CUTS, AWAY_FOR)
async def test_a_server_that_does_not_count_is_followed_by_the_order_of_its_streams(
    generation: str, steps: str, cuts: list[int], away: list[int]
) -> None:
    fake = Fake(steps, resumes=False)
    fake.generation, fake.cuts, fake.away = generation, cuts, away
    client = client_of(fake)
    events = [event async for event in client.follow(TASK)]
    repeatable = [msgspec.json.encode(event) for event in events if event.task is None]
    assert len(repeatable) == len(set(repeatable))
    assert put_together(events) == put_together([snapshot(fake, fake.end)])
    assert sum(event.is_last for event in events) == 1
    assert client.is_numbered is (generation == "repeats" and len(events) == 1)


async def test_a_snapshot_that_shows_nothing_new_is_not_shown_again() -> None:
    fake = Fake("sacc", resumes=False)
    fake.generation = "zero"
    fake.cuts = [len(fake.first())] * 4
    events = await followed(fake)
    assert [event.task is not None for event in events] == [True, *[False] * 5]
    assert len(fake.calls_of("SubscribeToTask")) == 5


async def test_a_gap_is_mended_by_reading_the_task() -> None:
    fake = Fake("ssss")
    fake.skips = {3, 4}
    events = await followed(fake, after=1)
    assert [(event.generation, event.missed) for event in events] == [(2, False), (6, True)]
    assert events[1].task is not None and events[1].task.state == State.COMPLETED
    [(asked, _)] = fake.calls_of("GetTask")
    assert asked["currentGeneration"] == "4"


async def test_what_a_snapshot_has_shown_is_not_shown_again() -> None:
    fake = Fake("ssss")
    fake.skips, fake.reads = {3}, [5]
    events = await followed(fake, after=1)
    assert [(event.generation, event.missed) for event in events] == [(2, False), (5, True), (6, False)]


@given(STEPS, CUTS)
async def test_a_server_that_tells_everything_again_is_heard_once(steps: str, cuts: list[int]) -> None:
    fake = Fake(steps)
    fake.replays, fake.cuts = True, cuts
    assert await followed(fake) == [element(fake, at) for at in range(1, fake.end + 1)]


@pytest.mark.parametrize("silences", [1, 2])
async def test_a_stream_that_ends_without_a_word_is_opened_again(silences: int) -> None:
    fake = Fake("ss")
    fake.position, fake.silences = fake.end, silences
    assert [(event.generation, event.missed) for event in await followed(fake, after=1)] == [
        (2, False),
        (3, False),
        (4, False),
    ]


async def test_a_server_whose_streams_say_nothing_is_read() -> None:
    fake = Fake("ss")
    fake.position, fake.silences = fake.end, 1000
    assert await followed(fake, after=1) == [snapshot(fake, fake.end, missed=True)]
    assert await followed(fake, after=fake.end) == []


async def test_a_server_that_refuses_its_own_cursor_is_followed_without() -> None:
    fake = Fake("ssss")
    fake.forgets, fake.cuts, fake.away = True, [len(fake.first())], [2]
    client = client_of(fake)
    events = [event async for event in client.follow(TASK)]
    assert [(event.generation, event.missed) for event in events] == [
        (1, False),
        (3, True),
        (4, False),
        (5, False),
        (6, False),
    ]
    assert not client.is_numbered


async def test_a_cursor_that_the_caller_made_up_is_refused() -> None:
    fake = Fake("ssss")
    fake.forgets = True
    with pytest.raises(Fault) as refusal:
        await followed(fake, after=99)
    assert refusal.value.kind is INVALID_PARAMS


async def test_a_server_that_lost_count_is_not_believed() -> None:
    """A task that is younger than what was seen of it."""
    fake = Fake("ssss", resumes=False)
    fake.position = 2
    fake.cuts = [len(fake.first())]
    events = await followed(fake, after=5)
    assert events[0].missed and events[0].task is not None and events[0].generation == 2
    assert [event.generation for event in events[1:]] == [3, 4, 5, 6]


async def test_a_follower_of_a_task_that_has_ended_is_shown_its_end() -> None:
    fake = Fake("sac", resumes=False)
    fake.position = fake.end
    assert await followed(fake) == [snapshot(fake, fake.end)]
    assert await followed(fake, after=fake.end) == []
    assert [event.missed for event in await followed(fake, after=2)] == [True]


async def test_an_agent_that_does_not_stream_is_asked_again_and_again() -> None:
    fake = Fake("sss", streams=False)

    def moving(body: bytes, headers: Any, handle: Any = fake.handle) -> Reply:
        reply: Reply = handle(body, headers)
        fake.position = min(fake.end, fake.position + 1)
        return reply

    fake.handle = moving  # type: ignore[method-assign]
    events = [event async for event in client_of(fake).send_and_follow("go")]
    assert [event.generation for event in events] == [1, 2, 3, 4, 5]
    assert not any(event.missed for event in events)
    asked = [params.get("currentGeneration") for params, _ in fake.calls_of("GetTask")]
    assert asked == ["1", "2", "3", "4"]


async def test_a_server_that_is_away_for_a_while_is_waited_for() -> None:
    fake = Fake("ss")
    fake.refusals = [503, 502, 429, 500]
    assert [event.generation for event in await followed(fake)] == [1, 2, 3, 4]


async def test_a_server_that_stays_away_is_given_up() -> None:
    fake = Fake("ss")
    fake.refusals = [503] * 1000
    with pytest.raises(Fault) as refusal:
        await followed(fake)
    assert refusal.value.kind is AWAY
    assert len(fake.calls) == HASTY.failures_max + 1


async def test_who_may_not_look_is_told_at_once() -> None:
    fake = Fake("ss")
    fake.refusals = [401]
    with pytest.raises(Fault) as refusal:
        await followed(fake)
    assert refusal.value.kind is UNAUTHENTICATED
    assert len(fake.calls) == 1


async def test_a_cut_stream_is_taken_up_with_the_last_event_id() -> None:
    fake = Fake("ss")
    fake.cuts = [fake.size() - 1]  # all but the newline behind the last event
    events = await followed(fake)
    assert [event.generation for event in events] == [1, 2, 3, 4]
    assert [headers.get("last-event-id") for _, headers in fake.calls_of("SubscribeToTask")] == [None, "3"]


# --- sending --------------------------------------------------------------------------------------------------------


async def test_a_first_message_goes_under_a_key_and_another_under_a_generation() -> None:
    fake = Fake("ss")
    client = client_of(fake)
    task = await client.send("go", blocking=False)
    assert isinstance(task, Task)
    await client.reply(task, "and then?")
    (first, with_key), (second, without) = fake.calls_of("SendMessage")
    assert with_key["idempotency-key"] and first["configuration"] == {"returnImmediately": True}
    assert "idempotency-key" not in without
    assert second["configuration"] == {"ifGenerationMatch": "1"}
    assert second["message"]["taskId"] == TASK and second["message"]["contextId"] == "c-1"


async def test_a_key_is_for_a_first_message() -> None:
    with pytest.raises(Malformed):
        await client_of(Fake()).send("go", task_id=TASK, idempotency_key="k-1")


@given(st.integers(0, 6), st.booleans())
async def test_a_send_whose_answer_was_lost_is_repeated_under_its_key(losses: int, follows: bool) -> None:
    fake = Fake("ss")
    fake.losses = losses
    client = client_of(fake)
    if follows:
        events = [event async for event in client.send_and_follow("go")]
        assert [event.generation for event in events] == [1, 2, 3, 4]
    else:
        assert isinstance(await client.send("go"), Task)
    sent = [headers["idempotency-key"] for _, _, headers in fake.calls]
    assert len(sent) == losses + 1 and len(set(sent)) == 1
    assert fake.made == 1
    bodies = [params for _, params, _ in fake.calls]
    assert all(body == bodies[0] for body in bodies)


async def test_a_send_is_repeated_a_bounded_number_of_times() -> None:
    fake = Fake("ss")
    fake.losses = 1000
    with pytest.raises(Unreachable) as lost:
        await client_of(fake).send("go", idempotency_key="k-1")
    assert lost.value.details == {"outcome": "unknown", "idempotency_key": "k-1"}
    assert len(fake.calls) == HASTY.repeats_max + 1
    assert fake.made == 1


@pytest.mark.parametrize("follows", [False, True])
async def test_a_server_without_keys_is_not_sent_the_same_twice(follows: bool) -> None:
    fake = Fake("ss", resumes=False)
    fake.losses = 1
    client = client_of(fake)
    with pytest.raises(Unreachable) as lost:
        await (anext(client.send_and_follow("go")) if follows else client.send("go"))
    assert lost.value.details["outcome"] == "unknown"
    assert len(fake.calls) == 1


async def test_a_refusal_in_doubt_is_repeated_only_with_a_key() -> None:
    fake = Fake("ss")
    fake.refusals = [503, 500]
    task = await client_of(fake).send("go")
    assert isinstance(task, Task) and len(fake.calls) == 3
    fake.refusals = [503]
    with pytest.raises(Fault) as refusal:
        await client_of(fake).reply(task, "more")
    assert refusal.value.kind is AWAY and refusal.value.details["outcome"] == "unknown"


async def test_a_reply_to_a_task_that_moved_on_is_refused_with_both_generations() -> None:
    fake = Fake("ss")
    client = client_of(fake)
    seen = await client.get(TASK)
    fake.position = 3
    with pytest.raises(TaskGenerationMismatch) as refusal:
        await client.reply(seen, "go on")
    assert (refusal.value.expected, refusal.value.current) == (1, 3)
    assert isinstance(await client.reply(await client.get(TASK), "go on"), Task)


@pytest.mark.parametrize("generation", ["zero", "repeats"])
async def test_what_does_not_count_is_no_guard(generation: str) -> None:
    fake = Fake("ss", resumes=False)
    fake.generation = generation
    client = client_of(fake)
    async for _ in client.follow(TASK):
        pass
    await client.reply(await client.get(TASK, after_generation=5), "go on")
    [(sent, _)] = fake.calls_of("SendMessage")
    assert "ifGenerationMatch" not in sent.get("configuration", {})
    assert all("currentGeneration" not in params for params, _ in fake.calls_of("GetTask"))


# --- over a socket --------------------------------------------------------------------------------------------------


async def test_a_stream_cut_at_every_byte_is_put_together_again_over_a_socket() -> None:
    fake = Fake("sa")
    size = fake.size()
    async with serving(fake) as url, Client.connect(url, patience=HASTY) as client:
        for cut in range(0, size + 1, 7):
            fake.position, fake.cuts = 1, [cut, cut // 2]
            events = [event async for event in client.follow(TASK)]
            first = events[0].generation
            assert [event.generation for event in events] == list(range(first, fake.end + 1))


async def test_an_answer_that_is_lost_on_the_wire_is_asked_for_again() -> None:
    fake = Fake("sa")
    fake.losses = 3
    async with serving(fake) as url, Client.connect(url, patience=HASTY, token="secret") as client:
        assert isinstance(await client.send("go"), Task)
    assert fake.made == 1 and len(fake.calls) == 4
    assert {headers["authorization"] for _, _, headers in fake.calls} == {"Bearer secret"}


async def test_a_send_that_never_left_is_tried_again_whoever_the_server_is() -> None:
    waits: list[float] = []

    async def wait(pause_s: float) -> None:
        waits.append(pause_s)

    async with serving(Fake("sa", resumes=False)) as url:
        client = await Client.connect(url, patience=Patience(sleep=wait))
    async with client:
        with pytest.raises(Unreachable):
            await client.get(TASK)  # the line that was open is not any more
        with pytest.raises(Unreachable) as failed:
            await client.send("go", task_id=TASK)
    assert failed.value.details["outcome"] == "not_sent"
    assert len(waits) == HASTY.repeats_max


async def test_no_answer_is_read_that_is_larger_than_any_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a card nor a task: the server may be anybody's, and may never come to an end."""
    async with serving(Fake()) as url, Client.connect(url) as client:
        assert (await client.get(TASK)).id == TASK
        monkeypatch.setattr(transport, "ANSWER_BYTES_MAX", 100)
        for asked in (client.get(TASK), client.send("go"), Client.connect(url)):
            with pytest.raises(Fault, match="more than 100 bytes") as refusal:
                await asked
            assert refusal.value.kind is BAD_AGENT


# --- cards ----------------------------------------------------------------------------------------------------------


def test_the_first_interface_that_can_be_spoken_is_taken() -> None:
    def entry(binding: str, version: str = "1.0", url: str = "https://a") -> dict[str, str]:
        return {"url": url, "protocolBinding": binding, "protocolVersion": version}

    card = {"supportedInterfaces": [entry("GRPC"), entry("HTTP+JSON"), entry("JSONRPC", "1.1.2")]}
    assert pick(card, "https://a").binding == "HTTP+JSON"
    assert pick(card, "https://a", "JSONRPC").version == "1.1"
    with pytest.raises(Fault) as refusal:
        pick(card, "https://a", "GRPC-WEB")
    assert refusal.value.kind is BAD_AGENT
    for other in (entry("JSONRPC", "0.3"), entry("JSONRPC", url="http://a")):
        with pytest.raises(Fault) as refusal:
            pick({"supportedInterfaces": [other]}, "https://a")
        assert refusal.value.kind is VERSION


def test_a_card_is_found_by_its_agent_or_by_itself() -> None:
    assert card_url("http://a/agents/writer/") == "http://a/agents/writer/.well-known/agent-card.json"
    assert card_url("http://a/card.json") == "http://a/card.json"


def test_a_card_is_trusted_by_the_key_that_signed_it() -> None:
    realm, other = Realm.throwaway(), Realm.throwaway()
    card = {**Fake().card, "description": "", "skills": []}
    card["signatures"] = [*sign_card(card, other), *sign_card(card, realm)]
    check_signed(card, [realm.pubkey])
    for wrong in (
        {**card, "name": "another"},
        {**card, "signatures": []},
        {**card, "signatures": [{"protected": "%", "signature": 1}]},
        {name: value for name, value in card.items() if name != "signatures"},
    ):
        with pytest.raises(Fault):
            check_signed(wrong, [realm.pubkey])
    with pytest.raises(Fault):
        check_signed(card, [Realm.throwaway().pubkey])


def test_a_key_may_be_of_another_kind_but_then_the_signature_is_too() -> None:
    curve, rsa = ec.generate_private_key(ec.SECP256R1()), RSA.generate_private_key(65537, 2048)
    card = Fake().card

    def signed(algorithm: str, sign: Callable[[bytes], bytes]) -> dict[str, Any]:
        protected = b64(msgspec.json.encode({"alg": algorithm}))
        signature = sign(f"{protected}.{b64(payloads_of(card)[0])}".encode())
        return {**card, "signatures": [{"protected": protected, "signature": b64(signature)}]}

    def by_curve(data: bytes) -> bytes:
        r, s = decode_dss_signature(curve.sign(data, ec.ECDSA(SHA256())))
        return r.to_bytes(32, "big") + s.to_bytes(32, "big")

    def by_rsa(data: bytes) -> bytes:
        return rsa.sign(data, PKCS1v15(), SHA256())

    check_signed(signed("ES256", by_curve), [rsa.public_key(), curve.public_key()])
    check_signed(signed("RS256", by_rsa), [rsa.public_key()])
    for wrong in (signed("RS256", by_curve), signed("none", lambda _: b""), signed("ES256", lambda _: b"short")):
        with pytest.raises(Fault):
            check_signed(wrong, [curve.public_key(), rsa.public_key()])
    for text in ("", "0OIl", "abc"):
        with pytest.raises(Malformed):
            check_signed(card, [text])


async def test_a_client_does_not_connect_to_an_agent_whose_card_nobody_signed() -> None:
    async with serving(Fake()) as url:
        with pytest.raises(Fault) as refusal:
            await Client.connect(url, keys=[Realm.throwaway().pubkey])
    assert refusal.value.kind is BAD_AGENT


# --- what comes off the wire ----------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 40)), st.sampled_from(["\n", "\r\n", "\r"]))
def test_events_come_off_the_wire_the_same_in_any_pieces(sizes: list[int], newline: str) -> None:
    text = "\ufeff: hello\nid: 1\ndata: {\ndata:}\n\nevent: x\n\ndata: ä\nretry: 5\n\nid\ndata\n\ndata: half"
    wire = text.replace("\n", newline).encode()
    parser, found, at = Parser(), [], 0
    for size in sizes:
        found += parser.feed(wire[at : at + size])
        at += size
    found += parser.feed(wire[at:])
    assert [(sent.data.decode(), sent.id) for sent in found] == [("{\n}", "1"), ("ä", "1"), ("", "")]


def test_a_refusal_is_known_by_its_reason_its_code_or_its_status() -> None:
    info = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "PERMISSION_DENIED"}]
    assert refused("no", info, -32603, 200).kind.reason == "PERMISSION_DENIED"
    assert refused("no", None, -32001, 200).kind.reason == "TASK_NOT_FOUND"
    assert refused("no", None, None, 503).kind is AWAY
    assert refused("no", None, -32603, 503).kind is AWAY
    assert refused("no", None, -32603, 200).kind is INTERNAL
    assert refused("no", "odd", -1, 418).kind.reason == "INVALID_PARAMS"


def test_a_refusal_says_nothing_in_the_name_of_the_client() -> None:
    metadata = {"self": "x", "kind": "x", "message": "x", "outcome": "not_sent", "retry_after_s": "x", "taskId": "t"}
    info = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "UNAVAILABLE", "metadata": metadata}]
    refusal = refused("no", info, -32603, 200, retry_after_s=2.0)
    assert refusal.kind is AWAY
    assert refusal.details == {"taskId": "t", "retry_after_s": 2.0}


def test_a_task_reads_however_it_is_written() -> None:
    plain = b'{"id":"t","status":{"state":"TASK_STATE_NEW"},"generation":"12"}'
    task: Task = read(plain, Task)
    assert (task.generation, task.state, task.is_terminal) == (12, "TASK_STATE_NEW", False)
    empty = b'{"id":"t","contextId":null,"status":{"state":"TASK_STATE_WORKING","message":null},"generation":3,"x":1}'
    assert read(empty, Task).generation == 3
    data = b'{"artifactId":"a","parts":[{"data":{"k":null},"metadata":null}]}'
    assert read(b'{"id":"t","status":{"state":"s"},"artifacts":[' + data + b"]}", Task).artifacts[0].parts[0].data == {
        "k": None
    }
    with pytest.raises(Fault) as refusal:
        read(b'{"id":5}', Task)
    assert refusal.value.kind is BAD_AGENT
