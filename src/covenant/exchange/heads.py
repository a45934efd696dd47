"""The signature under the end of the chain: with it, nothing that was written before can be changed unseen."""

from __future__ import annotations

from typing import Final

from covenant.exchange.realm import Realm
from covenant.model.command import SignHead
from covenant.store.engine import Store

SIGN_EVERY_MS: Final = 1000


class Heads:
    def __init__(self, store: Store, realm: Realm) -> None:
        self._store = store
        self._realm = realm
        self._signed_seq = 0
        self._signing = False

    async def sign(self) -> None:
        """Vouch for the chain as it is durable now, if anything was written since the last time."""
        sign_lanes = getattr(self._store, "sign_lanes", None)
        if sign_lanes is not None:
            await sign_lanes(self._realm.sign_head)
            return
        head_of = getattr(self._store, "head", None)
        if head_of is None or self._signing:
            return
        self._signing = True
        try:
            head = await head_of()
            if head.seq > self._signed_seq:
                signature = self._realm.sign_head(head.seq, head.hash)
                await self._store.run(SignHead(None, head.seq, head.hash, signature, self._realm.pubkey))
                self._signed_seq = head.seq + 1
        finally:
            self._signing = False
