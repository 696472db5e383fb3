"""Runs a function on a rank, for `tnt.run`: the script of such a run.

The function comes to the master rank through its standard input, in pieces that the rank asks for,
and from there by MPI to the others: hosts need no folder in common. Replies are announced.
"""

from __future__ import annotations

import logging
import os
import socket
from contextlib import suppress
from typing import Any

from tarantella.calls.call_format import (
    Call,
    Reply,
    framed,
    framed_size,
    pickled_error,
    pickled_result,
    unframed,
)
from tarantella.cli.keywords import in_keywords
from tarantella.errors import RankError
from tarantella.runtime import failure, messages, world
from tarantella.runtime.announce import (
    ASKS,
    CALLER,
    LONGEST_PIECE,
    REPLIES,
    Announcement,
    announce,
    prints,
)
from tarantella.runtime.log import LOGGER


def main() -> None:
    """Run the function, and tell the caller what became of it."""
    os.environ.pop(CALLER, None)  # whatever the function starts is not ours
    LOGGER.addFilter(_with_keywords)
    descriptor = os.dup(2)  # the function may close or redirect its own
    call = Call.unpacked(_received(descriptor))
    try:
        function, args = call.load()
        result = function(*args)
        if call.all_reply or world.is_master_rank():
            _reply(Reply(world.get_size(), _pickled(result)), descriptor)
    except Exception as error:
        _reply(_raised(error), descriptor)
        with suppress(AttributeError):
            setattr(error, failure.SENT_TO_CALLER, True)
        raise


def _received(descriptor: int) -> Any:
    data = _read(descriptor) if world.is_master_rank() else b""
    if world.get_size() == 1:
        return data
    return messages.bcast_bytes(data, world.communicator("control"))


def _read(descriptor: int) -> bytes:
    """The message on standard input, which is closed then."""
    data = bytearray()
    while (message := unframed(data)) is None:
        start = len(data)
        announce(Announcement(ASKS, 0, socket.gethostname(), os.getpid(), start), descriptor)
        while len(data) < min(start + LONGEST_PIECE, framed_size(data)):
            if not (piece := os.read(0, LONGEST_PIECE)):
                raise RankError(
                    "The function did not reach the ranks: what starts them does not forward "
                    "standard input."
                )
            data += piece
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return message


def _pickled(result: Any) -> bytes:
    try:
        return pickled_result(result)
    except Exception as error:
        raise RankError(
            f"What the function returns, a {type(result).__name__}, cannot be pickled ({error}): "
            "return something else, such as arrays, numbers or a Keras model, or save it to a file."
        ) from error


def _with_keywords(record: logging.LogRecord) -> bool:
    """Has a message speak of options as the user has written them: as keywords of `tnt.run`."""
    record.msg, record.args = in_keywords(record.getMessage()), ()
    return True


def _raised(error: Exception) -> Reply:
    if failure.is_ours(error):
        error.args = (in_keywords(str(error)),)
    return Reply(
        world.get_size(),
        pickled_error(error),
        failure.describe(error),
        failure.text_for_user(error),
    )


def _reply(reply: Reply, descriptor: int) -> None:
    message = framed(reply.packed())
    for news in prints(REPLIES, world.get_rank(), socket.gethostname(), 0, message):
        announce(news, descriptor)


if __name__ == "__main__":
    main()
