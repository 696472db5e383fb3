"""Runs that are restarted after a failure, and resume where they stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

LIMIT = 180  # seconds, for a machine that is busy with other things; a hang is what it catches
START = """
import os, signal, sys, time
from pathlib import Path
import tarantella as tnt
rank = tnt.get_rank()
attempt = int(os.environ["TNT_RESTARTS"])
tnt.barrier()
"""


def command(folder: Path, text: str, *options: str) -> list[str]:
    script = folder / "script.py"
    script.write_text(START + text)
    own = [sys.executable, "-m", "tarantella.cli", "-n", "2", "--no-gpu"]
    return [*own, *options, "--", str(script)]


def run(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, text, *options), cwd=folder, capture_output=True, text=True, timeout=LIMIT
    )


FAILS_TWICE = """
if rank == 1 and attempt < 2:
    os.kill(os.getpid(), signal.SIGKILL)
tnt.barrier()
if rank == 0:
    print("ended in attempt", attempt)
"""


def test_started_again_until_it_ends_well(tmp_path: Path) -> None:
    result = run(tmp_path, FAILS_TWICE, "--max-restarts", "3", "--output-dir", "kept")
    assert (result.returncode, result.stdout) == (0, "ended in attempt 2\n")
    messages = [line.partition("failed")[0] for line in result.stderr.splitlines()]
    assert [line.partition(" on ")[0] for line in messages] == [
        "tarantella: rank 1",
        "tarantella: restart 1 of 3.",
        "tarantella: rank 1",
        "tarantella: restart 2 of 3.",
    ]
    assert (tmp_path / "kept" / "rank-0.txt").read_text() == "ended in attempt 2\n"


def test_no_more_often_than_asked_for(tmp_path: Path) -> None:
    result = run(tmp_path, FAILS_TWICE, "--max-restarts", "1")
    assert (result.returncode, result.stdout) == (137, "")
    assert result.stderr.count("restart 1 of 1.") == 1
    assert result.stderr.count("failed: it was killed by signal 9") == 2


def test_output_of_all_attempts_is_kept(tmp_path: Path) -> None:
    text = "print('attempt', attempt, flush=True)\ntnt.barrier()\nif attempt == 0: sys.exit(3)\n"
    result = run(tmp_path, text, "--max-restarts", "1", "--output-dir", "kept")
    assert result.returncode == 0
    for rank in (0, 1):
        kept = (tmp_path / "kept" / f"rank-{rank}.txt").read_text()
        assert [line for line in kept.splitlines() if "attempt" in line] == [
            "attempt 0",
            "attempt 1",
        ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_not_if_the_command_is_asked_to_end(number: int, tmp_path: Path) -> None:
    text = "if rank == 0: Path('up').touch()\ntime.sleep(600)\n"
    process = subprocess.Popen(
        command(tmp_path, text, "--max-restarts", "3"),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + LIMIT
    while not (tmp_path / "up").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + number
    assert "restart" not in errors


def test_not_after_bad_input(tmp_path: Path) -> None:
    result = run(tmp_path, "sys.exit(2)\n", "--max-restarts", "3")
    assert result.returncode == 2
    assert "restart" not in result.stderr


TRAIN = """
import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(3)
x = np.random.default_rng(1).normal(size=(24, 5))
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1] ** 2)).shuffle(24).batch(6)
layers = [keras.Input((5,)), keras.layers.Dense(7, "tanh"), keras.layers.Dropout(0.2, seed=1)]
model = tnt.Model(keras.Sequential([*layers, keras.layers.Dense(1)]))
model.compile(keras.optimizers.Adam(0.01), "mse")
faults = {
    "undisturbed": lambda: None,
    "SIGKILL": lambda: rank == 1 and os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: rank == 1 and os.kill(os.getpid(), signal.SIGTERM),
    "command": lambda: rank == 1 and os.kill(int(os.environ["TNT_COMMAND"]), signal.SIGTERM),
}

class Fault(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == (2, 1) and not Path("faulty").exists():
            tnt.barrier()
            Path("faulty").touch()
            faults[sys.argv[1]]()
        if Path("faulty").exists() and sys.argv[1] == "command":
            time.sleep(0.3)  # for the signal to come
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

backup = keras.callbacks.BackupAndRestore("backup", save_freq=int(sys.argv[2]))
history = model.fit(data, epochs=4, verbose=0, callbacks=[backup, Fault()])
if rank == 0:
    np.savez("weights", *model.get_weights())
    print(len(history.history["loss"]))
"""


def train(folder: Path, fault: str, steps: int, *options: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    line = command(folder, TRAIN, *options)
    return subprocess.run(
        [*line, fault, str(steps)], cwd=folder, capture_output=True, text=True, timeout=LIMIT
    )


def weights(folder: Path) -> list[np.ndarray]:
    with np.load(folder / "weights.npz") as arrays:
        return [arrays[key] for key in arrays.files]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[np.ndarray]:
    folder = tmp_path_factory.mktemp("undisturbed")
    result = train(folder, "undisturbed", 3)
    assert (result.returncode, result.stdout) == (0, "4\n"), result.stderr
    return weights(folder)


SAVED = "tarantella WARNING: Stopped by SIGTERM: the training is saved in backup, after step "


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGTERM"])
def test_a_rank_that_fails_in_an_epoch(
    fault: str, undisturbed: list[np.ndarray], tmp_path: Path
) -> None:
    """It was killed after step 9 was backed up; or it backs up itself, when it is asked to end."""
    steps = {"SIGKILL": 3, "SIGTERM": 100}[fault]
    result = train(tmp_path, fault, steps, "--max-restarts", "1")
    assert (result.returncode, result.stdout) == (0, "4\n"), result.stderr
    assert "restart 1 of 1." in result.stderr
    assert (SAVED in result.stderr) == (fault == "SIGTERM")
    np.testing.assert_equal(weights(tmp_path), undisturbed)
    assert not (tmp_path / "backup").exists()


def test_a_command_that_is_asked_to_end(undisturbed: list[np.ndarray], tmp_path: Path) -> None:
    result = train(tmp_path, "command", 100, "--max-restarts", "1")
    assert (result.returncode, result.stdout) == (143, "")
    assert len(result.stderr.splitlines()) == 2, result.stderr
    first, last = result.stderr.splitlines()
    assert first.startswith(f"{SAVED}")
    assert last == "tarantella: ended by SIGTERM; all ranks were ended."
    result = train(tmp_path, "undisturbed", 100)
    assert (result.returncode, result.stdout, result.stderr) == (0, "4\n", "")
    np.testing.assert_equal(weights(tmp_path), undisturbed)


TAKES_TIME = """
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[1] == "ignored" else lambda *_: None)
tnt.barrier()
if rank == 0:
    os.kill(int(os.environ["TNT_COMMAND"]), signal.SIGTERM)
start = time.monotonic()
while time.monotonic() - start < 10:
    time.sleep(0.1)
Path(f"{rank}").touch()
"""


@pytest.mark.parametrize(
    ("what", "grace", "done"), [("ignored", 30, False), ("caught", 30, True), ("caught", 1, False)]
)
def test_time_that_ranks_get(what: str, grace: int, done: bool, tmp_path: Path) -> None:
    line = command(tmp_path, TAKES_TIME, "--grace-period", str(grace))
    result = subprocess.run([*line, what], cwd=tmp_path, capture_output=True, timeout=LIMIT)
    assert result.returncode == 143
    assert [(tmp_path / f"{rank}").exists() for rank in range(2)] == [done] * 2
