"""Webhooks: who may ask for them, and how far each has been told.

A webhook is told of every generation after the one at which it was set. How far it has been told is a record, so that
a restart goes on where the last one stopped.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from msgspec import structs

from covenant.model import event as e
from covenant.model.agent import AgentId
from covenant.model.audit import AuditRow
from covenant.model.command import DropPush, NotePush, SetPush
from covenant.model.error import Malformed, NotPermitted, TooLarge, UnknownPush, UnknownTask
from covenant.model.push import Authentication, Push, PushConfig, push_key
from covenant.model.query import GetPush, GetPushed, ListPushes
from covenant.model.record import TaskRecord
from covenant.model.view import Pushed
from covenant.rules.address import is_surely_private
from covenant.rules.context import Commit, Context, View
from covenant.rules.dialect import VERSIONS, negotiated
from covenant.rules.envelope import check_asked, check_id, check_name, check_size, check_text
from covenant.rules.retention import is_retained
from covenant.rules.sight import is_hidden, visible_task

PUSHES_MAX: Final = 16  # of one task
GIVEN_UP: Final = "push_given_up"
_NO_STEPS: Final = (".", "..")  # clients take them for where the path leads
_WEB_PORTS: Final = (80, 443)
_FREE_PORTS_FROM: Final = 1024  # below it are the services of the system: mail, logins, names


def set_push(command: SetPush, view: View, ctx: Context) -> Commit:
    """Under an id that is there already, it takes that one's place; the very same again changes nothing."""
    record = _own(command.task_id, command.by, view, ctx)
    config = command.config
    after = 0 if command.from_start else record.generation
    return Commit(_set(config, record.task.id, after, view.pushes(record.task.id), ctx), config)


def brought(config: PushConfig, task_id: str, after: int, known: Sequence[Push], ctx: Context) -> tuple[e.PushSet, ...]:
    """The webhook that a message brings along, in the commit of that message. Without an id of its own it is known by
    where it leads: the one that comes with every message of a task is one."""
    if not config.id:
        config = structs.replace(config, id=str(uuid.uuid5(uuid.NAMESPACE_URL, f"{task_id}\n{config.url}")))
    return _set(config, task_id, after, known, ctx)


def _set(config: PushConfig, task_id: str, after: int, known: Sequence[Push], ctx: Context) -> tuple[e.PushSet, ...]:
    """Beside those that the task has."""
    config = _checked(config, ctx)
    if any(push.config == config for push in known):
        return ()
    if len(known) >= PUSHES_MAX and not any(push.config.id == config.id for push in known):
        raise TooLarge(f"a task has at most {PUSHES_MAX} webhooks", field="config", limit=PUSHES_MAX)
    return (e.PushSet(push_key(task_id, config.id), config, after),)


def _checked(config: PushConfig, ctx: Context) -> PushConfig:
    """Return the configuration as it is kept: its version is Major.Minor."""
    if type(config) is not PushConfig:
        raise Malformed("a push configuration is needed", field="config")
    check_name(config.id, "id", ctx.limits)
    if "/" in config.id or config.id in _NO_STEPS:
        raise Malformed("id is one step of a path: without a slash, and neither `.` nor `..`", field="id")
    _check_url(config.url, ctx)
    _check_secrets(config, ctx)
    if config.protocol_version is None:
        return config
    agreed = negotiated(config.protocol_version)
    if agreed is None:
        raise Malformed(f"protocolVersion is {' or '.join(VERSIONS)}", field="protocolVersion")
    return structs.replace(config, protocol_version=agreed)


