"""The float64 products that a fuzzer compares with: by NumPy, or by a machine for many products.

    Products(blocks).answers(used, a)               by NumPy
    MachineProducts(blocks, gpu).answers(used, a)   the same by `float64_products`

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
from reference.product import factors, same_operands, terms
from steps.contract import Launch, Machine, ceil_div

Operands = Q81 | Halves | Bfloats | Tokens

TILE: Final = 16  # outputs of a thread block in M and in N
DEPTH: Final = 64  # K of a stage in shared memory
STRIDE: Final = DEPTH + 1  # numbers from one row of a stage to the next


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
        wanted, most = same_operands(a, self.blocks)
        same, size = (wanted, most) if used is None else same_operands(used, self.blocks)
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
        self._terms: dict[type, Any] = {}

    def answers(self, used: Operands | None, a: np.ndarray) -> Answers:
        given = self._terms_of(type(a))
        count = others = len(given) + 1
        if used is not None:
            count += len(self._terms_of(type(used)))
        out = self._machine.empty((count, len(a), len(self.blocks)), np.float64)
        run = self._machine.run
        run(products_launch(self._machine.array(factors(a)), given, out[:others]))
        if used is not None:
            x = self._machine.array(factors(used))
            run(products_launch(x, self._terms_of(type(used)), out[others:]))
        wanted, most, energy, *more = np.array(self._machine.host(out))
        if used is None:
            return Answers(wanted, most, wanted, most, energy)
        return Answers(more[0], np.max(more[1:], axis=0), wanted, most, energy)

    def _terms_of(self, kind: type) -> Any:
        """What factors of such activations are multiplied by, on the machine: `Terms.same`, then
        its sizes."""
        if kind not in self._terms:
            made = terms(kind, self.blocks)
            self._terms[kind] = self._machine.array(np.stack([made.same, *made.sizes]))
        return self._terms[kind]


def products_launch(x: Any, w: Any, out: Any) -> Launch:
    """x[M, K] with each of w[W, N, K] into out[W, M, N], float64 all of them: x @ w^T with the
    first, |x| @ w^T with the others. With out[W + 1, M, N] x^2 @ (w^2)^T with the first follows."""
    count, m, n = out.shape
    grid = ceil_div(n, TILE), ceil_div(m, TILE), count
    return Launch(float64_products, grid, (TILE, TILE), (x, w, out))


@cuda.jit
def float64_products(x, w, out):
    """A stage of x and of w in shared memory, an output a thread."""
    tile_x = cuda.shared.array((TILE, STRIDE), float64)
    tile_w = cuda.shared.array((TILE, STRIDE), float64)
    tx, ty, which = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockIdx.z
    m, n0 = cuda.blockIdx.y * TILE + ty, cuda.blockIdx.x * TILE
    squares = which == w.shape[0]
    of = 0 if squares else which
    total = float64(0)
    for k0 in range(0, x.shape[1], DEPTH):
        for j in range(tx, DEPTH, TILE):
            u, v = float64(0), float64(0)
            if k0 + j < x.shape[1]:
                if m < out.shape[1]:
                    u = x[m, k0 + j]
                if n0 + ty < out.shape[2]:
                    v = w[of, n0 + ty, k0 + j]
            if squares:
                u, v = u * u, v * v
            elif which > 0:
                u = abs(u)
            tile_x[ty, j] = u
            tile_w[ty, j] = v
        cuda.syncthreads()
        for j in range(DEPTH):
            total += tile_x[ty, j] * tile_w[tx, j]
        cuda.syncthreads()
    if m < out.shape[1] and n0 + tx < out.shape[2]:
        out[which, m, n0 + tx] = total
