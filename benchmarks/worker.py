"""A process that times its steps when it is told to: see step_time.py, which starts it.

    python benchmarks/worker.py KIND ADDRESS

plain: plain Keras with all cores. ranks: one of several ranks, which also trains alone, on its part
of the batch. mirrored: one of two workers of MultiWorkerMirroredStrategy, on legacy Keras.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from common import RANKS, all_step_times, compiled
from models import CASES, SIZES, Case
from turns import take_turns

# As many as Tarantella gives to a rank with one compute thread.
INTER_OP_THREADS = 7
HEARTBEAT_MS = 600_000


@dataclass(frozen=True)
class Training:
    """A compiled model, the size of the batch in each step, and what follows each step."""

    model: Any
    batch: int
    after_step: Callable[[], object] | None = None


class Plain:
    """Trains with plain Keras, in this process."""

    def __init__(self, keras: Any = None) -> None:
        self.keras = keras or importlib.import_module("keras")
        self._case = CASES["lenet5"]
        self._trainings: dict[str, Training] = {}

    def build(self, model: str, size: str = "cpu", precision: str = "", ranks: int = RANKS) -> None:
        """Builds a model.

        Args:
            model: Its name.
            size: A key of `SIZES`.
            precision: A dtype policy of Keras 3, if not the usual one.
            ranks: The number of ranks; the batch grows with it.
        """
        if precision:
            self.keras.config.set_dtype_policy(precision)
        case = SIZES[size][model]
        self._case = replace(case, batch=case.batch // RANKS * ranks)
        self._trainings = self.trainings(self._case)

    def first_step(self, candidate: str) -> float:
        """The time from the call of `fit` to the end of its first step."""
        training = self._trainings[candidate]
        data = self.fit_arguments(self._case, training.batch, 1)
        return self._step_times(training, **data)[0]

    def measure(self, candidate: str, warm_up: int, steps: int) -> list[float]:
        """The times of the steps after the warm-up."""
        training = self._trainings[candidate]
        data = self.fit_arguments(self._case, training.batch, warm_up + steps + 1)
        return self._step_times(training, **data)[1 + warm_up :]

    def _step_times(self, training: Training, **data: Any) -> list[float]:
        return all_step_times(
            training.model, keras=self.keras, after_step=training.after_step, **data
        )

    def drop(self) -> None:
        """Releases the model."""
        self._trainings = {}
        self.keras.backend.clear_session()
        gc.collect()

    def trainings(self, case: Case) -> dict[str, Training]:
        return {"keras": Training(self.compiled(case, case.build(self.keras)), case.batch)}

    def compiled(self, case: Case, model: Any) -> Any:
        return compiled(model, self.keras, case.momentum)

    def fit_arguments(self, case: Case, batch: int, steps: int) -> dict[str, Any]:
        """Arguments of `fit`: batches in memory."""
        import tensorflow as tf

        dataset = tf.data.Dataset.from_tensors(case.data(batch)).repeat(steps)
        return {"x": dataset, "shuffle": False}


class Ranks(Plain):
    """Trains on a rank, and also without the others, for comparison."""

    def __init__(self) -> None:
        import tarantella as tnt

        super().__init__()
        self._tnt = tnt
        from mpi4py import MPI

        self._barrier = MPI.COMM_WORLD.Dup().Barrier

    def trainings(self, case: Case) -> dict[str, Training]:
        alone, together = (case.build(self.keras) for _ in range(2))
        together = self._tnt.Model(together)
        limit = Training(self.compiled(case, alone), case.batch // self._tnt.get_size())
        return {
            "limit": limit,
            "barrier": replace(limit, after_step=self._barrier),
            "tarantella": Training(self.compiled(case, together), case.batch),
        }


class Mirrored(Plain):
    """Trains as a worker of MultiWorkerMirroredStrategy, with one compute thread on its cores."""

    def __init__(self) -> None:
        index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        cores = sorted(os.sched_getaffinity(0))
        share = len(cores) // RANKS
        os.sched_setaffinity(0, cores[index * share : (index + 1) * share])
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(INTER_OP_THREADS)
        super().__init__(importlib.import_module("tf_keras"))
        _be_patient()
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def trainings(self, case: Case) -> dict[str, Training]:
        with self._strategy.scope():
            model = self.compiled(case, case.build(self.keras))
        return {"mirrored": Training(model, case.batch // RANKS)}

    def fit_arguments(self, case: Case, batch: int, steps: int) -> dict[str, Any]:
        """Ready micro-batches: the strategy has no batch to split, and no end to agree on."""
        import tensorflow as tf

        dataset = self._strategy.distribute_datasets_from_function(
            lambda context: tf.data.Dataset.from_tensors(case.data(batch)).repeat()
        )
        return {"x": dataset, "steps_per_epoch": steps}


def _be_patient() -> None:
    """Allows workers to be silent for longer than TensorFlow's 10 s, as on a busy machine.

    The benchmark notices by other means if they die. There is no public option for it.
    """
    from tensorflow.python.eager import context

    here = context.context()
    here.configure_coordination_service = functools.partial(
        here.configure_coordination_service, heartbeat_timeout_in_ms=HEARTBEAT_MS
    )


KINDS = {"plain": Plain, "ranks": Ranks, "mirrored": Mirrored}


def main() -> None:
    kind, address = sys.argv[1:]
    worker = KINDS[kind]()
    names = ("build", "first_step", "measure", "drop")
    take_turns(address, {name: getattr(worker, name) for name in names})


if __name__ == "__main__":
    main()
