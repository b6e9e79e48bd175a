"""Other libraries' own code on our runs: a file for each library, a function for each method.

Every function takes the trainings and the study of a run, and returns scores (q, n) with our sign,
that of f(with m) - f(without m).
"""
