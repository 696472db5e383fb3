"""The settings of a rank, from its environment."""

from __future__ import annotations

import pytest

from tarantella.errors import InputError
from tarantella.runtime.configuration import Configuration, read_configuration


def test_nothing_set() -> None:
    assert read_configuration({}) == Configuration()


def test_everything_set() -> None:
    environ = {
        "TNT_LOG_LEVEL": "debug",
        "TNT_LOG_ON_ALL_DEVICES": "true",
        "TNT_OUTPUT_ON_ALL_DEVICES": "1",
        "TNT_TENSORBOARD_ON_ALL_DEVICES": "Yes",
        "TNT_FUSION_THRESHOLD": " 0 ",
        "TNT_NO_GPU": "on",
        "TNT_GPUS": "0, 4",
        "TNT_THREADS": "2",
    }
    assert read_configuration(environ) == Configuration(
        "DEBUG", True, True, True, 0, True, (0, 4), 2
    )


def test_fusion_threshold_in_bytes() -> None:
    assert read_configuration({"TNT_FUSION_THRESHOLD": "3"}).fusion_threshold_bytes == 3072


@pytest.mark.parametrize("value", ["", "0", "False", "no", "off"])
def test_switched_off(value: str) -> None:
    assert not read_configuration({"TNT_NO_GPU": value}).no_gpu


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TNT_LOG_LEVEL", "loud"),
        ("TNT_NO_GPU", "perhaps"),
        ("TNT_FUSION_THRESHOLD", "-1"),
        ("TNT_FUSION_THRESHOLD", "32.5"),
        ("TNT_FUSION_THRESHOLD", ""),
        ("TNT_THREADS", "0"),
        ("TNT_GPUS", "0,x"),
    ],
)
def test_value_without_sense_is_named(name: str, value: str) -> None:
    with pytest.raises(InputError, match=name):
        read_configuration({name: value})
