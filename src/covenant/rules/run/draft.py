"""The commit of a run as its holder sends it, checked before anything is looked up."""

from __future__ import annotations

from msgspec import UNSET, structs

from covenant.model.error import Malformed, TooLarge
from covenant.model.limits import Limits
from covenant.model.run import NOTHING, Memo, RunCommit
from covenant.model.task import Result
from covenant.rules.envelope import check_count, check_id, check_key, seal_result
from covenant.rules.run.entry import NUMBER_MAX, checked_entry
from covenant.rules.run.value import check_value
from covenant.rules.run.wait import checked_wait


def checked(made: RunCommit, limits: Limits) -> RunCommit:
    """The commit as it will be kept: complete, bounded, and nobody else's."""
    if type(made) is not RunCommit:
        raise Malformed("a commit of a run is needed", field="commit")
    check_count(made.number, "number", NUMBER_MAX)
    check_count(made.leaf, "leaf", NUMBER_MAX)
    lists = ("entries", "tasks", "begins", "answers", "cancels", "takes", "memos")
    for name in lists:
        listed = getattr(made, name)
        if not isinstance(listed, (list, tuple)):
            raise Malformed(f"{name} is a list", field=name)
        limit = limits.batch_max * (8 if name == "memos" else 1)
        if len(listed) > limit:
            raise TooLarge(f"a commit has at most {limit} {name}", field=name, size=len(listed), limit=limit)
    if made.wait is not None and made.result is not None:
        raise Malformed("a run that ends waits for nothing", field="wait")
    return structs.replace(
        made,
        entries=tuple(checked_entry(draft, limits) for draft in made.entries),
        memos=tuple(_checked_memo(memo, limits) for memo in made.memos),
        checkpoint=UNSET if made.checkpoint is UNSET else check_value(made.checkpoint, "checkpoint", limits),
        wait=None if made.wait is None else checked_wait(made.wait, limits),
        result=None if made.result is None else _checked_result(made.result, limits),
    )


def _checked_result(result: Result, limits: Limits) -> Result:
    sealed = seal_result(result, limits)
    if sealed.status == "partial":
        raise Malformed("a run ends with `ok` or `error`", field="result")
    return sealed


def _checked_memo(memo: Memo, limits: Limits) -> Memo:
    if type(memo) is not Memo:
        raise Malformed("a memo is needed", field="memos")
    check_key(memo.key, "memo.key", limits.key_bytes_max)
    if memo.begun is not None:
        check_key(memo.begun, "memo.begun", limits.key_bytes_max)
    if memo.entry is not None:
        check_count(memo.entry, "memo.entry", NUMBER_MAX)
    if memo.task is not None:
        check_id(memo.task, "memo.task")
    if memo.value is NOTHING:
        return memo
    value = check_value(memo.value, "memo.value", limits, is_wrapped=True)
    return Memo(memo.key, value, memo.entry, memo.task, memo.begun)
