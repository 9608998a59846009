"""What a product of experts is, and what a kernel for it hands over.

    C[t, s] = A[t] @ dequantize(W[ids[t, s]])^T         ggml's mul_mat_id

W is E matrices [N, K] of one format, packed by `qformats.repack.tiles` one after another: expert e
begins at row tile e * `row_tiles`, as each is padded to whole groups of 128 rows and 128 K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from qformats.repack import TILE_GROUP, TILE_ROWS
from steps.contract import Accuracy, Launch, Machine, ceil_div, known_accuracy

IDS: Final = ("int32", "int64")
"""The dtypes of ids."""

GATES: Final = ("silu", "clamped")
"""See `steps.kernels.experts.gates`."""

GROUP_ROWS: Final = TILE_ROWS * TILE_GROUP
"""Each expert has a multiple of so many rows in packed arrays."""


@dataclass(frozen=True, slots=True)
class ExpertsRequest:
    """A product of experts that somebody wants: all that, with the machine, decides the kernel.

    format  : of W, a name of `qformats.FORMATS`.
    tokens, chosen, experts, n, k : T, S, E, N and K.
    a, c    : dtypes of A and C, "float32", "float16" or "bfloat16".
    ids     : the dtype of ids[T, S], "int32" or "int64". A slot whose id is not one from 0 to E - 1
              is NaN in C, and no weights are read for it.
    per_slot: A is [T, S, K], a row for each slot; else [T, K].
    bias    : the dtype of a bias [E, N], None for none.
    gate    : None, or one of `GATES`: row tiles of W, 16 rows each, are of gates and ups in turn,
              and C[t, s] has N / 2 outputs.
    router  : None, or the dtype of the router's weights [T, S]: C is then [T, N], the sum over s of
              weight times product.
    leads   : C is for another product of these ids alone, as its A: each row is somewhere in it,
              where that product `follows` and looks for it. Of the same T, S and E both have
              kernels of the same kind.
    follows : the launch before the product's first is one of a product of these ids that `leads`,
              which wrote A, a row for each slot, and neither ids nor the router's weights.
    accuracy: "exact", or "fast" to allow kernels that requantize W, see `steps.gemm`.
    """

    format: str
    tokens: int
    chosen: int
    experts: int
    n: int
    k: int
    a: str = "float32"
    c: str = "float32"
    ids: str = "int32"
    per_slot: bool = False
    bias: str | None = None
    gate: str | None = None
    router: str | None = None
    leads: bool = False
    follows: bool = False
    accuracy: str = "exact"

    def __post_init__(self) -> None:
        known_accuracy(self.accuracy)

    @property
    def slots(self) -> int:
        """Products of a token with an expert: T * S."""
        return self.tokens * self.chosen

    @property
    def a_rows(self) -> int:
        return self.slots if self.per_slot else self.tokens

    @property
    def outputs(self) -> int:
        """Of each product."""
        return self.n if self.gate is None else self.n // 2

    @property
    def out_shape(self) -> tuple[int, ...]:
        if self.router is not None:
            return self.tokens, self.outputs
        return self.tokens, self.chosen, self.outputs

    @property
    def row_tiles(self) -> int:
        """Of an expert in packed arrays."""
        return ceil_div(self.n, GROUP_ROWS) * TILE_GROUP


@dataclass(frozen=True, slots=True)
class ExpertsOperands:
    """The arrays of a call on one machine.

    packed, row_scales: of all experts. a: [a_rows, K], ids: [T, S], out: `out_shape`.
    bias: [E, N] or None. router: [T, S] or None.
    """

    packed: Any
    row_scales: Any
    a: Any
    ids: Any
    out: Any
    bias: Any = None
    router: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsKernel:
    """A kernel of products of experts: a file of this room ends in one, `KERNEL`.

    name, title: "few"; one line for messages.
    launches: (request, operands, machine) -> all launches in their order; memory that they work in
        besides comes from the machine, as `steps.contract.Kernel.scratch` says.
    formats: those that it takes. min_cc, max_cc: compute capabilities, None for any.
    rows: of an expert, on average, above which it is faster than those for fewer.
    accuracy: "exact", of weights of `qformats.repack.tiles`; "fast", of `byte_tiles`.
    most_k: the largest K, None for any.
    """

    name: str
    title: str
    launches: Callable[[ExpertsRequest, ExpertsOperands, Machine], tuple[Launch, ...]]
    formats: tuple[str, ...]
    min_cc: tuple[int, int] = (9, 0)
    max_cc: tuple[int, int] | None = None
    rows: float = 0
    accuracy: Accuracy = "exact"
    most_k: int | None = None

    def why_not(self, request: ExpertsRequest, cc: tuple[int, int] | None) -> str | None:
        """None, or one sentence saying why it cannot do that (on such a GPU)."""
        if request.format not in self.formats:
            return f"experts are multiplied in {', '.join(self.formats)}, not in {request.format}"
        if cc is not None and not self.min_cc <= cc <= (self.max_cc or cc):
            return (
                f"experts need compute capability {self.min_cc[0]}.{self.min_cc[1]}, and this GPU "
                f"has {cc[0]}.{cc[1]}: multiply one expert at a time with gemm"
            )
        if self.most_k is not None and request.k > self.most_k:
            return (
                f"{self.title} add up products in int32, which holds {self.most_k} of them, and K="
                f"{request.k}: ask for exact ones"
            )
        return None
