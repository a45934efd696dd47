"""Properties of the pure parts: what an event may do to a record, what a ledger holds, when two tasks are the same, and
that no input gets past the seals with anything but a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.floors import reached, reaches

from covenant import (
    AgentId,
    Audio,
    Content,
    CovenantError,
    Idempotency,
    Image,
    Json,
    Limits,
    Outcome,
    Result,
    Task,
    Text,
)
from covenant.model import event as e
from covenant.model.agent import check_agent
from covenant.model.record import Asks, CacheKey, Part, Record, Slot, TaskRecord, TaskState, part_key
from covenant.rules.context import Context
from covenant.rules.envelope import check_count, check_id, check_text, check_time, digest_of, seal_result, seal_task
from covenant.rules.evolve import evolve
from covenant.store import ledger as ledgers
from covenant.store.clock import CountingIds
from covenant.store.ledger import DueTimes, LazyLedger, Ledger

ADA, BOB, CYD = (AgentId.named(name) for name in ("ada", "bob", "cyd"))
TASK_ID = "22222222-2222-4222-8222-222222222222"
SLOT = "slot:of-a-test"

# --- events and records ---------------------------------------------------------------------------------------

results = st.builds(
    Result,
    task_id=st.just(TASK_ID),
    status=st.sampled_from(("ok", "error")),
    content=st.sampled_from(((), (Text("x"),))),
    error_message=st.none() | st.just("boom"),
    lease_id=st.none(),
    sequence=st.none(),
)
moments = st.none() | st.integers(0, 200)
first_events = st.builds(
    e.Sent,
    key=st.just(TASK_ID),
    task=st.builds(
        Task,
        id=st.just(TASK_ID),
        sender=st.just(ADA),
        recipient=st.just(BOB),
        intent_text=st.just("draft"),
        task_kind=st.none(),
        parent=st.none(),
        deadline_ms=moments,
        idempotency=st.just(Idempotency("idempotent", "k")),
        content=st.just(()),
        not_before_ms=moments,
    ),
    slot=st.just(SLOT),
    follows=st.booleans(),
    replayed=st.just(False),
    protocol=st.booleans(),
)


def next_events(record: TaskRecord) -> st.SearchStrategy[e.Event]:
    """What may happen to a task in this state."""
    key = st.just(TASK_ID)
    if record.outcome is not None:
        drained = record.answer_for is None
        if record.protocol:
            return st.just(e.CascadeDone(TASK_ID))  # nobody drains what the protocol shows
        return st.sampled_from((e.Undrained(TASK_ID) if drained else e.Drained(TASK_ID), e.CascadeDone(TASK_ID)))
    ended = st.builds(e.Ended, key, st.sampled_from(Outcome), results, st.booleans())
    messaged = st.just(e.Messaged(TASK_ID, queued=record.lease is None))
    if record.lease is not None:
        lease_id = record.lease.lease_id
        return st.one_of(
            st.builds(e.Requeued, key, st.just(lease_id), st.just("released"), st.just("why"), moments),
            st.builds(e.Answered, key, results),
            st.sampled_from((e.Heartbeat(TASK_ID), e.Progressed(TASK_ID), e.CancelAsked(TASK_ID, "why"))),
            st.just(e.Unleased(TASK_ID)),
            messaged,
            st.just(e.Shown(TASK_ID)),
            st.builds(e.Updated, key, st.just(record.asks)),
            st.builds(e.Asked, key, st.sampled_from(Asks), st.booleans()),
            st.builds(e.Chunked, key, st.none() | st.just("draft")),
            st.builds(e.Replied, key, results),
            ended,
        )
    if record.waits_on is not None:
        return st.one_of(st.just(e.Promoted(TASK_ID)), st.builds(e.Answered, key, results), messaged, ended)
    if record.ready_for is None:
        return st.one_of(st.just(e.Due(TASK_ID)), messaged, ended)
    return st.one_of(st.builds(e.Leased, key, st.uuids().map(str), st.just("one")), messaged, ended)


def questions(record: TaskRecord) -> st.SearchStrategy[e.Event]:
    """The same, mostly as far as a holder's question, and what comes after it."""
    if record.lease is not None:
        asked = st.builds(e.Asked, st.just(TASK_ID), st.sampled_from(Asks), st.booleans())
        stands = st.sampled_from((e.Shown(TASK_ID), e.Heartbeat(TASK_ID), e.CancelAsked(TASK_ID, "why")))
        return st.one_of(asked, stands, next_events(record))
    if record.outcome is None and record.waits_on is not None:
        return st.just(e.Promoted(TASK_ID))
    if record.outcome is None:
        return st.just(e.Due(TASK_ID) if record.ready_for is None else e.Leased(TASK_ID, TASK_ID, "one"))
    return next_events(record)


