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
    golden    the single hand-computed block of `GOLDEN` (1 x 1 x 32 only)

Formats that are only read (K-quants) have weights that are drawn as blocks (`reference.drawn`),
in which the distribution is that of A.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np

from qformats import BLOCK, FILE_FORMATS, FORMATS, WEIGHT_FORMATS, format_of
from reference.drawn import REACH, integer_blocks, random_blocks
from reference.product import Q81

Array = np.ndarray[Any, np.dtype[Any]]
Shape = tuple[int, int, int]

DISTRIBUTIONS: Final = ("uniform", "normal", "llm", "integer", "golden")

# Shapes a simulator can afford (at most ~20k multiply-adds), each here for a reason: a single
# output, one row, one column, an odd number of blocks, just above a tile of 4 ... 128 in M or N.
# M, N and K differ wherever they can, so that swapping two of them cannot go unseen.
CHECK_SHAPES: Final[tuple[Shape, ...]] = (
    (1, 1, 32),
    (1, 5, 96),
    (5, 1, 64),
    (2, 33, 160),
    (17, 5, 96),
    (9, 20, 96),
    (33, 18, 32),
    (16, 32, 32),
    (3, 66, 96),
    (65, 4, 64),
    (2, 130, 64),
    (130, 2, 64),
)

# Shapes for a GPU: ragged against tiles of 16/32/64/128 in M and N, and K % 256 != 0 nearly
# everywhere (256 is the stride in K of ggml's own kernels); a few aligned ones for the fast path.
GPU_CHECK_SHAPES: Final[tuple[Shape, ...]] = (
    *CHECK_SHAPES,
    (4, 512, 1024),  # the classical acceptance shape of this ladder
    (1, 257, 352),
    (2, 129, 4128),
    (7, 65, 1056),
    (8, 1024, 4096),
    (16, 100, 288),
    (17, 33, 1120),
    (31, 130, 544),
    (33, 511, 1056),
    (64, 128, 256),
    (65, 257, 2080),
    (127, 129, 736),
    (129, 127, 1184),
    (130, 514, 96),
    (257, 384, 1056),
    (300, 800, 2144),
    (512, 500, 1024),
)

# Decode (1, 8, 16), a batch of 128, and prefill (512, 4096) on the (N, K) of an 8-billion-parameter
# model.
BENCH_SHAPES: Final[tuple[Shape, ...]] = tuple(
    (m, n, k)
    for m in (1, 8, 16, 128, 512, 4096)
    for n, k in ((4096, 4096), (4096, 14336), (14336, 4096))
)

# LLM.int8() (Dettmers et al., 2022, arXiv:2208.07339) reports outlier features in about 0.1 % of
# the channels of large transformers, up to 20 times the size of the others, the same channels for
# every token. Hence K/1024 channels (at least one), factor 20, positions drawn from the seed.
OUTLIER_FACTOR: Final = 20.0
CHANNELS_PER_OUTLIER: Final = 1024

# Above this many units a float32 sum of integers may round: 24 bits of significand.
EXACT_UNITS: Final = 2**24
# The largest |sum of q| of a Q8_1 block that is exact in its f16 field s: 11 bits of significand.
EXACT_HALF: Final = 2**11


