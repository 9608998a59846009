"""Runs random products (`steps.checks.fuzz_cases`) and says what is wrong with them.

Of each case

    refusals    what the API must refuse is refused in a sentence with the number
    memory      nothing is written outside C, and weights and A are unchanged
    rows        a row of A with a NaN is NaN in C, one with an infinity is not finite, and neither
                disturbs other rows; a finite one is finite wherever its sums can be
    errors      finite rows, those of each kind by themselves, satisfy `reference.check`; and are no
                further from the product of A with the weights than the accuracy asked for allows
    repeats     the same product again, by the step, `gemm`, a plan or a graph, has the same bits

Cases may share `Weights`, so that hundreds of products with the same cost no more than their own
float64 operations. `steps.checks.fuzz_workers` runs many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from qformats import BLOCK, FORMATS, format_of
from reference import Problem, Reference, bfloat16_values, check
from reference.product import Operands, Terms, factors, terms
from steps.blocks.q8_1 import q8_1_blocks
from steps.checks import fuzz_experts
from steps.checks.fuzz_cases import FuzzCase, GivenProblem
from steps.checks.fuzz_experts import ExpertsCase
from steps.checks.run import fatal
from steps.checks.verify import multiply, operands, prepare, require_unchanged
from steps.contract import Kernel
from steps.kernels.parts.activations.layouts import reading_of
from steps.product.gemm import Packed, gemm, pack
from steps.product.operands import ARRAYS
from steps.product.plan import plan

if TYPE_CHECKING:
    from steps.driver.machines import Gpu, Simulator

Machine: TypeAlias = "Gpu | Simulator"

LARGEST: Final = {"float32": 2.0**128, "float16": 65504.0, "bfloat16": 2.0**128}
"""Of C, by its dtype. Sums that may come to an eighth of it are promised to be finite."""

SPOILED: Final = ("nan", "inf")  # kinds of rows whose outputs are not finite
LEAST: Final = 1e-30
"""Rows whose largest |a| is below it are only promised not to grow: scales get subnormal."""

ERRORS: Final = {"exact": 1e-6, "fast": 1e-2, "pruned": 1e-6}
"""The error of a row against the product of A with the weights, as a share of sum a^2 w^2."""

A8_ERROR: Final = 2e-3  # the same of exact steps that quantize A to Q8_1
LEAST_OF_C: Final = {"float32": 0.0, "float16": 2.0**-25, "bfloat16": 0.0}
"""By which an output may be off however small it is: half of the least step of its dtype."""

LEAST_IN_BLOCKS: Final = 127 * 2.0**-25
"""By which a value of A may be off where its block has a scale in float16."""

ROUNDED: Final = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff of C and A, by dtype."""


class Answers(NamedTuple):
    """What C should be, float64[M, N] each.

    same, size: the product of the operands that a kernel multiplied, and its magnitude.
    wanted, most: the same of A as it was given, and the dequantized weights.
    energy: sum a^2 w^2.
    """

    same: np.ndarray
    size: np.ndarray
    wanted: np.ndarray
    most: np.ndarray
    energy: np.ndarray

    def rows(self, pick: np.ndarray) -> Answers:
        """Of some tokens only."""
        return Answers(*(each[pick] for each in self))


