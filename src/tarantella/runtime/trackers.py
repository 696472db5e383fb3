"""Trackers of experiments: a run of Tarantella is one run of the tracker, the master rank's.

A script opens its run on every rank. Where a variable disables a tracker, the other ranks get it;
then the script works on them as it is, and leaves nothing on the server. Where there is none, or
the script says otherwise, the ranks notice when they train, and the user is told what to do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tarantella.runtime.configuration import Configuration


@dataclass(frozen=True)
class Tracker:
    """A tracker.

    Attributes:
        name: Its name.
        package: The package to import.
        has_run: Whether a process has a run that the tracker records, given the package.
        remedy: How a script opens a run on the master rank only.
        disabling: The variables that disable it.
    """

    name: str
    package: str
    has_run: Callable[[Any], bool]
    remedy: str
    disabling: Mapping[str, str] = field(default_factory=dict)


TRACKERS = (
    # A `mode` that is passed to `wandb.init` takes precedence over the variable.
    Tracker(
        "Weights & Biases",
        "wandb",
        lambda wandb: wandb.run is not None and not wandb.run.disabled,
        '`wandb.init(mode="offline" if tnt.is_master_rank() else "disabled")`, or without `mode`',
        {"WANDB_MODE": "disabled"},
    ),
    # It has no variable like this. Another place for the runs of other ranks would hide models
    # and data from them that they may want to load.
    Tracker(
        "MLflow",
        "mlflow",
        lambda mlflow: mlflow.active_run() is not None,
        "`if tnt.is_master_rank(): mlflow.start_run()`",
    ),
    # `disabled=False` in a `comet_ml.ExperimentConfig` takes precedence over the variable.
    Tracker(
        "Comet",
        "comet_ml",
        lambda comet: not getattr(comet.get_running_experiment(), "disabled", True),
        "`comet_ml.Experiment(disabled=not tnt.is_master_rank())`",
        {"COMET_AUTO_LOG_DISABLE": "true"},
    ),
)


def variables_of_rank(rank: int, settings: Configuration) -> dict[str, str]:
    """The variables that a rank needs so that trackers have one run in all."""
    if rank == 0 or settings.trackers_on_all_devices:
        return {}
    return {name: value for each in TRACKERS for name, value in each.disabling.items()}


def open_runs() -> list[str]:
    """The packages of the trackers that have a run in this process."""
    return [each.package for each in TRACKERS if _has_run(each)]


def _has_run(tracker: Tracker) -> bool:
    try:
        return tracker.package in sys.modules and tracker.has_run(sys.modules[tracker.package])
    except AttributeError:  # another version, or something else of that name
        return False


def warning_of_several_runs(package: str, ranks: int) -> str:
    """What to tell a user whose ranks have opened a run each."""
    [tracker] = [each for each in TRACKERS if each.package == package]
    return (
        f"{ranks} ranks have opened a run of {tracker.name} each, but only the master's gets "
        f"metrics. Open one on the master rank only: {tracker.remedy}. If you want one for each "
        "rank, set TNT_TRACKERS_ON_ALL_DEVICES=true."
    )
