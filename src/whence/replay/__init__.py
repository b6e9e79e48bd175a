"""Replay of a recorded training, which Hydra and Unrolled share."""
