"""A of the decode steps: float16 as it is, or Q8_1, which for few tokens the kernel makes itself.

Step 17 teaches this.
"""

from __future__ import annotations

from typing import Any, Final

from steps.contract import Activations, Family, Machine
from steps.kernels.decode.tiles import fused
from steps.kernels.parts.activations.layouts import (
    by_family,
    float16_rows,
    float32_quantized_inside,
    q8_1_mma_order,
)


def q8_1(family: Family, a: Any, machine: Machine) -> Activations:
    """Float32 A itself for few tokens, else prequantized: that is too much for each thread block
    to do again."""
    return (float32_quantized_inside if fused(*a.shape) else q8_1_mma_order)(family, a, machine)


activations: Final = by_family(float16_rows, q8_1)
