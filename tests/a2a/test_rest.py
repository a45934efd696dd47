"""The HTTP+JSON binding as a client sees it on the wire."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

import pytest

from covenant import Text
from covenant.model.task import Result
from tests.a2a.served import NEWER, VERSION, Site, events_of, message

ABSENT = "00000000-0000-4000-8000-000000000000"
SEND = {"message": message(), "configuration": {"returnImmediately": True}}


def error_of(response: Any, status: int, name: str) -> dict[str, Any]:
    """google.rpc.Status, as AIP-193 wraps it."""
    error: dict[str, Any] = response.json()["error"]
    assert (response.status_code, error["code"], error["status"]) == (status, status, name)
    assert error["message"]
    assert error["details"][0]["@type"] == "type.googleapis.com/google.rpc.ErrorInfo"
    return error


async def test_a_message_is_sent_worked_on_and_answered(site: Site) -> None:
    sending = asyncio.ensure_future(site.rest("POST", "/message:send", {"message": message()}, **NEWER))
    delivery = await site.lease()
    await site.finish(delivery, Result.ok(delivery, [Text("the brief")]))
    task = (await sending).json()["task"]
    assert (task["status"]["state"], task["generation"]) == ("TASK_STATE_COMPLETED", "4")
    found = await site.rest("GET", f"/tasks/{task['id']}", **NEWER)
    assert found.json() == task
    short = await site.rest("GET", f"/tasks/{task['id']}?historyLength=0")
    assert "history" not in short.json() and "generation" not in short.json()


@pytest.mark.parametrize("prefix", ["", "/writer@lab", "/agents/writer@lab", "/agents/writer@lab/writer@lab"])
async def test_every_operation_has_its_path_also_below_an_agent_and_a_tenant(site: Site, prefix: str) -> None:
    task = (await site.rest("POST", f"{prefix}/message:send", SEND)).json()["task"]
    place = f"{prefix}/tasks/{task['id']}"
    assert (await site.rest("GET", place)).json()["id"] == task["id"]
    assert (await site.rest("GET", f"{prefix}/tasks")).json()["totalSize"] == 1
    hook = {"id": "h-1", "url": "https://example.com/hook"}
    made = (await site.rest("POST", f"{place}/pushNotificationConfigs", hook)).json()
    assert made == {**hook, "taskId": task["id"]}
    assert (await site.rest("GET", f"{place}/pushNotificationConfigs/h-1")).json() == made
    assert (await site.rest("GET", f"{place}/pushNotificationConfigs")).json() == {"configs": [made]}
    for _ in range(2):
        dropped = await site.rest("DELETE", f"{place}/pushNotificationConfigs/h-1")
        assert (dropped.status_code, dropped.json()) == (200, {})
    assert (await site.rest("GET", f"{prefix}/extendedAgentCard")).json()["name"] == "writer"
    assert (await site.rest("POST", f"{place}:cancel")).json()["status"]["state"] == "TASK_STATE_CANCELED"


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_subscription_is_a_get_or_a_post(site: Site, method: str) -> None:
    task = await site.start()
    delivery = await site.lease()
    headers = {**VERSION, **site.auth("alice")}
    async with site.client.stream(method, f"{site.url}/tasks/{task['id']}:subscribe", headers=headers) as response:
        assert response.headers["content-type"] == "text/event-stream"
        await site.chunk(delivery, "one")
        await site.finish(delivery)
        events = await events_of(response.aiter_lines())
    assert [number for number, _ in events] == ["2", "3", "4"]
    assert [next(iter(told)) for _, told in events] == ["task", "artifactUpdate", "statusUpdate"]


async def test_a_stream_is_resumed_and_needs_no_snapshot(site: Site) -> None:
    """Contract 17."""
    task = await site.start()
    await site.finish(await site.lease())
    headers = {**VERSION, **site.auth("alice"), "Last-Event-ID": "1"}
    async with site.client.stream("GET", f"{site.url}/tasks/{task['id']}:subscribe", headers=headers) as response:
        events = await events_of(response.aiter_lines())
    assert [(number, told["statusUpdate"]["generation"]) for number, told in events] == [("2", "2"), ("3", "3")]


async def test_a_stream_that_has_nothing_to_tell_yet_begins_all_the_same(site: Site) -> None:
    """Who comes back at the end of what there is sees that somebody listens."""
    task = await site.start()
    headers = {**VERSION, **site.auth("alice"), "Last-Event-ID": "1"}
    async with (
        asyncio.timeout(10),
        site.client.stream("GET", f"{site.url}/tasks/{task['id']}:subscribe", headers=headers) as response,
    ):
        assert response.status_code == 200
        await site.finish(await site.lease())
        assert [number for number, _ in await events_of(response.aiter_lines())] == ["2", "3"]


async def test_a_message_may_be_answered_by_a_stream(site: Site) -> None:
    headers = {**VERSION, **site.auth("alice")}
    place = f"{site.url}/message:stream"
    async with site.client.stream("POST", place, json={"message": message()}, headers=headers) as response:
        await site.finish(await site.lease())
        events = await events_of(response.aiter_lines())
    assert next(iter(events[0][1])) == "task"
    assert events[-1][1]["statusUpdate"]["status"]["state"] == "TASK_STATE_COMPLETED"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "name"),
    [
        ("GET", f"/tasks/{ABSENT}", None, 404, "NOT_FOUND"),
        ("GET", "/tasks/nonsense", None, 404, "NOT_FOUND"),
        ("GET", "/nobody/tasks", None, 404, "NOT_FOUND"),
        ("GET", "/agents/nobody/tasks", None, 404, "NOT_FOUND"),
        ("GET", "/agents/writer@lab/editor@lab/tasks", None, 400, "INVALID_ARGUMENT"),
        ("GET", "/tasks?pageSize=many", None, 400, "INVALID_ARGUMENT"),
        ("GET", "/tasks?pageSize=101", None, 400, "INVALID_ARGUMENT"),
        ("GET", "/tasks?pageSize=1&pageSize=2", None, 400, "INVALID_ARGUMENT"),
        ("GET", "/tasks?status=BUSY", None, 400, "INVALID_ARGUMENT"),
        ("GET", "/tasks?statusTimestampAfter=yesterday", None, 400, "INVALID_ARGUMENT"),
        ("GET", "/tasks?includeArtifacts=perhaps", None, 400, "INVALID_ARGUMENT"),
        ("GET", "/tasks?pageToken=x", None, 400, "INVALID_ARGUMENT"),
        ("GET", f"/tasks/{ABSENT}?historyLength=-1", None, 400, "INVALID_ARGUMENT"),
        ("POST", "/message:send", {}, 400, "INVALID_ARGUMENT"),
        ("POST", "/message:send", [], 400, "INVALID_ARGUMENT"),
        ("POST", "/message:send", None, 400, "INVALID_ARGUMENT"),
        ("POST", "/message:stream", {"message": message(taskId=ABSENT)}, 404, "NOT_FOUND"),
        ("POST", f"/tasks/{ABSENT}:cancel", {}, 404, "NOT_FOUND"),
        ("POST", f"/tasks/{ABSENT}:subscribe", None, 404, "NOT_FOUND"),
        ("GET", f"/tasks/{ABSENT}/pushNotificationConfigs/x", None, 404, "NOT_FOUND"),
        ("GET", "/message:send", None, 405, "UNIMPLEMENTED"),
        ("DELETE", f"/tasks/{ABSENT}", None, 405, "UNIMPLEMENTED"),
        ("GET", "/agents/writer@lab/nothing", None, 404, "UNIMPLEMENTED"),
        ("GET", "/agents/writer@lab", None, 405, "UNIMPLEMENTED"),
        ("POST", f"/tasks/{ABSENT}:explode", {}, 405, "UNIMPLEMENTED"),
    ],
)
async def test_what_is_wrong_gets_a_status_and_its_details(
    site: Site, method: str, path: str, body: Any, status: int, name: str
) -> None:
    error_of(await site.rest(method, path, body), status, name)


async def test_a_wrong_method_says_which_are_right(site: Site) -> None:
    response = await site.rest("PUT", f"/tasks/{ABSENT}:subscribe", {})
    assert (response.status_code, response.headers["allow"]) == (405, "GET, POST")
    (info,) = response.json()["error"]["details"]
    assert info["metadata"] == {"allow": '["GET","POST"]', "code": "wrong_method"}


async def test_a_body_that_is_no_json_is_an_error(site: Site) -> None:
    headers = {**VERSION, **site.auth("alice"), "Content-Type": "application/json"}
    response = await site.client.post(f"{site.url}/message:send", content=b"{", headers=headers)
    error = error_of(response, 400, "INVALID_ARGUMENT")
    assert error["details"][0]["reason"] == "PARSE_ERROR"


async def test_a_webhook_has_a_name_that_a_path_can_carry(site: Site) -> None:
    task = (await site.rest("POST", "/message:send", SEND)).json()["task"]
    hooks = f"/tasks/{task['id']}/pushNotificationConfigs"
    for name in ("a/b", "/", ".", ".."):
        response = await site.rest("POST", hooks, {"id": name, "url": "https://example.com/hook"})
        error_of(response, 400, "INVALID_ARGUMENT")
    for name in ("a b", "a%2Fb", "...", "ä?#", "a:b"):
        response = await site.rest("POST", hooks, {"id": name, "url": "https://example.com/hook"})
        assert response.json()["id"] == name
        assert (await site.rest("GET", f"{hooks}/{quote(name, safe='')}")).json()["id"] == name
        assert (await site.rest("DELETE", f"{hooks}/{quote(name, safe='')}")).status_code == 200
    assert (await site.rest("GET", hooks)).json()["configs"] == []


@pytest.mark.parametrize("spelled", ["taskId", "task_id"])
async def test_the_task_in_the_path_is_the_one_that_is_meant(site: Site, spelled: str) -> None:
    """Whatever the body or the query says beside it, in either spelling."""
    meant, other = [(await site.start())["id"] for _ in range(2)]
    hooks = f"/tasks/{meant}/pushNotificationConfigs"
    hook = {"id": "h-1", "url": "https://example.com/hook"}
    made = await site.rest("POST", hooks, {spelled: other, **hook})
    assert made.json() == {**hook, "taskId": meant}
    assert (await site.rest("GET", f"{hooks}/h-1?{spelled}={other}")).json() == made.json()
    assert (await site.rest("GET", f"/tasks/{other}/pushNotificationConfigs")).json() == {"configs": []}


async def test_a_number_that_there_is_not_is_wrong_input(site: Site) -> None:
    headers = {**VERSION, **site.auth("alice"), "Content-Type": "application/json"}
    for path in ("/message:send", f"/tasks/{ABSENT}:cancel"):
        content = b'{"message":{"messageId":"m","role":"ROLE_USER","parts":[{"data":1e400}]},"metadata":{"a":1e400}}'
        response = await site.client.post(f"{site.url}{path}", content=content, headers=headers)
        error = error_of(response, 400, "INVALID_ARGUMENT")
        assert error["details"][0]["reason"] == "INVALID_PARAMS"


async def test_a_body_of_another_type_is_refused(site: Site) -> None:
    response = await site.rest("POST", "/message:send", SEND, **{"Content-Type": "text/plain"})
    assert error_of(response, 415, "INVALID_ARGUMENT")["details"][0]["reason"] == "CONTENT_TYPE_NOT_SUPPORTED"


@pytest.mark.parametrize(
    ("headers", "answer", "error"),
    [
        ({"Content-Type": "application/json"}, "application/json", "application/json"),
        ({"Content-Type": "application/a2a+json"}, "application/a2a+json", "application/a2a+json"),
        ({}, "application/a2a+json", "application/json"),
        ({"Accept": "application/json"}, "application/json", "application/json"),
        ({"Accept": "application/a2a+json"}, "application/a2a+json", "application/a2a+json"),
    ],
)
async def test_a_client_is_answered_in_the_media_type_that_it_uses(
    site: Site, headers: dict[str, str], answer: str, error: str
) -> None:
    assert (await site.rest("GET", "/tasks", **headers)).headers["content-type"] == answer
    assert (await site.rest("GET", f"/tasks/{ABSENT}", **headers)).headers["content-type"] == error


async def test_who_says_not_who_it_is_is_not_let_in(site: Site) -> None:
    response = await site.rest("GET", "/tasks", who=None)
    error_of(response, 401, "UNAUTHENTICATED")
    assert response.headers["www-authenticate"] == "Bearer"


async def test_the_tasks_of_another_client_are_not_there(site: Site) -> None:
    task = await site.start()
    hidden = error_of(await site.rest("GET", f"/tasks/{task['id']}", who="carol"), 404, "NOT_FOUND")
    missing = error_of(await site.rest("GET", f"/tasks/{ABSENT}", who="carol"), 404, "NOT_FOUND")
    assert hidden["message"].replace(task["id"], ABSENT) == missing["message"]
    assert list(hidden["details"][0]["metadata"]) == list(missing["details"][0]["metadata"])


async def test_the_version_is_looked_at_and_may_stand_in_the_query(site: Site) -> None:
    refused = await site.rest("GET", "/tasks", **{"A2A-Version": "99.0"})
    assert error_of(refused, 400, "FAILED_PRECONDITION")["details"][0]["reason"] == "VERSION_NOT_SUPPORTED"
    assert (await site.rest("GET", "/tasks?A2A-Version=1.0", **{"A2A-Version": ""})).status_code == 200


async def test_tasks_are_listed_by_what_the_query_says(site: Site) -> None:
    for n in range(3):
        await site.start(f"task {n}", contextId=f"c-{n % 2}")
    delivery = await site.lease()
    await site.finish(delivery, Result.ok(delivery, [Text("done")]))

    async def listed(query: str) -> dict[str, Any]:
        found: dict[str, Any] = (await site.rest("GET", f"/tasks?{query}")).json()
        return found

    assert (await listed("contextId=c-0"))["totalSize"] == 2
    assert (await listed("status=TASK_STATE_COMPLETED"))["totalSize"] == 1
    assert (await listed("status=TASK_STATE_COMPLETED&includeArtifacts=true"))["tasks"][0]["artifacts"]
    assert "artifacts" not in (await listed("status=TASK_STATE_COMPLETED&includeArtifacts=false"))["tasks"][0]
    assert (await listed("statusTimestampAfter=2100-01-01T00:00:00Z"))["totalSize"] == 0
    page = await listed("pageSize=2")
    assert (len(page["tasks"]), page["pageSize"], page["totalSize"]) == (2, 2, 3)
    rest = await listed(f"pageSize=2&pageToken={page['nextPageToken']}")
    assert (len(rest["tasks"]), rest["nextPageToken"]) == (1, "")


async def test_a_poll_is_held_until_the_generation_is_higher(site: Site) -> None:
    """Contract 15."""
    task = await site.start()
    held = asyncio.ensure_future(site.rest("GET", f"/tasks/{task['id']}?currentGeneration=1"))
    await site.lease()
    assert (await held).json()["generation"] == "2"


async def test_the_mailbox_keeps_its_routes(site: Site) -> None:
    assert (await site.rest("GET", "/whoami")).json()["agent"]["display"] == "alice@lab"
    assert (await site.rest("GET", "/a2a/tasks/recent")).json()["kind"] == "a2a_tasks"
    assert (await site.rest("GET", "/healthz", who=None)).status_code == 200
    assert (await site.rest("GET", "/nothing/at/all")).json()["code"] == "unknown_route"
