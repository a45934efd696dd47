"""What stands beside a request of the A2A protocol, in HTTP headers or gRPC metadata: version, extensions, keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from covenant.a2a.fault import EXTENSION_REQUIRED, INVALID_PARAMS, VERSION, Fault
from covenant.rules.dialect import VERSIONS
from covenant.serve.a2a.operations import Agent

_VERSION_IF_UNSAID: Final = "0.3"  # as the protocol rules


class Parameters(Struct, frozen=True):
    version: str
    extensions: tuple[str, ...] = ()
    key: str | None = None
    after: int | None = None  # the last generation that the client has seen of a stream


def gathered(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """By their names. What is given twice is a list."""
    found: dict[str, str] = {}
    for name, value in pairs:
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


def read(headers: Mapping[str, str], version: str | None = None) -> Parameters:
    """Names are in small letters. The version may also come in the query of a URL."""
    said = headers.get("a2a-version") or version or _VERSION_IF_UNSAID
    wanted = headers.get("a2a-extensions")
    last = headers.get("last-event-id")
    if last is not None and not (last.isascii() and last.isdigit() and len(last) < 19):
        raise Fault(INVALID_PARAMS, "Last-Event-ID is a generation", field="Last-Event-ID")
    extensions = () if wanted is None else tuple(uri.strip() for uri in wanted.split(",") if uri.strip())
    return Parameters(said, extensions, headers.get("idempotency-key"), None if last is None else int(last))


def check(parameters: Parameters, agent: Agent) -> tuple[str, ...]:
    """Raise unless the two sides can speak to each other; the extensions that are in force."""
    if parameters.version not in VERSIONS:
        raise Fault(VERSION, f"version {parameters.version} is not spoken here: {', '.join(VERSIONS)}")
    wanted = parameters.extensions
    if agent.required and (missing := [uri for uri in agent.required if uri not in wanted]):
        raise Fault(EXTENSION_REQUIRED, f"this agent requires {', '.join(missing)}", extension=missing[0])
    return tuple(uri for uri in wanted if uri in agent.extensions) if wanted else ()
