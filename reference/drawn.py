"""Random blocks of the formats that files come in, packed here and not by the codec under test.

K-quants are read and not written (`qformats.kquants`), so their weights are drawn as blocks: any
bits are codes, and scales are such that weights are about as large as a language model's.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from qformats import FORMATS

Array = np.ndarray[Any, np.dtype[Any]]

SIZE: Final = 0.02  # of a drawn weight, about: a language model's standard deviation

# Standard deviation and middle of codes or levels drawn evenly. Scales: lowest and highest.
_CODES: Final = {
    **{"q2_k": (1.1, 1.5), "q3_k": (2.3, 0), "q4_k": (4.6, 7.5), "q5_k": (9.2, 15.5)},
    **{"q6_k": (18.5, 0), "iq4_xs": (67.4, 0), "nvfp4": (5.9, 0)},
    **{"q1_0": (1, 0), "tq2_0": (1.2, 0)},
}
_SCALES: Final = {
    **{"q2_k": (4, 15), "q3_k": (-32, 31), "q4_k": (16, 63), "q5_k": (16, 63)},
    **{"q6_k": (-128, 127), "iq4_xs": (-32, 31)},
}

REACH: Final = {
    "mxfp4": 2 * 12,
    "iq4_nl": 127,
    "q2_k": 2 * 3 + 15,
    "q3_k": 2 * 4,
    "q4_k": 2 * 15 + 16,
    "q5_k": 2 * 31 + 32,
    "q6_k": 2 * 32,
    "iq4_xs": 2 * 127,
    "nvfp4": 2 * 12,
    "q1_0": 1,
    "tq2_0": 2,
}
"""The most quanta that an element of `integer_blocks` comes to, |scale * level| + |offset|."""


def random_blocks(rng: np.random.Generator, n: int, k: int, name: str) -> Array:
    """Blocks of a format that is only read, [N, K/256] of a K-quant: every code and most scales as
    likely, weights about SIZE."""
    blocks = _any_codes(rng, n, k, name)
    spread, middle = _CODES[name]
    if name not in _SCALES:
        size = rng.uniform(0.5, 1.5, size=blocks["d"].shape) * SIZE / spread
        blocks["d"] = _ue4m3(size) if name == "nvfp4" else size
        return blocks
    low, high = _SCALES[name]
    groups = (*blocks.shape, FORMATS[name].elements // FORMATS[name].group)
    scales = rng.integers(low, high, size=groups, endpoint=True)
    d = rng.uniform(0.5, 1.5, size=blocks.shape) * SIZE / (spread * np.sqrt(np.mean(scales**2)))
    blocks["d"] = d
    if "dmin" in (blocks.dtype.names or ()):
        blocks["dmin"] = blocks["d"] * (middle * rng.uniform(0.8, 1.2, size=blocks.shape))
        minima = rng.integers(low, high, size=groups, endpoint=True)
    else:
        minima = None
    pack_scales(blocks, name, scales, minima)
    return blocks


def integer_blocks(
    rng: np.random.Generator, n: int, k: int, name: str, quantum: float, extreme: bool = False
) -> Array:
    """Blocks [N, K/32] or [N, K/256] whose weights are whole numbers of quanta, at most REACH.

    A K-quant's d is a quantum or a quarter of one, and its scales make up for it, so that both are
    checked. extreme: rows of the highest and of the lowest level, in turns.
    """
    blocks = _any_codes(rng, n, k, name)
    if extreme:
        ends = np.array([0x77, 0xFF] if name in ("mxfp4", "nvfp4") else [0xFF, 0])
        blocks.view(np.uint8)[...] = ends[np.arange(n) % 2, None]
    if name == "mxfp4":
        blocks["e"] = 128 + int(np.log2(quantum)) + rng.integers(0, 1, blocks.shape, endpoint=True)
        return blocks
    if name == "nvfp4":
        blocks["d"] = _ue4m3(quantum * rng.integers(1, 2, blocks["d"].shape, endpoint=True))
        return blocks
    if name in ("iq4_nl", "q1_0", "tq2_0"):
        blocks["d"] = quantum
        return blocks
    groups = (*blocks.shape, FORMATS[name].elements // FORMATS[name].group)
    fraction = rng.choice(np.array([1, 4]), size=blocks.shape)
    blocks["d"] = quantum / fraction
    scales = rng.integers(1, 2, size=groups, endpoint=True) * fraction[..., None]
    minima = None
    if "dmin" in (blocks.dtype.names or ()):
        blocks["dmin"] = quantum
        largest = {"q2_k": 15, "q4_k": 16, "q5_k": 32}[name]
        minima = rng.integers(0, largest, size=groups, endpoint=True)
    else:
        scales *= rng.choice(np.array([-1, 1]), size=groups)
    pack_scales(blocks, name, scales, minima)
    return blocks


def pack_scales(blocks: Array, name: str, scales: Array, minima: Array | None = None) -> None:
    """Write integer scales and minima [..., groups] into blocks of K-quants or IQ4_XS."""
    if name == "iq4_xs":
        six = scales + 32
        turns = np.arange(0, 8, 2)
        blocks["scales_l"] = six[..., ::2] & 15 | (six[..., 1::2] & 15) << 4
        fours = (six >> 4).reshape(*six.shape[:-1], 2, 4)
        blocks["scales_h"] = np.bitwise_or.reduce(fours << turns, axis=-1)
        return
    field = blocks["scales"]
    if name == "q6_k":
        field[...] = scales
    elif name == "q3_k":
        six = scales + 32
        for g in range(16):
            field[..., g % 8] = field[..., g % 8] & (15 << 4 - g // 8 * 4) | (
                (six[..., g] & 15) << g // 8 * 4
            )
            at, shift = 8 + g % 4, g // 4 * 2
            field[..., at] = field[..., at] & (255 - (3 << shift)) | (six[..., g] >> 4) << shift
    elif name == "q2_k" and minima is not None:
        field[...] = scales | minima << 4
    elif minima is not None:
        for g in range(4):
            field[..., g] = scales[..., g] | scales[..., g + 4] >> 4 << 6
            field[..., 4 + g] = minima[..., g] | minima[..., g + 4] >> 4 << 6
            field[..., 8 + g] = scales[..., g + 4] & 15 | (minima[..., g + 4] & 15) << 4


def _ue4m3(x: Array) -> Array:
    """NVFP4's scale bytes nearest to x: of 126 scales, 2^-10 the smallest and 224 the largest."""
    d = np.arange(1, 127)
    scales = np.where(d < 8, d * 2.0**-10, (1 + d % 8 / 8) * 2.0 ** (d // 8 - 8))
    return d[np.abs(scales - x[..., None]).argmin(axis=-1)].astype(np.uint8)


def _any_codes(rng: np.random.Generator, n: int, k: int, name: str) -> Array:
    fmt = FORMATS[name]
    size = (n, k // fmt.elements * fmt.block_bytes)
    return rng.integers(0, 256, size=size, dtype=np.uint8).view(fmt.dtype).copy()
