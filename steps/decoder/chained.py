"""Layers of one token: what is between two attentions is one launch, `steps.kernels.between.chain`.

    norm, qkv | attention | chain | attention | chain ... attention | chain, without qkv | logits

A layer is chained where each of its products would be step 18's kernel in float16, all in one
format and without a bias but for that of queries, keys and values, and where their sizes divide
into shares of this GPU (`Chains.takes`). Otherwise it is as `steps.decoder.deferred` has it.
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
from steps.kernels.between import chain
from steps.kernels.decode import bulk
from steps.nn import operator as operator

if TYPE_CHECKING:
    from torch import Tensor

    from steps.decoder.model import Layer

torch = operator.torch


class Memory:
    """What thread blocks of a chain show each other, for each layer. Of a sequence: launches that
    may run at the same time need memory of their own.

    layers: of each (x before gates, silu(gate) * up, x before qkv, float16; the sums of h^2 before
    gates, and `left` before qkv, float32, see `steps.decoder.deferred`), all of them `NOTHING`.
    """

    def __init__(self, layers: int, width: int, hidden: int, device: Any) -> None:
        parts, half, full = width // chain.ROWS, torch.float16, torch.float32
        sizes = (width, half), (hidden, half), (width, half), (parts, full), (1 + parts, full)
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
        alike = all(
            by_step_18(one, 1)
            and (one.format, one.n, one.k) == (like.format, like.n, like.k)
            and (one.bias is None) == (like.bias is None)
            for layer in layers
            if layer.mixture is None
            for one, like in zip(layer.products, first.products, strict=True)
        )
        if not alike or any(layer.mixture is not None for layer in layers):
            return False
        qkv, *others = first.products
        norms = (one for layer in layers for one in (layer.before_attention, layer.before_hidden))
        return (
            all(one.format == qkv.format and one.bias is None for one in others)
            and all(one.output_dtype(1) is torch.float16 for one in first.products)
            and all(one.dtype is torch.float32 for one in norms)
            and chain.supports(*_sizes(first, qkv), chain.thread_blocks(multiprocessors()))
            and chain.runs_here()
        )

    def memory(self, layers: Sequence[Layer]) -> Memory:
        first = layers[0]
        return Memory(len(layers), first.down.n, first.down.k, first.before_hidden.device)

    def of_layer(
        self, layer: Layer, weight: Tensor, qkv: Any, a: Tensor, h: Tensor, left: Tensor,
        memory: Sequence[Tensor], epsilon: float,
    ) -> Tensor | None:  # fmt: skip
        """The queries, keys and values [1, N] of the next layer, of attention's a [1, K], and h of
        this one behind `down` in place. left: that of the norm before `layer.out`.

        weight, qkv: of the next norm, and the product behind it. Where that is None there is no
        next layer, and the norm is in `memory`, as a deferred one is: x and left.
        """
        products = layer.out, layer.gate_up, layer.down, qkv or layer.down
        packed = [one.packed[bulk.KERNEL.pack.__name__] for one in products]
        of_qkv: list[Tensor] = []
        if qkv is not None:
            of_qkv = [a.new_empty((1, qkv.n)), *(() if qkv.bias is None else (qkv.bias,))]
        arrays = (
            *(weights for weights, _ in packed), *(scales for _, scales in packed),
            layer.before_hidden, weight, a, h, left, *memory, *of_qkv,
        )  # fmt: skip
        flat = [one.view(-1) for one in arrays]
        self._launch(of_chain, flat, layer.out.format, epsilon)
        return of_qkv[0] if of_qkv else None

    def ahead(
        self, layers: Sequence[Layer], norm: Tensor, output: Any, epsilon: float
    ) -> tuple[list[OfArrays], set[Any]]:
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
        memory = self.memory(layers[:1]).layers[0]
        for layer, qkv in ((first, first.qkv), (last, None)):
            here.of_layer(layer, norm, qkv, a, h, left, memory, epsilon)
            left = memory[-1]
        around = {one for layer in layers for one in layer.products} - {first.qkv}
        if norms.takes(last.down, output, h, norm):
            norms.after(output, x, memory[-1].view(1, -1), epsilon)
            around.add(output)
        return [*found.values()], around


def _sizes(layer: Layer, qkv: Any) -> tuple[str, int, int, int, int, bool]:
    """As `steps.kernels.between.chain.chain_of` takes them."""
    name = storage_format(FORMATS[layer.out.format]).name
    n_qkv, biased = (0, False) if qkv is None else (qkv.n, qkv.bias is not None)
    return name, layer.down.n, layer.down.k, layer.out.k, n_qkv, biased


def of_chain(format: str, epsilon: float, *arrays: Any, machine: Machine) -> Launch:
    weights, scales, norms, place = arrays[:4], arrays[4:8], arrays[8:10], arrays[10:18]
    y, bias = (*arrays[18:], None, None)[:2]
    name = storage_format(FORMATS[format]).name
    rest = epsilon, chain.thread_blocks(multiprocessors())
    return chain.launch(name, weights, scales, norms, place, y, bias, *rest)
