"""64 K of a tile by wgmma: weights become numbers in registers and meet all tokens of the tile.

Step 12 teaches this in its own kernel, step 15 the same of int8. The kernels of steps 13 to 15 use
it, with the loads of codes and scales apart, so that they can be issued before a wait.

A warp has the fragment-packed tiles of its 16 features in shared memory, 128 K a stage. It loads
the codes and scales of 64 K, half of a stage, makes four A fragments of 16 K each, and its
warpgroup multiplies them with the tokens' box of these 64 K (steps/kernels/prefill/row_tiles.py).
wgmma returns at once, so the next half is loaded and unpacked meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from numba import cuda

from steps.instructions import wgmma_commit, wgmma_f16, wgmma_fence, wgmma_s8
from steps.kernels.parts.weights.int8 import byte_format
from steps.kernels.parts.weights.storage_formats import half_format

NEXT_16_K: Final = 2
"""In a swizzled descriptor: 16 K are 32 bytes of a token's row."""

NEXT_32_K: Final = 2
"""The same of int8."""


@dataclass(frozen=True, slots=True)
class HalfStage:
    """Device functions for 64 K.

    tile_bytes: of a fragment-packed tile, 16 features x 128 K
    load(memory, at, lane, half) -> codes and scales of this lane
        of half 0 or 1 of the packed tile at byte `at` of shared memory
    multiply(acc, loaded, b) -> acc + 64 features x 64 K times the tokens at the swizzled descriptor
        b, one commit group
    """

    tile_bytes: int
    load: Any
    multiply: Any


@cache
def half_stage(format_name: str, in_pairs: bool = False) -> HalfStage:
    """The device functions for the weights of a storage format and float16 tokens, for capture in a
    kernel factory. in_pairs: a fence between two products and two lets ptxas make the fragments of
    the next pair before the wait for this one (step 14's worklog; not measured with experts)."""
    form = half_format(format_name)
    words, scales = form.words, form.scales
    multipliers, fragments = form.multipliers, form.fragments

    @cuda.jit(device=True, forceinline=True)
    def load(memory, at, lane, half):
        return words(memory, at, lane, half), scales(memory, at, lane, half)

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, loaded, b):
        w, s = loaded
        block0, block1 = multipliers(s, 0), multipliers(s, 1)
        w0, w1 = fragments(w, 0, block0), fragments(w, 1, block0)
        w2, w3 = fragments(w, 2, block1), fragments(w, 3, block1)
        wgmma_fence()
        acc = wgmma_f16(acc, w0[0], w0[1], w0[2], w0[3], b, 1)
        acc = wgmma_f16(acc, w1[0], w1[1], w1[2], w1[3], b + NEXT_16_K, 1)
        if in_pairs:
            wgmma_fence()
        acc = wgmma_f16(acc, w2[0], w2[1], w2[2], w2[3], b + 2 * NEXT_16_K, 1)
        acc = wgmma_f16(acc, w3[0], w3[1], w3[2], w3[3], b + 3 * NEXT_16_K, 1)
        wgmma_commit()
        return acc

    return HalfStage(form.tile_bytes, load, multiply)


@cache
def byte_half_stage(format_name: str) -> HalfStage:
    """The same for weights requantized to int8 and tokens in int8, whose box has 128 K: a half
    stage has two of its descriptors. Step 15 teaches it."""
    form = byte_format(format_name)
    words, scales, fragments = form.words, form.scales, form.fragments

    @cuda.jit(device=True, forceinline=True)
    def load(memory, at, lane, half):
        return words(memory, at, lane, half), scales(memory, at, lane, half)

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, loaded, b):
        w0, w1 = fragments(loaded[0], loaded[1], 0), fragments(loaded[0], loaded[1], 1)
        wgmma_fence()
        acc = wgmma_s8(acc, w0[0], w0[1], w0[2], w0[3], b, 1)
        acc = wgmma_s8(acc, w1[0], w1[1], w1[2], w1[3], b + NEXT_32_K, 1)
        wgmma_commit()
        return acc

    return HalfStage(form.tile_bytes, load, multiply)
