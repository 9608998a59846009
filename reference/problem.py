"""Problems: the inputs of one product, C[M,N] = A[M,K] @ dequant(W)[N,K]^T, always reproducible.

A `Problem` is only its parameters; the arrays are drawn from them when first asked for, by a
generator seeded with *all* of them, so two machines (and two years) see the same numbers. The
arrays are cached and read-only: a kernel that scribbles on its inputs is found, not compensated.

Distributions
    uniform   A and W uniform in (-1, 1): ggml's own test data
    normal    A and W standard normal: what trained weights look like within a row
    llm       normal, but a few channels (columns) of A are 20 times larger, see `OUTLIER_FACTOR`
    integer   small integers times powers of two: every intermediate of every step is exact, in any
              order of summation, so a right kernel equals the float64 product **bit for bit**
    extreme   every code and activation at its most, of either sign: what integer sums must hold.
              Exact too, up to a K of a thousand (`Problem.exact`)
    golden    the single hand-computed block of `GOLDEN` (1 x 1 x 32 only)

A is float32, or rounded to what a caller may have: float16 or bfloat16 (`Problem.input`). "integer"
is exact in all three.

Formats that are only read (K-quants) have weights that are drawn as blocks (`reference.drawn`),
in which the distribution is that of A.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np

from qformats import BLOCK, FILE_FORMATS, FORMATS, WEIGHT_FORMATS, format_of
from qformats.repack import prune
from reference.bfloat16 import bfloat16_bits, rounded_to_bfloat16
from reference.drawn import REACH, integer_blocks, random_blocks
from reference.exact import (
    EXACT_QUANTA,
    OFFSET_QUANTA,
    WEIGHT_QUANTA,
    WEIGHT_QUANTUM,
    code_range,
    exact_activations,
    exact_blocks,
    extreme_activations,
    extreme_blocks,
)
from reference.golden import GOLDEN, frozen
from reference.shapes import Shape

Array = np.ndarray[Any, np.dtype[Any]]

DISTRIBUTIONS: Final = ("uniform", "normal", "llm", "integer", "extreme", "golden")

OF_BLOCKS: Final = ("integer", "extreme", "golden")
"""Those whose weights are made as blocks, so that nothing is lost in quantizing them."""

INPUTS: Final = ("float32", "float16", "bfloat16")  # the dtypes that A may have

# LLM.int8() (Dettmers et al., 2022, arXiv:2208.07339) reports outlier features in about 0.1 % of
# the channels of large transformers, up to 20 times the size of the others, the same channels for
# every token. Hence K/1024 channels (at least one), factor 20, positions drawn from the seed.
OUTLIER_FACTOR: Final = 20.0

CHANNELS_PER_OUTLIER: Final = 1024


@dataclass(frozen=True)
class Problem:
    """The inputs of one product; see the module's docstring for the distributions.

    Raises ValueError (TypeError for a size that is no int), naming the numbers, when a size is
    not positive, K is not a multiple of 32 (256 for K-quants), or a name is unknown. pruned: as
    `qformats.repack.prune` does it, of Q4_0.
    """

    m: int
    n: int
    k: int
    format: str
    distribution: str = "normal"
    seed: int = 0
    input: str = "float32"
    pruned: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "seed"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
            object.__setattr__(self, name, int(value))
        if min(self.m, self.n, self.k) < 1:
            raise ValueError(f"M, N and K must be positive, got M={self.m}, N={self.n}, K={self.k}")
        if self.format not in (*WEIGHT_FORMATS, *FILE_FORMATS):
            names = ", ".join((*WEIGHT_FORMATS, *FILE_FORMATS))
            raise ValueError(f"unknown weight format {self.format!r}: use one of {names}")
        if self.k % (size := FORMATS[self.format].elements):
            below, above = self.k // size * size, (self.k // size + 1) * size
            raise ValueError(
                f"K={self.k} is not a multiple of the block of {size}: "
                f"use {above}" + (f" or {below}" if below else "")
            )
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if self.distribution not in DISTRIBUTIONS:
            raise ValueError(
                f"unknown distribution {self.distribution!r}: use one of {', '.join(DISTRIBUTIONS)}"
            )
        if self.input not in INPUTS:
            raise ValueError(f"unknown input {self.input!r}: use one of {', '.join(INPUTS)}")
        if self.distribution == "golden" and self.format not in GOLDEN:
            raise ValueError(f"there is no golden case of {self.format}: use another distribution")
        if self.distribution == "golden" and self.shape != (1, 1, BLOCK):
            raise ValueError(f"the golden case is 1 x 1 x 32, got {self.m} x {self.n} x {self.k}")

    @property
    def shape(self) -> Shape:
        """(M, N, K)."""
        return self.m, self.n, self.k

    @property
    def exact(self) -> bool:
        """Whether a right result is the float64 product bit for bit.

        For "golden" that holds on the Q8_1 bits of `GOLDEN`, not on what a quantizer makes of `a`.
        """
        if self.distribution == "extreme":
            return 127 * self.k * self._reach < EXACT_QUANTA
        return self.distribution == "integer"

    @property
    def knows_floats(self) -> bool:
        """Whether `w` is known; without it the error of the blocks cannot be measured."""
        return True

    def by_weights(self, rows: Array) -> tuple[tuple[Array, Problem], ...]:
        """Rows of C by the weights that they are of: (which of `rows`, the problem that has W)."""
        return ((np.arange(len(rows)), self),)

    @cached_property
    def a(self) -> Array:
        """Activations [M, K]: float32, also of bfloat16's numbers; or float16."""
        if self.distribution == "golden":
            a = GOLDEN[self.format].a.copy()
        elif self.distribution == "integer":
            a = exact_activations(self._rng("a"), self.m, self.k, self._reach)
        elif self.distribution == "extreme":
            a = extreme_activations(self._rng("a"), self.m, self.k)
        else:
            a = _draw(self._rng("a"), self.distribution, self.m, self.k)
        if self.distribution == "llm":
            a[:, self.outlier_channels] *= np.float32(OUTLIER_FACTOR)
        if self.input == "bfloat16":
            return frozen(rounded_to_bfloat16(a))
        return frozen(a.astype(self.input, copy=False))

    @property
    def given(self) -> Array:
        """A as a caller has it: `a`, or bits in uint16 where they are bfloat16."""
        return bfloat16_bits(self.a) if self.input == "bfloat16" else self.a

    @property
    def tokens(self) -> Array:
        """The same, a row for each token: of experts' products A has one for each row of C."""
        return self.given

    @property
    def ids(self) -> Array | None:
        """Of experts' products the experts of each token, int32[T, S]."""
        return None

    @cached_property
    def w(self) -> Array:
        """The weights before quantization, float32[N, K] (`OF_BLOCKS`, and formats that are only
        read: of the blocks)."""
        if self.distribution in OF_BLOCKS or not FORMATS[self.format].written:
            return frozen(FORMATS[self.format].dequantize(self.blocks))
        return frozen(_draw(self._rng("w"), self.distribution, self.n, self.k))

    @cached_property
    def blocks(self) -> Array:
        """The quantized weights, structured[N, K/32] or, of K-quants, [N, K/256], of the format's
        dtype; where `pruned`, two of each four along K are 0."""
        return frozen(prune(self._made)) if self.pruned else self._made

    @property
    def _made(self) -> Array:
        if self.distribution == "golden":
            return frozen(GOLDEN[self.format].blocks.copy())
        extreme = self.distribution == "extreme"
        if self.format in FILE_FORMATS and self.distribution in OF_BLOCKS:
            made = integer_blocks(
                self._rng("w"), self.n, self.k, self.format, WEIGHT_QUANTUM, extreme
            )
            return frozen(made)
        if extreme:
            return frozen(extreme_blocks(self._rng("w"), self.n, self.k, self.format))
        if not FORMATS[self.format].written:
            return frozen(random_blocks(self._rng("w"), self.n, self.k, self.format))
        if self.distribution == "integer":
            return frozen(exact_blocks(self._rng("w"), self.n, self.k, self.format))
        return frozen(FORMATS[self.format].quantize(self.w))

    @cached_property
    def outlier_channels(self) -> Array:
        """The columns of A that "llm" enlarges, int64[max(1, K/1024)], sorted."""
        count = max(1, self.k // CHANNELS_PER_OUTLIER)
        return frozen(np.sort(self._rng("outliers").choice(self.k, count, replace=False)))

    @property
    def _reach(self) -> int:
        """The most weight quanta one element can contribute, |scale * code| + |offset| (integer).

        Kernels may sum codes and compensation apart, so both count, each at its largest.
        """
        if self.format in REACH:
            return REACH[self.format]
        low, high = code_range(self.format)
        return WEIGHT_QUANTA * (max(-low, high) + OFFSET_QUANTA[self.format])

    def _rng(self, purpose: str) -> np.random.Generator:
        words = (self.format, self.distribution, purpose)
        return np.random.default_rng(
            [self.m, self.n, self.k, self.seed, *(zlib.crc32(word.encode()) for word in words)]
        )


class PrequantizedProblem(Problem):
    """A product with prequantized weights, such as a tensor of a file: A alone is drawn.

    blocks: structured[N, K/elements] of any format, kept as they are and not copied; they must not
    change. There is no `w`, which they were quantized from. ValueError for blocks that are no
    matrix and for a distribution that is of weights too (`DISTRIBUTIONS` are those of A alone).
    """

    DISTRIBUTIONS: ClassVar = ("uniform", "normal", "llm")

    # As dataclasses compare, two matrices of one shape would be the same problem.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(
        self,
        m: int,
        blocks: Array,
        distribution: str = "normal",
        seed: int = 0,
        input: str = "float32",
    ) -> None:
        fmt = format_of(blocks)
        if blocks.ndim != 2:
            raise ValueError(
                f"weights must be blocks [N, K/{fmt.elements}], got the shape {list(blocks.shape)}"
            )
        if distribution not in self.DISTRIBUTIONS:
            raise ValueError(
                f"A alone is drawn, from one of {', '.join(self.DISTRIBUTIONS)}, "
                f"got {distribution!r}"
            )
        n, deep = blocks.shape
        super().__init__(m, n, deep * fmt.elements, fmt.name, distribution, seed, input)
        self.__dict__["blocks"] = frozen(blocks.view())

    @property
    def knows_floats(self) -> bool:
        """No."""
        return False

    @cached_property
    def w(self) -> Array:
        """ValueError: there is none."""
        raise ValueError("the floats that these prequantized weights came from are not known")


