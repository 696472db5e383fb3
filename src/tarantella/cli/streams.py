"""Takes passages out of a stream of output, such as the messages of a launcher.

Everything else passes at once, even half lines and progress bars. Only what looks like the start of
a passage is held back until it is certain; a mere end of a line never is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Passage:
    """Something to take out of a stream.

    Attributes:
        start: how it begins
        end: how it ends
        taken: gets the passage, returns what to show instead
        begins_line: whether it is only at the start of a line
    """

    start: bytes
    end: bytes
    taken: Callable[[bytes], bytes]
    begins_line: bool = False


class StreamFilter:
    """Takes passages out of a stream of bytes that comes in pieces."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages = passages
        self._first_bytes = {passage.start[0] for passage in passages}
        self._longest_start = max((len(passage.start) for passage in passages), default=0)
        self._held = b""
        self._before = b"\n"  # what comes before that

    @property
    def holds(self) -> bool:
        """Whether something is held back."""
        return bool(self._held)

    def feed(self, data: bytes) -> bytes:
        """Take the next piece; returns what can be shown now."""
        text = self._held + data
        shown = b""
        while True:
            position, passage = self._next_start(text)
            if passage is None:
                keep = self._possible_start(text)
                self._held = text[len(text) - keep :]
                passed = text[: len(text) - keep]
                self._before = passed[-1:] or self._before
                return shown + passed
            shown += text[:position]
            end = text.find(passage.end, position + len(passage.start))
            if end < 0:
                self._held = text[position:]
                self._before = text[:position][-1:] or self._before
                return shown
            end += len(passage.end)
            shown += passage.taken(text[position:end])
            self._before = passage.end[-1:]
            text = text[end:]

    def flush(self) -> bytes:
        """Nothing more comes for now: returns what was held back."""
        held, self._held = self._held, b""
        self._before = held[-1:] or self._before
        return held

    def _next_start(self, text: bytes) -> tuple[int, Passage | None]:
        found = [
            (position, passage)
            for passage in self._passages
            if (position := self._position(text, passage)) >= 0
        ]
        return min(found, key=lambda pair: pair[0], default=(0, None))

    def _position(self, text: bytes, passage: Passage) -> int:
        position = text.find(passage.start)
        while passage.begins_line and position >= 0:
            before = text[position - 1 : position] if position else self._before
            if before == b"\n":
                break
            position = text.find(passage.start, position + 1)
        return position

    def _possible_start(self, text: bytes) -> int:
        """The length of the longest end of the text that may be the start of a passage."""
        for length in range(min(self._longest_start - 1, len(text)), 0, -1):
            end = text[-length:]
            if end[0] not in self._first_bytes or end == b"\n":
                continue
            before = text[-length - 1 : -length] or self._before
            if any(
                passage.start.startswith(end) and not (passage.begins_line and before != b"\n")
                for passage in self._passages
            ):
                return length
        return 0
