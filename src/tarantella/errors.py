"""The errors that users see, each with a message that says what to do."""


class TarantellaError(Exception):
    """Base class of all errors that Tarantella raises."""

    # Without this, TensorFlow replaces errors raised in a tf.function by its own.
    ag_pass_through = True


class InputError(TarantellaError, ValueError):
    """The user passed something that cannot work; the message names it and the solution."""


class MismatchError(TarantellaError, RuntimeError):
    """The ranks disagree about something they must agree on."""


class VersionError(TarantellaError, ImportError):
    """This Python, TensorFlow or Keras cannot be used; the message names those that can."""
