"""Tiny matrices are fastest on one thread, and two test machines agree to the last bit on it."""

import torch

torch.set_num_threads(1)
