"""Scripts that draw the figures of README and documentation, into docs/figures/."""
