"""Write the golden bytes: `python -m tests.golden.make`. Needed again only for a new case.

The bytes come from the `gguf` package (llama.cpp's own Python codec), and for q8_1 and iq4_nl,
which gguf cannot quantize, from the scalar recipe. Where both exist they must agree before any is
written, but for mxfp4 blocks so small that ggml leaves their exponent open.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from tests.formats.scalar_codec import QUANTIZE

HERE = Path(__file__).parent

# Normal data whose iq4_nl scale is another float16 if the sums behind it are taken backwards, with
# x (x t) for (x x) t, or in float64. As the bits of float32s.
SUMS = """
    3ee5c400 be081f17 bf6f464c 3d6734a5 bf4bb8fd bf52f698 bf1e5ce0 bf598bcf
    3ff7a1d0 3ed7291b bf6ff408 3fddb43f bfa6303d bebf574e 3fd13a55 beca8033
    be41b0a1 bfa5cb14 bfb0b7b7 3edfd491 3f145846 bfd97fb0 be6abaa7 be18fff1
    bf0f9c59 bf9ac6bb 3f6b3ddf be0e0787 3f140668 bf581e3a bf5ad6bb bfb3f9b9
"""


def cases() -> dict[str, np.ndarray]:
    """float32[32] each, by name. No block has zeros of both signs: there gguf differs from ggml."""
    rng = np.random.default_rng(20)
    normal = rng.standard_normal(32)
    outlier = rng.standard_normal(32)
    outlier[19] = -47.0
    plus_first, minus_first = np.linspace(-1, 1, 32), np.linspace(1, -1, 32)
    ties = np.arange(-16, 16) / 2
    ties[5] = 8.0
    found = {
        "ramp": np.arange(-16, 16),
        "normal": normal,
        "uniform": rng.uniform(-1, 1, 32),
        "outlier": outlier,
        "constant": np.full(32, 0.3),
        "constant negative": np.full(32, -0.3),
        "zero": np.zeros(32),
        "both extremes, minus first": plus_first,
        "both extremes, plus first": minus_first,
        "ties": ties,
        "ties of 127": np.concatenate([[127.0], np.arange(-15.5, 15.5)]),
        "float16 subnormal scale": normal * 1e-6,
        "float32 subnormal": np.arange(-16, 16) * 2.0**-140,
        "1/d overflows": np.arange(-16, 16) * 2.0**-147,
        "sums in order": np.array([int(word, 16) for word in SUMS.split()], "<u4").view("<f4"),
        "huge": np.arange(-16, 16) * 4000.0 + 1,
    }
    return {name: x.astype(np.float32) for name, x in found.items()}


def main() -> None:
    for name, scalar in QUANTIZE.items():
        blocks = []
        for case, x in cases().items():
            if name == "q8_1" and case == "huge":
                x = x / 64  # its s would not fit a float16
            data = scalar(x.tolist())
            open_to_c = name == "mxfp4" and 0 < abs(x).max() < 2.0**-125
            if name not in ("q8_1", "iq4_nl") and not open_to_c:
                with np.errstate(all="ignore"):
                    theirs = quantize(x, GGMLQuantizationType[name.upper()]).tobytes()
                if theirs != data:
                    sys.exit(f"{name}, {case}: gguf {theirs.hex()}, scalar recipe {data.hex()}")
            blocks.append({"case": case, "x": x.astype("<f4").tobytes().hex(), "bytes": data.hex()})
        scalar_only = name in ("q8_1", "iq4_nl")
        origin = "the scalar recipe" if scalar_only else f"gguf {version('gguf')}"
        golden = {"format": name, "origin": origin, "blocks": blocks}
        (HERE / f"{name}.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
