"""Draw the figures of README and documentation: python -m tools.figures.make"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import matplotlib
import torch

import whence.demo
from whence.operators import inverse, response

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FIGURES = Path(__file__).parents[2] / "docs/figures"
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#888888"


def demo() -> None:
    """The demo's own figure, for README and the front page."""
    with tempfile.TemporaryDirectory() as folder:
        whence.demo.main(["--out", folder, "--quiet"])
        shutil.copyfile(Path(folder) / "figure.png", FIGURES / "demo.png")


def responses(rate: float = 0.1, updates: int = 100) -> None:
    """SOURCE's F_r next to the influence function's F_inv with λ = 1/(η̄K), as in the paper."""
    duration = rate * updates
    sigma = torch.logspace(-3, 2, 500, dtype=torch.float64)
    figure, axis = plt.subplots(figsize=(6, 3.6))
    axis.axhline(duration, color=GREY, linewidth=0.8, linestyle=":")
    axis.plot(sigma, 1 / sigma, color=GREY, linewidth=0.8, linestyle=":")
    axis.plot(
        sigma,
        response(sigma, duration),
        color=BLUE,
        linewidth=2,
        label="$F_r(σ) = (1 - e^{-\\barη K σ})\\, /\\, σ$",
    )
    axis.plot(
        sigma,
        inverse(sigma, 1 / duration),
        color=ORANGE,
        linewidth=2,
        linestyle="--",
        label="$F_{inv}(σ) = 1\\, /\\, (σ + λ)$,  $λ = 1\\, /\\, \\barη K$",
    )
    axis.text(1.3e-3, duration * 1.12, "$\\barη K$", color=GREY)
    axis.text(40, 1.6 / 40, "$1/σ$", color=GREY)
    axis.set(xscale="log", yscale="log", xlim=(1e-3, 1e2), ylim=(7e-3, 25))
    axis.set_xlabel("curvature σ")
    axis.set_ylabel("response")
    axis.set_title(f"$\\barη$ = {rate},  K = {updates}", fontsize=10)
    axis.legend(frameon=False, loc="lower left")
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(FIGURES / "response.png", dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    responses()
    demo()
