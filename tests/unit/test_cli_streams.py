"""Taking the launcher's messages out of a stream, in whatever pieces it comes."""

from __future__ import annotations

import pytest

from tarantella.cli.streams import Passage, StreamFilter

TEXT = b"one\ntw<<secret>>o\n<not a secret\n<<another\nsecret>>three"


def filtered(pieces: list[bytes]) -> tuple[bytes, list[bytes]]:
    taken: list[bytes] = []

    def take(passage: bytes) -> bytes:
        taken.append(passage)
        return b""

    stream = StreamFilter([Passage(b"<<", b">>", take)])
    shown = b"".join(stream.feed(piece) for piece in pieces)
    return shown + stream.flush(), taken


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 100])
def test_passages_are_taken_out_of_pieces_of_any_size(size: int) -> None:
    pieces = [TEXT[start : start + size] for start in range(0, len(TEXT), size)]
    shown, taken = filtered(pieces)
    assert shown == b"one\ntwo\n<not a secret\nthree"
    assert taken == [b"<<secret>>", b"<<another\nsecret>>"]


def test_everything_else_passes_at_once() -> None:
    stream = StreamFilter([Passage(b"\n<<", b">>", lambda _: b"")])
    for piece in (b"\r 10%", b"\r 20%\n", b"\xff\xfe half a line", b"\n", b"next\n"):
        assert stream.feed(piece) == piece
        assert not stream.holds


def test_what_was_held_back_comes_out() -> None:
    stream = StreamFilter([Passage(b"<<", b">>", lambda _: b"")])
    assert stream.feed(b"a <") == b"a "
    assert stream.holds
    assert stream.flush() == b"<"
    assert stream.feed(b" b") == b" b"


def test_passage_can_be_replaced() -> None:
    stream = StreamFilter([Passage(b"<<", b">>", bytes.upper)])
    assert stream.feed(b"a <<b>> c") == b"a <<B>> c"


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_a_passage_that_begins_a_line_is_found_nowhere_else(size: int) -> None:
    passages = [Passage(b"hide", b"\n", lambda _: b"", begins_line=True)]
    text = b"hide 1\nkeep: hide 2\nhide 3\n hide 4\nhide 5\nend"
    stream = StreamFilter(passages)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    shown = b"".join([*map(stream.feed, pieces), stream.flush()])
    assert shown == b"keep: hide 2\n hide 4\nend"


def test_only_the_start_of_a_line_is_held_back_for_a_passage_that_begins_one() -> None:
    stream = StreamFilter([Passage(b"    @", b"\n", lambda _: b"", begins_line=True)])
    assert stream.feed(b"Epoch 1/3 ") == b"Epoch 1/3 "
    assert stream.feed(b"\n  ") == b"\n"
    assert stream.feed(b"  @ 0x7f\nx") == b"x"