@dataclass(frozen=True)
class Problem:
    """The inputs of one product; see the module's docstring for the distributions.

    Raises ValueError (TypeError for a size that is no int), naming the numbers, when a size is
    not positive, K is not a multiple of 32 (256 for K-quants), or a name is unknown.
    """

    m: int
    n: int
    k: int
    format: str
    distribution: str = "normal"
    seed: int = 0

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
        return self.distribution == "integer"

    @property
    def knows_floats(self) -> bool:
        """Whether `w` is known: else nobody can say how far the blocks are from what was meant."""
        return True

    @cached_property
    def a(self) -> Array:
        """Activations, float32[M, K]."""
        if self.distribution == "golden":
            return _frozen(GOLDEN[self.format].a.copy())
        if self.distribution == "integer":
            return _frozen(_integer_activations(self._rng("a"), self.m, self.k, self._reach))
        a = _draw(self._rng("a"), self.distribution, self.m, self.k)
        if self.distribution == "llm":
            a[:, self.outlier_channels] *= np.float32(OUTLIER_FACTOR)
        return _frozen(a)

    @cached_property
    def w(self) -> Array:
        """The weights before quantization, float32[N, K] ("integer", "golden", and formats that
        are only read: of the blocks)."""
        if self.distribution in ("integer", "golden") or not FORMATS[self.format].written:
            return _frozen(FORMATS[self.format].dequantize(self.blocks))
        return _frozen(_draw(self._rng("w"), self.distribution, self.n, self.k))

    @cached_property
    def blocks(self) -> Array:
        """The quantized weights, structured[N, K/32] or, of K-quants, [N, K/256], of the format's
        dtype."""
        if self.distribution == "golden":
            return _frozen(GOLDEN[self.format].blocks.copy())
        if self.format in FILE_FORMATS and self.distribution == "integer":
            rng = self._rng("w")
            return _frozen(integer_blocks(rng, self.n, self.k, self.format, _WEIGHT_UNIT))
        if not FORMATS[self.format].written:
            return _frozen(random_blocks(self._rng("w"), self.n, self.k, self.format))
        if self.distribution == "integer":
            return _frozen(_integer_blocks(self._rng("w"), self.n, self.k, self.format))
        return _frozen(FORMATS[self.format].quantize(self.w))

    @cached_property
    def outlier_channels(self) -> Array:
        """The columns of A that "llm" enlarges, int64[max(1, K/1024)], sorted."""
        count = max(1, self.k // CHANNELS_PER_OUTLIER)
        return _frozen(np.sort(self._rng("outliers").choice(self.k, count, replace=False)))

    @property
    def _reach(self) -> int:
        """The most weight units one element can contribute, |scale * code| + |offset| (integer).

        Kernels may sum codes and compensation apart, so both count, each at its largest.
        """
        if self.format in REACH:
            return REACH[self.format]
        low, high = _code_range(self.format)
        return _WEIGHT_UNITS * (max(-low, high) + _OFFSET_UNITS[self.format])

    def _rng(self, purpose: str) -> np.random.Generator:
        words = (self.format, self.distribution, purpose)
        return np.random.default_rng(
            [self.m, self.n, self.k, self.seed, *(zlib.crc32(word.encode()) for word in words)]
        )


class PrequantizedProblem(Problem):
    """A product with weights that are there already, such as a tensor of a file: A alone is drawn.

    blocks: structured[N, K/elements] of any format, kept as they are and not copied; they must not
    change. There is no `w`, which they were quantized from. ValueError for blocks that are no
    matrix and for a distribution that is of weights too (`DISTRIBUTIONS` are those of A alone).
    """

    DISTRIBUTIONS: ClassVar = ("uniform", "normal", "llm")

    # As dataclasses compare, two matrices of one shape would be the same problem.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, m: int, blocks: Array, distribution: str = "normal", seed: int = 0) -> None:
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
        super().__init__(m, n, deep * fmt.elements, fmt.name, distribution, seed)
        self.__dict__["blocks"] = _frozen(blocks.view())

    @property
    def knows_floats(self) -> bool:
        """No."""
        return False

    @cached_property
    def w(self) -> Array:
        """ValueError: there is none."""
        raise ValueError("what given blocks were quantized from is not known: there are no floats")


def _frozen(array: Array) -> Array:
    array.setflags(write=False)
    return array


def _draw(rng: np.random.Generator, distribution: str, rows: int, columns: int) -> Array:
    """float32[rows, columns], uniform in (-1, 1) or standard normal."""
    if distribution == "uniform":
        return rng.random((rows, columns), dtype=np.float32) * np.float32(2) - np.float32(1)
    return rng.standard_normal((rows, columns), dtype=np.float32)


# --- the exact case -------------------------------------------------------------------------------
# Scales are 1 or 2 units; a unit of weight is 2^-3, one of activation 2^-4 (any power would do: it
# only has to be far from the ends of f16, and different for the two so that mixing them shows).

_WEIGHT_UNIT: Final = 2.0**-3
_WEIGHT_UNITS: Final = 2  # the larger of the two weight scales, in units
_ACTIVATION_UNIT: Final = 2.0**-4
_ACTIVATION_UNITS: Final = 2
# |offset| / |scale| of value = scale * code + offset, at most: -8, -16 by the format; m is drawn.
_OFFSET_UNITS: Final = {"q4_0": 8, "q4_1": 8, "q5_0": 16, "q5_1": 16, "q8_0": 0}


def _code_range(name: str) -> tuple[int, int]:
    """The lowest and highest code a block of the format can store, both included.

    For q8_0 that is -128: ggml's quantizer never writes it, but a file may hold it.
    """
    return {4: (0, 15), 5: (0, 31), 8: (-128, 127)}[FORMATS[name].bits]


def _integer_activations(rng: np.random.Generator, m: int, k: int, reach: int) -> Array:
    """float32[M, K] that Q8_1 stores without error, small enough for exact float32 sums.

    Each block holds one element of +-127 * 2^e, so a quantizer's d = amax / 127 is exactly 2^e and
    every code an exact integer, whichever way it divides; its sum of codes stays within 2^11,
    so s is exact even in f16, and equal in both of its definitions.

    The rest of a block is as large as fits: with `reach` weight units per element at most, a row
    whose sum of |codes| (in activation units) stays below 2^24 / reach has float32 sums that are
    integers below 2^24 units in any order. Where K is so long that even the extremes alone do not
    fit, some blocks are all zero (d = 0: a case of its own).
    """
    blocks = k // BLOCK
    budget = (EXACT_UNITS - 1) // reach  # activation units per row
    share = budget // blocks // _ACTIVATION_UNITS - 127  # for the 31 others of a block, at least
    peak = int(np.clip(share // (BLOCK - 1), 1, 127))
    codes = rng.integers(-peak, peak, size=(m, blocks, BLOCK), endpoint=True)
    where = rng.integers(0, BLOCK, size=(m, blocks, 1))
    sign = rng.choice(np.array([-127, 127]), size=(m, blocks, 1))
    np.put_along_axis(codes, where, sign, axis=-1)
    # Alternating signs bring any sum within 16 * 127 = 2032 < 2^11.
    alternating = np.abs(codes) * np.where(np.arange(BLOCK) % 2, -1, 1)
    heavy = np.abs(codes.sum(axis=-1, keepdims=True)) > EXACT_HALF
    codes = np.where(heavy, alternating, codes)

    units = codes * rng.integers(1, _ACTIVATION_UNITS, size=(m, blocks, 1), endpoint=True)
    cost = np.abs(units).sum(axis=-1)
    order = rng.permuted(np.broadcast_to(np.arange(blocks), (m, blocks)), axis=1)
    spent = np.cumsum(np.take_along_axis(cost, order, axis=1), axis=1)
    fits = np.empty((m, blocks), dtype=bool)
    np.put_along_axis(fits, order, spent <= budget, axis=1)
    units = units * fits[..., None]

    worst = int(np.abs(units).sum(axis=(1, 2)).max()) * reach
    assert worst < EXACT_UNITS, f"sums reach {worst} units, float32 is exact below {EXACT_UNITS}"
    assert int(np.abs(codes.sum(axis=-1)).max()) <= EXACT_HALF, "s would round in f16"
    return (units * _ACTIVATION_UNIT).astype(np.float32).reshape(m, k)


def _integer_blocks(rng: np.random.Generator, n: int, k: int, name: str) -> Array:
    """Blocks [N, K/32] with every code possible, scales and offsets small multiples of a unit.

    Codes are drawn over the whole range and each block holds both extremes. Q4_0's and Q5_0's
    scales are of either sign, as ggml's quantizer makes them.
    """
    low, high = _code_range(name)
    shape = (n, k // BLOCK)
    codes = rng.integers(low, high, size=(*shape, BLOCK), endpoint=True)
    ends = rng.integers(0, BLOCK, size=(*shape, 1))
    step = rng.integers(1, BLOCK, size=(*shape, 1))
    np.put_along_axis(codes, ends, low, axis=-1)
    np.put_along_axis(codes, (ends + step) % BLOCK, high, axis=-1)
    scale = rng.integers(1, _WEIGHT_UNITS, size=shape, endpoint=True) * _WEIGHT_UNIT
    if name in ("q4_0", "q5_0"):
        return pack_block(name, codes, scale * rng.choice(np.array([-1.0, 1.0]), size=shape))
    if name in ("q4_1", "q5_1"):
        most = _OFFSET_UNITS[name] * _WEIGHT_UNITS
        m = rng.integers(-most, most, size=shape, endpoint=True) * _WEIGHT_UNIT
        return pack_block(name, codes, scale, m)
    return pack_block(name, codes, scale)


def pack_block(name: str, codes: Array, scale: Array, m: Array | None = None) -> Array:
    """Blocks from stored codes int[..., 32], d and m [...].

    The codec's own packing is one of the things the exact case checks, so it is not used here.
    Byte j of qs holds element j below and element j + 16 above; bit j of qh is the fifth bit of
    element j.
    """
    blocks = np.zeros(codes.shape[:-1], dtype=FORMATS[name].dtype)
    blocks["d"] = scale
    if m is not None:
        blocks["m"] = m
    if FORMATS[name].bits == 8:
        blocks["qs"] = codes
        return blocks
    half = BLOCK // 2
    low, high = codes[..., :half], codes[..., half:]
    blocks["qs"] = (low & 15) | (high & 15) << 4
    if FORMATS[name].bits == 5:
        fifth = (codes >> 4 & 1).astype(np.uint32) << np.arange(BLOCK, dtype=np.uint32)
        word = np.bitwise_or.reduce(fifth, axis=-1).astype("<u4")
        blocks["qh"] = np.ascontiguousarray(word)[..., None].view(np.uint8)
    return blocks


# --- the case computed by hand --------------------------------------------------------------------


@dataclass(frozen=True)
class Golden:
    """One block against one block, with the result worked out by hand.

    a        float32[1, 32], = q * d of the activation block
    blocks   structured[1, 1] of the weight format
    q81      the activation block as planes (q int8[1, 32], d and s float32[1, 1])
    q8_1     the same as ggml's 36-byte block, structured[1, 1]
    value    what every kernel of either family must return, exactly

    Quantizing `a` anew does not give `q81` (its largest element is 8, so d would be 8 / 127): an
    A8 step is given these bits, an A16 step is given `a`.
    """

    format: str
    a: Array
    blocks: Array
    q81: Q81
    q8_1: Array
    value: float

    def gave(self, q81: Q81) -> bool:
        """Whether these are the golden activation bits."""
        pairs = ((q81.q, self.q81.q), (q81.d, self.q81.d), (q81.s, self.q81.s))
        return all(np.array_equal(x, y) for x, y in pairs)


def _golden(name: str, codes: Array, value: float, m: float | None = None) -> Golden:
    q = np.arange(-16, 16, dtype=np.int8)
    d, s = np.float32(0.5), np.float32(-8.0)
    block = np.zeros((1, 1), dtype=FORMATS["q8_1"].dtype)
    block["d"], block["s"], block["qs"] = d, s, q
    return Golden(
        format=name,
        a=_frozen((q * d).astype(np.float32)[None]),
        blocks=_frozen(
            pack_block(
                name,
                np.asarray(codes, dtype=np.int64)[None, None],
                np.full((1, 1), 0.25),
                None if m is None else np.full((1, 1), m),
            )
        ),
        q81=Q81(q[None], np.full((1, 1), d), np.full((1, 1), s)),
        q8_1=_frozen(block),
        value=value,
    )


_J: Final = np.arange(BLOCK)
_SAWTOOTH: Final = (_J + 1) // 2 % 16  # 0, 1, 1, 2, 2, ... 15, 15, 0

# Everywhere: activations d = 0.5, q = -16 ... 15, s = 0.5 * (-16) = -8; weights d = 0.25.
# A block is then  0.25 * 0.5 * sumi + offset * (-8)  with  sumi = sum of code[j] * (j - 16).
#   q4_0: codes 0,1,1,2,2,...,15,15,0  sumi = 1000;  offset = -8 * 0.25 = -2:   125 + 16 = 141
#   q4_1: the same codes, m = -1.5:                                             125 + 12 = 137
#   q5_0: code[j] = j, sumi = sum j^2 - 16 sum j = 10416 - 16 * 496 = 2480;
#         offset = -16 * 0.25 = -4:                                             310 + 32 = 342
#   q5_1: the same codes, m = -3:                                               310 + 24 = 334
#   q8_0: code[j] = 8 (j - 16), sumi = 8 * sum (j - 16)^2 = 8 * (1496 + 1240) = 21888:  2736
GOLDEN: Final[dict[str, Golden]] = {
    "q4_0": _golden("q4_0", _SAWTOOTH, 141.0),
    "q4_1": _golden("q4_1", _SAWTOOTH, 137.0, m=-1.5),
    "q5_0": _golden("q5_0", _J, 342.0),
    "q5_1": _golden("q5_1", _J, 334.0, m=-3.0),
    "q8_0": _golden("q8_0", 8 * (_J - 16), 2736.0),
}
