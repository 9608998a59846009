"""Layers of one token as `steps.kernels.decode.chain`: what is between two attentions is one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from qformats import FORMATS
from qformats.storage import storage_format
from steps.contract import Launch, Machine, multiprocessors
from steps.kernels.decode import bulk, chain
from steps.nn import operator as operator

if TYPE_CHECKING:
    from torch import Tensor

torch = operator.torch


class Memory:
    """What the blocks of chains show each other, of each layer: x before gates and before the next
    queries [width], gates [hidden], the sums of h^2 before gates [width / 32], and `left`."""

    def __init__(self, layers: int, width: int, hidden: int, device: Any) -> None:
        parts = width // chain.ROWS
        sizes = 2 * width, 2 * hidden, 2 * width, 4 * parts, 4 * (1 + parts)
        places = [0]
        for size in sizes:
            places.append(places[-1] + -(-size // 256) * 256)
        self.all = torch.full((layers, places[-1] // 2), -1, dtype=torch.int16, device=device)

        def view(layer: int, i: int, dtype: Any) -> Tensor:
            begin = places[i] // 2
            found: Tensor = self.all[layer, begin : begin + sizes[i] // 2].view(dtype)
            return found

        half, full = torch.float16, torch.float32
        dtypes = half, half, half, full, full
        self.layers = [
            tuple(view(layer, i, dtype) for i, dtype in enumerate(dtypes)) for layer in range(layers)
        ]

    def empty(self) -> None:
        self.all.fill_(-1)


class Chains:
    def __init__(self, launch: Callable[..., None]) -> None:
        self._launch = launch

    def run(
        self, layer: Any, qkv: Any, weight: Tensor, a: Tensor, h: Tensor, before: Tensor,
        memory: Sequence[Tensor], epsilon: float,
    ) -> Tensor | None:  # fmt: skip
        """From attention's a to the next layer's queries, keys and values; None behind the last."""
        products = layer.out, layer.gate_up, layer.down, *(() if qkv is None else (qkv,))
        packed = [one.packed[bulk.KERNEL.pack.__name__] for one in products]
        packed += [packed[-1]] * (4 - len(packed))
        y = None if qkv is None else torch.empty((1, qkv.n), dtype=torch.float16, device=a.device)
        bias = None if qkv is None else qkv.bias
        arrays = (
            *(one[0].view(-1) for one in packed), *(one[1].view(-1) for one in packed),
            layer.before_hidden, weight, a.view(-1), h.view(-1), before.view(-1), *memory,
            *(() if y is None else (y.view(-1),)), *(() if bias is None else (bias,)),
        )  # fmt: skip
        self._launch(of_chain, arrays, layer.out.format, epsilon)
        return y


def of_chain(format: str, epsilon: float, *arrays: Any, machine: Machine) -> Launch:
    weights, scales, norms, rest = arrays[:4], arrays[4:8], arrays[8:10], arrays[10:]
    a, h, before, x_hidden, gates, x_next, squares, left, *more = rest
    y, bias = (*more, None, None)[:2]
    n_qkv = 0 if y is None else y.size
    name, blocks = storage_format(FORMATS[format]).name, multiprocessors()
    size = h.size, gates.size, a.size, n_qkv
    how = chain.chain_of(name, *size, blocks, bias is not None)
    assert how is not None
    place = a, h, before, x_hidden, gates, x_next, squares, left, y
    return chain.launch(how, weights, scales, bias, norms, *place, epsilon, blocks, WINDOW)


WINDOW = chain.H200_WINDOW
