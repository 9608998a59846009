"""Layers of one token: what is between two attentions is one launch, `steps.kernels.between.chain`.

    norm, qkv | attention | chain | attention | chain ... attention | chain, without qkv | logits

A layer is chained where each of its products would be step 18's kernel in float16, without a bias
but for that of queries, keys and values, and where their sizes divide into shares of this GPU
(`Chains.takes`). Otherwise it is as `steps.decoder.deferred` has it. Products have formats of their
own, two of them at most; one kernel is for both. Queries, keys and values may have both.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from qformats import FORMATS
from qformats.storage import storage_format
from steps.compile.dry_run import OfArrays
from steps.contract import Launch, Machine, multiprocessors
from steps.decoder.deferred import DeferredNorms, by_step_18
from steps.decoder.model import Concatenated
from steps.kernels.between import attention, chain
from steps.kernels.decode import bulk
from steps.nn import operator as operator

if TYPE_CHECKING:
    from torch import Tensor

    from steps.decoder.model import Cache, Layer

torch = operator.torch


class Memory:
    """What thread blocks of a chain show each other, for each layer. Of a sequence: launches that
    may run at the same time need memory of their own.

    formats: of all products of the model (`formats_of`). layers: of each what attention makes,
    float16, and (x before gates, silu(gate) * up, x before qkv, float16; the sums of h^2 before
    gates, `left` before qkv, see `steps.decoder.deferred`, and h behind down, float32; the next
    layer's queries, keys and values, float16), all of them `NOTHING`.
    """

    def __init__(self, formats: tuple[str, ...], layers: int, first: Layer, device: Any) -> None:
        self.formats = formats
        half, full, width = torch.float16, torch.float32, first.down.n
        parts = width // chain.ROWS
        sizes = (
            (first.out.k, half),
            (width, half),
            (first.down.k, half),
            (width, half),
            (parts, full),
            (1 + parts, full),
            (width, full),
            (sum(_features(first.qkv)), half),
        )
        places = [0]
        for count, dtype in sizes:
            places.append(places[-1] + -(-count * dtype.itemsize // 256) * 256)
        self._all = torch.full((layers, places[-1]), 0xFF, dtype=torch.uint8, device=device)
        self.layers = [
            tuple(
                of_layer[at : at + count * dtype.itemsize].view(dtype)
                for at, (count, dtype) in zip(places, sizes, strict=False)
            )
            for of_layer in self._all
        ]

    def empty(self) -> None:
        """Queue that all of it is `NOTHING` again, before the first layer of a token."""
        self._all.fill_(0xFF)


class Chains:
    """launch: as of `steps.decoder.deferred.DeferredNorms`."""

    def __init__(self, launch: Callable[..., None]) -> None:
        self._launch = launch

    def takes(self, layers: Sequence[Layer]) -> bool:
        """Whether all layers of a model can be chained."""
        first = layers[0]
        if any(layer.mixture is not None for layer in layers):
            return False
        products = [one for layer in layers for each in layer.products for one in _parts(each)]
        norms = [one for layer in layers for one in (layer.before_attention, layer.before_hidden)]
        if not all(
            by_step_18(one, 1) and one.output_dtype(1) is torch.float16 for one in products
        ) or any(one.dtype is not torch.float32 for one in norms):
            return False
        blocks, formats = chain.thread_blocks(multiprocessors()), formats_of(layers)
        alike = all(
            _size(one) == _size(like)
            for layer in layers
            for one, like in zip(layer.products, first.products, strict=True)
        )
        sizes = {_sizes(layer, qkv) for layer in layers for qkv in (layer.qkv, None)}
        return (
            alike
            and not any(_biased(one) for one in first.products[1:])
            and all(len(_parts(one)) == 1 for layer in layers for one in layer.products[1:])
            and all(chain.supports(formats, *one, blocks) for one in sizes)
            and chain.runs_here()
        )

    def memory(self, layers: Sequence[Layer]) -> Memory:
        return Memory(formats_of(layers), len(layers), layers[0], layers[0].before_hidden.device)

    def attends(self, cache: Tensor, heads: int) -> bool:
        """Whether attention with so many heads of queries can run beside chains."""
        _, twice, _, size = cache.shape
        return cache.dtype is torch.float16 and attention.supports(heads, twice // 2, size)

    def attention(
        self, qkv: Tensor, cached: Sequence[Tensor], memory: Sequence[Tensor],
        head_norms: tuple[Tensor, Tensor, float] | None,
    ) -> Tensor:  # fmt: skip
        """a of a layer but the first one, in `memory`, beside the chain that makes qkv. cached: see
        `Operations.attention`."""
        *weights, epsilon = head_norms or (0.0,)
        a = memory[0].view(1, -1)
        self._launch(of_attention, (qkv, *cached, a, *weights), epsilon)
        return a

    def of_layer(
        self, layer: Layer, weight: Tensor, qkv: Any, a: Tensor, h: Tensor, left: Tensor,
        memory: Sequence[Tensor], formats: tuple[str, ...], waits: bool, epsilon: float,
    ) -> Tensor | None:  # fmt: skip
        """The queries, keys and values [1, N] of the next layer, of attention's a [1, K]; and h
        behind `down` in `memory`. left: that of the norm before `layer.out`. waits: for what makes
        a, h and left; else all of them are in memory of `Memory`.

        weight, qkv: of the next norm, and the product behind it. Where that is None there is no
        next layer, and the norm is in `memory`, as a deferred one is: x and left. formats: of
        all chains of the model.
        """
        parts = () if qkv is None else _parts(qkv)
        products = layer.out, layer.gate_up, layer.down, *parts
        packed = [one.packed[bulk.KERNEL.pack.__name__] for one in products]
        biases = [one.bias for one in parts if one.bias is not None]
        *shown, following = memory[1:]
        y = [following] if parts else []
        arrays = (
            layer.before_hidden, weight, a, h, left, *shown, *(weights for weights, _ in packed),
            *(scales for _, scales in packed), *biases, *y,
        )  # fmt: skip
        flat = [one.view(-1) for one in arrays]
        names = tuple(_stored_as(one) for one in products)
        features = tuple(one.n for one in parts)
        self._launch(of_chain, flat, formats, names, features, waits, epsilon)
        return following.view(1, -1) if parts else None

    def ahead(
        self, layers: Sequence[Layer], norm: Tensor, output: Any, cache: Cache, heads: int,
        epsilon: float,
    ) -> tuple[list[OfArrays], set[Any]]:  # fmt: skip
        """(recipes of what a token launches beside operations and the first product, for
        `steps.compile.parallel_compile`; the products that launch nothing else). norm, output: of
        the logits."""
        found: dict[Hashable, OfArrays] = {}

        def record(make: Callable[..., Launch], arrays: Sequence[Tensor], *rest: Any) -> None:
            types = operator.array_types(arrays)
            found[make, types, rest] = OfArrays(partial(make, *rest), types)

        here, norms, first, last = Chains(record), DeferredNorms(record), layers[0], layers[-1]
        h = norm.new_empty((1, first.down.n))
        a = h.new_empty((1, first.out.k), dtype=torch.float16)
        x, left = norms.launched((h,), norm, epsilon, torch.float16, first.out)
        memory, formats = self.memory(layers[:1]).layers[0], formats_of(layers)
        for layer, qkv in zip(layers, (*(one.qkv for one in layers[1:]), None), strict=True):
            waits = layer is first or not here.attends(cache.layers[0], heads)
            if not waits:
                cached = cache.layers[0], cache.position, cache.cos, cache.sin
                here.attention(memory[-1].view(1, -1), cached, memory, layer.head_norms)
            here.of_layer(layer, norm, qkv, a, h, left, memory, formats, waits, epsilon)
            left = memory[5]
        around = {one for layer in layers for one in layer.products} - {first.qkv}
        if norms.takes(last.down, output, h, norm):
            norms.after(output, x, left.view(1, -1), epsilon)
            around.add(output)
        return [*found.values()], around


def formats_of(layers: Sequence[Layer]) -> tuple[str, ...]:
    """Storage formats of all that layers multiply, in the order of their names."""
    products = (one for layer in layers for each in layer.products for one in _parts(each))
    return tuple(sorted({_stored_as(one) for one in products}))


def _parts(product: Any) -> tuple[Any, ...]:
    """The matrices of a product, each in one format."""
    return tuple(product.products) if isinstance(product, Concatenated) else (product,)


def _stored_as(product: Any) -> str:
    return storage_format(FORMATS[product.format]).name


def _features(product: Any) -> tuple[int, ...]:
    return tuple(one.n for one in _parts(product))


def _size(product: Any) -> tuple[int, int, bool]:
    """(features, K, whether there is a bias)."""
    return sum(_features(product)), _parts(product)[0].k, _biased(product)


def _biased(product: Any) -> bool:
    return any(one.bias is not None for one in _parts(product))


def _sizes(layer: Layer, qkv: Any) -> tuple[int, int, int, tuple[int, ...], bool]:
    """As `steps.kernels.between.chain.chain_of` takes them behind formats. qkv: of the next layer,
    None behind the last."""
    features, biased = ((), False) if qkv is None else (_features(qkv), _biased(qkv))
    return layer.down.n, layer.down.k, layer.out.k, features, biased


def of_attention(
    epsilon: float, qkv: Any, cache: Any, position: Any, cos: Any, sin: Any, a: Any, *weights: Any,
    machine: Machine,
) -> Launch:  # fmt: skip
    head_norms = (*weights, epsilon) if weights else None
    return attention.launch(qkv, cache, position, cos, sin, a, machine, head_norms, polled=True)


def of_chain(
    formats: tuple[str, ...], names: tuple[str, ...], qkv: tuple[int, ...], waits: bool,
    epsilon: float, *arrays: Any, machine: Machine,
) -> Launch:  # fmt: skip
    norms, place, arrays = arrays[:2], arrays[2:11], arrays[11:]
    count = len(names)
    weights, scales, rest = arrays[:count], arrays[count : 2 * count], arrays[2 * count :]
    y, biases = (rest[-1], rest[:-1]) if qkv else (None, ())
    operands = weights, scales, norms, place, y, biases, qkv
    blocks = chain.thread_blocks(multiprocessors())
    return chain.launch(formats, names, *operands, epsilon, blocks, waits=waits)
