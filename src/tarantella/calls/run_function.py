"""`tnt.run`: a function on several ranks, from a notebook, a shell or a script."""

from __future__ import annotations

import json
import operator
import os
import pickle
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tarantella.calls.call_format import Call, Reply, framed, unframed
from tarantella.calls.command_process import run_command
from tarantella.calls.keyword_options import arguments_for
from tarantella.cli import caller
from tarantella.cli.command_line import parse
from tarantella.cli.hostfile import is_host_name
from tarantella.cli.keywords import in_keywords
from tarantella.errors import InputError, RankError, RankTraceback
from tarantella.runtime import launcher, world
from tarantella.runtime.announce import FAILED, Announcement, is_run_by_command

_SCRIPT = str(Path(__file__).absolute().parent / "function.py")
_PARAMETERS = ("args", "ranks", "hosts", "all_results")


def run(
    function: Callable[..., Any],
    args: Iterable[Any] = (),
    ranks: int | None = 2,
    hosts: Iterable[str] | str | os.PathLike[str] | None = None,
    *,
    all_results: bool = False,
    **options: Any,
) -> Any:
    """Runs a function on several ranks, from a notebook, a Python shell or a script.

    The command `tarantella` starts the ranks, shows their output here while they run, and ends
    all of them if one fails or if you interrupt it. Inside of the function, `tnt.Model` and the
    rest of Tarantella work as in a script. The function may be a lambda, refer to local variables,
    and use modules that you have imported; it gets copies of all of these.

    ```python
    import numpy as np

    import tarantella as tnt

    x = np.random.default_rng(1).normal(size=(1000, 8))


    def train(epochs):
        import keras

        model = tnt.Model(keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)]))
        model.compile(optimizer="adam", loss="mse")
        return model.fit(x, x.sum(axis=1), batch_size=64, epochs=epochs, verbose=2).history


    history = tnt.run(train, args=(3,), ranks=2, no_gpu=True)
    print(history["loss"])
    ```

    Args:
        function: What to run. Every rank calls it with the same arguments.
        args: Its arguments.
        ranks: How many ranks to start; with `hosts`, on each of them. None: one for each GPU, on
            the hosts of the Slurm, PBS or LSF job if this is one.
        hosts: The hosts to start them on: a list of names, or the path of a hostfile. None: this
            machine.
        all_results: Whether to return a list of what the function has returned on each rank.
        **options: Other options of the command, with `_` for `-`: `no_gpu=True`,
            `log_level="INFO"`, `x={"NAME": "value"}`.

    Returns:
        What the function has returned on the master rank. A `tnt.Model` comes back as a plain
        Keras model.

    Raises:
        RankError: If a rank was killed or has exited. An exception that the function raises is
            raised here, too, with the traceback of the rank as its cause; it becomes a RankError if
            it cannot be pickled.
    """
    _refuse_rank()
    arguments = _ranks(ranks, with_hosts=hosts is not None)
    arguments += arguments_for(options, _PARAMETERS)
    names: tuple[str, ...] = ()
    if isinstance(hosts, (str, os.PathLike)):
        arguments.append(f"--hostfile={_hostfile(hosts)}")
    elif hosts is not None:
        names = _host_names(hosts)
    program = [_SCRIPT, _name_of(function)]
    _check(arguments, program)
    call = _call(function, args, all_results)
    replies = _Replies()
    status = run_command(arguments, names, program, framed(call.packed()), replies.feed)
    if status != 0:
        raise replies.error(status)
    return replies.results() if all_results else replies.result(0)


def _refuse_rank() -> None:
    """A run inside of a run would need its ranks' cores and GPUs a second time."""
    parent = launcher.rank_of_parent()
    is_rank = world.get_size() > 1 or (parent is not None and parent[1] > 1)
    if is_rank or is_run_by_command():
        raise InputError(
            "tnt.run starts ranks, but this process belongs to a run already: call the function "
            "itself, or start this program with plain `python`."
        )


def _ranks(ranks: int | None, with_hosts: bool) -> list[str]:
    if ranks is None:
        return []
    try:
        number = operator.index(ranks)
    except TypeError:
        number = 0
    if number < 1 or isinstance(ranks, bool):
        raise InputError(
            f"ranks={ranks!r}: give a number of ranks, 1 or more, or None for one on each GPU."
        )
    return [f"--n-per-node={number}"] if with_hosts else ["-n", str(number)]


