"""The settings that ranks read, one row each, from `TNT_...` variables.

The command sets the variables for its ranks, from its options and its plan; without the command,
users set them. A new setting is a new row here; with an `option`, it is one of the command, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from tarantella.runtime.cores import parse_list
from tarantella.runtime.settings import (
    PATH,
    SWITCH,
    Group,
    Option,
    TextFormat,
    one_of,
    or_auto,
    setting,
    settings_of,
    whole_number,
    whole_numbers,
)

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
# How GPUs sum; "ring" is for tests, the sums of "nccl" between ranks on CPUs.
GPU_SUMS = ("auto", "nccl", "host")
_RING = "ring"
GRADIENT_TYPES = ("float32", "bfloat16", "float16")
_OTHER_NAMES = {"warn": "WARNING"}  # in earlier versions, and in Python's logging
_CORES = re.compile(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", re.ASCII)

# The variables that the command sets from its plan.
GPU = "TNT_GPU"
NO_GPU = "TNT_NO_GPU"
GPUS = "TNT_GPUS"
THREADS = "TNT_THREADS"
CORES = "TNT_CORES"
MEMORY = "TNT_MEMORY"
NETWORK_INTERFACE = "TNT_NETWORK_INTERFACE"
TERMINAL = "TNT_TERMINAL"

Value = TypeVar("Value")


def _read_cores(text: str) -> tuple[tuple[int, ...], ...]:
    parts = text.split(":")
    lists = tuple(tuple(parse_list(part)) for part in parts if _CORES.fullmatch(part.strip()))
    if len(lists) < len(parts) or not all(lists):
        raise ValueError(text)
    return lists


def _read_names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


_LEVEL = one_of(LOG_LEVELS, _OTHER_NAMES)
_GPU_SUMS = one_of(GPU_SUMS, {_RING: _RING})
_GRADIENT_TYPE = one_of(GRADIENT_TYPES)
_FOLDER = TextFormat(
    "the name of a folder",
    PATH.read,
    lambda folder: str(Path(folder).absolute()),  # ranks may run in another one
    path="folder",
    empty_is_unset=True,
    keeps_spaces=True,
)
_CORE_LISTS = TextFormat("lists of cores, as in 0-3:4-7", _read_cores, empty_is_unset=True)
_NAMES = TextFormat("names, separated by commas", _read_names, empty_is_unset=True)


@dataclass(frozen=True)
class Configuration:
    """The settings of a rank.

    A list by rank that is shorter than the number of ranks starts again, as for hosts that are
    all alike.
    """

    # The least important messages of the library to show.
    log_level: str = setting(
        "WARNING",
        _LEVEL,
        "TNT_LOG_LEVEL",
        Option(
            ("--log-level",),
            Group.OUTPUT,
            "show library messages of this level and above: " + ", ".join(LOG_LEVELS),
            metavar="LEVEL",
        ),
    )
    log_on_all_devices: bool = setting(
        False,
        SWITCH,
        "TNT_LOG_ON_ALL_DEVICES",
        Option(
            ("--log-on-all-devices",),
            Group.OUTPUT,
            "show library messages of every rank, not only of the master rank",
        ),
    )
    output_on_all_devices: bool = setting(
        False,
        SWITCH,
        "TNT_OUTPUT_ON_ALL_DEVICES",
        Option(
            ("--output-on-all-devices",),
            Group.OUTPUT,
            "show the output of every rank, with the rank in front of each line",
        ),
    )
    quiet: bool = setting(
        False,
        SWITCH,
        "TNT_QUIET",
        Option(
            ("--quiet",),
            Group.OUTPUT,
            "show no line about the ranks at the start, and no summary at the end",
        ),
    )
    # The folder for all that each rank prints; empty: it is not kept.
    output_dir: str = setting(
        "",
        _FOLDER,
        "TNT_OUTPUT_DIR",
        Option(
            ("--output-dir",),
            Group.OUTPUT,
            "keep everything that each rank prints, in one file per rank",
            metavar="DIR",
        ),
        planned=True,
    )
    tensorboard_on_all_devices: bool = setting(False, SWITCH, "TNT_TENSORBOARD_ON_ALL_DEVICES")
    # Whether each rank may have a run of W&B, MLflow or Comet, and logs to it.
    trackers_on_all_devices: bool = setting(False, SWITCH, "TNT_TRACKERS_ON_ALL_DEVICES")
    # None: what costs least for the gradients of a model.
    fusion_threshold_kb: int | None = setting(
        None,
        or_auto(whole_number("a whole number of kilobytes, 0 or more")),
        "TNT_FUSION_THRESHOLD",
        Option(
            ("--fusion-threshold",),
            Group.TRAINING,
            "send gradients up to this size together; 0 sends each on its own ({default}: chosen "
            "from the model and the number of hosts)",
            metavar="KB",
        ),
    )
    gradient_type: str = setting(
        "float32",
        _GRADIENT_TYPE,
        "TNT_GRADIENT_TYPE",
        Option(
            ("--gradient-type",),
            Group.TRAINING,
            "send gradients between hosts as float32, bfloat16 or float16: 16 bits halve the "
            "traffic, and change results slightly ({default})",
            metavar="TYPE",
        ),
    )
    strict: bool = setting(
        False,
        SWITCH,
        "TNT_STRICT",
        Option(
            ("--strict",),
            Group.TRAINING,
            "make it an error, not a warning, if ranks have different data",
        ),
    )
    # The file for a trace of what each rank does when; empty: none is made.
    timeline: str = setting(
        "",
        PATH,
        "TNT_TIMELINE",
        Option(
            ("--timeline",),
            Group.TRAINING,
            "record what each rank is doing, and when, for Perfetto or chrome://tracing",
            metavar="FILE",
        ),
    )
    # How long a rank waits for others before there is a warning; 0: forever.
    stall_seconds: int = setting(
        60,
        whole_number("a whole number of seconds, or 0 to wait forever"),
        "TNT_STALL_TIMEOUT",
        Option(
            ("--stall-timeout",),
            Group.FAILURES,
            "warn if ranks wait this long for others, and end the run after ten times that; "
            "0: wait forever, without a warning ({default})",
            metavar="SECONDS",
        ),
    )
    # How long a rank may take to end after SIGTERM, if it handles the signal.
    grace_seconds: int = setting(
        30,
        whole_number("a whole number of seconds, 0 or more"),
        "TNT_GRACE_PERIOD",
        Option(
            ("--grace-period",),
            Group.FAILURES,
            "how long ranks that handle SIGTERM may take to save their work ({default})",
            metavar="SECONDS",
        ),
    )
    gpu: bool = setting(
        False,
        SWITCH,
        GPU,
        Option(("--gpu",), Group.DEVICES, "use GPUs, or end with an error if there are too few"),
    )
    no_gpu: bool = setting(
        False,
        SWITCH,
        NO_GPU,
        Option(("--no-gpu", "--no-gpus"), Group.DEVICES, "use the CPU, even if there are GPUs"),
    )
    gpu_sums: str = setting(
        "auto",
        _GPU_SUMS,
        "TNT_GPU_SUMS",
        Option(
            ("--gpu-sums",),
            Group.DEVICES,
            "how GPUs sum gradients: nccl, on the GPUs; host, by MPI in host memory; auto, by NCCL "
            "where possible ({default})",
            metavar="HOW",
        ),
    )
    # The GPU of each rank on its host; None: in their own order.
    gpus: tuple[int, ...] | None = setting(
        None, whole_numbers("the numbers of GPUs, separated by commas"), GPUS, planned=True
    )
    # The threads that each rank computes with; None: an even share of the host's cores.
    threads: tuple[int, ...] | None = setting(
        None, whole_numbers("a whole number, 1 or more", 1), THREADS, planned=True
    )
    # The cores that each rank is bound to; None: it is not bound.
    cores: tuple[tuple[int, ...], ...] | None = setting(None, _CORE_LISTS, CORES, planned=True)
    # The NUMA domain whose memory each rank is bound to; None: it is not bound.
    memory: tuple[int, ...] | None = setting(
        None,
        whole_numbers("the numbers of NUMA domains, separated by commas"),
        MEMORY,
        planned=True,
    )
    # The network interface that each rank communicates through.
    network_interfaces: tuple[str, ...] | None = setting(
        None, _NAMES, NETWORK_INTERFACE, planned=True
    )
    # Whether a terminal shows what ranks print; None: if their own output is one.
    terminal: bool | None = setting(None, SWITCH, TERMINAL, planned=True)
    # How long hosts may take to answer the command before a run.
    check_seconds: int = setting(
        30,
        whole_number("a whole number of seconds, from 1 to 3600", 1, 3600),
        "TNT_CHECK_TIMEOUT",
    )

    @property
    def fusion_threshold_bytes(self) -> int | None:
        """None: it is to be chosen."""
        return None if self.fusion_threshold_kb is None else self.fusion_threshold_kb * 1024


def of_rank(values: tuple[Value, ...] | None, rank: int) -> Value | None:
    """The value of a rank in a list by rank."""
    return values[rank % len(values)] if values else None


@cache
def configuration() -> Configuration:
    """The settings of this rank, read once."""
    return read_configuration(os.environ)


def read_configuration(environ: Mapping[str, str]) -> Configuration:
    """The settings in these variables; an InputError names one that makes no sense."""
    return Configuration(
        **{
            name: row.read_variable(environ[row.variable])
            for name, row in settings_of(Configuration).items()
            if row.variable in environ
        }
    )
