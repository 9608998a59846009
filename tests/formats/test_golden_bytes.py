"""Golden bytes: a codec that packs and unpacks in one wrong way agrees with itself, not here.

Each file of `golden/` says where its bytes come from. What gguf does not write (q8_1, iq4_nl, and
zeros of both signs as ggml's scan takes them) comes from a second program for these recipes.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from qformats import FORMATS

GOLDEN = {
    path.stem: json.loads(path.read_text()) for path in Path(__file__).parent.glob("golden/*.json")
}
CASES = [
    pytest.param(name, block, id=f"{name}-{block['case'].replace(' ', '_')}")
    for name, golden in sorted(GOLDEN.items())
    for block in golden["blocks"]
]


def values(block: dict[str, str]) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(block["x"]), "<f4")


def test_every_format_has_golden_blocks():
    assert set(GOLDEN) == {name for name, fmt in FORMATS.items() if fmt.written}
    assert all(len(golden["blocks"]) >= 10 for golden in GOLDEN.values())


@pytest.mark.parametrize(("name", "block"), CASES)
def test_quantizer_writes_the_golden_bytes(name, block):
    assert FORMATS[name].quantize(values(block)).tobytes().hex() == block["bytes"]


def test_hand_computed_blocks():
    """Bytes worked out on paper: no program stands behind these."""
    x = np.zeros(32, np.float32)
    x[0], x[1], x[16], x[31] = -8, 7, 3, -1
    # q4_0: the extreme is -8, so d = 1 = 0x3c00; codes x + 8.
    expected = "003c" + "b0" + "8f" + "88" * 13 + "78"
    assert FORMATS["q4_0"].quantize(x).tobytes().hex() == expected
    # q4_1: d = 15/15 = 1, m = -8 = 0xc800; the same codes.
    assert FORMATS["q4_1"].quantize(x).tobytes().hex() == "003c00c8" + expected[4:]

    x[0], x[1], x[16], x[31] = -16, 15, 3, -1
    # q5_0: d = 1; codes 0, 31, 19, 15, else 16. qh = all bits but 0 and 31 = 0x7ffffffe.
    expected = "feffff7f" + "30" + "0f" + "00" * 13 + "f0"
    assert FORMATS["q5_0"].quantize(x).tobytes().hex() == "003c" + expected
    # q5_1: d = 31/31 = 1, m = -16 = 0xcc00.
    assert FORMATS["q5_1"].quantize(x).tobytes().hex() == "003c00cc" + expected

    x[0], x[1], x[16], x[31] = -127, 15, 0.5, -2.5  # halves go away from zero: 1 and -3
    codes = "810f" + "00" * 14 + "01" + "00" * 14 + "fd"
    assert FORMATS["q8_0"].quantize(x).tobytes().hex() == "003c" + codes
    # q8_1: s = 1 * (-127 + 15 + 1 - 3) = -114 = 0xd720.
    assert FORMATS["q8_1"].quantize(x).tobytes().hex() == "003c20d7" + codes

    x[0], x[1], x[16], x[31] = 6, -0.5, 2.5, -1.75
    # mxfp4: floor(log2 6) = 2, so e = 127 and a level is a half; 2.5 is as near to 2 as to 3, and
    # -1.75 as near to -1.5 as to -2: codes 7, 8 + 1, 4 (2) and 8 + 3 (-1.5).
    assert FORMATS["mxfp4"].quantize(x).tobytes().hex() == "7f" + "47" + "09" + "00" * 13 + "b0"

    x[0], x[1], x[16], x[31] = 127, -103, 0, 0
    # iq4_nl: 127 is given level -127, code 0, so that -103 becomes 103, which is nearer to 113 than
    # to 89: code 15. 0 is nearest to 1, code 8. The d that fits best, weighted with x^2, is
    # -(127 * 127^3 + 113 * 103^3) / (127^2 127^2 + 113^2 103^2) = -383622792 / 395610962, that is
    # -0.96970, and of the float16s -1986/2048 = 0xbbc2.
    assert FORMATS["iq4_nl"].quantize(x).tobytes().hex() == "c2bb" + "80" + "8f" + "88" * 14
