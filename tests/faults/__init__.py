"""Attempts to break whence: each is a function of a random generator and an empty folder.

An attempt raises `Broken` if a promise of docs/trust.md does not hold. `test_faults.py` makes a few
of each kind; `python -m tools.faults` makes as many as you like, and counts.
"""
