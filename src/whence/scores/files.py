"""Moved to `whence.persist.files`."""

from whence.persist.files import make_folder, write_json

__all__ = ["make_folder", "write_json"]
