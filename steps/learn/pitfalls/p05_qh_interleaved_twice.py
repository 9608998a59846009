"""The quantizer and the reader both misread qh, in the same way. Every round trip succeeds, the
error is that of five bits, and the golden value is right: the two agree with each other and with
nobody else. A test that uses its own codec on both sides cannot find this. Bytes written by ggml
can, and so can blocks put together by hand."""

from __future__ import annotations

from typing import Final

import numpy as np

from qformats import BLOCK, FORMATS
from reference import Q81
from steps.learn.pitfalls.exhibit import RIGHT, Array, Pitfall, launch
from steps.learn.pitfalls.p04_qh_interleaved import wrong as reader
from steps.learn.pitfalls.right import kernel

# What ggml writes for x[j] = (j - 16) / 4: the largest is x[0] = -4, so d = -4 / -16 = 0.25, which
# is 0x3400, and the code of element j is j: fifth bits in elements 16 ... 31; byte j of qs holds j
# in both nibbles.
GOLDEN_VALUES: Final = ((np.arange(BLOCK) - 16) / 4).astype(np.float32)
GOLDEN_BYTES: Final = bytes.fromhex("00340000ffff00112233445566778899aabbccddeeff")


def quantize(x: Array) -> Array:
    """float32[..., K] -> Q5_0 blocks with qh interleaved, as a reader like that of p04 expects."""
    return _interleaved(FORMATS["q5_0"].quantize(x))


def _interleaved(blocks: Array) -> Array:
    """The same blocks with bit 2j of qh for element j and bit 2j + 1 for element j + 16."""
    bits = np.unpackbits(blocks["qh"], axis=-1, bitorder="little")
    moved = np.empty_like(bits)
    moved[..., 0::2], moved[..., 1::2] = bits[..., :16], bits[..., 16:]
    out = blocks.copy()
    out["qh"] = np.packbits(moved, axis=-1, bitorder="little")
    return out


def self_consistent(blocks: Array, q81: Q81) -> Array:
    """The product with this codec on both sides: its own blocks of the same weights, its reader."""
    return launch(kernel(reader), _interleaved(blocks), q81)


def golden_bytes() -> tuple[dict[str, str], dict[str, str]]:
    """Both quantizers on the golden values, against ggml's bytes."""
    complaints = []
    for make in (quantize, FORMATS["q5_0"].quantize):
        made = make(GOLDEN_VALUES).tobytes()
        same = made == GOLDEN_BYTES
        complaint = f"bytes 2-5 (qh) are {made[2:6].hex()}, ggml writes {GOLDEN_BYTES[2:6].hex()}"
        complaints.append({} if same else {"golden bytes": complaint})
    return complaints[0], complaints[1]


PITFALL = Pitfall(
    number=5,
    title="qh interleaved in quantizer and reader",
    story=__doc__,
    format="q5_0",
    right=RIGHT["q5_0"],
    wrong=self_consistent,
    golden=342.0,  # right!
    caught_by=("golden bytes",),
    extra=golden_bytes,
)
