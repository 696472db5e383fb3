"""The report of a run: one HTML file with figures, which opens anywhere without a network."""
