"""Numbers as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """A time, as in 12.3 s, 1 min 05 s or 2 h 03 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02} min"


def rate(number: float) -> str:
    """So many a second: with three digits at least, and commas."""
    digits = 0 if number >= 100 else 1 if number >= 10 else 2
    return f"{number:,.{digits}f}"


def memory(size: float) -> str:
    """A number of bytes, as in 1.5 GB or 730 MB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def count(number: int, thing: str) -> str:
    """So many things."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"
