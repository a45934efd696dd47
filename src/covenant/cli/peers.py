"""`covenant peers`: who may come in."""

from __future__ import annotations

from pathlib import Path

import click

from covenant.cli.bounds import text_option
from covenant.cli.option import answers, cursor_option, limit_option
from covenant.cli.session import Session
from covenant.cli.table import Cell, Column, print_fields, print_table
from covenant.cli.words import ago
from covenant.exchange.realm import OPERATOR_DISPLAY, read_secret
from covenant.model.error import CovenantError
from covenant.model.peer import PeerView
from covenant.serve import wire as w


@click.group()
def peers() -> None:
    """Who may come in: enroll, list, revoke, rotate tokens."""


@peers.command()
@click.argument("name")
@click.option("--key", metavar="PUBKEY", help="Its Ed25519 key in base58. Without one it is known by its token alone.")
@click.option(
    "--grant",
    "grants",
    multiple=True,
    metavar="ACTION",
    help="What it may do; may be given more than once.",
)
@answers
def enroll(session: Session, name: str, key: str | None, grants: tuple[str, ...]) -> None:
    """Let a peer in, and get the token that it comes with."""
    done = session.ask(w.EnrollPeer(display=name, pubkey=key, grants=list(grants)), w.PeerEnrolled)

    def tell() -> None:
        print_fields(
            [
                ("peer", done.display),
                ("key", done.pubkey),
                ("may", ", ".join(done.granted) or "nothing yet: covenant capabilities grant …"),
                ("token", done.token),
            ]
        )
        click.echo("\nThe token is shown this once. Its owner sets it as COVENANT_TOKEN.")

    session.answer(done, tell)


@peers.command("list")
@limit_option(50)
@cursor_option
@answers
def list_peers(session: Session, limit: int, cursor: str | None) -> None:
    """Who is enrolled, and who was."""
    page = session.ask(w.ListPeers(limit=limit, cursor=cursor), w.Peers)
    session.answer(page, lambda: _tell(session, page))


def _tell(session: Session, page: w.Peers) -> None:
    columns = (Column("peer"), Column("key"), Column("role"), Column("enrolled"), Column("state"))
    print_table(columns, (_row(peer) for peer in page.peers))
    session.tell_more("peers list", page.cursor)


def _row(peer: PeerView) -> tuple[str | Cell, ...]:
    is_in = peer.revoked_ms is None
    state = Cell("in", "green") if is_in else Cell(f"revoked {ago(peer.revoked_ms)}", "red")
    return peer.display, peer.pubkey, peer.role.value, ago(peer.enrolled_ms), state


@peers.command()
@click.argument("name")
@text_option("--reason", default="revoked", show_default=True, meaning="Why; it is kept in the audit.")
@answers
def revoke(session: Session, name: str, reason: str) -> None:
    """Throw a peer out; its open connections end."""
    done = session.ask(w.RevokePeer(peer=name, reason=reason), w.PeerRevoked)
    session.answer(done, lambda: click.echo(f"revoked {done.display} ({done.pubkey})"))


@peers.command()
@click.argument("name", required=False)
@answers
def rotate(session: Session, name: str | None) -> None:
    """Make a new token: of NAME, or your own. The daemon keeps the operator's in its home."""
    done = session.ask(w.RotateToken(peer=name), w.TokenRotated)

    def tell() -> None:
        click.echo(f"the old token of {done.display} is worth nothing any more")
        if done.display == OPERATOR_DISPLAY and _is_in(session.home.token_file, done.token):
            click.echo(f"the new one is in {session.home.token_file}")
        else:
            click.echo(f"the new one, shown this once:\n{done.token}")

    session.answer(done, tell)


def _is_in(file: Path, token: str) -> bool:
    """Not when the daemon has another home than this one."""
    try:
        return read_secret(file).decode(errors="replace").strip() == token
    except (OSError, CovenantError):
        return False
