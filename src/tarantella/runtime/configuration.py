"""The settings of a rank, from the `TNT_...` variables that the command or the user has set."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from tarantella.errors import InputError
from tarantella.runtime.cores import parse_list

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_OTHER_NAMES = {"WARN": "WARNING"}  # as earlier versions, and Python's logging, have it

LOG_LEVEL = "TNT_LOG_LEVEL"
LOG_ON_ALL_DEVICES = "TNT_LOG_ON_ALL_DEVICES"
OUTPUT_ON_ALL_DEVICES = "TNT_OUTPUT_ON_ALL_DEVICES"
OUTPUT_DIR = "TNT_OUTPUT_DIR"
TENSORBOARD_ON_ALL_DEVICES = "TNT_TENSORBOARD_ON_ALL_DEVICES"
FUSION_THRESHOLD = "TNT_FUSION_THRESHOLD"
TIMELINE = "TNT_TIMELINE"
STALL_TIMEOUT = "TNT_STALL_TIMEOUT"
GRACE_PERIOD = "TNT_GRACE_PERIOD"
NO_GPU = "TNT_NO_GPU"
GPUS = "TNT_GPUS"
THREADS = "TNT_THREADS"
CORES = "TNT_CORES"
MEMORY = "TNT_MEMORY"
NETWORK_INTERFACE = "TNT_NETWORK_INTERFACE"
TERMINAL = "TNT_TERMINAL"
CHECK_TIMEOUT = "TNT_CHECK_TIMEOUT"

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")
_CORES = re.compile(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", re.ASCII)

Value = TypeVar("Value")


@dataclass(frozen=True)
class Configuration:
    """The settings of a rank, and what they are when nobody sets them.

    A list by rank that is shorter than the number of ranks starts again, as for hosts that are
    all alike.

    Attributes:
        log_level: the least important of the library's messages to be shown
        log_on_all_devices: every rank shows its messages, not only the master rank
        output_on_all_devices: every rank shows its progress and callback output
        output_dir: the folder for all that each rank prints; empty: it is not kept
        tensorboard_on_all_devices: every rank writes TensorBoard files
        fusion_threshold_kb: gradients up to this size are sent together; 0 sends each alone
        timeline: the file for a trace of what each rank does when; empty: none is made
        stall_seconds: how long a rank waits for others until there is a warning; 0: for ever
        grace_seconds: how long a rank may take to end, after SIGTERM, if it does something then
        no_gpu: use the CPU even where there are GPUs
        gpus: the GPU of each rank on its host; None: in their own order
        threads: threads that each rank computes with; None: an even share of the host's cores
        cores: the cores that each rank is bound to, by the command; None: it is not
        memory: the NUMA domain whose memory each rank is bound to, by the command
        network_interfaces: the interface that each rank communicates by, over TCP
        terminal: what ranks print is shown by a terminal; None: if their own output is one
        check_seconds: for how long the command waits for hosts that it looks at before a run
    """

    log_level: str = "WARNING"
    log_on_all_devices: bool = False
    output_on_all_devices: bool = False
    output_dir: str = ""
    tensorboard_on_all_devices: bool = False
    fusion_threshold_kb: int = 256
    timeline: str = ""
    stall_seconds: int = 60
    grace_seconds: int = 30
    no_gpu: bool = False
    gpus: tuple[int, ...] | None = None
    threads: tuple[int, ...] | None = None
    cores: tuple[tuple[int, ...], ...] | None = None
    memory: tuple[int, ...] | None = None
    network_interfaces: tuple[str, ...] | None = None
    terminal: bool | None = None
    check_seconds: int = 30

    @property
    def fusion_threshold_bytes(self) -> int:
        return self.fusion_threshold_kb * 1024


def of_rank(values: tuple[Value, ...] | None, rank: int) -> Value | None:
    """The value of a rank in a list by rank."""
    return values[rank % len(values)] if values else None


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
        log_level=read(LOG_LEVEL, log_level, default.log_level, "one of " + ", ".join(LOG_LEVELS)),
        log_on_all_devices=read(LOG_ON_ALL_DEVICES, _switch, False, a_switch),
        output_on_all_devices=read(OUTPUT_ON_ALL_DEVICES, _switch, False, a_switch),
        output_dir=environ.get(OUTPUT_DIR, ""),
        tensorboard_on_all_devices=read(TENSORBOARD_ON_ALL_DEVICES, _switch, False, a_switch),
        fusion_threshold_kb=read(
            FUSION_THRESHOLD,
            _at_least(0),
            default.fusion_threshold_kb,
            "a whole number of kilobytes, 0 or more",
        ),
        timeline=environ.get(TIMELINE, ""),
        stall_seconds=read(
            STALL_TIMEOUT,
            _at_least(0),
            default.stall_seconds,
            "a whole number of seconds, or 0 to wait for ever",
        ),
        grace_seconds=read(
            GRACE_PERIOD, _at_least(0), default.grace_seconds, "a whole number of seconds"
        ),
        no_gpu=read(NO_GPU, _switch, False, a_switch),
        gpus=read(GPUS, _numbers(0), None, "the numbers of GPUs, separated by commas"),
        threads=read(THREADS, _numbers(1), None, "a whole number, 1 or more"),
        cores=read(CORES, _lists, None, "lists of cores, as in 0-3:4-7"),
        memory=read(MEMORY, _numbers(0), None, "the numbers of NUMA domains, separated by commas"),
        network_interfaces=read(NETWORK_INTERFACE, _names, None, "names, separated by commas"),
        terminal=read(TERMINAL, _switch, None, a_switch),
        check_seconds=read(
            CHECK_TIMEOUT, _seconds, default.check_seconds, "a whole number of seconds, up to 3600"
        ),
    )


def _switch(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(text)


def log_level(text: str) -> str:
    """The level that is meant; a ValueError if there is none of this name."""
    level = _OTHER_NAMES.get(text.upper(), text.upper())
    if level not in LOG_LEVELS:
        raise ValueError(text)
    return level


def _at_least(smallest: int) -> Callable[[str], int]:
    def meaning(text: str) -> int:
        if not text.isdecimal() or int(text) < smallest:
            raise ValueError(text)
        return int(text)

    return meaning


def _seconds(text: str) -> int:
    seconds = _at_least(1)(text)
    if seconds > 3600:
        raise ValueError(text)
    return seconds


def _numbers(smallest: int) -> Callable[[str], tuple[int, ...]]:
    def meaning(text: str) -> tuple[int, ...]:
        return tuple(_at_least(smallest)(part.strip()) for part in text.split(","))

    return meaning


def _lists(text: str) -> tuple[tuple[int, ...], ...] | None:
    if not text:
        return None
    parts = text.split(":")
    lists = tuple(tuple(parse_list(part)) for part in parts if _CORES.fullmatch(part.strip()))
    if len(lists) < len(parts) or not all(lists):
        raise ValueError(text)
    return lists


def _names(text: str) -> tuple[str, ...] | None:
    return tuple(part.strip() for part in text.split(",")) if text else None
