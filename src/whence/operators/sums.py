"""Weighted sums and norms of per-example gradients, from their factors (a, s).

Letters and the bias coordinate as in `products.py`. Whole gradients exist only for a few examples,
or a few of their rows, at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whence.operators.products import LARGE, SMALL, buffer, build


def add_weighted(total: Tensor, weights: Tensor, a: Tensor, s: Tensor, bias: bool) -> None:
    """total (q, o, width) += Σ_n weights[q, n] G_n, G_n the whole gradient of example n."""
    (n, t, i), o, weights = a.shape, s.shape[2], weights.to(a.dtype)
    if bias:
        total[..., i] += weights @ s.sum(1)
    if t > 1:  # Σ_t s_t a_tᵀ once per example, a few outputs at a time, for all q
        step = max(1, LARGE.get(a.device.type, LARGE["cuda"]) // (n * i))
        for start in range(0, o, step):
            rows = slice(start, min(start + step, o))
            gradient = buffer(a, n, rows.stop - start, i)
            torch.bmm(s[:, :, rows].mT, a, out=gradient)
            total[:, rows, :i] += (weights @ gradient.view(n, -1)).view(len(weights), -1, i)
        return
    a, s = a.squeeze(1), s.squeeze(1)
    short, long = (s, a) if o <= i else (a, s)  # the weights go to the shorter side
    step = max(1, SMALL.get(a.device.type, SMALL["cuda"]) // short.numel())
    for start in range(0, len(weights), step):
        part = weights[start : start + step]
        weighted = torch.mul(part.unsqueeze(1), short.mT, out=buffer(a, len(part), *short.mT.shape))
        found = (weighted.view(-1, n) @ long).view(len(part), short.shape[1], -1)
        total[start : start + step, :, :i] += found if o <= i else found.mT


def squared_norms(a: Tensor, s: Tensor, bias: bool) -> Tensor:
    """‖G_n‖², (n,)."""
    (n, t, i), o = a.shape, s.shape[2]
    gram = t * (i + o) <= o * i  # Σ_{t,t'} (s_t · s_t')(a_t · a_t' + 1) is less than Σ_t s_t a_tᵀ
    step = max(1, SMALL.get(a.device.type, SMALL["cuda"]) // (t * t if gram else o * i))
    wide = torch.promote_types(a.dtype, torch.float32)
    found = []
    for start in range(0, n, step):
        x, y = a[start : start + step], s[start : start + step]
        products = (y @ y.mT) * (x @ x.mT + bias) if gram else build(x, y, None, bias).square()
        found.append(products.sum((1, 2), dtype=wide))
    return torch.cat(found)
