"""The errors that users see, each with a message that says what to do."""


class TarantellaError(Exception):
    """Base class of all errors that Tarantella raises."""

    # Without this, TensorFlow replaces errors raised in a tf.function by its own.
    ag_pass_through = True


class InputError(TarantellaError, ValueError):
    """The user passed something that cannot work; the message names it and the solution."""


class MismatchError(TarantellaError, RuntimeError):
    """The ranks disagree about something they must agree on."""


class RankError(TarantellaError, RuntimeError):
    """A rank of `tnt.run` was killed, has exited, or has raised or returned what cannot be sent."""


class RankTraceback(TarantellaError):  # noqa: N818  # it is not raised, but the cause of what is
    """The traceback of a rank, as the cause of the error that `tnt.run` raises for it."""


class VersionError(TarantellaError, ImportError):
    """This Python, TensorFlow or Keras cannot be used; the message names those that can."""
