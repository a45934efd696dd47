"""The JSON-RPC binding as a client sees it on the wire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from a2a.types import a2a_pb2

from covenant import Text
from covenant.exchange.bounds import Bounds
from covenant.model import command as c
from covenant.model.query import ListInputs, ListPushes
from covenant.model.record import Asks
from covenant.model.task import Result
from covenant.serve.a2a import jsonrpc
from covenant.serve.a2a.directory import DIRECT_REPLY
from tests.a2a.served import NEWER, VERSION, Site, agent_says, events_of, hesitate, message, start_site
from tests.until import until

TaskState = {number: name for name, number in a2a_pb2.TaskState.items()}
CALL = {"jsonrpc": "2.0", "id": 1, "method": "ListTasks", "params": {}}


def body(**other: Any) -> bytes:
    return json.dumps({**CALL, **other}).encode()


SENT = body(method="SendMessage", params={"message": message()})


def reason(error: dict[str, Any]) -> str:
    info = error["data"][0]
    assert info["@type"] == "type.googleapis.com/google.rpc.ErrorInfo"
    assert info["domain"] == "a2a-protocol.org"
    found: str = info["reason"]
    return found


async def test_a_message_is_sent_worked_on_and_answered(site: Site) -> None:
    sending = asyncio.ensure_future(site.rpc("SendMessage", {"message": message()}, **NEWER))
    delivery = await site.lease()
    assert delivery.task.intent_text == "draft the brief"
    await site.finish(delivery, Result.ok(delivery, [Text("the brief")]))
    task = (await sending)["task"]
    assert task["status"]["state"] == "TASK_STATE_COMPLETED"
    assert task["artifacts"][0]["parts"] == [{"text": "the brief"}]
    assert task["generation"] == "4"
    assert (await site.rpc("GetTask", {"id": task["id"]}, **NEWER)) == task


@pytest.mark.parametrize("path", ["/", "/agents/writer@lab", "/agents/writer@lab/", "/agents/writer%40lab"])
async def test_an_agent_has_its_own_place_and_the_default_one_the_root(site: Site, path: str) -> None:
    listing = await site.rpc("ListTasks", path=path)
    assert listing == {"tasks": [], "nextPageToken": "", "pageSize": 50, "totalSize": 0}


@pytest.mark.parametrize("call_id", ["c-7", 7, 0, -3, 1.5, None, "", 2**53])
async def test_the_id_comes_back_as_it_came(site: Site, call_id: Any) -> None:
    answer = (await site.post(body(id=call_id))).json()
    assert answer["id"] == call_id and type(answer["id"]) is type(call_id)
    failure = (await site.post(body(id=call_id, method="Nothing"))).json()
    assert failure["id"] == call_id


@pytest.mark.parametrize(
    ("content", "code", "call_id"),
    [
        (b"{", -32700, None),
        (b"", -32700, None),
        (b'{"jsonrpc":"2.0","id":1,"method":"ListTasks","params":{}', -32700, None),
        (b'"\xff"', -32700, None),
        (b"[" * 100_000, -32700, None),
        (b"[]", -32600, None),
        (b"[" + body() + b"]", -32600, None),
        (b"7", -32600, None),
        (body(jsonrpc="1.0"), -32600, 1),
        (b'{"id":1,"method":"ListTasks"}', -32600, 1),
        (b'{"jsonrpc":"2.0","id":1}', -32600, 1),
        (body(method=7), -32600, 1),
        (body(id={"a": 1}), -32600, None),
        (body(id=True), -32600, None),
        (b'{"jsonrpc":"2.0","method":"ListTasks","params":{}}', -32600, None),
        (body(method="tasks/list"), -32601, 1),
        (body(params=[]), -32602, 1),
        (body(params="x"), -32602, 1),
        (body(params={"pageSize": "many"}), -32602, 1),
        (body(params={"pageSize": 0}), -32602, 1),
        (body(params={"status": "BUSY"}), -32602, 1),
        (body(params={"historyLength": -1}), -32602, 1),
        (body(params={"pageToken": "x"}), -32602, 1),
        (body(method="GetTask"), -32602, 1),
        (body(method="GetTask", params={"id": "nonsense"}), -32001, 1),
        (body(method="SendMessage", params={}), -32602, 1),
        (body(method="SendMessage", params={"message": {**message(), "parts": []}}), -32602, 1),
        (body(method="SendMessage", params={"message": {**message(), "role": "ROLE_NOBODY"}}), -32602, 1),
        (body(method="SendMessage", params={"message": message(taskId="nonsense")}), -32001, 1),
        (SENT.replace(b"draft the brief", b"\xff\xfe"), -32602, 1),
        (SENT.replace(b"messageId", b"message_id").replace(b"draft the brief", b"\xff\xfe"), -32602, 1),
        (SENT.replace(b'"text": "draft the brief"', b'"data": 1e400'), -32602, 1),
        (SENT.replace(b'"text": "draft the brief"', b'"data": ' + b"[" * 500 + b"]" * 500), -32602, 1),
        (SENT.replace(b'"text": "draft the brief"', b'"raw": "no base64!"'), -32602, 1),
    ],
)
async def test_a_wrong_call_is_refused_in_the_words_of_json_rpc(
    site: Site, content: bytes, code: int, call_id: Any
) -> None:
    response = await site.post(content)
    assert response.status_code == 200
    answer = response.json()
    assert list(answer) == ["jsonrpc", "id", "error"]
    assert (answer["error"]["code"], answer["id"]) == (code, call_id)
    assert answer["error"]["message"]
    reason(answer["error"])


async def test_wrong_params_say_which_member_is_wrong(site: Site) -> None:
    wrong = {"message": {"messageId": "m-1", "role": "ROLE_USER", "parts": [{"text": 7}]}}
    violations = {}
    for params in (wrong, {"message": {"messageId": "m-1", "parts": []}}, {}):
        details = (await site.rpc("SendMessage", params))["data"][1]
        assert details["@type"] == "type.googleapis.com/google.rpc.BadRequest"
        violations[json.dumps(params)] = details["fieldViolations"][0]["field"]
    assert list(violations.values()) == ["message.parts[0].text", "message.role", "message"]


@pytest.mark.parametrize("letter", ["x", "\U0001f600"])
async def test_what_an_error_tells_is_bounded(site: Site, letter: str) -> None:
    """However much of what was sent it would repeat, over either binding."""
    long = letter * 100_000
    for method, params in (
        ("GetTask", {"id": long}),
        ("GetTask", {"id": "x", "tenant": long}),
        ("ListTasks", {"status": long}),
        ("ListTasks", {"pageToken": long}),
        ("CancelTask", {"id": long}),
        (long, {}),
    ):
        response = await site.post(body(method=method, params=params))
        assert "error" in response.json()
        assert len(response.content) < 5_000
    response = await site.rest("POST", "/message:send", {"message": message(taskId=long)})
    assert response.status_code == 404 and len(response.content) < 5_000


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_the_content_type_is_looked_at_before_the_body(site: Site, kind: str) -> None:
    response = await site.post(b"not json", **{"Content-Type": kind})
    error = response.json()["error"]
    assert (response.status_code, error["code"], reason(error)) == (200, -32005, "CONTENT_TYPE_NOT_SUPPORTED")
    assert (await site.post(body(), **{"Content-Type": "Application/JSON; charset=utf-8"})).json()["id"] == 1


async def test_who_says_not_who_it_is_gets_a_status_for_it(site: Site) -> None:
    response = await site.post(body(), who=None)
    assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    assert reason(response.json()["error"]) == "UNAUTHENTICATED"
    assert (await site.post(body(), who="nobody's token")).status_code == 401


async def test_too_much_gets_a_status_for_it() -> None:
    async with httpx.AsyncClient() as client:
        site = await start_site(client, bounds=Bounds(body_bytes_max=1000, requests_per_s=1, burst=3))
        response = await site.post(body(params={"contextId": "x" * 1000}))
        assert (response.status_code, reason(response.json()["error"])) == (413, "REQUEST_TOO_LARGE")
        statuses = [(await site.post(body())) for _ in range(4)]
        assert statuses[-1].status_code == 429 and int(statuses[-1].headers["retry-after"]) >= 1
        assert reason(statuses[-1].json()["error"]) == "TOO_MANY_REQUESTS"
        await site.daemon.stop()


@pytest.mark.parametrize("version", ["", "0.3", "99.0", "2", "nonsense"])
async def test_a_version_that_is_not_spoken_is_refused(site: Site, version: str) -> None:
    error = await site.rpc("ListTasks", **{"A2A-Version": version})
    assert (error["code"], reason(error)) == (-32009, "VERSION_NOT_SUPPORTED")


async def test_the_version_may_stand_in_the_query(site: Site) -> None:
    response = await site.post(body(), "/?A2A-Version=1.0", **{"A2A-Version": ""})
    assert response.json()["result"]["totalSize"] == 0


async def test_a_tenant_names_the_agent_at_the_root_and_no_other_elsewhere(site: Site) -> None:
    task = await site.start()
    assert (await site.rpc("ListTasks", {"tenant": "writer@lab"}))["totalSize"] == 1
    assert (await site.rpc("ListTasks", {"tenant": "editor@lab"}))["totalSize"] == 0
    assert (await site.rpc("GetTask", {"id": task["id"], "tenant": "editor@lab"}))["code"] == -32001
    assert (await site.rpc("ListTasks", {"tenant": "nobody"}))["code"] == -32001
    assert (await site.rpc("ListTasks", {"tenant": "writer@lab"}, "/agents/writer@lab"))["totalSize"] == 1
    error = await site.rpc("ListTasks", {"tenant": "editor@lab"}, "/agents/writer@lab")
    assert (error["code"], error["data"][1]["fieldViolations"][0]["field"]) == (-32602, "tenant")
    assert (await site.rpc("ListTasks", path="/agents/nobody"))["code"] == -32001


async def test_the_tasks_of_another_client_are_not_there(site: Site) -> None:
    task = await site.start()
    missing = await site.rpc("GetTask", {"id": "00000000-0000-4000-8000-000000000000"}, who="carol")
    hidden = await site.rpc("GetTask", {"id": task["id"]}, who="carol")
    assert (hidden["code"], reason(hidden)) == (missing["code"], reason(missing)) == (-32001, "TASK_NOT_FOUND")
    for method in ("CancelTask", "SubscribeToTask"):
        assert (await site.rpc(method, {"id": task["id"]}, who="carol"))["code"] == -32001


async def test_a_task_is_canceled_and_one_that_has_ended_otherwise_is_not(site: Site) -> None:
    task = await site.start()
    for _ in range(2):
        assert (await site.rpc("CancelTask", {"id": task["id"]}))["status"]["state"] == "TASK_STATE_CANCELED"
    task = await site.start()
    await site.finish(await site.lease())
    error = await site.rpc("CancelTask", {"id": task["id"]})
    assert (error["code"], reason(error)) == (-32002, "TASK_NOT_CANCELABLE")


async def test_a_mismatch_says_what_was_expected_and_what_is(site: Site) -> None:
    """Contract 16."""
    task = await site.start()
    params = {"message": message("more", taskId=task["id"]), "configuration": {"ifGenerationMatch": "7"}}
    error = await site.rpc("SendMessage", params)
    assert (error["code"], reason(error)) == (-32010, "TASK_GENERATION_MISMATCH")
    metadata = {"taskId": task["id"], "expectedGeneration": "7", "currentGeneration": "1"}
    assert error["data"][0]["metadata"] == metadata


async def test_a_webhook_is_set_read_listed_and_dropped(site: Site) -> None:
    task = await site.start()
    about = {"taskId": task["id"]}
    hook = {"id": "h-1", "url": "https://example.com/hook", "token": "secret"}
    made = await site.rpc("CreateTaskPushNotificationConfig", {**about, **hook})
    assert made == {**about, "id": "h-1", "url": "https://example.com/hook"}
    assert await site.rpc("GetTaskPushNotificationConfig", {**about, "id": "h-1"}) == made
    assert (await site.rpc("ListTaskPushNotificationConfigs", about))["configs"] == [made]
    for _ in range(2):
        call = {**CALL, "method": "DeleteTaskPushNotificationConfig", "params": {**about, "id": "h-1"}}
        assert (await site.post(json.dumps(call).encode())).json() == {"jsonrpc": "2.0", "id": 1, "result": None}
    assert (await site.rpc("GetTaskPushNotificationConfig", {**about, "id": "h-1"}))["code"] == -32001


async def test_the_same_first_message_under_one_key_is_one_task(site: Site) -> None:
    """Contract 17."""
    params = {"message": message(), "configuration": {"returnImmediately": True}}
    answers = [await site.rpc("SendMessage", params, **{"Idempotency-Key": "k-1"}) for _ in range(2)]
    assert answers[0]["task"]["id"] == answers[1]["task"]["id"]


GENERATION = "urn:covenant:generation"


@pytest.mark.parametrize(
    ("headers", "params", "is_shown"),
    [
        ({}, {}, False),
        (NEWER, {}, True),
        ({"A2A-Extensions": f"urn:x, {GENERATION}"}, {}, True),
        ({}, {"currentGeneration": 0}, True),
    ],
)
async def test_generations_are_shown_to_who_speaks_of_them(
    site: Site, headers: dict[str, str], params: dict[str, Any], is_shown: bool
) -> None:
    """A client of 1.0 may hold every answer against its schema, which has none."""
    task = await site.start()
    assert "generation" not in task
    found = await site.rpc("GetTask", {"id": task["id"], **params}, **headers)
    assert ("generation" in found) is is_shown
    if not params:
        listing = await site.rpc("ListTasks", {}, **headers)
        assert ("generation" in listing["tasks"][0]) is is_shown
        await site.finish(await site.lease())
        async with opened(site, "SendStreamingMessage", {"message": message()}, **headers) as response:
            delivery = await site.lease()
            await site.chunk(delivery, "one")
            await site.finish(delivery)
            events = await events_of(response.aiter_lines())
        assert [number for number, _ in events][-1] == "4"
        assert all(("generation" in next(iter(told["result"].values()))) is is_shown for _, told in events)


async def test_the_extensions_in_force_are_named(site: Site) -> None:
    response = await site.post(body(), **{"A2A-Extensions": f"urn:x, {GENERATION}"})
    assert response.headers["a2a-extensions"] == GENERATION
    assert "a2a-extensions" not in (await site.post(body())).headers


async def test_an_extension_that_the_agent_requires_has_to_be_named() -> None:
    async with httpx.AsyncClient() as client:
        card = {"name": "writer", "capabilities": {"extensions": [{"uri": "urn:x", "required": True}]}}
        site = await start_site(client, card)
        error = await site.rpc("ListTasks")
        assert (error["code"], reason(error)) == (-32008, "EXTENSION_SUPPORT_REQUIRED")
        assert (await site.rpc("ListTasks", **{"A2A-Extensions": "urn:x"}))["totalSize"] == 0
        await site.daemon.stop()


async def test_members_may_have_their_names_of_the_proto_file(site: Site) -> None:
    said = {
        "message_id": "m-1",
        "role": "ROLE_USER",
        "parts": [{"data": {"task_id": None}, "media_type": "application/json"}],
        "metadata": {"message_id": "kept as it is"},
    }
    params = {"message": said, "configuration": {"return_immediately": True, "history_length": 1}}
    task = (await site.rpc("SendMessage", params))["task"]
    assert task["history"][0]["parts"] == [{"data": {"task_id": None}, "mediaType": "application/json"}]
    assert task["history"][0]["metadata"] == {"message_id": "kept as it is"}
    assert "history" not in await site.rpc("GetTask", {"id": task["id"], "history_length": 0})
    error = await site.rpc("GetTask", {"id": task["id"], "history_length": "x"})
    assert error["data"][1]["fieldViolations"][0]["field"] == "historyLength"


async def test_numbers_may_be_strings_and_enumerations_numbers(site: Site) -> None:
    """As ProtoJSON has it."""
    sent = {"message": {**message(), "role": 1}, "configuration": {"historyLength": "0", "returnImmediately": True}}
    task = (await site.rpc("SendMessage", sent))["task"]
    assert "history" not in task
    shown = await site.rpc("GetTask", {"id": task["id"], "historyLength": "5"})
    assert [said["role"] for said in shown["history"]] == ["ROLE_USER"]
    for number, state in TaskState.items():
        for status in (number, state):
            page = await site.rpc("ListTasks", {"status": status, "pageSize": "10", "historyLength": 0.0})
            assert len(page["tasks"]) == (number in (0, 1)), status
            listed = (await site.rest("GET", f"/tasks?status={status}")).json()
            assert len(listed["tasks"]) == (number in (0, 1)), status
    for params in ({"pageSize": "1.5"}, {"pageSize": 1.5}, {"pageSize": "ten"}, {"pageSize": True}, {"status": 9}):
        assert (await site.rpc("ListTasks", params))["code"] == -32602
    for role in (0, 3, -1, 1.5, True, "1x"):
        assert (await site.rpc("SendMessage", {"message": {**message(), "role": role}}))["code"] == -32602


async def test_null_is_what_is_not_said(site: Site) -> None:
    params = {
        "message": {**message(), "extensions": None, "parts": [{"data": None}]},
        "configuration": {"returnImmediately": True, "acceptedOutputModes": None},
        "metadata": None,
    }
    task = (await site.rpc("SendMessage", params))["task"]
    assert task["history"][0]["parts"] == [{"data": None}]


async def test_what_is_said_beside_a_message_reaches_the_worker(site: Site) -> None:
    beside: dict[str, Any] = {
        "metadata": {"trace": "t-1"},
        "configuration": {"acceptedOutputModes": ["text/plain"], "returnImmediately": True},
    }
    told = {"covenant/requestMetadata": {"trace": "t-1"}, "covenant/acceptedOutputModes": ["text/plain"]}
    first = (await site.rpc("SendMessage", {"message": message(metadata={"own": 1}), **beside}))["task"]
    delivery = await site.lease()
    assert delivery.task.message is not None and delivery.task.message.metadata == {"own": 1, **told}
    await site.rpc("SendMessage", {"message": message("more", taskId=first["id"]), **beside})
    heard = await site.exchange.ask(site.writer, ListInputs(site.writer.agent, delivery.lease_id))
    assert heard.inputs[0].message.metadata == told


# --- streams ---------------------------------------------------------------------------------------------------


def opened(site: Site, method: str, params: Any, path: str = "/", **headers: str) -> Any:
    told = {"Content-Type": "application/json", **VERSION, **site.auth("alice"), **headers}
    content = json.dumps({"jsonrpc": "2.0", "id": "s-1", "method": method, "params": params})
    return site.client.stream("POST", f"{site.url}{path}", content=content, headers=told)


async def test_a_stream_is_the_task_and_then_each_event_under_its_generation(site: Site) -> None:
    async with opened(site, "SendStreamingMessage", {"message": message()}, **NEWER) as response:
        assert response.headers["content-type"] == "text/event-stream"
        delivery = await site.lease()
        await site.work(c.UpdateTask(None, delivery.lease_id, agent_says("half way")))
        await site.chunk(delivery, "one")
        await site.finish(delivery)
        events = await events_of(response.aiter_lines())
    assert all((told["jsonrpc"], told["id"]) == ("2.0", "s-1") for _, told in events)
    first = events[0][1]["result"]["task"]
    numbers = [int(number) for number, _ in events]
    assert numbers == list(range(int(first["generation"]), 6))
    kinds = [next(iter(told["result"])) for _, told in events]
    assert kinds[0] == "task" and kinds[-2:] == ["artifactUpdate", "statusUpdate"]
    assert events[-1][1]["result"]["statusUpdate"]["status"]["state"] == "TASK_STATE_COMPLETED"


async def test_a_cut_stream_goes_on_behind_the_last_event_that_was_seen(site: Site) -> None:
    """Contract 17: no snapshot, every event once, finished tasks too."""
    task = await site.start()
    delivery = await site.lease()
    await site.chunk(delivery, "one")
    async with opened(site, "SubscribeToTask", {"id": task["id"]}, **{"Last-Event-ID": "1"}) as response:
        lines = response.aiter_lines()
        seen = [line async for line in _until(lines, "id: 3")]
        assert sum(line.startswith("id: ") for line in seen) == 2
    await site.chunk(delivery, " two", append=True)
    await site.finish(delivery)
    async with opened(site, "SubscribeToTask", {"id": task["id"]}, **{"Last-Event-ID": "3"}) as response:
        events = await events_of(response.aiter_lines())
    assert [number for number, _ in events] == ["4", "5"]
    async with opened(site, "SubscribeToTask", {"id": task["id"]}, **{"Last-Event-ID": "5"}) as response:
        assert (response.status_code, await events_of(response.aiter_lines())) == (200, [])


async def _until(lines: Any, last: str) -> Any:
    async for line in lines:
        yield line
        if line == last:
            return


@pytest.mark.parametrize(
    ("method", "params", "code"),
    [
        ("SubscribeToTask", {"id": "nonsense"}, -32001),
        ("SubscribeToTask", {}, -32602),
        ("SendStreamingMessage", {"message": message(taskId="nonsense")}, -32001),
        ("SendStreamingMessage", {"message": message(), "configuration": {"historyLength": -1}}, -32602),
    ],
)
async def test_what_is_refused_before_the_first_event_is_no_stream(
    site: Site, method: str, params: Any, code: int
) -> None:
    async with opened(site, method, params) as response:
        await response.aread()
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["code"] == code


async def test_what_is_refused_after_a_stream_has_begun_is_its_last_word(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an id: it is no event to go on behind."""
    task = await site.start()
    await site.finish(await site.lease())
    run = site.exchange.run
    hesitate(site, monkeypatch, run)
    params = {"message": message("more", taskId=task["id"])}
    async with opened(site, "SendStreamingMessage", params) as response:
        [(number, told)] = await events_of(response.aiter_lines())
    assert (number, told["jsonrpc"], told["id"]) == ("", "2.0", "s-1")
    assert (told["error"]["code"], reason(told["error"])) == (-32004, "UNSUPPORTED_OPERATION")
    hesitate(site, monkeypatch, run)
    headers = {**VERSION, **site.auth("alice")}
    async with site.client.stream("POST", f"{site.url}/message:stream", json=params, headers=headers) as response:
        [(_, told)] = await events_of(response.aiter_lines())
    assert (told["error"]["code"], told["error"]["status"]) == (400, "FAILED_PRECONDITION")
    assert told["error"]["details"][0]["reason"] == "UNSUPPORTED_OPERATION"


