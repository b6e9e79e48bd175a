"""One question each, beyond the paper's evaluation."""
