"""Versions of the protocol are negotiated before anything else of a request is read, in the three bindings.
(Specification 3.6.)"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest
import pytest_asyncio

from covenant.a2a import wire
from covenant.model.message import Message, Part
from covenant.serve.a2a import dialect, parameters
from tests.a2a.bindings import BINDINGS, Bindings, bindings
from tests.a2a.served import message

pytestmark = pytest.mark.asyncio(loop_scope="module")

AGREED: Final = {"1.0": False, "1.0.1": False, "1.1": True, "1.1.0": True}  # and whether generations are shown


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def here() -> AsyncIterator[Bindings]:
    async with bindings() as found:
        yield found


@pytest.mark.parametrize("binding", BINDINGS)
@pytest.mark.parametrize("said", AGREED)
async def test_a_request_is_answered_in_the_words_of_its_version(here: Bindings, binding: str, said: str) -> None:
    sent = {"message": message(), "configuration": {"returnImmediately": True}}
    answer = await here.call(binding, "SendMessage", sent, version=said)
    shows = "generation" in answer.result["task"]
    assert shows is (AGREED[said] or binding == "GRPC")  # protobuf has the field, and clients pass over it


WRONG: Final[dict[str, dict[str, Any]]] = {  # each of them is refused for another reason by who speaks 1.0
    "SendMessage": {},
    "ListTasks": {"pageSize": 1_000},
    "GetTask": {"id": "nonsense", "historyLength": -1},
    "SendStreamingMessage": {"message": {"messageId": "m-1", "role": "ROLE_USER"}},
    "SubscribeToTask": {"id": "nonsense"},
    "CreateTaskPushNotificationConfig": {"taskId": "nonsense"},
}


@pytest.mark.parametrize("binding", BINDINGS)
@pytest.mark.parametrize("said", [None, "", "0.3", "99.0", "1.0.x"])
async def test_a_client_of_another_version_hears_nothing_else_first(
    here: Bindings, binding: str, said: str | None
) -> None:
    heard = set()
    for operation, params in WRONG.items():
        for given, headers in ((params, ()), (params, (("Last-Event-ID", "x"),)), ({**params, "tenant": "nobody"}, ())):
            answer = await here.call(binding, operation, given, *headers, version=said)
            heard.add((answer.reason, answer.code))
            known = await here.call(binding, operation, given, *headers, version="1.0")
            assert known.reason not in (None, "VERSION_NOT_SUPPORTED")
    code = {"JSONRPC": -32009, "HTTP+JSON": 400, "GRPC": "FAILED_PRECONDITION"}[binding]
    assert heard == {("VERSION_NOT_SUPPORTED", code)}


OLD: Final = {
    "message": {"kind": "message", "messageId": "m", "role": "user", "parts": [{"kind": "text", "text": "x"}]}
}


@pytest.mark.parametrize(
    ("path", "content", "kind"),
    [
        ("/", {"jsonrpc": "2.0", "id": 7, "method": "message/send", "params": OLD}, "application/json"),
        ("/", {"jsonrpc": "2.0", "id": 7, "method": "SendMessage", "params": OLD}, "application/json"),
        ("/", {"jsonrpc": "2.0", "id": 7, "method": "SendMessage"}, "text/plain"),
        ("/", [{"jsonrpc": "2.0", "id": 7}], "application/json"),
        ("/message:send", OLD, "application/json"),
        ("/v1/message:send", OLD, "application/json"),
        ("/agents/nobody/message:send", OLD, "text/plain"),
        ("/message:send?x=1&x=2", OLD, "application/json"),
    ],
)
async def test_what_a_client_of_version_0_3_sends_is_told_the_version(
    here: Bindings, path: str, content: Any, kind: str
) -> None:
    for data in (json.dumps(content).encode(), b"{"):
        answer = await here.http("POST", path, [("Content-Type", kind), *here.site.auth("alice").items()], data)
        assert answer.reason == "VERSION_NOT_SUPPORTED"


@pytest.mark.parametrize("size", [10, 100_000])  # the larger one is read as it comes
async def test_the_refusal_has_the_id_of_its_call(here: Bindings, size: int) -> None:
    call = {"jsonrpc": "2.0", "id": 7, "method": "message/send", "params": "x" * size}
    response = await here.site.post(json.dumps(call).encode(), **{"A2A-Version": "0.3"})
    assert (response.json()["id"], response.json()["error"]["code"]) == (7, -32009)


async def test_the_version_may_be_in_the_query_and_the_header_stands_above_it(here: Bindings) -> None:
    for query, header, is_spoken in (
        ("1.0", None, True),
        ("1.0.1", "", True),
        ("0.3", None, False),
        ("0.3", "1.0", True),
        ("1.0", "0.3", False),
    ):
        told = [*here.site.auth("alice").items()] + ([] if header is None else [("A2A-Version", header)])
        answer = await here.http("GET", f"/tasks?A2A-Version={query}", told, None)
        assert (answer.reason is None) is is_spoken


@pytest.mark.parametrize("binding", BINDINGS)
async def test_a_stranger_is_a_stranger_whatever_it_speaks(here: Bindings, binding: str) -> None:
    answer = await here.call(binding, "ListTasks", version="0.3", who=None)
    assert answer.reason == "UNAUTHENTICATED"


async def test_a_guard_is_a_sign_that_the_client_knows_generations() -> None:
    """Contract 16: an answer to it shows the generation also where no header names the extension."""
    said = parameters.read({"a2a-version": "1.0"})
    message = Message(message_id="m", role="ROLE_USER", parts=(Part(text="x"),))
    for guard in (None, 1):
        settings = wire.Configuration(if_generation_match=guard)
        request = wire.SendMessage(message=message, configuration=settings)
        assert dialect.knows_generations(said, request) is (guard is not None)
