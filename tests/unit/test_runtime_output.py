"""Progress and callback output, on the ranks where it should be seen."""

from __future__ import annotations

import io
import sys

import pytest

from tarantella.runtime import output, world
from tarantella.runtime.configuration import Configuration
from tarantella.runtime.output import MarkedStream, rank_output, shows_output


def be(monkeypatch: pytest.MonkeyPatch, rank: int, size: int, everywhere: bool = False) -> None:
    monkeypatch.setattr(world, "_rank", rank)
    monkeypatch.setattr(world, "_size", size)
    settings = Configuration(output_on_all_devices=everywhere)
    monkeypatch.setattr(output, "configuration", lambda: settings)


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2)])
def test_master_rank_prints_as_ever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int, size: int
) -> None:
    be(monkeypatch, rank, size)
    before = sys.stdout
    with rank_output():
        assert sys.stdout is before
        print("seen")
    assert capsys.readouterr().out == "seen\n"
    assert shows_output()


def test_other_ranks_print_nothing_inside_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be(monkeypatch, 1, 2)
    print("before")
    with rank_output():
        print("hidden \udcff")
        with rank_output():
            print("hidden")
        print("hidden")
    print("after")
    assert capsys.readouterr().out == "before\nafter\n"
    assert not shows_output()


def test_every_rank_marks_its_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be(monkeypatch, 1, 2, everywhere=True)
    with rank_output():
        print("one")
        with rank_output():
            print("two\nthree")
        print("no end", end="")
        assert not sys.stdout.isatty()
    assert (
        capsys.readouterr().out == "[rank 1] one\n[rank 1] two\n[rank 1] three\n[rank 1] no end\n"
    )
    assert shows_output()


def test_output_is_back_after_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be(monkeypatch, 1, 2)
    with pytest.raises(ValueError, match="bad"), rank_output():
        raise ValueError("bad")
    print("seen")
    assert capsys.readouterr().out == "seen\n"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (["a", "b", "\n"], "> ab\n"),
        (["10%", "\r20%", "\r30%\n"], "> 30%\n"),
        (["long text\rshort\n"], "> shorttext\n"),
        (["12%", "\b\b\b", "34%\n"], "> 34%\n"),
        (["\b\bx\n"], "> x\n"),
        (["\n\n"], "> \n> \n"),
        (["a\r\n"], "> a\n"),
    ],
)
def test_lines_as_a_reader_would_see_them(written: list[str], shown: str) -> None:
    target = io.StringIO()
    stream = MarkedStream(target, "> ")
    for text in written:
        assert stream.write(text) == len(text)
    assert target.getvalue() == shown


def test_a_line_is_one_call() -> None:
    class Calls(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def write(self, text: str, /) -> int:
            self.calls.append(text)
            return len(text)

    target = Calls()
    stream = MarkedStream(target, "[rank 1] ")
    print("a", "b", 3, file=stream)
    assert target.calls == ["[rank 1] a b 3\n"]
