"""The settings of a rank, from its environment."""

from __future__ import annotations

import pytest

from tarantella.errors import InputError
from tarantella.runtime.configuration import Configuration, of_rank, read_configuration


def test_nothing_set() -> None:
    assert read_configuration({}) == Configuration()


def test_everything_set() -> None:
    environ = {
        "TNT_LOG_LEVEL": "debug",
        "TNT_LOG_ON_ALL_DEVICES": "true",
        "TNT_OUTPUT_ON_ALL_DEVICES": "1",
        "TNT_TENSORBOARD_ON_ALL_DEVICES": "Yes",
        "TNT_FUSION_THRESHOLD": " 0 ",
        "TNT_TIMELINE": " trace.json",
        "TNT_GPU": "true",
        "TNT_NO_GPU": "on",
        "TNT_GPUS": "0, 4",
        "TNT_THREADS": "2",
        "TNT_CORES": "0-1,4:2-3",
        "TNT_MEMORY": "0,1",
        "TNT_NETWORK_INTERFACE": "ib0",
        "TNT_TERMINAL": "false",
        "TNT_CHECK_TIMEOUT": "5",
    }
    assert read_configuration(environ) == Configuration(
        log_level="DEBUG",
        log_on_all_devices=True,
        output_on_all_devices=True,
        tensorboard_on_all_devices=True,
        fusion_threshold_kb=0,
        timeline=" trace.json",
        gpu=True,
        no_gpu=True,
        gpus=(0, 4),
        threads=(2,),
        cores=((0, 1, 4), (2, 3)),
        memory=(0, 1),
        network_interfaces=("ib0",),
        terminal=False,
        check_seconds=5,
    )


@pytest.mark.parametrize("name", ["WARN", "warn", " Warning"])
def test_another_name_for_warnings(name: str) -> None:
    assert read_configuration({"TNT_LOG_LEVEL": name}).log_level == "WARNING"


def test_cores_that_the_user_leaves_open() -> None:
    assert read_configuration({"TNT_CORES": ""}).cores is None


def test_a_short_list_starts_again() -> None:
    assert [of_rank((5, 6), rank) for rank in range(4)] == [5, 6, 5, 6]
    assert of_rank(None, 3) is None


@pytest.mark.parametrize(("value", "in_bytes"), [("3", 3072), ("0", 0), ("auto", None)])
def test_fusion_threshold_in_bytes(value: str, in_bytes: int | None) -> None:
    settings = read_configuration({"TNT_FUSION_THRESHOLD": value})
    assert settings.fusion_threshold_bytes == in_bytes


def test_fusion_threshold_is_chosen_if_nobody_sets_it() -> None:
    assert read_configuration({}).fusion_threshold_bytes is None


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
        ("TNT_CORES", "0-3:all"),
        ("TNT_CORES", "0-"),
        ("TNT_CORES", "0,x"),
        ("TNT_CORES", "0-99999999999"),
    ],
)
def test_value_without_sense_is_named(name: str, value: str) -> None:
    with pytest.raises(InputError, match=name):
        read_configuration({name: value})
