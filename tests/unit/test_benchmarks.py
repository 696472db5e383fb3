"""The benchmarks: what they make of figures, how processes take turns, and that they run."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(BENCHMARKS)
    bench, common, fusion, gpu, legacy, models, mps, report, step_time, turns, wire = (
        importlib.import_module(name)
        for name in (
            "bench",
            "common",
            "fusion",
            "gpu",
            "legacy",
            "models",
            "mps",
            "report",
            "step_time",
            "turns",
            "wire",
        )
    )

Figure = report.Figure


# What is made of figures


def test_a_ratio_is_taken_in_each_round_and_its_median_counts() -> None:
    rounds = [
        {"limit": [1.0, 2.0, 9.0], "tarantella": [2.0, 2.0, 2.0]},
        {"limit": [3.0, 3.0, 3.0], "tarantella": [4.0, 4.0, 4.0]},
        {"limit": [1.0, 1.0, 1.0], "tarantella": [2.0, 2.0, 2.0]},
    ]
    figures = step_time.figures_of("lenet5", rounds, ["limit", "tarantella"])
    (ratio,) = [figure for figure in figures if figure.over]
    assert (ratio.what, ratio.over, ratio.at_least) == ("tarantella", "limit", 0.95)
    assert ratio.rounds == [1.0, 0.75, 0.5]
    assert (ratio.median, ratio.verdict) == (0.75, "MISSED")


def test_the_speed_of_a_threshold_is_the_median_of_its_ratios(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fusion.show("one host", {"mlp": {"32": [1.0, 4.0, 8.0], "auto": [2.0, 1.0, 3.0]}})
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "mlp one host 32 kB 4000.0 ms 0.375 (0.250 to 1.000)",
        "mlp one host auto kB 2000.0 ms 1.000 (0.500 to 1.000)",
    ]


@pytest.mark.parametrize(
    ("benchmark", "options", "message"),
    [
        ("fusion", ["--thresholds", "auto", "32k"], "'32k' is neither a number of kilobytes nor"),
        ("step_time", ["--ranks", "1", "2"], "figures of 2 ranks would mean nothing here"),
        ("allreduce", ["--ranks", "2"], "each needs a core and there are 1"),
    ],
)
def test_options_that_make_no_sense_are_refused_at_once(
    benchmark: str,
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)  # nothing is measured
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(sys, "argv", [f"{benchmark}.py", *options])
    with pytest.raises(SystemExit):
        importlib.import_module(benchmark).main()
    assert message in capsys.readouterr().err


def test_a_benchmark_that_only_checks_that_it_runs_may_share_cores() -> None:
    common.check_cores(argparse.ArgumentParser(), [1000], quick=True)


def test_many_ranks_train_the_models_that_are_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    monkeypatch.setattr(step_time, "measured", lambda plan: plans.append(plan) or [])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    for models_of_run in (["lenet5", "mlp"], ["mlp"]):
        bench.of_many_ranks(argparse.Namespace(models=models_of_run, rounds=1, quick=True))
    assert [(plan.models, plan.ranks) for plan in plans] == [(["lenet5"], 4)]


def test_a_candidate_that_cannot_be_measured_is_named_with_the_reason() -> None:
    rounds = [{"limit": [1.0], "tarantella": [1.0]}]
    candidates = ["limit", "tarantella", "mirrored"]
    figures = step_time.figures_of("mlp", rounds, candidates, "no network")
    lines = [line for line in report.table(figures).splitlines() if "mirrored" in line]
    assert len(lines) == 3
    assert all("not measured: no network" in line for line in lines)
    assert [(f.what, f.over) for f in report.missed(figures)] == [("tarantella", "mirrored")]


@pytest.mark.parametrize(
    ("target", "verdict"),
    [
        ({}, ""),
        ({"at_least": 2.0}, "met"),
        ({"at_least": 2.1}, "MISSED"),
        ({"at_most": 2.0}, "met"),
        ({"at_most": 1.9}, "MISSED"),
    ],
)
def test_a_verdict_is_about_the_median(target: dict[str, float], verdict: str) -> None:
    assert Figure("step", "mlp", "keras", [0.0, 2.0, 9.0], **target).verdict == verdict


def test_results_are_written_with_the_machine_and_all_rounds(tmp_path: Path) -> None:
    figures = [
        Figure("step", "mlp", "tarantella", [0.98765432, 0.5, 0.75], over="limit", at_least=0.9),
        Figure("step", "mlp", "mirrored", [], over="limit", problem="no network"),
    ]
    report.write_json(figures, tmp_path / "results.json")
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["machine"]["cores"] >= 1
    assert "MPI" in content["machine"]["mpi"]
    measured, missing = content["figures"]
    assert measured["rounds"] == [0.9877, 0.5, 0.75]
    assert (measured["median"], measured["low"], measured["high"]) == (0.75, 0.5, 0.9877)
    assert measured["verdict"] == "MISSED"
    assert missing["problem"] == "no network"
    assert "median" not in missing


def test_the_picture_is_drawn_also_where_a_candidate_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures = [
        Figure("step", "lenet5", "keras", [0.8, 0.9], over="limit"),
        Figure("step", "mlp", "tarantella", [7.0], over="limit"),
        Figure("step", "mlp", "mirrored", [], over="limit", problem="no network"),
    ]
    report.picture(figures, tmp_path / "results.png")
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_figures_are_read_from_what_the_input_benchmark_prints() -> None:
    text = (
        "jpeg round 1: 1 rank   100.0 images/s, 2: ranks   180.0 (1.80)\n"
        "jpeg      2 ranks      over 1 rank  1.79 (1.70 to 1.95)\n"
        "jpeg      Two ranks are not 1.8 times as fast as one.\n"
        "memory    halves       over ready micro-batches  +4.1% (-0.5% to +7.0%)\n"
        "memory    arrays       over ready micro-batches  +1.5% (-0.5% to +2.5%)\n"
    )
    ranks, halves, arrays = bench.read_input(text)
    assert (ranks.subject, ranks.what, ranks.over) == ("jpeg", "2 ranks", "1 rank")
    assert (ranks.median, ranks.verdict) == (1.79, "MISSED")
    assert (halves.median, halves.verdict) == (pytest.approx(0.041), "")
    assert (arrays.low_and_high, arrays.verdict) == (pytest.approx((-0.005, 0.025)), "met")


def test_the_host_that_sends_most_bytes_is_compared_with_the_least_possible() -> None:
    sent = {"float32": [6_000_000, 12_000_000], "bfloat16": [3_000_000, 6_000_000]}
    assert wire.rows(4, 2, 1_000_000, sent) == [
        "| 4 | 2 | `float32` | 12.0 MB | 2.00 | 1.00 |",
        "| 4 | 2 | `bfloat16` | 6.0 MB | 2.00 | 0.50 |",
    ]
    (row,) = wire.rows(2, 8, 1_000_000, {"float16": [2_000_000, 2_100_000]})
    assert row == "| 2 | 8 | `float16` | 2.1 MB | 1.05 |  |"


def test_an_environment_that_cannot_be_made_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(legacy, "tensorflow_here", lambda: ("no-such-package", "not a version"))
    with pytest.raises(legacy.UnavailableError, match="cannot be installed"):
        legacy.legacy_python(tmp_path / "environment")


def test_the_gradient_of_the_embedding_is_sparse() -> None:
    import keras
    import tensorflow as tf

    case = models.CASES["embedding"]
    model = case.build(keras)
    x, y = case.data(4)
    with tf.GradientTape() as tape:
        loss = keras.losses.sparse_categorical_crossentropy(y, model(x))
    gradients = tape.gradient(loss, model.trainable_variables)
    assert isinstance(gradients[0], tf.IndexedSlices)


# On GPUs


def rows_of(results: dict[str, gpu.Result], model: str = "mlp") -> dict[str, list[str]]:
    figures = gpu.figures_of(model, "float32", results)
    rows = {name: gpu.row(model, "float32", name, figures) for name in results}
    return {name: [cell.strip() for cell in row.split("|")[4:-1]] for name, row in rows.items()}


def test_a_row_has_the_ratios_of_its_rounds_and_the_targets_it_misses() -> None:
    results = {
        "limit": gpu.Result([[0.01], [0.02], [0.03]], 1.0),
        "nccl": gpu.Result([[0.02], [0.1], [0.1]], 5.0),
        "host": gpu.Result([[0.01], [0.1], [0.1]], 3.0),
        "keras": gpu.Result([[0.01], [0.01], [0.01]], 2.0),
    }
    rows = rows_of(results)
    assert rows["limit"] == ["20.0 ms (10.0 ms to 30.0 ms)", "", "1.0 s", "", ""]
    step, over_limit, first_step, over_keras, remarks = rows["nccl"]
    assert step == "100.0 ms (20.0 ms to 100.0 ms)"
    assert over_limit == "0.30 (0.20 to 0.50)"
    assert (first_step, over_keras) == ("5.0 s", "0.40")
    missed = ["nccl over limit >= 0.35", "nccl, first step over keras >= 0.83"]
    assert remarks == "; ".join(f"MISSED: {each}" for each in missed)  # as fast as `host`
    assert rows["host"][1] == "0.30 (0.20 to 1.00)"
    assert rows["host"][-1] == ""


def test_only_steps_that_take_long_have_a_target_in_any_model() -> None:
    for limit, verdict in ((0.021, "MISSED"), (0.019, "")):
        results = {"limit": gpu.Result([[limit]]), "nccl": gpu.Result([[1.0]])}
        figures = gpu.figures_of("lenet5", "float32", results)
        assert [figure.verdict for figure in figures if figure.over] == [verdict]


def test_a_candidate_that_failed_has_the_reason_in_its_row() -> None:
    results = {
        "limit": gpu.Result([[0.01], [0.01]], 1.0),
        "nccl": gpu.Result([[0.02]], 1.0, "InternalError: a | b"),
        "host": gpu.Result(problem="host: a process died at 'build'."),
    }
    rows = rows_of(results, "lenet5")
    assert rows["nccl"] == ["20.0 ms", "0.50", "1.0 s", "", "InternalError: a / b"]
    assert rows["host"] == ["-", "-", "-", "", "host: a process died at 'build'."]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("I0 port.cc\nhost: a process died at 'build'.\n", "host: a process died at 'build'."),
        (
            "nccl: an error at 'measure':\nTraceback (most recent call last):\n"
            "tensorflow.python.errors_impl.InternalError: NCCL failed\n\t [[{{node a}}]] [Op:b]\n",
            "tensorflow.python.errors_impl.InternalError: NCCL failed",
        ),
        ("", "no reason is known"),
    ],
)
def test_the_gist_of_an_error(error: str, expected: str) -> None:
    assert gpu.gist(error) == expected


def train_with(
    monkeypatch: pytest.MonkeyPatch, first_step: str, measure: dict[str, str]
) -> tuple[str, ...]:
    """Replaces worker.py by processes that run this code; returns the names of the candidates."""

    def command(name: str, plan: gpu.Plan, address: str) -> turns.Command:
        code = f"import pathlib, time, turns\nname = {name!r}\n"
        code += f"def first_step(**arguments):\n    {first_step}\n"
        code += f"def measure(**arguments):\n    {measure[name]}\n"
        code += "actions = {'build': lambda **a: None, 'first_step': first_step}\n"
        code += f"turns.take_turns({address!r}, {{**actions, 'measure': measure}})"
        return turns.Command([sys.executable, "-c", code], {"PYTHONPATH": str(BENCHMARKS)})

    monkeypatch.setattr(gpu, "command", command)
    return tuple(measure)


def cells_of(plan: gpu.Plan) -> list[list[str]]:
    shown: list[str] = []
    list(gpu.measured(plan, shown.append))
    return [[cell.strip() for cell in line.split("|")] for line in shown[2:]]


def test_a_candidate_that_fails_or_takes_too_long_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All three are processes that do as worker.py does, but for what is wrong with them."""
    bodies = {
        "limit": "return [1.0, 2.0, 3.0]",
        "nccl": "raise RuntimeError('NCCL is out of order')",
        "host": "time.sleep(600)",
    }
    sums = train_with(monkeypatch, "return 4.0", bodies)
    cells = cells_of(gpu.Plan([], 1, ["mlp"], sums, ["float32"], rounds=2, time_limit=3.0))
    assert [cell[4] for cell in cells] == ["2000.0 ms (2000.0 ms to 2000.0 ms)", "-", "-"]
    assert [cell[6] for cell in cells] == ["4.0 s"] * 3
    assert cells[1][8] == "RuntimeError: NCCL is out of order"
    assert "host: " in cells[2][8]


