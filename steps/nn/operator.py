"""The quantized product as operators of torch: `torch.ops.quantized_gemm.linear` and `.product`.

torch.compile sees one node whose shape and dtype it knows without running it. `linear` has a
gradient; `product` is the same without one. `QuantLinear` calls them where torch compiles, traces
or transforms. Elsewhere on a GPU it calls `multiply`, or `Multiplied` where there is a gradient,
which do the same in less host time. The decoder always calls `multiply`.

`multiply` goes the way of `steps.product`: a Request for x, `choose`, `prepare`, a call. What the
kernel does not read, write or add, torch does (`Request.caller_casts`): it copies an x that is not
contiguous, not aligned to 16 bytes or of a dtype that no kernel of this GPU reads, and adds a bias
or casts y where the kernel does not.

torch allocates the workspace on the current stream, in a CUDA graph in the pool of that graph.
Counters are kept from call to call (`counters`). Nothing waits for the GPU.

The gradient of x is `linear_input_gradient`: packed weights are unpacked to floats on the GPU
(`steps.kernels.unpack`), and torch multiplies by these. On a CPU the weights are dequantized at
every call and torch multiplies: the reference, and slow.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from qformats import FORMATS, Format
from steps.compile import kernel_cache
from steps.compile.compiler import architecture, before_compiling, signature_of
from steps.compile.dry_run import ArrayType
from steps.contract import FLOATS, ceil_div
from steps.kernels.parts.activations.layouts import GATED
from steps.kernels.unpack import HALF_K
from steps.product.choice import Choice, Request, choose
from steps.product.operands import ALIGNMENT
from steps.product.prepared import Kept, Prepared, prepare
from steps.product.rows import prepared_columns

try:
    import torch
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "steps.nn.linear needs torch, an extra of this project: pip install torch", name="torch"
    ) from missing

from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from torch.autograd import Function
else:
    Function = torch.autograd.Function

try:
    from torch._C import (
        _get_tracing_state,
        _len_torch_dispatch_stack,
        _len_torch_function_stack,
    )
    from torch._C._functorch import peek_interpreter_stack
except ImportError:  # another version of torch, of which this is not known: `runs_at_once` says no
    PLAIN: tuple[Any, ...] = ()

    def peek_interpreter_stack() -> bool:
        return True
else:
    PLAIN = (Tensor, Parameter)
"""Classes of tensors whose operators torch just runs; a subclass may override them."""

NAMES: Final = {getattr(torch, name): name for name in FLOATS}
"""The dtypes that activations may have, and their names."""

DTYPES: Final = {name: dtype for dtype, name in NAMES.items()}

PREPARED: Final = 512
"""Prepared products that are kept, those used last: some KB of host memory each, none of the GPU's.
Kernels stay loaded for good, so a CUDA graph may outlive the `Prepared` that it was captured
with."""

CALLS: Final = 32
"""Shapes of x for which a layer keeps what `multiply` worked out, those used last."""

PANEL_BYTES: Final = 1 << 28
"""Of weights that are unpacked at once for a gradient: all of them in most layers. Panels that the
L2 holds are no faster, as products with few columns leave SMs idle: 1.4x as slow at 512 tokens."""

ROWS: Final = 512
"""Rows dequantized at once on a CPU: 8 MB of float32 at K = 4096."""


def _on_cpu(
    x: Tensor,
    bias: Tensor | None,
    blocks: Tensor | None,
    weights: list[Tensor],
    fast: list[Tensor],
    packings: str,
    accuracy: str,
    format: str,
    n: int,
    k: int,
    invariant: bool = False,
    wide: bool = False,
) -> Tensor:
    """y[..., N] = x[..., K] @ dequantize(W)[N, K]^T + bias[N], in the dtype of x.

    x        : float32, float16 or bfloat16, any batch dimensions, contiguous or not.
    blocks   : uint8 [N, bytes of a row], on the CPU: needed for products and gradients there.
    weights, fast : on a GPU the arrays of the one or two packings that `packings` names, such as
               "tiles" or "tiles byte_tiles".
    accuracy, invariant : see `steps.gemm`.
    wide     : y is float32 whatever x is, for sums that are not complete.
    Raises TypeError for another dtype of x, ValueError for a last dimension that is not K.
    """
    _require(x, k)
    rows = x.reshape(x.numel() // k, k).to(torch.float32)
    y = rows.new_empty((*x.shape[:-1], n))
    columns = y.view(len(rows), n)
    with torch.autocast("cpu", enabled=False):  # which would round both
        for first, part in _dequantized(blocks, format):
            columns[:, first : first + len(part)] = rows @ part.T
    return finished(y, torch.float32 if wide else x.dtype, bias)


# This and `_shape_of` take the arguments of `_on_cpu`, in their order. torch may leave out the last
# ones where they are their defaults.
def _on_gpu(x: Tensor, bias: Tensor | None, _blocks: Tensor | None, *rest: Any) -> Tensor:
    weights, fast, packings, accuracy, format, n, k, *options = rest
    _require(x, k)
    packed = by_packing(packings, weights, fast)
    held = Weights(format, n, k, accuracy, packed, *options[:1])
    return multiply(x, bias, held, torch.float32 if any(options[1:]) else None)


def _shape_of(x: Tensor, *rest: Any) -> Tensor:
    n, k, *options = rest[7:]
    _require(x, k)
    return x.new_empty((*x.shape[:-1], n), dtype=torch.float32 if any(options[1:]) else x.dtype)


linear = torch.library.custom_op(
    "quantized_gemm::linear", _on_cpu, mutates_args=(), device_types="cpu"
)
linear.register_kernel("cuda")(_on_gpu)
linear.register_fake(_shape_of)

_PRODUCT: Final = "quantized_gemm::product"
torch.library.define(
    _PRODUCT,
    torch.library.infer_schema(_on_cpu, mutates_args=()),
    tags=torch.Tag.pt2_compliant_tag,
)
for _device, _kernel in (("cpu", _on_cpu), ("cuda", _on_gpu)):
    torch.library.impl(_PRODUCT, _device, _kernel)
torch.library.register_fake(_PRODUCT, _shape_of)
product = torch.ops.quantized_gemm.product.default


@torch.library.custom_op(
    "quantized_gemm::linear_input_gradient", mutates_args=(), device_types="cpu"
)
def linear_input_gradient(
    gradient: Tensor,
    blocks: Tensor | None,
    weights: list[Tensor],
    packings: str,
    format: str,
    n: int,
    k: int,
) -> Tensor:
    """dX[..., K] = gradient[..., N] @ dequantize(W)[N, K], in the gradient's dtype, of `NAMES`.

    On a GPU W is unpacked from `weights` into a panel in the gradient's dtype, some columns at a
    time where it is large, and torch multiplies by the panel. Sums are whole, so the same gradient
    gives the same bits. float16 holds no weight beyond 65504, and below 2^-14 multiples of 2^-24.
    On a CPU W is dequantized from `blocks`, slowly. Other arguments: see `_on_cpu`.
    """
    _require(gradient, n, "gradient")
    rows = gradient.reshape(-1, n).to(torch.float32)
    total = rows.new_zeros((len(rows), k))
    with torch.autocast("cpu", enabled=False):
        for first, part in _dequantized(blocks, format):
            total += rows[:, first : first + len(part)] @ part
    return total.to(gradient.dtype).reshape(*gradient.shape[:-1], k)


@linear_input_gradient.register_kernel("cuda")
def _input_gradient_on_gpu(gradient: Tensor, _blocks: Tensor | None, *rest: Any) -> Tensor:
    weights, packings, format, n, k = rest
    _require(gradient, n, "gradient")
    rows = gradient.reshape(-1, n).contiguous()
    m, layout = len(rows), packings.partition(" ")[0]
    total = rows.new_empty((m, k))
    if m:
        width = panel_width(n, k, rows.itemsize) if layout == "tiles" else k
        panel = rows.new_empty((n * width,))
        with torch.autocast("cuda", enabled=False):
            for first in range(0, k, width):
                columns = total[:, first : first + width]
                part = panel[: n * columns.shape[1]].view(n, columns.shape[1])
                unpack(weights, layout, format, k, first, part)
                torch.mm(rows, part, out=columns)
    return total.view(*gradient.shape[:-1], k)


@linear_input_gradient.register_fake
def _shape_of_gradient(gradient: Tensor, *rest: Any) -> Tensor:
    n, k = rest[-2:]
    _require(gradient, n, "gradient")
    return gradient.new_empty((*gradient.shape[:-1], k))


def panel_width(n: int, k: int, itemsize: int) -> int:
    """Columns of W that are unpacked at once: K, or equal shares of it in panels of about
    `PANEL_BYTES`, a multiple of `HALF_K`."""
    share = ceil_div(k, ceil_div(n * k * itemsize, PANEL_BYTES))
    return min(k, ceil_div(share, HALF_K) * HALF_K)


@torch.library.custom_op("quantized_gemm::dequantize", mutates_args=(), device_types="cpu")
def dequantize(
    blocks: Tensor | None,
    weights: list[Tensor],
    packings: str,
    format: str,
    n: int,
    k: int,
    dtype: torch.dtype,
) -> Tensor:
    """The weights [N, K] in a dtype: of `blocks` on the CPU, there; of `weights` on a GPU, there,
    as kernels multiply them (`steps.kernels.unpack`). Arguments: see `_on_cpu`."""
    assert blocks is not None
    fmt = FORMATS[format]
    return torch.from_numpy(fmt.dequantize(host_blocks(blocks, fmt))).to(dtype)


@dequantize.register_kernel("cuda")
def _dequantize_on_gpu(_blocks: Tensor | None, weights: list[Tensor], *rest: Any) -> Tensor:
    packings, format, n, k, dtype = rest
    own = dtype if dtype in NAMES else torch.float32
    w = torch.empty((n, k), dtype=own, device=weights[0].device)
    unpack(weights, packings.partition(" ")[0], format, k, 0, w)
    return w.to(dtype)


@dequantize.register_fake
def _shape_of_weights(blocks: Tensor | None, weights: list[Tensor], *rest: Any) -> Tensor:
    n, k, dtype = rest[-3:]
    device = weights[0].device if blocks is None else blocks.device
    return torch.empty((n, k), dtype=dtype, device=device)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, blocks, weights, fast, packings, _accuracy, format_name, n, k, *_options = inputs
    if ctx.needs_input_grad[0]:
        _keep(ctx, x, blocks, weights)
    ctx.bias, ctx.dtype = bias is not None and bias.dtype, x.dtype
    ctx.of = packings, format_name, n, k
    ctx.arrays, ctx.rest = (len(weights), len(fast)), inputs[2:]


def _keep(ctx: Any, like: Tensor, blocks: Tensor | None, weights: list[Tensor]) -> None:
    """Save what W is made of again where `like` is: on a GPU the packed weights, else the
    blocks."""
    ctx.is_packed = like.is_cuda
    if blocks is None and not ctx.is_packed:
        raise ValueError("a gradient with respect to x needs the blocks on the CPU: pass them")
    ctx.save_for_backward(*(weights if ctx.is_packed else [blocks]))


def _kept(ctx: Any) -> tuple[Tensor | None, list[Tensor]]:
    """(blocks, weights), one of which is missing."""
    held = list(ctx.saved_tensors)
    return (None, held) if ctx.is_packed else (held[0], [])


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """With respect to x and bias; the blocks are constant."""
    back = InputGradient.apply if is_transformed() else linear_input_gradient
    of_x = of_bias = None
    if ctx.needs_input_grad[0]:
        of_x = _of_x(ctx, gradient, back, (*_kept(ctx), *ctx.of))
    if ctx.needs_input_grad[1]:
        of_bias = _of_bias(ctx, gradient)
    weights, fast = ([None] * count for count in ctx.arrays)
    # torch leaves out last arguments that are their defaults, and wants no gradient of them
    constants = (None,) * (len(ctx.needs_input_grad) - 5)
    return of_x, of_bias, None, weights, fast, *constants


def _of_x(ctx: Any, gradient: Tensor, back: Any, of: tuple[Any, ...]) -> Tensor:
    # a float32 y of x in 16 bits is rounded to these further on: so is what comes back from it
    of_x: Tensor = back(gradient.to(ctx.dtype), *of)
    return of_x


def _of_bias(ctx: Any, gradient: Tensor) -> Tensor:
    rows = gradient.reshape(-1, gradient.shape[-1])
    return rows.sum(0, dtype=torch.float32).to(ctx.bias)


linear.register_autograd(_gradients, setup_context=_remember)


def _remember_weights(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gradient, blocks, weights, *of = inputs
    _keep(ctx, gradient, blocks, weights)
    ctx.of, ctx.arrays = of, len(weights)


def _gradients_of_gradient(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
    """Of dX = dY @ W with respect to dY, from `upstream` [..., K]: by a whole float matrix, so that
    torch can differentiate again."""
    w = dequantize(*_kept(ctx), *ctx.of, torch.float32)
    with torch.autocast(upstream.device.type, enabled=False):
        of_gradient = upstream.to(torch.float32) @ w.T
    return of_gradient.to(upstream.dtype), None, [None] * ctx.arrays, *(None,) * len(ctx.of)


linear_input_gradient.register_autograd(_gradients_of_gradient, setup_context=_remember_weights)


# --- under transforms -----------------------------------------------------------------------------


def is_transformed() -> bool:
    """Whether a transform of torch.func (vmap, jvp, grad, ...) or forward-mode differentiation is
    active, for which the operators have no rules: `Linear` and `InputGradient` have."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


