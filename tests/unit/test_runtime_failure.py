"""What is shown of an error, and the status it ends with."""

from __future__ import annotations

import pytest

from tarantella.errors import InputError
from tarantella.runtime.failure import describe, exit_status, show


@pytest.mark.parametrize(
    ("error", "status", "cause"),
    [
        (ValueError("bad value"), 1, "ValueError: bad value"),
        (ValueError("two\nlines"), 1, "ValueError: two"),
        (InputError("wrong"), 2, "InputError: wrong"),
        (SystemExit(3), 3, "sys.exit(3)"),
        (SystemExit(-1), 255, "sys.exit(-1)"),
        (SystemExit("sorry"), 1, "sorry"),
        (SystemExit(), 0, "sys.exit(None)"),
        (SystemExit(0), 0, "sys.exit(0)"),
        (KeyboardInterrupt(), 130, "KeyboardInterrupt"),
    ],
)
def test_status_and_cause(error: BaseException, status: int, cause: str) -> None:
    assert exit_status(error) == status
    assert describe(error) == cause


def test_errors_of_ours_show_the_frames_of_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    from tarantella.runtime import world

    try:
        world.communicator("control")
    except Exception as error:
        show(error)
    shown = capsys.readouterr().err
    assert "test_runtime_failure.py" in shown
    assert "world.py" not in shown
    assert shown.splitlines()[-1].startswith("tarantella.errors.TarantellaError: This process")


@pytest.mark.parametrize(
    ("error", "shown"),
    [(SystemExit("sorry"), "sorry\n"), (SystemExit(3), ""), (KeyboardInterrupt(), "")],
)
def test_quiet_ends(error: BaseException, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    show(error)
    assert capsys.readouterr().err == shown


def test_the_cause_of_a_tensorflow_error_is_found_in_its_text() -> None:
    text = "Graph execution error:\n\nDetected at node x\nValueError: my data are bad\n\n [[node]]"
    assert describe(RuntimeError(text)) == (
        "RuntimeError: Graph execution error: ValueError: my data are bad"
    )
