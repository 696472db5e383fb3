"""What sums over the ranks: the choice between TensorFlow's collectives and MPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tarantella.errors import InputError, VersionError
from tarantella.graph import engine
from tarantella.internals import tensorflow as internals
from tarantella.runtime import servers, world
from tarantella.runtime.configuration import Configuration
from tarantella.runtime.log import LOGGER

ADDRESSES = ("127.0.0.1:1", "127.0.0.1:2")


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "get_size", lambda: 2)
    monkeypatch.setattr(world, "get_host_names", lambda: ("a", "b"))
    monkeypatch.setattr(world, "shared_communicator", lambda purpose: None)
    monkeypatch.setattr(servers, "addresses", lambda: ADDRESSES)
    monkeypatch.setattr(engine, "_hint", None)
    monkeypatch.setattr(engine, "_problem_here", "")


@pytest.fixture
def warnings(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(LOGGER, "propagate", True)
    return caplog


def choose(
    monkeypatch: pytest.MonkeyPatch,
    wanted: str,
    before: Sequence[str] = ("", ""),
    of_first_sum: Sequence[str] = ("", ""),
) -> str:
    """What is chosen if the ranks have these problems."""
    problems = iter([before, of_first_sum])
    monkeypatch.setattr(engine, "configuration", lambda: Configuration(gpu_sums=wanted))
    monkeypatch.setattr(engine.messages, "allgather", lambda own, communicator: next(problems))
    monkeypatch.setattr(engine, "_try", lambda hint: "")
    return engine.device_hint()


@pytest.mark.parametrize(("wanted", "hint"), [("auto", "nccl"), ("nccl", "nccl"), ("ring", "ring")])
def test_collectives_are_used_where_they_can_be(
    wanted: str, hint: str, monkeypatch: pytest.MonkeyPatch, warnings: Any
) -> None:
    assert choose(monkeypatch, wanted) == hint
    assert not warnings.records


def test_host_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "addresses", lambda: ())
    assert choose(monkeypatch, "host", [], []) == ""


FIRST_SUM = ["", "NCCL: Duplicate GPU detected"]
ELSEWHERE = "Duplicate GPU detected (rank 1 on host b)"


def test_one_rank_without_nccl_sends_all_to_mpi_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, warnings: Any
) -> None:
    assert choose(monkeypatch, "auto", of_first_sum=FIRST_SUM) == ""
    (record,) = warnings.records
    assert ELSEWHERE in record.getMessage()
    assert "`--gpu-sums host`" in record.getMessage()
    assert engine.device_hint() == ""  # and it is not asked again


def test_nccl_that_cannot_be_used_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError) as raised:
        choose(monkeypatch, "nccl", of_first_sum=FIRST_SUM)
    assert ELSEWHERE in str(raised.value)


def test_gpus_that_only_some_ranks_see(monkeypatch: pytest.MonkeyPatch, warnings: Any) -> None:
    assert choose(monkeypatch, "auto", ["", engine._NO_GPU]) == ""
    assert "TensorFlow finds no GPU (rank 1 on host b)" in warnings.text


def test_nothing_is_said_if_no_rank_sees_a_gpu(
    monkeypatch: pytest.MonkeyPatch, warnings: Any
) -> None:
    assert choose(monkeypatch, "auto", [engine._NO_GPU, engine._NO_GPU]) == ""
    assert not warnings.records


def test_nccl_without_any_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="TensorFlow finds no GPU"):
        choose(monkeypatch, "nccl", [engine._NO_GPU, engine._NO_GPU])


@pytest.mark.parametrize("name", ["config", "configure_collective_ops", "enable_collective_ops"])
def test_without_a_private_name_of_tensorflow_the_ranks_are_told(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Context:
        def do_nothing(self, *args: Any, **kwargs: Any) -> None: ...

        config = configure_collective_ops = enable_collective_ops = do_nothing

    delattr(Context, name)
    monkeypatch.setattr(internals, "_found", lambda path: Context)
    with pytest.raises(VersionError, match=name):
        internals.start_server(ADDRESSES, 0)
    monkeypatch.setattr(engine, "configuration", lambda: Configuration(gpu_sums="ring"))
    engine.prepare()
    assert name in engine._problem_here


def test_tensorflow_that_is_in_use_already_cannot_be_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(addresses: Any, rank: int) -> None:
        raise RuntimeError("Collective ops must be configured at program startup")

    monkeypatch.setattr(engine, "start_server", refuse)
    monkeypatch.setattr(engine, "configuration", lambda: Configuration(gpu_sums="ring"))
    engine.prepare()
    assert "before `import tarantella`" in engine._problem_here


def test_no_server_starts_for_a_tensorflow_that_sees_no_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "start_server", lambda *_: pytest.fail("it was started"))
    monkeypatch.setattr(engine, "configuration", lambda: Configuration(gpu_sums="auto"))
    engine.prepare()
    assert engine._problem_here == engine._NO_GPU
