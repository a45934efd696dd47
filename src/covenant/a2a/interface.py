"""What a client takes from an agent's card: where the agent is reached, in which tongue, and what it can do."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from covenant.a2a.fault import BAD_AGENT, VERSION, Fault

JSONRPC: Final = "JSONRPC"
REST: Final = "HTTP+JSON"
BINDINGS: Final = (JSONRPC, REST)
GENERATION: Final = "urn:covenant:generation"
WELL_KNOWN: Final = "/.well-known/agent-card.json"
_MAJOR: Final = "1"


class Interface(Struct, frozen=True):
    url: str
    binding: str
    version: str
    tenant: str | None = None


class Abilities(Struct, frozen=True):
    streams: bool
    resumes: bool  # numbers what happens, takes a stream up where it was cut, and knows a repeated send by its key


def card_url(url: str) -> str:
    """Of an agent, or of its card."""
    return url if url.endswith(".json") else url.rstrip("/") + WELL_KNOWN


def pick(card: dict[str, Any], came_from: str, binding: str | None = None) -> Interface:
    """The first that can be spoken: the agent lists the one it prefers first."""
    listed = card.get("supportedInterfaces")
    found = [_interface(entry) for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    spoken = [entry for entry in found if entry.binding in (BINDINGS if binding is None else (binding,))]
    if not spoken:
        wanted = binding or " or ".join(BINDINGS)
        raise Fault(BAD_AGENT, f"the agent is not reached by {wanted}")
    for entry in spoken:
        is_exposed = came_from.startswith("https:") and not entry.url.startswith("https:")
        if entry.version.partition(".")[0] == _MAJOR and not is_exposed:  # a secret came for an encrypted line
            return entry
    raise Fault(VERSION, f"the agent speaks {', '.join(sorted({entry.version for entry in spoken}))}, or in the clear")


def _interface(entry: dict[str, Any]) -> Interface:
    version = str(entry.get("protocolVersion") or "1.0")
    tenant = entry.get("tenant")
    return Interface(
        str(entry.get("url", "")),
        str(entry.get("protocolBinding", "")),
        ".".join(version.split(".")[:2]),
        str(tenant) if tenant else None,
    )


def abilities(card: dict[str, Any]) -> Abilities:
    said = card.get("capabilities")
    capabilities = said if isinstance(said, dict) else {}
    listed = capabilities.get("extensions")
    uris = [entry.get("uri") for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    return Abilities(capabilities.get("streaming") is True, GENERATION in uris)
