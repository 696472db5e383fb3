"""The report of real runs: what ranks have measured, and how the run ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly")

LIMIT = 240  # seconds, for a machine that is busy with other things
START = """
import os, signal, sys, time
import tarantella as tnt
tnt.barrier()
"""
TRAINS_AND_FAILS = """
if tnt.get_rank() == 1 and os.environ["TNT_RESTARTS"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
tnt.barrier()

import keras
import numpy as np


class Fails(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise ValueError("<b>enough</b>")


keras.utils.set_random_seed(1)
model = tnt.Model(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
model.compile("sgd", "mse")
x = np.ones((12, 4), np.float32)
model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0, validation_data=(x, x[:, :1]))
model.fit(x, x[:, :1], batch_size=4, epochs=3, verbose=0, callbacks=[Fails()])
"""
TRAINS = """
import keras
import numpy as np

model = tnt.Model(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
model.compile("sgd", "mse")
x = np.ones((12, 4), np.float32)
model.fit(x, x[:, :1], batch_size=4, verbose=0)
"""
WAITS = """
if tnt.is_master_rank():
    print("ready", flush=True)
time.sleep(600)
"""


def command(folder: Path, text: str, *options: str) -> list[str]:
    script = folder / "script.py"
    script.write_text(START + text)
    own = [sys.executable, "-m", "tarantella.cli", "-n", "2", "--no-gpu", "--report", "run.html"]
    return [*own, *options, "--", script.name]


def figures(page: str) -> dict[str, dict[str, Any]]:
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    [content] = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page)
    return dict(zip(titles, json.loads(content), strict=True))


def test_report_of_a_run_that_is_restarted_trains_twice_and_fails(tmp_path: Path) -> None:
    line = command(tmp_path, TRAINS_AND_FAILS, "--max-restarts", "1")
    result = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert result.returncode == 1, result.stderr
    page = (tmp_path / "run.html").read_text()
    shown = figures(page)
    training, validation = shown["loss"]["data"]
    assert training["x"][:4] == [1, 2, None, 3]
    assert [value is None for value in training["y"][:4]] == [False, False, True, False]
    assert training["y"][0] > training["y"][1] > training["y"][3]
    assert validation["x"][:2] == [1, 2]
    assert all(value > 0 for value in shown["Throughput"]["data"][0]["y"] if value is not None)
    parts = {trace["name"]: trace for trace in shown["The parts of a step"]["data"]}
    assert parts["compute"]["y"] == ["rank 0", "rank 1"]
    assert min(parts["compute"]["x"]) > 0
    memory = shown["Peak memory so far"]["data"]
    assert [trace["name"] for trace in memory] == ["rank 0", "rank 1"]
    assert all(max(filter(None, trace["y"])) > 100 for trace in memory)
    assert re.search(r'class="state bad">Rank \d on host \S+ failed: ValueError', page)
    assert "&lt;b&gt;enough&lt;/b&gt;" in page
    assert "<small>restart, " in page
    assert "SIGKILL" in page
    assert re.search(r"Keras 3\.\d+", page)
    assert "--max-restarts 1" in page
    assert not list(tmp_path.glob(".run.html*"))


def interrupted(line: list[str], folder: Path) -> str:
    """What the command shows on standard error if Ctrl+C ends a run that waits."""
    aloud = {**os.environ, "TNT_QUIET": "false"}
    process = subprocess.Popen(
        line, cwd=folder, env=aloud, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, shown = process.communicate(timeout=LIMIT)
        assert process.returncode == 130
        return shown
    finally:
        process.kill()
        process.wait()


def test_ctrl_c_shows_a_summary_that_names_the_report(tmp_path: Path) -> None:
    *_, ended, took, written = interrupted(command(tmp_path, TRAINS + WAITS), tmp_path).splitlines()
    assert ended == "tarantella: ended by SIGINT; all ranks were ended."
    assert re.search(r"^tarantella: the run took .* 3 steps in .* samples/s on 2 ranks\.$", took)
    assert written == "  written: run.html (--report)"


def test_quiet_leaves_the_summary_out_after_ctrl_c(tmp_path: Path) -> None:
    shown = interrupted(command(tmp_path, WAITS, "--quiet"), tmp_path)
    assert shown == "tarantella: ended by SIGINT; all ranks were ended.\n"


def test_report_of_a_run_that_trains_nothing_and_is_interrupted(tmp_path: Path) -> None:
    line = command(tmp_path, WAITS)
    process = subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        page = (tmp_path / "run.html").read_text()
        assert "Running when this was written." in page
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) == 130
    finally:
        process.kill()
        process.wait()
    page = (tmp_path / "run.html").read_text()
    assert 'class="state bad">Ended by SIGINT.' in page
    assert "Nothing was trained with a tnt.Model." in page