RISING = (
    e.Leased,
    e.Unleased,
    e.Progressed,
    e.Requeued,
    e.Ended,
    e.Messaged,
    e.Updated,
    e.Asked,
    e.Chunked,
    e.Replied,
)


def rise(event: e.Event) -> int:
    """What DESIGN.md's table says that an event adds to the generation."""
    if isinstance(event, e.Answered):
        return 2 if event.result.content else 1
    return 1 if isinstance(event, RISING) else 0


def folded(
    data: st.DataObject,
    check: Callable[[Record | None, e.Event, Record | None], None],
    next_event: Callable[[TaskRecord], st.SearchStrategy[e.Event]] = next_events,
) -> None:
    """Fold a random life of a task, and look at each step of it."""
    record: Record | None = None
    for order in range(1, data.draw(st.integers(2, 12), label="events") + 1):
        event: e.Event
        if record is None:
            event = data.draw(first_events)
        else:
            assert isinstance(record, TaskRecord)
            event = data.draw(next_event(record))
        new = evolve(record, event, order, 10 * order)
        check(record, event, new)
        record = new


@given(st.data())
def test_an_event_never_touches_the_record_it_is_given(data: st.DataObject) -> None:
    seen: list[tuple[Record, bytes]] = []

    def check(old: Record | None, event: e.Event, new: Record | None) -> None:
        assert new is not None
        assert new is not old
        assert all(msgspec.json.encode(record) == before for record, before in seen)
        seen.append((new, msgspec.json.encode(new)))

    folded(data, check)


@reaches(first=50, further=100)
@given(st.data())
def test_the_generation_rises_as_the_table_says(data: st.DataObject) -> None:
    def check(old: Record | None, event: e.Event, new: Record | None) -> None:
        assert isinstance(new, TaskRecord)
        if old is None:
            reached("first")
            assert new.generation == 1
        else:
            reached("further")
            assert isinstance(old, TaskRecord)
            assert new.generation == old.generation + rise(event)

    folded(data, check)


@given(st.data())
def test_every_event_leaves_its_order_on_the_record(data: st.DataObject) -> None:
    """By it the log is read back from the last event of a record to its first."""
    seen = 0

    def check(old: Record | None, event: e.Event, new: Record | None) -> None:
        nonlocal seen
        seen += 1
        assert isinstance(new, TaskRecord)
        assert new.order == seen

    folded(data, check)


@reaches(taken=100, due=30)
@given(st.data())
def test_a_record_is_in_one_place_at_a_time(data: st.DataObject) -> None:
    def check(old: Record | None, event: e.Event, new: Record | None) -> None:
        assert isinstance(new, TaskRecord)
        places = [new.ready_for, new.waits_on, new.lease, new.answer_for]
        assert sum(place is not None for place in places) <= 1
        if new.lease is not None or new.outcome is not None:
            reached("taken")
            assert new.due_ms is None
        elif new.task.deadline_ms is not None:
            reached("due")
            assert new.due_ms is not None
            assert new.due_ms <= new.task.deadline_ms

    folded(data, check)


@given(st.data())
def test_a_lease_raises_the_attempt_by_one_and_nothing_else_does(data: st.DataObject) -> None:
    def check(old: Record | None, event: e.Event, new: Record | None) -> None:
        assert isinstance(new, TaskRecord)
        before = old.attempt if isinstance(old, TaskRecord) else 0
        assert new.attempt == before + isinstance(event, e.Leased) - isinstance(event, e.Unleased)

    folded(data, check)


