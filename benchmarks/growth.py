"""What training costs a rank, counted on 2, 4 and 8 ranks, and what grows with their number.

More ranks than cores cannot be timed, so everything is counted. A rank's counts for a `fit` with
E epochs of S steps are F + E (P + S s); three calls of `fit` with different E and S give the cost
of a step (s), an epoch (P, with its validation) and the call itself (F):

calls    The MPI calls of the process, by communicator and kind, with the bytes passed in or
         out, whichever is more, and the thread. All communicators belong to a class that counts,
         whoever uses them.
wire     The bytes that the kernel has sent on the TCP connections of the process. The ranks use
         TCP as if each had its own host; so this is what the MPI library makes of the calls,
         counted independently of this script.
lines    Lines of Tarantella's Python executed, in any thread; not those that wait for others.
memory, threads, files, processor time of the process.

A rank's micro-batch is the same for every number of ranks. There are always more ranks than cores,
so that they all wait for each other in the same way.

    python benchmarks/growth.py                     # a few minutes
    python benchmarks/growth.py --ranks 2 4 --cases lenet5-arrays
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pickle
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import is_rank, lenet5, on_ranks

RESULTS = Path(__file__).parent / "results" / "growth.json"
# As if every rank had its own host. MPICH communicates through UCX.
OVER_TCP = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self", "UCX_LOG_LEVEL": "error"}
RANKS = [2, 4, 8]
MICRO_BATCH = 4  # samples on each rank
STEPS = 6
VALIDATION_STEPS = 2
LONG = 30  # steps for noisy figures: processor time, memory
SHORTEST, WORDS = 5, 1000  # of sentences
UNITS = ("step", "epoch", "fit")
KIB = 2**10
MEMORY_NOISE = 8.0  # MiB by which a rank's memory may differ from run to run

Counts = dict[str, float]
Sides = dict[str, dict[str, Any]]  # the master's counts, and the largest of the others'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--output", type=Path, default=RESULTS, help="file for the counts")
    options = parser.parse_args()
    if is_rank():
        count_on_rank(options.cases)
        return
    runs = {}
    for ranks in options.ranks:
        runs[ranks] = launch(ranks, options.cases)
        print_table(ranks, runs[ranks])
    print_verdicts(runs)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(runs, indent=1) + "\n")


def launch(ranks: int, cases: list[str]) -> Sides:
    """Counts on fresh ranks, more than there are cores."""
    settings = {**OVER_TCP, "TNT_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    variables = [f"{name}={value}" for name, value in settings.items()]
    command = on_ranks(ranks, "--log-level", "ERROR", "-x", *variables)
    command += [sys.argv[0], "--cases", *cases]
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[: max(ranks - 1, 1)])
    try:
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    finally:
        os.sched_setaffinity(0, cores)
    if run.returncode != 0:
        sys.exit(run.returncode)
    master, *others = json.loads(run.stdout.splitlines()[-1])
    return {"master": master, "others": most(others)}


def most(counted: list[Any]) -> Any:
    """The largest of each count, for nested dictionaries of counts."""
    if not isinstance(counted[0], dict):
        return max(counted)
    names = {name for one in counted for name in one}
    missing: Any = {} if isinstance(next(iter(counted[0].values()), 0), dict) else 0
    return {name: most([one.get(name, missing) for one in counted]) for name in sorted(names)}


# What is counted

_calls: list[tuple[str, float]] = []  # lists: any thread may append to them at any time
_lines: list[str] = []
_is_tracing = False
# Files where a rank polls, as often as it has time to.
_waiting: tuple[str, ...] = ("/comm/waiting.py", "/comm/background_allreduce.py")
_master_done = "/comm/master_done.py"

_COLLECTIVE = (
    *("Allgather", "Allgatherv", "Allreduce", "Alltoall", "Alltoallv", "Alltoallw", "Barrier"),
    *("Bcast", "Exscan", "Gather", "Gatherv", "Reduce", "Reduce_scatter", "Reduce_scatter_block"),
    *("Scan", "Scatter", "Scatterv"),
)
_TO_ONE = ("Send", "Bsend", "Ssend", "Rsend", "Sendrecv", "Recv", "Mprobe")


def start_counting() -> Any:
    """Starts this rank with communicators that count, and returns one that does not."""
    global _waiting
    import mpi4py

    mpi4py.rc.finalize = False  # as Tarantella needs it, which imports MPI next
    from mpi4py import MPI

    module: Any = MPI
    plain = MPI.COMM_WORLD
    module.COMM_WORLD = _counting_class()(plain)  # its duplicates have the same class
    import tarantella as tnt
    from tarantella.runtime import world

    assert tnt.get_size() == plain.Get_size()
    for file in (*_waiting, _master_done):
        assert (Path(tnt.__file__).parent / file[1:]).exists(), file
    if not tnt.is_master_rank():
        _waiting += (_master_done,)
    for purpose in world.PURPOSES:
        counting: Any = world.communicator(purpose)
        counting.purpose = purpose
    _trace_functions_in_graphs()
    return plain.Dup()


def _counting_class() -> Any:
    from mpi4py import MPI

    class Counting(MPI.Intracomm):
        purpose = "world"

    for kind in (*_COLLECTIVE, *_TO_ONE):
        first = kind[0].lower() + kind[1:]
        for name in (kind, f"I{first}", first, f"i{first}"):
            if hasattr(MPI.Intracomm, name):
                setattr(Counting, name, _counted(name))
        if hasattr(MPI.Intracomm, f"{kind}_init"):
            setattr(Counting, f"{kind}_init", _refused)
    return Counting


def _counted(name: str) -> Callable[..., Any]:
    from mpi4py import MPI

    method, pickles = getattr(MPI.Intracomm, name), name[0].islower()

    def call(self: Any, *args: Any, **options: Any) -> Any:
        result = method(self, *args, **options)
        if result is None and "mprobe" in name:
            return result  # polled, and nothing was there
        values = [*args, *options.values()]
        if pickles:
            results = result if isinstance(result, list) else []
            sizes = [sum(len(pickle.dumps(one)) for one in some) for some in (values[:1], results)]
        else:
            sizes = [_bytes_of(value) for value in values] or [0]
        main = threading.current_thread() is threading.main_thread()
        thread = "main" if main else "other"
        _calls.append((f"{self.purpose} {name} {thread}", max(sizes)))
        return result

    return call


def _refused(*args: Any, **options: Any) -> Any:
    raise NotImplementedError("Persistent requests are not counted.")


def _bytes_of(buffer: Any) -> int:
    """The size of an argument, if it is a buffer: an array, or a list that begins with one."""
    if isinstance(buffer, (list, tuple)):
        return _bytes_of(buffer[0])
    return int(getattr(buffer, "nbytes", 0))


def _trace_functions_in_graphs() -> None:
    """Counts lines also in Python functions that TensorFlow calls in its own threads."""
    import tensorflow as tf

    def wrapped(make: Callable[..., Any]) -> Callable[..., Any]:
        def with_traced(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            def traced(*arrays: Any) -> Any:
                with tracing():
                    return function(*arrays)

            return make(traced, *args, **options)

        return with_traced

    tf.numpy_function = wrapped(tf.numpy_function)
    tf.py_function = wrapped(tf.py_function)


@contextmanager
def tracing() -> Iterator[None]:
    """Counts the lines that this thread runs, while lines are counted at all."""
    before = sys.gettrace()
    sys.settrace(_trace if _is_tracing else before)
    try:
        yield
    finally:
        sys.settrace(before)


def _trace(frame: Any, event: str, argument: Any) -> Any:
    file, caller = (each.f_code.co_filename if each else "" for each in (frame, frame.f_back))
    waits = file.endswith(_waiting) or (_master_done in _waiting and caller.endswith(_master_done))
    return _trace_line if "/tarantella/" in file and not waits else None


def _trace_line(frame: Any, event: str, argument: Any) -> Any:
    if event == "line":
        _lines.append(Path(frame.f_code.co_filename).name)
    return _trace_line


def sent_on_the_wire() -> dict[str, int]:
    """The bytes that each TCP connection of this process has sent so far."""
    sent = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            if not str(descriptor.readlink()).startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(descriptor.name)))
        except OSError:  # closed meanwhile
            continue
        with connection:
            try:
                information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                ends = f"{connection.getsockname()} {connection.getpeername()}"
            except OSError:  # not connected
                continue
            # Linux's struct tcp_info: the bytes that the other end has acknowledged.
            sent[ends] = struct.unpack_from("Q", information, 120)[0]
    return sent


def of_process() -> Counts:
    """Memory in MiB, threads and open files of this process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "resident MiB": int(status["VmRSS"].split()[0]) / KIB,
        "resident MiB, its own": int(status["RssAnon"].split()[0]) / KIB,
        "peak MiB": int(status["VmHWM"].split()[0]) / KIB,
        "threads": int(status["Threads"]),
        "files": len(list(Path("/proc/self/fd").iterdir())),
    }


