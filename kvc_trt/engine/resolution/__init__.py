"""From a user's options to a complete build: its model, its numbers and its calibration."""
