"""The engine of sums: the one place that chooses how values are summed over the ranks.

Gradients, metrics, losses, the state of layers and batch statistics all get their channel here. A
new engine is a subclass of `Channel` in a file of its own, and a line in `channel`.
"""

from __future__ import annotations

import os
import threading
from functools import cache

import tensorflow as tf

from tarantella.errors import InputError, VersionError
from tarantella.graph.channel import Channel
from tarantella.graph.compiling import RefusingChannel, is_compiling
from tarantella.graph.device_channel import DeviceChannel
from tarantella.graph.host_channel import HostChannel
from tarantella.graph.overlapped import OverlappedChannel
from tarantella.graph.sum_counter import compiled_sum_counter
from tarantella.internals.tensorflow import start_server
from tarantella.runtime import messages, run_report, servers, watch, world
from tarantella.runtime.configuration import configuration
from tarantella.runtime.log import LOGGER
from tarantella.runtime.meter import SUMS
from tarantella.runtime.timeline import timeline

# What a rank waits in, if NCCL does not get through.
_FIRST_SUM = "the first sum by NCCL (`--gpu-sums host` does without it)"
_NO_GPU = "TensorFlow finds no GPU"
# TensorFlow has no way to tell NCCL in compiled functions where the ranks find each other, but this
# variable of NCCL does.
_NCCL_ROOT = "NCCL_COMM_ID"
# With these versions it was tried. With another, ranks might wait for each other for ever.
_COMPILE_SUMS = ("2.21.",)

_deciding = threading.Lock()
_hint: str | None = None  # of TensorFlow's collectives; empty: MPI sums
_problem_here = ""  # why this rank cannot use TensorFlow's collectives
_xla_sums = False  # whether XLA can compile sums


def channel(purpose: str, gradient_type: str = "float32") -> Channel:
    """The channel for a purpose.

    Args:
        purpose: One of `world.PURPOSES`, as in "gradients".
        gradient_type: The type in which values cross the network, if it can be chosen.
    """
    if is_compiling():
        return RefusingChannel(purpose)
    if gradient_type != "float32":
        _tell_of_gradient_type(gradient_type)
    if hint := device_hint():
        return DeviceChannel(purpose, hint)
    # On one host there is nothing to overlap: sums need the cores that compute.
    if purpose == "gradients" and world.has_several_hosts():
        sent_as = None if gradient_type == "float32" else tf.as_dtype(gradient_type)
        return OverlappedChannel("gradients", "sparse gradients", sent_as)
    return HostChannel(purpose)


@cache
def _tell_of_gradient_type(gradient_type: str) -> None:
    """Tells users once where the type that they have chosen is not used."""
    if not world.has_several_hosts():
        LOGGER.info(
            "All ranks are on one host, so gradients cross no network: they are not sent as %s.",
            gradient_type,
        )
    elif device_hint():
        LOGGER.warning(
            "Gradients are not sent as %s: NCCL sums them in their own type. `--gpu-sums host` "
            "sums them by MPI, which can.",
            gradient_type,
        )


def prepare() -> None:
    """Makes TensorFlow's collectives ready, before its first operation."""
    global _problem_here
    if not servers.addresses():
        return
    if _wanted_hint() == "nccl" and not tf.config.get_visible_devices("GPU"):
        _problem_here = _NO_GPU
        return
    try:
        start_server(servers.addresses(), world.get_rank())
    except RuntimeError:
        _problem_here = "TensorFlow was in use before `import tarantella`"
    except ValueError as error:
        _problem_here = str(error).rstrip(".")
    except VersionError as missing:
        _problem_here = str(missing).rstrip(".")


def device_hint() -> str:
    """What TensorFlow's collectives use, "nccl" or "ring"; empty if MPI does the sums.

    The ranks decide together, when the first of them needs a sum.

    Raises:
        InputError: If the user wants NCCL, and it cannot be used.
    """
    global _hint
    if _hint is None:
        with _deciding:
            if _hint is None:
                _hint = _decide()
    return _hint


def compiles_sums() -> bool:
    """Whether XLA can compile a sum together with what is around it, on all ranks.

    No operation on the CPU then waits for the sum. A timeline shows sums between compiled functions
    only. All threads share what XLA sums by, so only the main thread can use it.
    """
    has_own_thread = bool(world.communicators().thread)
    return bool(device_hint()) and _xla_sums and not has_own_thread and timeline() is None


