"""The operations between products by the kernels of `steps.kernels.between`, in place of torch's.

    do = chosen("kernels")                      # an `Operations`, for a `Decoder`

An operation is no product: nothing is chosen, and there is no `Choice`. Its launch is described by
an `OfArrays`, prepared once for each shape and dtype (`steps.product.prepared.Prepared`), and then
called with addresses, as those of products are. A call allocates nothing but its results, so it may
run while a stream is captured.

Plain torch does what no kernel takes: float64, heads of odd sizes, rows that are not a multiple of
8 values. A prompt's attention is torch's, on queries and keys that a kernel here has rotated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from steps.compile.dry_run import DryRun, OfArrays, operands
from steps.contract import Launch, Machine
from steps.decoder import operations
from steps.decoder.chained import Chains
from steps.decoder.deferred import DeferredNorms
from steps.decoder.expert_layers import ExpertLayers
from steps.decoder.operations import PLAIN, Operations
from steps.kernels.between import (
    add_and_norm,
    argmax,
    attention,
    rotary,
    router,
    swiglu,
)
from steps.kernels.between.eight import EIGHT, OF_DTYPE
from steps.nn import operator as operator
from steps.product.prepared import Prepared

if TYPE_CHECKING:
    from torch import Tensor

torch = operator.torch

MODE: Final = "kernels"
LEAST_CC: Final = (8, 0)
"""The least compute capability. Before 9.0 a launch waits for the end of the one before."""
ALIGNMENT: Final = 16  # bytes, of every array

Make = Callable[..., Launch]
"""(*arrays, machine) -> a launch."""


def prepared(make: Make, arrays: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], None]:
    """A launch of one operation, compiled and loaded for arrays of these shapes and dtypes: call it
    with such arrays, to queue it on the current stream of their device."""
    recipe, memory = OfArrays(make, operator.array_types(arrays)), DryRun()
    with torch.cuda.device(arrays[0].device) if arrays[0].is_cuda else nullcontext():
        made = Prepared(recipe.launches(memory), memory, operands(len(arrays)))
    return partial(operator.launch, made)


def name_of(one: Tensor) -> str:
    """ "float32", as `steps.contract.array_dtype` takes it."""
    return str(one.dtype).removeprefix("torch.")


def takes(*arrays: Tensor) -> bool:
    """Whether kernels read and write such arrays: contiguous, aligned, of 16 or 32 bits."""
    return all(
        one.is_contiguous() and one.data_ptr() % ALIGNMENT == 0 and name_of(one) in OF_DTYPE
        for one in arrays
    )


def takes_rows(h: Tensor, weight: Tensor, *others: Tensor) -> bool:
    """As `takes`, for an operation on rows, whose h and weight are float32."""
    floats = h.dtype is weight.dtype is torch.float32
    return floats and h.shape[-1] % EIGHT == 0 and takes(h, weight, *others)


class Kernels(Operations):
    """Operations and deferred norms by kernels, on one stream.

    prepare: `prepared`; tests pass a function of their own.
    """

    mode = MODE
    swiglu_overlaps = True

    def __init__(self, prepare: Callable[..., Any] = prepared) -> None:
        self._prepare = prepare
        self._prepared: dict[Hashable, Any] = {}
        self.deferred = DeferredNorms(self._launch)
        self.chains = Chains(self._launch)
        self.expert_layers = ExpertLayers(self._launch)

    def argmax_of_rows(self, logits: Tensor) -> Tensor:
        if logits.dtype is not torch.float32 or not takes(logits):
            return PLAIN.argmax_of_rows(logits)
        found = logits.new_empty(len(logits), dtype=torch.int64)
        self._launch(of_argmax, (logits, found))
        return found

    def rms_norm(self, h: Tensor, weight: Tensor, epsilon: float, dtype: Any) -> Tensor:
        x = torch.empty_like(h, dtype=dtype)
        if not takes_rows(h, weight, x):
            return PLAIN.rms_norm(h, weight, epsilon, dtype)
        self._launch(of_norm, (h, weight, x), epsilon)
        return x

    def add_and_norm(
        self,
        h: Tensor,
        y: Tensor,
        weight: Tensor,
        epsilon: float,
        dtype: Any,
        other: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """h is the residual's memory from then on: y is added in place."""
        x, others = torch.empty_like(h, dtype=dtype), () if other is None else (other,)
        if not takes_rows(h, weight, x, y, *others):
            return PLAIN.add_and_norm(h, y, weight, epsilon, dtype, other)
        self._launch(of_add_and_norm, (h, y, weight, x, *others), epsilon)
        return h, x

    def route(
        self,
        h: Tensor,
        y: Tensor,
        weight: Tensor,
        epsilon: float,
        dtype: Any,
        of_experts: Tensor,
        chosen: int,
        normed: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In one launch for few tokens; the logits of more are torch's product."""
        (m, width), experts = h.shape, len(of_experts)
        x = torch.empty_like(h, dtype=dtype)
        ids = h.new_empty((m, chosen), dtype=torch.int32)
        shares = h.new_empty((m, chosen), dtype=torch.float32)
        takes_all = takes_rows(h, weight, y, x, of_experts, ids.view(torch.float32), shares)
        if not takes_all or not router.supports(width, experts, chosen):
            rest = epsilon, dtype, of_experts, chosen, normed
            return PLAIN.route(h, y, weight, *rest)
        if m <= router.MOST_TOKENS:
            residual = torch.empty_like(h)
            arrays = h, y, weight, of_experts, residual, x, ids, shares
            self._launch(of_route, arrays, epsilon, normed)
            return residual, x, ids, shares
        h, x = self.add_and_norm(h, y, weight, epsilon, dtype)
        logits = torch.nn.functional.linear(x.to(of_experts.dtype), of_experts)
        self._launch(of_choice, (logits, ids, shares), normed)
        return h, x, ids, shares

    def attention(
        self,
        qkv: Tensor,
        cache: Tensor,
        position: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: int,
        dtype: Any,
        head_norms: tuple[Tensor, Tensor, float] | None = None,
        first: int = 0,
    ) -> Tensor:
        batch, twice, _, size = cache.shape
        *weights, epsilon = head_norms or (0.0,)
        arrays = [qkv, cos, sin, *weights]
        known = size in attention.SIZES and cache.dtype is torch.float16
        if not known or not takes(*arrays):
            rest = heads, dtype, head_norms, first
            return PLAIN.attention(qkv, cache, position, cos, sin, *rest)
        if len(qkv) > batch:
            queries = qkv.new_empty((len(qkv), heads * size), dtype=cache.dtype)
            given = (qkv, cache, position, cos, sin, queries, *weights)
            self._launch(of_rotary, given, epsilon)
            return of_prompt(queries, cache, first).to(dtype)
        if not attention.supports(heads, twice // 2, size):
            return PLAIN.attention(qkv, cache, position, cos, sin, heads, dtype, head_norms)
        y = qkv.new_empty((batch, heads * size), dtype=dtype)
        self._launch(of_attention, (qkv, cache, position, cos, sin, y, *weights), epsilon)
        return y

    def swiglu(self, y: Tensor, dtype: Any) -> Tensor:
        x = y.new_empty((len(y), y.shape[1] // 2), dtype=dtype)
        if x.shape[1] % EIGHT or not takes(y, x):
            return PLAIN.swiglu(y, dtype)
        self._launch(of_swiglu, (y, x))
        return x

    def _launch(self, make: Callable[..., Launch], arrays: Sequence[Tensor], *rest: Any) -> None:
        types = tuple((one.shape, one.dtype) for one in arrays)
        key = make, types, rest, arrays[0].device
        made = self._prepared.get(key)
        if made is None:
            made = self._prepared[key] = self._prepare(partial(make, *rest), arrays)
        made(arrays)


def of_prompt(queries: Tensor, cache: Tensor, first: int) -> Tensor:
    """Attention of rotated queries [B * T, heads * D] at positions `first` and on, whose keys and
    values are in the cache."""
    batch, twice, _, size = cache.shape
    q = queries.view(batch, -1, queries.shape[1] // size, size).transpose(1, 2)
    k, v = cache[:, :, : first + q.shape[2]].split(twice // 2, 1)
    return operations.of_prompt(q, k, v).transpose(1, 2).reshape(queries.shape)


def of_argmax(logits: Any, found: Any, *, machine: Machine) -> Launch:
    return argmax.launch(logits, found, machine)


def of_rotary(
    epsilon: float, qkv: Any, cache: Any, position: Any, cos: Any, sin: Any, queries: Any,
    *weights: Any, machine: Machine,
) -> Launch:  # fmt: skip
    head_norms = (*weights, epsilon) if weights else None
    return rotary.launch(qkv, cache, position, cos, sin, queries, head_norms)


def of_norm(epsilon: float, h: Any, weight: Any, x: Any, *, machine: Machine) -> Launch:
    return add_and_norm.launch(h, None, weight, epsilon, x)


def of_add_and_norm(
    epsilon: float, h: Any, y: Any, weight: Any, x: Any, other: Any = None, *, machine: Machine
) -> Launch:
    return add_and_norm.launch(h, y, weight, epsilon, x, other)


def of_route(
    epsilon: float, normed: bool, h: Any, y: Any, weight: Any, of_experts: Any, residual: Any,
    x: Any, ids: Any, shares: Any, *, machine: Machine,
) -> Launch:  # fmt: skip
    rest = of_experts, residual, x, ids, shares, normed, machine
    return router.launch(h, y, weight, epsilon, *rest)


def of_choice(normed: bool, logits: Any, ids: Any, shares: Any, *, machine: Machine) -> Launch:
    return router.choose(logits, ids, shares, normed)


def of_attention(
    epsilon: float, qkv: Any, cache: Any, position: Any, cos: Any, sin: Any, y: Any, *weights: Any,
    machine: Machine,
) -> Launch:  # fmt: skip
    head_norms = (*weights, epsilon) if weights else None
    return attention.launch(qkv, cache, position, cos, sin, y, machine, head_norms)


def of_swiglu(y: Any, x: Any, *, machine: Machine) -> Launch:
    return swiglu.launch(y, x)


def chosen(mode: str | None = None) -> Operations:
    """The operations in a mode: "kernels", or "plain" torch; by default the kernels, and on a GPU
    of less than `LEAST_CC` plain.

    ValueError for kernels on such a GPU.
    """
    can = torch.cuda.is_available() and torch.cuda.get_device_capability() >= LEAST_CC
    if mode == MODE and not can:
        raise ValueError(
            "the operations between products cannot be 'kernels' here: their kernels take a GPU of "
            "compute capability 8.0 or later; use plain"
        )
    return Kernels() if can and mode != "plain" else PLAIN
