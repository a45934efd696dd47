"""The generation of a task, sentence by sentence of the thread that proposed it, in the three bindings of one daemon.

Where the thread changed its mind the last word counts: a generation begins at 1 and not at 0, and a mismatch is 409 in
HTTP and not 412. The tests of the sentences that were overruled say so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any, Final

import pytest
import pytest_asyncio

from covenant import Result, Text
from covenant.a2a.fault import NO_EXTENDED_CARD
from covenant.model import command as c
from covenant.model.message import Artifact, Part
from covenant.model.record import Asks
from covenant.model.view import Delivery
from covenant.serve.a2a.proto import POOL
from tests.a2a.bindings import BINDINGS, Bindings, bindings
from tests.a2a.fake import TASK, Fake, client_of
from tests.a2a.served import agent_says, message
from tests.seeds.sentences import Sentences
from tests.until import until

says = Sentences("004_generation.txt")
module_loop = pytest.mark.asyncio(loop_scope="module")
in_each_binding = pytest.mark.parametrize("binding", BINDINGS)

NOW: Final = {"returnImmediately": True}
REQUIRED: Final = "urn:must"
MISMATCH: Final = {"JSONRPC": -32010, "HTTP+JSON": 409, "GRPC": "ABORTED"}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def here() -> AsyncIterator[Bindings]:
    async with bindings() as found:
        site = found.site
        card = {"name": "editor", "capabilities": {"extensions": [{"uri": REQUIRED, "required": True}]}}
        await site.exchange.run(
            site.exchange.operator(), c.PublishCard(None, site.daemon.exchange.agent("editor@lab"), card)
        )
        yield found


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def cleared(here: Bindings) -> AsyncIterator[None]:
    yield
    await here.cancel_all()


async def send(here: Bindings, binding: str, text: str = "draft the brief", **more: Any) -> dict[str, Any]:
    params = {"message": message(text, **more), "configuration": NOW}
    task: dict[str, Any] = (await here.call(binding, "SendMessage", params)).result["task"]
    return task


async def get(here: Bindings, binding: str, task_id: str, **more: Any) -> dict[str, Any]:
    task: dict[str, Any] = (await here.call(binding, "GetTask", {"id": task_id, **more})).result
    return task


async def events(here: Bindings, binding: str, task_id: str) -> list[tuple[str, dict[str, Any]]]:
    """All that came after the first generation, once the task has ended: what kind of event, and what it says."""
    answer = await here.call(binding, "SubscribeToTask", {"id": task_id}, ("Last-Event-ID", "1"))
    return [next(iter(event.items())) for event in answer.events]


async def artifact(here: Bindings, delivery: Delivery, text: str, append: bool = False) -> None:
    made = Artifact(artifact_id="draft", parts=(Part(text=text),))
    await here.site.work(c.AddArtifact(None, delivery.lease_id, made, append=append))


async def live(here: Bindings, binding: str) -> tuple[str, list[tuple[str, str]]]:
    """A task through all kinds of mutations: its id, and after each the kind of mutation and what the task says."""
    task_id = (await send(here, binding))["id"]
    said: list[tuple[str, str]] = []

    async def note(what: str) -> None:
        said.append((what, (await get(here, binding, task_id))["generation"]))

    await note("task")
    delivery = await here.site.lease()
    await note("statusUpdate WORKING")
    await artifact(here, delivery, "Dear all, ")
    await note("artifactUpdate")
    await artifact(here, delivery, "the brief.", append=True)
    await note("artifactUpdate")
    await here.site.work(c.UpdateTask(None, delivery.lease_id, agent_says("which?"), Asks.INPUT))
    await note("statusUpdate INPUT_REQUIRED")
    await send(here, binding, "this", taskId=task_id)
    await note("statusUpdate WORKING")
    await artifact(here, delivery, "Dear you")
    await note("artifactUpdate")
    await here.site.finish(delivery, Result.ok(delivery))
    await note("statusUpdate COMPLETED")
    return task_id, said


def kind_of(event: tuple[str, dict[str, Any]]) -> str:
    kind, told = event
    state = told["status"]["state"].removeprefix("TASK_STATE_") if "status" in told else ""
    return f"{kind} {state}".strip()


# --- what moves it -------------------------------------------------------------------------------------------


@says(
    "feat: add generation field to Task for ordering, long-polling, and optimistic concurrency",
    "Adds a monotonically increasing `generation` field to `Task` that the server increments on every state-changing"
    " mutation (TaskState transition or Artifact addition/update).",
    "`Task.generation`: the current generation of the task snapshot.",
    "`TaskStatusUpdateEvent.generation` / `TaskArtifactUpdateEvent.generation`: the post-mutation generation, "
    "allowing clients to detect missed events by observing gaps in the sequence.",
    "Section 3.5.2: note generation-based event ordering.",
    "This pull request introduces task generation semantics to the A2A protocol, adding a monotonically increasing "
    "generation field to tasks and events.",
    "Adds a monotonically increasing generationfield toTask(and related messages) that supports three new "
    "capabilities:",
    "1. Event ordering / missed-event detection",
    "TaskStatusUpdateEventandTaskArtifactUpdateEventnow carry the task'sgenerationvalue after the mutation that "
    "produced them.",
)
@module_loop
@in_each_binding
async def test_each_mutation_moves_the_generation_and_its_event_has_the_one_behind_it(
    here: Bindings, binding: str
) -> None:
    task_id, said = await live(here, binding)
    told = await events(here, binding, task_id)
    assert [(kind_of(event), event[1]["generation"]) for event in told] == said[1:]
    assert len(told) == 7


@says(
    "The `generation` field on [`Task`](#411-task) is a monotonically increasing integer maintained by the server.",
    "monotonically -> sequentially.",
    "increasing is always monotonic but not always sequential which is important here.",
    "Events produced by the server MUST have sequential numbering, meaning each change in the generation of a Task "
    "MUST by an increase by one and must map 1:1 to a produced Event.",
    'Replace "monotonically increasing" with "sequentially increasing" and make the server obligation explicit: '
    "generation MUST be incremented by exactly 1 per mutation, with each mutation mapping 1:1 to one emitted event.",
)
@module_loop
@in_each_binding
async def test_a_generation_rises_by_exactly_one_and_each_mutation_is_one_event(here: Bindings, binding: str) -> None:
    """Sequentially, and not only monotonically: the later word."""
    task_id, said = await live(here, binding)
    assert [int(generation) for _, generation in said] == list(range(1, 9))
    told = [int(event["generation"]) for _, event in await events(here, binding, task_id)]
    assert told == list(range(2, 9))


@says(
    "The review feedback suggests initializing the generation counter at 1 instead of 0 to distinguish between a new"
    " task and a server that does not support generations.",
    "It is initialised to `0` when a task is created and **MUST** be incremented by the server on every "
    "state-changing mutation:",
    "Starting at 1 means generation=0 is an unambiguous sentinel detectable from a single event, rather than "
    "requiring two consecutive events with the same value.",
    "generationfield, event ordering, long-polling behaviour, optimistic concurrency, and backwards compatibility.",
)
@module_loop
@in_each_binding
async def test_a_generation_begins_at_1_and_not_at_0(here: Bindings, binding: str) -> None:
    """The thread began with 0, and ended with 1: so 0 says that a server has no generations."""
    task = await send(here, binding)
    assert task["generation"] == "1"
    assert (await get(here, binding, task["id"]))["generation"] == "1"
    params = {"message": message(), "configuration": NOW}
    streaming = asyncio.ensure_future(here.call(binding, "SendStreamingMessage", params))
    for _ in range(2):  # the task from above is leased, too
        await here.site.finish(await here.site.lease())
    assert (await streaming).events[0]["task"]["generation"] == "1"


# --- events that are missed ----------------------------------------------------------------------------------


@says(
    "This enables reliable event ordering, missed-event detection, optimistic concurrency control via a new "
    "ifGenerationMatch field, and efficient long-polling through the currentGeneration parameter.",
    "A gap in generation values (e.g. jumping from3to5) tells a client it missed at least one event and should "
    "re-fetch the full task state.",
)
@module_loop
@in_each_binding
async def test_who_misses_an_event_sees_a_gap_and_reads_the_task_again(here: Bindings, binding: str) -> None:
    task_id, _ = await live(here, binding)
    told = [int(event["generation"]) for _, event in await events(here, binding, task_id)]
    for missed in told[1:-1]:
        seen = [generation for generation in told if generation != missed]
        gaps = [(before, after) for before, after in pairwise(seen) if after != before + 1]
        assert gaps == [(missed - 1, missed + 1)]
    assert (await get(here, binding, task_id))["generation"] == str(told[-1])


async def test_our_client_reads_the_task_again_behind_a_gap() -> None:
    fake = Fake("sacc", resumes=False)
    fake.skips = {3}
    followed = [event async for event in client_of(fake).follow(TASK)]
    assert [event.generation for event in followed if event.missed] == [fake.end]
    assert followed[-1].task is not None and len(fake.calls_of("GetTask")) == 1


@says(
    "Document that clients receiving two consecutive events with identical generation values (including two 0s) MUST"
    " conclude the server does not implement generation and fall back to stream ordering / timestamps.",
    "This replaces the earlier sentinel-value approach with a robust detection rule and covers the backward-compat "
    "case cleanly.",
    "Servers that have not yet implemented `generation` will return `0` on all events and responses; clients will "
    "detect this via the duplicate-generation rule above and gracefully fall back.",
    "Update the detection rule accordingly: any event carrying generation=0 signals a non-implementing server.",
    'Clients SHOULD treat a server-returnedgenerationof0as "generation unknown" and MUST NOT use it for ordering, '
    "long-polling, or precondition checks against a server that does not implement this feature.",
)
@pytest.mark.parametrize("generation", ["zero", "repeats"])
async def test_a_client_does_not_count_on_a_server_that_does_not_count(generation: str) -> None:
    """One 0 is enough, by the last word; two alike say the same."""
    fake = Fake("ss", resumes=False)
    fake.generation = generation
    client = client_of(fake)
    followed = [event async for event in client.follow(TASK)]
    assert followed and not client.is_numbered
    await client.reply(await client.get(TASK, after_generation=5), "go on")
    [(sent, _)] = fake.calls_of("SendMessage")
    assert "ifGenerationMatch" not in sent.get("configuration", {})
    assert all("currentGeneration" not in params for params, _ in fake.calls_of("GetTask"))


# --- a poll that is held -------------------------------------------------------------------------------------


@says(
    "`GetTaskRequest.current_generation`: enables efficient long-polling; the server SHOULD hold the request until "
    "the task's generation exceeds the supplied value.",
    "Section 3.1.3 Get Task: cross-reference to new generation semantics section for currentGeneration long-polling.",
    "Section 3.5.1: add long-polling as an update delivery mechanism.",
    "2. Long-polling via GetTaskRequest.current_generation",
    "If currentGenerationis supplied on aGetTaskcall the server SHOULD hold the request open until the task's "
    "generation advances beyond that value, returning immediately if it already has.",
    "This replaces tight polling loops with a single blocking call.",
)
@module_loop
@in_each_binding
async def test_a_poll_is_held_until_the_generation_is_higher(here: Bindings, binding: str) -> None:
    waits = here.site.daemon.exchange.waits
    task_id = (await send(here, binding))["id"]
    delivery = await here.site.lease()
    for known in (2, 3, 4):
        polling = asyncio.ensure_future(get(here, binding, task_id, currentGeneration=str(known)))
        await until(lambda: waits.total == 1)
        assert not polling.done()
        await artifact(here, delivery, "more", append=known > 2)
        assert (await polling)["generation"] == str(known + 1)
        assert waits.total == 0
    await here.site.finish(delivery)


@says(
    "Section 11.5: add currentGeneration query parameter example.",
    "currentGenerationto the mapping table and example.",
)
@module_loop
async def test_the_generation_that_is_known_may_stand_in_a_query(here: Bindings) -> None:
    task_id = (await send(here, "HTTP+JSON"))["id"]
    told = [*here.site.auth("alice").items(), ("A2A-Version", "1.1")]
    polling = asyncio.ensure_future(here.http("GET", f"/tasks/{task_id}?currentGeneration=1", told, None))
    await until(lambda: here.site.daemon.exchange.waits.total == 1)
    await here.site.finish(await here.site.lease())
    assert (await polling).result["generation"] in ("2", "3")


@module_loop
@in_each_binding
async def test_a_poll_that_is_behind_is_answered_at_once(here: Bindings, binding: str) -> None:
    """As the sentence on polls ends."""
    task_id = (await send(here, binding))["id"]
    delivery = await here.site.lease()
    async with asyncio.timeout(10):
        for known in (0, 1):
            assert (await get(here, binding, task_id, currentGeneration=str(known)))["generation"] == "2"
    await here.site.finish(delivery)


# --- a guard -------------------------------------------------------------------------------------------------


@says(
    "`SendMessageConfiguration.if_generation_match`: optimistic concurrency guard; the server MUST reject the "
    "request (HTTP 412 / gRPC ABORTED) if the task's generation does not match, preventing lost-update races.",
    "Section 3.2.2 SendMessageConfiguration: document ifGenerationMatch optimistic concurrency behaviour.",
    "3. Optimistic concurrency via SendMessageConfiguration.if_generation_match",
    "If ifGenerationMatchis set the server MUST reject the request with HTTP412 Precondition Failed/ "
    "gRPCABORTED(TaskGenerationMismatchError) if the task's generation has changed since the client last read it, "
    "preventing lost-update races in multi-client scenarios.",
)
@module_loop
@in_each_binding
async def test_a_message_about_another_generation_is_refused_and_changes_nothing(here: Bindings, binding: str) -> None:
    """With 409, not 412: see the table."""
    task_id = (await send(here, binding))["id"]
    delivery = await here.site.lease()
    before = await get(here, binding, task_id)
    for guard in (1, 3):
        params = {
            "message": message("late", taskId=task_id),
            "configuration": {**NOW, "ifGenerationMatch": str(guard)},
        }
        for operation in ("SendMessage", "SendStreamingMessage"):
            answer = await here.call(binding, operation, params)
            assert (answer.reason, answer.code) == ("TASK_GENERATION_MISMATCH", MISMATCH[binding])
    assert await get(here, binding, task_id) == before
    good = {"message": message("in time", taskId=task_id), "configuration": {**NOW, "ifGenerationMatch": "2"}}
    assert (await here.call(binding, "SendMessage", good)).result["task"]["generation"] == "3"
    await here.site.finish(delivery)


@says(
    "New Section 3.2.7 Task Generation Semantics covering the generation field, event ordering/missed-event "
    "detection, long-polling behaviour, optimistic concurrency, and backwards compatibility.",
)
@module_loop
async def test_of_clients_that_have_seen_the_same_one_gets_through_whichever_binding_it_speaks(here: Bindings) -> None:
    """No update is lost in a race of several clients."""
    task_id = (await send(here, "JSONRPC"))["id"]
    for generation in range(1, 6):
        params = {"message": message(taskId=task_id), "configuration": {**NOW, "ifGenerationMatch": str(generation)}}
        race = [here.call(binding, "SendMessage", params) for binding in BINDINGS * 3]
        reasons = sorted(str(answer.reason) for answer in await asyncio.gather(*race))
        assert reasons == ["None", *["TASK_GENERATION_MISMATCH"] * 8]
    task = await get(here, "JSONRPC", task_id)
    assert (task["generation"], len(task["history"])) == ("6", 6)
    await here.site.finish(await here.site.lease())


@says(
    "Section 3.3.2 Error Handling: add TaskGenerationMismatchError.",
    "Section 5.4: add TaskGenerationMismatchError error code mappings (JSON-RPC -32010 / gRPC ABORTED / HTTP 412).",
    "Section 11.6: add 412 Precondition Failed error response example.",
    "Additionally, it is recommended to map the TaskGenerationMismatchError to HTTP 409 Conflict to maintain "
    "consistency with canonical gRPC-to-HTTP status mappings.",
    "`TaskGenerationMismatchError` | `-32010` | `ABORTED` | `412 Precondition Failed`",
    "The mapping of gRPC ABORTED to HTTP 412 Precondition Failed deviates from the canonical gRPC mapping (where "
    "ABORTED maps to 409 Conflict).",
    "Per the general rules of this repository, compatibility with gRPC transcoding systems should be prioritized by "
    "using canonical mappings.",
    "While 412 is semantically appropriate for If-Match failures in REST, using ABORTED will likely result in 409 "
    "being generated by standard transcoders.",
    "TaskGenerationMismatchError | -32010 | ABORTED | 409 Conflict",
    "When mapping gRPC statuses to HTTP statuses, prioritize compatibility with gRPC transcoding systems by using "
    "the canonical mapping, even if a more specific HTTP status code is available.",
    "Change TaskGenerationMismatchError HTTP mapping from 412 Precondition Failed to 409 Conflict to align with the "
    "canonical gRPC ABORTED to HTTP 409 transcoding mapping used by standard gRPC-HTTP proxies.",
    "TaskGenerationMismatchErrorto the A2A-Specific Errors table.",
    "TaskGenerationMismatchError(JSON-RPC-32010/ gRPCABORTED/ HTTP412).",
    "412generation mismatch error response example includingifGenerationMatchbody mapping.",
)
@module_loop
@in_each_binding
async def test_a_mismatch_has_the_codes_of_the_table(here: Bindings, binding: str) -> None:
    """The thread, and its summary, began with 412; the last word is 409, as gRPC's ABORTED is elsewhere."""
    task_id = (await send(here, binding))["id"]
    params = {"message": message(taskId=task_id), "configuration": {"ifGenerationMatch": "9"}}
    answer = await here.call(binding, "SendMessage", params)
    assert answer.code == {"JSONRPC": -32010, "HTTP+JSON": 409, "GRPC": "ABORTED"}[binding]
    assert answer.status == (409 if binding == "HTTP+JSON" else 200)
    assert answer.reason == "TASK_GENERATION_MISMATCH"
    assert answer.metadata == {"taskId": task_id, "expectedGeneration": "9", "currentGeneration": "1"}
    await here.site.finish(await here.site.lease())


