"""The retry scheduler: the retry gate on a timer, off unless the environment asks for it. (Contract 12.)

A pass is a call of the operator like any other and comes through the same door: without a grant of
`a2a.repair.requeue` it is refused. Passes follow one another, never two at once, and together they go through all
leases, the oldest first. A pass that was refused or failed leaves its row too, late if the store was down.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from msgspec import Struct

from covenant.exchange.exchange import Exchange
from covenant.model.command import NoteRefusal, RetryStale
from covenant.model.error import BadSetting, CovenantError
from covenant.model.limits import SPAN_MS_MAX, Limits
from covenant.model.peer import Caller
from covenant.model.repair import RetryPolicy, RetryReport, SkipReason
from covenant.store.clock import Clock

PREFIX: Final = "COVENANT_A2A_AUTO_RETRY_"
INTERVAL_MS: Final = 60_000
SCAN_ROW: Final = "a2a_auto_retry_scheduler_scan"

_ATTEMPTS_MAX: Final = 2**31
_WORDS: Final = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
_NUMBER: Final = re.compile(r"[0-9]{1,18}", re.ASCII)

log = logging.getLogger("covenant.scheduler")


# --- what the environment says -----------------------------------------------------------------------------


class RetryPlan(Struct, frozen=True, kw_only=True):
    """How often the gate runs, and its bounds; `policy.enabled` says whether it runs at all."""

    interval_ms: int = INTERVAL_MS
    policy: RetryPolicy = RetryPolicy()


def plan_from(environ: Mapping[str, str], limits: Limits | None = None) -> RetryPlan:
    """The plan that the six variables tell. All of them are checked, also while the scheduler is off: a wrong one must
    not come to light on the day that it is switched on. Nor is one taken with which no pass could requeue anything."""
    limits, usual = limits or Limits(), RetryPolicy()
    return RetryPlan(
        interval_ms=_number(environ, "INTERVAL_MS", INTERVAL_MS, SPAN_MS_MAX, least=1),
        policy=RetryPolicy(
            enabled=_flag(environ, "SCHEDULER"),
            min_lease_age_ms=_number(environ, "MIN_LEASE_AGE_MS", usual.min_lease_age_ms, SPAN_MS_MAX),
            max_attempts=_number(environ, "MAX_ATTEMPTS", usual.max_attempts, _ATTEMPTS_MAX, least=2),
            max_requeues=_number(environ, "MAX_REQUEUES", usual.max_requeues, limits.step_records_max, least=1),
            scan_limit=_number(environ, "SCAN_LIMIT", usual.scan_limit, limits.page_max, least=1),
        ),
    )


def _flag(environ: Mapping[str, str], variable: str) -> bool:
    name = PREFIX + variable
    text = environ.get(name, "off").strip().lower()
    if text not in _WORDS:
        raise BadSetting(f"{name} is {' or '.join(_WORDS)}, not {text!r}", name=name)
    return _WORDS[text]


def _number(environ: Mapping[str, str], variable: str, usual: int, most: int, least: int = 0) -> int:
    name = PREFIX + variable
    text = environ.get(name, str(usual)).strip()
    if not _NUMBER.fullmatch(text) or not least <= int(text) <= most:
        raise BadSetting(f"{name} is a number from {least} to {most}, not {text[:40]!r}", name=name)
    return int(text)


# --- the timer ---------------------------------------------------------------------------------------------


async def sleep_until(clock: Clock, due_ms: int) -> None:
    """Until the clock shows this time, or was set back: then nobody knows how long it would be."""
    began_ms = clock.now_ms()
    while began_ms <= clock.now_ms() < due_ms:
        woken = asyncio.Event()
        timer = clock.call_at(due_ms, woken.set)
        try:
            await woken.wait()
        finally:
            timer.cancel()


class Rounds:
    """Does the same work again and again. A round that fails is told, and is not the last."""

    def __init__(self, clock: Clock, interval_ms: int, work: Callable[[], Awaitable[object]]) -> None:
        self._clock = clock
        self._interval_ms = interval_ms
        self._work = work
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        first_ms = self._clock.now_ms() + self._interval_ms
        self._running = asyncio.create_task(self._run(first_ms))

    async def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
            self._running = None

    async def _run(self, due_ms: int) -> None:
        while True:
            await sleep_until(self._clock, due_ms)
            try:
                await self._work()
            except CovenantError as failed:
                log.warning("a round came to nothing; the next one comes in %d ms: %s", self._interval_ms, failed)
            except Exception:
                log.exception("a round failed; the next one comes in %d ms", self._interval_ms)
            due_ms = self._clock.now_ms() + self._interval_ms


# --- the passes --------------------------------------------------------------------------------------------


class Scheduler:
    """`operator` says who the operator is now: its token may be another tomorrow."""

    def __init__(self, exchange: Exchange, plan: RetryPlan, clock: Clock, operator: Callable[[], Caller]) -> None:
        self._exchange = exchange
        self._policy = plan.policy
        self._operator = operator
        self._rounds = Rounds(clock, plan.interval_ms, self.run_pass)
        self._cursor: str | None = None
        self._untold: Counter[str] = Counter()  # why passes failed that have no row yet

    def start(self) -> None:
        self._rounds.start()

    async def stop(self) -> None:
        await self._rounds.stop()

    async def run_pass(self) -> None:
        if not self._exchange.store.leads():
            return
        command = RetryStale(None, self._policy, self._cursor, scheduled=True)
        try:
            report: RetryReport = await self._exchange.run(self._operator(), command)
        except CovenantError as failed:
            log.warning("a pass of the retry scheduler came to nothing: %s (%s)", failed, failed.code)
            self._untold[failed.code] += 1
        else:
            if report.requeued:
                log.info("the retry scheduler requeued %s", [candidate.task_id for candidate in report.requeued])
            if not _left_some(report):
                self._cursor = report.cursor
        await self._tell_failures()

    async def _tell_failures(self) -> None:
        """A row for each reason; how many passes besides had the same is counted in it."""
        for code, count in list(self._untold.items()):
            try:
                await self._exchange.store.run(NoteRefusal(None, SCAN_ROW, code, count=count - 1))
            except CovenantError as failed:
                log.warning("a failed pass has no row yet: %s", failed)
                return
            del self._untold[code]


def _left_some(report: RetryReport) -> bool:
    """Whether the pass stopped requeueing only because of its bound: then the next one starts where it started, and
    goes on behind those that it has requeued."""
    return bool(report.requeued) and any(skip.reason is SkipReason.LIMIT_REACHED for skip in report.skipped)