# torch.compiler.assume_constant_result, which would import torch's compiler: that guards on both
is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Linear(Function):
    """`linear`, with rules for vmap and forward mode; arguments are those of `linear`, all of them.

    Each rule calls `apply` again, for the transforms around the one that asks.
    """

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        return product(*inputs)

    setup_context = staticmethod(_remember)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        of_x, of_bias, *_ = _gradients(ctx, gradient)
        return of_x, of_bias, *(None,) * len(ctx.rest)

    @staticmethod
    def jvp(ctx: Any, x: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
        y = Linear.apply(x, None, *ctx.rest)
        return y if bias is None else (y + bias).to(y.dtype)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, bias: Tensor | None, *rest: Any) -> Any:
        of_x, of_bias, *others = in_dims
        if any(dim is not None for dim in tree_leaves(others)):
            raise ValueError(
                "vmap over the blocks of a QuantLinear: only x and bias can be batched"
            )
        if of_x is not None:
            x = x.movedim(of_x, 0)
        if of_bias is None:
            return Linear.apply(x, bias, *rest), 0
        assert bias is not None
        y = Linear.apply(x, None, *rest[:-1], True)
        y = y if of_x is not None else y.unsqueeze(0)
        bias = bias.movedim(of_bias, 0)
        bias = bias.reshape(len(bias), *(1,) * (y.ndim - 2), bias.shape[-1])
        return (y + bias).to(torch.float32 if rest[-1] else x.dtype), 0


