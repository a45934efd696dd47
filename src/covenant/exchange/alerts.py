"""Alerts: what an operator should hear of without having to look. (Contract 2, 12.)

A check looks at leases without a sign of life, tasks that are out of attempts, and queues that grow. An incident is
told when it begins and when it ends, and not in between, nor again by the next daemon: notes are kept of what is open
and was told. It only tells: nothing is requeued or ended here.

The log gets every alert; a URL gets them as JSON, delivered by a courier who may be slow or fail without anybody
waiting for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, structs

from covenant.exchange.scheduler import Rounds, sleep_until
from covenant.model.command import RetryStale
from covenant.model.error import BadSetting, CovenantError, UnknownTask
from covenant.model.limits import SPAN_MS_MAX
from covenant.model.query import DeepQueues, GetTask, ListQueue
from covenant.model.record import TaskState
from covenant.model.repair import RetryPolicy, RetryReport, SkipReason
from covenant.model.span import span
from covenant.model.view import QueueDepth, QueueEntry, QueuePage
from covenant.store.clock import Clock
from covenant.store.engine import Notes, Store

if TYPE_CHECKING:
    import aiohttp

_PAGE: Final = 100
_LEASES_MAX: Final = 1000  # that one check tells apart

_UNSENT_MAX: Final = 1000
_TIMEOUT_S: Final = 5.0
_TRIES: Final = 5
_FIRST_WAIT_MS: Final = 1000

log = logging.getLogger("covenant.alerts")


class IncidentKind(StrEnum):
    STALE_LEASE = "stale_lease"
    TASK_EXHAUSTED = "task_exhausted"
    QUEUE_GROWING = "queue_growing"


class Thresholds(Struct, frozen=True, kw_only=True):
    """When something is worth an alert, and how often that is looked at."""

    every_ms: int = 30_000
    stale_ms: int = 300_000  # a lease without a sign of life
    queue_depth: int = 1000  # ready tasks of one recipient; more are an incident

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if type(value) is not int or not 0 < value <= SPAN_MS_MAX:
                raise BadSetting(f"{name} of the alerts is a number from 1 to {SPAN_MS_MAX}", name=name)


class Alert(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="covenant_alert"):
    """An incident that begins or ends, as it is posted. `id` is the same at both ends and in every repeat."""

    id: str
    incident: IncidentKind
    state: Literal["open", "resolved"]
    at_ms: int
    since_ms: int
    detail: str
    command: str
    task_id: str | None = None
    lease_id: str | None = None
    recipient: str | None = None


class AlertSummary(Struct, frozen=True):
    """What is open, by kind, and what became of the posts."""

    open: dict[IncidentKind, int]
    waiting: int = 0
    posted: int = 0
    failed: int = 0
    dropped: int = 0


class Alerts:
    """`policy` is that of the retry gate, for what counts as out of attempts; `command_of` names the command that would
    move a task."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        thresholds: Thresholds,
        policy: RetryPolicy,
        command_of: Callable[[QueueEntry], str | None],
        url: str | None = None,
        notes: Notes | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._thresholds = thresholds
        self._policy = structs.replace(policy, enabled=False, max_requeues=0, scan_limit=self._page)
        self._command_of = command_of
        self._courier = None if url is None else Courier(url, clock, self._note)
        self._rounds = Rounds(clock, thresholds.every_ms, self.check)
        self._notes = notes
        self._noted: bytes | None = None
        self._has_read = False  # since it leads
        self._open: dict[str, Alert] = {}  # by id

    async def start(self) -> None:
        if self._store.leads():
            with suppress(CovenantError):  # the first check tries again
                await self._take_over()
        if self._courier is not None:
            self._courier.start()
        self._rounds.start()

    async def stop(self) -> None:
        await self._rounds.stop()
        if self._courier is not None:
            await self._courier.stop()
        await self._note()

    async def _take_over(self) -> None:
        """From the daemon before, or from the one that led until now."""
        self._open = await self._read_notes()
        self._has_read = True

    async def _read_notes(self) -> dict[str, Alert]:
        try:
            self._noted = None if self._notes is None else await self._notes.read()
            told = [] if self._noted is None else msgspec.json.decode(self._noted, type=list[Alert])
        except (OSError, msgspec.MsgspecError) as failed:
            log.warning("what was told before cannot be read, and may be told again: %s: %s", self._notes, failed)
            return {}
        return {alert.id: alert for alert in told}

    async def _note(self) -> None:
        """Keep what is open as far as it was told: what still waits to be posted, the next daemon tells."""
        if self._notes is None or not self._has_read or not self._store.leads():
            return
        told = dict(self._open)
        for alert in reversed([] if self._courier is None else self._courier.unsent):
            if alert.state == "open":
                told.pop(alert.id, None)
            else:
                told[alert.id] = structs.replace(alert, state="open")
        data = msgspec.json.encode(list(told.values()))
        if data == (self._noted or b"[]"):
            return
        try:
            await self._notes.write(data)
            self._noted = data
        except (OSError, CovenantError) as failed:
            log.warning("what was told cannot be kept, and may be told again: %s: %s", self._notes, failed)

    def summary(self) -> AlertSummary:
        counts = Counter(alert.incident for alert in self._open.values())
        courier = self._courier
        by_kind = {kind: counts[kind] for kind in IncidentKind}
        if courier is None:
            return AlertSummary(by_kind)
        return AlertSummary(by_kind, courier.waiting, courier.posted, courier.failed, courier.dropped)

    async def check(self) -> None:
        """What begins and what ends is told only when all has been looked at: half a look proves nothing."""
        if not self._store.leads():
            self._has_read, self._open = False, {}  # who leads tells, and takes note
            return
        if not self._has_read:
            await self._take_over()
        found = {**await self._stale_leases(), **await self._exhausted_tasks(), **await self._growing_queues()}
        for key, alert in found.items():
            if key not in self._open:
                self._tell(alert)
        for key, alert in self._open.items():
            if key not in found:
                self._tell(structs.replace(alert, state="resolved", at_ms=self._clock.now_ms()))
        self._open = found
        await self._note()

    def _tell(self, alert: Alert) -> None:
        level = logging.WARNING if alert.state == "open" else logging.INFO
        log.log(level, "%s %s: %s (%s)", alert.incident, alert.state, alert.detail, alert.command)
        if self._courier is not None:
            self._courier.take(alert)

    # --- what to look at ----------------------------------------------------------------------------------

    @property
    def _page(self) -> int:
        return min(_PAGE, self._store.limits.page_max)

    async def _stale_leases(self) -> dict[str, Alert]:
        """The stalest first, up to a bound. One that was told of is not pushed out by others: those are younger."""
        found: dict[str, Alert] = {}
        cursor: str | None = None
        while len(found) < _LEASES_MAX:
            query = ListQueue(
                None, self._page, TaskState.IN_FLIGHT, min_lease_age_ms=self._thresholds.stale_ms, cursor=cursor
            )
            page: QueuePage = await self._store.ask(query)
            for entry in page.tasks:
                alert = self._stale(entry)
                found[alert.id] = self._open.get(alert.id, alert)
            cursor = page.cursor
            if cursor is None or not page.tasks:
                break
            await asyncio.sleep(0)
        return found

    def _stale(self, entry: QueueEntry) -> Alert:
        detail = f"{entry.leased_to} holds attempt {entry.attempt} and has given no sign of life"
        return self._of_task(IncidentKind.STALE_LEASE, entry, f"{detail} for {span(self._thresholds.stale_ms)}")

    async def _exhausted_tasks(self) -> dict[str, Alert]:
        """What the retry gate, if it ran now, would list as exhausted."""
        found: dict[str, Alert] = {}
        cursor: str | None = None
        for _ in range(0, _LEASES_MAX, self._page):
            report: RetryReport = await self._store.run(RetryStale(None, self._policy, cursor))
            for task_id in report.exhausted:
                alert = await self._exhausted(task_id)
                if alert is not None:
                    found[alert.id] = self._open.get(alert.id, alert)
            cursor = report.cursor
            if cursor is None or report.skipped[-1].reason is SkipReason.LEASE_TOO_YOUNG:
                break
            await asyncio.sleep(0)
        return found

    async def _exhausted(self, task_id: str) -> Alert | None:
        try:
            entry: QueueEntry = await self._store.ask(GetTask(None, task_id))
        except UnknownTask:
            return None
        if entry.state is not TaskState.IN_FLIGHT:
            return None  # it has moved since the report
        detail = f"attempt {entry.attempt} is stale and the retry gate allows {self._policy.max_attempts}"
        return self._of_task(IncidentKind.TASK_EXHAUSTED, entry, f"{detail}: somebody has to decide")

    async def _growing_queues(self) -> dict[str, Alert]:
        deep: list[QueueDepth] = await self._store.ask(DeepQueues(None, self._queue_depth))
        was = {alert.recipient: alert for alert in self._open.values() if alert.incident is IncidentKind.QUEUE_GROWING}
        alerts = (was.get(queue.recipient.display) or self._growing(queue.recipient.display) for queue in deep)
        return {alert.id: alert for alert in alerts}

    @property
    def _queue_depth(self) -> int:
        """The threshold as it was set, but below the size of a full queue, which else would never exceed it."""
        return min(self._thresholds.queue_depth, self._store.limits.queue_depth_max - 1)

    def _growing(self, recipient: str) -> Alert:
        now_ms = self._clock.now_ms()
        return Alert(
            id=f"{IncidentKind.QUEUE_GROWING}:{recipient}:{now_ms}",
            incident=IncidentKind.QUEUE_GROWING,
            state="open",
            at_ms=now_ms,
            since_ms=now_ms,
            detail=f"more than {self._queue_depth} tasks wait for {recipient}: are its workers running?",
            command="covenant a2a status --state queued",
            recipient=recipient,
        )

    def _of_task(self, kind: IncidentKind, entry: QueueEntry, detail: str) -> Alert:
        """It began when the holder was last heard of."""
        return Alert(
            id=f"{kind}:{entry.lease_id}:{entry.heartbeat_ms}",
            incident=kind,
            state="open",
            at_ms=self._clock.now_ms(),
            since_ms=entry.heartbeat_ms or entry.sent_ms,
            detail=detail,
            command=self._command_of(entry) or f"covenant why {entry.task.id}",
            task_id=entry.task.id,
            lease_id=entry.lease_id,
            recipient=entry.task.recipient.display,
        )


