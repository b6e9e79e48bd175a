"""A kind of layer: how its input and its output's gradient become positions.

Every tracked layer is linear in its parameters. With an input `a` and the gradient `s` of the loss
in the output at each position t, the per-example gradient of the weight has one of three forms:

    matrix          y_t = W a_t         G = Σ_t s_t a_tᵀ          a (n, t, i), s (n, t, o)
    lookup          y_t = W[a_t]        G = Σ_t 1[a_t] s_tᵀ       a row numbers, s (n, t, i)
    elementwise     y_t = w ∘ a_t       g = Σ_t s_t ∘ a_t         a and s (n, t, d)

A kind turns the module's input x and the gradient at its output, dloss/dy, into `a` and `s`; by
default, as for `nn.Linear`. A layer that consists of several independent ones (a grouped
convolution) gives one pair per block.

x and y are seen in one of four ways (`Kind.seen`):

    call            the module's input and output
    product         the operands and the result of `F.linear`, where no module is called
    copies          a parameter is replaced by one copy per example, (n, ...)
    forward         the kind computes the module's output, and records x and y of each weight

To support another layer, write a subclass and `register` it. Below the kinds are the layers of a
model that are of one, with their blocks of parameters: what `capture.py` captures.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from whence.layers.rows import Rows

Form = Literal["matrix", "lookup", "elementwise"]
Seen = Literal["call", "product", "copies", "forward"]


@dataclass(frozen=True)
class Places:
    """Which positions of its examples a call computes.

    Attributes:
        numbers: (n, t), or (n, blocks, t): 0 to length - 1, or -1 where there is nothing.
        length: positions of an example, of which a task's mask says which exist.
    """

    numbers: Tensor
    length: int

    def of(self, block: int) -> Tensor:
        """The numbers of one block, (n, t)."""
        return self.numbers if self.numbers.dim() == 2 else self.numbers[:, block]

    def mask(self, block: int, mask: Tensor | None) -> Tensor:
        """The positions of one block that exist, (n, t)."""
        numbers = self.of(block)
        exist = numbers >= 0
        if mask is not None and mask.shape == (len(numbers), self.length):
            exist = exist & (mask.gather(1, numbers.clamp_min(0)) != 0)
        return exist


class Notes(Protocol):
    """Passed to `Kind.forward`, which calls it to record x and y of a weight.

    Attributes:
        n: examples in the batch.
        names: the weights that are tracked.
        forward: the host's own forward.
    """

    n: int
    forward: Callable[..., Any]

    @property
    def names(self) -> Collection[str]: ...
    def __call__(self, weight: str, x: Tensor, y: Tensor, places: Places | None = None) -> None: ...


class Kind:
    """How to capture one kind of layer. All methods are pure."""

    #: the class of the modules, or patterns of its name where importing it would cost too much
    module: ClassVar[type[nn.Module] | tuple[str, ...]] = nn.Module
    #: a parameter that every such module has
    parameter: ClassVar[str | None] = None
    #: how the gradient is made up
    form: ClassVar[Form] = "matrix"
    #: names of its weight and bias in the module
    attributes: ClassVar[tuple[str, str]] = ("weight", "bias")
    #: whether a bias is a last column of the matrix; if not, it is a separate layer
    bias_column: ClassVar[bool] = True
    #: how its inputs and outputs are captured
    seen: ClassVar[Seen] = "call"
    #: of products, whether (n t, i) has the positions of an example together; else (t n, i)
    examples_first: ClassVar[bool] = False
    #: whether the channels of x are its second axis, not its last
    channels_first: ClassVar[bool] = False

    def claims(self, module: nn.Module) -> bool:
        """Whether a module of that class, or of a subclass, is of this kind."""
        return True

    def refusal(self, module: nn.Module) -> str | None:
        """Why this module cannot be captured, such as a subclass with its own forward; None if
        it can."""
        return own_forward(module, self.module)

    def parts(self, module: Any) -> Sequence[Part]:
        """The matrices of a module that has several, each a separate layer; else none."""
        return ()

    def host(self, module: Any) -> nn.Module:
        """The module whose `forward` is replaced."""
        assert isinstance(module, nn.Module)
        return module

    def forward(self, host: Any, note: Notes, *args: Any, **kwargs: Any) -> Any:
        """What the host's forward computes. It calls `note` with x and y of every weight."""
        return note.forward(*args, **kwargs)

    def shape(self, module: Any) -> tuple[int, int, int]:
        """(blocks, o, i) without the bias coordinate; (1, rows, i) of a lookup, (1, d, 1) of an
        elementwise layer."""
        o, i = module._parameters[self.attributes[0]].shape
        return 1, o, i

    def inputs(self, module: Any, x: Tensor) -> Sequence[Tensor | Rows]:
        """`a` of each block: (n, t, i), or `Rows` of a lookup. Middle axes of x are positions."""
        return [x.reshape(len(x), -1, x.shape[-1])]

    def add_gram(self, module: Any, x: Tensor, total: Tensor) -> Tensor | None:
        """Add Σ a aᵀ over all positions to the upper triangle of total (i, i) without forming `a`.

        Returns Σ a (i,), or None, with nothing added, if the kind has no such shortcut.
        """
        return None

    def gradients(self, module: Any, gradient: Tensor) -> list[Tensor]:
        """`s` (n, t, o) of each block."""
        return [gradient.reshape(len(gradient), -1, gradient.shape[-1])]

    def bias_gradient(self, module: Any, gradient: Tensor) -> Tensor:
        """`s` (n, t, o) of a bias that is a separate layer."""
        return torch.cat(self.gradients(module, gradient), -1)

    def matrices(self, module: Any, weight: Tensor) -> list[Tensor]:
        """A tensor shaped like the weight as matrices (o, i), one per block."""
        _, o, i = self.shape(module)
        return [weight.reshape(o, i)]

    def vectors(self, module: Any, bias: Tensor) -> list[Tensor]:
        """A tensor shaped like the bias as (o,) vectors, one per block."""
        return list(bias.reshape(self.shape(module)[0], -1))


