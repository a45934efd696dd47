"""A message with a part of a type that the agent's card does not name is refused, in the three bindings.
(Specification 3.1.1.)"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.a2a.bindings import BINDINGS, Bindings, bindings
from tests.a2a.served import message

pytestmark = pytest.mark.asyncio(loop_scope="module")
CARD = {
    "name": "writer",
    "defaultInputModes": ["text/plain", "application/json"],
    "skills": [{"id": "s", "name": "s", "description": "s", "tags": ["s"], "inputModes": ["image/*"]}],
}
NOW = {"returnImmediately": True}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def here() -> AsyncIterator[Bindings]:
    async with bindings(CARD) as found:
        yield found


def of(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"message": {**message(**more), "parts": list(parts)}, "configuration": NOW}


@pytest.mark.parametrize("binding", BINDINGS)
async def test_a_part_of_another_type_is_refused_and_nothing_is_sent(here: Bindings, binding: str) -> None:
    before = (await here.call(binding, "ListTasks")).result.get("totalSize", 0)
    wrong = {"raw": "AAAA", "mediaType": "application/x-unsupported-type"}
    code = {"JSONRPC": -32005, "HTTP+JSON": 400, "GRPC": "INVALID_ARGUMENT"}[binding]
    for operation in ("SendMessage", "SendStreamingMessage"):
        for parts in ((wrong,), ({"text": "look"}, wrong)):
            answer = await here.call(binding, operation, of(*parts))
            assert (answer.code, answer.reason) == (code, "CONTENT_TYPE_NOT_SUPPORTED")
            assert answer.metadata == {"mediaType": "application/x-unsupported-type"}
    assert (await here.call(binding, "ListTasks")).result.get("totalSize", 0) == before


@pytest.mark.parametrize("binding", BINDINGS)
async def test_a_message_to_a_task_is_held_to_the_same(here: Bindings, binding: str) -> None:
    task_id = (await here.site.start())["id"]
    wrong = of({"text": "x", "mediaType": "text/markdown"}, taskId=task_id)
    assert (await here.call(binding, "SendMessage", wrong)).reason == "CONTENT_TYPE_NOT_SUPPORTED"
    assert (await here.call(binding, "GetTask", {"id": task_id})).result["generation"] == "1"


@pytest.mark.parametrize("binding", BINDINGS)
@pytest.mark.parametrize(
    "part",
    [
        {"text": "x"},
        {"data": {"a": 1}},
        {"raw": "AAAA"},
        {"url": "https://example.com/x"},
        {"raw": "AAAA", "mediaType": "image/png"},
        {"text": "x", "mediaType": "text/plain; charset=utf-8"},
    ],
)
async def test_what_the_card_takes_is_taken(here: Bindings, binding: str, part: dict[str, Any]) -> None:
    assert (await here.call(binding, "SendMessage", of(part))).reason is None


@pytest.mark.parametrize("binding", BINDINGS)
async def test_an_agent_whose_card_says_nothing_takes_everything(here: Bindings, binding: str) -> None:
    sent = {**of({"raw": "AAAA", "mediaType": "application/x-unsupported-type"}), "tenant": "editor@lab"}
    assert (await here.call(binding, "SendMessage", sent)).reason is None
