"""The explorer: scores and their data as a local web page, and what if."""

from whence.explore.launch import Running, serve, start

__all__ = ["Running", "serve", "start"]