class Courier:
    """Brings alerts to a URL, one after the other. Only so many wait: the oldest goes when there is no room."""

    def __init__(self, url: str, clock: Clock, idle: Callable[[], Awaitable[None]]) -> None:
        self._url, self._host = url, _host_of(url)
        self._clock = clock
        self._idle = idle  # called when all is delivered
        self._under_way: Alert | None = None
        self._unsent: deque[Alert] = deque()
        self._came = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self.posted = 0
        self.failed = 0
        self.dropped = 0

    @property
    def waiting(self) -> int:
        return len(self._unsent)

    @property
    def unsent(self) -> list[Alert]:
        """With the one under way."""
        return [*([] if self._under_way is None else [self._under_way]), *self._unsent]

    def take(self, alert: Alert) -> None:
        if len(self._unsent) >= _UNSENT_MAX:
            self._unsent.popleft()
            self.dropped += 1
        self._unsent.append(alert)
        self._came.set()

    def start(self) -> None:
        self._running = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
            self._running = None
        if self.unsent:
            log.warning("%d alerts for %s were not posted before the end", len(self.unsent), self._host)

    async def _run(self) -> None:
        import aiohttp  # whoever has no URL needs none of it

        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as session:
            while True:
                while not self._unsent:
                    await self._idle()
                    self._came.clear()
                    await self._came.wait()
                self._under_way = self._unsent.popleft()
                await self._deliver(self._under_way, session)
                self._under_way = None

    async def _deliver(self, alert: Alert, session: aiohttp.ClientSession) -> None:
        body = msgspec.json.encode(alert)
        for attempt in range(_TRIES):
            if attempt:
                await sleep_until(self._clock, self._clock.now_ms() + _FIRST_WAIT_MS * 2 ** (attempt - 1))
            trouble = await self._post(body, session)
            if trouble is None:
                self.posted += 1
                return
            log.info("%s did not take an alert: %s", self._host, trouble)
        self.failed += 1
        log.error("an alert was not taken by %s and is given up: %s", self._host, alert.id)

    async def _post(self, body: bytes, session: aiohttp.ClientSession) -> str | None:
        """What went wrong, if anything. So is a redirect: an alert goes where the operator said, and nowhere else."""
        import aiohttp

        headers = {"Content-Type": "application/json"}
        try:
            async with session.post(self._url, data=body, headers=headers, allow_redirects=False) as response:
                return None if 200 <= response.status < 300 else f"status {response.status}"
        except (aiohttp.ClientError, OSError, ValueError) as failed:
            return type(failed).__name__


def _host_of(url: str) -> str:
    """What the log may say of a URL, which can hold secrets."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = None
    if host is None or parts.scheme not in ("http", "https"):
        raise BadSetting("an alert goes to a URL like https://host/path", name="--alert-url")
    return host if port is None else f"{host}:{port}"
