"""Header values as RFC 9110 has them, on every surface: without the white space around them, and once where there is
one value. Each request is sent as bytes: clients repair what these tests are about."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest
import pytest_asyncio
from msgspec import Struct

from covenant.rules.header import SINGLE, headers_fault
from tests.a2a.bindings import Bindings, bindings
from tests.a2a.served import message

module_loop = pytest.mark.asyncio(loop_scope="module")
PATIENCE_S: Final = 20
SPACES: Final = (" ", "\t", "  \t ")
VALUES: Final = {  # of each single-valued header one that is good, and another
    "host": ("x", "y"),
    "authorization": ("Bearer {alice}", "Bearer {carol}"),
    "content-type": ("application/json", "text/plain"),
    "idempotency-key": ("k", "j"),
    "last-event-id": ("1", "2"),
    "a2a-version": ("1.0", "1.1"),
}
CALL: Final = {"jsonrpc": "2.0", "id": 1, "method": "ListTasks", "params": {}}
SURFACES: Final = {  # a request of each, which is answered with 200 as it is
    "mailbox": ("GET /whoami", None),
    "mailbox, by ASGI": ("GET /%77hoami", None),
    "mailbox, in chunks": ("GET /whoami", "chunked"),
    "JSON-RPC": ("POST /", CALL),
    "JSON-RPC, in chunks": ("POST /", "chunked"),
    "REST": ("GET /tasks", None),
    "card": ("GET /.well-known/agent-card.json", None),
    "health": ("GET /healthz", None),
    "version": ("GET /version", None),
    "events": ("GET /a2a/events", None),
    "metrics": ("GET /metrics", None),
    "description": ("GET /openapi.json", None),
}


class Told(Struct):
    status: int
    head: bytes
    body: bytes


class Site:
    def __init__(self, here: Bindings) -> None:
        self.here = here

    def request(self, line: str, body: Any, headers: dict[str, str], *more: str, http: str = "1.1") -> bytes:
        data = b"" if body is None else json.dumps(CALL if body == "chunked" else body).encode()
        head = [f"{line} HTTP/{http}", *(f"{name}: {value}" for name, value in headers.items()), *more]
        if body == "chunked":
            head.append("Transfer-Encoding: chunked")
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
        elif body is not None:
            head.append(f"Content-Length: {len(data)}")
        said = "\r\n".join([*head, "", ""])
        for name, token in self.here.site.tokens.items():
            said = said.replace(f"{{{name}}}", token)
        return said.encode() + data

    async def told(self, said: bytes) -> Told:
        """The head of the answer and what came with it; a stream has no end."""
        address = self.here.site.daemon.address
        assert address is not None
        reader, writer = await asyncio.open_connection(*address)
        writer.write(said)
        async with asyncio.timeout(PATIENCE_S):
            head = await reader.readuntil(b"\r\n\r\n")
            length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
            body = await reader.readexactly(int(length[0].partition(b":")[2])) if length else b""
        writer.close()
        return Told(int(head[9:12]), head, body)


def usual(**other: str) -> dict[str, str]:
    """The headers that every surface is content with."""
    given = {"host": "x", "authorization": "Bearer {alice}", "a2a-version": "1.0", "content-type": "application/json"}
    return {**given, **other}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def site() -> AsyncIterator[Site]:
    async with bindings() as here:
        yield Site(here)


def test_the_table_of_single_values_has_an_example_of_each() -> None:
    assert set(VALUES) == SINGLE


@module_loop
@pytest.mark.parametrize("surface", SURFACES)
async def test_each_surface_answers_the_plain_request(site: Site, surface: str) -> None:
    line, body = SURFACES[surface]
    for space in ("", *SPACES):
        spaced = {name: f"{space}{value}{space}" for name, value in usual().items()}
        told = await site.told(site.request(line, body, spaced))
        assert (told.status, b'"error"' in told.body[:60]) == (200, False)


@module_loop
@pytest.mark.parametrize("surface", SURFACES)
async def test_a_header_that_has_one_value_is_not_given_twice(site: Site, surface: str) -> None:
    """In whichever order, alike or not: who stands in between may have read the other one."""
    line, body = SURFACES[surface]
    answers = []
    for name, (good, other) in VALUES.items():
        for first, second in ((good, other), (other, good), (good, good), (good, "")):
            headers = {**usual(), name: first}
            told = await site.told(site.request(line, body, headers, f"{name.title()}: {second}"))
            answers.append((name, told.status))
            answer = json.loads(told.body)
            if surface.startswith("JSON-RPC"):
                assert answer["error"]["code"] == -32602
            elif surface in ("REST", "card"):
                assert answer["error"]["details"][0]["reason"] == "INVALID_PARAMS"
            else:
                assert (answer["kind"], answer["code"], answer["field"]) == ("error", "malformed", name)
    assert answers == [(name, 400) for name in VALUES for _ in range(4)]


@module_loop
@pytest.mark.parametrize("surface", SURFACES)
async def test_a_request_of_http_1_1_has_a_host(site: Site, surface: str) -> None:
    line, body = SURFACES[surface]
    headers = usual()
    del headers["host"]
    assert (await site.told(site.request(line, body, headers))).status == 400
    if body != "chunked":  # which the older version does not have
        assert (await site.told(site.request(line, body, headers, http="1.0"))).status == 200


@module_loop
@pytest.mark.parametrize("name", ["A2A-Extensions", "Accept", "X-Anything"])
async def test_a_header_that_is_a_list_may_come_several_times(site: Site, name: str) -> None:
    told = await site.told(site.request("GET /tasks", None, usual(), f"{name}: urn:a", f"{name}: urn:b"))
    assert told.status == 200


@module_loop
async def test_a_bad_head_is_refused_each_time_that_it_comes(site: Site) -> None:
    address = site.here.site.daemon.address
    assert address is not None
    reader, writer = await asyncio.open_connection(*address)
    said = site.request("GET /whoami", None, usual(), "Host: y")
    for _ in range(3):
        writer.write(said)
        async with asyncio.timeout(PATIENCE_S):
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 400 ")
            await reader.readuntil(b"}")
    writer.close()


@module_loop
@pytest.mark.parametrize("name", sorted(SINGLE - {"host", "content-type"}))
async def test_what_comes_behind_a_body_is_no_header(site: Site, name: str) -> None:
    """A trailer neither adds a value nor stands in for one (RFC 9110, 6.5.1)."""
    data = json.dumps(CALL).encode()
    trailer = site.request(f"{name}: {VALUES[name][1]}", None, {}).partition(b" HTTP/")[0]
    for headers, status in ((usual(), 200), ({k: v for k, v in usual().items() if k != "authorization"}, 401)):
        head = site.request("POST /", None, headers, "Transfer-Encoding: chunked")
        whole = b"%b%x\r\n%b\r\n0\r\n%b\r\n\r\n" % (head, len(data), data, trailer)
        assert (await site.told(whole)).status == status


# --- what a value means -------------------------------------------------------------------------------------


@module_loop
async def test_white_space_around_a_key_makes_no_second_task(site: Site) -> None:
    params = {"message": message(), "configuration": {"returnImmediately": True}}
    call = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": params}
    found = set()
    for line, body in (("POST /", call), ("POST /message:send", params)):
        for key in ("spaced", *(f"{left}spaced{right}" for left in ("", *SPACES) for right in SPACES)):
            told = await site.told(site.request(line, body, usual(**{"idempotency-key": key})))
            answer = json.loads(told.body)
            found.add((answer.get("result") or answer)["task"]["id"])
    by_grpc = await site.here.call("GRPC", "SendMessage", params, ("idempotency-key", "spaced  "))
    assert found == {by_grpc.result["task"]["id"]}


@module_loop
async def test_white_space_around_a_cursor_is_no_part_of_it(site: Site) -> None:
    task_id = (await site.here.site.start())["id"]
    for line in (f"GET /tasks/{task_id}:subscribe", "GET /a2a/events"):
        for space in SPACES:
            told = await site.told(site.request(line, None, usual(**{"last-event-id": f"{space}0{space}"})))
            assert (told.status, b"text/event-stream" in told.head) == (200, True)


@module_loop
async def test_white_space_inside_a_value_is_part_of_it(site: Site) -> None:
    for name, value in (("a2a-version", "1. 0"), ("last-event-id", "1 2"), ("content-type", "application /json")):
        told = await site.told(site.request("POST /", CALL, usual(**{name: value})))
        assert "error" in json.loads(told.body)


# --- metadata of gRPC ---------------------------------------------------------------------------------------


@module_loop
@pytest.mark.parametrize("name", sorted(SINGLE - {"host", "content-type"}))  # which gRPC has by other ways
async def test_an_entry_of_metadata_that_has_one_value_is_not_given_twice(site: Site, name: str) -> None:
    tokens = site.here.site.tokens
    good, other = (value.format(**tokens) for value in VALUES[name])
    for first, second in ((good, other), (other, good), (good, good)):
        told = {"authorization": f"Bearer {tokens['alice']}", "a2a-version": "1.0", name: first}
        answer = await site.here.rpc("ListTasks", b"", [*told.items(), (name, second)])
        assert (answer.code, answer.reason, answer.fields) == ("INVALID_ARGUMENT", "INVALID_PARAMS", [name])


@module_loop
async def test_white_space_around_metadata_is_no_part_of_it(site: Site) -> None:
    told = {"authorization": f"Bearer {site.here.site.tokens['alice']} ", "a2a-version": "1.0  "}
    assert (await site.here.rpc("ListTasks", b"", [*told.items()])).reason is None


# --- the rule -----------------------------------------------------------------------------------------------


def test_the_rule_names_the_header_that_is_wrong() -> None:
    for name in SINGLE:
        fault = headers_fault([name, "host", name] if name != "host" else [name, name], needs_host=True)
        assert fault is not None and fault.details["field"] == name
    assert headers_fault(["authorization"], needs_host=False) is None
    missing = headers_fault(["authorization"], needs_host=True)
    assert missing is not None and missing.details["field"] == "host"
    assert headers_fault(["accept", "accept"], needs_host=False) is None