class InputGradient(Function):
    """`linear_input_gradient`, as `Linear` is `linear`."""

    @staticmethod
    def forward(gradient: Tensor, *rest: Any) -> Tensor:
        return linear_input_gradient(gradient, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _remember_weights(ctx, inputs, output)
        ctx.rest = inputs[1:]

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        of_gradient, *_ = _gradients_of_gradient(ctx, upstream)
        return of_gradient, *(None,) * len(ctx.rest)

    @staticmethod
    def jvp(ctx: Any, gradient: Tensor, *_: Any) -> Tensor:
        return InputGradient.apply(gradient, *ctx.rest)

    @staticmethod
    def vmap(info: Any, in_dims: Any, gradient: Tensor, *rest: Any) -> Any:
        return InputGradient.apply(gradient.movedim(in_dims[0], 0), *rest), 0


# --- on a GPU -------------------------------------------------------------------------------------


def by_packing(
    packings: str, weights: Sequence[Tensor], fast: Sequence[Tensor]
) -> dict[str, Sequence[Tensor]]:
    """The arrays of each packing by its name."""
    return dict(zip(packings.split(), (weights, fast), strict=False))


class Weights:
    """Packed weights [N, K] as `multiply` takes them, on one GPU. It keeps the addresses of the
    arrays, so whoever has the arrays must keep them. packed: name of a layout -> its arrays.
    accuracy, invariant, family: see `steps.gemm`. asked: the `Request` but for M and dtypes."""

    __slots__ = ("addresses", "asked", "calls", "device", "first", "key", "types")

    def __init__(
        self,
        format: str,
        n: int,
        k: int,
        accuracy: str,
        packed: Mapping[str, Sequence[Tensor]],
        invariant: bool = False,
        family: str | None = None,
    ) -> None:
        self.asked = request_of(format, n, k, accuracy, tuple(packed), invariant, family)
        self.addresses = {
            name: tuple(array.data_ptr() for array in arrays) for name, arrays in packed.items()
        }
        self.types = {name: array_types(arrays) for name, arrays in packed.items()}
        self.first = next(iter(packed.values()))[0]
        self.device = self.first.get_device()
        self.key = self.asked, self.device
        self.calls: Kept[_Call] = Kept(CALLS)

    def choice(self, m: int, a: str, c: str, bias: str | None = None) -> Choice:
        """The kernel for m tokens. a, c, bias: dtypes of x, y and of a bias; a may be "gated".
        Where the kernel does not read, write or add them, `multiply` does."""
        return _choice(self.key, m, a, c, bias)


def request_of(
    format: str,
    n: int,
    k: int,
    accuracy: str,
    layouts: tuple[str, ...],
    invariant: bool = False,
    family: str | None = None,
) -> Request:
    """What `multiply` asks of packed weights, but for M and dtypes."""
    return Request(
        format, 0, n, k, accuracy=accuracy, family=family, layouts=layouts,
        invariant=invariant, caller_casts=True,
    )  # fmt: skip


def _choice(key: tuple[Request, int], m: int, a: str, c: str, bias: str | None) -> Choice:
    """key: a request, and the GPU that it is for, which is the current one."""
    return _choices.of(
        (key, m, a, c, bias),
        lambda: choose(replace(key[0], m=m, a=a, c=c, bias=bias), _machine()),
    )


class _Call:
    """What `multiply` keeps for one shape and dtype of x: the prepared launches, the addresses of
    the weights that they read, the dtype that x must have, and shape and dtypes of y."""

    __slots__ = (
        *("adds_bias", "arrays", "dtype", "made", "nbytes", "reads", "shape", "strides"),
        *("writes", "zeroed"),
    )

    def __init__(self, x: Tensor, bias: Any, w: Weights, dtype: Any, gated: bool) -> None:
        asked, columns = w.asked, w.asked.k * (1 + gated)
        _require(x, columns)
        self.shape = shape = (*x.shape[:-1], asked.n)
        self.strides = tuple(prod(shape[i:]) for i in range(1, len(shape) + 1))
        self.dtype = dtype or x.dtype
        of_bias = None if bias is None else NAMES.get(bias, "float32")
        self.made: Prepared | None = None
        if m := x.numel() // columns:
            a = GATED if gated else NAMES[x.dtype]
            choice, self.made = prepared(w, m, a, NAMES[self.dtype], of_bias, x)
            self.arrays, self.adds_bias = w.addresses[choice.layout], choice.bias is not None
            self.reads, self.writes = DTYPES[choice.reading.dtype], DTYPES[choice.writes]
            self.zeroed, self.nbytes = self.made.zeroed, self.made.nbytes


def multiply(
    x: Tensor, bias: Tensor | None, w: Weights, dtype: Any = None, gated: bool = False
) -> Tensor:
    """y[..., N] = x[..., K] @ dequantize(W)^T + bias on the weights' GPU, in a dtype, by default
    that of x.

    It is `product` without torch's dispatcher. x [..., K] is on that GPU, in one of `NAMES`.
    gated: x is float16 [..., 2 K], K gates and K ups, and silu(gate) * up is multiplied; only for
    weights whose `choice` reads it so. Every line counts here: a model calls it for each product,
    and its Python may take longer than the GPU.
    """
    if w.device != current_device():
        with torch.cuda.device(w.device):
            return multiply(x, bias, w, dtype, gated)
    key = (x.shape, x.dtype, dtype, gated, bias if bias is None else bias.dtype)
    call = w.calls.get(key) or w.calls.put(key, _Call(x, key[4], w, dtype, gated))
    if (made := call.made) is None:
        return x.new_empty(call.shape, dtype=call.dtype)
    at = x.data_ptr()
    if x.dtype is not call.reads or at % ALIGNMENT or not x.is_contiguous():
        x = _readable(x, call.reads)  # held until the launches are queued
        at = x.data_ptr()
    y = new_array(call.shape, call.strides, call.writes)
    stream, arrays, zeros, workspace = current_stream(w.device), call.arrays, 0, 0
    if call.zeroed:
        zeros = counters(call.zeroed, x, stream).data_ptr()
    if call.nbytes:
        room = new_array((call.nbytes,), (1,), torch.uint8)
        workspace = room.data_ptr()
    if bias is not None:
        bias = _addable(bias, w)
        if call.adds_bias:
            arrays, bias = (*arrays, bias.data_ptr()), None
    made((at, y.data_ptr(), *arrays), zeros, workspace, stream)
    return y if bias is None and call.writes is call.dtype else finished(y, call.dtype, bias)


class Multiplied(Function):
    """`multiply` with a gradient: `linear` without torch's dispatcher, which takes the host longer
    than many a product takes the GPU. of: `QuantLinear.unpacked_from`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Any, w: Weights, of: Any, dtype: Any) -> Tensor:
        ctx.bias, ctx.dtype, ctx.of = bias is not None and bias.dtype, x.dtype, of
        return multiply(x, bias, w, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            # the operator, where torch is to differentiate once more
            back = linear_input_gradient if torch.is_grad_enabled() else _input_gradient_on_gpu
            of_x = _of_x(ctx, gradient, back, ctx.of)
        if ctx.needs_input_grad[1]:
            of_bias = _of_bias(ctx, gradient)
        return of_x, of_bias, None, None, None


def launch(made: Prepared, arrays: Sequence[Tensor]) -> None:
    """Queue launches of an operation between products (`steps.decoder.kernel_operations`) on the
    current stream of the arrays' GPU."""
    first, zeros, workspace = arrays[0], 0, 0
    stream = current_stream(first.get_device())
    if made.zeroed:
        zeros = counters(made.zeroed, first, stream).data_ptr()
    if made.nbytes:
        room = first.new_empty((made.nbytes,), dtype=torch.uint8)
        workspace = room.data_ptr()
    made([one.data_ptr() for one in arrays], zeros, workspace, stream)


def unpack(
    weights: Sequence[Tensor], layout: str, format: str, k: int, first: int, panel: Tensor
) -> None:
    """Queue what fills panel[N, width] with columns first, first + 1, ... of packed weights [N, K],
    see `steps.kernels.unpack`."""
    device, arrays = panel.get_device(), (*weights, panel)
    if device != current_device():
        with torch.cuda.device(device):
            unpack(weights, layout, format, k, first, panel)
        return

    def loaded() -> Prepared:
        with _loading_allowed():
            return prepared_columns(layout, format, k, first, array_types(arrays))

    key = layout, format, k, first, panel.shape, panel.dtype, device
    launch(_unpacking.of(key, loaded), arrays)


def _addable(bias: Tensor, w: Weights) -> Tensor:
    """A bias [N] on the weights' GPU as kernels read it: contiguous, in one of `NAMES`."""
    if bias.shape != (w.asked.n,) or bias.get_device() != w.device:
        raise ValueError(
            f"bias must have shape [{w.asked.n}] and be on GPU {w.device} as x is, got "
            f"{list(bias.shape)} on {bias.device}"
        )
    return (bias if bias.dtype in NAMES else bias.to(torch.float32)).contiguous()


def _readable(x: Tensor, dtype: Any) -> Tensor:
    """x as kernels read it: contiguous, of this dtype, in 16 bits at a multiple of 16 bytes."""
    if x.dtype is not dtype:
        return x.to(dtype, memory_format=torch.contiguous_format)
    a = x if x.is_contiguous() else x.contiguous()
    return a.clone() if a.data_ptr() % ALIGNMENT and dtype is not torch.float32 else a


_choices: Kept[Choice] = Kept(PREPARED)
_prepared: Kept[tuple[Choice, Prepared]] = Kept(PREPARED)
_unpacking: Kept[Prepared] = Kept(PREPARED)


def prepared(
    w: Weights, m: int, a: str, c: str, bias: str | None = None, x: Tensor | None = None
) -> tuple[Choice, Prepared]:
    """`Weights.choice`, and its launches prepared on the current GPU, which must be that of the
    weights. Kernels not used before are compiled and loaded.

    x: the m tokens. Where they are prompts, kernels for the tokens that follow are compiled
    meanwhile (`_compile_meanwhile`).

    RuntimeError where a kernel cannot be loaded during a capture into a CUDA graph; it says what to
    do.
    """
    return _prepared.of((w.key, m, a, c, bias), lambda: _loaded(w, m, a, c, bias, x))


def _loaded(
    w: Weights, m: int, a: str, c: str, bias: str | None, x: Tensor | None
) -> tuple[Choice, Prepared]:
    with _loading_allowed():
        try:
            choice = w.choice(m, a, c, bias)
            with before_compiling(partial(_compile_meanwhile, choice, w, x)):
                return prepare(choice, w.types[choice.layout])
        except (TypeError, ValueError):
            raise  # no kernel can do this
        except Exception as error:  # Numba and the driver have many types for it
            if not is_capturing():
                raise
            raise RuntimeError(
                f"kernels for {m} tokens could not be loaded while a CUDA graph is captured: "
                f"multiply {m} tokens once before the capture ({error})"
            ) from error


_layers: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
"""The layers (`QuantLinear`) that were moved to a GPU, in their order."""

_looked_for: set[Any] = set()
"""Of which products `first_products_follow` knows whether their kernels are there."""


def first_products_follow(layer: Any) -> None:
    """A layer (`QuantLinear`) was moved to a GPU, and it and those before will soon multiply. Where
    a kernel for one token is not there, start the processes that will compile it: that takes
    seconds, in which the other layers are moved."""
    _layers[layer] = None
    key, dtype = layer.key, NAMES.get(layer.dtype, "float32")
    if (key, dtype) in _looked_for:
        return
    _looked_for.add((key, dtype))
    with torch.cuda.device(key[1]), suppress(Exception):  # of any type: who calls the layer gets it
        if not is_compiled(_choice(key, 1, dtype, dtype, None)):
            from steps.compile.parallel_compile import start

            start(_machine())


def is_compiled(choice: Choice) -> bool:
    """Whether the cache has all kernels of a product on the current GPU."""
    arch = architecture(_machine().cc)
    wanted = ((one.kernel, signature_of(one.args)) for one in choice.launches())
    return all(kernel_cache.find(*one, arch) for one in wanted)


def _compile_meanwhile(first: Choice, w: Weights, x: Tensor | None) -> None:
    """Let other processes compile what a product needs that is the first of its kind, and what the
    other layers of the GPU need for as many tokens; then, where x is prompts [..., tokens, K], what
    they need for one token of each. One after another these take as long as all of them."""
    from steps.compile.parallel_compile import compile_meanwhile  # not where nothing is missing

    asked = first.request
    wanted = {(w.key, asked.m, asked.bias): first}
    tokens = [asked.m]
    if x is not None and x.ndim > 2 and x.shape[-2] > 1 and not _learns(x):
        tokens.append(prod(x.shape[:-2]))
    layers = [
        (one.key, None if one.bias is None else NAMES.get(one.bias.dtype, "float32"))
        for one in list(_layers)
        if one.packings and one.sharding is None
    ]
    for m, (key, bias) in itertools.product(tokens, layers):
        if key[1] == w.device and (key, m, bias) not in wanted:
            with suppress(ValueError):  # which is for who calls this layer
                wanted[key, m, bias] = _choice(key, m, asked.a, asked.c, bias)
    compile_meanwhile(wanted.values(), _machine())


def _learns(x: Tensor) -> bool:
    """Whether gradients are made, so that no tokens follow."""
    return torch.is_grad_enabled() or x.requires_grad  # `Multiplied` has turned the first off


def array_types(arrays: Sequence[Tensor]) -> tuple[ArrayType, ...]:
    """(shape, dtype) of each tensor, as a dry run takes them."""
    return tuple((tuple(one.shape), str(one.dtype).removeprefix("torch.")) for one in arrays)


RESERVE: Final = 1 << 20
"""Bytes of zeros that are set aside on a device, from which counters are taken."""

COUNTERS: Final = 1 << 12
"""Least bytes of counters that are taken at once; doubled until they suffice."""

_reserves: dict[Any, Tensor] = {}
_counters: dict[tuple[int, int, int], Tensor] = {}
_taking = threading.Lock()


def reserve_counters(device: Any, least: int = RESERVE // 2) -> None:
    """Set zeros aside on a device that has fewer than `least` bytes of them left; only then it
    waits for the GPU."""
    with _taking:
        if device not in _reserves or len(_reserves[device]) < least:
            _reserves[device] = torch.zeros(max(RESERVE, least), dtype=torch.uint8, device=device)
            torch.cuda.synchronize(device)


def counters(size: int, like: Tensor, stream: int) -> Tensor:
    """At least `size` bytes that are zero and that launches on a stream leave zero.

    Launches of a stream run one after another, so all of them share counters. A CUDA graph may run
    beside them, so each capture gets counters of its own, which are not handed out again. If the
    reserve is used up during a capture, the graph itself sets memory to zero.
    """
    capture = _capture_of(stream)
    key = (like.get_device(), stream, capture)
    found = _counters.get(key)
    if found is not None and found.numel() >= size:
        return found
    taken = COUNTERS
    while taken < size:
        taken *= 2
    if not capture:
        reserve_counters(like.device, taken)
    with _taking:
        left = _reserves.get(like.device)
        if left is not None and len(left) >= taken:
            found, _reserves[like.device] = left[:taken], left[taken:]
            _counters[key] = found
            return found
    return like.new_zeros((size,), dtype=torch.uint8)


def _capture_of(stream: int) -> int:
    """The driver's number of the capture that the current stream is in; 0 for none."""
    if not is_capturing():
        return 0
    from cuda.bindings import driver

    _, _, number, *_ = driver.cuStreamGetCaptureInfo(stream)
    return int(number)


new_array = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None) or (
    lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device="cuda")
)
"""(shape, strides, dtype) -> a tensor on the current GPU, its values unset. Code of torch's
compiler allocates this way too: past the dispatcher, which takes the host 1.5 us more."""

