"""Numbers of the protocol as ProtoJSON has them, the same in the three bindings. (Specification 3.2.7, 5.5.)"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any, Final
from urllib.parse import quote

import pytest
import pytest_asyncio
from google.protobuf import json_format
from hypothesis import example, given
from hypothesis import strategies as st

from covenant.a2a.names import INT32, INT64, whole
from covenant.model import command as c
from covenant.serve.a2a.proto import SERVICE, class_of
from tests.a2a.bindings import BINDINGS, Bindings, bindings
from tests.a2a.served import message
from tests.until import until

module_loop = pytest.mark.asyncio(loop_scope="module")
EDGES: Final = (0, 1, -1, 2**31 - 1, 2**31, -(2**31), 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**30)
NONE: Final = (
    "",
    " ",
    "-",
    "+1",
    " 1",
    "1 ",
    "1_0",
    "0x1",
    "007",
    "1.",
    ".5",
    "1e",
    "nan",
    "Infinity",
    "\uff11",
    "1,0",
)
digits = st.integers(-(10**22), 10**22) | st.sampled_from(EDGES)


@st.composite
def decimals(draw: st.DrawFn) -> str:
    """A number as JSON writes it: whole or not, with or without an exponent."""
    text = str(draw(digits))
    if draw(st.booleans()):
        text += "." + draw(st.text("0", min_size=1, max_size=3) | st.text("0123456789", min_size=1, max_size=25))
    if draw(st.booleans()):
        text += draw(st.sampled_from("eE")) + draw(st.sampled_from(("", "+", "-"))) + str(draw(st.integers(0, 30)))
    return text


def worth(text: str, bits: int) -> int | None:
    """Return the number by another way than the one that is tested."""
    value = Decimal(text)
    is_whole = value == value.to_integral_value()
    return int(value) if is_whole and -(2 ** (bits - 1)) <= value < 2 ** (bits - 1) else None


def read(value: Any, bits: int) -> int | None:
    try:
        return whole(value, bits)
    except ValueError:
        return None


@given(decimals(), st.sampled_from((INT32, INT64)))
@example("1.0", INT64)
@example("1e0", INT64)
@example("1.5", INT64)
@example("15e-1", INT64)
@example("10e-1", INT64)
@example("0.10e1", INT64)
@example("-0.0", INT64)
@example("9223372036854775807.0", INT64)
@example("9223372036854775808", INT64)
@example("922337203685477580.8e1", INT64)
@example("0e9999", INT64)
@example("1e9999", INT64)
@example("1e-9999", INT64)
def test_a_number_in_a_string_is_worth_what_it_says(text: str, bits: int) -> None:
    assert read(text, bits) == worth(text, bits)


@given(st.integers() | st.sampled_from(EDGES), st.sampled_from((INT32, INT64)))
def test_a_number_is_taken_where_it_fits(value: int, bits: int) -> None:
    fits = -(2 ** (bits - 1)) <= value < 2 ** (bits - 1)
    assert read(value, bits) == (value if fits else None)
    assert read(str(value), bits) == read(value, bits)


@given(st.floats())
@example(2.0**63)
@example(-(2.0**63))
def test_a_number_with_a_point_is_the_double_that_json_means(value: float) -> None:
    fits = value.is_integer() and -(2**63) <= value < 2**63
    assert read(value, INT64) == (int(value) if fits else None)


@pytest.mark.parametrize("text", NONE)
def test_what_is_no_number_is_refused(text: str) -> None:
    assert read(text, INT64) is None


# --- through a daemon ---------------------------------------------------------------------------------------


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def here() -> AsyncIterator[Bindings]:
    async with bindings() as found:
        yield found


async def outcomes(here: Bindings, operation: str, params: dict[str, Any], name: str, raw: str) -> dict[str, Any]:
    """Return the answer of each binding to this JSON in the member `name`; of gRPC if the number fits its field."""
    path = {"GetTask": "/tasks/{id}", "ListTasks": "/tasks", "SendMessage": "/message:send"}[operation]
    told = [*here.site.auth("alice").items(), ("A2A-Version", "1.1"), ("Content-Type", "application/json")]
    member = json.dumps(params).replace(f'"{name}": null', f'"{name}": {raw}')
    call = f'{{"jsonrpc": "2.0", "id": 1, "method": "{operation}", "params": {member}}}'
    found = {"JSONRPC": await here.http("POST", "/", told, call.encode())}
    if operation == "SendMessage":
        found["HTTP+JSON"] = await here.http("POST", path, told, member.encode())
    else:
        text = json.loads(raw) if raw.startswith('"') else raw
        place = path.format(id=params.get("id"))
        found["HTTP+JSON"] = await here.http("GET", f"{place}?{name}={quote(text)}", told[:2], None)
    method = SERVICE.methods_by_name[operation]
    number = worth(json.loads(raw) if raw.startswith('"') else raw, INT64)
    if number is not None:
        plain = json.loads(member.replace(f'"{name}": {raw}', f'"{name}": {number}'))
        try:
            request = json_format.ParseDict(plain, class_of(method.input_type)())
        except json_format.ParseError:  # it does not fit
            return {binding: answer.reason for binding, answer in found.items()}
        found["GRPC"] = await here.rpc(operation, request.SerializeToString(), told[:2])
    return {binding: answer.reason for binding, answer in found.items()}


FORMS: Final = ("{}", '"{}"', "{}.0", '"{}.0"', "{}e0", '"{}e0"')


@module_loop
@pytest.mark.parametrize("form", FORMS)
async def test_the_bindings_take_the_same_numbers_in_every_form(here: Bindings, form: str) -> None:
    """Each is taken by all three or by none; what gRPC cannot say is refused by the other two."""
    task_id = (await here.site.start())["id"]
    asked = {
        "currentGeneration": ("GetTask", {"id": task_id, "currentGeneration": None}, (0, -1, -(2**63))),
        "historyLength": ("GetTask", {"id": task_id, "historyLength": None}, (0, 1, 2**31 - 1)),
        "pageSize": ("ListTasks", {"pageSize": None}, (1, 100)),
    }
    wrong = {"currentGeneration": (-(2**63) - 2**12,), "historyLength": (-1, 2**31), "pageSize": (0, 101, -1, 2**31)}
    count = 0
    for name, (operation, params, good) in asked.items():
        for number in (*good, *wrong[name]):
            reasons = await outcomes(here, operation, params, name, form.format(number))
            assert set(reasons.values()) == {None if number in good else "INVALID_PARAMS"}, (name, number)
            count += len(reasons)
    assert count >= 38


def some_number(rng: random.Random) -> str:
    """As text of JSON: in a string any, as a number only what a double holds, since that is what it means there."""
    in_string = rng.random() < 0.5
    text = str(rng.choice((*EDGES, rng.randrange(-(10**20), 10**20), rng.randrange(-200, 200))))
    is_small = abs(int(text)) < 2**53
    if (in_string or is_small) and rng.random() < 0.4:
        text += "." + rng.choice(("0", "00", "5", "25"))
    if (in_string or is_small) and rng.random() < 0.4:
        text += rng.choice(("e0", "E+0", "e-1", "e1", "e-2"))
    return f'"{text}"' if in_string else text


@module_loop
@pytest.mark.parametrize("name", ["currentGeneration", "historyLength"])
async def test_the_bindings_agree_on_any_number(here: Bindings, name: str) -> None:
    """Of a task that has ended, which nobody waits for."""
    rng = random.Random(name)
    task_id = (await here.site.start())["id"]
    await here.site.exchange.run(here.site.exchange.operator(), c.CancelTask(None, task_id, "enough"))
    bits = INT64 if name == "currentGeneration" else INT32
    taken = refused = by_grpc = 0
    for _ in range(150):
        raw = some_number(rng)
        number = worth(raw.strip('"'), bits)
        is_good = number is not None and (bits == INT64 or number >= 0)
        reasons = await outcomes(here, "GetTask", {"id": task_id, name: None}, name, raw)
        assert set(reasons.values()) == {None if is_good else "INVALID_PARAMS"}, (raw, reasons)
        taken += is_good
        refused += not is_good
        by_grpc += "GRPC" in reasons
    assert min(taken, refused, by_grpc) >= 30


@module_loop
@pytest.mark.parametrize("raw", ["1.5", '"1.5"', "1e-1", '"1e-1"', "true", "[]", "{}", '"x"', '""', '" 1"', "1e400"])
@pytest.mark.parametrize("name", ["currentGeneration", "historyLength"])
async def test_what_is_no_number_is_refused_by_both_bindings_of_json(here: Bindings, name: str, raw: str) -> None:
    task_id = (await here.site.start())["id"]
    told = [*here.site.auth("alice").items(), ("A2A-Version", "1.1"), ("Content-Type", "application/json")]
    call = f'{{"jsonrpc": "2.0", "id": 1, "method": "GetTask", "params": {{"id": "{task_id}", "{name}": {raw}}}}}'
    by_call = await here.http("POST", "/", told, call.encode())
    text = json.loads(raw) if raw.startswith('"') else raw
    by_path = await here.http("GET", f"/tasks/{task_id}?{name}={quote(text)}", told[:2], None)
    assert {by_call.reason, by_path.reason} == {"INVALID_PARAMS"}


@module_loop
@pytest.mark.parametrize("raw", ["1.5", '"1e-1"', str(2**63), '"-1e19"'])
async def test_a_guard_that_is_no_number_is_refused_of_a_first_message_too(here: Bindings, raw: str) -> None:
    """A number is ignored there, as there is nothing to compare it with."""
    sent = {"message": message(), "configuration": {"returnImmediately": True, "ifGenerationMatch": None}}
    answers = await outcomes(here, "SendMessage", sent, "ifGenerationMatch", raw)
    assert answers == {"JSONRPC": "INVALID_PARAMS", "HTTP+JSON": "INVALID_PARAMS"}
    for number in ("7", "-1"):
        assert set((await outcomes(here, "SendMessage", sent, "ifGenerationMatch", number)).values()) == {None}


@module_loop
@pytest.mark.parametrize("binding", BINDINGS)
async def test_a_generation_that_no_task_has_is_before_or_behind_all_of_them(here: Bindings, binding: str) -> None:
    """Specification 3.2.7: already greater is answered at once, and what does not match is a mismatch."""
    task_id = (await here.site.start())["id"]
    for known in (-1, -(2**63), 0):
        answer = await here.call(binding, "GetTask", {"id": task_id, "currentGeneration": str(known)})
        assert answer.result["generation"] == "1"
    for guard in (-1, -(2**63), 0, 2, 2**63 - 1):
        params = {"message": message(taskId=task_id), "configuration": {"ifGenerationMatch": str(guard)}}
        answer = await here.call(binding, "SendMessage", params)
        told = {"taskId": task_id, "expectedGeneration": str(guard), "currentGeneration": "1"}
        assert (answer.reason, answer.metadata) == ("TASK_GENERATION_MISMATCH", told)


@module_loop
@pytest.mark.parametrize("raw", ["1", '"1"', "1.0", '"1.0"', "1e0", '"1e0"', "10e-1", '"10E-1"'])
async def test_a_guard_matches_in_whatever_form_it_is_written(here: Bindings, raw: str) -> None:
    task_id = (await here.site.start())["id"]
    params = {
        "message": message("more", taskId=task_id),
        "configuration": {"returnImmediately": True, "ifGenerationMatch": None},
    }
    told = [*here.site.auth("alice").items(), ("A2A-Version", "1.1"), ("Content-Type", "application/json")]
    body = json.dumps(params).replace('"ifGenerationMatch": null', f'"ifGenerationMatch": {raw}')
    answer = await here.http("POST", "/message:send", told, body.encode())
    assert answer.result["task"]["generation"] == "2"
    call = f'{{"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {body}}}'
    assert (await here.http("POST", "/", told, call.encode())).reason == "TASK_GENERATION_MISMATCH"


@module_loop
@pytest.mark.parametrize("binding", BINDINGS)
async def test_a_poll_for_a_generation_far_ahead_is_held(here: Bindings, binding: str) -> None:
    waits = here.site.daemon.exchange.waits
    task_id = (await here.site.start())["id"]
    asking = asyncio.ensure_future(here.call(binding, "GetTask", {"id": task_id, "currentGeneration": str(2**63 - 1)}))
    await until(lambda: waits.total == 1)
    cancel = c.CancelTask(here.site.daemon.exchange.agent("alice@lab"), task_id, "enough")
    await here.site.exchange.run(here.site.exchange.authenticate(here.site.tokens["alice"]), cancel)
    assert (await asking).result["status"]["state"] == "TASK_STATE_CANCELED"


EMPTY: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "GetTask": ({"id": ""}, "id"),
    "CancelTask": ({"id": ""}, "id"),
    "SubscribeToTask": ({"id": ""}, "id"),
    "GetTaskPushNotificationConfig": ({"taskId": "t", "id": ""}, "id"),
    "DeleteTaskPushNotificationConfig": ({"taskId": "t", "id": ""}, "id"),
    "ListTaskPushNotificationConfigs": ({"taskId": ""}, "taskId"),
    "CreateTaskPushNotificationConfig": ({"taskId": "t", "url": ""}, "url"),
    "SendMessage": ({"message": {**message(), "messageId": ""}}, "messageId"),
}


@module_loop
@pytest.mark.parametrize("operation", EMPTY)
async def test_a_required_text_that_is_empty_is_missing_in_every_binding(here: Bindings, operation: str) -> None:
    """Protobuf cannot tell the two apart, so no binding does. A path of HTTP+JSON has no empty segment."""
    params, field = EMPTY[operation]
    for binding in ("JSONRPC", "GRPC"):
        answer = await here.call(binding, operation, params)
        assert (answer.reason, [name.rpartition(".")[2] for name in answer.fields]) == ("INVALID_PARAMS", [field])
