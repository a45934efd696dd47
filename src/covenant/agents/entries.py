"""The entries of a run: how one is written, and how they are read again. (Contract 18, 20.)

An entry is below the one that came last, which is the leaf. Those of this call of the function are known; the others
are fetched when somebody asks for them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from msgspec import Struct, json, structs

from covenant.agents import values
from covenant.agents.hold import Hold
from covenant.agents.lookout import Lookout
from covenant.agents.notes import Notes
from covenant.agents.times import Times
from covenant.agents.waits import Waits
from covenant.model.error import KeyReused, Malformed, TooLarge
from covenant.model.message import Message
from covenant.model.run import EntryDraft, EntryFound, EntryRole, EntrySeen, EntryType, Memo, RunLoaded
from covenant.rules.envelope import seal_message
from covenant.rules.run.entry import digest_of_entry

_PAGE: Final = 1000


class AgentEntry(Struct, frozen=True):
    """One thing that was said or done in a run."""

    id: str
    role: EntryRole
    content: Any
    type: EntryType = EntryType.MESSAGE
    number: int = 0
    parent: int = 0
    at_ms: int = 0
    turn: str | None = None


def entry_of(seen: EntrySeen) -> AgentEntry:
    content = values.unraw(seen.content) if seen.message is None else values.content_of(seen.message)
    return AgentEntry(seen.id, seen.role, content, seen.type, seen.number, seen.parent, seen.at_ms, seen.turn)


def _size_of(draft: EntryDraft) -> int:
    return len(memoryview(draft.content)) + (0 if draft.says is None else len(json.encode(draft.says)))


def _nowhere(entry_id: str) -> Malformed:
    return Malformed(f"no entry {entry_id} in this run", field="entry")


class Entries:
    def __init__(self, hold: Hold, notes: Notes, times: Times, waits: Waits, lookout: Lookout) -> None:
        self.leaf = 0
        self.turn: str | None = None  # to which those that follow belong
        self._hold = hold
        self._notes = notes
        self._times = times
        self._waits = waits
        self._lookout = lookout
        self._count = 0
        self._own: dict[str, int] = {}  # under ids that were made here: nobody else has those
        self._numbers: dict[str, int] = {}  # of those that are known
        self._is_whole = False  # all are
        self._known: dict[int, AgentEntry] = {}
        self._once: dict[str, EntryFound] = {}  # by their key

    # --- writing ------------------------------------------------------------------------------------------

    async def append(self, draft: EntryDraft, content: Any, *, is_named: bool = False) -> str:
        """Add an entry, or find the one that the same operation has added, and get its id. `is_named`: the id is
        somebody's choice."""
        notes = self._notes
        if draft.key is not None:
            notes.check_name(draft.key, "key")
        once = [] if draft.key is None else [draft.key]
        key = notes.memory.key("entry", [draft.role.value, draft.type.value, content, *once])
        memo = notes.memory.recall(key)
        if memo is None:
            found = None if draft.key is None else await self._find_same(draft.key, draft)
            if found is None:
                await self._waits.room_for(_size_of(draft))
                self.enter(key, draft, content)
                if not is_named:
                    self._own[draft.id] = self.leaf
                return draft.id
            memo = Memo(key, values.raw(self.leaf), found)
            notes.remember(memo)
        assert memo.entry is not None
        leaf = values.unraw(memo.value)
        self.leaf = memo.entry if leaf is None else leaf
        entry_id = notes.memory.entry_ids[memo.entry]
        if leaf is None and not is_named:
            self._own[entry_id] = memo.entry
        return entry_id

    def enter(self, key: str | None, draft: EntryDraft, content: Any) -> str:
        notes, limits = self._notes, self._hold.box.limits
        notes.check_room(key, notes.batch.entries, "entries")
        notes.check_value(draft.content)
        if self._count >= limits.entries_max:
            raise TooLarge("the run has too many entries", field="entries", limit=limits.entries_max)
        if draft.says is not None:
            seal_message(draft.says, limits)
        self._count += 1
        number, turn = self._count, self.turn
        parent, self.leaf = self.leaf, number
        notes.batch.entries.append(
            EntryDraft(draft.id, draft.role, draft.content, parent, draft.type, draft.said, draft.says, turn, draft.key)
        )
        notes.batch.bytes += _size_of(draft)
        self._learn_id(number, draft.id)
        now_ms = self._times.now_ms()
        self._known[number] = AgentEntry(draft.id, draft.role, content, draft.type, number, parent, now_ms, turn)
        if key is not None:
            notes.remember(Memo(key, entry=number))
        if draft.key is not None:
            self._once[draft.key] = EntryFound(number, draft.id, digest_of_entry(draft))
        return draft.id

    async def _find_same(self, name: str, draft: EntryDraft) -> int | None:
        """An entry that is there already stays where it is, and what follows comes where it would have come."""
        found = await self._find(name)
        if found is None:
            return None
        if found.digest != digest_of_entry(draft):
            raise KeyReused(f"the entry under {name!r} has other content", key=name)
        return found.number

    async def _find(self, key: str) -> EntryFound | None:
        """The entry that was added under a key, also if it is not committed yet."""
        hold = self._hold
        found = self._once.get(key)
        if found is None and hold.is_resuming:
            found = await self._lookout.look_up(lambda: hold.box.find_entry(hold.lease_id, key))
        if found is not None:
            self._once[key] = found
            self._learn_id(found.number, found.id)
        return found

    def _learn_id(self, number: int, entry_id: str) -> None:
        self._notes.memory.entry_ids[number] = entry_id
        self._number(number, entry_id)

    def _number(self, number: int, entry_id: str) -> None:
        """Whoever sends messages chooses their ids: an id is that of the first entry that had it."""
        self._numbers[entry_id] = min(number, self._numbers.get(entry_id, number))

    # --- reading ------------------------------------------------------------------------------------------

    async def load(self, limit: int | None) -> list[AgentEntry]:
        """The way to the leaf; called again after a crash, to what was the leaf then."""
        notes = self._notes
        key = notes.memory.key("load", limit)
        memo = notes.memory.recall(key)
        leaf = self.leaf if memo is None else int(values.unraw(memo.value))
        if memo is None:
            notes.note(key, leaf)
        entries = await self._path_to(leaf, limit)
        return [structs.replace(entry, content=values.fresh(entry.content)) for entry in entries]

    async def content_at(self, number: int) -> Any:
        if number not in self._known:
            await self._fetch(number, 1, every=True)
        return values.fresh(self._known[number].content)

    async def branch(self, to: AgentEntry | str) -> None:
        if isinstance(to, AgentEntry) and to.number:
            self.leaf = await self._checked_number(to)
            return
        entry_id = to if isinstance(to, str) else to.id
        notes = self._notes
        key = notes.memory.key("branch", entry_id)
        memo = notes.memory.recall(key)
        if memo is None:
            await self._waits.make_room()
            memo = notes.note(key, await self._number_of(entry_id))
        number = values.unraw(memo.value)
        if number is None:
            raise _nowhere(entry_id)
        self.leaf = number

    async def _checked_number(self, to: AgentEntry) -> int:
        if not 0 < to.number <= self._count:
            raise _nowhere(to.id)
        if to.number not in self._known:
            await self._fetch(to.number, 1, every=True)
        if self._known[to.number].id != to.id:
            raise _nowhere(to.id)
        return to.number

    async def _number_of(self, entry_id: str) -> int | None:
        if entry_id in self._own:
            return self._own[entry_id]
        while not self._is_whole:
            numbers = self._numbers
            await self._fetch(self._count, None, every=True)
            self._is_whole = numbers is self._numbers  # else a checkpoint of another place has let go of them
        return self._numbers.get(entry_id)

    async def _path_to(self, leaf: int, limit: int | None) -> list[AgentEntry]:
        path: list[AgentEntry] = []
        at = leaf
        while at > 0 and (limit is None or len(path) < limit):
            entry = self._known.get(at)
            if entry is None:
                await self._fetch(at, None if limit is None else limit - len(path))
                entry = self._known[at]
            path.append(entry)
            if entry.type is EntryType.COMPACTION:
                break
            at = entry.parent
        return path[::-1]

    async def _fetch(self, leaf: int, limit: int | None, *, every: bool = False) -> None:
        """The stored part of a way, from an entry back; or of everything."""
        hold = self._hold
        before: int | None = leaf
        left = limit
        while before is not None and (left is None or left > 0):
            size = _PAGE if left is None else min(_PAGE, left)
            page = await hold.ask(partial(hold.box.run_entries, hold.run_id, size, before=before, every=every))
            for entry in page.entries:
                self._known[entry.number] = entry_of(entry)
                self._number(entry.number, entry.id)
            left = None if left is None else left - len(page.entries)
            before = page.before

    # --- from call to call --------------------------------------------------------------------------------

    def learn(self, loaded: RunLoaded, message: Message | None) -> None:
        """Where the run stands. The message that it began with is its first entry."""
        self._count, self.leaf = loaded.entries, loaded.leaf
        self._is_whole = not loaded.entries
        for number, entry_id in self._notes.memory.entry_ids.items():
            self._number(number, entry_id)
        if message is None:
            return
        if not self._hold.is_resuming:
            self.enter(None, EntryDraft(message.message_id, EntryRole.USER, said=0), values.content_of(message))
        elif not loaded.checkpoints:
            self.leaf = 1

    def forget(self) -> None:
        """They are fetched again when somebody asks for them."""
        self._known.clear()
        self._own.clear()
        self._numbers = {}
        self._is_whole = False
        self._notes.memory.entry_ids.clear()

    def give_up(self) -> None:
        """What was noted last was refused and is not there: nothing more is counted."""
        self._count = -1
        self.leaf = 0