def _check_url(url: str, ctx: Context) -> None:
    """What can be known of it now; where its host leads is looked up each time that it is called."""
    check_size(url, "url", ctx.limits.text_bytes_max)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise Malformed("url is no URL", field="url") from None
    if not url.isprintable() or " " in parts.netloc:
        raise Malformed("url has no control characters, and its host no spaces", field="url")
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise Malformed("url is http:// or https:// with a host", field="url")
    if parts.username is not None or parts.password is not None:
        raise Malformed("url names no user: credentials go under authentication", field="url")
    if port is not None and port not in _WEB_PORTS and port < _FREE_PORTS_FROM:
        raise Malformed(f"the port of url is 80, 443, or {_FREE_PORTS_FROM} and above", field="url")
    if not ctx.private_webhooks and is_surely_private(parts.hostname):
        raise Malformed("url leads to an address that is not public", field="url")


def _check_secrets(config: PushConfig, ctx: Context) -> None:
    """They become header values: one line, and nothing that ends one."""
    authentication = config.authentication
    if authentication is not None and type(authentication) is not Authentication:
        raise Malformed("authentication has a scheme and credentials", field="authentication")
    values = {"token": config.token}
    if authentication is not None:
        check_text(authentication.scheme, "scheme", ctx.limits.text_bytes_max)
        values |= {"scheme": authentication.scheme, "credentials": authentication.credentials}
    for name, value in values.items():
        if value is not None:
            check_size(value, name, ctx.limits.text_bytes_max)
            if not value.isprintable() or not value.isascii():
                raise Malformed(f"{name} is one line of printable ASCII", field=name)


def drop_push(command: DropPush, view: View, ctx: Context) -> Commit:
    """Again changes nothing."""
    record = _own(command.task_id, command.by, view, ctx)
    check_asked(command.config_id, "id", ctx.limits.text_bytes_max)
    key = push_key(record.task.id, command.config_id)
    return Commit(() if view.get(key) is None else (e.PushDropped(key),))


def note_push(command: NotePush, view: View, ctx: Context) -> Commit:
    """What the deliverer has done; the webhook may have gone meanwhile, or another may be in its place."""
    key = push_key(command.task_id, command.config_id)
    push = view.get(key)
    if not isinstance(push, Push) or push.since != command.since:
        return Commit(())
    if command.reason is not None:
        row = AuditRow(GIVEN_UP, subject=command.config_id, task_id=command.task_id, reason=command.reason)
        return Commit((e.PushDropped(key),), None, (row,))
    if command.is_last:
        return Commit((e.PushDropped(key),))
    if push.delivered >= command.generation:
        return Commit(())
    return Commit((e.PushDelivered(key, command.generation),))


def get_push(query: GetPush, view: View, ctx: Context) -> PushConfig:
    record = _own(query.task_id, query.by, view, ctx)
    check_asked(query.config_id, "id", ctx.limits.text_bytes_max)
    push = view.get(push_key(record.task.id, query.config_id))
    if not isinstance(push, Push):
        raise UnknownPush(f"no webhook {query.config_id}", config=query.config_id)
    return push.config


def list_pushes(query: ListPushes, view: View, ctx: Context) -> list[PushConfig]:
    return [push.config for push in view.pushes(_own(query.task_id, query.by, view, ctx).task.id)]


def get_pushed(query: GetPushed, view: View, ctx: Context) -> Pushed:
    if query.by is not None:
        raise NotPermitted("the secrets of webhooks are for those alone", task_id=query.task_id)
    pushes = view.pushes(query.task_id)
    record = view.get(query.task_id)
    if not isinstance(record, TaskRecord) or not is_retained(record, ctx):
        return Pushed(None, 0, True, pushes)
    if is_hidden(record):
        return Pushed(record.sender, 0, False, pushes)
    return Pushed(record.sender, record.generation, record.outcome is not None, pushes, record.direct)


def _own(task_id: str, by: AgentId | None, view: View, ctx: Context) -> TaskRecord:
    task_id = check_id(task_id, "task_id")
    record = visible_task(task_id, by, view, ctx)
    if record.direct:
        raise UnknownTask(f"no task {task_id}", task_id=task_id)
    if by is not None and by.pubkey != record.sender:
        raise NotPermitted("only the sender of a task sets webhooks for it", task_id=task_id)
    return record
