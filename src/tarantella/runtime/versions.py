"""The versions of Python, TensorFlow and Keras that Tarantella works with.

Older ones are refused when Tarantella is imported. Newer ones run as long as they have the private
names that Tarantella uses. Standard library only, in a syntax that an older Python understands.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tarantella.errors import VersionError
from tarantella.runtime.imports import before_import, when_imported

# The oldest that works and the newest that was tested; `tests/versions/pairs.py` says which
# of them were tested together.
VERSIONS = {"Python": ("3.10", "3.13"), "TensorFlow": ("2.18", "2.21"), "Keras": ("3.8", "3.15")}

_PACKAGES = {
    "TensorFlow": (
        *("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-rocm", "tensorflow-macos"),
        *("tf-nightly", "tf-nightly-cpu"),
    ),
    "Keras": ("keras", "keras-nightly"),
}
_INSTALL = {
    "Python": "use another one.",
    "TensorFlow": (
        "install it with `pip install tensorflow-cpu`, or `pip install 'tensorflow[and-cuda]'` "
        "for GPUs."
    ),
    "Keras": "install it with `pip install --upgrade keras`.",
}
_BACKEND = "KERAS_BACKEND"
_NEEDS_TENSORFLOW = "Tarantella needs TensorFlow as the backend of Keras"


def check_python() -> None:
    """Raises an error if this Python is too old to load the rest of Tarantella."""
    _refuse_old("Python", "{}.{}.{}".format(*sys.version_info))


def check() -> None:
    """Raises an error if TensorFlow or Keras is missing, too old, or not used by the other."""
    for name in _PACKAGES:
        if name.lower() not in sys.modules and importlib.util.find_spec(name.lower()) is None:
            raise VersionError(f"{_needs(name)}, but {name} is not installed: {_INSTALL[name]}")
        _refuse_old(name, installed(name))
    if "keras" not in sys.modules:
        check_backend()
    before_import("keras", check_backend)  # the script may still set the variable
    when_imported("keras", _check_loaded)


def check_backend() -> None:
    """Raises an error if Keras, which is not loaded yet, will not use TensorFlow."""
    if problem := backend_problem(os.environ) or _problem_of_file():
        raise VersionError(problem)


def backend_problem(environ: Mapping[str, str]) -> str:
    """What to say if these variables choose another backend than TensorFlow; empty if not."""
    backend = environ.get(_BACKEND, "")
    if backend in ("", "tensorflow"):
        return ""
    return (
        f"{_NEEDS_TENSORFLOW}, but the environment variable {_BACKEND} is {backend!r}: set it to "
        "tensorflow, or unset it."
    )


@contextmanager
def private_names(name: str) -> Iterator[None]:
    """Raises an error that asks for another version where a private name is missing."""
    try:
        yield
    except VersionError:
        raise
    except (AttributeError, ImportError) as error:
        raise missing(name, str(error).partition(" (")[0]) from error


def missing(name: str, what: str) -> VersionError:
    """The error for something missing that Tarantella uses.

    Args:
        name: TensorFlow or Keras
        what: what is missing
    """
    oldest, newest = VERSIONS[name]
    return VersionError(
        f"Tarantella does not know {name} {installed(name)} ({what}): install one of the versions "
        f"that it was tested with, {oldest} to {newest}."
    )


def _check_loaded() -> None:
    """Looks at what was really loaded, as metadata can be wrong or missing."""
    for name in _PACKAGES:
        _refuse_old(name, installed(name))
    backend = sys.modules["keras"].config.backend()
    if backend != "tensorflow":
        raise VersionError(
            f"{_NEEDS_TENSORFLOW}, but it is loaded with {backend!r}: set the environment variable "
            f"{_BACKEND}=tensorflow."
        )


def _problem_of_file() -> str:
    """What to say if the user's keras.json, which the variable overrides, names another one."""
    folder = os.environ.get("KERAS_HOME") or Path("~", ".keras").expanduser()
    file = Path(folder, "keras.json")
    try:
        backend = json.loads(file.read_text()).get("backend", "")
    except (OSError, ValueError, AttributeError):
        return ""  # Keras does without it as well
    if os.environ.get(_BACKEND) or backend in ("", "tensorflow"):
        return ""
    return (
        f"{_NEEDS_TENSORFLOW}, but {file} names {backend!r}: set the environment variable "
        f"{_BACKEND}=tensorflow, or change the file."
    )


def _refuse_old(name: str, version: str) -> None:
    # An unknown version, as of a build without metadata, is checked when it is loaded.
    if version and _numbers(version) < _numbers(VERSIONS[name][0]):
        raise VersionError(f"{_needs(name)}, but this is {name} {version}: {_INSTALL[name]}")


def _needs(name: str) -> str:
    oldest, newest = VERSIONS[name]
    return f"Tarantella needs {name} {oldest} or later (tested up to {newest})"


def installed(name: str) -> str:
    """The version of a package: the loaded one, or what its metadata say; empty if unknown."""
    module = sys.modules.get(name.lower())
    if module is not None and hasattr(module, "__version__"):
        return str(module.__version__)
    from importlib import metadata

    found = []
    for package in _PACKAGES[name]:
        with suppress(metadata.PackageNotFoundError):
            found.append(metadata.version(package))
    return max(found, key=_numbers, default="")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
