"""Runs a task's evaluation: training, attribution, retraining, judging."""