async def test_a_stream_that_fails_says_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> None:
        raise ValueError("a bug")

    hesitate(site, monkeypatch, broken)
    async with opened(site, "SendStreamingMessage", {"message": message()}) as response:
        [(_, told)] = await events_of(response.aiter_lines())
    assert (told["error"]["code"], reason(told["error"])) == (-32603, "INTERNAL_ERROR")
    assert "bug" not in json.dumps(told)


async def test_a_finished_task_takes_no_plain_subscription(site: Site) -> None:
    task = await site.start()
    await site.finish(await site.lease())
    error = await site.rpc("SubscribeToTask", {"id": task["id"]})
    assert (error["code"], reason(error)) == (-32004, "UNSUPPORTED_OPERATION")


async def test_a_stream_stays_open_over_a_question(site: Site) -> None:
    task = await site.start()
    delivery = await site.lease()
    await site.work(c.UpdateTask(None, delivery.lease_id, agent_says("which colour?"), Asks.INPUT))
    async with opened(site, "SubscribeToTask", {"id": task["id"]}) as response:
        await site.start("red", taskId=task["id"])
        await site.finish(delivery)
        events = await events_of(response.aiter_lines())
    assert events[0][1]["result"]["task"]["status"]["state"] == "TASK_STATE_INPUT_REQUIRED"
    assert events[-1][1]["result"]["statusUpdate"]["status"]["state"] == "TASK_STATE_COMPLETED"


