"""Numbers for Prometheus: what is asked, how long it takes, what waits, and what the journal does.

A request costs a few additions to numbers that were laid out at the start; everything else is looked up when somebody
asks, in places that know their own size. No label says who asked or what for: the verbs and the statuses are few.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, Final

from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from covenant.exchange.exchange import Exchange
from covenant.exchange.pusher import Pusher
from covenant.model.record import TaskState
from covenant.rules.sight import lease_age_ms
from covenant.serve import wire as w
from covenant.serve.a2a.calls import CALLS
from covenant.serve.http import Receive, Scope, Send
from covenant.serve.places import PLACES
from covenant.store.clock import Clock
from covenant.store.state import Tally

PATH: Final = "/metrics"
STALE_MS: Final = 5 * 60 * 1000
STALE_MAX: Final = 1000  # leases that are looked at
BUCKETS_S: Final = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 30.0)
_BOUNDS: Final = (*map(str, BUCKETS_S), "+Inf")
_CLASSES: Final = {2: "2xx", 4: "4xx", 5: "5xx"}
_DENIALS: Final = {401: "unauthenticated", 403: "not_permitted"}
_OTHER: Final = "other"  # no verb was reached
_JOURNAL: Final = {
    "commits": "Commits written.",
    "events": "Events in them.",
    "syncs": "Syncs of the disk.",
    "bytes": "Bytes written.",
    "archived": "Records moved to the archive.",
    "snapshots": "Snapshots written.",
    "reopened": "Times that the journal reopened after an error of the disk.",
}


class _Tally(Struct):
    """Of one verb."""

    verb: str
    classes: list[int]  # by the first digit of the status
    buckets: list[int]
    seconds: float = 0.0


def _tally(verb: str) -> _Tally:
    return _Tally(verb, [0] * 6, [0] * (len(BUCKETS_S) + 1))


class Metrics(Collector):
    def __init__(
        self, exchange: Exchange, clock: Clock, open_things: dict[str, Callable[[], int]], pusher: Pusher
    ) -> None:
        self._exchange = exchange
        self._clock = clock
        self._open = open_things  # how many there are of what clients keep open
        self._pusher = pusher
        kinds: list[type[w.Request]] = [w.Authenticate, *(place.request for place in PLACES)]
        self._tallies: dict[type | None, _Tally] = {kind: _tally(str(kind.__struct_config__.tag)) for kind in kinds}
        for name, call in CALLS.items():
            self._tallies.setdefault(call.request, _tally(name))  # a message is a message, streamed or not
        self._other = self._tallies[None] = _tally(_OTHER)
        self._denials = dict.fromkeys(_DENIALS, 0)
        self._tally: Tally | None = None  # as it was when the page was last asked for
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def note(self, kind: type | None, status: int, seconds: float) -> None:
        """A request has ended."""
        tally = self._tallies.get(kind, self._other)
        tally.classes[status // 100] += 1
        tally.buckets[bisect_left(BUCKETS_S, seconds)] += 1
        tally.seconds += seconds
        if status in _DENIALS:
            self._denials[status] += 1

    async def page(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._tally = await self._exchange.store.tally(STALE_MAX)
        data = generate_latest(self._registry)
        headers = [
            (b"content-type", CONTENT_TYPE_LATEST.encode()),
            (b"content-length", b"%d" % len(data)),
            (b"cache-control", b"no-store"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    # --- what is told -------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        yield self._requests()
        yield self._request_seconds()
        denials = CounterMetricFamily(
            "covenant_denials", "Requests without a valid token or the right.", labels=["why"]
        )
        for status, why in _DENIALS.items():
            denials.add_metric([why], self._denials[status])
        yield denials
        opened = GaugeMetricFamily("covenant_open", "What clients keep open.", labels=["what"])
        for what, count in self._open.items():
            opened.add_metric([what], count())
        yield opened
        store: Any = self._exchange.store
        if self._tally is not None:
            yield from _tasks(self._tally, self._clock.now_ms())
        yield from _webhooks(self._pusher)
        yield from _journal(getattr(store, "stats", None))

    def _requests(self) -> Metric:
        family = CounterMetricFamily("covenant_requests", "Requests answered.", labels=["verb", "status"])
        for tally in self._tallies.values():
            for digit, name in _CLASSES.items():
                family.add_metric([tally.verb, name], tally.classes[digit])
        return family

    def _request_seconds(self) -> Metric:
        """Of the verbs that were called."""
        family = HistogramMetricFamily(
            "covenant_request_seconds", "Time to the answer, waits included.", labels=["verb"]
        )
        for tally in self._tallies.values():
            if any(tally.buckets):
                below = accumulate(tally.buckets)
                family.add_metric([tally.verb], list(zip(_BOUNDS, below, strict=True)), tally.seconds)
        return family


def _tasks(tally: Tally, now_ms: int) -> Iterator[Metric]:
    counts = tally.counts
    tasks = GaugeMetricFamily("covenant_tasks", "Open tasks.", labels=["state"])
    tasks.add_metric([TaskState.QUEUED], counts.queued)
    tasks.add_metric([TaskState.IN_FLIGHT], counts.in_flight)
    tasks.add_metric([TaskState.PARKED], counts.parked)
    tasks.add_metric([TaskState.RESULT_PENDING], counts.result_pending)
    yield tasks
    queued = GaugeMetricFamily("covenant_tasks_queued", "What the queued ones wait for.", labels=["why"])
    queued.add_metric(["ready"], counts.ready)
    queued.add_metric(["following"], counts.following)
    queued.add_metric(["delayed"], counts.queued - counts.ready - counts.following)
    yield queued
    parked = GaugeMetricFamily("covenant_runs_parked", "Runs that wait.", labels=["why"])
    parked.add_metric(["woken"], counts.woken)
    parked.add_metric(["waiting"], counts.parked - counts.woken)
    yield parked
    yield GaugeMetricFamily(
        "covenant_results_pending", "Results, partial ones too, that wait to be drained.", counts.answers
    )
    silent = tally.leases
    yield GaugeMetricFamily(
        "covenant_lease_oldest_seconds",
        "Since the last sign of life under the lease that has been silent longest.",
        max((lease_age_ms(record, now_ms) for record in silent), default=0) / 1000,
    )
    yield GaugeMetricFamily(
        "covenant_leases_stale",
        f"Leases without a sign of life for {STALE_MS // 60_000} minutes, counted up to {STALE_MAX}.",
        sum(lease_age_ms(record, now_ms) > STALE_MS for record in silent),
    )


def _webhooks(pusher: Pusher) -> Iterator[Metric]:
    counts = pusher.counts
    posts = CounterMetricFamily("covenant_webhook_posts", "Posts to webhooks of A2A clients.", labels=["status"])
    posts.add_metric(["taken"], counts.taken)
    posts.add_metric(["failed"], counts.failed)
    yield posts
    yield CounterMetricFamily("covenant_webhooks_given_up", "Webhooks that did not answer in the end.", counts.given_up)
    yield GaugeMetricFamily("covenant_webhooks_behind", "Webhooks that have something to hear.", pusher.behind)


def _journal(stats: Any) -> Iterator[Metric]:
    """Nothing of a store that has no journal."""
    if stats is not None:
        for name, told in _JOURNAL.items():
            yield CounterMetricFamily(f"covenant_journal_{name}", told, getattr(stats, name))
