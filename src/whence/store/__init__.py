"""Projected gradients on disk, and the methods that answer from them."""

from whence.store.store import GradientStore

__all__ = ["GradientStore"]
