"""The last part of what a rank prints, kept in case it fails. Standard library only."""

from __future__ import annotations

from collections import deque

_MOST_BYTES = 1 << 14


class OutputTail:
    """Keeps the end of what comes in pieces from several streams."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[int, bytes]] = deque()
        self._size = 0
        self._complete = True

    def add(self, stream: int, piece: bytes) -> None:
        """Add the next piece of a stream."""
        if not piece:
            return
        self._complete = self._complete and len(piece) <= _MOST_BYTES
        self._pieces.append((stream, piece[-_MOST_BYTES:]))
        self._size += len(self._pieces[-1][1])
        while (excess := self._size - _MOST_BYTES) > 0:
            stream, first = self._pieces.popleft()
            if len(first) > excess:
                self._pieces.appendleft((stream, first[excess:]))
            self._size -= min(excess, len(first))
            self._complete = False

    def take(self) -> list[tuple[int, bytes]]:
        """What is kept, in order, from the start of a line; afterwards nothing is kept."""
        pieces = list(self._pieces)
        starts = [index for index, (_, piece) in enumerate(pieces) if b"\n" in piece]
        if starts and not self._complete:
            del pieces[: starts[0]]
            stream, first = pieces[0]
            pieces[0] = (stream, first.partition(b"\n")[2])
        self._pieces.clear()
        self._size = 0
        return pieces
