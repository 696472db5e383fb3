"""What dividing the input among ranks gains if it is costly, and costs if it is not.

Every rank has one core, to prepare its input and to train, even if it is the only one.

jpeg: a pipeline that reads, decodes and resizes images, and a tiny model. Samples per second on two
ranks, over those on one. For comparison: two processes that each train alone on half of every batch
(the limit), and two ranks that decode every image and cut the finished batch. One and two ranks
take turns, in fresh processes each time.

memory: LeNet-5 on two ranks, with NumPy arrays and with a dataset of samples in memory. The time of
a step, over that of a step with ready micro-batches: nothing is shuffled, batched, split or agreed
on. For comparison, a dataset of half the batch that each rank shuffles and batches itself. All take
turns in the same two processes.

A round's figure is the median of its steps, on the slower rank; the result is the median of
the rounds' ratios.

    python benchmarks/input.py                      # both
    python benchmarks/input.py --only memory --rounds 9
    python benchmarks/input.py --quick              # checks only that it runs
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from common import compiled, is_rank, lenet5, on_ranks, step_times

RANKS = 2
GAIN, COST = 1.8, 0.02  # the targets

IMAGES, WIDTH, IMAGE_BATCH = 256, 512, 64
SAMPLE_BATCH, SHUFFLED = 256, 4096
# Steps to warm up with, and steps to measure.
IMAGE_STEPS, QUICK_IMAGE_STEPS = (6, 24), (1, 3)
SAMPLE_STEPS, QUICK_SAMPLE_STEPS = (20, 100), (2, 4)

Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["jpeg", "memory"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of a few steps")
    parser.add_argument("--images", type=Path, help=argparse.SUPPRESS)  # for the ranks
    options = parser.parse_args()
    if is_rank():
        use_one_core()
        rank_main(options)
        return
    if len(os.sched_getaffinity(0)) < RANKS:
        sys.exit(f"This needs {RANKS} cores.")
    rounds = 1 if options.quick else options.rounds
    print("Each rank is bound to one core, even if it is the only one.", flush=True)
    if options.only != "memory":
        compare_on_images(rounds, options.quick)
    if options.only != "jpeg":
        compare_on_arrays(rounds, options.quick)


def use_one_core() -> None:
    """Binds this rank to its own core, with all threads that it will start."""
    rank = next(os.environ[v] for v in ("PMI_RANK", "OMPI_COMM_WORLD_RANK") if v in os.environ)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(rank)]})


def rank_main(options: argparse.Namespace) -> None:
    """Measures, and prints the figures of each round as a line."""
    import tarantella as tnt

    if options.images:
        steps = QUICK_IMAGE_STEPS if options.quick else IMAGE_STEPS
        rounds = [images_per_second(sorted(map(str, options.images.iterdir())), *steps)]
    else:
        steps = QUICK_SAMPLE_STEPS if options.quick else SAMPLE_STEPS
        inputs = Inputs(*steps)
        rounds = [inputs.seconds_per_step() for _ in range(1 if options.quick else options.rounds)]
    if tnt.is_master_rank():
        print(json.dumps(rounds), flush=True)


def launch(ranks: int, quick: bool, *arguments: str) -> list[Figures]:
    """Runs this script on fresh ranks and returns the figures of each round."""
    settings = ["TNT_THREADS=1", "TF_NUM_INTRAOP_THREADS=1", "TNT_CORES="]  # see use_one_core
    command = on_ranks(ranks, *(word for one in settings for word in ("-x", one)))
    command += [sys.argv[0], *arguments, *(["--quick"] if quick else [])]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if run.returncode != 0:
        sys.exit(run.returncode)
    figures: list[Figures] = json.loads(run.stdout.splitlines()[-1])
    return figures


def slowest(times: list[float]) -> float:
    """The median step time, on the slowest rank."""
    import tarantella as tnt

    return float(tnt.allreduce(statistics.median(times), op="max"))


def described(ratios: list[float], form: str) -> str:
    low, middle, high = (form.format(f(ratios)) for f in (min, statistics.median, max))
    return f"{middle} ({low} to {high})"


# Images


def compare_on_images(rounds: int, quick: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_images(Path(folder), 2 * IMAGE_BATCH if quick else IMAGES)
        ratios: dict[str, list[float]] = {}
        for number in range(rounds):
            (alone,) = launch(1, quick, "--images", folder)
            (together,) = launch(RANKS, quick, "--images", folder)
            rate = alone["ranks"]
            print(
                f"jpeg round {number + 1}: 1 rank {rate:7.1f} images/s, 2: "
                + ", ".join(f"{kind} {r:7.1f} ({r / rate:.2f})" for kind, r in together.items()),
                flush=True,
            )
            for kind, one in together.items():
                ratios.setdefault(kind, []).append(one / rate)
    for kind, name in (("ranks", "2 ranks"), ("limit", "two alone"), ("cut", "batches cut")):
        print(f"jpeg      {name:12} over 1 rank  {described(ratios[kind], '{:.2f}')}")
    if statistics.median(ratios["ranks"]) < GAIN and not quick:
        print(f"jpeg      Two ranks are not {GAIN} times as fast as one.")


def make_images(folder: Path, number: int) -> None:
    """Writes JPEG files of gradients with some noise."""
    import numpy as np
    import tensorflow as tf

    rng = np.random.default_rng(1)
    ramp = np.linspace(0, 200, WIDTH)
    for i in range(number):
        colours = rng.random((2, 3))
        image = ramp[:, None, None] * colours[0] + ramp[None, :, None] * colours[1]
        image = image / 2 + rng.normal(20, 10, image.shape)
        jpeg = tf.io.encode_jpeg(np.clip(image, 0, 255).astype(np.uint8), quality=90)
        (folder / f"{i:04}.jpg").write_bytes(jpeg.numpy())


def images_per_second(files: list[str], warm_up: int, steps: int) -> Figures:
    """Trains on the images in every way possible on this number of ranks."""
    import keras

    import tarantella as tnt
    from tarantella.data import order
    from tarantella.data.cut import cut as cut_batches
    from tarantella.keras import adapter

    def cut(dataset: Any, rank: int, size: int) -> Any:
        return cut_batches(order.with_common_order(dataset), rank, size)

    def rate(model: Any, batch: int) -> float:
        dataset = decoded(files, batch, warm_up + steps)
        times = step_times(compiled(model), dataset, shuffle=False)[warm_up - 1 :]
        return IMAGE_BATCH / slowest(times)

    plain = keras.Sequential(
        [
            keras.Input((64, 64, 3)),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model = tnt.Model(plain)
    rates = {"ranks": rate(model, IMAGE_BATCH)}
    if tnt.get_size() > 1:
        rates["limit"] = rate(plain, IMAGE_BATCH // tnt.get_size())
        with patch.object(adapter, "split", cut):
            rates["cut"] = rate(model, IMAGE_BATCH)
    return rates


def decoded(files: list[str], batch: int, steps: int) -> Any:
    """Batches of images, prepared the way users do."""
    import tensorflow as tf

    def load(file: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image = tf.io.decode_jpeg(tf.io.read_file(file), channels=3)
        return tf.image.resize(image, (64, 64)) / 255, label

    labels = [i % 10 for i in range(len(files))]
    dataset = tf.data.Dataset.from_tensor_slices((files, labels)).shuffle(len(files)).repeat()
    dataset = dataset.map(load, num_parallel_calls=tf.data.AUTOTUNE).batch(batch)
    return dataset.take(steps).prefetch(tf.data.AUTOTUNE)


# Arrays


def compare_on_arrays(rounds: int, quick: bool) -> None:
    figures = launch(RANKS, quick, "--only", "memory", "--rounds", str(rounds))
    for number, one in enumerate(figures):
        print(
            f"memory round {number + 1}: "
            + ", ".join(f"{kind} {1e3 * time:.2f} ms" for kind, time in one.items())
        )
    for kind in (kind for kind in figures[0] if kind != "ready"):
        costs = [one[kind] / one["ready"] - 1 for one in figures]
        print(f"memory    {kind:12} over ready micro-batches  {described(costs, '{:+.1%}')}")
        if kind != "halves" and statistics.median(costs) > COST and not quick:
            print(f"memory    The split of {kind} costs more than {COST:.0%} of the step.")


class Inputs:
    """The kinds of input that are compared, for a model on two ranks."""

    def __init__(self, warm_up: int, steps: int) -> None:
        import numpy as np

        import tarantella as tnt

        self._warm_up = warm_up
        rng = np.random.default_rng(1)
        samples = SAMPLE_BATCH * (warm_up + steps)
        self._x = rng.random((samples, 28, 28, 1), np.float32)
        self._y = rng.integers(0, 10, samples)
        self._model = compiled(tnt.Model(lenet5()))

    def seconds_per_step(self) -> Figures:
        import tensorflow as tf

        dataset = tf.data.Dataset.from_tensor_slices((self._x, self._y))
        times = {}
        with nothing_agreed_on(self._ready):
            times["ready"] = self._seconds(dataset.batch(SAMPLE_BATCH))
        with nothing_agreed_on(self._half):
            times["halves"] = self._seconds(dataset.batch(SAMPLE_BATCH))
        times["arrays"] = self._seconds(self._x, self._y, batch_size=SAMPLE_BATCH)
        times["dataset"] = self._seconds(dataset.shuffle(SHUFFLED).batch(SAMPLE_BATCH))
        return times

    def _seconds(self, *data: Any, **options: Any) -> float:
        return slowest(step_times(self._model, *data, **options)[self._warm_up - 1 :])

    def _ready(self, *_: Any) -> Any:
        """The same micro-batch again and again."""
        import tensorflow as tf

        own = SAMPLE_BATCH // RANKS
        ready = self._micro_batch(tf.constant(self._x[:own]), tf.constant(self._y[:own]))
        return tf.data.Dataset.from_tensors(ready).repeat(len(self._x) // SAMPLE_BATCH)

    def _half(self, *_: Any) -> Any:
        """Batches of half the size, of half of the samples."""
        import tensorflow as tf

        half = len(self._x) // RANKS
        dataset = tf.data.Dataset.from_tensor_slices((self._x[:half], self._y[:half]))
        dataset = dataset.shuffle(SHUFFLED // RANKS).batch(SAMPLE_BATCH // RANKS)
        return dataset.map(self._micro_batch).prefetch(tf.data.AUTOTUNE)

    @staticmethod
    def _micro_batch(x: Any, y: Any) -> Any:
        import tensorflow as tf

        from tarantella.data.micro_batch import MicroBatch

        own, total = (tf.constant(n, tf.int64) for n in (SAMPLE_BATCH // RANKS, SAMPLE_BATCH))
        return MicroBatch(own, total, (x, y))


@contextmanager
def nothing_agreed_on(micro_batches: Callable[..., Any]) -> Iterator[None]:
    """Trains on a dataset of micro-batches as it is, whatever is passed to `fit`."""
    from tarantella.data.cut import Split
    from tarantella.keras import adapter

    def steps(own: Split, own_data: bool) -> Any:
        return SimpleNamespace(
            dataset=own.micro_batches, problem=None, on_next_step=lambda tell: None
        )

    with (
        patch.object(adapter, "split", lambda *_: Split(micro_batches())),
        patch.object(adapter, "AgreedSteps", steps),
    ):
        yield


if __name__ == "__main__":
    main()
