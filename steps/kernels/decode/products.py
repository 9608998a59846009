"""Which product a variant of steps 17 and 18 has."""

from __future__ import annotations

from steps.kernels.decode.product import Product
from steps.kernels.decode.product_a8 import product_a8
from steps.kernels.decode.product_a16 import product_a16
from steps.kernels.decode.tiles import Variant


def product_of(name: str, how: Variant, kind: str) -> Product:
    """The product of a storage format with A of a dtype."""
    tokens = how.tokens
    return product_a8(name, tokens) if how.family == "A8" else product_a16(name, kind, tokens)