async def test_a_stream_without_news_says_that_it_lives() -> None:
    async with httpx.AsyncClient() as client:
        site = await start_site(client, keep_awake_s=0.01)
        task = await site.start()
        async with opened(site, "SubscribeToTask", {"id": task["id"]}) as response:
            seen = [line async for line in _until(response.aiter_lines(), ":")]
            assert seen[0] == "id: 1"
        await site.daemon.stop()


@asynccontextmanager
async def crowded(card: dict[str, Any] | None = None) -> AsyncIterator[Site]:
    """Alice has as many waits open as she may."""
    async with httpx.AsyncClient() as client:
        site = await start_site(client, card, bounds=Bounds(waits_max=1))
        try:
            with site.exchange.waits.one(site.exchange.authenticate(site.tokens["alice"]).agent.pubkey):
                yield site
        finally:
            await site.daemon.stop()


async def test_who_may_not_wait_is_answered_what_its_message_has_led_to() -> None:
    async with crowded() as site:
        first = (await site.rpc("SendMessage", {"message": message()}, **NEWER))["task"]
        assert (first["status"]["state"], first["generation"]) == ("TASK_STATE_SUBMITTED", "1")
        more = (await site.rpc("SendMessage", {"message": message("more", taskId=first["id"])}, **NEWER))["task"]
        assert (more["id"], more["generation"]) == (first["id"], "2")


