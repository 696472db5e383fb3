"""The versions of TensorFlow and Keras that are tested together, and with which Python.

The first pair is the oldest that is supported, the last one is that of `constraints.txt`.
"""

from __future__ import annotations

from typing import NamedTuple


class Pair(NamedTuple):
    """One environment.

    Attributes:
        tensorflow: the version of TensorFlow
        keras: the version of Keras
        pythons: the versions of Python that it is tested with; the first that is found
    """

    tensorflow: str
    keras: str
    pythons: tuple[str, ...]

    def __str__(self) -> str:
        return f"TensorFlow {self.tensorflow} and Keras {self.keras}"


PAIRS = (
    Pair("2.18.0", "3.8.0", ("3.10", "3.11", "3.12")),
    Pair("2.18.1", "3.9.2", ("3.11", "3.12", "3.10")),
    Pair("2.19.1", "3.10.0", ("3.11", "3.12", "3.10")),
    Pair("2.19.1", "3.11.3", ("3.12", "3.11", "3.10")),
    Pair("2.20.0", "3.12.4", ("3.10", "3.11", "3.12", "3.13")),
    Pair("2.20.0", "3.13.2", ("3.13", "3.12", "3.11")),
    Pair("2.21.0", "3.12.4", ("3.10",)),  # of constraints.txt for Python 3.10
    Pair("2.21.0", "3.14.1", ("3.12", "3.13", "3.11")),
    Pair("2.21.0", "3.15.1", ("3.13", "3.12", "3.11")),
)
