"""What products state that they are off by, and what that does to a model's logits.

A product y of x and weights w, with independent errors of variance v_x and v_w in them and a result
rounded to 16 bits, is off by

    v_y[m, n] = sum over k of (v_x[m, k] w[n, k]^2 + x[m, k]^2 v_w[n, k]) + (u y[m, n])^2

    exact   x and w have 16 bits: v_x = (u x)^2 and v_w = (u w)^2, where u of float16 is
            2^-11 / sqrt(3) / sqrt(1.5 / ln 2) = 1.92e-4, as significands from 1 to 2 that are as
            likely in each part of an octave have the mean square 1.5 / ln 2
    Q8_1    x is int8 with a scale for 32 values: a step is d = largest / 127, and v_x = d^2 / 12
    fast    x is int8 with a scale for a token, w with a scale for a row

Through n products, one after the other or side by side, relative errors e add up to about
e sqrt(n). How much of that reaches the logits is the model's: residuals dilute it, norms and the
softmax pass it on. So a trusted model runs again with noise of these variances in its products
(`disturbed`), and `SAFETY` times what that changes is the bound. Kernels that lose more than they
state are outside, however deep the model is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from qformats import BLOCK

SAFETY: Final = 2.0
"""The bound over what is expected: rounding in attention, between products and in the cache, and
errors that are not quite independent. Emulated roundings stay within 1.3 (tests)."""
HALF: Final = 2.0**-11 / math.sqrt(3) / math.sqrt(1.5 / math.log(2))
"""Relative root mean square of what rounding to float16 changes."""
EXACT_TOKENS: Final = 16
"""Up to so many tokens "fast" selects the steps that "exact" does."""


def variance(x: Any, weight: Any, y: Any, rounding: str) -> Any:
    """Of what a product y [M, N] of x [M, K] and weight [N, K], all tensors, is off by.

    rounding: "exact", "Q8_1" or "fast"
    """
    if rounding == "fast" and len(x) <= EXACT_TOKENS:
        rounding = "exact"

    def of_16_bits(values: Any) -> Any:
        return (HALF * values) ** 2

    def of_int8(values: Any) -> Any:
        """With a scale for all values of the last dimension."""
        return (values.abs().amax(-1, keepdim=True) ** 2 / (12 * 127**2)).expand_as(values)

    of_x, of_weight = {
        "exact": lambda: (of_16_bits(x), of_16_bits(weight)),
        "Q8_1": lambda: (of_int8(x.unflatten(-1, (-1, BLOCK))).flatten(-2), 0 * weight),
        "fast": lambda: (of_int8(x), of_int8(weight)),
    }[rounding]()
    return of_x @ (weight**2).T + x**2 @ of_weight.T + of_16_bits(y)


@contextmanager
def disturbed(products: Iterable[Any], rounding: str, seed: int = 0) -> Iterator[None]:
    """While this lasts, each product of a model is off by normal noise of its `variance`.

    products: torch modules with a `weight` [N, K] that multiply x [..., K]
    """
    import torch

    generators: dict[Any, Any] = {}

    def disturb(product: Any, inputs: tuple[Any, ...], y: Any) -> Any:
        wide = torch.promote_types(y.dtype, torch.float32)
        x, weight = (one.to(wide) for one in (inputs[0], product.weight))
        flat = y.to(wide).flatten(0, -2)
        off = variance(x.flatten(0, -2), weight, flat, rounding).sqrt()
        if y.device not in generators:
            generators[y.device] = torch.Generator(y.device).manual_seed(seed)
        noise = torch.randn(off.shape, generator=generators[y.device], device=y.device, dtype=wide)
        return (flat + off * noise).view(y.shape).to(y.dtype)

    hooks = [one.register_forward_hook(disturb) for one in products]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