class Snapshot:
    """The counts of this rank at one moment, after a barrier."""

    def __init__(self, comm: Any) -> None:
        self._barrier(comm)
        self._calls, self._lines = len(_calls), len(_lines)
        self._sent = sent_on_the_wire()

    def since(self, other: Snapshot) -> Counts:
        counts: Counter[str] = Counter()
        for call, size in _calls[other._calls : self._calls]:
            counts[f"calls: {call}"] += 1
            counts[f"bytes: {call}"] += int(size)
        for file, number in Counter(_lines[other._lines : self._lines]).items():
            counts[f"lines: {file}"] = number
        sent = {ends: n - other._sent.get(ends, 0) for ends, n in self._sent.items()}
        counts["wire: bytes"] = sum(sent.values())
        # Far more than keep-alive messages.
        counts["wire: connections in use"] = sum(n > 100 * STEPS for n in sent.values())
        return dict(counts)

    @staticmethod
    def _barrier(comm: Any) -> None:
        time.sleep(0.05)  # until what was sent is acknowledged
        request = comm.Ibarrier()
        while not request.Test():
            time.sleep(0.001)


# The cases


def count_on_rank(cases: list[str]) -> None:
    """Counts all cases on this rank; the master prints the counts of all ranks as a line."""
    comm = start_counting()
    counted: dict[str, Any] = {"start": at_start(), "cases": {}}
    for name in cases:
        counted["cases"][name] = of_case(CASES[name], comm)
    counted["process"] = {**of_process(), **of_long_run(comm)}
    everyones = comm.gather(counted)
    if comm.Get_rank() == 0:
        print(json.dumps(everyones), flush=True)