async def test_who_may_not_wait_for_a_direct_reply_is_shown_the_task() -> None:
    async with crowded({"name": "writer", "capabilities": {"extensions": [{"uri": DIRECT_REPLY}]}}) as site:
        for at_once in (True, False):
            params = {"message": message(), "configuration": {"returnImmediately": at_once}}
            sent = await site.rpc("SendMessage", params)
            assert sent["task"]["status"]["state"] == "TASK_STATE_SUBMITTED"


async def test_a_stream_too_many_is_refused_before_its_message_is_taken() -> None:
    async with crowded() as site:
        first = await site.start()
        calls = {"SendStreamingMessage": {"message": message("another")}, "SubscribeToTask": {"id": first["id"]}}
        for method, params in calls.items():
            async with opened(site, method, params) as response:
                await response.aread()
            assert (response.status_code, reason(response.json()["error"])) == (429, "TOO_MANY_REQUESTS")
        assert (await site.rpc("ListTasks"))["totalSize"] == 1


async def test_a_client_that_hangs_up_leaves_nothing_behind(site: Site) -> None:
    task = await site.start()
    async with opened(site, "SubscribeToTask", {"id": task["id"]}) as response:
        assert await anext(response.aiter_lines()) == "id: 1"
        await until(lambda: site.exchange.waits.total == 1)
    await until(lambda: site.exchange.waits.total == 0)


