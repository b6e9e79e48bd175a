"""Datasets: from $WHENCE_DATA, which points to a folder with one sub-folder for each."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

SOURCES = {
    "concrete": "UCI Concrete Compressive Strength as concrete.csv (8 features, then the target)",
    "fashion_mnist": "FashionMNIST as fashion_mnist.npz (train_images, train_labels, test_images, "
    "test_labels)",
}


def find(folder: str, file: str) -> Path:
    """A file of a dataset; says what to put where when it is not there."""
    root = os.environ.get("WHENCE_DATA")
    where = Path(root or "$WHENCE_DATA") / folder / file
    if root is None or not where.is_file():
        raise FileNotFoundError(
            f"{where} is not there: put {SOURCES[folder]} there, and let WHENCE_DATA point to the "
            "folder above it"
        )
    return where


def digits(train: int = 1500) -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's 8 × 8 digits, shuffled once: so many to train on, the rest to ask about."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.from_numpy(images[order].astype(np.float32) / 16)
    y = torch.from_numpy(labels[order].astype(np.int64))
    return TensorDataset(x[:train], y[:train]), TensorDataset(x[train:], y[train:])


def fashion_mnist(train: int = 6000, test: int = 2000) -> tuple[TensorDataset, TensorDataset]:
    """The first images of either split, flat and standardised."""
    with np.load(find("fashion_mnist", "fashion_mnist.npz"), allow_pickle=False) as arrays:
        sets = [
            (arrays[f"{split}_images"][:count], arrays[f"{split}_labels"][:count])
            for split, count in (("train", train), ("test", test))
        ]
    made = [
        TensorDataset(
            torch.from_numpy((images.reshape(len(images), -1) / 255 - 0.286) / 0.353).float(),
            torch.from_numpy(labels.astype(np.int64)),
        )
        for images, labels in sets
    ]
    return made[0], made[1]


def concrete() -> tuple[TensorDataset, TensorDataset]:
    """Standardised features and targets, shuffled once; nine tenths to train on."""
    table = np.loadtxt(find("concrete", "concrete.csv"), delimiter=",", skiprows=1)
    table = table[np.random.default_rng(0).permutation(len(table))]
    cut = len(table) * 9 // 10
    table = (table - table[:cut].mean(0)) / table[:cut].std(0)
    x, y = torch.from_numpy(table[:, :-1]).float(), torch.from_numpy(table[:, -1:]).float()
    return TensorDataset(x[:cut], y[:cut]), TensorDataset(x[cut:], y[cut:])
