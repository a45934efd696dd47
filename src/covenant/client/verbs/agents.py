"""Agents' cards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from covenant.model import command as c
from covenant.model import query as q
from covenant.model.card import Card, CardPage
from covenant.model.error import UnknownPeer
from covenant.serve import wire as w

if TYPE_CHECKING:
    from covenant.client.engine import RemoteEngine


def _card(published: w.Published) -> Card:
    return Card(published.agent, published.card, published.published_ms)


async def publish(x: RemoteEngine, command: c.PublishCard) -> Card:
    done: w.AgentReply = await x.call(
        w.PublishAgent(name=command.agent.pubkey, card=command.card), w.AgentReply, command.by
    )
    return _card(done.published)


async def withdraw(x: RemoteEngine, command: c.WithdrawCard) -> None:
    await x.call(w.WithdrawAgent(name=command.agent.pubkey), w.AgentWithdrawn, command.by)


async def get_card(x: RemoteEngine, query: q.GetCard) -> Card | None:
    try:
        found: w.AgentReply = await x.call(w.GetAgent(name=query.pubkey), w.AgentReply, query.by)
    except UnknownPeer:
        return None
    return _card(found.published)


async def list_cards(x: RemoteEngine, query: q.ListCards) -> CardPage:
    request = w.ListAgents(limit=x.page(query.limit), cursor=x.cursor(query.cursor))
    page: w.Agents = await x.call(request, w.Agents, query.by)
    return CardPage([_card(one) for one in page.agents], page.cursor)
