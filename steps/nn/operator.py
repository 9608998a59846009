"""The quantized product as operators of torch: `torch.ops.quantized_gemm.linear` and `.product`.

What `torch.nn.functional.linear` is to a float matrix, for blocks; `steps.nn.linear.QuantLinear` calls
them. As a registered operator it is one node to torch.compile, which knows its shape and dtype
without running it. `linear` has a gradient; `product` is the same without one, and takes torch half
the time to call.

On a GPU one call is a cast of `x` to float32 (only for other dtypes, and not for float16 where the
step reads that; or a copy where it is not contiguous), zeros for the step's scratch memory if it
has any, one or two launches of a step, and for a bias or a dtype that the step does not write one
kernel of torch. All memory is torch's and of the stream that is current, so that calls on several
streams do not meet, and what is captured into a CUDA graph lies in the pool of that graph, for as
long as it lives. Nothing waits for the GPU.

On a CPU the weights are dequantized at every call and torch multiplies: the reference, and slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from qformats import FORMATS, Format
from steps.api.operands import stream_of
from steps.api.relocatable import Place, Relocatable
from steps.contract import Shape

try:
    import torch
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "steps.nn.linear needs torch, an extra of this project: pip install torch", name="torch"
    ) from missing

from torch import Tensor

FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
"""What activations may be."""

PLANS: Final = 512
"""Plans that are kept, of the shapes and token counts last used: some KB of host memory each, none
of the GPU's. Kernels stay loaded for good, so a graph outlives the plan that it was captured by."""