@says(
    "`ExtensionSupportRequiredError` | `-32008` | `FAILED_PRECONDITION` | `400 Bad Request`",
    "`VersionNotSupportedError` | `-32009` | `FAILED_PRECONDITION` | `400 Bad Request`",
)
@module_loop
@in_each_binding
async def test_the_errors_beside_it_keep_their_codes(here: Bindings, binding: str) -> None:
    code = {"JSONRPC": -32008, "HTTP+JSON": 400, "GRPC": "FAILED_PRECONDITION"}[binding]
    answer = await here.call(binding, "ListTasks", {"tenant": "editor@lab"})
    if binding == "HTTP+JSON":  # where the tenant stands in the path
        told = [*here.site.auth("alice").items(), ("A2A-Version", "1.1")]
        answer = await here.http("GET", "/editor@lab/tasks", told, None)
    assert (answer.reason, answer.code) == ("EXTENSION_SUPPORT_REQUIRED", code)
    answer = await here.call(binding, "ListTasks", version="9.0")
    code = {"JSONRPC": -32009, "HTTP+JSON": 400, "GRPC": "FAILED_PRECONDITION"}[binding]
    assert (answer.reason, answer.code) == ("VERSION_NOT_SUPPORTED", code)


@says(
    "`ExtendedAgentCardNotConfiguredError` | `-32007` | `FAILED_PRECONDITION` | `400 Bad Request`",
)
def test_the_error_of_a_card_that_is_missing_keeps_its_codes() -> None:
    """No agent here is without one: the table is all that there is to test."""
    kind = NO_EXTENDED_CARD
    assert (kind.name, kind.jsonrpc, kind.grpc, kind.http) == (
        "ExtendedAgentCardNotConfiguredError",
        -32007,
        "FAILED_PRECONDITION",
        400,
    )


