"""Products by torch on a CPU that round as this project's kernels say they do.

Operands are those of `reference.operands`, by which kernels are judged. Sums are float32, and y
is float16 but for the logits. Products of up to 16 tokens are exact ones, as they are on a GPU.

    exact         x and the dequantized weights rounded to float16 (steps 11 to 14, 17, 18)
    exact, A8     x quantized to Q8_1, a scale for 32 values (steps 2 to 10 and 17)
    fast          x quantized to int8 with a scale for a token, weights requantized to int8 with a
                  scale for a row (step 15)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from qformats.codec import format_of
from qformats.repack import byte_weights
from reference.operands import Q81, Halves, Tokens
from steps.decoder.compare.stated_errors import EXACT_TOKENS
from steps.decoder.model import Maker, Plain, torch

if TYPE_CHECKING:
    from torch import Tensor


class Emulated(Plain):
    """y[M, N] = x[M, K] @ dequantize(blocks)^T + bias, on the CPU, rounded as products of an
    accuracy and family are. last: y are logits, and not rounded."""

    def __init__(
        self,
        blocks: np.ndarray,
        bias: Tensor | None,
        last: bool,
        accuracy: str = "exact",
        family: str = "A16",
    ) -> None:
        values = format_of(blocks).dequantize(blocks)
        super().__init__(_floats(values if family == "A8" else values.astype(np.float16)), bias)
        self._last = last
        self._rounded: Callable[[np.ndarray], Any] = (
            Q81.of_values if family == "A8" else Halves.of_values
        )
        self._int8: Tensor | None = None
        if accuracy == "fast":
            codes, factors = byte_weights(blocks)
            self._int8 = _floats(codes) * _floats(factors)[:, None]

    def input_dtype(self, m: int) -> Any:
        return torch.float32

    def forward(self, x: Tensor) -> Tensor:
        few = len(x) <= EXACT_TOKENS or self._int8 is None
        rounded = self._rounded if few else Tokens.of_values
        weight = self.weight if few else self._int8
        a = _floats(rounded(x.float().numpy()).values())
        y = torch.nn.functional.linear(a, weight, self.bias)
        return y if self._last else y.half()

    def after_swiglu(self, y: Tensor, swiglu: Any) -> Tensor:
        return self(swiglu(y, torch.float32))


def _floats(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(values, np.float32))


def emulated_products(accuracy: str = "exact", family: str = "A16") -> Maker:
    """Makes products of blocks that round as those of `step_products` do."""

    def make(weights: np.ndarray, last: bool, bias: np.ndarray | None = None) -> Emulated:
        added = None if bias is None else _floats(bias)
        return Emulated(weights, added, last, accuracy, family)

    return Maker(make)
