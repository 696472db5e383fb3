"""What many ranks print, as whole lines with the rank in front, never one inside of another."""

from __future__ import annotations

from collections.abc import Sequence

from tarantella.runtime.announce import Announcement


class MarkedLines:
    """Puts the pieces together that ranks send home.

    Args:
        name_hosts: mark the lines with the host as well
        hidden: how lines begin that nobody wants to see
    """

    def __init__(self, name_hosts: bool, hidden: Sequence[bytes] = ()) -> None:
        self._name_hosts = name_hosts
        self._hidden = tuple(hidden)
        self._unfinished: dict[tuple[int, int], tuple[bytes, bytes]] = {}

    def add(self, news: Announcement) -> bytes:
        """Take the next piece; returns the lines that are complete with it."""
        key = (news.rank, news.stream)
        mark, start = self._unfinished.pop(key, (self._mark(news), b""))
        *lines, rest = (start + news.printed).split(b"\n")
        if rest:
            self._unfinished[key] = (mark, rest)
        return b"".join(self._marked(mark, line) for line in lines)

    def finish(self, stream: int) -> bytes:
        """Nothing more is coming: returns the lines of a stream that have no end."""
        keys = [key for key in self._unfinished if key[1] == stream]
        return b"".join(self._marked(*self._unfinished.pop(key)) for key in keys)

    def _mark(self, news: Announcement) -> bytes:
        host = f" on {news.host}" if self._name_hosts else ""
        return f"[rank {news.rank}{host}] ".encode(errors="replace")

    def _marked(self, mark: bytes, line: bytes) -> bytes:
        if self._hidden and line.startswith(self._hidden):
            return b""
        return mark + line + b"\n"
