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
