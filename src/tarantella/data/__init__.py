"""From a global batch to this rank's micro-batch, for each kind of data."""
