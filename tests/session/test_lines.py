"""output.Lines: the same lines come out however the bytes were cut, whatever they hold."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skyfab.session.lines import _LONGEST, Lines

Line = tuple[str, str]


def lines_of(pieces: list[bytes]) -> list[Line]:
    """All lines, the unfinished last one included, as the session shows them at the end of a call."""
    lines = Lines("stdout")
    found: list[Line] = []
    for piece in pieces:
        if complete := lines.feed(piece):
            assert complete.stream == "stdout"
            found += complete
    if lines.partial:
        found += lines.rest()
    assert not lines.partial
    return found


def cut(data: bytes, at: list[int]) -> list[bytes]:
    marks = sorted({0, len(data), *(n % (len(data) + 1) for n in at)})
    return [data[a:b] for a, b in itertools.pairwise(marks)] or [b""]


output = st.lists(
    st.sampled_from(
        [b"\n", b"\r", b"\r\n", b"a", b"50%", b"\xc3\xa9", b"\xc3", b"\xff", b"", b"\x1b[31m", b"\0", b" "]
    ),
    max_size=30,
).map(b"".join)


@settings(deadline=None, max_examples=150)
@given(output, st.lists(st.integers(0, 1000), max_size=20))
@example(b"a\r\nb", [2])
@example(b"a\r\r\nb", [2])
@example(b"\r", [])
@example("é\n".encode(), [1])
def test_any_split_gives_the_same_lines(data: bytes, at: list[int]) -> None:
    assert lines_of(cut(data, at)) == lines_of([data])


@settings(deadline=None, max_examples=100)
@given(output)
def test_lines_are_what_a_person_would_say_they_are(data: bytes) -> None:
    """Against a plain definition: text up to CR LF, LF or CR; a bare CR with nothing before it says nothing."""
    expected = []
    *ended, last = re.split(rb"(\r\n|\n|\r)", data)
    for text, end in zip(ended[::2], ended[1::2], strict=True):
        if text or end != b"\r":
            expected.append((text.decode(errors="replace"), "\r" if end == b"\r" else "\n"))
    if last:
        expected.append((last.decode(errors="replace"), "\n"))
    found = lines_of([data])
    # A carriage return at the very end may be half of a line's end: it is shown as one.
    if data.endswith(b"\r"):
        assert [text for text, _ in found if text] == [text for text, _ in expected if text]
    else:
        assert found == expected


def test_a_line_is_shown_as_soon_as_it_is_whole() -> None:
    lines = Lines("stderr")
    assert lines.feed(b"par") is None
    assert lines.partial
    found = lines.feed(b"tial\nnext")
    assert found is not None
    assert found.stream == "stderr"
    assert list(found) == [("partial", "\n")]
    assert list(lines.rest()) == [("next", "\n")]
    assert lines.feed(b"") is None


def test_progress_bars_are_lines_that_will_be_overwritten() -> None:
    """tqdm writes a carriage return before each state, pip after it."""
    assert lines_of([b"\r 0%", b"\r50%", b"\r100%\n"]) == [(" 0%", "\r"), ("50%", "\r"), ("100%", "\n")]
    assert lines_of([b" 0%\r", b"50%\r", b"100%\n"]) == [(" 0%", "\r"), ("50%", "\r"), ("100%", "\n")]


def test_what_was_written_without_an_end_is_shown_at_the_end() -> None:
    assert lines_of([b"no end"]) == [("no end", "\n")]
    assert lines_of([b"50%\r"]) == [("50%", "\n")]
    assert lines_of([b""]) == []


@pytest.mark.parametrize("piece", [1001, 1_000_001])
def test_a_line_without_end_is_shown_in_pieces_and_never_held(piece: int) -> None:
    """Memory stays bounded, nothing is lost, and no character is cut in two."""
    data = "é".encode() * 1_500_000
    lines = Lines("stdout")
    shown: list[str] = []
    for at in range(0, len(data), piece):
        if found := lines.feed(data[at : at + piece]):
            shown += [text for text, _ in found]
        assert len(lines._rest) <= _LONGEST + piece
    if lines.partial:
        shown += [text for text, _ in lines.rest()]
    assert "".join(shown) == data.decode()
    assert max(map(len, shown)) <= _LONGEST + piece


@pytest.mark.parametrize("character", ["x", "é", "€", "😁"])
@pytest.mark.parametrize("before", range(4))
def test_a_long_line_is_cut_between_characters(monkeypatch: pytest.MonkeyPatch, character: str, before: int) -> None:
    monkeypatch.setattr("skyfab.session.lines._LONGEST", 20)
    text = "x" * before + character * 12
    data = text.encode()
    for size in range(21, len(data)):
        lines = Lines("stdout")
        first = lines.feed(data[:size])
        assert first is not None
        assert len(lines._rest) <= 4, "most of it is shown"
        second = lines.feed(data[size:] + b"\n")
        assert second is not None
        assert "".join(piece for piece, _ in [*first, *second]) == text


def test_a_long_line_that_is_no_text_is_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyfab.session.lines._LONGEST", 20)
    lines = Lines("stdout")
    assert lines.feed(b"\x80" * 21) is not None
    assert len(lines._rest) <= 4
