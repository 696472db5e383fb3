"""The errors a user can meet, each with a message that says what to do."""


class TarantellaError(Exception):
    """Base of every error that Tarantella raises on purpose."""

    # From a tf.function, TensorFlow raises an error of its own instead, unless told not to.
    ag_pass_through = True


class InputError(TarantellaError, ValueError):
    """Something the user passed in cannot work; the message names it and the way out."""


class MismatchError(TarantellaError, RuntimeError):
    """The ranks disagree about something they must agree on."""


class VersionError(TarantellaError, ImportError):
    """This Python, TensorFlow or Keras cannot be used; the message names those that can."""
