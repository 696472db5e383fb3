"""The processes around a rank: its supervisor, the runner of its script, and its clean-up."""
