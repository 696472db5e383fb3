"""An environment with legacy Keras, the only Keras that MultiWorkerMirroredStrategy supports.

It is next to this file, has the TensorFlow that Tarantella runs with, and is created if it is
missing or broken.

    python benchmarks/legacy.py                     # creates it, and prints its path
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FOLDER = Path(__file__).parent / ".venv"
CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
LINES_SHOWN = 5


class UnavailableError(Exception):
    """Legacy Keras is not available; the message says why."""


def main() -> None:
    try:
        print(legacy_python())
    except UnavailableError as error:
        sys.exit(str(error))


def legacy_python(folder: Path = FOLDER) -> Path:
    """A Python with legacy Keras, in an environment that is created if necessary."""
    package, release = tensorflow_here()
    python = folder / "bin" / "python"
    if not works(python, release):
        print(f"Installing legacy Keras for TensorFlow {release} into {folder} ...", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        _install(folder, package, release)
        if not works(python, release):
            raise UnavailableError(
                f"legacy Keras was installed into {folder}, but cannot be imported"
            )
    return python


def tensorflow_here() -> tuple[str, str]:
    """The package of this Python's TensorFlow, and its version."""
    for package in ("tensorflow-cpu", "tensorflow"):
        try:
            return package, version(package)
        except PackageNotFoundError:
            continue
    raise UnavailableError("this Python has no TensorFlow")


def works(python: Path, release: str) -> bool:
    """Whether a Python has that TensorFlow, and can import legacy Keras."""
    code = f"import tensorflow as tf, tf_keras; assert tf.__version__ == {release!r}"
    return (
        python.exists()
        and subprocess.run([python, "-c", code], capture_output=True).returncode == 0
    )


def _install(folder: Path, package: str, release: str) -> None:
    # Use this Python's pip, as some systems ship venv without one. Legacy Keras requires the
    # package `tensorflow` by name, even if `tensorflow-cpu` is installed.
    minor = ".".join(release.split(".")[:2])
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    pip += ["--quiet", "--no-input", "--constraint", str(CONSTRAINTS)]
    _run(*pip, f"{package}=={release}")
    _run(*pip, "--no-deps", f"tf-keras=={minor}.*")


def _run(*command: str) -> None:
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode != 0:
        last = "\n".join(run.stdout.splitlines()[-LINES_SHOWN:])
        raise UnavailableError(f"legacy Keras cannot be installed ({command[2]}):\n{last}")


if __name__ == "__main__":
    main()