# --- clients that know nothing of it -------------------------------------------------------------------------


@says(
    "The `generation` field was introduced in version **1.1** of this specification.",
    "Clients that do not read or send `generation` continue to interoperate correctly with servers that support it.",
    "The current release is 1.0.0 and we're not going back to change that, this change would only be included if we "
    "cut a 1.1 because it involves a proto change.",
    "Existing clients that do not read or sendgenerationcontinue to interoperate without change.",
)
@module_loop
@in_each_binding
async def test_a_client_of_1_0_sends_reads_follows_and_answers_as_ever(here: Bindings, binding: str) -> None:
    """It says nothing of generations and is shown none, but by gRPC, where it passes over the field."""
    params = {"message": message(), "configuration": NOW}
    task = (await here.call(binding, "SendMessage", params, version="1.0")).result["task"]
    following = asyncio.ensure_future(here.call(binding, "SubscribeToTask", {"id": task["id"]}, version="1.0"))
    await until(lambda: here.site.daemon.exchange.waits.total == 1)
    delivery = await here.site.lease()
    more = {"message": message("more", taskId=task["id"]), "configuration": NOW}
    assert (await here.call(binding, "SendMessage", more, version="1.0")).reason is None
    await here.site.finish(delivery, Result.ok(delivery, [Text("done")]))
    told = [next(iter(event.items())) for event in (await following).events]
    assert [kind for kind, _ in told] == ["task", "statusUpdate", "statusUpdate", "artifactUpdate", "statusUpdate"]
    shown = (await here.call(binding, "GetTask", {"id": task["id"]}, version="1.0")).result
    assert shown["status"]["state"] == "TASK_STATE_COMPLETED"
    if binding != "GRPC":
        assert all("generation" not in one for one in (task, shown, *(event for _, event in told)))


