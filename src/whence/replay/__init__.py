"""Replaying a recorded training: what Hydra and Unrolled share."""
