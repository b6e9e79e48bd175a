"""`nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d` with any stride, padding (all modes), dilation and
groups; and `nn.ConvTranspose1d`, `2d` and `3d`.

A position is a place of the kernel on the image. Its input is the patch under the kernel in the
order (row, column, channel): with channels last, a patch is a few contiguous runs, so extracting
patches is a plain copy. A transposed convolution does the reverse: it spreads each pixel over a
patch of its output, so the patches are those of the output's gradient.
"""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from whence.layers.kind import Kind, register, register_each
from whence.layers.shifted import add_shifted_gram, patch_sums

MIN_CHANNELS = 16  # from here on, many small products are faster than one large one


class Convolution(Kind):
    channels_first = True

    def shape(self, module: Any) -> tuple[int, int, int]:
        o = module.out_channels
        return module.groups, o // module.groups, module.weight.numel() // o

    def inputs(self, module: Any, x: Tensor) -> list[Tensor]:
        return _patches(_channels_last(_padded(module, x)), module)

    def gradients(self, module: Any, gradient: Tensor) -> list[Tensor]:
        n, o = gradient.shape[:2]
        places = gradient.movedim(1, -1).reshape(n, -1, o)
        return list(places.tensor_split(module.groups, dim=2))

    def matrices(self, module: Any, weight: Tensor) -> list[Tensor]:
        return list(weight.movedim(1, -1).reshape(self.shape(module)))


class Conv2d(Convolution):
    module = nn.Conv2d

    def add_gram(self, module: nn.Conv2d, x: Tensor, total: Tensor) -> Tensor | None:
        plain = (
            module.kernel_size == (3, 3)
            and module.stride == module.dilation == (1, 1)
            and module.groups == 1
            and module.padding in ((1, 1), "same")
            and module.padding_mode == "zeros"
            and module.in_channels >= MIN_CHANNELS
        )
        if not plain or total.dtype != x.dtype:
            return None
        image = F.pad(x, (1, 1, 1, 1)).permute(0, 2, 3, 1).contiguous()
        add_shifted_gram(total, image)
        return patch_sums(image)


class Transposed(Kind):
    """Output gradients are patches, (place in the kernel, channel); inputs are pixels."""

    channels_first = True
    bias_column = False

    def shape(self, module: Any) -> tuple[int, int, int]:
        i = module.in_channels
        return module.groups, module.weight.numel() // i, i // module.groups

    def inputs(self, module: Any, x: Tensor) -> list[Tensor]:
        return list(_channels_last(x).flatten(1, -2).tensor_split(module.groups, dim=2))

    def gradients(self, module: Any, gradient: Tensor) -> list[Tensor]:
        pads = [p for size in reversed(module.padding) for p in (size, size)]
        image = _channels_last(F.pad(gradient, pads))
        for axis, extra in enumerate(module.output_padding, 1):  # pixels that no kernel reaches
            image = image.narrow(axis, 0, image.shape[axis] - extra)
        return _patches(image, module)

    def bias_gradient(self, module: Any, gradient: Tensor) -> Tensor:
        return gradient.movedim(1, -1).reshape(len(gradient), -1, module.bias.numel())

    def matrices(self, module: Any, weight: Tensor) -> list[Tensor]:
        groups, o, i = self.shape(module)
        parts = weight.reshape(groups, i, *weight.shape[1:])
        parts = parts.movedim(1, -1).movedim(1, -2)  # (g, ..., c, i)
        return list(parts.reshape(groups, o, i))


def _channels_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous()


def _patches(image: Tensor, module: Any) -> list[Tensor]:
    """What is under the kernel at each of its places on (n, ..., c): (n, t, i) of each group."""
    n, *sizes, c = image.shape
    kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
    each = zip(sizes, kernel, stride, dilation, strict=True)
    places = [(size - d * (k - 1) - 1) // s + 1 for size, k, s, d in each]
    steps = image.stride()[1:-1]
    along = [step * s for step, s in zip(steps, stride, strict=True)]
    inside = [step * d for step, d in zip(steps, dilation, strict=True)]
    strides = (image.stride(0), *along, *inside, 1)
    patches = image.as_strided((n, *places, *kernel, c), strides)
    parts = patches.tensor_split(module.groups, dim=-1)
    return [part.reshape(n, prod(places), -1) for part in parts]


def _padded(module: Any, x: Tensor) -> Tensor:
    if isinstance(module.padding, str) or module.padding_mode != "zeros":
        # the module's own list of pads, last dimension first ("same" may pad unevenly)
        pads = module._reversed_padding_repeated_twice
        if not any(pads):
            return x
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        return F.pad(x, pads, mode=mode)
    pads = [p for size in reversed(module.padding) for p in (size, size)]
    return F.pad(x, pads) if any(pads) else x


register(Conv2d())
register_each(Convolution, nn.Conv1d, nn.Conv3d)
register_each(Transposed, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