#: a kind and the attributes that it tracks as a layer: weight and bias, or one of them
Part = tuple[Kind, str] | tuple[Kind, str, str]
KINDS: list[Kind] = []


def register(kind: Kind) -> None:
    """Track layers of this kind in every later Study. Kinds registered later take precedence."""
    KINDS.insert(0, kind)


def register_each(kind: type[Kind], *modules: type[nn.Module]) -> None:
    """Track several classes of modules by one kind."""
    for module in modules:
        register(type(module.__name__, (kind,), {"module": module})())


def kind_of(module: nn.Module) -> Kind | None:
    """The first kind that has the module's class and claims it, if any."""
    classes = type(module).__mro__

    def is_of(kind: Kind) -> bool:
        if kind.parameter is not None and kind.parameter not in module._parameters:
            return False
        if isinstance(kind.module, type):
            return kind.module in classes
        return any(fnmatchcase(base.__name__, name) for base in classes for name in kind.module)

    return next((kind for kind in KINDS if is_of(kind) and kind.claims(module)), None)


def own_forward(module: nn.Module, base: type[nn.Module] | tuple[str, ...]) -> str | None:
    """Why a module may compute something else than its base class; None if it does not."""
    methods = "forward", "_conv_forward"
    if not isinstance(base, type) or base is nn.Module:
        return None
    if all(getattr(type(module), m, None) is getattr(base, m, None) for m in methods):
        return None
    return f"{type(module).__name__} is a subclass of {base.__name__} with its own forward"


# --- layers of a kind -----------------------------------------------------------------------------

#: inputs or outputs of a matrix, above which it is cut into blocks, so that covariances and their
#: eigendecompositions stay small
WIDEST = 2**14