def at_start() -> Counts:
    """What the start of the run cost this rank."""
    counts = of_process()
    counts["calls"] = len(_calls)
    counts["bytes"] = sum(size for _, size in _calls)
    return counts


def of_case(case: Callable[[], Fit], comm: Any) -> dict[str, Counts]:
    """What a step, an epoch and a call of `fit` cost this rank."""
    global _is_tracing
    fit = case()
    fit(1, STEPS)  # traces the functions, and broadcasts the master's weights
    counts = []
    for epochs, steps in ((1, STEPS), (1, 2 * STEPS), (2, STEPS)):
        before = Snapshot(comm)
        _is_tracing = True
        with tracing():
            fit(epochs, steps)
        _is_tracing = False
        counts.append(Snapshot(comm).since(before))
    once, longer, twice = counts
    return solved(once, longer, twice, STEPS)


def solved(once: Counts, longer: Counts, twice: Counts, steps: int) -> dict[str, Counts]:
    """The counts of a step, of an epoch and of a call of `fit`.

    Args:
        once: The counts of one epoch.
        longer: The counts of one epoch of twice as many steps.
        twice: The counts of two epochs.
        steps: The number of steps in an epoch.
    """
    parts: dict[str, Counts] = {unit: {} for unit in UNITS}
    for name in sorted({*once, *longer, *twice}):
        one, long, two = (counts.get(name, 0) for counts in (once, longer, twice))
        if name == "wire: connections in use":
            parts["step"][name] = long
            continue
        step = (long - one) / steps
        epoch = two - one - steps * step
        values = (step, epoch, one - epoch - steps * step)
        for unit, value in zip(UNITS, values, strict=True):
            if value:
                parts[unit][name] = value
    return parts


def of_long_run(comm: Any) -> Counts:
    """Processor time and memory of a step, measured over many steps."""
    fit = on_arrays(lenet5)
    fit(1, LONG)
    figures = []
    for steps in (LONG, 2 * LONG):
        Snapshot(comm)
        processor, memory = time.process_time(), of_process()["resident MiB"]
        fit(1, steps)
        memory = of_process()["resident MiB"] - memory
        figures.append((time.process_time() - processor, memory))
    (short, _), (long, grown) = figures
    return {
        "processor ms per step": 1e3 * (long - short) / LONG,
        f"MiB more after {2 * LONG} steps": grown,
    }


Fit = Callable[[int, int], None]


