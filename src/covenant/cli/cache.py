"""The cache of results: what would be answered without asking anybody to work."""

from __future__ import annotations

import click

from covenant.cli.bounds import reason_option
from covenant.cli.option import answers, cursor_option, limit_option
from covenant.cli.session import Session
from covenant.cli.table import Column, print_table
from covenant.cli.words import ago, brief
from covenant.serve import wire as w


@click.group()
def cache() -> None:
    """Results that are kept for repeated tasks."""


@cache.command("list")
@limit_option(50)
@cursor_option
@answers
def list_cached(session: Session, limit: int, cursor: str | None) -> None:
    """What is in the cache."""
    page = session.ask(w.ListCache(limit=limit, cursor=cursor), w.CacheReply)
    session.answer(page, lambda: _tell(session, page))


def _tell(session: Session, page: w.CacheReply) -> None:
    if not page.entries:
        click.echo("the cache is empty")
        return
    columns = (Column("entry"), Column("kind", fits=True), Column("key", fits=True), Column("status"), Column("cached"))
    print_table(
        columns,
        (
            (
                entry.id,
                brief(entry.cache_key.kind, 40),
                brief(entry.cache_key.key, 40),
                entry.result.status,
                ago(entry.cached_ms),
            )
            for entry in page.entries
        ),
    )
    session.tell_more("a2a cache list", page.cursor)


@cache.command()
@click.argument("entry")
@reason_option
@answers
def forget(session: Session, entry: str, reason: str) -> None:
    """Drop an entry: the next send under its key does the work again."""
    done = session.ask(w.ForgetCached(entry_id=entry, reason=reason), w.Forgotten)
    session.answer(done, lambda: click.echo(f"forgot {done.entry_id}"))