def test_first_steps_that_are_not_timed_are_taken_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first_step = f"folder = pathlib.Path({str(tmp_path)!r})\n"
    first_step += "    (folder / name).touch()\n"
    first_step += "    while len(list(folder.iterdir())) < 2: time.sleep(0.01)\n"
    first_step += "    return 4.0"
    bodies = dict.fromkeys(("nccl", "keras"), "return [1.0]")
    sums = train_with(monkeypatch, first_step, bodies)
    plan = gpu.Plan([], 1, ["mlp"], sums, ["float32"], rounds=1, first_steps=False, time_limit=30.0)
    cells = cells_of(plan)
    assert [cell[4] for cell in cells] == ["1000.0 ms"] * 2
    assert [cell[6:9] for cell in cells] == [["", "", ""]] * 2


# MPS

MPS = """#!/bin/sh
test -d "$CUDA_MPS_PIPE_DIRECTORY" -a -d "$CUDA_MPS_LOG_DIRECTORY" || exit 3
echo "$* $(cat) $CUDA_MPS_PIPE_DIRECTORY" >>"$0.calls"
"""


@pytest.fixture
def mps_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file to which a program in place of NVIDIA's writes how it was called."""
    program = tmp_path / mps.CONTROL
    program.write_text(MPS)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path / f"{mps.CONTROL}.calls"