@reaches(asked=15, stands=15, is_gone=100)
@given(st.data())
def test_a_question_stands_until_it_is_answered_or_its_holder_is_gone(data: st.DataObject) -> None:
    def check(old: Record | None, event: e.Event, new: Record | None) -> None:
        assert isinstance(new, TaskRecord)
        assert new.asks is None or new.lease is not None
        assert new.note <= new.said
        before = old if isinstance(old, TaskRecord) else None
        if isinstance(event, e.Asked):
            reached("asked")
            assert new.asks is event.asks
        elif isinstance(event, (e.Shown, e.Updated, e.Chunked, e.Progressed, e.Heartbeat, e.CancelAsked)):
            reached("stands")
            assert before is not None
            assert new.asks is before.asks
        else:
            reached("is_gone")
            assert new.asks is None or (before is not None and before.outcome is not None)

    folded(data, check, questions)


@reaches(open=50, over=20)
@given(st.data())
def test_a_protocol_task_resolves_by_its_end_and_waits_for_no_drain(data: st.DataObject) -> None:
    def check(old: Record | None, event: e.Event, new: Record | None) -> None:
        assert isinstance(new, TaskRecord)
        if new.protocol:
            reached("open" if new.outcome is None else "over")
            assert new.answer_for is None
            assert (new.state is TaskState.RESOLVED) == (new.outcome is not None)
            assert bool(new.resolved_ms) == (new.outcome is not None)

    folded(data, check)


@given(results, st.integers(1, 9))
def test_parts_and_slots_are_copied_too(result: Result, number: int) -> None:
    key = part_key(TASK_ID, number)
    part = evolve(None, e.Parted(key, result, ADA.pubkey, 1, number, 4), 1, 10)
    slot = evolve(None, e.SlotOpened(SLOT, CacheKey(ADA.pubkey, BOB.pubkey, "draft", "k"), "digest", TASK_ID), 2, 10)
    assert isinstance(part, Part)
    assert isinstance(slot, Slot)
    before = msgspec.json.encode((part, slot))
    drained = evolve(part, e.Drained(key), 3, 20)
    evolve(drained, e.Undrained(key), 4, 30)
    led = evolve(slot, e.SlotLed(SLOT, TASK_ID), 5, 30)
    evolve(led, e.SlotCached(SLOT, TASK_ID, result, 99), 6, 40)
    evolve(slot, e.SlotCached(SLOT, TASK_ID, result), 6, 40)
    assert evolve(slot, e.SlotClosed(SLOT), 7, 40) is None
    assert msgspec.json.encode((part, slot)) == before


# --- ledgers --------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def trim_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ledgers tidy up after hundreds of removals; here after three."""
    monkeypatch.setattr(ledgers, "_TRIM_AT", 3)