async def test_a_client_that_hangs_up_while_it_is_kept_waiting_leaves_nothing_behind(site: Site) -> None:
    waiting = asyncio.ensure_future(site.rpc("SendMessage", {"message": message()}))
    await until(lambda: site.exchange.waits.total == 1)
    waiting.cancel()
    await until(lambda: site.exchange.waits.total == 0)
    assert (await site.rpc("ListTasks"))["totalSize"] == 1


async def test_a_daemon_that_ends_ends_its_streams_and_answers_who_waits() -> None:
    async with httpx.AsyncClient() as client:
        site = await start_site(client)
        task = await site.start()
        async with opened(site, "SubscribeToTask", {"id": task["id"]}) as response:
            lines = response.aiter_lines()
            assert await anext(lines) == "id: 1"
            held = asyncio.ensure_future(site.rpc("GetTask", {"id": task["id"], "currentGeneration": "1"}))
            await until(lambda: site.exchange.waits.total == 2)
            await site.daemon.stop()
            rest = [line async for line in lines]
        assert not any(line.startswith("id: ") for line in rest)
        assert (await held)["generation"] == "1"


async def test_who_is_thrown_out_hears_nothing_more(site: Site) -> None:
    task = await site.start()
    operator = site.exchange.authenticate(site.tokens["operator"])
    async with opened(site, "SubscribeToTask", {"id": task["id"]}) as response:
        lines = response.aiter_lines()
        assert await anext(lines) == "id: 1"
        await until(lambda: site.exchange.waits.total == 1)
        await site.exchange.trust.revoke_peer(operator, "alice@lab", "left")
        assert not any(line.startswith("id: ") for line in [line async for line in lines])


