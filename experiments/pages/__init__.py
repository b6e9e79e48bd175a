"""Writes pages of the documentation from the committed results."""
