"""An entry of a run: what makes one complete, and the key under which it is there once. (Contract 18.)"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

import msgspec
from msgspec import structs

from covenant.model.error import Malformed
from covenant.model.limits import Limits
from covenant.model.run import EntryDraft, EntryRole, EntryType, mark_key
from covenant.rules.envelope import check_count, check_key, seal_message
from covenant.rules.run.value import check_value

NUMBER_MAX: Final = 2**53


def checked_entry(draft: EntryDraft, limits: Limits) -> EntryDraft:
    if type(draft) is not EntryDraft or type(draft.role) is not EntryRole or type(draft.type) is not EntryType:
        raise Malformed("an entry has a role and a type", field="entries")
    check_key(draft.id, "entry.id", limits.key_bytes_max)
    check_count(draft.parent, "entry.parent", NUMBER_MAX)
    if draft.said is not None:
        check_count(draft.said, "entry.said", NUMBER_MAX)
    for name in ("turn", "key"):
        if getattr(draft, name) is not None:
            check_key(getattr(draft, name), f"entry.{name}", limits.key_bytes_max)
    content = check_value(draft.content, "entry.content", limits)
    says = draft.says
    if says is not None:
        says = structs.replace(seal_message(says, limits), role="ROLE_AGENT")
    return structs.replace(draft, content=content, says=says)


def marked(task_id: str, key: str) -> str:
    return mark_key(task_id, sha256(key.encode()).hexdigest()[:32])


def digest_of_entry(draft: EntryDraft) -> str:
    content = msgspec.json.encode(
        (draft.role, draft.type, draft.content, draft.says and draft.says.parts), order="deterministic"
    )
    return sha256(content).hexdigest()[:32]
