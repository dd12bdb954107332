"""Stop strings: exact, whatever the tokens' borders."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coremill.worker.stops import StopMatcher


def cut(text: bytes, stops: tuple[bytes, ...]) -> tuple[bytes, bool]:
    """By definition: before the stop string that ends first, of those that end together the longest."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))], True
    return text, False


def feed(pieces: list[bytes], stops: tuple[bytes, ...]) -> tuple[bytes, bool]:
    matcher, shown = StopMatcher(stops), b""
    for piece in pieces:
        more, stopped = matcher.feed(piece)
        shown += more
        if stopped:
            return shown, True
    return shown + matcher.flush(), False


@given(
    pieces=st.lists(st.text("abc", max_size=4).map(str.encode), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=5).map(str.encode), max_size=3),
)
def test_any_split_gives_the_definition(pieces, stops):
    assert feed(pieces, tuple(stops)) == cut(b"".join(pieces), tuple(stops))


def test_nothing_is_held_back_that_cannot_become_a_stop_string():
    matcher = StopMatcher((b"END",))
    assert matcher.feed(b"the E") == (b"the ", False)
    assert matcher.feed(b"N") == (b"", False)
    assert matcher.feed(b"T") == (b"ENT", False)
    assert matcher.feed(b"EN") == (b"", False)
    assert matcher.flush() == b"EN"


def test_a_stop_string_across_characters_of_several_bytes():
    stop = "é€".encode()
    pieces = [bytes([byte]) for byte in b"caf" + stop + b"!"]
    assert feed(pieces, (stop,)) == (b"caf", True)


def test_without_stop_strings_everything_is_shown_at_once():
    assert StopMatcher(()).feed(b"x") == (b"x", False)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopMatcher((b"a", b""))