ROWS: Final = 512
"""Rows dequantized at once, where no GPU multiplies: 8 MB of float32 at K = 4096."""


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
) -> Tensor:
    """y[..., N] = x[..., K] @ dequantize(W)[N, K]^T + bias[N], in the dtype of x.

    x        : float32, float16 or bfloat16, any batch dimensions, contiguous or not.
    blocks   : uint8 [N, bytes of a row], on the CPU: needed there, and for a gradient anywhere.
    weights, fast : on a GPU the arrays of the one or two packings that `packings` names, such as
               "tiles" or "tiles byte_tiles".
    accuracy : see `steps.gemm`.
    TypeError or ValueError for an x that does not fit.
    """
    _require(x, k)
    rows = x.reshape(x.numel() // k, k).to(torch.float32)
    y = rows.new_empty((len(rows), n))
    for first, part in _dequantized(blocks, format):
        y[:, first : first + len(part)] = rows @ part.T
    return _finished(y.reshape(*x.shape[:-1], n), x, bias)


# Both are called with the arguments of `_on_cpu`, in their order.
def _on_gpu(x: Tensor, bias: Tensor | None, _blocks: Tensor | None, *given: Any) -> Tensor:
    weights, fast, packings, accuracy, format, n, k = given
    _require(x, k)
    shape = (*x.shape[:-1], n)
    if not (m := x.numel() // k):
        return x.new_empty(shape)
    offered = by_packing(packings, weights, fast)
    half = bias is None and x.dtype is torch.float16
    dtype = "float16" if x.dtype is torch.float16 else "float32"
    with torch.cuda.device(x.device):
        made = planned(format, (m, n, k), offered, accuracy, half, x.device, dtype)
        a = x.contiguous().to(getattr(torch, made.takes))
        y = a.new_empty(shape, dtype=torch.float16 if made.half else torch.float32)
        work = a.new_empty((made.nbytes,), dtype=torch.uint8) if made.nbytes else y
        if made.zeroed:
            work[: made.zeroed].zero_()
        arrays = [array.data_ptr() for array in offered[made.packing]]
        made(a.data_ptr(), y.data_ptr(), arrays, work.data_ptr(), stream_of(a))
        return _finished(y, x, bias)


def _shape_of(x: Tensor, *given: Any) -> Tensor:
    *_, n, k = given
    _require(x, k)
    return x.new_empty((*x.shape[:-1], n))


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


@torch.library.custom_op("quantized_gemm::linear_input_gradient", mutates_args=())
def linear_input_gradient(gradient: Tensor, blocks: Tensor, format: str, k: int) -> Tensor:
    """gradient[..., N] @ dequantize(W)[N, K], in its dtype: blocks dequantized on the CPU at every
    call, multiplied on its device. Meant for the occasional gradient, not for training at speed."""
    rows = gradient.reshape(-1, gradient.shape[-1]).to(torch.float32)
    total = rows.new_zeros((len(rows), k))
    for first, part in _dequantized(blocks, format):
        total += rows[:, first : first + len(part)] @ part.to(rows.device)
    return total.to(gradient.dtype).reshape(*gradient.shape[:-1], k)


@linear_input_gradient.register_fake
def _shape_of_gradient(gradient: Tensor, blocks: Tensor, format: str, k: int) -> Tensor:
    return gradient.new_empty((*gradient.shape[:-1], k))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _x, bias, blocks, weights, fast, *_, format_name, _n, k = inputs
    if ctx.needs_input_grad[0]:
        if blocks is None:
            raise ValueError("a gradient with respect to x needs the blocks: pass them too")
        ctx.save_for_backward(blocks)
    ctx.bias, ctx.format, ctx.k = bias is not None and bias.dtype, format_name, k
    ctx.arrays = len(weights), len(fast)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """With respect to x and bias; the blocks are constant."""
    of_x = of_bias = None
    if ctx.needs_input_grad[0]:
        (blocks,) = ctx.saved_tensors
        of_x = linear_input_gradient(gradient, blocks, ctx.format, ctx.k)
    if ctx.needs_input_grad[1]:
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_bias = rows.sum(0, dtype=torch.float32).to(ctx.bias)
    weights, fast = ([None] * count for count in ctx.arrays)
    return of_x, of_bias, None, weights, fast, *(None,) * 5


linear.register_autograd(_gradients, setup_context=_remember)


# --- on a GPU -------------------------------------------------------------------------------------


def by_packing(
    packings: str, weights: Sequence[Tensor], fast: Sequence[Tensor]
) -> dict[str, Sequence[Tensor]]:
    """The arrays of each packing by its name."""
    return dict(zip(packings.split(), (weights, fast), strict=False))


_plans: dict[tuple[Any, ...], Relocatable] = {}  # the one used last at the end


def planned(
    format_name: str,
    size: tuple[int, int, int],
    offered: Mapping[str, Sequence[Tensor]],
    accuracy: str,
    half: bool,
    device: Any,
    given: str = "float32",
) -> Relocatable:
    """The plan of (M, N, K) on a device, which is the current one; kernels not used before are
    compiled and loaded.

    half, given: y may be float16, and x may be this; they are where the step can (`Relocatable`).
    RuntimeError where a capture into a CUDA graph does not survive that: it says what to do.
    """
    key = (format_name, size, *offered, accuracy, half, device, given)
    made = _plans.pop(key, None)
    if made is None:
        made = _made(format_name, Shape(*size), offered, accuracy, half, given)
        if len(_plans) >= PLANS:
            _plans.pop(next(iter(_plans)), None)
    _plans[key] = made
    return made


def _made(
    format_name: str,
    shape: Shape,
    offered: Mapping[str, Sequence[Tensor]],
    accuracy: str,
    half: bool,
    given: str,
) -> Relocatable:
    with _loading_allowed():
        try:
            offer, machine = places(offered), _machine()
            return Relocatable(format_name, shape, offer, machine, accuracy, half, given)
        except (TypeError, ValueError):
            raise  # such a product cannot be at all
        except Exception as error:  # Numba and the driver have many types for it
            if not torch.cuda.is_current_stream_capturing():
                raise
            raise RuntimeError(
                f"kernels for {shape.m} tokens could not be loaded while a CUDA graph is captured: "
                f"multiply as many tokens once before ({error})"
            ) from error


def places(offered: Mapping[str, Sequence[Tensor]]) -> dict[str, tuple[Place, ...]]:
    """The arrays of each packing as a `Relocatable` is made of them."""
    return {
        name: tuple((tuple(one.shape), str(one.dtype).removeprefix("torch.")) for one in arrays)
        for name, arrays in offered.items()
    }


def capability(device: Any) -> tuple[int, int]:
    """The compute capability of a GPU."""
    major, minor = torch.cuda.get_device_capability(device)
    return int(major), int(minor)


def upload(array: np.ndarray, device: Any) -> Tensor:
    """An array of a packing on a GPU, which any stream may read when this returns."""
    held = torch.from_numpy(np.ascontiguousarray(array)).to(device)
    torch.cuda.synchronize(device)
    return held


def _machine() -> Any:
    from steps.api.machines import Gpu

    return Gpu()


@contextmanager
def _loading_allowed() -> Iterator[None]:
    """Lets this thread load kernels although some stream is being captured.

    torch captures in a mode that forbids every thread what might wait for the GPU; loading touches
    no stream, so for this thread that is lifted meanwhile.
    """
    from cuda.bindings import driver

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    _, before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)


# --- on any device --------------------------------------------------------------------------------


def _require(x: Tensor, k: int) -> None:
    if x.dtype not in FLOATS:
        raise TypeError(f"x must be float32, float16 or bfloat16, got {x.dtype}")
    if x.ndim < 1 or x.shape[-1] != k:
        raise ValueError(f"x must have shape [..., {k}], got {list(x.shape)}")


def _finished(y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """The bias is added before y is rounded to the dtype of x."""
    if bias is None:
        return y if y.dtype is x.dtype else y.to(x.dtype)
    return torch.add(y, bias, out=y if y.dtype is x.dtype else y.new_empty(y.shape, dtype=x.dtype))


def host_blocks(blocks: Tensor, fmt: Format) -> np.ndarray:
    """A tensor of bytes as structured[N, K/32], not copied."""
    view: np.ndarray = blocks.numpy().view(fmt.dtype)
    return view


def _dequantized(blocks: Tensor | None, format_name: str) -> Iterator[tuple[int, Tensor]]:
    """(first row, float32 [rows, K]) of all rows, a few at a time."""
    if blocks is None:
        raise ValueError("a product on the CPU needs the blocks: pass them")
    fmt = FORMATS[format_name]
    held = host_blocks(blocks, fmt)
    for first in range(0, len(held), ROWS):
        yield first, torch.from_numpy(fmt.dequantize(held[first : first + ROWS]))
