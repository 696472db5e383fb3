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


def test_the_cause_of_an_error_of_ours_is_the_problem_without_the_advice() -> None:
    """Its whole text is shown with the traceback."""
    error = InputError("batch_size is 0.5, in model.keras. Use 1 or more. Or leave it out.")
    assert describe(error) == "InputError: batch_size is 0.5, in model.keras"
    assert describe(InputError("There is none.")) == "InputError: There is none"
    assert describe(InputError("There are 3. Use 4.")) == "InputError: There are 3"
    named = "The file J. Smith.csv has no rows"
    assert describe(InputError(f"{named}. Add some.")) == f"InputError: {named}"


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


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "Graph execution error:\n\nDetected at node y\n  File 'a.py', line 3\n\n"
            "Cast string to float is not supported\n\t [[{{node y}}]] [Op:z]",
            "Graph execution error: Cast string to float is not supported",
        ),
        (
            "Exception encountered when calling Dense.call().\n\n\x1b[1mThree are too many\x1b[0m",
            "Exception encountered when calling Dense.call(). Three are too many",
        ),
        ("Two are bad. One of them:\n\nIt is odd.\nList:", "Two are bad. One of them: It is odd."),
    ],
)
def test_a_first_line_that_says_little_is_followed_by_the_cause(text: str, cause: str) -> None:
    assert describe(RuntimeError(text)) == f"RuntimeError: {cause}"
