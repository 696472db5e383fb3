"""The library's messages."""

from __future__ import annotations

import logging

import pytest

from tarantella.runtime import log
from tarantella.runtime.configuration import Configuration


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    logger = logging.Logger("tarantella")
    monkeypatch.setattr(log, "LOGGER", logger)
    return logger


def test_master_rank_shows_warnings(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log.configure(Configuration(), rank=0, size=2)
    logger.warning("mind %s", "this")
    logger.info("not this")
    assert capsys.readouterr().err == "tarantella WARNING: mind this\n"


def test_other_ranks_are_silent(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(Configuration(), rank=1, size=2)
    logger.error("bad")
    assert capsys.readouterr().err == ""


def test_every_rank_marks_its_lines(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log.configure(Configuration(log_level="DEBUG", log_on_all_devices=True), rank=1, size=2)
    logger.debug("two\nlines")
    assert capsys.readouterr().err == "[rank 1] tarantella DEBUG: two\n[rank 1] lines\n"


def test_what_the_user_has_set_stays(logger: logging.Logger) -> None:
    handler = logging.NullHandler()
    logger.addHandler(handler)
    logger.setLevel("ERROR")
    log.configure(Configuration(log_level="DEBUG"), rank=0, size=1)
    assert logger.handlers == [handler]
    assert logger.level == logging.ERROR


def test_root_logger_is_left_alone(logger: logging.Logger) -> None:
    before = list(logging.getLogger().handlers), logging.getLogger().level
    log.configure(Configuration(), rank=0, size=2)
    assert (list(logging.getLogger().handlers), logging.getLogger().level) == before
