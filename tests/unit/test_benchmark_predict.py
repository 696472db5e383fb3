"""The model of a training step that predicts step times."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "predict.py"
MB = 10**6


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("benchmarks_predict", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look their types up
    spec.loader.exec_module(module)
    return module


predict = _load()
Layer, Message, Network = predict.Layer, predict.Message, predict.Network
SLOW = Network(latency=1e-5, bandwidth=1e9, addition=8e9)


def _step(ranks: int, network: Any = SLOW, algorithm: str = "fastest") -> Any:
    messages = [Message(0.1 + 0.02 * n, 10 * MB) for n in range(10)]
    return predict.simulate(
        0.3,
        messages,
        lambda nbytes: predict.allreduce_seconds(nbytes, ranks, network, algorithm),
    )


def test_a_rank_alone_communicates_nothing() -> None:
    step = _step(ranks=1)
    assert step.time == 0.3
    assert step.communication == step.exposed == 0
    assert step.hidden == 1


def test_without_latency_and_with_all_bandwidth_everything_is_hidden() -> None:
    step = _step(1024, Network(latency=0.0, bandwidth=math.inf))
    assert step.time == 0.3
    assert step.hidden == 1


def test_one_message_at_the_end_takes_its_time_in_addition() -> None:
    step = predict.simulate(0.3, [Message(0.3, MB)], lambda nbytes: 0.05)
    assert step.time == pytest.approx(0.35)
    assert step.exposed == pytest.approx(0.05)
    assert step.hidden == pytest.approx(0.0)


def test_a_message_that_is_ready_early_is_hidden() -> None:
    step = predict.simulate(0.3, [Message(0.1, MB)], lambda nbytes: 0.05)
    assert step.time == 0.3
    assert step.hidden == 1


def test_messages_wait_for_each_other() -> None:
    messages = [Message(0.1, MB), Message(0.15, MB), Message(0.3, MB)]
    step = predict.simulate(0.3, messages, lambda nbytes: 0.2)
    # The first ends at 0.3, the second at 0.5, the third at 0.7.
    assert step.time == pytest.approx(0.7)
    assert step.efficiency == pytest.approx(3 / 7)
    assert step.communication == pytest.approx(0.6)
    assert step.hidden == pytest.approx(1 / 3)


def test_messages_are_copied_to_the_host_and_back() -> None:
    step = predict.simulate(0.3, [Message(0.3, MB)], lambda nbytes: 0.05, lambda nbytes: 0.01)
    assert step.time == pytest.approx(0.37)


@pytest.mark.parametrize("algorithm", ["fastest", "doubling", "halving", "ring"])
def test_a_step_is_never_faster_on_more_ranks(algorithm: str) -> None:
    times = [_step(ranks, SLOW, algorithm).time for ranks in range(1, 1025)]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("algorithm", "seconds"),
    [
        # On four ranks with 1 s of latency, 1 s for all the bytes, and 2 s to add them:
        ("doubling", 2 * (1 + 1 + 2)),
        ("halving", 4 * 1 + 2 * 3 / 4 * 1 + 3 / 4 * 2),
        ("ring", 6 * 1 + 2 * 3 / 4 * 1 + 3 / 4 * 2),
    ],
)
def test_an_algorithm_takes_what_its_rounds_take(algorithm: str, seconds: float) -> None:
    network = Network(latency=1.0, bandwidth=MB, addition=MB / 2)
    assert predict.allreduce_seconds(MB, 4, network, algorithm) == pytest.approx(seconds)


def test_the_fastest_is_doubling_for_few_bytes_and_halving_for_many() -> None:
    def fastest(nbytes: int) -> str:
        best = predict.allreduce_seconds(nbytes, 64, SLOW)
        return next(
            name
            for name, seconds in predict.ALGORITHMS.items()
            if seconds(nbytes, 64, SLOW) == best
        )

    assert fastest(8) == "doubling"
    assert fastest(100 * MB) == "halving"


def test_gradients_are_ready_from_the_last_layer_to_the_first() -> None:
    layers = [Layer(0.75, ((1000,),)), Layer(0.25, ((500,), (2,)))]
    messages = predict.messages_of(layers, forward=1.0, backward=2.0, threshold=0)
    assert [message.ready for message in messages] == [1.5, 1.5, 3.0]
    assert [message.nbytes for message in messages] == [64, 2048, 4032]


def test_a_fused_message_is_ready_with_its_last_gradient() -> None:
    layers = [Layer(0.75, ((2,),)), Layer(0.25, ((2,),))]
    (message,) = predict.messages_of(layers, forward=1.0, backward=2.0, threshold=1024)
    assert message.ready == 3.0