class LedgerOps:
    """Both sorts of ledger, and a sorted list."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.lazy = LazyLedger(lambda key, order: self.naive.get(order) == key)
        self.naive: dict[int, str] = {}
        self.removed: dict[int, str] = {}
        self.last = 0

    def add(self, data: st.DataObject) -> None:
        self.last += data.draw(st.integers(1, 3))
        self.put(self.last, f"key-{self.last}")

    def put_back(self, data: st.DataObject) -> None:
        if self.removed:
            order = data.draw(st.sampled_from(sorted(self.removed)))
            self.put(order, self.removed.pop(order))

    def put(self, order: int, key: str) -> None:
        self.naive[order] = key
        self.ledger.add(order, key)
        self.lazy.add(order, key)

    def remove(self, data: st.DataObject) -> None:
        if self.naive:
            self.take(data.draw(st.sampled_from(sorted(self.naive))))

    def remove_oldest(self, data: st.DataObject) -> None:
        if self.naive:
            self.take(min(self.naive))

    def take(self, order: int) -> None:
        self.removed[order] = self.naive.pop(order)
        self.ledger.remove(order)
        self.lazy.lose()

    def check(self, looks: bool) -> None:
        ledger, lazy, orders = self.ledger, self.lazy, sorted(self.naive)
        keys = [self.naive[order] for order in orders]
        assert len(ledger) == len(lazy) == len(keys)
        assert ledger.oldest(1) == keys[:1]
        for limit in (0, 1, 2, 100):
            assert ledger.oldest(limit) == keys[:limit]
            assert not looks or lazy.oldest(limit) == keys[:limit]
        assert list(lazy.newest()) == keys[::-1]
        for number in range(self.last + 2):
            behind = [self.naive[order] for order in orders if order > number]
            assert list(ledger.after(number)) == list(lazy.after(number)) == behind
            before = [self.naive[order] for order in reversed(orders) if order < number]
            assert list(lazy.newest(number)) == before


@given(st.data())
def test_a_ledger_is_a_sorted_list(data: st.DataObject) -> None:
    ops = LedgerOps()
    steps = (ops.add, ops.add, ops.add, ops.remove, ops.remove_oldest, ops.put_back)
    drawn = st.tuples(st.sampled_from(range(len(steps))), st.booleans())
    for step, looks in data.draw(st.lists(drawn, max_size=40)):
        steps[step](data)
        ops.check(looks)


changes = st.tuples(st.sampled_from("abcdef"), st.none() | st.integers(0, 9))


@given(st.lists(changes, max_size=40))
def test_due_times_are_a_sorted_list(changed: list[tuple[str, int | None]]) -> None:
    times = DueTimes()
    naive: dict[str, int] = {}
    for key, due in changed:
        times.set(key, due)
        if due is None:
            naive.pop(key, None)
        else:
            naive[key] = due
        assert times.next_ms() == min(naive.values(), default=None)
        for now in (0, 4, 9):
            expected = [key for due, key in sorted((due, key) for key, due in naive.items()) if due <= now]
            for limit in (1, 2, 100):
                assert times.until(now, limit) == expected[:limit]


# --- when two tasks are the same ------------------------------------------------------------------------------

blocks: st.SearchStrategy[Content] = st.one_of(
    st.builds(Text, st.text(max_size=3), st.none()),
    st.builds(Json, st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3)),
    st.builds(Image, st.text(max_size=3), st.just("image/png"), st.none()),
    st.builds(Audio, st.text(max_size=3), st.just("audio/ogg"), st.none()),
)
tasks = st.builds(
    Task,
    id=st.uuids().map(str),
    sender=st.sampled_from((ADA, BOB, CYD)),
    recipient=st.sampled_from((ADA, BOB, CYD)),
    intent_text=st.text(min_size=1, max_size=4),
    task_kind=st.none() | st.text(min_size=1, max_size=4),
    parent=st.none() | st.uuids().map(str),
    deadline_ms=st.none() | st.integers(0, 2**53 - 1),
    idempotency=st.none(),
    content=st.lists(blocks, max_size=3).map(tuple),
    not_before_ms=st.none() | st.integers(0, 2**53 - 1),
)


def substance(task: Task) -> tuple[Any, ...]:
    assert task.sender is not None
    content = msgspec.json.encode(task.content)
    return task.intent_text, task.task_kind, content, task.sender.pubkey, task.recipient.pubkey


@given(tasks, tasks)
def test_a_digest_ignores_id_parent_and_times(task: Task, other: Task) -> None:
    same = Task(
        id=other.id,
        sender=task.sender,
        recipient=task.recipient,
        intent_text=task.intent_text,
        task_kind=task.task_kind,
        parent=other.parent,
        deadline_ms=other.deadline_ms,
        idempotency=Idempotency("unsafe", "key"),
        content=task.content,
        not_before_ms=other.not_before_ms,
    )
    assert digest_of(same) == digest_of(task)


@reaches(same=10, other=50)
@given(tasks, tasks, st.sampled_from(("intent_text", "task_kind", "content", "sender", "recipient")))
def test_a_digest_tells_everything_else_apart(task: Task, other: Task, field: str) -> None:
    mixed = msgspec.structs.replace(task, **{field: getattr(other, field)})
    for one, two in ((task, other), (task, mixed)):
        is_same = substance(one) == substance(two)
        reached("same" if is_same else "other")
        assert (digest_of(one) == digest_of(two)) == is_same


# --- no input but a refusal -----------------------------------------------------------------------------------

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=40),
    st.text(st.characters(categories=["Cs"]), min_size=1, max_size=2),
    st.binary(max_size=8),
    st.sampled_from(("ok", "error", "partial", "idempotent", "unsafe", TASK_ID, TASK_ID.upper(), " ", "a" * 2000)),
    st.just(object()),
    st.complex_numbers(),
)
odd_agents = st.builds(AgentId, scalars, scalars)
odd_values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        scalars,
        st.sampled_from((ADA, BOB)),
        odd_agents,
        st.builds(Idempotency, scalars, scalars),
        st.builds(Text, scalars, scalars),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.integers() | st.text(max_size=3), inner, max_size=2),
        st.builds(Json, inner),
        st.builds(Text, st.text(max_size=3), inner),
    ),
    max_leaves=4,
)
CONTEXT = Context(0, CountingIds(), Limits(key_bytes_max=64, content_bytes_max=256, content_blocks_max=2))


def only_refuses(call: Callable[[], object]) -> None:
    try:
        call()
        reached("taken")
    except CovenantError as refusal:
        reached("refused")
        assert refusal.code
        assert msgspec.json.encode(refusal.to_wire())


words = st.text("abcdef", min_size=1, max_size=8)


def odd_in(kind: type[Task] | type[Result]) -> st.SearchStrategy[dict[str, Any]]:
    """No member of this, one, or all of them."""
    odd = dict.fromkeys(kind.__struct_fields__, odd_values)
    one = st.dictionaries(st.sampled_from(list(odd)), odd_values, max_size=1)
    return st.booleans().flatmap(lambda is_one: one if is_one else st.fixed_dictionaries({}, optional=odd))


@reaches(taken=5, refused=20)
@given(words, odd_in(Task), st.none() | st.just(ADA))
def test_a_task_is_sealed_or_refused(word: str, odd: dict[str, Any], by: AgentId | None) -> None:
    def seal() -> None:
        sealed = seal_task(Task(**{"recipient": BOB, "intent_text": word, "sender": ADA, **odd}), by, CONTEXT)
        digest_of(sealed)
        stored = msgspec.json.decode(msgspec.json.encode(sealed), type=Task)
        assert msgspec.json.encode(stored) == msgspec.json.encode(sealed)

    only_refuses(seal)


@reaches(taken=10, refused=20)
@given(words, odd_in(Result))
def test_a_result_is_sealed_or_refused(word: str, odd: dict[str, Any]) -> None:
    def seal() -> None:
        good = {"task_id": TASK_ID, "status": "ok", "content": (Text(word),)}
        sealed = seal_result(Result(**{**good, **odd}), CONTEXT.limits)
        stored = msgspec.json.decode(msgspec.json.encode(sealed), type=Result)
        assert msgspec.json.encode(stored) == msgspec.json.encode(sealed)

    only_refuses(seal)


sound_values = (
    words
    | st.uuids().map(str)
    | st.integers(1, 16)
    | words.map(lambda word: AgentId.named(f"{word}@lab"))
    | words.map(lambda word: Task(recipient=BOB, intent_text=word))
    | words.map(lambda word: Result(TASK_ID, "ok", (Text(word),)))
)
any_values = st.booleans().flatmap(lambda is_sound: sound_values if is_sound else odd_values)


@reaches(taken=10, refused=200)
@given(any_values)
def test_a_check_passes_or_refuses(value: Any) -> None:
    only_refuses(lambda: seal_task(value, ADA, CONTEXT))
    only_refuses(lambda: seal_result(value, CONTEXT.limits))
    only_refuses(lambda: check_id(value, "id"))
    only_refuses(lambda: check_time(value, "time"))
    only_refuses(lambda: check_text(value, "text", 16))
    only_refuses(lambda: check_count(value, "count", 16))
    only_refuses(lambda: check_agent(value))


@reaches(taken=3, refused=20)
@given(any_values)
def test_an_agent_is_named_or_refused(value: Any) -> None:
    only_refuses(lambda: AgentId.named(value))


@given(st.uuids())
def test_an_id_is_taken_in_capital_letters_and_folded(value: Any) -> None:
    assert check_id(str(value).upper(), "id") == str(value)
