"""Runs LeNet-5 and tests of equality with other versions of TensorFlow and Keras.

Each pair of `pairs.py` gets a virtual environment with what these tests need, and no more.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pairs import PAIRS, Pair

ROOT = Path(__file__).parents[2]
TENSORFLOW = "tensorflow-cpu" if platform.machine() == "x86_64" else "tensorflow"

# What LeNet-5 and the tests need; the versions are those of constraints.txt.
PACKAGES = ("mpi4py", "mpich", "pytest", "pyyaml", "scikit-learn", "setuptools")
PACKAGES_OF_ALL = (*PACKAGES, "hypothesis", "pandas", "requests")

LENET5 = ("-n", "2", "--no-gpu", "--", "examples/lenet5.py")
INSIDE = (
    "tests/unit/test_data_pipeline.py",
    "tests/unit/test_internals_keras.py",
    "tests/unit/test_keras_hooks.py",
)
AREAS = ("losses", "metrics", "optimizers", "models", "kinds_of_data", "callbacks", "saving")
ALL = (*INSIDE, *(f"tests/ranks/test_{area}.py" for area in (*AREAS, "batch_normalization")))
# A few of each area, with what reaches deepest into Keras.
SMOKE = (
    *INSIDE,
    "tests/ranks/test_losses.py::test_several_outputs_with_their_own_reductions[with_sum-2-ranks]",
    "tests/ranks/test_losses.py::test_activity_regularizers",
    "tests/ranks/test_losses.py::test_class_weight",
    "tests/ranks/test_metrics.py::test_metrics_while_training",
    *(
        f"tests/ranks/test_optimizers.py::test_optimizer_option_gives_the_serial_result[{option}]"
        for option in ("ema-2-ranks", "accumulation-2-ranks", "loss_scale-2-ranks")
    ),
    "tests/ranks/test_models.py::test_subclassed",
    "tests/ranks/test_callbacks.py::test_all_events_with_the_logs_of_the_global_batch",
    "tests/ranks/test_callbacks.py::test_backup_and_restore[options0-2-ranks]",
    "tests/ranks/test_saving.py::test_content_is_that_of_plain_keras[functional-True-2-ranks]",
    "tests/ranks/test_batch_normalization.py::test_models[own_step-2-ranks]",
    "tests/ranks/test_batch_normalization.py::test_models[nested-2-ranks]",
)
ON_TWO_RANKS = ("-m", "not long", "-k", "2-ranks or unit")


class Result(NamedTuple):
    """What came of one pair."""

    pair: Pair
    python: str
    lenet5: str
    tests: str
    seconds: float


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 1 if anything failed, or nothing was run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--oldest", action="store_true", help="the oldest pair only")
    parser.add_argument("--smoke", action="store_true", help="a few tests of each area only")
    parser.add_argument("--keras", help="the pair with this version of Keras only")
    parser.add_argument(
        "--keep", type=Path, help="a folder to keep the environments in, and to take them from"
    )
    options = parser.parse_args(arguments)
    pairs = [pair for pair in PAIRS if options.keras in (None, pair.keras)]
    results = []
    for pair in pairs[:1] if options.oldest else pairs:
        python = find_python(pair.pythons)
        if python is None:
            print(f"{pair}: there is no Python {' or '.join(pair.pythons)} here.", flush=True)
            continue
        print(f"{pair}, with {python}", flush=True)
        results.append(try_pair(pair, python, options.smoke, options.keep))
    print(table(results))
    failed = [each for each in results if "failed" in each.lenet5 + each.tests]
    return 1 if failed or not results else 0


def find_python(versions: Sequence[str]) -> str | None:
    """The interpreter of the first of these versions that is there: the path, or of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in versions:
        known = [sys.executable, shutil.which(f"python{version}")]
        known += map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))
        for candidate in known:
            if candidate is not None and version_of(candidate) == version:
                return candidate
    return None


def version_of(python: str) -> str:
    """The version of an interpreter, such as 3.11; empty if it does not run."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    result = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return result.stdout.strip()


def try_pair(pair: Pair, python: str, smoke: bool, keep: Path | None) -> Result:
    """Makes an environment for a pair, and runs everything in it."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tarantella-versions-") as folder:
        name = f"{version_of(python)}-{pair.tensorflow}-{pair.keras}"
        environment = (keep or Path(folder)).absolute() / name
        tarantella = environment / "bin" / "tarantella"
        try:
            if not tarantella.exists():  # it was kept
                make_environment(environment, pair, python, PACKAGES if smoke else PACKAGES_OF_ALL)
            subprocess.check_call([tarantella, *LENET5], cwd=ROOT)
            lenet5 = "passed"
        except subprocess.CalledProcessError as error:
            print(error, flush=True)
            lenet5 = "failed"
        tests = run_tests(environment, SMOKE if smoke else ALL) if tarantella.exists() else ""
    return Result(pair, version_of(python), lenet5, tests, time.monotonic() - start)


def make_environment(environment: Path, pair: Pair, python: str, packages: Sequence[str]) -> None:
    """Installs a pair with what the tests need, and Tarantella as it is in this checkout."""
    subprocess.check_call([python, "-m", "venv", "--without-pip", environment])
    # The pip of this Python, as a system may have others without one.
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "install"]
    # Of TensorFlow's many files only a few are loaded, and only these are compiled, by Python.
    pip += ["--quiet", "--disable-pip-version-check", "--no-compile"]
    pins = environment / "constraints.txt"
    pins.write_text("".join(f"{line}\n" for line in pinned(pair, packages)))
    versions = (f"{TENSORFLOW}=={pair.tensorflow}", f"keras=={pair.keras}")
    subprocess.check_call([*pip, "--constraint", str(pins), *versions, *packages])
    subprocess.check_call([*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)])


def pinned(pair: Pair, packages: Sequence[str]) -> list[str]:
    """The lines of constraints.txt that hold for a pair.

    All of them, if it is a pair of that file; otherwise those of packages that we ask for, and
    TensorFlow and Keras say what they need of others.
    """
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    keras = any(line.partition(";")[0] == f"keras=={pair.keras}" for line in lines)
    if keras and f"tensorflow=={pair.tensorflow}" in lines:
        return lines
    return [line for line in lines if line.partition("==")[0] in packages]


def run_tests(environment: Path, tests: Sequence[str]) -> str:
    """Runs tests, shows what they print, and returns their last line without its frame."""
    command = [str(environment / "bin" / "python"), "-m", "pytest", *ON_TWO_RANKS, *tests]
    command += ["-o", f"cache_dir={environment / 'pytest'}"]
    last = ""
    shown_at_once = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=shown_at_once, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    summary = re.sub(r" in [\d.]+s.*", "", last.strip("= "))
    return summary if process.returncode == 0 else f"failed: {summary}"


def table(results: Sequence[Result]) -> str:
    """The results, as a table of Markdown."""
    lines = [
        "| Python | TensorFlow | Keras | LeNet-5 | tests | seconds |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {each.python} | {each.pair.tensorflow} | {each.pair.keras} | {each.lenet5} "
        f"| {each.tests} | {each.seconds:.0f} |"
        for each in results
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
