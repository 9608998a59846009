"""A product that somebody wants, as data: all that, with the machine, decides the kernel."""

from __future__ import annotations

from dataclasses import dataclass

from steps.contract import Family, Shape


@dataclass(frozen=True, slots=True)
class Request:
    """C[M, N] = A[M, K] @ dequantize(W)[N, K]^T + bias[N].

    format    : of W, a name of `qformats.FORMATS`.
    a, c      : dtypes of A and C, "float32", "float16" or "bfloat16". A may also be "gated":
                float16 y[M, 2 K], K gates and K ups a row; A is then silu(gate) * up.
    bias      : the dtype of a bias, None for none.
    accuracy  : "exact", or "fast" to allow kernels that requantize W, see `steps.gemm`.
    family    : only kernels of this family, "A16" or "A8".
    step      : only the kernel of this number, a lesson's; whatever its accuracy.
    layouts   : names of the layouts that W is packed in; None: it is not packed yet.
    invariant : see `steps.contract.Shape`.
    adapted   : whether the caller adapts to the kernel: casts A to what it reads and C from what it
                writes, and adds the bias where it does not. Otherwise only a kernel that does all
                of it will do.
    """

    format: str
    m: int
    n: int
    k: int
    a: str = "float32"
    c: str = "float32"
    bias: str | None = None
    accuracy: str = "exact"
    family: str | None = None
    step: int | None = None
    layouts: tuple[str, ...] | None = None
    invariant: bool = False
    adapted: bool = False

    @property
    def shape(self) -> Shape:
        return Shape(self.m, self.n, self.k, self.invariant)


def known_family(name: str) -> Family:
    """ValueError for a name that is no family."""
    if name == "A16":
        return "A16"
    if name == "A8":
        return "A8"
    raise ValueError(f"family is {name!r}: it must be A16 or A8")
