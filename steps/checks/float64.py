"""The float64 products that a fuzzer compares with: by NumPy, or by a machine for many products.

    Products(blocks).answers(used, a)               by NumPy
    MachineProducts(blocks, gpu).answers(used, a)   the same by `float64_product`

What is multiplied is `reference.product`'s in both: `factors` of activations and `terms` of
weights. A machine keeps the terms, so that hundreds of products with the same weights cost no more
than their own float64 operations.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from numba import cuda, float64

from qformats import format_of
from reference.operands import Q81, Bfloats, Halves, Tokens
from reference.product import both, factors, terms
from steps.contract import Launch, Machine, ceil_div

Operands = Q81 | Halves | Bfloats | Tokens

TILE: Final = 16
"""Outputs of a thread block in M and in N, and K of a stage."""

STRIDE: Final = TILE + 1
"""Numbers from one row of a stage to the next in shared memory."""

PLAIN, SIZES, SQUARES = range(3)
"""What `float64_product` multiplies: x and w; |x| and w; x^2 and w^2."""


class Answers(NamedTuple):
    """What C should be, float64[M, N] each.

    same, size: the product of the operands that a kernel multiplied, and its magnitude.
    wanted, most: the same of A as it was given, and the dequantized weights.
    energy: sum a^2 w^2.
    """

    same: np.ndarray
    size: np.ndarray
    wanted: np.ndarray
    most: np.ndarray
    energy: np.ndarray

    def rows(self, pick: np.ndarray) -> Answers:
        """Of some tokens only."""
        return Answers(*(each[pick] for each in self))


class Products:
    """Products with some weights, by NumPy. blocks: structured [N, K/32], of K-quants [N, K/256]"""

    def __init__(self, blocks: np.ndarray) -> None:
        self.blocks = blocks

    def answers(self, used: Operands | None, a: np.ndarray) -> Answers:
        """used: what a kernel multiplied, None where that was float32 A itself; a: A [M, K]"""
        wanted, most = both(a, self.blocks)
        same, size = (wanted, most) if used is None else both(used, self.blocks)
        energy = a.astype(np.float64) ** 2 @ (self.weights**2).T
        return Answers(same, size, wanted, most, energy)

    @property
    def weights(self) -> np.ndarray:
        """The dequantized weights, float64 [N, K]"""
        return format_of(self.blocks).dequantize(self.blocks).astype(np.float64)

    @cached_property
    def squares(self) -> np.ndarray:
        """Sum of the squares of each row's weights, float64 [N]"""
        weights = self.weights
        return np.asarray(np.einsum("nk,nk->n", weights, weights))


class MachineProducts(Products):
    """The same by a machine, which keeps the weights in float64."""

    def __init__(self, blocks: np.ndarray, machine: Machine) -> None:
        super().__init__(blocks)
        self._machine = machine
        self._terms: dict[type, tuple[Any, ...]] = {}

    def answers(self, used: Operands | None, a: np.ndarray) -> Answers:
        same, *sizes = self._terms_of(type(a))
        x = self._machine.array(factors(a))
        asked = [(x, same, PLAIN), (x, same, SQUARES), *((x, one, SIZES) for one in sizes)]
        if used is not None:
            same, *sizes = self._terms_of(type(used))
            x = self._machine.array(factors(used))
            asked += [(x, same, PLAIN), *((x, one, SIZES) for one in sizes)]
        m, n = len(a), len(self.blocks)
        out = self._machine.empty((len(asked), m, n), np.float64)
        for i, (left, right, what) in enumerate(asked):
            self._machine.run(product_launch(left, right, out[i], what))
        wanted, energy, most, *others = np.array(self._machine.host(out))
        if used is None:
            return Answers(wanted, most, wanted, most, energy)
        return Answers(others[0], np.max(others[1:], axis=0), wanted, most, energy)

    def _terms_of(self, kind: type) -> tuple[Any, ...]:
        """What factors of such activations are multiplied by: `Terms.same`, then its sizes."""
        if kind not in self._terms:
            made = terms(kind, self.blocks)
            self._terms[kind] = tuple(map(self._machine.array, (made.same, *made.sizes)))
        return self._terms[kind]


def product_launch(x: Any, w: Any, out: Any, what: int) -> Launch:
    """out[M, N] = x[M, K] @ w[N, K]^T, float64 all of them; what: `PLAIN`, `SIZES` or `SQUARES`"""
    m, n = out.shape
    return Launch(
        float64_product, (ceil_div(n, TILE), ceil_div(m, TILE)), (TILE, TILE), (x, w, out, what)
    )


@cuda.jit
def float64_product(x, w, out, what):
    """A tile of each in shared memory, an output a thread."""
    tile_x = cuda.shared.array((TILE, STRIDE), float64)
    tile_w = cuda.shared.array((TILE, STRIDE), float64)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    m, n0 = cuda.blockIdx.y * TILE + ty, cuda.blockIdx.x * TILE
    total = float64(0)
    for k0 in range(0, x.shape[1], TILE):
        u, v = float64(0), float64(0)
        if k0 + tx < x.shape[1]:
            if m < out.shape[0]:
                u = x[m, k0 + tx]
            if n0 + ty < out.shape[1]:
                v = w[n0 + ty, k0 + tx]
        if what == SIZES:
            u = abs(u)
        if what == SQUARES:
            u, v = u * u, v * v
        tile_x[ty, tx] = u
        tile_w[ty, tx] = v
        cuda.syncthreads()
        for j in range(TILE):
            total += tile_x[ty, j] * tile_w[tx, j]
        cuda.syncthreads()
    if m < out.shape[0] and n0 + tx < out.shape[1]:
        out[m, n0 + tx] = total