def sum_in_compiled(flat: tf.Tensor) -> tf.Tensor:
    """The sum over the ranks, in a function that XLA compiles; needs `compiles_sums`."""
    return DeviceChannel("gradients", device_hint()).compiled_sum(flat)


def note_compiled_sum() -> None:
    """Tells the watch for stalls that a function with a sum that XLA compiles is about to run."""
    compiled_sum_counter().note()


def _wanted_hint() -> str:
    return "ring" if configuration().gpu_sums == "ring" else "nccl"


def _decide() -> str:
    wanted = configuration().gpu_sums
    if wanted == "host" or world.get_size() == 1:
        return ""
    problem = servers.problem()
    if servers.addresses():
        hint = _wanted_hint()
        problem = _problem_of_ranks(_own_problem(hint)) or _problem_of_ranks(_try(hint))
        if not problem:
            LOGGER.info("Values are summed by TensorFlow's collectives (%s).", hint)
            _decide_whether_xla_sums(hint)
            run_report.describe(unseen=[SUMS])
            return hint
    if wanted == "auto":
        if problem and problem != _NO_GPU:  # without any GPU, nothing is lost
            LOGGER.warning(
                "The GPUs cannot use NCCL for sums over the ranks: %s. MPI sums in host memory, "
                "which is slower. `--gpu-sums host` turns this warning off.",
                problem,
            )
            run_report.describe(engine="MPI")
        return ""
    raise InputError(
        f"The GPUs cannot use NCCL, which `--gpu-sums nccl` asks for: {problem or _NO_GPU}. "
        "With `--gpu-sums auto` or `host`, MPI sums in host memory."
    )


def _own_problem(hint: str) -> str:
    """Why this rank cannot use TensorFlow's collectives, as far as is known."""
    if not _problem_here and hint == "nccl" and not tf.config.list_logical_devices("GPU"):
        return _NO_GPU  # the user has hidden it after `import tarantella`
    return _problem_here


def _try(hint: str) -> str:
    """Takes a first sum; returns what went wrong."""
    try:
        with watch.waiting(_FIRST_SUM), tf.init_scope():
            (total,) = DeviceChannel("engine", hint).allreduce([tf.ones(1)], 0)
            received = float(total[0])
    except tf.errors.OpError as error:
        return str(error.message).partition("\n")[0].rstrip(".")
    return "" if received == world.get_size() else f"a sum of ones was {received}"


def _decide_whether_xla_sums(hint: str) -> None:
    """Takes a first sum that XLA compiles, if that was ever tried with this TensorFlow."""
    global _xla_sums
    root = servers.nccl_root()
    if hint != "nccl" or not root or not tf.__version__.startswith(_COMPILE_SUMS):
        return
    problem = _problem_of_ranks(_try_compiled(hint, root))
    _xla_sums = not problem
    if _xla_sums:
        compiled_sum_counter()  # makes a variable, which a function that is traced should not
    else:
        LOGGER.info("XLA does not compile sums over the ranks: %s.", problem)


def _try_compiled(hint: str, root: str) -> str:
    """Takes a first sum that XLA compiles; returns what went wrong.

    It makes the connections that all later ones use.
    """

    @tf.function(jit_compile=True, autograph=False)
    def total(values: tf.Tensor) -> tf.Tensor:
        return DeviceChannel("engine", hint).compiled_sum(values)

    is_users = _NCCL_ROOT in os.environ
    os.environ.setdefault(_NCCL_ROOT, root)
    try:
        with watch.waiting(_FIRST_SUM), tf.init_scope(), tf.device("GPU:0"):
            received = float(total(tf.ones(1))[0])
    except tf.errors.OpError as error:
        return str(error.message).partition("\n")[0].rstrip(".")
    finally:
        if not is_users:  # other connections are made without it
            del os.environ[_NCCL_ROOT]
    return "" if received == world.get_size() else f"a sum of ones was {received}"


def _problem_of_ranks(own: str) -> str:
    """The problem of the first rank that has one, with its number; `_NO_GPU` if all lack one."""
    problems = messages.allgather(own, world.shared_communicator("engine"))
    if set(problems) == {_NO_GPU}:
        return _NO_GPU
    hosts = world.get_host_names()
    found = (
        f"{each} (rank {rank} on host {hosts[rank]})" for rank, each in enumerate(problems) if each
    )
    return next(found, "")