# --- the messages of protobuf --------------------------------------------------------------------------------

FIELDS: Final = {
    "Task": ("generation", 7, False),
    "TaskStatusUpdateEvent": ("generation", 5, False),
    "TaskArtifactUpdateEvent": ("generation", 7, False),
    "GetTaskRequest": ("current_generation", 4, True),
    "SendMessageConfiguration": ("if_generation_match", 5, True),
}


@says(
    "The field defaults to `0` in the Protocol Buffer encoding (proto3 default for `int64`).",
    "Taskint64 generation = 7",
    "TaskStatusUpdateEventint64 generation = 5",
    "TaskArtifactUpdateEventint64 generation = 7",
    "GetTaskRequestoptional int64 current_generation = 4",
    "SendMessageConfigurationoptional int64 if_generation_match = 5",
    "generationdefaults to0in proto3.",
)
@pytest.mark.parametrize("name", FIELDS)
def test_the_fields_have_the_numbers_of_the_thread(name: str) -> None:
    field_name, number, is_optional = FIELDS[name]
    field = POOL.FindMessageTypeByName(f"lf.a2a.v1.{name}").fields_by_name[field_name]
    assert (field.number, field.type, field.has_presence) == (number, field.TYPE_INT64, is_optional)
    assert field.default_value == 0


# --- the text itself -----------------------------------------------------------------------------------------

says.state_nothing(
    "a question that nobody answered",
    "Along with generation, can we have generationIDs ?",
    "It would be a list of integers.",
)
says.state_nothing(
    "tells where the same was written down",
    "Updates all four references in the spec and the proto comment.",
    "Update both the spec prose and the proto comment accordingly.",
    "Also update the backwards-compatibility note and the proto comment.",
)


def test_every_sentence_has_a_test() -> None:
    assert (says.without_a_test(), says.both()) == ([], [])
    assert says.marked() <= set(globals())
    assert len(says.all) == 71
