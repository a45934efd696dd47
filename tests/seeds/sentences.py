"""The sentences of a page, and the tests that hold them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Sentences:
    """The sentences of one page. Called with some of them, word for word, it marks the test that holds them."""

    def __init__(self, file: str) -> None:
        self.all = Path(__file__).with_name(file).read_text().splitlines()
        self._tests: dict[str, set[str]] = {sentence: set() for sentence in self.all}
        self._reasons: dict[str, str] = {}

    def __call__(self, *sentences: str) -> Callable[[F], F]:
        def mark(test: F) -> F:
            for sentence in sentences:
                self._tests[sentence].add(test.__name__)  # a KeyError: it is not on the page
            return test

        return mark

    def state_nothing(self, reason: str, *sentences: str) -> None:
        for sentence in sentences:
            assert sentence in self._tests, sentence
            self._reasons[sentence] = reason

    def without_a_test(self) -> list[str]:
        return [sentence for sentence in self.all if not self._tests[sentence] and sentence not in self._reasons]

    def both(self) -> list[str]:
        """Return the sentences that have a test and are listed as stating nothing."""
        return [sentence for sentence in self.all if self._tests[sentence] and sentence in self._reasons]

    def marked(self) -> set[str]:
        """Return the names of the tests."""
        return set().union(*self._tests.values())
