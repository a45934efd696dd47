"""What stands beside a request of the A2A protocol, in HTTP headers or gRPC metadata: version, extensions, keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from covenant.a2a.fault import EXTENSION_REQUIRED, INVALID_PARAMS, VERSION, Fault
from covenant.rules.dialect import VERSIONS, negotiated
from covenant.rules.header import OWS, headers_fault
from covenant.serve.a2a.operations import Agent

_SHOWN_MAX: Final = 100


class Parameters(Struct, frozen=True):
    version: str  # Major.Minor, one of those that are spoken
    extensions: tuple[str, ...] = ()
    key: str | None = None
    after: int | None = None  # the last generation that the client has seen of a stream


def gathered(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the values by their names. One that may come several times is a list then."""
    found: dict[str, str] = {}
    for name, value in pairs:
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


def gathered_metadata(pairs: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """Return the metadata of a gRPC call by names, with values trimmed. Raises Malformed if one of `SINGLE` repeats."""
    texts = [(name, value.strip(OWS)) for name, value in pairs if isinstance(value, str)]
    if (fault := headers_fault([name for name, _ in texts])) is not None:
        raise fault
    return gathered(texts)


def read(headers: Mapping[str, str], version: str | None = None) -> Parameters:
    """Read the parameters. Names are in small letters. The version may also come in the query of a URL.

    The version comes first: it decides how everything else is read.
    """
    said = headers.get("a2a-version") or version
    agreed = negotiated(said)
    if agreed is None:
        given = repr(said[:_SHOWN_MAX]) if said else "0.3, which is what a request without one speaks,"
        raise Fault(VERSION, f"version {given} is not spoken here: {', '.join(VERSIONS)}")
    wanted = headers.get("a2a-extensions")
    last = headers.get("last-event-id")
    if last is not None and not (last.isascii() and last.isdigit() and len(last) < 19):
        raise Fault(INVALID_PARAMS, "Last-Event-ID is a generation", field="Last-Event-ID")
    extensions = () if wanted is None else tuple(uri.strip() for uri in wanted.split(",") if uri.strip())
    return Parameters(agreed, extensions, headers.get("idempotency-key"), None if last is None else int(last))


def check(parameters: Parameters, agent: Agent) -> tuple[str, ...]:
    """Return the extensions that are in force. Raise if the agent requires one that the client does not name."""
    wanted = parameters.extensions
    if agent.required and (missing := [uri for uri in agent.required if uri not in wanted]):
        raise Fault(EXTENSION_REQUIRED, f"this agent requires {', '.join(missing)}", extension=missing[0])
    return tuple(uri for uri in wanted if uri in agent.extensions) if wanted else ()
