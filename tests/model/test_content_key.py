"""What stands for content. (Contract 19.)

The vectors of `content_keys.json` hold for any language: RFC 8785's own examples and table of numbers, and what an
implementation in JavaScript says of the rest, where canonical numbers and the order of UTF-16 are at home.
"""

from __future__ import annotations

import json
import struct
import uuid
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import pytest
import rfc8785
from hypothesis import example, given
from hypothesis import strategies as st
from tests.floors import reached, reaches

from covenant.model.error import BlankText, CovenantError, Malformed
from covenant.model.limits import CONTENT_DEPTH_MAX, Limits
from covenant.rules.content_key import canonical, content_hash, digest_of_input, task_id, task_key
from covenant.rules.envelope import check_json

VECTORS: Final = json.loads(Path(__file__).with_name("content_keys.json").read_text(encoding="utf-8"))
RUN: Final = "00000000-0000-0000-0000-000000000001"
EXACT_MAX: Final = 2**53 - 1
EXPONENT_FROM: Final = 10**21  # from here on ECMAScript writes a number with an exponent

ODD_NAMES: Final = ("a", "b", 'a":1,"b', "1", "", "é", "e\u0301", "\uffff", "\U0001f602")
ODD_LEAVES: Final = (
    *(None, True, False, "", "1", "true", "null", "[]", ":1", '":"', "\\"),
    *(0, 0.0, -0.0, 1, 1.0, -1, 0.5, 1e-7, 2**53, 2.0**53, 2**53 + 1, 10**16, 1e16),
    *(2**68, 2.0**68, 295147905179352830000, 10**20, 1e20, 10**21, 1e21, 10**30, 1e30),
)

texts = st.text() | st.text(':"\\{}[],1an')
floats = st.floats(allow_nan=False, allow_infinity=False)


def trees(leaves: st.SearchStrategy[Any], names: st.SearchStrategy[str], size: int) -> st.SearchStrategy[Any]:
    return st.recursive(leaves, lambda below: st.lists(below) | st.dictionaries(names, below), max_leaves=size)


