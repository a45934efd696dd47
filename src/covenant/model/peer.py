"""Who may come in, and what they may do: peers, and the grants that they hold.

A peer is an agent with a token, of which only the digest is kept. A grant is a capability that the realm's key has
signed. Both are records like any other: made by events, changed in commits.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal

from msgspec import Struct

from covenant.model.agent import AgentId

PEER_PREFIX: Final = "peer:"
GRANT_PREFIX: Final = "grant:"


class Role(StrEnum):
    OPERATOR = "operator"
    PEER = "peer"


OPERATOR: Final = Role.OPERATOR  # at hand: an enum takes its time to look a member up


class Caller(Struct, frozen=True, gc=False):
    """Who stands behind a call: proven by a token, and true only as long as that token is."""

    agent: AgentId
    role: Role
    token: str  # its digest

    @property
    def is_operator(self) -> bool:
        return self.role is OPERATOR


class Peer(Struct, gc=False, omit_defaults=True):
    agent: AgentId
    role: Role
    token: str  # its digest
    enrolled_ms: int
    revoked_ms: int | None = None
    order: int = 0
    held: tuple[str, ...] = ()  # the actions of its grants, also where they are used up or over; not where revoked


class Scope(Struct, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """What a grant is narrowed to; what is absent is not restricted."""

    version: int = 1
    peer_pubkey_b58: str | None = None  # the counterparty
    task_id: str | None = None
    lease_id: str | None = None
    duplicate_risk: Literal["idempotent", "operator_accepted"] | None = None
    max_uses: int | None = None


class Capability(Struct, frozen=True, gc=False, omit_defaults=True):
    """What the realm's key signs."""

    id: str
    subject: AgentId
    action: str
    granted_by: AgentId
    granted_ms: int
    scope: Scope = Scope()
    expires_ms: int | None = None
    delegable: bool = False
    parent: str | None = None  # the grant that it was delegated from


class Grant(Struct, gc=False, omit_defaults=True):
    capability: Capability
    signature: str
    uses: int = 0
    revoked_ms: int | None = None
    order: int = 0

    # places
    due_ms: int | None = None


class Demand(Struct, frozen=True, gc=False):
    """What a call needs: one action, and what its scope is compared with. `label` names it in the audit."""

    action: str
    label: str
    counterparty: AgentId | None = None
    task_id: str | None = None
    lease_id: str | None = None
    duplicate_risk: str | None = None


class GrantedView(Struct, frozen=True, gc=False, omit_defaults=True):
    """A grant as it is shown."""

    id: str
    subject: AgentId
    action: str
    scope: Scope
    granted_by: AgentId
    granted_ms: int
    signature: str
    expires_ms: int | None = None
    delegable: bool = False
    parent: str | None = None
    uses: int = 0
    revoked_ms: int | None = None


class PeerView(Struct, frozen=True, gc=False, omit_defaults=True):
    display: str
    pubkey: str
    role: Role
    enrolled_ms: int
    revoked_ms: int | None = None


class PeerPage(Struct, frozen=True, gc=False):
    peers: list[PeerView]
    cursor: str | None = None


class GrantPage(Struct, frozen=True, gc=False):
    capabilities: list[GrantedView]
    cursor: str | None = None


def peer_key(pubkey: str) -> str:
    return f"{PEER_PREFIX}{pubkey}"


def grant_key(grant_id: str) -> str:
    return f"{GRANT_PREFIX}{grant_id}"
