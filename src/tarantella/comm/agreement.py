"""Ranks make sure that they agree before they exchange data, and name the rank that differs.

Data that does not match would hang the ranks, or give wrong numbers. So each rank first describes
what it has in a list of lines, and one small message compares the digests. The lines themselves are
sent only when the digests differ.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from tarantella.comm import buffers, structures
from tarantella.comm.waiting import barrier
from tarantella.errors import InputError, MismatchError
from tarantella.runtime import world

if TYPE_CHECKING:
    from mpi4py import MPI

# A path in a structure, and what is there.
Line = tuple[str, str]
_LONGEST_TEXT = 300

_locks: dict[MPI.Comm, threading.Lock] = {}


def check_same(description: object, what: str, comm: MPI.Comm | None = None) -> None:
    """Raises an error on all ranks if they have different descriptions of something.

    Every rank must call it. Without a communicator it takes its turn among the collectives of
    `tarantella.comm.collectives`.

    Args:
        description: Anything made of dicts, lists, strings, numbers, booleans and None.
        what: What is described, for the message, as in "the model's weights".
        comm: The communicator, if not the one of the collectives.

    Raises:
        MismatchError: If the ranks differ; it says which has what, and where.

    Example:
        >>> check_same([list(w.shape) for w in model.weights], "the shapes of the model's weights")
    """
    if world.get_size() == 1:
        return
    lines = _json_lines(description)
    if comm is not None:
        agree(what, lines, comm)
    else:
        with turn() as collectives:
            agree(what, lines, collectives)


def all_ranks(condition: bool) -> bool:
    """Whether something holds on all ranks; every rank must call it."""
    if world.get_size() == 1:
        return condition
    from mpi4py import MPI

    holds = np.array([condition])
    with turn() as comm:
        barrier(comm)
        comm.Allreduce(MPI.IN_PLACE, holds, MPI.LAND)
    return bool(holds[0])


@contextmanager
def turn() -> Iterator[MPI.Comm]:
    """Waits for this rank's other threads, and gives the communicator of the collectives.

    Threads must not mix their messages on one communicator. They still have to call collectives in
    the same order on all ranks; if they do not, the ranks notice that they are not at the same
    point.
    """
    communicator = world.communicator("collectives")
    with _locks.setdefault(communicator, threading.Lock()):
        yield communicator


def agree(
    what: str, lines: Sequence[Line], comm: MPI.Comm, problem: Exception | None = None
) -> None:
    """Returns once all ranks have given the same description; otherwise raises an error on all.

    Args:
        what: What the ranks are about to do, or talk about.
        lines: The description, from the outside in: up to a first difference, all ranks' lines
            must be about the same paths.
        comm: The communicator.
        problem: Why this rank cannot take part. It is raised here, and reported on the others.

    Raises:
        MismatchError: If the ranks' lines differ.
        InputError: If another rank has a problem.
    """
    mine = json.dumps([what, list(lines), None if problem is None else str(problem)]).encode()
    barrier(comm)
    same = _digests_are_equal(mine, comm)
    theirs = [] if same else [json.loads(data) for data in buffers.allgather_bytes(mine, comm)]
    if problem is not None:
        raise problem
    if not same:
        raise _difference(theirs)


def _digests_are_equal(data: bytes, comm: MPI.Comm) -> bool:
    from mpi4py import MPI

    digest = np.frombuffer(hashlib.blake2b(data, digest_size=16).digest(), np.uint64)
    # The largest of all, and the complement of the smallest, in one message.
    extremes = np.concatenate([digest, ~digest])
    comm.Allreduce(MPI.IN_PLACE, extremes, MPI.MAX)
    return np.array_equal(extremes[:2], ~extremes[2:])


def _difference(descriptions: Sequence[tuple[str, list[Line], str | None]]) -> Exception:
    for rank, (_, _, problem) in enumerate(descriptions):
        if problem is not None:
            return InputError(f"rank {rank} failed: {problem}")
    what = descriptions[0][0]
    if any(other != what for other, _, _ in descriptions):
        calls = _by_rank([other for other, _, _ in descriptions], "is at", "are at")
        return MismatchError(f"the ranks are not at the same point: {calls}")
    # Lines go from the outside in, so the first ones that differ are about the same path.
    for at_path in zip(*(lines for _, lines, _ in descriptions), strict=False):
        if any(line != at_path[0] for line in at_path):
            path = f" for {at_path[0][0]}" if at_path[0][0] else ""
            found = _by_rank([text for _, text in at_path], "has", "have")
            return MismatchError(f"{what}: {found}{path}; all ranks must have the same")
    counts = _by_rank([f"{len(lines)} entries" for _, lines, _ in descriptions], "has", "have")
    return MismatchError(f"{what}: {counts}; all ranks must have the same")


def _by_rank(texts: Sequence[str], one: str, many: str) -> str:
    """Says which ranks have which text: "ranks 0-2 have this, rank 3 has that"."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    return ", ".join(
        f"rank{'s' * (len(who) > 1)} {_ranges(who)} {many if len(who) > 1 else one} {_short(text)}"
        for text, who in ranks.items()
    )


def _ranges(ranks: Sequence[int]) -> str:
    """Writes ascending numbers briefly: [0, 1, 2, 5] as "0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 3] + "..."


def _json_lines(description: object) -> list[Line]:
    plain = json.loads(json.dumps(description))  # what JSON does not tell apart is the same

    def text(item: object) -> str:
        leaf = structures.is_leaf(item)
        return json.dumps(item) if leaf else structures.describe_container(item)

    return [(path, text(item)) for path, item in structures.walk(plain)]
