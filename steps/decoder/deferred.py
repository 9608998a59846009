"""Norms of few tokens without a launch: `steps.kernels.between.deferred_norm` for a decoder.

The two products around a norm make it. h is the residual, y what a product adds to it:

    product before    h += y, x = h * weight * s, and partial sums of h^2: they are `left`
    product after     multiplies x, and scales its sums by what it works out from `left`

s needs the `left` of the norm before. Where there is none, that norm is a launch which also writes
`left` (`launched`). The product after may be that of gates and ups: it then also computes
silu(gate) * up, without a launch (`steps.kernels.between.gated_product`).

A norm is deferred where both products are one launch of step 18's kernel that reads float16: not
where a product is several side by side (`Concatenated`), or a sum over more than two ranks. Two
GPUs exchange their terms of y within the product before (`parallel.Summed.places`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from qformats import FORMATS
from steps.compile.dry_run import OfArrays
from steps.contract import Launch, Machine
from steps.decoder.model import Product
from steps.decoder.parallel import Gathered, Joined, Summed
from steps.kernels.between import add_and_norm, deferred_norm, gated_product
from steps.kernels.between.eight import EIGHT
from steps.kernels.decode import bulk
from steps.nn import operator as operator

if TYPE_CHECKING:
    from torch import Tensor

torch = operator.torch


class DeferredNorms:
    """The operations of deferred norms. launch: (make, arrays, *rest) queues the launch
    make(*rest, *arrays, machine=...), as `kernel_operations.Kernels` does.

    x: float16 [M, width], the norm but for the factor of each token. left: float32 [M, 1 + parts],
    what a norm leaves for the product after it and for the next norm.
    """

    def __init__(self, launch: Callable[..., None]) -> None:
        self._launch = launch

    def takes(self, before: Any, after: Any, h: Tensor, weight: Tensor) -> bool:
        """Whether the norm with this weight, of a residual h between these two products, can be
        deferred."""
        floats = h.dtype is weight.dtype is torch.float32 and h.is_contiguous()
        few = len(h) <= deferred_norm.MOST_TOKENS and h.shape[1] % EIGHT == 0
        if not floats or not few or (isinstance(before, Summed) and before.places(len(h)) is None):
            return False
        return all(by_step_18(own(one), len(h)) for one in (before, after))

    def launched(
        self, rows: Sequence[Tensor], weight: Tensor, epsilon: float, dtype: Any, before: Any
    ) -> tuple[Tensor, Tensor]:
        """(x of a dtype, left) of a norm that is a launch, and is followed by the product `before`
        of a deferred one. rows: the residual h, and one or two terms of y, which are added to h in
        place."""
        (h, *terms), before = rows, own(before)
        size = len(h), before.n, before.k
        parts = deferred_norm.partial_sums(FORMATS[before.format], *size)
        x, left = torch.empty_like(h, dtype=dtype), h.new_empty((len(h), 1 + parts))
        self._launch(of_norm, (h, weight, x, left, *terms), epsilon)
        return x, left

    def before(
        self, product: Any, a: Tensor, h: Tensor, weight: Tensor, epsilon: float, left: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(x, left) of a deferred norm, by the product before it: h += a @ W^T in place, of two
        GPUs the sum of their terms. left: that of the norm before."""
        places = (isinstance(product, Summed) and product.places(len(h))) or ()
        product = own(product)
        parts = deferred_norm.partial_sums(FORMATS[product.format], len(h), product.n, product.k)
        x, after = torch.empty_like(h, dtype=torch.float16), h.new_empty((len(h), 1 + parts))
        arrays = a, h, weight, left, after, x, *places, *_weights(product)
        self._launch(of_product_before, arrays, product.format, epsilon, bool(places))
        return x, after

    def after(self, product: Any, x: Tensor, left: Tensor, epsilon: float) -> Tensor:
        """The product after a deferred norm: y [M, N], in the dtype that the product writes."""
        if isinstance(product, Gathered):
            return product.gathered(self.after(own(product), x, left, epsilon))
        y = x.new_empty((len(x), product.n), dtype=product.output_dtype(len(x)))
        arrays = x, left, y, *_weights(product)
        self._launch(of_product_after, arrays, product.format, epsilon)
        return y

    def takes_gates(self, product: Product, down: Any, m: int) -> bool:
        """Whether `gated` can be used for a product of gates and ups after a deferred norm. down:
        the product that reads silu(gate) * up."""
        of = FORMATS[product.format], m, product.n // 2, product.k
        plain = product.bias is None and down.input_dtype(m) is torch.float16
        return plain and gated_product.supports(*of)

    def gated(self, product: Product, x: Tensor, left: Tensor, epsilon: float) -> Tensor:
        """silu(gate) * up, float16 [M, hidden], where `after` would give y = [gate, up]."""
        gates = x.new_empty((len(x), product.n // 2))
        self._launch(of_gated, (x, left, gates, *_weights(product)), product.format, epsilon)
        return gates

    def ahead(
        self, norms: Iterable[tuple[Any, Tensor, Any, Any]], m: int, epsilon: float
    ) -> tuple[list[OfArrays], set[Product]]:
        """(recipes of what deferred norms launch for m tokens, for
        `steps.compile.parallel_compile`; the products around them, which launch nothing else).
        norms: see `Decoder._norms`."""
        found: dict[Hashable, OfArrays] = {}

        def record(make: Callable[..., Launch], arrays: Sequence[Tensor], *rest: Any) -> None:
            types = operator.array_types(arrays)
            found[make, types, rest] = OfArrays(partial(make, *rest), types)

        here, around, left = DeferredNorms(record), set(), None
        for before, weight, after, reads_gates in norms:
            h = weight.new_empty((m, len(weight)))
            if not here.takes(before, after, h, weight):
                left = None
                continue
            around |= {before, after}
            a = h.new_empty((m, own(before).k), dtype=torch.float16)
            if left is None:
                _, left = here.launched((h,), weight, epsilon, torch.float16, before)
            x, left = here.before(before, a, h, weight, epsilon, left)
            if reads_gates is not None and here.takes_gates(after, reads_gates, m):
                here.gated(after, x, left, epsilon)
            else:
                here.after(own(after), x, left, epsilon)
        return [*found.values()], around


def own(product: Any) -> Any:
    """This rank's product of one whose y ranks join; else the product."""
    return product.products[0] if isinstance(product, Joined) else product


def by_step_18(product: Any, m: int) -> bool:
    """Whether a product of m tokens is one launch of step 18's kernel that reads float16."""
    if not isinstance(product, Product):
        return False
    choice = product.choice(m)
    return choice.kernel is bulk.KERNEL and choice.family == "A16"


def _weights(product: Product) -> tuple[Tensor, ...]:
    packed = product.packed[bulk.KERNEL.pack.__name__]
    return (*packed, *(() if product.bias is None else (product.bias,)))


def of_norm(
    epsilon: float, h: Any, weight: Any, x: Any, left: Any, y: Any = None, other: Any = None, *,
    machine: Machine,
) -> Launch:  # fmt: skip
    return add_and_norm.launch(h, y, weight, epsilon, x, other, left)


def of_product_before(
    format: str, epsilon: float, shared: bool, a: Any, h: Any, weight: Any, before: Any,
    after: Any, x: Any, *weights: Any, machine: Machine,
) -> Launch:  # fmt: skip
    places, weights = (weights[:2], weights[2:]) if shared else ((), weights)
    rest = a, h, weight, before, epsilon, after, x, *places
    return deferred_norm.launch_residual(FORMATS[format], weights, *rest)


def of_product_after(
    format: str, epsilon: float, x: Any, left: Any, y: Any, *weights: Any, machine: Machine
) -> Launch:
    return deferred_norm.launch_normed(FORMATS[format], weights, x, left, epsilon, y)


def of_gated(
    format: str, epsilon: float, x: Any, left: Any, gates: Any, *weights: Any, machine: Machine
) -> Launch:
    return gated_product.launch(FORMATS[format], weights, x, left, epsilon, gates)