def _hostfile(path: str | os.PathLike[str]) -> str:
    name = os.fspath(path)
    if not Path(name).exists():
        raise InputError(
            f"There is no hostfile {name}: check its path; for names of hosts, pass a list, as in "
            f"hosts=[{name!r}]."
        )
    return name


def _host_names(hosts: Iterable[str]) -> tuple[str, ...]:
    names = tuple(hosts)
    if not names:
        raise InputError("hosts is empty: name at least one host, or leave it out.")
    for name in names:
        if not isinstance(name, str) or not is_host_name(name):
            raise InputError(f"hosts has {name!r} in it, which is not the name of a host.")
    lower = [name.lower() for name in names]
    twice = sorted({name for name in lower if lower.count(name) > 1})
    if twice:
        raise InputError(
            f"hosts names {twice[0]} twice: name each host once; ranks is the number on each."
        )
    return names


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _check(arguments: Sequence[str], program: Sequence[str]) -> None:
    """Says at once what is wrong with the options, and not only when the command has started."""
    try:
        parse([*arguments, "--", *program])
    except InputError as error:
        raise InputError(in_keywords(str(error))) from None


def _call(function: Callable[..., Any], args: Iterable[Any], all_results: bool) -> Call:
    if not callable(function):
        raise InputError(
            f"tnt.run needs a function, not a {type(function).__name__}: pass the function itself, "
            "without calling it, as in tnt.run(train, args=(3,))."
        )
    if isinstance(args, (str, bytes)) or not isinstance(args, Iterable):
        raise InputError(f"args={args!r}: give a tuple of arguments, as in args=({args!r},).")
    try:
        return Call.of(function, tuple(args), all_results)
    except Exception as error:
        raise InputError(
            "The function or its arguments cannot be sent to ranks, as something in them cannot be "
            f"pickled ({error}): make that inside of the function."
        ) from error


class _Replies:
    """What ranks reply, and what the command tells about them."""

    def __init__(self) -> None:
        self._line = b""
        self._received: dict[int, bytearray] = {}
        self._failure: Announcement | None = None
        self._reply_of_failed: Reply | None = None

    def feed(self, data: bytes) -> None:
        """Take the next piece of what the command tells."""
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            self._hear(Announcement(**json.loads(line)))

    def _hear(self, news: Announcement) -> None:
        if news.kind in (FAILED, caller.REFUSED):
            self._failure = news
            self._reply_of_failed = self._reply(news.rank)
            self._received.clear()  # the run may be restarted
        else:
            self._received.setdefault(news.rank, bytearray()).extend(news.printed)

    def _reply(self, rank: int) -> Reply | None:
        message = unframed(self._received.get(rank, b""))
        return None if message is None else Reply.unpacked(message)

    def result(self, rank: int) -> Any:
        """What the function has returned on a rank."""
        return _loaded(self._expected(rank).content, rank)

    def results(self) -> list[Any]:
        """What it has returned on each rank."""
        return [self.result(rank) for rank in range(self._expected(0).ranks)]

    def _expected(self, rank: int) -> Reply:
        reply = self._reply(rank)
        if reply is None:
            raise RankError(f"Rank {rank} has exited before the function returned.")
        return reply

    def error(self, status: int) -> Exception:
        """The error of a run that has ended with this exit status."""
        if self._failure is None:
            return RankError(f"The run was ended{_by_signal(status)}.")
        if self._failure.kind == caller.REFUSED:
            return InputError(self._failure.cause)
        reply = self._reply_of_failed
        if reply is None or not reply.error:
            return RankError(_sentence(self._failure.cause))
        rank = f"rank {self._failure.rank} on host {self._failure.host}"
        error = (
            _loaded(reply.content, self._failure.rank)
            if reply.content
            else RankError(f"{rank} has raised what cannot be pickled: {reply.error}")
        )
        error.__cause__ = RankTraceback(f"{rank}:\n\n{reply.traceback}")
        return error


def _loaded(content: bytes, rank: int) -> Any:
    try:
        return pickle.loads(content)
    except Exception as error:
        raise RankError(
            f"What rank {rank} has sent cannot be loaded in this process ({error})."
        ) from error


def _by_signal(status: int) -> str:
    number = status - 128 if status > 128 else -status
    try:
        return f" by {signal.Signals(number).name}"
    except ValueError:
        return f", with exit status {status}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
