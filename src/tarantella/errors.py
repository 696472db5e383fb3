"""The errors a user can meet, each with a message that says what to do."""


class TarantellaError(Exception):
    """Base of every error that Tarantella raises on purpose."""


class InputError(TarantellaError, ValueError):
    """Something the user passed in cannot work; the message names it and the way out."""


class MismatchError(TarantellaError, RuntimeError):
    """The ranks disagree about something they must agree on."""
