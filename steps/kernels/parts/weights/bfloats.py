"""Weights of a fragment-packed tile as bfloat16 in registers, where A is bfloat16.

    float16     sign | 5 bits of exponent | 10 of fraction
    bfloat16    sign | 8 bits of exponent |  7 of fraction

A weight is made float16 first, as in `steps.kernels.parts.weights.halves`, and then rounded once
more:

    LOP3, HFMA2             two codes of a word -> two float16, one register
    HADD2.F32, HADD2.F32    each as float32, exactly
    F2FP.BF16               both rounded to bfloat16, one register

These are three instructions more for two weights. In return every format is unpacked in one place,
and scales and minima count with all of their 11 bits: a weight is off by 2^-8 of itself for the
rounding to bfloat16, and by an eighth of that for the one to float16.

Arithmetic in bfloat16 would be shorter, and less exact, as scales and minima would be bfloat16 too,
of 8 bits: with codes as the smallest bfloat16, multiples of 2^-133, in no more instructions than
`halves`; or with 128 + code, from which 128 is subtracted first, in two more for two weights.

Step 11 teaches the float16 weights. Products of many experts read bfloat16 A with these. Kernels of
one matrix make A float16 instead (`steps.kernels.parts.activations.layouts.all_float16_rows`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from numba import cuda, uint16, uint32

from steps.instructions import floats_to_bfloats, half_to_float
from steps.kernels.parts.weights.halves import HalfFormat
from steps.kernels.parts.weights.storage_formats import half_format


@cuda.jit(device=True, forceinline=True)
def halves_to_bfloats(word):
    """Two float16 of a word, rounded to bfloat16."""
    low, high = half_to_float(uint16(word)), half_to_float(uint16(uint32(word) >> uint32(16)))
    return floats_to_bfloats(low, high)


@cache
def bfloat_format(name: str) -> HalfFormat:
    """The bfloat16 weights of a storage format, for capture in a kernel factory: `half_format`, but
    for the numbers in the registers of `fragments`, which are for `mma_m16n8k16_bf16` and
    `wgmma_bf16`."""
    half = half_format(name)
    float16_fragments = half.fragments

    @cuda.jit(device=True, forceinline=True)
    def fragments(words, step, multipliers):
        a0, a1, a2, a3 = float16_fragments(words, step, multipliers)
        return (
            halves_to_bfloats(a0),
            halves_to_bfloats(a1),
            halves_to_bfloats(a2),
            halves_to_bfloats(a3),
        )

    return replace(half, fragments=fragments)


def float_format(name: str, kind: str) -> HalfFormat:
    """The weights of a storage format as numbers of this kind, "float16" or "bfloat16"."""
    return {"float16": half_format, "bfloat16": bfloat_format}[kind](name)
