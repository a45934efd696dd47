"""Protobuf to the protocol's structs, and back.

The fields have the same names on both sides, so neither way has a list of them. What differs is the few things that
protobuf knows and JSON does not: bytes, times, enumerations, and a JSON value as a message.
"""

from __future__ import annotations

import base64
import calendar
import math
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from google.protobuf import descriptor_pb2, json_format
from google.protobuf.message import DecodeError
from msgspec import UNSET, Struct

from covenant.a2a.fault import BAD_AGENT, INVALID_PARAMS, PARSE, Fault
from covenant.rules.portable import alike
from covenant.serve.a2a.misread import misread
from covenant.serve.a2a.proto import AgentCard, Object, Timestamp, Value, Values, class_of

T = TypeVar("T")
Convert: TypeAlias = Callable[[Any], Any]
Plan: TypeAlias = dict[int, tuple[str, Convert]]


# --- reading -----------------------------------------------------------------------------------------------


class Reader:
    """Of one kind of message. How each of its fields is read is settled once."""

    def __init__(self, descriptor: Any, shape: type) -> None:
        self._name = descriptor.name
        self._class = class_of(descriptor)
        self._plan = _plan_of(descriptor, {})
        self._shape = shape

    def read(self, data: bytes) -> Any:
        try:
            message = self._class.FromString(data)
        except DecodeError:
            raise Fault(PARSE, f"this is not a {self._name}") from None
        try:
            return msgspec.convert(_plain(message, self._plan), self._shape)
        except msgspec.ValidationError as wrong:
            raise misread(wrong) from None


def _plan_of(descriptor: Any, known: dict[str, Plan]) -> Plan:
    """By the fields' numbers. A message may hold its own kind: `known` are those that are begun."""
    plan = known.get(descriptor.full_name)
    if plan is None:
        plan = known[descriptor.full_name] = {}
        proto = descriptor_pb2.DescriptorProto()
        descriptor.CopyToProto(proto)
        for field, said in zip(descriptor.fields, proto.field, strict=True):
            convert = _convert_of(field, known)
            if said.label == descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED:
                convert = _each(convert)
            plan[field.number] = (field.json_name, convert)
    return plan


def _convert_of(field: Any, known: dict[str, Plan]) -> Convert:
    if field.enum_type is not None:
        names = {number: value.name for number, value in field.enum_type.values_by_number.items()}
        return lambda number: names.get(number, str(number))
    if field.message_type is not None:
        special = _SPECIAL.get(field.message_type.full_name)
        if special is not None:
            return special
        plan = _plan_of(field.message_type, known)
        return lambda message: _plain(message, plan)
    if field.type == field.TYPE_BYTES:
        return lambda data: base64.b64encode(data).decode()
    return lambda value: value


def _each(convert: Convert) -> Convert:
    return lambda values: [convert(value) for value in values]


def _plain(message: Any, plan: Plan) -> dict[str, Any]:
    found = {}
    for field, value in message.ListFields():
        name, convert = plan[field.number]
        found[name] = convert(value)
    return found


def _read_object(message: Any) -> dict[str, Any]:
    """In the order of the names: a map has none, and the same message sent again must read the same."""
    return {name: _read_value(message.fields[name]) for name in sorted(message.fields)}


def _read_value(message: Any) -> Any:
    kind = message.WhichOneof("kind")
    if kind == "string_value":
        return message.string_value
    if kind == "number_value":
        return _read_number(message.number_value)
    if kind == "bool_value":
        return message.bool_value
    if kind == "struct_value":
        return _read_object(message.struct_value)
    if kind == "list_value":
        return [_read_value(value) for value in message.list_value.values]
    return None


def _read_number(number: float) -> Any:
    if not math.isfinite(number):
        raise Fault(INVALID_PARAMS, "JSON has no such number", field="number_value")
    return alike(number)


def _read_moment(moment: Any) -> str:
    try:
        text: str = moment.ToJsonString()
    except ValueError as wrong:
        raise Fault(INVALID_PARAMS, str(wrong), field="timestamp") from None
    return text


_SPECIAL: Final[dict[str, Convert]] = {
    Object.DESCRIPTOR.full_name: _read_object,
    Value.DESCRIPTOR.full_name: _read_value,
    Timestamp.DESCRIPTOR.full_name: _read_moment,
}


# --- writing -----------------------------------------------------------------------------------------------


class Writer:
    """Of one kind of message. The same is written in the same bytes by every daemon: a map goes in the order of its
    names."""

    def __init__(self, descriptor: Any) -> None:
        self._class = class_of(descriptor)

    def write(self, reply: Struct | None) -> bytes:
        try:
            message = self._class() if reply is None else self._class(**_fields(reply))
        except (TypeError, ValueError, OverflowError) as wrong:
            raise Fault(BAD_AGENT, f"this does not go over gRPC: {wrong}") from None
        data: bytes = message.SerializeToString(deterministic=True)
        return data


def write_card(card: dict[str, Any]) -> bytes:
    """What its owner wrote beyond the protocol is left out."""
    try:
        message = json_format.ParseDict(card, AgentCard(), ignore_unknown_fields=True)
    except json_format.ParseError as wrong:
        raise Fault(BAD_AGENT, f"this card does not go over gRPC: {wrong}") from None
    data: bytes = message.SerializeToString()
    return data


def _fields(reply: Struct) -> dict[str, Any]:
    found = {}
    for name in reply.__struct_fields__:
        value = getattr(reply, name)
        convert = _WRITERS.get(name)
        if value is UNSET or value == () or (value is None and convert is not _write_value):
            continue
        found[name] = _written(value) if convert is None else convert(value)
    return found


def _written(value: Any) -> Any:
    if isinstance(value, Struct):
        return _fields(value)
    if isinstance(value, tuple | list):
        return [_written(item) for item in value]
    return value


def _write_object(members: dict[str, Any]) -> Any:
    message = Object()
    message.update(members)
    return message


def _write_value(value: Any) -> Any:
    if value is None:
        return Value(null_value=0)
    if isinstance(value, bool):
        return Value(bool_value=value)
    if isinstance(value, str):
        return Value(string_value=value)
    if isinstance(value, dict):
        return Value(struct_value=_write_object(value))
    if isinstance(value, Iterable):
        items = Values()
        items.extend(value)
        return Value(list_value=items)
    return Value(number_value=value)


def _write_moment(text: str) -> Any:
    moment = datetime.fromisoformat(text)
    return Timestamp(seconds=calendar.timegm(moment.utctimetuple()), nanos=moment.microsecond * 1000)


_WRITERS: Final[dict[str, Convert]] = {
    "data": _write_value,
    "metadata": _write_object,
    "raw": base64.b64decode,
    "timestamp": _write_moment,
    "generation": int,
}
