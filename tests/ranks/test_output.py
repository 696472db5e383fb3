"""Progress and callback output of training appears once, or with the rank in front of each line."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import keras
import numpy as np

import tarantella as tnt

model = tnt.Model(keras.Sequential([keras.layers.Dense(1)]))
model.compile("sgd", "mse")
x = np.ones((16, 2))
shout = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print("\\nshout", epoch))
model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=2, callbacks=[shout])
model.evaluate(x, x[:, :1], verbose=2)
print("done", tnt.get_rank())
"""


def _output(tmp_path: Path, *options: str) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "tarantella.cli", "-n", "2", "--no-gpu", *options, "--"]
    result = subprocess.run(
        [*command, str(script)], check=True, timeout=300, capture_output=True, text=True
    )
    return result.stdout.splitlines()


def test_output_of_training_appears_once(tmp_path: Path) -> None:
    lines = _output(tmp_path)
    assert [line for line in lines if line.startswith("Epoch")] == ["Epoch 1/2", "Epoch 2/2"]
    assert [line for line in lines if "shout" in line] == ["shout 0", "shout 1"]
    assert sum(line.startswith("4/4 - ") for line in lines) == 2
    assert [line for line in lines if "done" in line] == ["done 0"]


def test_output_of_every_rank_is_marked(tmp_path: Path) -> None:
    lines = _output(tmp_path, "--output-on-all-devices")
    for rank in (0, 1):
        own = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert sum("Epoch" in line for line in own) == 2
        assert sum("shout" in line for line in own) == 2
        assert own[-1] == f"[rank {rank}] done {rank}"
    assert all(line.startswith("[rank ") for line in lines)


PROGRESS = """
import sys

import keras
import numpy as np

import tarantella as tnt

model = tnt.Model(keras.Sequential([keras.layers.Dense(1)]))
model.compile("sgd", "mse")
x = np.ones((20, 2))
for word in sys.argv[1:]:
    verbose = word if word == "auto" else int(word)
    # How many batches there are, nobody knows.
    endless = ((x[:4], x[:4, :1]) for _ in range(100))
    model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=verbose)
    model.fit(endless, steps_per_epoch=3, epochs=2, verbose=verbose)
    model.evaluate(x, x[:, :1], batch_size=4, verbose=verbose)
    model.predict(x, batch_size=4, verbose=verbose)
    if tnt.is_master_rank():
        print("that was", word)
"""

ENDS = [f"{steps}/{steps}" for steps in (5, 5, 3, 3, 5, 5)]


def _progress(tmp_path: Path, ranks: int, *verbose: str) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(PROGRESS)
    command = [sys.executable, "-m", "tarantella.cli", "-n", str(ranks), "--no-gpu", "--"]
    return [*command, str(script), *verbose]


def _without_terminal(command: list[str]) -> str:
    result = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
    return result.stdout


def _on_terminal(command: list[str]) -> str:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL)
    os.close(theirs)
    output = b""
    try:
        while piece := os.read(ours, 65536):
            output += piece
    except OSError:  # how a terminal says that nobody writes to it any more
        pass
    finally:
        os.close(ours)
    assert process.wait(300) == 0
    return output.decode()


@pytest.mark.parametrize(("ranks", "verbose"), [(2, ("auto", "1", "0")), (1, ("1",))])
def test_without_a_terminal_progress_comes_in_lines(
    tmp_path: Path, ranks: int, verbose: tuple[str, ...]
) -> None:
    """And not at all with `verbose=0`."""
    output = _without_terminal(_progress(tmp_path, ranks, *verbose))
    assert not re.search(r"[\b\r\x1b]", output)
    for word in verbose:
        shown, _, output = output.partition(f"that was {word}\n")
        lines = shown.splitlines()
        ends = [] if word == "0" else ENDS
        epochs = 0 if word == "0" else 4
        assert [line.split()[0] for line in lines if "/step" in line] == ends
        assert sum(line.startswith("Epoch ") for line in lines) == epochs
        assert len(lines) == len(ends) + epochs
    assert output == ""


def test_a_terminal_shows_one_progress_bar(tmp_path: Path) -> None:
    output = _on_terminal(_progress(tmp_path, 2, "auto"))
    lines = [line for line in output.split("\n") if "\b" in line]
    bars = [re.findall(r"\x1b\[1m *(\d+/\d+)\x1b\[0m", line)[-1] for line in lines]
    assert bars == ENDS
    assert output.count("Epoch ") == 4
