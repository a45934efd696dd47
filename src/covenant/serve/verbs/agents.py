"""The agents that the A2A protocol reaches, and their cards."""

from __future__ import annotations

from covenant.exchange.exchange import Exchange
from covenant.model import command as c
from covenant.model import query as q
from covenant.model.card import Card, CardPage
from covenant.model.error import UnknownPeer
from covenant.model.peer import Caller
from covenant.rules.card import plain_card
from covenant.serve import wire as w


async def publish_agent(x: Exchange, caller: Caller, r: w.PublishAgent) -> w.AgentReply:
    agent = caller.agent if r.name is None else x.meant(caller, r.name)
    card = plain_card(agent) if r.card is None else r.card
    return w.AgentReply(published=_published(await x.run(caller, c.PublishCard(x.by(caller), agent, card))))


def _published(card: Card) -> w.Published:
    return w.Published(card.agent, card.card, card.published_ms)


async def list_agents(x: Exchange, caller: Caller, r: w.ListAgents) -> w.Agents:
    page: CardPage = await x.ask(caller, q.ListCards(x.by(caller), r.limit, cursor=r.cursor))
    return w.Agents(agents=[_published(card) for card in page.cards], cursor=page.cursor)


async def get_agent(x: Exchange, caller: Caller, r: w.GetAgent) -> w.AgentReply:
    card: Card | None = await x.ask(caller, q.GetCard(x.by(caller), x.key_of(r.name)))
    if card is None:
        raise UnknownPeer(f"no agent {r.name} is published", peer=r.name)
    return w.AgentReply(published=_published(card))


async def withdraw_agent(x: Exchange, caller: Caller, r: w.WithdrawAgent) -> w.AgentWithdrawn:
    agent = x.meant(caller, r.name)
    await x.run(caller, c.WithdrawCard(x.by(caller), agent))
    return w.AgentWithdrawn(display=agent.display, pubkey=agent.pubkey)
