"""Layers of one token in one launch, `steps.kernels.between.chain`.

    norm | chain: of each layer qkv, attention, out, gates and ups, down | logits

Layers are chained where each of their products would be step 18's kernel in float16, all in one
format and without a bias but for that of queries, keys and values, and where their sizes divide
into shares of this GPU (`Chains.takes`). Otherwise they are as `steps.decoder.deferred` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from qformats import FORMATS
from qformats.storage import storage_format
from steps.compile.dry_run import OfArrays
from steps.contract import Launch, Machine, multiprocessors
from steps.decoder.deferred import DeferredNorms, by_step_18
from steps.decoder.model import Product
from steps.kernels.between import chain
from steps.kernels.between.chain import Sizes
from steps.kernels.decode import bulk
from steps.nn import operator as operator

if TYPE_CHECKING:
    from torch import Tensor

    from steps.decoder.model import Cache, Config, Layer

torch = operator.torch

PACKED: Final = bulk.KERNEL.pack.__name__


class Joined:
    """Weights of all layers one behind the other, as one launch reads them. `Layer`s keep views.

    weights, scales : of qkv, out, gates and ups, down. norms: of those before gates, and of those
    behind down. of_heads: of queries and of keys, or none. bias: of qkv, or None.
    """

    def __init__(self, layers: Sequence[Layer], norm: Tensor) -> None:
        self.weights: list[Tensor] = []
        self.scales: list[Tensor] = []
        for products in zip(*(layer.products for layer in layers), strict=True):
            for i, into in enumerate((self.weights, self.scales)):
                parts = [one.packed[PACKED][i] for one in products]
                whole = torch.cat([part.view(-1) for part in parts])
                into.append(whole)
                for one, part, view in zip(
                    products, parts, whole.view(len(parts), -1), strict=True
                ):
                    one.move(PACKED, i, view.view(part.shape))
        behind = [*(layer.before_attention for layer in layers[1:]), norm]
        self.norms = torch.cat([layer.before_hidden for layer in layers]), torch.cat(behind)
        of_heads = [layer.head_norms[:2] for layer in layers if layer.head_norms is not None]
        self.of_heads = [torch.cat(one) for one in zip(*of_heads, strict=True)]
        biases = [layer.qkv.bias for layer in layers if layer.qkv.bias is not None]
        self.bias = torch.cat(biases) if biases else None


def memory(sizes: Sizes, layers: int, device: Any) -> tuple[Tensor, list[Tensor]]:
    """(all of it, its parts): what thread blocks of a chain show each other. Of a sequence:
    launches that may run at the same time need memory of their own. Before each token it is filled
    with 0xFF, `chain.NOTHING`."""
    half, full, parts = torch.float16, torch.float32, sizes.width // chain.ROWS
    of_layer = (
        (sizes.width, half), (sizes.hidden, half), (sizes.width, half), (sizes.n_qkv, half),
        (sizes.k_out, half), (parts, full), (1 + parts, full),
    )  # fmt: skip
    words = chain.words_of(sizes, chain.thread_blocks(multiprocessors()))
    counts = [*((layers * count, dtype) for count, dtype in of_layer), (words, torch.int32)]
    places = [0]
    for count, dtype in counts:
        places.append(places[-1] + -(-count * dtype.itemsize // 256) * 256)
    whole = torch.full((places[-1],), 0xFF, dtype=torch.uint8, device=device)
    return whole, [
        whole[at : at + count * dtype.itemsize].view(dtype)
        for at, (count, dtype) in zip(places, counts, strict=False)
    ]


class Chains:
    """launch: as of `steps.decoder.deferred.DeferredNorms`."""

    def __init__(self, launch: Callable[..., None]) -> None:
        self._launch = launch

    def joined(self, layers: Sequence[Layer], norm: Tensor, config: Config) -> Joined | None:
        """Their weights, joined, if layers are such that they may be chained."""
        return Joined(layers, norm) if self._alike(layers, config) else None

    def _alike(self, layers: Sequence[Layer], config: Config) -> bool:
        first = layers[0]
        if any(layer.mixture is not None for layer in layers):
            return False
        products = [one for layer in layers for one in layer.products]
        if not all(isinstance(one, Product) and PACKED in one.packed for one in products):
            return False
        alike = all(
            (one.format, one.n, one.k) == (first.qkv.format, like.n, like.k)
            and (one.bias is None) == (like.bias is None)
            for layer in layers
            for one, like in zip(layer.products, first.products, strict=True)
        )
        norms = [one for layer in layers for one in (layer.before_attention, layer.before_hidden)]
        heads = [layer.head_norms for layer in layers]
        return (
            alike
            and all(one.bias is None for one in first.products[1:])
            and all(one.dtype is torch.float32 for one in norms)
            and len({one is None for one in heads}) == 1
            and len({one[2] for one in heads if one is not None}) < 2
            and chain.supports(*_sizes(first, config), chain.thread_blocks(multiprocessors()))
            and chain.runs_here()
        )

    def takes(self, layers: Sequence[Layer], cache: Cache) -> bool:
        """Whether a token of a sequence is a chain, of layers that are joined."""
        return cache.whole.dtype is torch.float16 and all(
            by_step_18(one, 1) and one.output_dtype(1) is torch.float16
            for layer in layers
            for one in layer.products
        )

    def of_token(
        self, layers: Sequence[Layer], joined: Joined, x: Tensor, left: Tensor, h: Tensor,
        cache: Cache, config: Config,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(x, left) of the norm behind the last layer, as `deferred` has them. x, left: of the norm
        before the first one. h: the residual, in place."""
        first = layers[0]
        name, sizes = _sizes(first, config)
        if cache.shown is None:
            cache.shown = memory(sizes, len(layers), h.device)
        whole, shown = cache.shown
        whole.fill_(0xFF)
        arrays = [
            *joined.weights, *joined.scales, *joined.norms, x, left, h, *shown, cache.whole,
            cache.position, cache.cos, cache.sin, *joined.of_heads,
        ]  # fmt: skip
        if joined.bias is not None:
            arrays.append(joined.bias)
        of_heads = 0.0 if first.head_norms is None else first.head_norms[2]
        epsilons = config.epsilon, of_heads
        self._launch(of_chain, [one.view(-1) for one in arrays], name, sizes, len(layers), epsilons)
        parts = sizes.width // chain.ROWS
        return shown[2].view(len(layers), -1)[-1:], shown[6].view(len(layers), 1 + parts)[-1:]

    def ahead(
        self, layers: Sequence[Layer], joined: Joined, norm: Tensor, output: Any, cache: Cache,
        config: Config,
    ) -> tuple[list[OfArrays], set[Any]]:  # fmt: skip
        """(recipes of what a token launches beside operations, for
        `steps.compile.parallel_compile`; the products that launch nothing else). norm, output: of
        the logits."""
        found: dict[Hashable, OfArrays] = {}

        def record(make: Callable[..., Launch], arrays: Sequence[Tensor], *rest: Any) -> None:
            types = operator.array_types(arrays)
            found[make, types, rest] = OfArrays(partial(make, *rest), types)

        here, norms, first, last = Chains(record), DeferredNorms(record), layers[0], layers[-1]
        h = norm.new_empty((1, first.down.n))
        given = first.before_attention, config.epsilon, torch.float16, first.out
        x, left = norms.launched((h,), *given)
        x, left = here.of_token(layers, joined, x, left, h, cache, config)
        around = {one for layer in layers for one in layer.products}
        if norms.takes(last.down, output, h, norm):
            norms.after(output, x, left, config.epsilon)
            around.add(output)
        return [*found.values()], around


def _sizes(layer: Layer, config: Config) -> tuple[str, Sizes]:
    name = storage_format(FORMATS[layer.out.format]).name
    heads = config.heads, config.kv_heads, config.head_dim
    rest = layer.qkv.bias is not None, layer.head_norms is not None
    return name, Sizes(layer.down.n, layer.down.k, *heads, *rest)


def of_chain(
    name: str, sizes: Sizes, layers: int, epsilons: tuple[float, float], *arrays: Any,
    machine: Machine,
) -> Launch:  # fmt: skip
    given = list(arrays)
    weights, scales, norms, place, shown = (
        [given.pop(0) for _ in range(count)] for count in (4, 4, 2, 3, 8)
    )
    attention = [given.pop(0) for _ in range(6 if sizes.normed else 4)]
    attention += attention[2:4] if not sizes.normed else []
    rest = given[0] if given else None, epsilons, chain.thread_blocks(multiprocessors())
    return chain.launch(name, sizes, layers, weights, scales, norms, place, shown, attention, *rest)
