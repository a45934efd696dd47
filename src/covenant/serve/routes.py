"""How a verb looks in HTTP: which route a path is, and how its parts become a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec

from covenant.model.error import Malformed, UnknownRoute, WrongMethod
from covenant.serve.places import PLACES, Place
from covenant.serve.wire import Request

T = TypeVar("T")

_encode: Final = msgspec.json.Encoder().encode
_anything: Final = msgspec.json.Decoder()

_PARAMETER_PLACES: Final = (3, 2)  # where a path has its one parameter: /a2a/tasks/{task_id}/…, /peers/{peer}


class Route:
    """One verb, with what it takes to read its requests."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.parameter = place.parameter
        self.fields = frozenset(field.encode_name for field in msgspec.structs.fields(place.request)) - {"id"}
        self.waits = "wait_ms" in self.fields
        self._body = self._body_decoder()
        self._whole = msgspec.json.Decoder(place.request)
        self._whole_lax = msgspec.json.Decoder(place.request, strict=False)
        self._beside = None if place.body in (None, "*") else self._without(str(place.body))

    def _without(self, body: str) -> type[msgspec.Struct]:
        """What a request has beside its body: that is read as what it is, and not put together with the rest."""
        fields = [f for f in msgspec.structs.fields(self.place.request) if f.encode_name != body]
        told = [
            (f.name, f.type) if f.required else (f.name, f.type, msgspec.field(default=f.default, name=f.encode_name))
            for f in fields
        ]
        return msgspec.defstruct("Beside", told, kw_only=True)

    def _body_decoder(self) -> msgspec.json.Decoder[Any] | None:
        if self.place.body is None:
            return None
        if self.place.body == "*":
            return msgspec.json.Decoder(dict[str, msgspec.Raw])
        member = next(f for f in msgspec.structs.fields(self.place.request) if f.encode_name == self.place.body)
        return msgspec.json.Decoder(member.type)

    def request(self, parameter: str | None, query: bytes, body: bytes) -> Request:
        """Put together from the path, the query and the body."""
        members: dict[str, Any] = query_of(query) if query else {}
        if unknown := members.keys() - self.fields:
            known = ", ".join(sorted(self.fields - {self.parameter, self.place.body})) or "none"
            raise Malformed(f"no parameter is called {min(unknown)!r} here; there are: {known}", field="query")
        if self.parameter is not None:
            members[self.parameter] = parameter
        name = self.place.body
        if name is None and body and decode(_anything, body) != {}:
            raise Malformed("this call has no body: its members go into the query", field="body")
        if name is None or (name == "*" and not body):
            return read_as(self.place.request, members, strict=False)
        assert self._body is not None
        decoded = decode(self._body, body)
        if name != "*":
            assert self._beside is not None
            beside = msgspec.structs.asdict(read_as(self._beside, members, strict=False)) if members else {}
            return self.place.request(**beside, **{name: decoded})
        whole = {name: msgspec.Raw(_encode(value)) for name, value in members.items()} | decoded
        if self.parameter is not None:
            whole[self.parameter] = msgspec.Raw(_encode(parameter))
        whole.pop("kind", None)
        return decode(self._whole_lax if query else self._whole, _encode(whole), "request")


def query_of(query: bytes) -> dict[str, str]:
    """Return the parameters of a query. Raise Malformed if it does not read, or names one twice."""
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, max_num_fields=64, errors="strict")
    except (UnicodeDecodeError, ValueError):
        raise Malformed("the query does not read", field="query") from None
    members = dict(pairs)
    if len(members) != len(pairs):
        raise Malformed("a parameter is given twice", field="query")
    return members


def decode(decoder: msgspec.json.Decoder[T], data: bytes, field: str = "body") -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as wrong:
        raise Malformed(str(wrong) or "this is not JSON", field=field) from None


def read_as(kind: type[T], members: Mapping[str, Any], *, strict: bool) -> T:
    try:
        return msgspec.convert(members, kind, strict=strict)
    except (msgspec.MsgspecError, RecursionError) as wrong:
        raise Malformed(str(wrong), field="request") from None


def _table() -> dict[str, dict[str, Route]]:
    table: dict[str, dict[str, Route]] = {}
    for place in PLACES:
        route = Route(place)
        pattern = "/".join("*" if part.startswith("{") else part for part in place.path.split("/"))
        for method in (place.method, *place.also):
            table.setdefault(pattern, {})[method] = route
    return table


ROUTES: Final = _table()


def find(method: str, path: str) -> tuple[Route, str | None]:
    """The route, and the parameter in its path."""
    methods = ROUTES.get(path)
    parameter: str | None = None
    if methods is None:
        methods, parameter = _with_parameter(path)
    route = methods.get(method)
    if route is None:
        raise WrongMethod(f"{path} takes {', '.join(sorted(methods))}", allow=sorted(methods))
    return route, parameter


def _with_parameter(path: str) -> tuple[dict[str, Route], str]:
    parts = path.split("/")
    for place in _PARAMETER_PLACES:
        if len(parts) > place and parts[place]:
            parameter = parts[place]
            methods = ROUTES.get("/".join([*parts[:place], "*", *parts[place + 1 :]]))
            if methods is not None:
                return methods, parameter
    raise UnknownRoute(f"there is nothing at {path[:200]}")
