"""Weights of a model in a GGUF file: `--gguf m.gguf --tensor blk.0.ffn_up.weight`.

The tensor's type is the format, its shape is N and K; M and the activations are left to ask for.
The file has only quantized weights. So a kernel is compared with the float64 product of the same
operands, and the error of the quantization is unknown.
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
from qformats.terminal import shown
from reference import PrequantizedProblem
from steps.checks.cases import Case
from steps.checks.select import UsageError
from steps.cli.arguments import refusing
from steps.contract import Size, Step
from steps.product.operands import weight_format
from steps.registry import kernel_of

if TYPE_CHECKING:
    from qformats.gguf_file import Tensor

PART_SIZE: Final[Size] = (9, 130, 256)
"""The most of a product that the simulator multiplies, in seconds per step: two tiles of 128 rows
and of K, and a whole block of any format."""


@dataclass(frozen=True)
class FileWeights:
    """A tensor of a file as the weights of a run, and A drawn for `m` tokens. The simulator
    multiplies a part of both."""

    path: Path
    tensor: Tensor
    m: int
    distribution: str
    seed: int
    simulated: bool

    @cached_property
    def problem(self) -> PrequantizedProblem:
        """What is multiplied; a whole tensor is not copied."""
        return self.of_input("float32")

    def of_input(self, input: str) -> PrequantizedProblem:
        """The same with A of a dtype."""
        m, blocks = self.m, self.tensor.array
        if self.simulated:
            most, n, k = PART_SIZE
            m, deep = min(m, most), max(1, k // FORMATS[self.tensor.type].elements)
            blocks = blocks[:n, :deep]
        return PrequantizedProblem(m, blocks, self.distribution, self.seed, input)

    def case(self, order: int | None) -> Case:
        """The problem as a case of the checks."""
        return Case(self.problem.shape, self.distribution, self.seed, order or 0)

    def __str__(self) -> str:
        """Which part of the tensor is multiplied, as a sentence's end."""
        (m, n, k), (rows, deep) = self.problem.shape, self.tensor.shape
        names = shown(f"{self.tensor.name} of {self.path.name}")
        told = f"{names}, {self.tensor.type} [{rows}, {deep}]"
        if not self.simulated:
            return f"{told}, M={m}"
        return (
            f"{told}: rows 0 to {n - 1} of {rows}, K 0 to {k - 1} of {deep}, {m} of {self.m} tokens"
        )

    def as_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "file": str(self.path),
            "tensor": self.tensor.name,
            "format": self.tensor.type,
            "shape": list(self.tensor.shape),
            "multiplied": list(self.problem.shape),
        }


PART: Final = "checked in the simulator, not timed, on a part of"

NOTES: Final = (
    "NMSE, kernel: against the float64 product of the same operands",
    "NMSE, product: unknown, as the file has only quantized weights",
)


def of(args: Namespace, steps: Sequence[Step], simulated: bool) -> FileWeights | None:
    """The tensor that --gguf and --tensor name, for some steps; None where neither is given.

    M is that of the steps' home shapes where --m is not given. UsageError for a file that is not
    sound, a name that is not in it, a tensor that none of the steps multiplies, and options that
    contradict it.
    """
    if args.gguf is None and args.tensor is None:
        return None
    if args.gguf is None:
        raise UsageError(f"--tensor {args.tensor} needs --gguf, the file that it is in")
    _require_no_other(args)
    tensor = _found(args.gguf, args.tensor)
    is_of = f"{tensor.name} is {tensor.type}"
    if len(tensor.shape) != 2:
        raise UsageError(
            f"{tensor.name} has the shape {list(tensor.shape)}; weights are a matrix [N, K]: "
            "name a tensor of two dimensions"
        )
    able = [kernel_of(step.number) for step in steps]
    why = [one.supports(tensor.type, family) for one in able for family in one.families]
    if None not in why:
        raise UsageError(f"{is_of}, and {why[-1]}")
    try:
        weight_format(tensor.array)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{is_of} and cannot be multiplied: {error}") from None
    tokens = args.m or max(step.home_shapes[0][0] for step in steps)
    return FileWeights(args.gguf, tensor, tokens, args.dist or "normal", args.seed, simulated)


def _require_no_other(args: Namespace) -> None:
    """UsageError for options that contradict the file."""
    if args.tensor is None:
        raise UsageError(
            f"--gguf {args.gguf} needs --tensor: `python -m qformats tensors {args.gguf}` "
            "lists them"
        )
    for option, value in (("--format", args.format), ("--n", args.n), ("--k", args.k)):
        if value:
            raise UsageError(f"{option} contradicts --gguf: a tensor has its own format, N and K")
    if args.dist not in PrequantizedProblem.DISTRIBUTIONS and args.dist is not None:
        raise UsageError(
            f"--dist {args.dist} contradicts --gguf: only A is drawn, from one of "
            f"{', '.join(PrequantizedProblem.DISTRIBUTIONS)}"
        )


def tensors_of(path: Path) -> dict[str, Tensor]:
    """`qformats.gguf_file.tensors`; UsageError for a file that is not sound."""
    from qformats.gguf_file import GGUFError, tensors

    with refusing(GGUFError):
        return tensors(path)


def _found(path: Path, name: str) -> Tensor:
    known = tensors_of(path)
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=3)
    lists = f"`python -m qformats tensors {path}` lists them"
    hint = f"did you mean {' or '.join(near)}?" if near else lists
    raise UsageError(f"{path} has no tensor {name!r} among its {len(known)}: {hint}")
