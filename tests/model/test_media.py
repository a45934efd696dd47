"""The media types that an agent takes, by its card. (Specification 3.1.1, 3.3.2.)"""

from __future__ import annotations

from typing import Any

import pytest

from covenant.model.message import Part
from covenant.rules.media import input_modes, refused_type

TEXT = Part(text="x")
DATA = Part(data={"a": 1})
NOTHING = Part(data=None)
FILE = Part(raw="AAAA")
LINK = Part(url="https://example.com/x")


@pytest.mark.parametrize(
    ("card", "modes"),
    [
        ({"name": "a"}, ()),
        ({"defaultInputModes": []}, ()),
        ({"defaultInputModes": None, "skills": None, "extended": None}, ()),
        ({"skills": [{"id": "s"}]}, ()),
        ({"defaultInputModes": ["text/plain"]}, ("text/plain",)),
        ({"defaultInputModes": ["Text/Plain; charset=utf-8", "IMAGE/*"]}, ("image/*", "text/plain")),
        ({"defaultInputModes": ["text"]}, ("text/*",)),
        (
            {"defaultInputModes": ["text/plain"], "skills": [{"inputModes": ["image/png"]}, {"inputModes": ["a/b"]}]},
            ("a/b", "image/png", "text/plain"),
        ),
        ({"skills": [{"inputModes": ["image/png"]}]}, ("application/json", "image/png", "text/plain")),
        (
            {"defaultInputModes": ["text/plain"], "extended": {"defaultInputModes": ["image/png"]}},
            ("image/png", "text/plain"),
        ),
    ],
)
def test_a_card_says_what_its_agent_takes(card: dict[str, Any], modes: tuple[str, ...]) -> None:
    assert input_modes(card) == modes


@pytest.mark.parametrize(
    ("modes", "part", "refused"),
    [
        ((), Part(text="x", media_type="any/thing"), None),
        (("text/plain",), TEXT, None),
        (("text/plain",), DATA, "application/json"),
        (("text/plain",), NOTHING, "application/json"),
        (("application/json",), NOTHING, None),
        (("application/json",), TEXT, "text/plain"),
        (("text/plain",), FILE, None),
        (("text/plain",), LINK, None),
        (("text/plain",), Part(text="x", media_type="text/markdown"), "text/markdown"),
        (("text/*",), Part(text="x", media_type="text/markdown"), None),
        (("text/*",), Part(raw="AAAA", media_type="image/png"), "image/png"),
        (("*/*",), Part(raw="AAAA", media_type="image/png"), None),
        (("image/png",), Part(raw="AAAA", media_type="Image/PNG; q=1"), None),
        (("image/png",), Part(url="https://e", media_type="image/png"), None),
        (("image/png",), Part(url="https://e", media_type="image/pngx"), "image/pngx"),
        (("image/*",), Part(url="https://e", media_type="image"), None),
        (("image/*",), Part(url="https://e", media_type="imagex/png"), "imagex/png"),
        (("text/plain",), Part(text="x", media_type=" "), None),
    ],
)
def test_a_part_is_taken_or_its_type_is_named(modes: tuple[str, ...], part: Part, refused: str | None) -> None:
    assert refused_type(modes, (part,)) == refused
    assert refused_type(modes, (FILE, part)) == refused
    assert refused_type(modes, ()) is None
