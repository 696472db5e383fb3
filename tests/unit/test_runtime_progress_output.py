"""Progress and callback output, on the ranks where it should be seen."""

from __future__ import annotations

import io
import sys
import warnings
from contextlib import ExitStack, redirect_stdout

import keras
import pytest

from tarantella.runtime import progress_output as output
from tarantella.runtime import world
from tarantella.runtime.configuration import Configuration
from tarantella.runtime.progress_output import Lines, progress_output, shown


def be(
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    size: int,
    everywhere: bool = False,
    terminal: bool | None = None,
) -> None:
    monkeypatch.setattr(world, "_rank", rank)
    monkeypatch.setattr(world, "_size", size)
    settings = Configuration(output_on_all_devices=everywhere, terminal=terminal)
    monkeypatch.setattr(output, "configuration", lambda: settings)


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2)])
def test_master_rank_prints_as_ever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int, size: int
) -> None:
    be(monkeypatch, rank, size, terminal=True)
    before = sys.stdout
    with progress_output():
        assert sys.stdout is before
        print("seen")
    assert capsys.readouterr().out == "seen\n"
    assert [shown(verbose) for verbose in ("auto", 0, 1, 2)] == [1, 0, 1, 2]


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2)])
def test_without_a_terminal_there_are_lines_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int, size: int
) -> None:
    be(monkeypatch, rank, size)
    with progress_output():
        print("at once", end="")
        assert capsys.readouterr().out == "at once"
        bar = keras.utils.Progbar(2)
        bar.update(1, [("loss", 0.5)])
        bar.update(2, [("loss", 0.25)])
        print("\x1b[1mbold\x1b[0m")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["2/2", "bold"]
    assert not any(character in "".join(lines) for character in "\b\r\x1b")
    assert [shown(verbose) for verbose in ("auto", 0, 1, 2)] == [2, 0, 1, 2]


def test_other_ranks_print_nothing_inside_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be(monkeypatch, 1, 2)
    print("before")
    with progress_output():
        print("hidden \udcff")
        with progress_output():
            print("hidden")
        print("hidden")
    print("after")
    assert capsys.readouterr().out == "before\nafter\n"
    assert [shown(verbose) for verbose in ("auto", 0, 1, 2)] == [0, 0, 0, 0]


def test_every_rank_marks_its_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be(monkeypatch, 1, 2, everywhere=True)
    with progress_output():
        print("one")
        with progress_output():
            print("two\nthree")
        print("no end", end="")
        assert not sys.stdout.isatty()
    assert (
        capsys.readouterr().out == "[rank 1] one\n[rank 1] two\n[rank 1] three\n[rank 1] no end\n"
    )
    assert [shown(verbose) for verbose in ("auto", 0, 1, 2)] == [2, 0, 1, 2]


@pytest.mark.parametrize("rank", [0, 1])
def test_threads_share_the_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    """Whoever leaves first; `sys.stdout` is the same for all."""
    be(monkeypatch, rank, 2)
    before, filters = sys.stdout, list(warnings.filters)
    first, second = ExitStack(), ExitStack()
    first.enter_context(progress_output())
    second.enter_context(progress_output())
    first.close()
    print("inside\rINSIDE")
    second.close()
    print("after")
    assert sys.stdout is before
    assert warnings.filters == filters
    assert capsys.readouterr().out == ("after\n" if rank else "INSIDE\nafter\n")


def test_streams_of_the_user_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, 0, 2)
    with progress_output(), redirect_stdout(io.StringIO()) as text:
        with progress_output():
            print("10%\r20%")
        print("10%\r20%")
    assert text.getvalue() == "20%\n10%\r20%\n"


def test_output_is_back_after_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be(monkeypatch, 1, 2)
    with pytest.raises(ValueError, match="bad"), progress_output():
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
    stream = Lines(target, "> ")
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
    stream = Lines(target, "[rank 1] ")
    print("a", "b", 3, file=stream)
    assert target.calls == ["[rank 1] a b 3\n"]
