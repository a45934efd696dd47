"""Whom a store knows: its peers, their grants and cards, and how far history was let go.

They are few, and asked for in every call, so every engine holds all of them in memory: as a part of its live state, or
as a copy of what others may change too. Like the state it decides nothing: it holds records, and finds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, TypeVar

from covenant.model.card import Card
from covenant.model.peer import Caller, Grant, Peer, peer_key
from covenant.model.push import Push
from covenant.model.record import Horizon, Key, Record, Tombstone
from covenant.model.run import Signal
from covenant.rules.grant import pin_of
from covenant.store.ledger import Ledger, Shelf

TRUSTED: Final = (Peer, Grant, Card, Horizon)

K = TypeVar("K", Peer, Grant, Push, Card, Signal)


class Directory:
    __slots__ = (
        "_callers",
        "_cards",
        "_granted",
        "_granted_to",
        "_grants",
        "_labels",
        "_peers",
        "compaction",
        "directory_mark",
        "records",
        "trust_order",
    )

    def __init__(self) -> None:
        self.records: dict[Key, Record | Tombstone] = {}
        self.compaction: Horizon | None = None
        self.trust_order = 0  # the last event that touched a peer or a grant
        self.directory_mark = object()  # another one whenever a peer or a card has changed
        self._cards = Ledger()
        self._labels: dict[str, str] = {}  # display of a peer, its key
        self._callers: dict[str, Caller] = {}  # by the digest of their token
        self._peers = Ledger()
        self._grants: dict[str, dict[str, dict[str, dict[str, Grant]]]] = {}  # subject, action, pin, id
        self._granted = Ledger()
        self._granted_to = Shelf(Ledger)

    def get(self, key: Key) -> Record | Tombstone | None:
        return self.records.get(key)

    def put(self, key: Key, record: Record | None) -> None:
        """Hold this under the key from now on, or nothing, whatever was held before."""
        old = self.records.get(key)
        if record is not None:
            self.records[key] = record
            self._place(key, old, record)
        elif old is not None:
            self._remove(key)

    def _place(self, key: Key, old: Record | Tombstone | None, new: Record) -> None:
        if type(new) is Peer:
            self._move_peer(key, old if type(old) is Peer else None, new)
        elif type(new) is Grant:
            self._move_grant(key, old if type(old) is Grant else None, new)
        elif type(new) is Card:
            self._move_card(key, old if type(old) is Card else None, new)
        elif type(new) is Horizon:
            self.compaction = new

    def _remove(self, key: Key) -> None:
        record = self.records.pop(key)
        if type(record) is Card:
            self._drop_card(record)

    def _move_peer(self, key: Key, old: Peer | None, new: Peer) -> None:
        self.trust_order = max(self.trust_order, new.order)
        self.directory_mark = object()
        caller = None
        if old is not None:
            caller = self._callers.pop(old.token, None)
            self._peers.remove(old.order)
        self._peers.add(new.order, key)
        self._labels[new.agent.display] = new.agent.pubkey
        if new.revoked_ms is None:
            entered = Caller(new.agent, new.role, new.token)
            self._callers[new.token] = caller if caller == entered else entered  # the same is known at a glance

    def _move_grant(self, key: Key, old: Grant | None, new: Grant) -> None:
        self.trust_order = max(self.trust_order, new.order)
        capability = new.capability
        actions = self._grants.setdefault(capability.subject.pubkey, {})
        pins = actions.setdefault(capability.action, {})
        grants = pins.setdefault(pin_of(capability), {})
        if old is not None:
            self._granted.remove(old.order)
            self._granted_to.ledgers[capability.subject.pubkey].remove(old.order)
        if new.revoked_ms is None:
            grants[capability.id] = new
            self._granted.add(new.order, key)
            self._granted_to.add(capability.subject.pubkey, new.order, key)
        else:
            grants.pop(capability.id, None)
            if not grants:
                del pins[pin_of(capability)]
            if not pins:
                del actions[capability.action]

    def _move_card(self, key: Key, old: Card | None, new: Card) -> None:
        self.directory_mark = object()
        if old is not None:
            self._cards.remove(old.order)
        self._cards.add(new.order, key)

    def _drop_card(self, card: Card) -> None:
        self.directory_mark = object()
        self._cards.remove(card.order)

    # --- of the rules' view -------------------------------------------------------------------------------

    def grants(self, subject: str, action: str) -> Mapping[str, Mapping[str, Grant]]:
        actions = self._grants.get(subject)
        return {} if actions is None else actions.get(action, {})

    def peer_named(self, display: str) -> str | None:
        return self._labels.get(display)

    def caller_of(self, digest: str) -> Caller | None:
        return self._callers.get(digest)

    def peers(self, after: int, limit: int) -> Sequence[Peer]:
        return self._kept(Peer, islice(self._peers.after(after), limit))

    def all_grants(self, subject: str | None, after: int, limit: int) -> Sequence[Grant]:
        ledger = self._granted if subject is None else self._granted_to.get(subject)
        return self._kept(Grant, islice(ledger.after(after), limit))

    def cards(self, after: int, limit: int) -> Sequence[Card]:
        return self._kept(Card, islice(self._cards.after(after), limit))

    def left_grants(self) -> list[str]:
        """Revoked peers that still have open grants: somebody was interrupted in ending them."""
        peers = {pubkey: self.records.get(peer_key(pubkey)) for pubkey, actions in self._grants.items() if actions}
        return [pubkey for pubkey, peer in peers.items() if type(peer) is Peer and peer.revoked_ms is not None]

    def _kept(self, kind: type[K], keys: Iterable[Key]) -> list[K]:
        """What a ledger of one kind leads to."""
        return [record for key in keys if isinstance(record := self.records[key], kind)]
