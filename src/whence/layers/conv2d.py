"""`nn.Conv2d` with any stride, padding (all modes), dilation and groups.

A position is a place of the kernel on the image. Its input is the patch under the kernel in the
order (row, column, channel): with channels last, a patch is a few contiguous runs, so extracting
patches is a plain copy.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from whence.layers.kind import Kind, register, same_forward
from whence.layers.shifted import add_shifted_gram, patch_sums

MIN_CHANNELS = 16  # from here on, many small products are faster than one large one


class Conv2d(Kind):
    module = nn.Conv2d

    def refusal(self, module: nn.Module) -> str | None:
        if (
            same_forward(module, nn.Conv2d)
            and getattr(type(module), "_conv_forward", None) is nn.Conv2d._conv_forward
        ):
            return None
        return f"{type(module).__name__} is a subclass of Conv2d with its own forward"

    def shape(self, module: nn.Conv2d) -> tuple[int, int, int]:
        rows, columns = module.kernel_size
        groups = module.groups
        return groups, module.out_channels // groups, module.in_channels // groups * rows * columns

    def inputs(self, module: nn.Conv2d, x: Tensor) -> list[Tensor]:
        image = _padded(module, x).permute(0, 2, 3, 1).contiguous()  # (n, h, w, c)
        (kh, kw), (sh, sw), (dh, dw) = module.kernel_size, module.stride, module.dilation
        n, h, w, c = image.shape
        oh, ow = (h - dh * (kh - 1) - 1) // sh + 1, (w - dw * (kw - 1) - 1) // sw + 1
        if (kh, kw, sh, sw) == (1, 1, 1, 1):
            patches = image.reshape(n, h, w, 1, 1, c)
        else:
            strides = (h * w * c, sh * w * c, sw * c, dh * w * c, dw * c, 1)
            patches = image.as_strided((n, oh, ow, kh, kw, c), strides)
        width = c // module.groups
        return [
            patches[..., g * width : (g + 1) * width].reshape(n, oh * ow, kh * kw * width)
            for g in range(module.groups)
        ]

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

    def gradients(self, module: nn.Conv2d, gradient: Tensor) -> list[Tensor]:
        n, o = gradient.shape[:2]
        places = gradient.permute(0, 2, 3, 1).reshape(n, -1, o)
        return list(places.tensor_split(module.groups, dim=2))

    def matrices(self, module: nn.Conv2d, weight: Tensor) -> list[Tensor]:
        blocks, o, i = self.shape(module)
        return list(weight.permute(0, 2, 3, 1).reshape(blocks, o, i))


def _padded(module: nn.Conv2d, x: Tensor) -> Tensor:
    if isinstance(module.padding, str) or module.padding_mode != "zeros":
        # the module's own list of pads, last dimension first ("same" may pad unevenly)
        pads = module._reversed_padding_repeated_twice
        if not any(pads):
            return x
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        return F.pad(x, pads, mode=mode)
    vertical, horizontal = module.padding
    return F.pad(x, (horizontal, horizontal, vertical, vertical)) if vertical or horizontal else x


register(Conv2d())
