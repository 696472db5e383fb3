"""How each callback of Keras, and of trackers of experiments, is treated on several ranks.

A table with one row per callback.

A callback without a row, such as a custom one, runs on all ranks with the logs of the
global batch. It may change the model whenever it is called, so the ranks wait for each other after
each of its events. A backup keeps nothing of it.

`tnt.keras.callbacks.Callback` overrides, for a single callback, which ranks run it and which logs
it gets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tarantella.internals import keras as internals
from tarantella.keras.backup_files import BackupRemoval
from tarantella.runtime.configuration import configuration


@dataclass(frozen=True)
class Phase:
    """A phase of `fit`, `evaluate` or `predict`.

    Attributes:
        name: "train", "test" or "predict".
        verbose: What this rank shows of its progress.
        trains: Whether it is a phase of `fit`.
    """

    name: str
    verbose: Any
    trains: bool


def _never(callback: Any, phase: Phase) -> bool:
    return False


@dataclass(frozen=True)
class Rule:
    """How one callback is treated.

    Attributes:
        callback: The name of its class.
        package: The package that has the class. It need not be installed, and is not imported.
        disabled: The name of the class that the package uses in its place where it is disabled.
        master_only: Whether only the master rank runs it, unless the user says otherwise.
        gets_plain_model: Whether it gets the plain model, for work that the master does alone.
        stand_in: Makes what the master rank runs in its place; the other ranks run nothing.
        leaves_model_alone: Whether its methods for batches do not change the model, so that the
            ranks need not wait for each other there.
        reads_batch_logs: For one that does: whether it reads the logs of batches in a phase.
        master_decides: Whether only the master runs it if each rank would give it its own logs.
        path: The attribute that holds the path it writes to.
        folder_per_rank: Whether ranks that write to one path get a folder each. Otherwise only
            the master writes.
        state: The attributes that a backup keeps.
        weights: The one of these that is a list of weights.
    """

    callback: str
    package: str = "keras"
    disabled: str = ""
    master_only: bool = False
    gets_plain_model: bool = False
    stand_in: Callable[[Any], Any] | None = None
    leaves_model_alone: bool = False
    reads_batch_logs: Callable[[Any, Phase], bool] = _never
    master_decides: bool = False
    path: str = ""
    folder_per_rank: bool = False
    state: tuple[str, ...] = ()
    weights: str = ""


RULES = (
    # Tarantella writes the backup itself, with what differs between the ranks (`resumption`).
    Rule("BackupAndRestore", leaves_model_alone=True, stand_in=BackupRemoval),
    # It only writes a file: several ranks would garble it. A backup also keeps how long the file
    # was (`callback_state`).
    Rule("CSVLogger", master_only=True, path="filename"),
    # On all ranks, as it stops training and restores weights. It counts epochs without progress.
    Rule(
        "EarlyStopping",
        state=internals.CALLBACK_STATE["EarlyStopping"],
        weights="best_weights",
    ),
    # `fit` returns it on every rank, with the epochs before the interruption.
    Rule("History", state=internals.CALLBACK_STATE["History"]),
    # On all ranks, as `model.save` has the master write and the others wait for it. It reads the
    # logs of batches only if it saves at batches.
    Rule(
        "ModelCheckpoint",
        leaves_model_alone=True,
        reads_batch_logs=lambda callback, phase: bool(callback.save_freq != "epoch"),
        master_decides=True,
        state=internals.CALLBACK_STATE["ModelCheckpoint"],
    ),
    # It only writes files.
    Rule("OrbaxCheckpoint", master_only=True),
    # It shows logs of batches only as a bar, and nothing while `fit` validates.
    Rule(
        "ProgbarLogger",
        leaves_model_alone=True,
        reads_batch_logs=lambda callback, phase: (
            phase.verbose == 1 and not (phase.trains and phase.name == "test")
        ),
    ),
    # On all ranks, as it changes the learning rate. It counts epochs without progress.
    Rule("ReduceLROnPlateau", state=internals.CALLBACK_STATE["ReduceLROnPlateau"]),
    # It only sends logs to a server, which should get them once.
    Rule("RemoteMonitor", master_only=True),
    # On all ranks, as it exchanges the weights. It has to know which ones are in the model.
    Rule("SwapEMAWeights", state=internals.CALLBACK_STATE["SwapEMAWeights"]),
    # It only writes files, in a folder; each rank can have its own.
    Rule(
        "TensorBoard",
        master_only=True,
        leaves_model_alone=True,
        reads_batch_logs=lambda callback, phase: bool(callback.update_freq != "epoch"),
        path="log_dir",
        folder_per_rank=True,
    ),
    # Those of trackers only send logs and files to a server, as one run of the tracker.
    Rule(
        "WandbMetricsLogger",
        package="wandb",
        master_only=True,
        leaves_model_alone=True,
        reads_batch_logs=lambda callback, phase: bool(callback.logging_batch_wise),
    ),
    # A `ModelCheckpoint`. Other hosts may not have the file that it sends.
    Rule(
        "WandbModelCheckpoint",
        package="wandb",
        master_only=True,
        leaves_model_alone=True,
        reads_batch_logs=lambda callback, phase: bool(callback.save_freq != "epoch"),
    ),
    # It predicts, and fails where the tracker is disabled. So the master predicts alone.
    Rule("WandbEvalCallback", package="wandb", master_only=True, gets_plain_model=True),
    Rule(
        "MlflowCallback",
        package="mlflow",
        master_only=True,
        leaves_model_alone=True,
        reads_batch_logs=lambda callback, phase: callback.log_every_n_steps is not None,
    ),
    Rule(
        "MlflowModelCheckpointCallback",
        package="mlflow",
        master_only=True,
        leaves_model_alone=True,
        reads_batch_logs=lambda callback, phase: bool(callback.save_freq != "epoch"),
    ),
    Rule(
        "CometKerasCallback",
        package="comet_ml",
        disabled="CometEmptyKerasCallback",
        master_only=True,
        leaves_model_alone=True,
        reads_batch_logs=lambda callback, phase: True,
    ),
)


def rules_for(callback: Any) -> list[Rule]:
    """The rules for a callback: those for the classes that it derives from."""
    return [rule for rule in RULES if _class_of(rule, callback)]


def _class_of(rule: Rule, callback: Any) -> Any | None:
    """The class that a rule is about, if a callback derives from it."""
    names = (rule.callback, rule.disabled) if rule.disabled else (rule.callback,)
    for cls in type(callback).__mro__:
        if cls.__name__ in names and cls.__module__.partition(".")[0] == rule.package:
            return cls
    return None


def kind(callback: Any) -> str:
    """A name for what a callback is; the same on ranks where its package is disabled."""
    for rule in rules_for(callback):
        if rule.disabled:
            return f"{rule.package}.{rule.callback}"
    return f"{type(callback).__module__}.{type(callback).__qualname__}"


# Which ranks run a callback


def runs_on_all_ranks(callback: Any) -> bool:
    """Whether all ranks run a callback, rather than only the master rank."""
    rules = [rule for rule in rules_for(callback) if rule.master_only]
    if configuration().trackers_on_all_devices:
        rules = [rule for rule in rules if rule.package == "keras"]
    default = not rules
    return getattr(callback, "_tnt_run_on_all_ranks", default)


def user_chose_ranks(callback: Any) -> bool:
    """Whether the user has chosen which ranks run this callback."""
    return hasattr(callback, "_tnt_run_on_all_ranks")


def gets_plain_model(callback: Any) -> bool:
    """Whether a callback gets the plain model, because the master rank runs it alone."""
    plain = any(rule.gets_plain_model for rule in rules_for(callback))
    return plain and not runs_on_all_ranks(callback)


def needs_folder_per_rank(callback: Any) -> bool:
    """Whether ranks that run a callback with the same path get a folder each."""
    return any(rule.folder_per_rank for rule in rules_for(callback))


def master_decides(callback: Any) -> bool:
    """Whether only the master runs a callback because each rank would give it its own logs."""
    return not aggregates_logs(callback) and any(
        rule.master_decides for rule in rules_for(callback)
    )


def stand_in_for(callback: Any) -> Any | None:
    """What the master rank runs in place of a callback, if it is not the callback itself."""
    made = [rule.stand_in(callback) for rule in rules_for(callback) if rule.stand_in]
    return made[0] if made else None


def written_path(callback: Any) -> str | None:
    """The path that every rank would write to, if a callback of Keras writes on all ranks."""
    if not runs_on_all_ranks(callback):
        return None
    paths = [str(getattr(callback, rule.path)) for rule in rules_for(callback) if rule.path]
    return paths[0] if paths else None


# What a callback sees and does


def aggregates_logs(callback: Any) -> bool:
    """Whether a callback gets the logs of the global batch."""
    return getattr(callback, "_tnt_aggregate_logs", True)


def reads_batch_logs(callback: Any, phase: Phase) -> bool:
    """Whether a callback looks at the global logs of batches in a phase."""
    event = f"{phase.name}_batch_end"
    if not aggregates_logs(callback) or not internals.handles(callback, event):
        return False
    watching = _watching_rules(callback, event)
    return not watching or any(rule.reads_batch_logs(callback, phase) for rule in watching)


def may_change_model(callback: Any, event: str) -> bool:
    """Whether a callback might change the model at an event of batches."""
    return internals.handles(callback, event) and not _watching_rules(callback, event)


def _watching_rules(callback: Any, event: str) -> list[Rule]:
    """The rules that say a callback only watches at an event; none if the user overrides it."""
    methods = [f"on_{name}" for name in internals.names_of(event)]
    return [
        rule
        for rule in rules_for(callback)
        if rule.leaves_model_alone
        and all(
            getattr(getattr(callback, method), "__func__", None)
            is getattr(_class_of(rule, callback), method)
            for method in methods
        )
    ]
