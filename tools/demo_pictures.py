"""Write the demo's pictures, a small part of Fashion-MNIST: python -m tools.demo_pictures

Reads $WHENCE_DATA/fashion_mnist/fashion_mnist.npz. Grey levels are rounded to 16, which nobody sees
in pictures of 28 × 28, and which halves the file.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from whence.demo import PICTURES, QUERIES, TRAIN

LEVELS = 16


def main() -> None:
    data = np.load(Path(os.environ["WHENCE_DATA"]) / "fashion_mnist/fashion_mnist.npz")
    random = np.random.default_rng(0)
    train = random.permutation(len(data["train_labels"]))[:TRAIN]
    test = random.permutation(len(data["test_labels"]))[: 2 * QUERIES]
    images = np.concatenate([data["train_images"][train], data["test_images"][test]])
    labels = np.concatenate([data["train_labels"][train], data["test_labels"][test]])
    grey = np.round(images.astype(np.float64) / 255 * (LEVELS - 1)).astype(np.uint8)
    np.savez_compressed(PICTURES, images=grey, labels=labels.astype(np.uint8))
    print(f"{PICTURES}: {len(labels)} pictures, {PICTURES.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
