"""The settings of a rank, from the `TNT_...` variables that the command or the user has set."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from tarantella.errors import InputError

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

LOG_LEVEL = "TNT_LOG_LEVEL"
LOG_ON_ALL_DEVICES = "TNT_LOG_ON_ALL_DEVICES"
OUTPUT_ON_ALL_DEVICES = "TNT_OUTPUT_ON_ALL_DEVICES"
TENSORBOARD_ON_ALL_DEVICES = "TNT_TENSORBOARD_ON_ALL_DEVICES"
FUSION_THRESHOLD = "TNT_FUSION_THRESHOLD"
NO_GPU = "TNT_NO_GPU"
GPUS = "TNT_GPUS"
THREADS = "TNT_THREADS"
TERMINAL = "TNT_TERMINAL"

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")

Value = TypeVar("Value")


@dataclass(frozen=True)
class Configuration:
    """The settings of a rank, and what they are when nobody sets them.

    Attributes:
        log_level: the least important of the library's messages to be shown
        log_on_all_devices: every rank shows its messages, not only the master rank
        output_on_all_devices: every rank shows its progress and callback output
        tensorboard_on_all_devices: every rank writes TensorBoard files
        fusion_threshold_kb: gradients up to this size are sent together; 0 sends each alone
        no_gpu: use the CPU even where there are GPUs
        gpus: the GPUs for the ranks of this host, by local rank; None: in their own order
        threads: threads a rank computes with; None: an even share of the host's cores
        terminal: what ranks print is shown by a terminal; None: if their own output is one
    """

    log_level: str = "WARNING"
    log_on_all_devices: bool = False
    output_on_all_devices: bool = False
    tensorboard_on_all_devices: bool = False
    fusion_threshold_kb: int = 32
    no_gpu: bool = False
    gpus: tuple[int, ...] | None = None
    threads: int | None = None
    terminal: bool | None = None

    @property
    def fusion_threshold_bytes(self) -> int:
        return self.fusion_threshold_kb * 1024


@cache
def configuration() -> Configuration:
    """The settings of this rank, read once."""
    return read_configuration(os.environ)


def read_configuration(environ: Mapping[str, str]) -> Configuration:
    """The settings that these variables ask for; an InputError names one that makes no sense."""

    def read(name: str, meaning: Callable[[str], Value], default: Value, expected: str) -> Value:
        if name not in environ:
            return default
        try:
            return meaning(environ[name].strip())
        except ValueError:
            raise InputError(
                f"The environment variable {name} is {environ[name]!r}: "
                f"set it to {expected}, or unset it."
            ) from None

    a_switch = "true or false"
    default = Configuration()
    return Configuration(
        log_level=read(LOG_LEVEL, _level, default.log_level, "one of " + ", ".join(LOG_LEVELS)),
        log_on_all_devices=read(LOG_ON_ALL_DEVICES, _switch, False, a_switch),
        output_on_all_devices=read(OUTPUT_ON_ALL_DEVICES, _switch, False, a_switch),
        tensorboard_on_all_devices=read(TENSORBOARD_ON_ALL_DEVICES, _switch, False, a_switch),
        fusion_threshold_kb=read(
            FUSION_THRESHOLD,
            _at_least(0),
            default.fusion_threshold_kb,
            "a whole number of kilobytes, 0 or more",
        ),
        no_gpu=read(NO_GPU, _switch, False, a_switch),
        gpus=read(GPUS, _numbers, None, "the numbers of GPUs, separated by commas"),
        threads=read(THREADS, _at_least(1), None, "a whole number, 1 or more"),
        terminal=read(TERMINAL, _switch, None, a_switch),
    )


def _switch(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(text)


def _level(text: str) -> str:
    if text.upper() not in LOG_LEVELS:
        raise ValueError(text)
    return text.upper()


def _at_least(smallest: int) -> Callable[[str], int]:
    def meaning(text: str) -> int:
        if not text.isdecimal() or int(text) < smallest:
            raise ValueError(text)
        return int(text)

    return meaning


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_at_least(0)(part.strip()) for part in text.split(","))
