"""What the benchmarks share: ranks of this machine, a model, and the times of its steps."""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any


def is_rank() -> bool:
    """Whether this process was started by `tarantella`."""
    return "TNT_RUN_ID" in os.environ


def on_ranks(ranks: int, *options: str) -> list[str]:
    """The beginning of a command that runs a script on ranks of this machine, without GPUs."""
    command = Path(sys.executable).parent / "tarantella"
    return [str(command), "-n", str(ranks), "--no-gpu", *options, "--"]


def step_times(model: Any, *data: Any, **options: Any) -> list[float]:
    """Trains on data, and returns how long each step took after the first one."""
    import keras

    ends: list[float] = []
    clock = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter())
    )
    model.fit(*data, verbose=0, callbacks=[clock], **options)
    return [end - begin for begin, end in itertools.pairwise(ends)]


def compiled(model: Any) -> Any:
    import keras

    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "sparse_categorical_crossentropy")
    return model


def lenet5() -> Any:
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(20, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(50, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(500, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )
