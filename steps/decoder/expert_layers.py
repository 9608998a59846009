"""Layers with experts at one token, two launches each: attention, and all behind it
(`steps.kernels.experts.layer`).

    norm, qkv | attention, layer | attention, layer | ... | norm, logits

Both show their outputs in words of memory and poll for those of the other, so that they overlap:
attention waits beside the layer before it, and a layer's first weights come beside attention. The
residual is in memory before the first layer and behind the last one only.

It is for models all of whose layers have experts, and whose products are of packed tiles without
biases; what a thread block reads of a layer has to fit into shared memory, and all thread blocks
must be on the GPU at once, as those of a chain (`takes`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from qformats.repack import tiles
from steps.compile.dry_run import OfArrays
from steps.contract import Launch, Machine
from steps.decoder.model import Cache, Layer, Product, StepExperts
from steps.kernels.between import attention, chain
from steps.kernels.experts import layer as kernel
from steps.nn import operator as operator

if TYPE_CHECKING:
    from torch import Tensor

torch = operator.torch


class ExpertLayers:
    """launch: (make, arrays, *rest) queues the launch make(*rest, *arrays, machine=...), as
    `kernel_operations.Kernels` does."""

    def __init__(self, launch: Callable[..., None]) -> None:
        self._launch = launch
        self._known: dict[Hashable, tuple[Sequence[Layer], bool]] = {}

    def takes(self, layers: Sequence[Layer], heads: int, cache: Tensor) -> bool:
        """Whether there are launches for one token of these layers, with so many heads of queries,
        and caches like this one."""
        key = id(layers), heads, cache.shape, cache.dtype
        if key not in self._known:  # with the layers, so that no others get their id
            self._known[key] = layers, _takes(layers, heads, cache)
        return self._known[key][1]

    def run(
        self,
        layers: Sequence[Layer],
        norm: Tensor,
        qkv: Tensor,
        h: Tensor,
        cache: Cache,
        heads: int,
        epsilon: float,
    ) -> None:
        """h, float32 [1, width], goes through all layers. norm: the weight of the one behind them.
        qkv: of the first."""
        shape = _shape(layers[0], layers[0])
        if cache.shown is None:
            cache.shown = h.new_zeros((1, shape.words), dtype=torch.int32)
        words, cached = cache.shown, (cache.position, cache.cos, cache.sin)
        count = len(layers)
        for index, (layer, kept) in enumerate(zip(layers, cache.layers, strict=True)):
            following = layers[index + 1] if index + 1 < count else layer
            after = norm if following is layer else following.before_attention
            *weights, of_heads = layer.head_norms or (0.0,)
            arrays = [*([qkv] if index == 0 else []), kept, *cached, words, *weights]
            sizes, numbers = _sizes(layer, following), (index, count)
            self._launch(of_attention, arrays, sizes, layer.out.k, of_heads, numbers)
            assert layer.mixture is not None
            experts = layer.mixture.experts
            arrays = [*layer.out.packed[tiles.__name__], *experts._arrays("gate_up")]
            arrays += [*experts._arrays("down"), *following.qkv.packed[tiles.__name__]]
            arrays += [h, layer.before_hidden, after, layer.mixture.router, words]
            self._launch(of_layer, arrays, sizes, epsilon, numbers)

    def ahead(
        self, layers: Sequence[Layer], norm: Tensor, cache: Cache, heads: int, epsilon: float
    ) -> list[OfArrays]:
        """Recipes of the launches for one token."""
        found: dict[Hashable, OfArrays] = {}

        def record(make: Callable[..., Launch], arrays: Sequence[Tensor], *rest: Any) -> None:
            types = operator.array_types(arrays)
            numbers = min(rest[-1][0], 1), rest[-1][1]  # of the second layer and on alike
            found[make, types, rest[:-1], numbers] = OfArrays(partial(make, *rest), types)

        h = norm.new_empty((1, len(norm)))
        qkv = h.new_empty((1, layers[0].qkv.n), dtype=torch.float16)
        ExpertLayers(record).run(layers, norm, qkv, h, cache, heads, epsilon)
        return [*found.values()]


def _takes(layers: Sequence[Layer], heads: int, cache: Tensor) -> bool:
    _, twice, _, size = cache.shape
    known = cache.dtype is torch.float16 and attention.supports(heads, twice // 2, size)
    if not known or not all(map(_is_known, layers)) or not chain.runs_here():
        return False
    first = _shape(layers[0], layers[0])
    of_words = {_shape(one, one).shown for one in layers}
    pairs = zip(layers, [*layers[1:], layers[-1]], strict=True)
    fits = all(kernel.why_not(_shape(*pair)) is None for pair in pairs)
    return fits and of_words == {first.shown}


def _is_known(layer: Layer) -> bool:
    """Whether a layer has the products and the dtypes that launches take."""
    mixture = layer.mixture
    if mixture is None or mixture.shared is not None:
        return False
    plain = all(
        isinstance(one, Product) and one.bias is None and tiles.__name__ in one.packed
        for one in (layer.qkv, layer.out)
    )
    norms = layer.before_attention, layer.before_hidden, mixture.router
    if not plain or any(one.dtype is not torch.float32 for one in norms):
        return False
    experts = mixture.experts
    return (
        type(experts) is StepExperts
        and experts._gate == "silu"
        and bool(experts._arrays("gate_up"))
    )


def _sizes(layer: Layer, following: Layer) -> tuple[Any, ...]:
    """Arguments of `kernel.shape_of`."""
    mixture, qkv = layer.mixture, following.qkv
    assert mixture is not None
    experts = mixture.experts
    formats = layer.out.format, experts.formats["gate"], experts.formats["down"], qkv.format
    sizes = experts.hidden, layer.out.k, experts.inner, experts.num_experts
    return formats, *sizes, mixture.chosen, mixture.normed, qkv.n


def _shape(layer: Layer, following: Layer) -> kernel.LayerShape:
    return kernel.shape_of(*_sizes(layer, following))


def of_attention(
    sizes: tuple[Any, ...], width: int, epsilon: float, numbers: tuple[int, int], *arrays: Any,
    machine: Machine,
) -> Launch:  # fmt: skip
    given = list(arrays)
    qkv = given.pop(0) if numbers[0] == 0 else None
    cache, position, cos, sin, words, *weights = given
    at, *_, qkv_at = kernel.shape_of(*sizes).shown
    places = attention.Shown(None if qkv is not None else qkv_at, at)
    head_norms = (*weights, epsilon) if weights else None
    rest = cache, position, cos, sin, words, places, width, *numbers
    return attention.launch_shown(qkv, *rest, machine, head_norms)


def of_layer(
    sizes: tuple[Any, ...], epsilon: float, numbers: tuple[int, int], *arrays: Any,
    machine: Machine,
) -> Launch:  # fmt: skip
    products, rest = [(arrays[i], arrays[i + 1]) for i in range(0, 8, 2)], arrays[8:]
    h, weight, after, router, words = rest
    given = h, weight, after, router, words, epsilon, *numbers
    return kernel.launch(kernel.shape_of(*sizes), products, *given)
