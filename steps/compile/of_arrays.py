"""A launch that is no product's, before there is memory for it.

Norms, gates and attention (`steps.kernels.between`) are such launches.
`steps.compile.dry_run.launches` does the same for products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from steps.compile.dry_run import REGION, WEIGHTS, ArrayType, DryRun, Placeholder
from steps.contract import Launch, array_dtype


@dataclass(frozen=True, slots=True)
class OfArrays:
    """make(*arrays, machine=...) of arrays of these shapes and dtypes. Another process can make the
    same launch, if `make` can be pickled."""

    make: Callable[..., Launch]
    arrays: tuple[ArrayType, ...]

    def placeholders(self) -> list[Placeholder]:
        """What stands for the arrays in `launch`: from `WEIGHTS` on, `REGION` apart."""
        return [
            Placeholder(WEIGHTS + i * REGION, shape or (1,), array_dtype(dtype))
            for i, (shape, dtype) in enumerate(self.arrays)
        ]

    def launch(self, machine: DryRun | None = None) -> Launch:
        """machine: adds up the memory that the launch asks for."""
        return self.make(*self.placeholders(), machine=machine or DryRun())
