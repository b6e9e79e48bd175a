"""Hugging Face: a callback that records a Trainer, and runs built from the folders it writes."""

from whence.integrations.huggingface.callback import RecorderCallback
from whence.integrations.huggingface.folders import from_huggingface

__all__ = ["RecorderCallback", "from_huggingface"]
