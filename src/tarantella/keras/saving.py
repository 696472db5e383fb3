"""Saving: the plain Keras model, written by the master rank, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from tarantella.comm import agreement, buffers, master_done
from tarantella.comm.master_done import Subject
from tarantella.internals import keras as internals
from tarantella.keras import hooks
from tarantella.keras.hdf5 import checked_writes
from tarantella.runtime import messages, world
from tarantella.runtime.atomic_write import atomic_write

WEIGHTS = ".weights.h5"
SHARDED_WEIGHTS = ".weights.json"


@dataclass(frozen=True)
class Target:
    """Where something is to be saved.

    Attributes:
        path: The file or folder.
        makes_parents: Whether Keras makes the folders above it, if they are missing.
        options: Further options for Keras.
    """

    path: str
    makes_parents: bool
    options: dict[str, Any]


def save_model(
    model: keras.Model,
    filepath: Any,
    overwrite: bool = True,
    zipped: bool | None = None,
    everywhere: bool = False,
    **options: Any,
) -> None:
    """Saves a plain Keras model, as `keras.Model.save`.

    Args:
        model: The model.
        filepath: The path; without an extension, a folder is made.
        overwrite: If False, ask before overwriting a file.
        zipped: If False, write a folder instead of one file.
        everywhere: Whether every rank writes, rather than the master alone.
        options: Further options of Keras.
    """

    def save(path: Any, **more: Any) -> None:
        with internals.kept_compile_arguments(model):
            keras.Model.save(model, path, **{"zipped": zipped, **options, **more})

    _write("save", save, filepath, _target_of_model(filepath, zipped), overwrite, everywhere)


def save_weights(
    model: keras.Model,
    filepath: Any,
    overwrite: bool = True,
    everywhere: bool = False,
    **options: Any,
) -> None:
    """Saves the weights of a plain Keras model, as `keras.Model.save_weights`.

    A path without an extension gets one, which `loading.find_weights` finds.
    """

    def save(path: Any, **more: Any) -> None:
        keras.Model.save_weights(model, path, **options, **more)

    sharded = options.get("max_shard_size") is not None
    target = _target_of_weights(filepath, sharded)
    _write("save_weights", save, filepath, target, overwrite, everywhere)


def export(
    model: keras.Model, filepath: Any, *args: Any, everywhere: bool = False, **options: Any
) -> None:
    """Exports a plain Keras model, as `keras.Model.export`."""
    path = local_path(filepath)

    def save(path: Any, overwrite: bool = True) -> None:
        keras.Model.export(model, path, *args, **options)

    target = None if path is None else Target(path, True, {})
    _write("export", save, filepath, target, True, everywhere)


# Where it is saved


def _target_of_model(filepath: Any, zipped: bool | None) -> Target | None:
    path = local_path(filepath)
    if path is None:
        return None
    if zipped is None and not Path(path).suffix:
        zipped = False
    if zipped is False:
        return None if path.endswith(".keras") else Target(path, True, {"zipped": False})
    if path.endswith((".h5", ".hdf5")):
        return Target(path, True, {})
    return Target(path, False, {}) if path.endswith(".keras") else None


def _target_of_weights(filepath: Any, sharded: bool) -> Target | None:
    path = local_path(filepath)
    if path is None:
        return None
    if not Path(path).suffix:
        path += SHARDED_WEIGHTS if sharded else WEIGHTS
    endings = (WEIGHTS, SHARDED_WEIGHTS) if sharded else (WEIGHTS,)
    return Target(path, False, {}) if path.endswith(endings) else None


def local_path(filepath: Any) -> str | None:
    """The path, if it is one in a local file system that can be renamed."""
    path = os.fspath(filepath) if isinstance(filepath, os.PathLike) else filepath
    if not isinstance(path, str) or internals.is_remote_path(path):
        return None
    path = path.rstrip(os.sep)
    return path if Path(path).name not in ("", "..") else None


# Which ranks write, and what the others do


def _write(
    method: str,
    save: Callable[..., None],
    filepath: Any,
    target: Target | None,
    overwrite: bool,
    everywhere: bool,
) -> None:
    """Lets Keras save something, and raises its error on all ranks.

    Args:
        method: The method that the user has called.
        save: Keras's function of a path and options.
        filepath: The path as the user passed it.
        target: What it means; None for a path that is left to Keras, to handle or refuse.
        overwrite: If False, ask before overwriting a file.
        everywhere: Whether every rank writes, rather than the master alone.
    """

    def write() -> None:
        if target is None:
            save(filepath, overwrite=overwrite)
        elif overwrite or not Path(target.path).exists() or internals.may_overwrite(target.path):
            write_atomically(save, target, alone=not everywhere)

    if everywhere:
        on_all_ranks(f"{method}(tnt_save_all_devices=True)", write)
    else:
        thing = str(filepath) if isinstance(filepath, (str, os.PathLike)) else ""
        master_done.done_by_master(Subject(method, thing), write)


def write_atomically(save: Callable[..., None], target: Target, alone: bool) -> None:
    """Saves something whole, or not at all.

    Args:
        save: Writes it, given a path and the target's options.
        target: Where to.
        alone: Whether no other process writes there at the same time.
    """
    parent = Path(target.path).parent
    if target.makes_parents and not parent.exists():
        parent.mkdir(parents=True, exist_ok=True)
    if not parent.is_dir():
        save(target.path, **target.options)  # raises Keras's error
        return
    with (
        atomic_write(target.path, world.get_rank(), alone) as written,
        checked_writes(),
        hooks.messages_about(str(written), target.path),
    ):
        save(str(written), **target.options)


def on_all_ranks(call: str, action: Callable[[], Any]) -> Any:
    """Does something on every rank; if it fails, all raise the error of the first that failed."""
    if world.get_size() == 1:
        return action()
    result, own, problem = None, None, b""
    try:
        result = action()
    except Exception as error:
        own, problem = error, messages.packed_error(error)
    with agreement.turn() as comm:
        agreement.agree(call, [], comm)
        problems = buffers.allgather_bytes(problem, comm)
    failed = [rank for rank, data in enumerate(problems) if data]
    if not failed:
        return result
    if own is not None and failed[0] == world.get_rank():
        raise own
    raise _of_other_rank(messages.unpacked_error(problems[failed[0]]), failed[0])


def _of_other_rank(error: Exception, rank: int) -> Exception:
    if hasattr(error, "add_note"):  # since Python 3.11
        error.add_note(f"This error is from rank {rank}.")
    return error