class Products:
    """The float64 products with some weights, blocks [N, K/32] or, of K-quants, [N, K/256]: those
    of `reference.product.same_operands`, of weights that are made float64 once."""

    def __init__(self, blocks: np.ndarray) -> None:
        self.blocks = blocks
        self._terms: dict[type, Terms] = {}

    def answers(self, used: Operands | None, a: np.ndarray) -> Answers:
        """used: what a kernel multiplied, None where that was float32 A itself; a: A [M, K]"""
        wanted, most = self._product(a)
        same, size = (wanted, most) if used is None else self._product(used)
        return Answers(same, size, wanted, most, a.astype(np.float64) ** 2 @ self.squares.T)

    def _product(self, used: Operands | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        of, x = self._terms_of(type(used)), factors(used)
        sizes = [np.abs(x) @ one.T for one in of.sizes]
        return x @ of.same.T, np.max(sizes, axis=0)

    def _terms_of(self, kind: type) -> Terms:
        if kind not in self._terms:
            self._terms[kind] = terms(kind, self.blocks)
        return self._terms[kind]

    @property
    def weights(self) -> np.ndarray:
        """The dequantized weights, float64 [N, K]"""
        return self._terms_of(np.ndarray).same

    @cached_property
    def squares(self) -> np.ndarray:
        """Those of the weights"""
        return self.weights**2


class Weights:
    """The weights of cases that share them, on a machine, and the float64 products with them."""

    def __init__(self, case: FuzzCase, machine: Machine) -> None:
        self._case, self._machine = case, machine
        self.blocks = case.blocks()
        self.products = Products(self.blocks)

    @cached_property
    def packed(self) -> Packed:
        """As callers pack them for the step."""
        return pack(self.blocks, step=self._case.step, machine=self._machine)

    @cached_property
    def arrays(self) -> tuple[Any, ...]:
        """As the kernel reads them, on the machine."""
        if not self._case.lesson:
            return self.packed.arrays
        return tuple(map(self._machine.array, self._case.kernel.pack(self.blocks)))

    @cached_property
    def kept(self) -> tuple[np.ndarray, ...]:
        """What is to be in `arrays` after each product."""
        return tuple(np.array(self._machine.host(one)) for one in self.arrays)


def complaints(case: FuzzCase, machine: Machine, weights: Weights | None = None) -> list[str]:
    """One sentence for each thing that is wrong with a case. weights: where cases share them."""
    weights = weights or Weights(case, machine)
    step, problem = case.kernel, case.problem(weights.blocks)
    a, blocks = problem.given, problem.blocks
    if numbers := refused(case, step, problem):
        return _refusals(case, a, blocks, machine, numbers)
    kept = weights.kept
    prepared = prepare(
        *(step, case.family, case.format, a, blocks, machine), dtype=case.c, packed=weights.arrays
    )
    c = np.array(multiply(prepared, machine))
    require_unchanged(prepared, machine, step, a, kept)
    used = operands(prepared, machine)
    found = Judged(case, problem, c, used, weights.products).wrong_rows()
    for again in _again(case, a, weights, machine):
        x, y = _floats(again), _floats(c)
        if not np.array_equal(x, y, equal_nan=True):
            where = np.argwhere((x != y) & ~(np.isnan(x) & np.isnan(y)))[0]
            at = tuple(map(int, where))
            found.append(f"via {case.via} C has other bits, the first at {at}")
    return found


def judged(
    case: FuzzCase | ExpertsCase, machine: Machine, weights: Any = None
) -> tuple[list[str], bool]:
    """(`complaints` or the error of a case, whether the GPU's context is lost, so that no more can
    run)"""
    try:
        if isinstance(case, ExpertsCase):
            return fuzz_experts.complaints(case, machine, weights), False
        return complaints(case, machine, weights), False
    except Exception as error:  # a kernel may fail in any way
        return [" ".join(f"{type(error).__name__}: {error}".split())], fatal(error)


# --- what must be refused -------------------------------------------------------------------------


def refused(case: FuzzCase, step: Kernel, problem: Problem) -> tuple[str, ...]:
    """The numbers that the sentence of a refusal must hold; none where nothing is refused."""
    if step.most_k is not None and case.k > step.most_k:
        return str(case.k), str(step.most_k)
    if _in_blocks(case, step):
        finite = np.isfinite(problem.a).all(axis=1)
        try:
            if finite.any():
                FORMATS["q8_1"].quantize(problem.a[finite])
        except ValueError:
            return ("65504",)
    return ()


def _in_blocks(case: FuzzCase, step: Kernel) -> bool:
    """Whether A is kept in 36-byte blocks, with scales and sums in float16."""
    return reading_of(step, case.a, case.family).make is q8_1_blocks


def _refusals(
    case: FuzzCase, a: np.ndarray, blocks: np.ndarray, machine: Machine, numbers: tuple[str, ...]
) -> list[str]:
    """What `gemm`, a plan and, for K, `pack` have let pass."""
    calls: dict[str, Callable[[], Any]] = {
        via: partial(_called, replace(case, via=via), a, blocks, machine)
        for via in ("gemm", "plan")
    }
    if numbers != ("65504",):
        calls["pack"] = partial(pack, blocks, step=case.step, machine=machine)
    if _refused_by_gemm(case, machine):
        del calls["gemm"]  # which says another thing
    found = []
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            if not all(number in str(error) for number in numbers):
                found.append(f"{name} refuses it without {' and '.join(numbers)}: {error}")
        else:
            found.append(f"{name} does not refuse it, as it must for {' and '.join(numbers)}")
    return found


# --- the rows of C --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Judged:
    """The product of a case: its problem, C, the activations that the kernel multiplied, None where
    these were float32 A, and the products with its weights."""

    case: FuzzCase
    problem: Problem
    c: np.ndarray
    used: Any
    products: Products

    def wrong_rows(self) -> list[str]:
        """What is wrong with rows of each kind."""
        found: list[str] = []
        kinds, used, answers = np.resize(self.case.kinds, self.case.m), self.used, None
        finite = np.flatnonzero(~np.isin(kinds, SPOILED))
        if finite.size:
            rows_used = None if used is None else used.rows(finite)
            answers = self.products.answers(rows_used, self.problem.a[finite])
        for kind in sorted(set(kinds)):
            rows = np.flatnonzero(kinds == kind)
            if kind in SPOILED:
                part = _floats(self.c[rows])
                wrong = ~np.isnan(part) if kind == "nan" else np.isfinite(part)
                if self.case.kernel.accuracy == "pruned":  # a weight that is pruned hides it
                    spoils = ~np.isfinite(self.problem.a[rows].astype(np.float64))
                    meets = spoils.astype(np.float64) @ (self.products.weights != 0).T
                    wrong &= meets > 0
                if wrong.any():
                    m, n = (int(i) for i in np.argwhere(wrong)[0])
                    found.append(
                        f"{np.count_nonzero(wrong)} of {part.size} outputs of rows with {kind} "
                        f"hide it, the first at ({rows[m]}, {n}): got {part[m, n]:.9g}"
                    )
            elif answers is not None:
                found += self._wrong_kind(rows, answers.rows(np.searchsorted(finite, rows)))
        return found

    def _wrong_kind(self, rows: np.ndarray, answers: Answers) -> list[str]:
        """What is wrong with rows of one finite kind."""
        case, problem = self.case, self.problem
        kind, part = case.kind_of(int(rows[0])), _floats(self.c[rows])
        finite_sums: np.ndarray = answers.most < LARGEST[case.c] / 8
        if (wrong := finite_sums & ~np.isfinite(part)).any():
            m, n = (int(i) for i in np.argwhere(wrong)[0])
            return [
                f"{np.count_nonzero(wrong)} of {part.size} outputs of {kind} rows are not finite, "
                f"the first at ({rows[m]}, {n}): got {part[m, n]}, expected "
                f"{answers.wanted[m, n]:.9g}"
            ]
        kept = np.all(finite_sums, axis=1)
        rows, part, answers = rows[kept], part[kept], answers.rows(kept)
        if not rows.size:
            return []
        a = problem.a[rows]
        x = a.astype(np.float64)
        largest = np.abs(x).max(axis=1)
        if (largest[largest > 0] < LEAST).any():
            if (np.abs(part) > 2 * answers.most + LEAST).any():
                most = f"{np.abs(part).max():.3g}"
                return [f"{kind} rows have outputs of {most}, larger than their sums"]
            return []
        own = problem
        if not case.as_drawn or not kept.all():
            data = "integer" if case.as_drawn and case.data == "integer" else "normal"
            own = GivenProblem(a, problem.blocks, problem.input, data)
        reference = Reference(own, part.size, multiply=lambda _: (answers.same, answers.size))
        used = None if self.used is None else self.used.rows(rows)
        verdict = check(self.c[rows], own, case.family, used, reference=reference)
        # Each output has its bound. What all of them come to is judged by roundings that fall at
        # random: not where the steps of C are coarse, nor where terms are alike, and so rounded,
        # nor where all outputs of a token are one.
        coarse = np.mean(answers.wanted**2) < (1e4 * LEAST_OF_C[case.c]) ** 2
        alike = kind == "ones" or case.weights == "most"
        right = verdict.ok or ((coarse or alike) and verdict.failures == ("nmse",))
        found = [] if right else [f"{kind} rows are {verdict.verdict}"]
        return found + self._far_off(x, answers, rows)

    def _far_off(self, x: np.ndarray, answers: Answers, rows: np.ndarray) -> list[str]:
        """Whether the product of the operands, which `check` takes as they are, is further from
        x @ weights than it may be: by what the pass over A has lost."""
        case, step, products = self.case, self.case.kernel, self.products
        wanted, energy, blocks = answers.wanted, answers.energy, products.blocks
        allowed = ERRORS[step.accuracy]
        exact_a8 = case.family == "A8" and step.accuracy == "exact"
        if exact_a8:
            allowed = A8_ERROR
        elif case.family == "A16":
            allowed += 4 * ROUNDED[case.a] ** 2
        permitted, squares = allowed * energy, products.squares.sum(axis=1)
        if step.accuracy == "fast":  # int8, whose step follows the largest |a| of a token
            permitted += (np.abs(x).max(axis=1, keepdims=True) / 127) ** 2 / 12 * squares
        if _in_blocks(case, step):
            permitted += LEAST_IN_BLOCKS**2 * squares
        few = 1 + 30 / (1 if case.weights == "most" else wanted.shape[1])  # columns are all alike
        error = ((answers.same - wanted) ** 2).sum(axis=1)
        most = few * permitted.sum(axis=1) + 2.0**-50
        if (error <= most).all():
            return []
        # What else may be lost takes longer to find out.
        if exact_a8:  # a block's step follows its largest value
            steps = np.abs(x).reshape(len(x), -1, BLOCK).max(axis=2) / 127
            of_blocks = products.squares.reshape(-1, steps.shape[1], BLOCK).sum(axis=(0, 2))
            most += few / 12 * (steps**2 @ of_blocks)
        if not format_of(blocks).written:  # K-quants, see `qformats.storage`: scales and minima
            # become float16, which costs 2^-11 of what each multiplies
            parts = _groups(x, blocks)
            most += few * 2.0**-22 * sum((p**2 + q**2).sum(axis=1) for p, q in parts)
        ones = case.kind_of(int(rows[0])) == "ones"
        if case.family == "A16" and (ones or case.weights == "most"):
            # terms are alike, and so are their roundings: by as much as a factor's, of all of the
            # sum
            unit = max(ROUNDED["float16"], ROUNDED[case.a])
            most += ((unit * answers.most) ** 2).sum(axis=1)
        if _in_blocks(case, step) and ones:
            # its blocks' scales and sums are rounded alike
            sums = [abs(sum(part)) for part in zip(*_groups(x, blocks), strict=True)]
            most += few * 2.0**-22 * (np.sum(sums, axis=0) ** 2).sum(axis=1)
        if (error <= most).all():
            return []
        m = int(np.argmax(error / most))
        whole = max(energy[m].sum(), 1e-300)
        return [
            f"row {rows[m]} ({case.kind_of(int(rows[m]))}) is off by {error[m] / whole:.2g} of "
            f"sum a^2 w^2, and {most[m] / whole:.2g} is allowed"
        ]


def _groups(x: np.ndarray, blocks: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Group by group of K, the parts of all outputs that are multiplied by a weight's scale, and by
    its offset: float64 [M, N]."""
    fmt = format_of(blocks)
    scale, offset = fmt.scale(blocks).astype(np.float64), fmt.offset(blocks).astype(np.float64)
    levels = fmt.levels(blocks).reshape(*scale.shape, fmt.group)
    for g, part in enumerate(np.split(x, scale.shape[1], axis=1)):
        yield part @ (levels[:, g] * scale[:, g, None]).T, np.outer(part.sum(axis=1), offset[:, g])


# --- the same again -------------------------------------------------------------------------------


def _again(case: FuzzCase, a: np.ndarray, weights: Weights, machine: Machine) -> list[np.ndarray]:
    """C of the same product, made in the way that the case names."""
    if case.via != "step":  # on a GPU weights that are packed, which the cases share
        return _called(case, a, weights.packed if machine.cc else weights.blocks, machine)
    prepared = prepare(
        *(case.kernel, case.family, case.format, a, weights.blocks, machine),
        dtype=case.c,
        packed=weights.arrays,
    )
    return [np.array(multiply(prepared, machine))]


def _called(
    case: FuzzCase, a: np.ndarray, w: np.ndarray | Packed, machine: Machine
) -> list[np.ndarray]:
    """C by `gemm` or a plan. Of a plan by two calls: the second finds the workspace as the first
    has left it."""
    options: dict[str, Any] = {"step": case.step, "family": case.family, "dtype": case.c}
    options["machine"] = machine
    on_gpu = machine.cc is not None
    empty = np.full((case.m, case.n), 0x7F, np.uint8).astype(ARRAYS[case.c])
    at = _on_gpu(a, case.offset, case.a) if on_gpu else a
    calls_made = 1 if case.via == "gemm" else 2
    outs = [_on_gpu(empty, case.offset) if on_gpu else empty.copy() for _ in range(calls_made)]
    if case.via == "gemm":
        if _refused_by_gemm(case, machine):
            return []
        gemm(at, w, out=outs[0], stream=_stream(case, machine), **options)
        return [_fetched(outs[0])]
    run = plan(case.m, w, input=case.a, **options)

    def calls(stream: Any) -> None:
        for out in outs:
            run(at, out, stream=stream)

    if case.via == "graph" and on_gpu:
        _replayed(calls)
    else:
        calls(_stream(case, machine))
    return [_fetched(out) for out in outs]


def _refused_by_gemm(case: FuzzCase, machine: Machine) -> bool:
    """Whether A has a NaN or infinity and is NumPy's, where it costs little to look."""
    return machine.cc is None and bool({*SPOILED} & {*case.kinds[: case.m]})


def _replayed(calls: Callable[[Any], None]) -> None:
    """Captured into a CUDA graph, which is launched twice."""
    from cuda.core import Device

    device = Device()
    device.set_current()
    builder, stream = device.create_graph_builder(), device.create_stream()
    builder.begin_building()
    calls(builder)
    builder.end_building()
    graph = builder.complete()
    graph.launch(stream)
    graph.launch(stream)
    stream.sync()


def _stream(case: FuzzCase, machine: Machine) -> Any:
    return _own_stream() if case.stream and machine.cc is not None else None


@cache
def _own_stream() -> Any:
    """One for all products: `gemm` keeps a workspace for each stream."""
    from numba import cuda

    return cuda.stream()


def _on_gpu(host: np.ndarray, offset: int, dtype: str = "bytes") -> Any:
    """On the GPU, `offset` elements of a float32 A behind an aligned address, of others chunks of
    16 bytes."""
    from numba import cuda

    first = offset if dtype == "float32" else offset * 16 // host.itemsize
    padded = np.zeros(first + host.size, host.dtype)
    padded[first:] = host.reshape(-1)
    there = cuda.to_device(padded)
    cuda.synchronize()  # it may be read on any stream
    return there[first:].reshape(host.shape)


def _fetched(array: Any) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return array
    from numba import cuda

    cuda.synchronize()
    host: np.ndarray = array.copy_to_host()
    return host


def _floats(c: np.ndarray) -> np.ndarray:
    """C as floats: of bfloat16 its values."""
    return bfloat16_values(c) if c.dtype == np.uint16 else c