def first_line(plan: gpu.Plan) -> str:
    shown: list[str] = []
    list(gpu.measured(replace(plan, models=()), shown.append))
    return shown[0].strip()


def test_all_candidates_that_share_a_gpu_use_mps(mps_calls: Path) -> None:
    with gpu.with_mps(gpu.Plan(["H200"])) as plan:
        folder = plan.mps["CUDA_MPS_PIPE_DIRECTORY"]
        assert mps_calls.read_text() == f"-d  {folder}\n"
        for name in gpu.CANDIDATES:
            environment = gpu.command(name, plan, "address").env
            assert plan.mps.items() <= environment.items()
        assert first_line(plan) == "2 ranks on H200, shared with MPS"
    assert not Path(folder).exists()


def test_mps_ends_also_after_errors(mps_calls: Path) -> None:
    with suppress(KeyError), gpu.with_mps(gpu.Plan(["H200"])) as plan:
        raise KeyError
    folder = plan.mps["CUDA_MPS_PIPE_DIRECTORY"]
    assert mps_calls.read_text().splitlines() == [f"-d  {folder}", f" quit {folder}"]


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ([], "2 ranks on the CPU (these figures mean nothing)"),
        (["H200", "H100"], "2 ranks on H200, H100"),
    ],
)
def test_mps_is_not_used_if_no_ranks_share_a_gpu(
    gpus: list[str], expected: str, mps_calls: Path
) -> None:
    with gpu.with_mps(gpu.Plan(gpus)) as plan:
        assert first_line(plan) == expected
    assert not plan.mps
    assert not mps_calls.exists()


