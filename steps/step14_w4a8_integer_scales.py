"""Step 14: W4A8 with integer scales - one integer multiply-add unpacks four weights.

What is new
    How int8 weights are made, and nothing else: the kernel is its parent's. A block's scale becomes
    an integer of up to 17 times its row's factor, and its offset a byte. Then four codes in the
    bytes of a word, times that integer, plus that byte four times, are four weights: no product
    leaves its byte, so nothing is carried into the next (qformats.integer_scales). The bytes are
    unsigned, wgmma takes those too, and 128 times the sum of a token's codes, which the pass that
    quantizes it has counted, is taken off at the end of a tile. Minima cost nothing: every offset
    is a byte. Codes of 5 bits lie in bytes whose upper three bits hold the bits of others.
Why it should help
    Eight weights take seven instructions, not 14; with 5 bits 8.75, not 18: in the whole loop 109
    instead of 169, and 127 instead of 203. What a warp does between two products is a chain, and
    where tiles are of 128 tokens it lasts longer than they do: at 512 tokens and N=K=4096 its
    parent uses 54 % of the tensor cores' time. Where it uses 80 % there is little to be gained.
What it costs
    Accuracy: an integer of 16 at most, 8 with 5 bits, is a coarse scale. Codes are rounded anew to
    its multiples; the weights are then off by 8.1e-4 (NMSE) of normal data with 4 bits and 1.3e-3
    with 5, where its parent's are off by 8.6e-5. So it has to be asked for by its number or by
    accuracy="coarse"; "fast" does not mean it. Packing takes seconds: factors are tried.
Machine code
    IMAD, LOP3 and PRMT between IGMMA.64x256x32.U8.S8; no HFMA2 anywhere.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import numpy as np

from qformats import Format
from qformats.integer_scales import integer_tiles
from steps.components import wgmma_tiles
from steps.components.activations.layouts import int8_chunks_and_sums
from steps.components.unpack.integer_scales import integer_format
from steps.contract import Family, Launch, Shape, Step, multiprocessors
from steps.step13_w4a8_wgmma import AHEAD, STAGES, TILES, kernel, stage

UNPACK: Final = {4: 9, 5: 11, 8: 4}  # by bits: instructions that make 16 x 16 weights, and loads


def tiling(fmt: Format, shape: Shape) -> wgmma_tiles.TileConfiguration:
    cycles = partial(stage, fmt.bits, UNPACK[fmt.bits])
    return wgmma_tiles.fewest_cycles(TILES, shape, multiprocessors(), cycles)


def scratch(fmt: Format, family: Family, shape: Shape) -> tuple[tuple[tuple[int, ...], Any], ...]:
    return wgmma_tiles.scratch_arrays(tiling(fmt, shape), np.int32)


def launch(
    fmt: Format,
    family: Family,
    shape: Shape,
    weights: tuple,
    activations: tuple,
    out: Any,
    scratch: tuple,
) -> Launch:
    cut = tiling(fmt, shape)
    in_half, slices = out.dtype == np.float16, wgmma_tiles.reduction_slices(cut)
    make = partial(kernel, integer_format(fmt.name), in_half, cut[0], slices)
    operands = (*weights, *activations, out)
    return wgmma_tiles.launch_of(make, STAGES, AHEAD, cut, shape.k, operands, scratch)


STEP = Step(
    number=14,
    name="step14_w4a8_integer_scales",
    title="W4A8 with integer scales: one multiply-add makes four weights",
    branch="float16",
    families=("A8",),
    parents={"A8": 13},
    unit={"A8": "tensor_int8"},
    pack=integer_tiles,
    activations=int8_chunks_and_sums,
    launch=launch,
    scratch=scratch,
    outputs=("float32", "float16"),
    accuracy="coarse",
    min_cc=(9, 0),
    max_cc=(9, 0),  # others have no wgmma, later ones neither
    contains={"A8": ("IGMMA", "IMAD", "UBLKCP", "SYNCS", "USETMAXREG")},
    forbids={"A8": ("IMMA", "HMMA", "HGMMA", "HFMA2", "LDGSTS", "LDSM")},
    chosen_untuned=True,
)
