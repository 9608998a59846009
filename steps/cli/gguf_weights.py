"""A matrix of a GGUF file as the weights of a run: `--gguf m.gguf --tensor blk.0.ffn_up.weight`.

Its type is the format, its shape N and K; only M and the activations are left to ask for. The file
holds no weights but the quantized ones, so a kernel is compared with the float64 product of the
same operands, and how far these are from what was once quantized nobody can say.
"""

from __future__ import annotations

import difflib
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from qformats import FORMATS
from reference import PrequantizedProblem
from steps.api.operands import weight_format
from steps.checks.cases import Case
from steps.checks.select import UsageError
from steps.contract import Size, Step

if TYPE_CHECKING:
    from qformats.gguf_file import Tensor

CUT: Final[Size] = (9, 130, 256)
"""What the simulator is given of a product at most, seconds a step: two tiles of 128 rows and of K,
and a whole block of any format."""


@dataclass(frozen=True)
class Given:
    """A tensor that a step can multiply with, the file it is of, and the tokens asked for."""

    path: Path
    tensor: Tensor
    m: int
    distribution: str
    seed: int

    def __str__(self) -> str:
        n, k = self.tensor.shape
        return f"{self.tensor.name} of {self.path.name}, {self.tensor.type} [{n}, {k}]"

    @cached_property
    def whole(self) -> PrequantizedProblem:
        """The product with all of the tensor, of which nothing is copied."""
        return PrequantizedProblem(self.m, self.tensor.array, self.distribution, self.seed)

    @cached_property
    def cut(self) -> PrequantizedProblem:
        """The first tokens, rows and K of it, so few that the simulator can multiply them."""
        m, n, k = CUT
        deep = max(1, k // FORMATS[self.tensor.type].elements)
        blocks = self.tensor.array[:n, :deep]
        return PrequantizedProblem(min(self.m, m), blocks, self.distribution, self.seed)

    def posed(self, simulated: bool) -> PrequantizedProblem:
        """What a machine is given."""
        return self.cut if simulated else self.whole

    def case(self, simulated: bool, order: int | None = None) -> Case:
        """`posed` as a case of the checks."""
        return Case(self.posed(simulated).shape, self.distribution, self.seed, order or 0)

    def told(self, simulated: bool) -> str:
        """What of the tensor is multiplied, for people."""
        if not simulated:
            return f"{self}, M={self.m}"
        (m, n, k), (rows, deep) = self.cut.shape, self.tensor.shape
        return (
            f"{self}: rows 0 to {n - 1} of {rows}, K 0 to {k - 1} of {deep}, {m} of {self.m} tokens"
        )

    def as_json(self, simulated: bool) -> dict[str, Any]:
        """The same for programs."""
        return {
            "file": str(self.path),
            "tensor": self.tensor.name,
            "format": self.tensor.type,
            "shape": list(self.tensor.shape),
            "multiplied": list(self.posed(simulated).shape),
        }


NOTES: Final = (
    "kernel error: against the float64 product of the same operands",
    "format error: not known, as a file has no weights but the quantized ones",
)


def given(args: Namespace, steps: Sequence[Step], tokens: int) -> Given | None:
    """The tensor that --gguf and --tensor name, for some steps; None where neither is given.

    tokens: M where --m is not given. UsageError, a sentence, for a file that is not sound, a name
    that is not in it, a tensor that none of the steps multiplies, and options that contradict it.
    """
    if args.gguf is None and args.tensor is None:
        return None
    if args.gguf is None:
        raise UsageError(f"--tensor {args.tensor} needs --gguf, the file that it is in")
    _require_no_other(args)
    tensor = _found(args.gguf, args.tensor)
    what = f"{tensor.name} is {tensor.type}"
    if len(tensor.shape) != 2:
        raise UsageError(
            f"{tensor.name} has the shape {list(tensor.shape)}, and weights are a matrix [N, K]: "
            "name a tensor of two dimensions"
        )
    why = [step.supports(tensor.type, family) for step in steps for family in step.families]
    if None not in why:
        raise UsageError(f"{what}, and {why[-1]}")
    try:
        weight_format(tensor.array)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what} and cannot be multiplied: {error}") from None
    return Given(args.gguf, tensor, args.m or tokens, args.dist or "normal", args.seed)


def _require_no_other(args: Namespace) -> None:
    """UsageError for options that say of the weights what the file says."""
    if args.tensor is None:
        raise UsageError(
            f"--gguf {args.gguf} needs --tensor: python -m qformats tensors {args.gguf} lists them"
        )
    for option, value in (("--format", args.format), ("--n", args.n), ("--k", args.k)):
        if value:
            raise UsageError(f"{option} contradicts --gguf: a tensor has its own format, N and K")
    if args.dist not in PrequantizedProblem.DISTRIBUTIONS and args.dist is not None:
        raise UsageError(
            f"--dist {args.dist} contradicts --gguf: only A is drawn, from one of "
            f"{', '.join(PrequantizedProblem.DISTRIBUTIONS)}"
        )
    if getattr(args, "save", False):
        raise UsageError("--save contradicts --gguf: records are of drawn weights")


def _found(path: Path, name: str) -> Tensor:
    from qformats.gguf_file import GGUFError, tensors

    try:
        held = tensors(path)
    except GGUFError as error:
        raise UsageError(str(error)) from None
    if name in held:
        return held[name]
    near = difflib.get_close_matches(name, held, n=3)
    lists = f"python -m qformats tensors {path} lists them"
    hint = f"did you mean {' or '.join(near)}?" if near else lists
    raise UsageError(f"{path} has no tensor {name!r} among its {len(held)}: {hint}")
