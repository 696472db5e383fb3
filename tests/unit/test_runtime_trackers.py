"""Which ranks may open a run of a tracker."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from tarantella.runtime import trackers
from tarantella.runtime.configuration import Configuration

DISABLED = {"WANDB_MODE": "disabled", "COMET_AUTO_LOG_DISABLE": "true"}


@pytest.mark.parametrize(
    ("rank", "on_all", "variables"), [(0, False, {}), (1, False, DISABLED), (1, True, {})]
)
def test_trackers_are_disabled_on_other_ranks(
    rank: int, on_all: bool, variables: dict[str, str]
) -> None:
    settings = Configuration(trackers_on_all_devices=on_all)
    assert trackers.variables_of_rank(rank, settings) == variables


def test_a_run_that_is_disabled_is_not_open() -> None:
    pytest.importorskip("wandb").init(mode="disabled")
    assert "wandb" not in trackers.open_runs()


def test_something_else_of_the_name_has_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))  # a folder, in a script's place
    assert "wandb" not in trackers.open_runs()


@pytest.mark.parametrize("tracker", trackers.TRACKERS, ids=lambda tracker: tracker.name)
def test_the_warning_names_the_tracker_and_two_ways_out(tracker: trackers.Tracker) -> None:
    message = trackers.warning_of_several_runs(tracker.package, 3)
    assert message.startswith(f"3 ranks have opened a run of {tracker.name} each")
    assert tracker.remedy in message
    assert "TNT_TRACKERS_ON_ALL_DEVICES=true" in message
