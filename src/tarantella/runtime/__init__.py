"""What a rank knows about itself: rank and size, settings, devices, log, start and end."""
