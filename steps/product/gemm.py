"""`gemm` and `pack`: checked products over ggml's blocks, by the best kernel for this machine.

The kernel is one of `steps.registry.kernels`, see `steps.product.choice`. "Step 14" names one by
the lesson that teaches it, here and in messages. A lesson's own kernel runs where no engineered one
can, and where it is named (`step=3`).

Products on the GPU with weights that `pack` made are prepared once: `Packed` keeps the last
`PRODUCTS` of them, each a `Product`. A call like an earlier one finds its `Product`, which checks
what may differ (the arrays' layout and addresses), and launches. Plans find it, too. Counters and
workspace are kept for each stream, so a product in a CUDA graph should be a plan's, which has its
own.

All arguments are checked before a launch, and an error leaves `out` as it was. Values on the GPU
are not checked for NaN and infinity, as that would cost a pass over them: a NaN makes its row of C
NaN, an infinity makes it NaN or infinite, in every step, and other rows are what they are without
it. Steps 2 to 4 are the exception: they keep activations in 36-byte blocks, whose float16 scales
and sums can overflow. For them `a` is fetched and checked, and values below 4e-6 may count as 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from qformats import FORMATS, Format
from steps.blocks.q8_1 import q8_1_blocks
from steps.contract import Accuracy, Family, known_accuracy
from steps.driver.launcher import address_of, stream_handle
from steps.product.choice import (
    Choice,
    Request,
    choose,
    packing_kernel,
    step_numbers,
    supporting,
    why_not,
)
from steps.product.operands import (
    ARRAYS,
    BYTES,
    activations_facts,
    address,
    as_array,
    bias_dtype,
    blocks_of,
    empty_beside,
    float_name,
    is_device_array,
    require_apart,
    require_finite,
    require_out,
    require_place,
    require_start_of_a,
    stream_of,
    weight_format,
)
from steps.product.prepared import Kept, prepare
from steps.registry import kernel_of

if TYPE_CHECKING:
    from qformats.gguf_file import Tensor
    from steps.driver.machines import Gpu, Simulator


PRODUCTS: Final = 512
"""Prepared products that packed weights keep: some KB of host memory each, none of the GPU's."""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Weights [N, K] of one format on one machine, in one layout. Made by `pack`. Several kernels
    may read one layout; which of them multiplies is chosen at each product. It equals itself alone,
    and is neither copied nor pickled: what can be is the blocks.

    step     : the only step that may multiply, where they were packed for one; else None.
    family   : the only family of products with them, None for either.
    accuracy : of products that do not name one.
    layout   : the name of the function that packed them, `Kernel.pack`.
    arrays   : what it made, on the machine.
    products : those prepared on the GPU, by their `Request`, and by `_key` of calls that found one.
    """

    step: int | None
    family: Family | None
    accuracy: Accuracy
    format: str
    n: int
    k: int
    layout: str
    arrays: tuple[Any, ...]
    machine: Gpu | Simulator
    products: Kept[Product] = field(init=False, default_factory=lambda: Kept(PRODUCTS))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{self!r} lies on the {self.machine.name} and is neither copied nor pickled: keep its "
            "blocks, and pack them where they are needed"
        )

    def __repr__(self) -> str:
        return f"Packed({self.format} [{self.n}, {self.k}] for {self.readers})"

    @property
    def readers(self) -> str:
        """The steps that may multiply these weights: "steps 13 and 14"."""
        if self.step is not None:
            return step_numbers([kernel_of(self.step)])
        every = Request(self.format, 1, self.n, self.k, accuracy="fast", family=self.family)
        return step_numbers(supporting(replace(every, layouts=(self.layout,)), self.machine.cc))


def pack(
    w: np.ndarray | Tensor,
    *,
    step: int | None = None,
    family: Family | None = None,
    accuracy: Accuracy = "exact",
    machine: Gpu | Simulator | None = None,
) -> Packed:
    """Weights, repacked as kernels read them and uploaded once, for any number of products.

    w        : blocks, a NumPy array [N, K/32], of K-quants [N, K/256], or a tensor of a file
               (`qformats.gguf_file`).
    step     : pack for this step alone. By default the layout is that of the highest default
               kernel (`steps.product.choice`), and serves every kernel that reads it.
    family   : "A16" or "A8": products with these weights are of this family; by default of either.
    accuracy : "exact" or "fast", see `gemm`: of products that do not name one. The layout is that
               of a step of this accuracy, if there is one.
    machine  : by default the current GPU; `steps.driver.machines.Simulator()` needs none, and is
               slow.

    Raises TypeError for what are no blocks, ValueError for blocks without a finite scale and where
    no step can multiply them, RuntimeError without a GPU.
    """
    blocks = blocks_of(w)
    fmt = weight_format(blocks)
    where = machine_for(machine)
    n, k = blocks.shape[0], blocks.shape[1] * fmt.elements
    request = Request(fmt.name, 1, n, k, accuracy=known_accuracy(accuracy), family=family)
    if step is None:
        kernel = packing_kernel(request, where.cc)
    else:
        kernel = kernel_of(step)
        own = replace(request, a=(*kernel.inputs, "float32")[0], c=kernel.outputs[0])
        if why := why_not(kernel, own, where.cc):
            raise ValueError(why)
    arrays = tuple(where.array(array) for array in kernel.pack(blocks))
    where.synchronize()  # an upload may be read on any stream from here on
    layout = kernel.pack.__name__
    return Packed(step, family, known_accuracy(accuracy), fmt.name, n, k, layout, arrays, where)


def gemm(
    a: Any,
    w: np.ndarray | Tensor | Packed,
    *,
    bias: Any = None,
    step: int | None = None,
    out: Any = None,
    dtype: Any = np.float32,
    family: Family | None = None,
    accuracy: Accuracy | None = None,
    invariant: bool = False,
    machine: Gpu | Simulator | None = None,
    stream: Any = None,
    explain: bool = False,
) -> Any:
    """C[M, N] = A[M, K] @ dequantize(W)[N, K]^T + bias[N].

    a       : float32, float16 or bfloat16 [M, K], C-contiguous, NumPy (bfloat16 as uint16) or of
              any library on the GPU, there in 16 bits at a multiple of 16 bytes. No kernel casts
              it. Without tokens, M=0, C is [0, N] and nothing is launched.
    w       : blocks [N, K/32], of K-quants [N, K/256], a NumPy array of a dtype of `qformats` (a
              view too); a tensor of a file, see `pack`; or what `pack` made of them.
    bias    : None, or float32, float16 or bfloat16 [N], C-contiguous, of the same kind as `a`. The
              kernel adds it to sums in float32, before C is rounded. ValueError for another shape,
              and where no kernel that can do the rest adds one.
    step    : the number of a step, lesson or engineered. By default the engineered kernel that was
              measured fastest at such a shape on such a GPU (`make tune`), else the highest default
              kernel; a lesson only where no engineered kernel can do it.
    out     : where to write C: [M, N] of `dtype`, C-contiguous, of the same kind as `a`.
    dtype   : of C: float32, float16 or bfloat16, which not every kernel writes. Values beyond
              65504 become infinite in float16.
    family  : "A16" multiplies `a` as floats; kernels on tensor cores round float32 to float16. "A8"
              quantizes `a` to int8 with a scale per 32 values (Q8_1). By default the faster.
    accuracy: "exact", the default, multiplies the weights that the format stores (scales of
              K-quants rounded to float16, `qformats.storage`). "fast" allows kernels that
              requantize the weights to int8 with one scale per row, and `a` to int8 with one per
              token: on normal data that adds 2 % to the error of Q4_0, and several times its own to
              that of Q8_0; where a few channels of `a` are 20 times the others, 50 % to that of
              Q4_0. It is never used unless it is asked for, here, by `step` or in `pack`; nor for K
              beyond 132096, more than the integer sums hold.
    invariant : up to M=16 a row of C has the same bits whatever M is and whatever the other rows
              are, as the verification of drafted tokens needs. The kernel is then the highest
              decode kernel, in family A16, and may take longer. ValueError where there is none.
    machine : where to multiply; by default the current GPU.
    stream  : where to queue the work: a stream of Numba, cuda.core, torch or CuPy, or a handle. By
              default the current stream of the library of `a` (torch, CuPy), else the default
              stream.
    explain : return (C, choice), a `steps.product.choice.Choice`; `print(choice)` says which kernel
              it was, how it was launched and why. Without tokens it is that of one.

    Returns C: `out` where it was given, else a new array of the library of `a` (NumPy, torch,
    CuPy, else Numba).
    Raises TypeError for arrays of a wrong kind or dtype, ValueError for wrong shapes, values or
    options, RuntimeError without a GPU. Each is one sentence that names the numbers.
    """
    key = _key(a, step, dtype, family, accuracy, invariant, getattr(bias, "dtype", bias))
    if key and type(w) is Packed and machine in (None, w.machine) and not explain:
        known = w.products.get(key)
        if known is not None:
            return known(a, out, stream, bias)
    w, given, result, added = blocks_of(w), a, out, bias
    a, out, bias = as_array("a", a), as_array("out", out), as_array("bias", bias)
    on_device = is_device_array(a)
    m, k, input = activations_facts(a, on_device)
    fmt, n, packed_k = weights_shape(w)
    if packed_k != k:
        raise ValueError(
            f"a has K={k} columns and w has {packed_k // fmt.elements} blocks of {fmt.elements} in "
            f"a row, K={packed_k}: they must be equal"
        )
    if not on_device:
        require_finite("a", a, input)
    of_bias = None if bias is None else bias_dtype(bias, n, on_device)
    output = float_name(dtype)
    require_out(out, (m, n), on_device, output)
    require_apart(out, a=a, bias=bias, w=w)

    where = machine_for(machine, w)
    if on_device and where.cc is None:
        raise TypeError(f"a is on a GPU and the machine is the {where.name}: pass a NumPy array")
    request = Request(
        fmt.name, m, n, k, input, output, of_bias, "exact" if accuracy is None else accuracy,
        family, step, invariant=invariant,
    )  # fmt: skip
    request = asked_of(w, request, named=accuracy is not None)
    if not m:
        choice = choose(replace(request, m=1), where)  # other arguments are checked as ever
        c = empty_beside(given, (0, n), output, where) if out is None else result
        return (c, choice) if explain else c
    if on_device:
        product = product_of(w, request, where)
        if key:
            product.weights.products.put(key, product)
        c = product(given, result, stream, added)
        return (c, product.choice) if explain else c

    choice, weights = chosen(w, request, where)
    if stream is not None:
        where = where.on(stream)
    source, target = where.array(a), where.empty((m, n), ARRAYS[output])
    arrays = weights.arrays if bias is None else (*weights.arrays, where.array(bias))
    activations, own = choice.on(where, arrays, source, target)
    if reads_blocks(choice):
        require_sums_in_blocks(a)
    for launch in (*activations.launches, own):
        where.run(launch)
    c = where.host(target)
    if out is not None:
        out[...] = c
        c = out
    return (c, choice.launched(own)) if explain else c


def asked_of(w: Any, request: Request, named: bool) -> Request:
    """The request for a product with `w`. Where `w` is packed already, its layout, family, step and
    accuracy are put in, unless the caller named others. named: whether the caller named the
    accuracy. ValueError for a step that does not read this layout."""
    if not isinstance(w, Packed):
        return request
    if request.step is not None and kernel_of(request.step).pack.__name__ != w.layout:
        raise ValueError(f"w is packed for {w.readers}, not for step {request.step}")
    asked = replace(request, layouts=(w.layout,), family=request.family or w.family)
    if not named:
        asked = replace(asked, accuracy=w.accuracy)
    elif w.step is not None and request.step is None:
        supporting(asked, w.machine.cc)  # an accuracy that is named rules out steps that have less
    return asked if request.step is not None else replace(asked, step=w.step)


def chosen(w: Any, request: Request, machine: Gpu | Simulator) -> tuple[Choice, Packed]:
    """The kernel for a product with `w`, and `w` packed as it reads them."""
    choice = choose(request, machine)
    if isinstance(w, Packed):
        return choice, w
    return choice, pack(w, step=choice.kernel.number, machine=machine)


# --- on a GPU -------------------------------------------------------------------------------------


def product_of(w: Any, request: Request, machine: Gpu | Simulator) -> Product:
    """The product on the current GPU, prepared now or, with packed weights, before."""
    if not isinstance(w, Packed):
        return Product(*chosen(w, request, machine))
    return w.products.of(request, lambda: Product(*chosen(w, request, machine)))


def _key(a: Any, *options: Any) -> tuple[Any, ...] | None:
    """All that the launches of a product with some packed weights depend on, as a key. None for a
    NumPy array, whose products are not prepared, and for options that cannot be hashed."""
    if type(a) is np.ndarray:
        return None
    try:
        key = (type(a), a.shape, a.dtype, *options)
        hash(key)
    except (AttributeError, TypeError):
        return None
    return key


class Memory(NamedTuple):
    """Memory that all products of a stream share, as they run one after the other: counters, which
    are zero between launches, and a workspace. zeroed, nbytes: their sizes; zeros, workspace: their
    addresses, 0 for none; arrays: keeps them alive."""

    zeroed: int
    nbytes: int
    zeros: int
    workspace: int
    arrays: tuple[Any, Any]


def new_memory(machine: Any, zeroed: int, nbytes: int) -> Memory:
    zeros = machine.array(np.zeros(zeroed, np.uint8)) if zeroed else None
    workspace = machine.empty((nbytes,), np.uint8) if nbytes else None
    machine.synchronize()  # what was uploaded may be used on any stream from here on
    at, of = (0 if array is None else address_of(array) for array in (zeros, workspace))
    return Memory(zeroed, nbytes, at, of, (zeros, workspace))


_memory: dict[tuple[int, int], Memory] = {}  # by (device, stream)


def memory_of(machine: Any, key: tuple[int, int], zeroed: int, nbytes: int) -> Memory:
    """The memory of a stream, at least so large: as the largest product so far needs."""
    found = _memory.get(key)
    if found is None or found.zeroed < zeroed or found.nbytes < nbytes:
        if found is not None:  # freed when all that was queued is done
            zeroed, nbytes = max(zeroed, found.zeroed), max(nbytes, found.nbytes)
        found = _memory[key] = new_memory(machine, zeroed, nbytes)
    return found


class Product:
    """A product of arrays on the GPU, chosen and prepared. `gemm` and plans call the same one."""

    __slots__ = (
        "_a_bytes", "_a_shape", "_addresses", "_bias_bytes", "_device", "_in_blocks",
        "_out_bytes", "_out_shape", "choice", "made", "weights",
    )  # fmt: skip

    def __init__(self, choice: Choice, weights: Packed) -> None:
        """Compile and load the kernels on the current GPU."""
        asked = choice.request
        types = [(array.shape, array.dtype) for array in weights.arrays]
        self.choice, self.made = prepare(choice, types)
        self.weights = weights
        self._addresses = tuple(map(address_of, weights.arrays))
        self._device = current_device()
        self._a_shape, self._out_shape = (asked.m, asked.k), (asked.m, asked.n)
        self._a_bytes = BYTES[asked.a] * asked.m * asked.k
        self._out_bytes = BYTES[asked.c] * asked.m * asked.n
        self._bias_bytes = BYTES[asked.bias] * asked.n if asked.bias else 0
        self._in_blocks = reads_blocks(choice)

    def __call__(
        self, a: Any, out: Any, stream: Any, bias: Any, memory: Memory | None = None
    ) -> Any:
        """C, `out` or a new array; errors as of `gemm`. memory: what the kernels work in, by
        default that of the stream."""
        asked, machine, addresses = self.choice.request, self.weights.machine, self._addresses
        source = address("a", a, self._a_shape, self._device, asked.a)
        require_start_of_a(source, asked.a)
        if asked.bias:
            added = self.address_of_bias(bias)
            addresses = (*addresses, added)
        if out is None:
            out = empty_beside(a, self._out_shape, asked.c, machine)
            target = address("out", out, self._out_shape, self._device, asked.c)
        else:
            target = address("out", out, self._out_shape, self._device, asked.c)
            require_place(target, self._out_bytes, source, self._a_bytes)
            if asked.bias:
                require_place(target, self._out_bytes, added, self._bias_bytes, "bias")
        handle, made = stream_handle(stream_of(a) if stream is None else stream), self.made
        if self._in_blocks:
            require_sums_on_gpu(a, machine, handle)
        if memory is None:
            memory = memory_of(machine, (self._device, handle), made.zeroed, made.nbytes)
        made((source, target, *addresses), memory.zeros, memory.workspace, handle)
        return out

    def address_of_bias(self, bias: Any) -> int:
        dtype = self.choice.request.bias or ""
        return address("bias", bias, self._out_shape[1:], self._device, dtype)


def current_device() -> int:
    """The number of the GPU that launches go to."""
    from numba import cuda

    return int(cuda.get_current_device().id)


# --- what a product needs to know -----------------------------------------------------------------


def reads_blocks(choice: Choice) -> bool:
    """Whether a product keeps A in 36-byte blocks, whose float16 d and s end at 65504."""
    return choice.reading.make is q8_1_blocks


def require_sums_in_blocks(a: np.ndarray) -> None:
    """ValueError for values that would overflow the float16 d or s of a 36-byte block. Rows with a
    NaN or infinity pass: their outputs are not finite anyway."""
    finite = np.isfinite(a).all(axis=1, keepdims=True)
    FORMATS["q8_1"].quantize(np.where(finite, a, np.float32(0)))


def require_sums_on_gpu(a: Any, machine: Any, stream: int) -> None:
    """The same for an array on the GPU, which is copied to the host. While a stream is captured
    into a CUDA graph nothing can be copied: an overflow then gives infinity or NaN."""
    where = machine.on(stream)
    if not where.is_captured():
        require_sums_in_blocks(where.host(_as_numba(as_array("a", a))))


def _as_numba(array: Any) -> Any:
    from numba import cuda

    # Not waited for: the work is queued on the stream that the array's own work is on.
    return cuda.as_cuda_array(array, sync=False)


def weights_shape(w: Any) -> tuple[Format, int, int]:
    """(format, N, K)"""
    if isinstance(w, Packed):
        return FORMATS[w.format], w.n, w.k
    fmt = weight_format(w)
    return fmt, w.shape[0], w.shape[1] * fmt.elements


def machine_for(asked: Gpu | Simulator | None, w: Any = None) -> Gpu | Simulator:
    """The machine to multiply on; weights that are packed, of experts too, lie on one already."""
    if (own := getattr(w, "machine", None)) is not None:
        if asked is not None and asked is not own:
            raise ValueError(f"w is packed on {own.name}, not on {getattr(asked, 'name', asked)}")
        found: Gpu | Simulator = own
        return found
    if asked is not None:
        if isinstance(asked, type) or not hasattr(asked, "cc"):
            raise TypeError(
                f"machine is {asked!r}: it must be Gpu() or Simulator() of steps.driver.machines"
            )
        return asked
    from steps.driver.machines import Gpu

    return Gpu()