async def test_several_streams_of_one_task_tell_the_same_in_the_same_order(site: Site) -> None:
    task = await site.start()

    async def follow() -> list[tuple[str, dict[str, Any]]]:
        async with opened(site, "SubscribeToTask", {"id": task["id"]}, **{"Last-Event-ID": "1"}) as response:
            return await events_of(response.aiter_lines())

    following = [asyncio.ensure_future(follow()) for _ in range(3)]
    delivery = await site.lease()
    for n in range(20):
        await site.chunk(delivery, str(n), append=n > 0)
    await site.finish(delivery)
    told = await asyncio.gather(*following)
    assert [number for number, _ in told[0]] == [str(n) for n in range(2, 24)]
    assert told[1] == told[0] and told[2] == told[0]


async def test_the_operations_are_counted_by_their_names(site: Site) -> None:
    await site.start()
    numbers = (await site.client.get(f"{site.url}/metrics")).text
    assert 'covenant_requests_total{status="2xx",verb="SendMessage"} 1.0' in numbers


@pytest.mark.parametrize(
    ("headers", "said", "version"),
    [({}, None, "1.0"), (NEWER, None, None), ({}, "1.1", "1.1"), (NEWER, "1.0", "1.0")],
)
async def test_a_webhook_is_told_in_the_words_of_who_set_it(
    site: Site, headers: dict[str, str], said: str | None, version: str | None
) -> None:
    hook = {"id": "h-1", "url": "https://example.com/hook"} | ({} if said is None else {"protocolVersion": said})
    params = {
        "message": message(),
        "configuration": {"returnImmediately": True, "taskPushNotificationConfig": hook},
    }
    task = (await site.rpc("SendMessage", params, **headers))["task"]
    await site.rpc("CreateTaskPushNotificationConfig", {**hook, "taskId": task["id"], "id": "h-2"}, **headers)
    configs = await site.exchange.ask(site.exchange.operator(), ListPushes(None, task["id"]))
    assert [(config.id, config.protocol_version) for config in configs] == [("h-1", version), ("h-2", version)]


