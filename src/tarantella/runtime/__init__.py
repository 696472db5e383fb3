"""What a rank knows of itself: its place among the ranks, its settings, devices, log and end."""
