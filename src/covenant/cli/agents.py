"""`covenant agents`: which agents the A2A protocol reaches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import click

from covenant.cli.content import json_in
from covenant.cli.entry import short
from covenant.cli.option import answers, cursor_option, limit_option
from covenant.cli.session import Session
from covenant.cli.table import Column, print_fields, print_table
from covenant.cli.words import ago, brief, safe
from covenant.serve import wire as w

_BINDINGS: Final = {"jsonrpc": "JSONRPC", "rest": "HTTP+JSON", "grpc": "GRPC"}


@click.group()
def agents() -> None:
    """Whom A2A clients reach: publish, list, show, withdraw."""


@agents.command()
@click.argument("name")
@click.argument("card", required=False, type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
@click.option(
    "--binding",
    "bindings",
    multiple=True,
    type=click.Choice(tuple(_BINDINGS)),
    help="List only this one; again for more, the preferred first. Default: all that are served.",
)
@answers
def publish(session: Session, name: str, card: Path | None, bindings: tuple[str, ...]) -> None:
    """Let A2A clients reach the peer NAME.

    CARD is a JSON file with its agent card, or - for stdin. Where it is served, and the signature, are added by the
    daemon. Without one, a plain card is made. A member that the daemon would not serve as it is written is refused.
    """
    said = None if card is None else json_in(card, dict[str, Any], "card", "CARD")
    if bindings:
        said = {"name": name.partition("@")[0]} if said is None else said
        if said.get("supportedInterfaces") is not None:
            raise click.UsageError("the card has supportedInterfaces already: leave them or --binding out")
        said["supportedInterfaces"] = [{"protocolBinding": _BINDINGS[binding]} for binding in dict.fromkeys(bindings)]
    done = session.ask(w.PublishAgent(name=name, card=said), w.AgentReply)

    def tell() -> None:
        label = short(done.published.agent)
        click.echo(f"published {label} as {safe(str(done.published.card.get('name', label)))}")
        click.echo(f"see it:   {session.command(f'agents show {label}')}")

    session.answer(done, tell)


@agents.command("list")
@limit_option(50)
@cursor_option
@answers
def list_agents(session: Session, limit: int, cursor: str | None) -> None:
    """The agents that are published."""
    page = session.ask(w.ListAgents(limit=limit, cursor=cursor), w.Agents)
    session.answer(page, lambda: _tell(session, page))


def _tell(session: Session, page: w.Agents) -> None:
    columns = (Column("agent"), Column("name", fits=True), Column("published"), Column("what it does", fits=True))
    print_table(columns, (_row(one) for one in page.agents))
    session.tell_more("agents list", page.cursor)


def _row(one: w.Published) -> tuple[str, ...]:
    name, told = (brief(str(one.card.get(member, ""))) for member in ("name", "description"))
    return short(one.agent), name, ago(one.published_ms), told


@agents.command()
@click.argument("name")
@answers
def show(session: Session, name: str) -> None:
    """Show an agent and its card, as it was published."""
    found = session.ask(w.GetAgent(name=name), w.AgentReply)

    def tell() -> None:
        one = found.published
        card = safe(json.dumps(one.card, indent=2, ensure_ascii=False))
        print_fields(
            [
                ("agent", one.agent.display),
                ("key", one.agent.pubkey),
                ("published", ago(one.published_ms)),
                ("card", card),
            ]
        )

    session.answer(found, tell)


@agents.command()
@click.argument("name")
@answers
def withdraw(session: Session, name: str) -> None:
    """Take its card away: A2A clients find it no more. Its open tasks go on."""
    done = session.ask(w.WithdrawAgent(name=name), w.AgentWithdrawn)
    session.answer(done, lambda: click.echo(f"withdrew {done.display}"))
