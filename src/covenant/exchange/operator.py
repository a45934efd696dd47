"""The operator: in the store from the first start on, with a token that its keeper has.

Once the store knows the operator, no other token becomes good because it was found: it may be one that was rotated
away. A keeper that has lost the good one gets a fresh one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from covenant.exchange.token import Keeper, digest_of, make_token
from covenant.model import command as c
from covenant.model.error import PeerConflict, StoreUnavailable
from covenant.model.peer import Role
from covenant.rules.grant import OPERATOR_ACTIONS

if TYPE_CHECKING:
    from covenant.exchange.exchange import Exchange

log = logging.getLogger("covenant.exchange")


class Operator:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._keeper: Keeper | None = None  # of its token
        self._keeping = asyncio.Lock()

    async def meet(self, token: str | Keeper) -> None:
        """In a store that was just opened."""
        self._keeper = None if isinstance(token, str) else token
        found = [token] if isinstance(token, str) else token.found()
        try:
            await self._meet(found)
        except PeerConflict:  # another daemon was first: both have just begun
            await self._exchange.store.refresh()
            await self._meet(found)

    async def _meet(self, found: Sequence[str]) -> None:
        store, realm = self._exchange.store, self._exchange.realm
        enrolled = store.agent_of(realm.operator.display)
        if enrolled is not None:
            realm.operator = enrolled
        operator = realm.operator
        known = store.caller_at(operator.pubkey)
        if known is None:
            grants = tuple(self._exchange.trust.sign(operator, action, operator) for action in OPERATOR_ACTIONS)
            token = found[0] if found else make_token()
            await self.keep(token, c.EnrollPeer(None, operator, Role.OPERATOR, digest_of(token), grants))
            return
        good = next((token for token in found if digest_of(token) == known.token), None)
        if good is None and self._keeper is None:
            log.warning("the token that was given at the start is not the operator's (any more), and opens nothing")
        elif good is None and store.is_shared:
            log.info("the operator's token is not kept here: the daemon that first opened this store has it")
        elif good is None:
            log.warning("the operator's token was not where it is kept; a new one was made")
            token = make_token()
            await self.keep(token, c.RotateToken(None, operator.pubkey, digest_of(token)))
        elif self._keeper is not None:
            self._keeper.settle(good)

    async def keep(self, token: str, command: c.Command | c.Call) -> Any:
        """Make a token the operator's: whoever is killed on the way leaves it where the next start finds it."""
        if self._keeper is None:
            return await self._exchange.store.run(command)
        async with self._keeping:
            try:
                self._keeper.lay_ready(token)
            except OSError as failed:
                raise StoreUnavailable(
                    f"the operator's token cannot be kept: {failed}", outcome="not_stored"
                ) from failed
            reply = await self._exchange.store.run(command)
            try:
                self._keeper.settle(token)
            except OSError:
                log.exception(
                    "the operator's new token is laid ready, but not in its place; the next start puts it there"
                )
            return reply
