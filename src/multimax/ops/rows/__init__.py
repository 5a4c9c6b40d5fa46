"""The function itself: multimax, log_multimax and modulate along one dim."""
