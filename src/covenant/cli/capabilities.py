"""`covenant capabilities`: who may do what."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from covenant.cli.bounds import TIME_MS, text_option
from covenant.cli.option import RISKS, Duration, Spelled, answers, cursor_option, limit_option
from covenant.cli.session import Session, moment
from covenant.cli.table import Column, print_fields, print_table
from covenant.cli.words import ago, now_ms, safe
from covenant.model.peer import GrantedView, Scope
from covenant.serve import wire as w


class ScopeType(click.ParamType[Scope]):
    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Scope:
        if isinstance(value, Scope):
            return value
        try:
            return msgspec.json.decode(value, type=Scope)
        except msgspec.MsgspecError as wrong:
            self.fail(f"no scope: {wrong}", param, ctx)


@click.group()
def capabilities() -> None:
    """Who may do what: grant, revoke, list, check."""


@capabilities.command()
@click.argument("subject")
@click.argument("action")
@click.option("--scope", type=ScopeType(), default=Scope(), help='What it is narrowed to: {"max_uses": 3}, …')
@click.option("--expires-in", "expires_in_ms", type=Duration(), help="How long it holds: 30d.")
@click.option("--expires-ms", type=TIME_MS, help="The same as Unix time in ms.")
@click.option("--delegable", is_flag=True, help="SUBJECT may pass it on.")
@click.option("--parent", metavar="GRANT", help="The grant that it is passed on from.")
@answers
def grant(
    session: Session,
    subject: str,
    action: str,
    scope: Scope,
    expires_in_ms: int | None,
    expires_ms: int | None,
    delegable: bool,
    parent: str | None,
) -> None:
    """Let SUBJECT do ACTION, such as a2a.send.bob or a2a.repair.requeue."""
    until_ms = moment("expires", expires_ms, expires_in_ms)
    request = w.Grant(
        subject=subject, action=action, scope=scope, expires_ms=until_ms, delegable=delegable, parent=parent
    )
    done = session.ask(request, w.Granted)
    session.answer(done, lambda: _tell(done.capability))


def _tell(granted: GrantedView) -> None:
    print_fields(
        [
            ("grant", granted.id),
            ("subject", granted.subject.display),
            ("action", granted.action),
            ("limits", _limits(granted)),
            ("granted by", granted.granted_by.display),
            ("revoked", ago(granted.revoked_ms)),
        ]
    )


def _limits(granted: GrantedView) -> str:
    """Everything that narrows or widens a grant, on one line."""
    scope = {name: value for name, value in msgspec.to_builtins(granted.scope).items() if name != "max_uses"}
    parts = [f"{name}={safe(str(value))}" for name, value in scope.items()]
    if granted.scope.max_uses is not None:
        parts.append(f"used {granted.uses} of {granted.scope.max_uses} times")
    if granted.expires_ms is not None:
        over = granted.expires_ms <= now_ms()
        parts.append(f"{'expired' if over else 'expires'} {ago(granted.expires_ms)}")
    if granted.delegable:
        parts.append("delegable")
    if granted.parent is not None:
        parts.append(f"from {granted.parent}")
    return ", ".join(parts)


@capabilities.command()
@click.argument("grant_id")
@text_option("--reason", default="revoked", show_default=True, meaning="Why; it is kept in the audit.")
@answers
def revoke(session: Session, grant_id: str, reason: str) -> None:
    """Take a grant back; it is worth nothing from the next call on."""
    done = session.ask(w.Revoke(grant_id=grant_id, reason=reason), w.Revoked)
    session.answer(done, lambda: _tell(done.capability))


@capabilities.command("list")
@click.option("--subject", help="Only those of this peer.")
@limit_option(50)
@cursor_option
@answers
def list_grants(session: Session, subject: str | None, limit: int, cursor: str | None) -> None:
    """Grants that hold."""
    page = session.ask(w.ListGrants(limit=limit, subject=subject, cursor=cursor), w.Grants)
    session.answer(page, lambda: _tell_page(session, page))


def _tell_page(session: Session, page: w.Grants) -> None:
    if not page.capabilities:
        click.echo("no grants")
        return
    columns = (Column("grant"), Column("subject"), Column("action"), Column("limits", fits=True))
    print_table(columns, ((one.id, one.subject.display, one.action, _limits(one)) for one in page.capabilities))
    session.tell_more("capabilities list", page.cursor)


@capabilities.command()
@click.argument("action")
@click.option("--subject", help="Whose right it is. Default: your own.")
@click.option("--counterparty", help="The other side. Default: the peer that ACTION ends with.")
@click.option("--task-id", metavar="ID", help="The task that the call is about.")
@click.option("--lease-id", metavar="LEASE", help="The lease that the call names.")
@click.option("--duplicate-risk", type=Spelled(RISKS), help="Of a requeue: what is said about doing it twice.")
@answers
def check(
    session: Session,
    action: str,
    subject: str | None,
    counterparty: str | None,
    task_id: str | None,
    lease_id: str | None,
    duplicate_risk: str | None,
) -> None:
    """Whether a call would be let in; exit 1 if not. Nothing is used up."""
    found = session.ask(
        w.Check(
            action=action,
            subject=subject,
            counterparty=counterparty,
            task_id=task_id,
            lease_id=lease_id,
            duplicate_risk=None if duplicate_risk is None else duplicate_risk.replace("-", "_"),
        ),
        w.Checked,
    )
    session.answer(found, lambda: _tell_checked(found))
    if not found.passed:
        raise click.exceptions.Exit(1)


def _tell_checked(found: w.Checked) -> None:
    if found.passed:
        by = "by right" if found.grant is None else f"by grant {found.grant}"
        click.echo(f"{click.style('yes', fg='green')}: {found.subject} may {found.action}, {by}")
    else:
        click.echo(f"{click.style('no', fg='red')}: {found.subject} may not {found.action} ({found.reason})")
