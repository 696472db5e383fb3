"""Which errors say that memory has run out, and what is said about them."""

from __future__ import annotations

import errno

import pytest

from tarantella.runtime import memory
from tarantella.runtime.failure import describe, show

LIMIT = "`ulimit -v` allows each process 2.0 GB"


class ResourceExhaustedError(Exception):
    """As TensorFlow's."""


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise MemoryError


@pytest.mark.parametrize(
    ("error", "anyway", "with_limit"),
    [
        (MemoryError(), True, True),
        (MemoryError("Unable to allocate 64.0 GiB for an array"), True, True),
        (ResourceExhaustedError("OOM when allocating tensor on /device:CPU:0"), True, True),
        (RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: out of memory"), True, True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True, True),
        (ImportError("libtensorflow_cc.so.2: failed to map segment from shared obj"), False, False),
        (ImportError("libx.so: failed to map segment from shared object"), False, True),
        (RuntimeError("can't start new thread"), False, True),
        (OSError(errno.ENOENT, "No such file"), False, False),
        (ValueError("bad value"), False, False),
        (SystemExit(3), False, False),
        (UnprintableError(), False, False),
    ],
)
def test_errors_that_mean_memory(
    error: BaseException, anyway: bool, with_limit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "limit_in_words", lambda: "")
    assert memory.shortage_in(error) == ("memory ran out" if anyway else "")
    assert describe(error).startswith("memory ran out: ") == anyway
    monkeypatch.setattr(memory, "limit_in_words", lambda: LIMIT)
    assert memory.shortage_in(error) == (f"memory ran out, as {LIMIT}" if with_limit else "")


def test_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "limit_in_words", lambda: LIMIT)
    text = (
        "{{function_node __wrapped__Mul}} OOM when allocating tensor on /device:GPU:0 by GPU_0_bfc"
    )
    name = f"{ResourceExhaustedError.__module__}.{ResourceExhaustedError.__name__}"
    assert describe(ResourceExhaustedError(text)) == (
        f"GPU memory ran out: {name}: OOM when allocating tensor on /device:GPU:0 by GPU_0_bfc"
    )


def test_only_the_users_frames_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np

    try:
        np.ones(1 << 55)
    except MemoryError as error:
        show(error)
    shown = capsys.readouterr().err
    assert "np.ones(1 << 55)" in shown
    assert "site-packages" not in shown
    assert shown.splitlines()[-1].startswith("memory ran out")


@pytest.mark.parametrize(
    ("status", "kills", "limit", "words"),
    [
        (-9, 1, "", "memory ran out, and the kernel killed a process on this host"),
        (-9, 0, LIMIT, ""),
        (-6, 0, LIMIT, f"probably because memory ran out, as {LIMIT}"),
        (-11, 0, LIMIT, f"probably because memory ran out, as {LIMIT}"),
        (-6, 1, "", ""),
        (-15, 0, LIMIT, ""),
        (1, 0, LIMIT, ""),
        (0, 0, LIMIT, ""),
    ],
)
def test_ends_that_mean_memory(
    status: int, kills: int, limit: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "limit_in_words", lambda: limit)
    assert memory.shortage_at_end(status, memory.oom_kills() - kills) == words
