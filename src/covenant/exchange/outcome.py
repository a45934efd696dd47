"""What a call says of what it has done, where something fails behind it.

A surface may have to look at what was committed, to show it: the store can be away by then, or the caller be turned
away. The command is done all the same, and who is told otherwise does it again. So whatever comes behind a commit in
the same call stands inside `with committed`: what is refused there says that the outcome is unknown.
"""

from __future__ import annotations

from types import TracebackType
from typing import Final

from covenant.model.error import CovenantError

NOT_STORED: Final = "not_stored"
UNKNOWN: Final = "unknown"


class _Committed:
    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, CovenantError) and error.details.get("outcome", NOT_STORED) == NOT_STORED:
            raise error.saying(outcome=UNKNOWN) from error


committed: Final = _Committed()
