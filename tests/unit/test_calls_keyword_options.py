"""Keyword arguments of `tnt.run` become options of the command."""

from __future__ import annotations

import json
import logging
import os
import pickle
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest

import tarantella as tnt
from tarantella.calls import function
from tarantella.calls.keyword_options import arguments_for
from tarantella.cli import caller, console
from tarantella.cli.command_line import parse
from tarantella.cli.keywords import in_keywords
from tarantella.cli.options import Options
from tarantella.cli.outcome import Failure
from tarantella.errors import InputError
from tarantella.runtime.announce import CALLER
from tarantella.runtime.settings import settings_of


def parsed(**options: Any) -> Options:
    return parse([*arguments_for(options, ("ranks",)), "--", __file__])


def test_options_are_those_of_the_command() -> None:
    options = parsed(
        no_gpu=True,
        strict=False,
        log_level="info",
        fusion_threshold=0,
        timeline=Path("-trace.json"),
        output_dir=None,
        x={"A": "b c", "B": "$x=1"},
    )
    words = ["--no-gpu", "--log-level", "INFO", "--fusion-threshold", "0", "--timeline=-trace.json"]
    assert options == parse([*words, "-x", "A=b c", "B=$x=1", "--", __file__])


def test_every_option_of_the_table_has_a_keyword_or_is_refused_with_a_reason() -> None:
    for row in settings_of(Options).values():
        for name in row.option.names if row.option else ():
            keyword = name.lstrip("-").replace("-", "_")
            try:
                arguments_for({keyword: None}, ())
            except InputError as error:
                assert f"{keyword} is " in str(error)  # noqa: PT017
                assert "Did you mean" not in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"no_gup": True}, "no_gup is not an option of tnt.run. Did you mean no_gpu?"),
        ({"rank": 2}, "rank is not an option of tnt.run. Did you mean ranks?"),
        ({"qwertz": 2}, "qwertz is not an option of tnt.run. See tarantella --help."),
        ({"n": 2}, "n is not an option of tnt.run: use ranks."),
        ({"hostfile": "hosts"}, "hostfile is not an option of tnt.run: use hosts."),
        ({"dry_run": True}, "dry_run is an option of the command only"),
        ({"no_gpu": "yes"}, "no_gpu='yes': no_gpu is either True or False."),
        ({"x": "A=1"}, "x='A=1': give a dictionary, as in x={'NAME': 'value'}."),
        ({"log_level": "LOUD"}, "log_level: 'LOUD' is not one of DEBUG"),
        ({"gpu": True, "no_gpu": True}, "gpu=True and no_gpu=True exclude each other"),
        ({"ranks": 2000}, "ranks: 2000 ranks are more than 1024"),
        ({"x": {"1A": ""}}, "x: '1A' is not a name for a variable"),
        ({"report": "a.txt"}, "report: 'a.txt' does not end in .html"),
        ({"ranks": 0}, "ranks=0: give a number of ranks, 1 or more"),
        ({"ranks": "two"}, "ranks='two': give a number of ranks"),
        ({"ranks": True}, "ranks=True: give a number of ranks"),
        ({"hosts": "node1"}, "There is no hostfile node1: check its path; for names of hosts"),
        ({"hosts": []}, "hosts is empty"),
        ({"hosts": ["a", "A"]}, "hosts names a twice"),
        ({"hosts": ["a", "b c"]}, "hosts has 'b c' in it, which is not the name of a host"),
        ({"hosts": ["a", 3]}, "hosts has 3 in it"),
        ({"args": 3}, "args=3: give a tuple of arguments, as in args=(3,)."),
        ({"args": "text"}, "args='text': give a tuple of arguments, as in args=('text',)."),
    ],
)
def test_what_makes_no_sense_is_explained(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        tnt.run(len, **options)
    assert message in str(refused.value)
    assert "".join(traceback.format_exception(refused.value)).count("Traceback") == 1


def test_messages_of_the_command_have_keywords_for_its_options() -> None:
    assert in_keywords("Use --no-gpu: --gpu-sums nccl needs --gpu.") == (
        "Use no_gpu=True: gpu_sums nccl needs gpu=True."
    )
    assert in_keywords("--n-per-node and -n, by --hostfile") == "ranks and ranks, by hosts"
    message = "The file a--gpu, `tarantella --cleanup`, and my-n: as they are."
    assert in_keywords(message) == message


def test_the_command_shows_keywords_if_tnt_run_has_started_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as heard:
        monkeypatch.setenv(CALLER, f"1:{writing}")
        console.show("written: run.html (--report)")
        caller.tell_failure(Failure(0, "here", "", 1), "rank 0 failed: --gpu needs a GPU.")
        os.close(writing)
        assert json.load(heard)["cause"] == "rank 0 failed: gpu=True needs a GPU."
    assert capfd.readouterr().err == "tarantella: written: run.html (report)\n"


def test_warnings_and_errors_of_ranks_have_keywords() -> None:
    record = logging.LogRecord("", logging.WARNING, "", 1, "%s With --strict.", ("Odd.",), None)
    function._with_keywords(record)
    assert record.getMessage() == "Odd. With strict=True."
    raised = function._raised(InputError("--gpu-sums nccl needs 2% of a GPU."))
    assert str(pickle.loads(raised.content)) == "gpu_sums nccl needs 2% of a GPU."
    users = function._raised(ValueError("--gpu"))
    assert str(pickle.loads(users.content)) == "--gpu"


def test_function_must_be_one_that_can_be_sent() -> None:
    with pytest.raises(InputError, match="needs a function, not a NoneType: pass the function"):
        tnt.run(None)  # type: ignore[arg-type]
    lock = threading.Lock()
    with pytest.raises(InputError, match="cannot be pickled .*make that inside of the function"):
        tnt.run(lambda: lock)