def test_without_mps_the_first_line_says_so(
    mps_calls: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mps_calls.with_suffix("").write_text("#!/bin/sh\necho no access >&2\nexit 1\n")
    with gpu.with_mps(gpu.Plan(["H200"])) as plan:
        assert first_line(plan) == "2 ranks on H200, shared without MPS"
    assert "no access" in capsys.readouterr().err


# Processes that take turns


def worker(crew: turns.Crew, body: str) -> turns.Command:
    """A process that knows `work`, whose body is given."""
    code = f"import os, sys, time, turns\ndef work(number):\n    {body}\n"
    code += f"turns.take_turns({crew.address!r}, {{'work': work}})"
    return turns.Command([sys.executable, "-c", code], {"PYTHONPATH": str(BENCHMARKS)})


def test_all_processes_of_a_group_answer() -> None:
    with turns.Crew() as crew:
        crew.start("pair", [worker(crew, f"return number + {i}") for i in (10, 20)], 2)
        assert sorted(crew.ask("pair", "work", number=1)) == [11, 21]
        assert sorted(crew.ask("pair", "work", number=2)) == [12, 22]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('too large')", "ValueError: too large"),
        ("os._exit(3)", "a process died at 'work'"),
        ("time.sleep(600)", "no answer to 'work'"),
    ],
)
def test_a_process_that_fails_ends_the_run_with_what_it_printed(body: str, message: str) -> None:
    begin = time.monotonic()
    with turns.Crew(patience=5) as crew:
        failing = worker(crew, f"print('last words', flush=True); {body}")
        crew.start("pair", [failing, worker(crew, "time.sleep(600)")], 2)
        with pytest.raises(SystemExit) as end:
            crew.ask("pair", "work", number=1)
        crew.end()
    assert message in str(end.value)
    assert "last words" in str(end.value)
    assert time.monotonic() - begin < 30


def test_a_process_that_ends_before_its_first_turn_ends_the_run() -> None:
    command = turns.Command([sys.executable, "-c", "print('no such model'); raise SystemExit(4)"])
    with turns.Crew() as crew, pytest.raises(SystemExit, match="status 4") as end:
        crew.start("one", [command], 1)
    assert "no such model" in str(end.value)