@dataclass(frozen=True)
class ParameterBlock:
    """One (o, i) matrix of parameters, its bias as a last column."""

    name: str
    o: int
    i: int  # without the bias coordinate
    bias: bool
    parameter: str  # the weight's name in the model
    rows: bool = False  # each row has its own curvature: outputs have no eigenbasis
    lookup: bool = False  # `s` is `Rows` and nothing else
    group: int = 0  # of the kind's blocks, the one that this is (a part of)
    row: int = 0  # where the part begins
    column: int = 0

    @property
    def tied(self) -> bool:
        """Whether its weight is used as a matrix and as a table (a head and an embedding)."""
        return self.rows and not self.lookup and not self.diagonal

    @property
    def diagonal(self) -> bool:
        """Whether there is no eigenbasis at all: rows of one number."""
        return self.rows and self.width == 1

    @property
    def width(self) -> int:
        """Columns, the bias included."""
        return self.i + self.bias

    @property
    def shape(self) -> tuple[int, int]:
        return self.o, self.width

    @property
    def size(self) -> int:
        return self.o * self.width

    def inputs_in(self, parts: Sequence[Any]) -> Any:
        """This block's part of the inputs (n, t, i) of a kind's blocks."""
        part = parts[self.group]
        return part if self.rows else _narrowed(part, 2, self.column, self.i)

    def slopes_in(self, parts: Sequence[Tensor]) -> Tensor:
        """This block's part of the output gradients (n, t, o) of a kind's blocks."""
        part = parts[self.group]
        return part if self.rows else _narrowed(part, 2, self.row, self.o)

    def matrix_in(self, parts: Sequence[Tensor]) -> Tensor:
        """This block's part of matrices (o, width), one for each of a kind's blocks."""
        rows = _narrowed(parts[self.group], 0, self.row, self.o)
        return _narrowed(rows, 1, self.column, self.width)


def _narrowed(x: Tensor, axis: int, start: int, length: int) -> Tensor:
    """A part of a tensor; a tensor that is the part, as it is."""
    return x if x.shape[axis] == length else x.narrow(axis, start, length)


@dataclass(eq=False)
class TrackedLayer:
    """A tracked layer: the modules that use its parameters, each with its kind, and its blocks.

    Attributes:
        weight, bias: names of the parameters in the model.
        uses: the modules. Several share the parameters; a lookup and a matrix may share a weight.
        shared: whether each call has one output for all examples of a batch (a table of positions),
            and of which shape: "row", one row of the batch; "free", any (biases of attention).
        idle: whether the model's outputs do not depend on some of its calls, such as those from
            which DoRA computes a norm. They are left out.
        windows: how many rows of its input each example has, one after another: windows of an
            image.
    """

    name: str
    weight: str
    bias: str | None
    uses: list[tuple[nn.Module, Kind]] = field(default_factory=list)
    shared: Literal["row", "free"] | None = None
    idle: bool = False
    windows: int = 1

    @property
    def individual(self) -> bool:
        """Whether the model computes with one value for each example instead of one for all."""
        return bool(self.shared) or self.uses[0][1].seen in ("copies", "forward")

    @cached_property
    def blocks(self) -> list[ParameterBlock]:
        module, kind = self.uses[0]
        groups, o, i = kind.shape(module)
        forms, bias = {kind.form for _, kind in self.uses}, self.bias is not None
        if kind.form == "elementwise":  # weight and bias in one column
            o, bias = o * len(self.parameter_names()), False
        split, lookup = forms == {"matrix"}, forms == {"lookup"}
        places = [
            (g, row, column)
            for g in range(groups)
            for row in (_cuts(o) if split else [(0, o)])
            for column in (_cuts(i) if split else [(0, i)])
        ]
        blocks = []
        for k, (group, (row, height), (column, width)) in enumerate(places):
            name = self.name if len(places) == 1 else f"{self.name}[{k}]"
            last = bias and column + width == i
            form = self.weight, not split, lookup
            blocks.append(ParameterBlock(name, height, width, last, *form, group, row, column))
        return blocks

    def parameter_names(self) -> list[str]:
        return [self.weight] + ([self.bias] if self.bias else [])

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by name."""
        of_module = self.uses[0][0]._parameters
        named = {name: of_module[name.rpartition(".")[2]] for name in self.parameter_names()}
        return {name: p for name, p in named.items() if p is not None}

    def matrices(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Tensors shaped like the parameters, by name, as a matrix (o, width) for each block."""
        module, kind = self.uses[0]
        weights = kind.matrices(module, tensors[self.weight])
        if self.bias is not None:
            columns = [v.unsqueeze(1) for v in kind.vectors(module, tensors[self.bias])]
            axis = 0 if kind.form == "elementwise" else 1
            weights = [torch.cat(pair, axis) for pair in zip(weights, columns, strict=True)]
        return [block.matrix_in(weights) for block in self.blocks]


def _cuts(size: int) -> list[tuple[int, int]]:
    """(start, length) of nearly equal parts of an axis, each at most WIDEST long."""
    count = -(-size // WIDEST)
    starts = [size * k // count for k in range(count + 1)]
    return [(start, stop - start) for start, stop in pairwise(starts)]
