"""The paper's experiments. See experiments/README.md."""