values = trees(st.none() | st.booleans() | st.integers() | floats | texts, texts, 20)
exact = trees(st.none() | st.booleans() | st.integers(-EXACT_MAX, EXACT_MAX) | floats | texts, texts, 20)
odd = trees(st.sampled_from(ODD_LEAVES), st.sampled_from(ODD_NAMES), 3)


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same one, by another way than writing them."""
    if type(one) in (int, float) and type(other) in (int, float):
        written_alike = type(one) is type(other) or abs(one) < EXPONENT_FROM
        return written_alike and Decimal(repr(one)) == Decimal(repr(other))
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if type(one) is dict and type(other) is dict:
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return type(one) is type(other) and bool(one == other)


def rewritten(value: Any) -> Any:
    """The same value in other Python clothes."""
    if type(value) is dict:
        return {name: rewritten(value[name]) for name in reversed(value)}
    if type(value) is list:
        return tuple(map(rewritten, value))
    if type(value) is int and abs(value) <= EXACT_MAX:
        return float(value)
    if type(value) is float and value.is_integer() and abs(value) <= EXACT_MAX:
        return int(value)
    return value


# --- canonical JSON ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS["canonical"], ids=lambda vector: vector["what"])
def test_a_value_is_written_as_its_vector_says(vector: dict[str, Any]) -> None:
    assert canonical(vector["input"]).decode() == vector["canonical"]


@pytest.mark.parametrize("vector", VECTORS["numbers"], ids=lambda vector: vector["ieee754"])
def test_a_float_is_written_as_the_table_of_the_rfc_says(vector: dict[str, Any]) -> None:
    (number,) = struct.unpack(">d", bytes.fromhex(vector["ieee754"]))
    if vector["canonical"] is None:
        with pytest.raises(Malformed):
            canonical(number)
    else:
        assert canonical(number).decode() == vector["canonical"]


def test_t_canonical_json_key_injection() -> None:
    two, spelled = {"a": 1, "b": 2}, {'a":1,"b': 2}
    unescaped = ["{" + ",".join(f'"{name}":{value}' for name, value in each.items()) + "}" for each in (two, spelled)]
    assert unescaped[0] == unescaped[1]
    assert canonical(two) != canonical(spelled)
    assert task_key(RUN, "echo", two) != task_key(RUN, "echo", spelled)
    assert content_hash("task", two) != content_hash("task", spelled)
    assert digest_of_input(two) != digest_of_input(spelled)


@reaches(same=4, other=20)
@given(odd, odd)
@example(295147905179352830000, 2.0**68)
@example(2**68, 2.0**68)
@example(10**30, 1e30)
def test_values_are_the_same_exactly_if_they_are_written_the_same(one: Any, other: Any) -> None:
    is_same = same(one, other)
    reached("same" if is_same else "other")
    assert (canonical(one) == canonical(other)) is is_same


@given(values)
def test_neither_order_nor_python_type_is_content(value: Any) -> None:
    assert canonical(rewritten(value)) == canonical(value)


@given(values)
def test_what_is_written_reads_back_as_the_same_value(value: Any) -> None:
    written = canonical(value)
    for read in (json.loads(written), msgspec.json.decode(written)):
        assert same(read, value)
        assert canonical(read) == written


@given(values)
def test_a_value_that_the_journal_has_kept_is_written_the_same(value: Any) -> None:
    kept = msgspec.json.decode(msgspec.json.encode(value))
    assert canonical(kept) == canonical(value)


@given(exact)
def test_where_the_rfc_can_write_a_value_it_writes_the_same(value: Any) -> None:
    """Contract 19: canonical JSON is that of RFC 8785."""
    assert canonical(value) == rfc8785.dumps(value)


@given(st.integers(min_value=EXACT_MAX), st.sampled_from((1, -1)))
def test_a_large_integer_keeps_every_digit(size: int, sign: int) -> None:
    assert canonical({"n": size * sign}) == b'{"n":%d}' % (size * sign)


class Named(StrEnum):
    A = "a"


class Pair(NamedTuple):
    one: int
    two: int


@pytest.mark.parametrize("vector", VECTORS["refused"], ids=lambda vector: vector["what"])
def test_what_is_not_unicode_is_refused(vector: dict[str, Any]) -> None:
    with pytest.raises(Malformed) as refusal:
        canonical(vector["input"])
    assert refusal.value.code == "malformed"


@pytest.mark.parametrize(
    "value",
    [
        *(float("nan"), float("inf"), -float("inf"), 1j, Decimal(1), 10**5000),
        *(b"bytes", {1}, range(2), Pair(1, 2), Named.A, datetime.min, msgspec.UNSET, object()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_json_is_refused_at_any_place(value: Any) -> None:
    for place in (value, [value], {"a": [0.5, value]}, {"é": value}, (1, value)):
        with pytest.raises(Malformed) as refusal:
            canonical(place)
        assert refusal.value.code == "malformed"


@pytest.mark.parametrize("name", [1, 0.5, None, True, b"a", (), Named.A], ids=lambda name: type(name).__name__)
def test_a_member_name_that_is_not_text_is_refused(name: Any) -> None:
    for value in ({name: 1}, {"é": 1, name: 1}, {"b": 0.5, name: 1}, [{name: 1}]):
        with pytest.raises(Malformed):
            canonical(value)


def nested(levels: int, inside: Any, *, as_object: bool) -> Any:
    for _ in range(levels):
        inside = {"a": inside} if as_object else [inside]
    return inside


@pytest.mark.parametrize("as_object", [True, False])
@pytest.mark.parametrize("inside", [1, 0.5, [], {}])
@pytest.mark.parametrize("more", [-1, 0, 1, 1000])
def test_depth_is_bounded_as_for_all_content(more: int, inside: Any, as_object: bool) -> None:
    value = nested(CONTENT_DEPTH_MAX + more, inside, as_object=as_object)
    if more <= 0:
        check_json(value, Limits())
        canonical(value)
    else:
        for check in (canonical, lambda deep: check_json(deep, Limits())):
            with pytest.raises(Malformed):
                check(value)


def test_a_list_that_holds_itself_is_refused_at_once() -> None:
    value: list[Any] = []
    value += [value, value]
    with pytest.raises(Malformed):
        canonical(value)


# --- keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS["task_keys"], ids=lambda vector: vector["what"])
def test_a_task_has_the_key_and_the_id_that_its_vector_says(vector: dict[str, Any]) -> None:
    """Contract 19."""
    key = task_key(
        vector["run"], vector["kind"], vector["input"], key=vector.get("key"), instance=vector.get("instance")
    )
    assert (key, task_id(key)) == (vector["task_key"], vector["task_id"])


@pytest.mark.parametrize("vector", VECTORS["content_hashes"])
def test_an_operation_has_the_hash_that_its_vector_says(vector: dict[str, Any]) -> None:
    assert content_hash(vector["operation"], vector["input"]) == vector["hash"]


@pytest.mark.parametrize("vector", VECTORS["digests"])
def test_an_input_has_the_digest_that_its_vector_says(vector: dict[str, Any]) -> None:
    assert digest_of_input(vector["input"]) == vector["digest"]


@reaches(colon=30)
@given(values)
@example({"a": {"b": ":1"}})
@example(':"a"')
@example({':"': '":'})
def test_no_json_text_begins_after_a_colon_inside_another(value: Any) -> None:
    """Which is why a kind may hold colons: `kind:content` can be cut in one way only."""
    written = canonical(value).decode()
    for place, sign in enumerate(written):
        if sign == ":":
            reached("colon")
            with pytest.raises(json.JSONDecodeError):
                json.loads(written[place + 1 :])


class Asked(NamedTuple):
    run: str
    kind: str
    value: Any
    key: str | None
    instance: str | int | None


RUNS: Final = (
    RUN,
    "a",
    "a:b",
    "0123456789abcdef",
    str(uuid.UUID(bytes=b"0123456789abcdef")),
    str(uuid.UUID(bytes=b"covenant.task-ke")),  # the bytes with which the second form of a key begins
)
asked = st.builds(
    Asked,
    st.sampled_from(RUNS),
    st.sampled_from(("", "b", "b:c", "c", '{"a"', 'b:"', ':"1"', "y.v1\n")),
    odd,
    st.none() | st.sampled_from(("1", "null", '"1"', "b")),
    st.none() | st.sampled_from((0, 1, "1", "null", "")),
)


@st.composite
def near(draw: st.DrawFn) -> tuple[Asked, Asked]:
    """Two that differ in three parts at most."""
    one, other = draw(asked), draw(asked)
    parts = draw(st.sets(st.sampled_from(Asked._fields), min_size=1, max_size=3))
    return one, one._replace(**{part: getattr(other, part) for part in parts})


@reaches(alike=5, other=5)
@given(near())
def test_two_tasks_share_a_key_exactly_if_they_are_the_same_task(pair: tuple[Asked, Asked]) -> None:
    """Contract 19."""
    one, other = pair
    alike = (one.run, one.kind, one.key) == (other.run, other.kind, other.key)
    alike = alike and type(one.instance) is type(other.instance) and one.instance == other.instance
    alike = alike and (one.key is not None or same(one.value, other.value))
    first, second = (task_key(a.run, a.kind, a.value, key=a.key, instance=a.instance) for a in (one, other))
    reached("alike" if alike else "other")
    assert (first == second) is alike
    assert (task_id(first) == task_id(second)) is alike


@given(st.tuples(texts, odd), st.tuples(texts, odd))
@example(("", "a"), ("a", ""))
@example(("a", 1), ('a"1', ""))
def test_an_operation_and_its_content_cannot_run_into_each_other(one: tuple[str, Any], other: tuple[str, Any]) -> None:
    alike = one[0] == other[0] and same(one[1], other[1])
    assert (content_hash(*one) == content_hash(*other)) is alike


def test_another_input_under_the_same_explicit_key_is_seen() -> None:
    assert task_key(RUN, "echo", {"a": 1}, key="k") == task_key(RUN, "echo", {"a": 2}, key="k")
    assert digest_of_input({"a": 1}) != digest_of_input({"a": 2})
    assert digest_of_input({"a": 1}) == digest_of_input({"a": 1.0})


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"key": " "}, BlankText),
        ({"key": 1}, Malformed),
        ({"key": "\ud800"}, Malformed),
        ({"instance": True}, Malformed),
        ({"instance": 1.0}, Malformed),
        ({"instance": "\ud800"}, Malformed),
        ({"kind": None}, Malformed),
        ({"kind": "\ud800"}, Malformed),
        ({"kind": "\ud800", "instance": 1}, Malformed),
        ({"run_id": ""}, BlankText),
        ({"run_id": None}, Malformed),
        ({"run_id": "\ud800"}, Malformed),
        ({"value": float("nan")}, Malformed),
        ({"value": float("nan"), "instance": 1}, Malformed),
    ],
    ids=str,
)
def test_a_key_is_refused_what_is_no_part_of_one(wrong: dict[str, Any], error: type[CovenantError]) -> None:
    parts: dict[str, Any] = {"run_id": RUN, "kind": "echo", "value": 1, **wrong}
    with pytest.raises(error):
        task_key(**parts)


@pytest.mark.parametrize("operation", [1, None, "\ud800"], ids=repr)
def test_an_operation_is_text(operation: Any) -> None:
    with pytest.raises(Malformed):
        content_hash(operation, 1)