async def test_a_webhook_of_a_task_that_has_ended_is_kept_with_it(site: Site) -> None:
    task = await site.start()
    await site.finish(await site.lease())
    hook = {"taskId": task["id"], "id": "h-1", "url": "https://example.com/hook"}
    made = await site.rpc("CreateTaskPushNotificationConfig", hook)
    for _ in range(3):
        assert await site.rpc("GetTaskPushNotificationConfig", {"taskId": task["id"], "id": "h-1"}) == made


WRITTEN = '{"jsonrpc":"2.0","id":%s,"method":"%s","params":%s}'
PARAMS = '{"message":{"messageId":"m","role":"ROLE_USER","parts":[{"text":"a"}]},"tenant":"t","unknown":[{}]}'


@pytest.mark.parametrize(
    "body",
    [
        WRITTEN % (1, "SendMessage", PARAMS),
        WRITTEN % ('"é"', "SendStreamingMessage", PARAMS),
        WRITTEN % ("null", "GetTask", '{"id":"x","historyLength":3}'),
        WRITTEN % (1.5, "ListTasks", "{}"),
        '{"params":{"id":"x"},"method":"CancelTask","jsonrpc":"2.0","id":1,"more":1}',
    ],
)
def test_a_call_written_as_usual_is_read_as_any_other(body: str) -> None:
    call_id, call, params = jsonrpc.read(body.encode())
    assert jsonrpc.read_usual(body.encode()) == (call_id, call, jsonrpc.request_of(call, params))


@pytest.mark.parametrize(
    "body",
    [
        WRITTEN % (1, "SendMessage", PARAMS.replace("messageId", "message_id")),
        WRITTEN % (1, "ListTasks", '{"pageSize":"5"}'),
        WRITTEN % (1, "Nothing", "{}"),
        WRITTEN % ("true", "ListTasks", "{}"),
        WRITTEN % (1, "ListTasks", "[]"),
        WRITTEN.replace("2.0", "1.0") % (1, "ListTasks", "{}"),
        '{"jsonrpc":"2.0","method":"ListTasks","params":{}}',
        '{"jsonrpc":"2.0","id":1,"method":"ListTasks"}',
        "[]",
        "{",
        "\udcff",
    ],
)
def test_a_call_that_is_written_otherwise_is_left_to_the_long_way(body: str) -> None:
    assert jsonrpc.read_usual(body.encode(errors="surrogateescape")) is None
