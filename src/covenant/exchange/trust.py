"""Whom the realm trusts, and with what: peers come and go, get tokens and grants.

Where trust ends, it ends everywhere: a revocation or a new token is carried to its end, and then whoever keeps
something open for that peer is told, also when nobody waits for the answer any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from covenant.exchange.operator import Operator
from covenant.exchange.realm import random_key
from covenant.exchange.token import digest_of, make_token
from covenant.model import command as c
from covenant.model.agent import AgentId
from covenant.model.peer import Caller, Capability, Grant, GrantedView, PeerView, Role, Scope
from covenant.rules.grant import check_action

if TYPE_CHECKING:
    from covenant.exchange.exchange import Exchange

_ANY: Final = Scope()

T = TypeVar("T")


class Trust:
    def __init__(self, exchange: Exchange) -> None:
        self.operator = Operator(exchange)
        self._exchange = exchange
        self._on_lost: list[Callable[[str], None]] = []
        self._ending: set[asyncio.Task[Any]] = set()

    # --- peers --------------------------------------------------------------------------------------------

    async def enroll(
        self, caller: Caller, display: str, pubkey: str | None, actions: Sequence[str]
    ) -> tuple[PeerView, str]:
        """A new peer with a token of its own. Without a key it gets a random one, and is known by its token alone."""
        label = AgentId.named(display).display
        agent = AgentId(label, pubkey or random_key())
        token = make_token()
        grants = tuple(self.sign(agent, action, caller.agent) for action in actions)
        command = c.EnrollPeer(self._exchange.by(caller), agent, Role.PEER, digest_of(token), grants)
        return await self._exchange.run(caller, command), token

    async def revoke_peer(self, caller: Caller, name: str, reason: str) -> PeerView:
        agent = self._exchange.meant(caller, name)
        command = c.RevokePeer(self._exchange.by(caller), agent.pubkey, reason)
        view: PeerView = await self._end(agent.pubkey, self._exchange.run(caller, command))
        return view

    async def rotate(self, caller: Caller, name: str | None) -> tuple[PeerView, str]:
        """A peer may always change its own token."""
        agent = caller.agent if name is None else self._exchange.meant(caller, name)
        token = make_token()
        command = c.RotateToken(self._exchange.by(caller), agent.pubkey, digest_of(token))
        if caller.is_operator and agent == self._exchange.realm.operator:
            rotating = self.operator.keep(token, c.Call(caller, command))
        else:
            rotating = self._exchange.run(caller, command)
        view: PeerView = await self._end(agent.pubkey, rotating)
        return view, token

    # --- its end ------------------------------------------------------------------------------------------

    def watch(self, lost: Callable[[str], None]) -> None:
        """Be told the key of a peer whose token is worth nothing from now on."""
        self._on_lost.append(lost)

    def lost(self, pubkey: str) -> None:
        for tell in self._on_lost:
            tell(pubkey)

    async def _end(self, pubkey: str, work: Coroutine[Any, Any, T]) -> T:
        """Done to its end, with what follows from it, also when nobody waits for the answer any more."""
        doing = asyncio.ensure_future(work)
        self._ending.add(doing)
        try:
            return await asyncio.shield(doing)
        finally:
            # Behind the reply: who changes its own token hears the new one on a connection that this closes.
            doing.add_done_callback(partial(self._ended, pubkey))

    def _ended(self, pubkey: str, doing: asyncio.Task[Any]) -> None:
        self._ending.discard(doing)
        if not doing.cancelled() and doing.exception() is None:
            self.lost(pubkey)

    async def settle(self) -> None:
        """Wait for what is being carried to its end."""
        if self._ending:
            await asyncio.wait(self._ending)

    # --- grants -------------------------------------------------------------------------------------------

    async def grant(
        self,
        caller: Caller,
        subject: str,
        action: str,
        scope: Scope,
        expires_ms: int | None,
        delegable: bool,
        parent: str | None,
    ) -> GrantedView:
        who = self._exchange.named(subject)
        signed = self.sign(who, action, caller.agent, scope, expires_ms, delegable, parent)
        granted: GrantedView = await self._exchange.run(caller, c.GrantCapability(self._exchange.by(caller), signed))
        return granted

    def sign(
        self,
        subject: AgentId,
        action: str,
        granter: AgentId,
        scope: Scope = _ANY,
        expires_ms: int | None = None,
        delegable: bool = False,
        parent: str | None = None,
    ) -> Grant:
        """A grant from now on, with the realm's signature under it. What is signed names its action in full."""
        x = self._exchange
        action = check_action(action)
        capability = Capability(x.new_id(), subject, action, granter, x.now_ms(), scope, expires_ms, delegable, parent)
        return x.realm.sign_grant(capability)
