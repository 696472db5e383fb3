"""From a global batch to this rank's micro-batch, for each kind of data."""

from tarantella.runtime import versions

with versions.private_names("TensorFlow"):
    from tarantella.data import pipeline  # noqa: F401  # says which version of TensorFlow broke it