@dataclass(frozen=True)
class ExpertsProblem(Problem):
    """A product of experts: row p of C is token p // `chosen` times the matrix `ids[p]` of
    `experts`. M is the number of these rows, a multiple of `chosen`; A has one for each of them,
    `tokens` one for each token.

    The experts are problems of their own, of seeds from `seed` on.
    """

    experts: int = 1
    chosen: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.experts, self.chosen) < 1 or self.m % self.chosen:
            raise ValueError(
                f"M={self.m} rows are no whole number of tokens with {self.chosen} of "
                f"{self.experts} experts each"
            )

    @cached_property
    def ids(self) -> Array:  # type: ignore[override]
        """int32[T, S], drawn for each token: no expert twice where there are enough of them."""
        rng = np.random.default_rng([self.m, self.seed, self.experts, self.chosen])
        shape = self.m // self.chosen, self.chosen
        if self.chosen > self.experts:
            return frozen(rng.integers(0, self.experts, shape, np.int32))
        order = np.argsort(rng.random((shape[0], self.experts)), axis=1)
        return frozen(np.ascontiguousarray(order[:, : self.chosen], np.int32))

    @cached_property
    def each(self) -> tuple[Problem, ...]:
        """Of each expert the problem whose weights are its own."""
        own = (1, self.n, self.k, self.format, self.distribution)
        return tuple(Problem(*own, self.seed + e) for e in range(self.experts))

    @cached_property
    def _of_tokens(self) -> Problem:
        own = (self.n, self.k, self.format, self.distribution, self.seed, self.input)
        return Problem(self.m // self.chosen, *own)

    @property
    def tokens(self) -> Array:
        return self._of_tokens.given

    @cached_property
    def a(self) -> Array:
        return frozen(np.repeat(self._of_tokens.a, self.chosen, axis=0))

    @cached_property
    def w(self) -> Array:
        """float32[E, N, K]."""
        return frozen(np.stack([one.w for one in self.each]))

    @cached_property
    def blocks(self) -> Array:
        """structured[E, N, K/32]."""
        return frozen(np.stack([one.blocks for one in self.each]))

    def by_weights(self, rows: Array) -> tuple[tuple[Array, Problem], ...]:
        own = self.ids.reshape(-1)[rows]
        return tuple((np.flatnonzero(own == e), self.each[e]) for e in np.unique(own))


def _draw(rng: np.random.Generator, distribution: str, rows: int, columns: int) -> Array:
    """float32[rows, columns], uniform in (-1, 1) or standard normal."""
    if distribution == "uniform":
        return rng.random((rows, columns), dtype=np.float32) * np.float32(2) - np.float32(1)
    return rng.standard_normal((rows, columns), dtype=np.float32)