def on_arrays(make: Callable[[], Any], **options: Any) -> Fit:
    model, batch = compiled(make()), global_batch()
    x, y = images(2 * LONG)
    held_out = (x[: VALIDATION_STEPS * batch], y[: VALIDATION_STEPS * batch])

    def fit(epochs: int, steps: int) -> None:
        samples = steps * batch
        model.fit(
            x[:samples],
            y[:samples],
            batch_size=batch,
            epochs=epochs,
            validation_data=held_out,
            verbose=0,
            **options,
        )

    return fit


def on_dataset(make: Callable[[], Any], own_data: bool = False) -> Fit:
    import tensorflow as tf

    model, batch = compiled(make()), MICRO_BATCH if own_data else global_batch()
    dataset = tf.data.Dataset.from_tensor_slices(images(2 * STEPS)).batch(batch)
    options = {
        "tnt_distribute_dataset": not own_data,
        "tnt_distribute_validation_dataset": not own_data,
    }

    def fit(epochs: int, steps: int) -> None:
        held_out = dataset.take(VALIDATION_STEPS)
        model.fit(
            dataset.take(steps), epochs=epochs, validation_data=held_out, verbose=0, **options
        )

    return fit


def on_words() -> Fit:
    """Sentences of different lengths, padded to the longest in a batch."""
    import tensorflow as tf

    model, batch = compiled(embedding()), global_batch()

    def sentence(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.range((number % MICRO_BATCH + 1) * SHORTEST), number % 10

    def fit(epochs: int, steps: int) -> None:
        dataset = tf.data.Dataset.range(steps * batch).map(sentence)
        model.fit(dataset.padded_batch(batch), epochs=epochs, verbose=0)

    return fit


def with_checkpoints() -> Fit:
    import keras

    folder = tempfile.TemporaryDirectory()
    checkpoint = keras.callbacks.ModelCheckpoint(Path(folder.name) / "model.keras")
    checkpoint.folder = folder  # lives as long as the callback
    return on_arrays(small, callbacks=[checkpoint])


def with_callback_at_batches() -> Fit:
    import keras

    return on_arrays(
        small,
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)],
    )


CASES: dict[str, Callable[[], Fit]] = {
    "lenet5-arrays": lambda: on_arrays(lenet5),
    "normalized-arrays": lambda: on_arrays(normalized),
    "normalized-dataset": lambda: on_dataset(normalized),
    "synchronized-dataset": lambda: on_dataset(synchronized),
    "own-dataset": lambda: on_dataset(small, own_data=True),
    "embedding-padded": on_words,
    "checkpoints": with_checkpoints,
    "batch-callback": with_callback_at_batches,
}


def global_batch() -> int:
    import tarantella as tnt

    return MICRO_BATCH * tnt.get_size()


def images(steps: int) -> tuple[Any, Any]:
    import numpy as np

    import tarantella as tnt

    rng = np.random.default_rng(1)
    most_ranks = max(*RANKS, tnt.get_size())  # as much memory on few ranks as on many
    samples = steps * MICRO_BATCH * most_ranks
    return rng.random((samples, 28, 28, 1), np.float32), rng.integers(0, 10, samples)


def compiled(model: Any) -> Any:
    import keras

    import tarantella as tnt

    distributed = tnt.Model(model)
    distributed.compile(
        keras.optimizers.SGD(0.01, momentum=0.9),
        "sparse_categorical_crossentropy",
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(3)],
    )
    return distributed


def normalized(**options: Any) -> Any:
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(4, 3, strides=2),
            layers.BatchNormalization(**options),
            layers.ReLU(),
            layers.Conv2D(8, 3, strides=2),
            layers.BatchNormalization(**options),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(10, "softmax"),
        ]
    )


def synchronized() -> Any:
    return normalized(synchronized=True)


def small() -> Any:
    import keras
    from keras import layers

    return keras.Sequential(
        [keras.Input((28, 28, 1)), layers.Flatten(), layers.Dense(10, "softmax")]
    )


def embedding() -> Any:
    import keras
    from keras import layers

    return keras.Sequential(
        [
            layers.Embedding(WORDS, 16),
            layers.GlobalAveragePooling1D(),
            layers.Dense(10, "softmax"),
        ]
    )


# What is printed