current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""The number of the GPU that launches go to."""

current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda device: torch.cuda.current_stream(device).cuda_stream
)
"""The handle of the current stream of a GPU, by its number."""

is_capturing = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
"""Whether the current stream is captured into a graph. The public functions for this and the two
above take the host up to 2 us."""


is_any_autocast_enabled = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
"""Whether autocast is on for some device."""


def runs_at_once(x: Tensor) -> bool:
    """Whether torch would just run `product` of x: no mode, trace or transform that intercepts
    operators is active. torch.compile is not asked about here."""
    return (
        type(x) in PLAIN
        and not _len_torch_dispatch_stack()
        and not _len_torch_function_stack()
        and peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and _get_tracing_state() is None
        and not x.is_neg()
    )


def capability(device: Any) -> tuple[int, int]:
    """The compute capability of a GPU."""
    major, minor = torch.cuda.get_device_capability(device)
    return int(major), int(minor)


def upload(array: np.ndarray, device: Any) -> Tensor:
    """A copy of an array on a GPU, which any stream may read when this returns."""
    copy = torch.from_numpy(np.ascontiguousarray(array)).to(device)
    torch.cuda.synchronize(device)
    return copy


def _machine() -> Any:
    from steps.driver.machines import Gpu

    return Gpu()


@contextmanager
def _loading_allowed() -> Iterator[None]:
    """Lets this thread load kernels while some stream is captured.

    torch captures in a mode in which no thread may make a call that could wait for the GPU. Loading
    touches no stream, so this thread may.
    """
    from cuda.bindings import driver

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    _, before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)


# --- on any device --------------------------------------------------------------------------------


def _require(x: Tensor, k: int, name: str = "x") -> None:
    if x.dtype not in NAMES:
        raise TypeError(f"{name} must be float32, float16 or bfloat16, got {x.dtype}")
    if x.ndim < 1 or x.shape[-1] != k:
        raise ValueError(f"{name} must have shape [..., {k}], got {list(x.shape)}")


def finished(y: Tensor, dtype: Any, bias: Tensor | None) -> Tensor:
    """y plus bias, in a dtype: the sum is rounded once. It may be written over y."""
    if bias is None:
        return y if y.dtype is dtype else y.to(dtype)
    return torch.add(y, bias, out=y if y.dtype is dtype else y.new_empty(y.shape, dtype=dtype))


def host_blocks(blocks: Tensor, fmt: Format) -> np.ndarray:
    """A tensor of bytes as structured[N, K/32], not copied."""
    # not by .numpy(), after which torch cannot free the memory, as FSDP does after a forward
    view: np.ndarray = np.from_dlpack(blocks).view(fmt.dtype)
    return view


def _dequantized(blocks: Tensor | None, format_name: str) -> Iterator[tuple[int, Tensor]]:
    """(first row, float32 [rows, K]) of all rows, a few at a time."""
    if blocks is None:
        raise ValueError("a product on the CPU needs the blocks: pass them")
    fmt = FORMATS[format_name]
    rows = host_blocks(blocks, fmt)
    for first in range(0, len(rows), ROWS):
        yield first, torch.from_numpy(fmt.dequantize(rows[first : first + ROWS]))