def print_table(ranks: int, counted: Sides) -> None:
    title = f"{ranks} ranks, {MICRO_BATCH} samples each"
    print(f"\n{title:67}{'master':>20}{'most of others':>20}")
    for case, unit in itertools.product(counted["master"]["cases"], UNITS):
        sides = [side["cases"][case][unit] for side in counted.values()]
        for name in sorted({name for counts in sides for name in counts}):
            if name.startswith(("calls", "wire")):
                _print_row(f"{case:22}{unit:7}", name, [_cell(name, counts) for counts in sides])
        _print_row(
            f"{case:22}{unit:7}", "lines", [f"{_total('lines', counts):.0f}" for counts in sides]
        )
    for group in ("start", "process"):
        for name in counted["master"][group]:
            values = [f"{side[group][name]:.1f}" for side in counted.values()]
            _print_row(f"{group:29}", name, values)
    sys.stdout.flush()


def _print_row(of: str, name: str, cells: list[str]) -> None:
    print(f"{of}{name:38}" + "".join(f"{cell:>20}" for cell in cells))


def _cell(name: str, counts: Counts) -> str:
    number = counts.get(name, 0)
    if name.startswith("wire"):
        return f"{number:.0f}"
    size = counts.get(name.replace("calls", "bytes", 1), 0)
    return f"{number:.4g} x {size / number:.0f} B" if number else "-"


def _total(quantity: str, counts: Counts) -> float:
    return sum(value for name, value in counts.items() if name.startswith(quantity))


def print_verdicts(runs: dict[int, Sides]) -> None:
    """Prints for every quantity whether it is the same for every number of ranks."""
    print(f"\nOn {', '.join(map(str, runs))} ranks:")
    first = next(iter(runs.values()))["master"]
    for case, unit in itertools.product(first["cases"], UNITS):
        for quantity in ("calls", "bytes", "lines"):
            by_side = {
                side: of_kind([run[side]["cases"][case][unit] for run in runs.values()], quantity)
                for side in ("master", "others")
            }
            print(f"{case:22}{f'{quantity} per {unit}':17}{verdict(by_side)}")
    for case in first["cases"]:
        print(f"{case:22}{'wire per step':17}{_on_the_wire(case, runs)}")
    for group in ("start", "process"):
        for name in first[group]:
            by_side = {
                side: {"": [run[side][group][name] for run in runs.values()]}
                for side in ("master", "others")
            }
            noise = MEMORY_NOISE if "MiB" in name else 0.0
            print(f"{group:8}{name:31}{verdict(by_side, noise)}")


def of_kind(counts: list[Counts], quantity: str) -> dict[str, list[float]]:
    """The counts of a quantity, by name, for each number of ranks."""
    names = {name for one in counts for name in one if name.startswith(quantity)}
    return {
        name.partition(": ")[2]: [one.get(name, 0.0) for one in counts] for name in sorted(names)
    }


def verdict(by_side: dict[str, dict[str, list[float]]], noise: float = 0.0) -> str:
    """Whether counts are the same for every number of ranks; if not, which ones differ.

    Args:
        by_side: For the master and for the others, the counts by name.
        noise: How much they may differ.
    """
    master, others = by_side["master"], by_side["others"]
    found = []
    for name in sorted({*master, *others}):
        of_all = master.get(name) == others.get(name)
        sides = {"every rank": master} if of_all else {"the master": master, "others": others}
        for side, counts in sides.items():
            values = counts.get(name, [0.0])
            if max(values) - min(values) > noise + 1e-9:
                kind = "grows" if values[-1] > values[0] + noise else "differs"
                series = ", ".join(f"{value:.5g}" for value in values)
                found.append(f"{kind}: {name} {series} on {side}".replace(":  ", ": "))
    return "; ".join(found) if found else "same for every number of ranks"


def _on_the_wire(case: str, runs: dict[int, Sides]) -> str:
    """What a rank sends in a step, and what an allreduce of the same bytes has to send."""
    texts = []
    for ranks, counted in runs.items():
        steps = [side["cases"][case]["step"] for side in counted.values()]
        sent, used = (
            max(step.get(f"wire: {what}", 0) for step in steps)
            for what in ("bytes", "connections in use")
        )
        reduced = sum(
            size
            for name, size in steps[0].items()
            if name.startswith("bytes: ") and "allreduce" in name.lower()
        )
        needed = 2 * (ranks - 1) / ranks * reduced
        texts.append(
            f"{ranks}: {sent / KIB:.1f} KiB, {needed / KIB:.1f} for allreduces, "
            f"{used:.0f} connections"
        )
    return "; ".join(texts)


if __name__ == "__main__":
    main()
