"""The contract of kernels: what a file with a kernel hands over, and nothing else.

    Kernel    what it can do, how it packs W and prepares A, and `launch`, which makes a Launch
    Step      a Kernel and its place in the ladder: what a lesson's file defines as `STEP`
    Launch    kernel, grid, block and arguments, as data
    Machine   where launches run: a GPU or the simulator (`steps.driver.machines`)

A lesson defines a `Step` as `STEP`, an engineered kernel (`steps.kernels`) a `Kernel` as `KERNEL`.
Such a file says *what* to run. A machine runs it, the offline compiler turns it into machine code,
and other rooms check, time and draw it through what is here. So it holds its idea, and no timing,
data or printing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, Final, Literal, Protocol

import numpy as np

from qformats import FORMATS, WEIGHT_FORMATS, Format

Family = Literal["A16", "A8"]
"""How a kernel reads its activations: A16 as floating point, A8 quantized on the GPU to int8, with
a scale per 32 values (Q8_1) or, in a "fast" kernel, per token."""

Accuracy = Literal["exact", "fast", "pruned"]
"""exact: the kernel multiplies the weights as their format stores them, rounded to float16 at most;
of K-quants scales and minima are rounded so as well (`qformats.storage`).
fast: it requantizes them to int8 with one scale per row, and is used only when asked for.
pruned: it multiplies two of each four weights along K (`qformats.repack.prune`), and is a lesson:
`gemm` never takes it."""

ACCURACIES: Final[tuple[Accuracy, ...]] = ("exact", "fast")
"""Those that can be asked for. Asking for one allows those before it, too."""


def known_accuracy(name: str) -> Accuracy:
    """ValueError for a name that is no accuracy."""
    for accuracy in ACCURACIES:
        if name == accuracy:
            return accuracy
    raise ValueError(f"accuracy is {name!r}: it must be one of {', '.join(ACCURACIES)}")


Unit = Literal[
    "fp32", "int32", "packed_int32", "dp4a", "tensor_int8", "tensor_fp16", "tensor_sparse"
]
"""The arithmetic unit whose measured peak bounds a kernel (`results.measure.limits`)."""


Size = tuple[int, int, int]
"""M, N, K of a product."""

FLOATS: Final = ("float32", "float16", "bfloat16")
"""The dtypes of A and of C, by name, see `dtype_name`."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch as data: `kernel[grid, block](*args)`, `shared_bytes` of dynamic memory.

    `args` are the arrays of one machine (device arrays on a GPU, NumPy arrays in the simulator) and
    Python scalars, in the order of the kernel's parameters. `overlap`: it may begin while the
    launch before it still runs (programmatic dependent launch, compute capability 9.0 and later);
    the kernel itself calls `griddepcontrol_wait` before it reads what that launch wrote, or writes
    what it reads. `together`: its thread blocks wait for each other, so all must run at once.
    """

    kernel: Any
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: tuple[Any, ...]
    shared_bytes: int = 0
    overlap: bool = False
    together: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """C[M, N] = A[M, K] @ W[N, K]^T: M tokens, N output features, K the reduction.

    invariant: a row of C must have the same bits whatever M is, up to `Kernel.most_tokens`.
    """

    m: int
    n: int
    k: int
    invariant: bool = False


@dataclass(frozen=True, slots=True)
class Activations:
    """The activations as a kernel reads them.

    `launches` run before the kernel's own: none when `arrays` is the caller's A itself.
    `layout` names what `arrays` hold (`steps.kernels.parts.activations.layouts`): Q8_1 as "blocks",
    "k_outermost" or "mma_order"; "inside" where the kernel quantizes float32 A itself; "tokens" for
    int8 with one scale per token; "rows" for float16 or bfloat16 A[M, K], followed by token scales
    where it was made of another A; None for float32 A. Where the kernel makes some of the rows
    itself, A comes before them and counters come last (`steps.kernels.parts.activations.beside`).
    """

    arrays: tuple[Any, ...]
    launches: tuple[Launch, ...] = ()
    layout: str | None = None


def plain_rows(a: Any, machine: Machine) -> Activations:
    """A[M, K] as the caller has it, in float32, float16 or bfloat16: nothing runs before the
    kernel."""
    return Activations((a,), layout=None if dtype_name(a) == "float32" else "rows")


class Machine(Protocol):
    """Where launches run: `steps.driver.machines.Gpu` or `steps.driver.machines.Simulator`.

    array : a C-contiguous copy of a NumPy array on the machine.
    empty : a new array there, whose content is anything.
    host  : the content of an array there as NumPy, after all launches before.
    run   : queue a launch; launches run in their order.
    """

    name: str

    def array(self, host: np.ndarray) -> Any: ...
    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any: ...
    def host(self, array: Any) -> np.ndarray: ...
    def run(self, launch: Launch) -> None: ...


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch of the ladder: steps that run on the same units of the GPU, each compared with its
    parent at the branch's home shapes. The first home shape is the one in tables and charts."""

    title: str
    homes: tuple[Size, ...]


BRANCHES: Final[Mapping[str, Branch]] = {
    "cuda_cores": Branch("CUDA cores", ((512, 4096, 4096),)),
    "int8": Branch("int8 tensor cores, exact", ((512, 4096, 4096),)),
    "float16": Branch("float16 tensor cores and beyond", ((512, 4096, 4096),)),
    "decode": Branch("decode: few tokens", ((1, 4096, 14336),)),
}
"""By the name that a step gives, in the order of the ladder's panels."""

PackWeights = Callable[[np.ndarray], tuple[np.ndarray, ...]]
MakeActivations = Callable[[Any, Machine], Activations]
MakeLaunch = Callable[..., Launch]
Scratch = Callable[[Format, Family, Shape], tuple[tuple[tuple[int, ...], Any], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel of products and what it can do. `gemm` chooses among the engineered ones.

    number: the lesson that teaches it; `gemm(step=)`, tables and messages name a kernel so.
    name, title: "wgmma_float16"; one line for tables.
    families: the activation families it multiplies, the one that continues the ladder last.
    unit: the arithmetic unit that bounds it, per family.
    pack: blocks[N, K/32] -> arrays the kernel reads (on the host, done once, timed apart).
    activations: per family, (a, machine) -> `Activations` (timed apart).
    launch: (format, family, shape, weights, activations, out) -> `Launch`; for a kernel with
        `scratch`, its arrays follow as one more argument.
    scratch: (format, family, shape) -> ((shape, dtype), ...) of memory the kernel works in besides,
        such as partial sums that thread blocks hand each other. The last of these arrays, of
        counters, is all zero before the first launch, and the kernel leaves it so for the next one;
        the others may hold anything.
    outputs: the dtypes that C may have, the usual one first; the launch looks at `out.dtype`.
    inputs: the dtypes of A that a lesson reads; empty for those that `activations` can read, which
        `steps.kernels.parts.activations.layouts.inputs` names.
    adds_bias: whether `launch` takes a bias [N], of any dtype of `FLOATS`, behind the packed
        weights, and adds it to C before that is rounded.
    min_cc: smallest compute capability; 7.5 is the oldest that the pinned toolkit compiles for.
    max_cc: the greatest, None for any: what sm_90a has, later ones do not.
    accuracy: "fast" or "pruned" for a kernel that changes its weights, see `Accuracy`.
    most_tokens: the M up to which it is meant to be used, None for any: where no measurement says
        better, `gemm` takes it for no more. It is right for every M all the same.
    invariant: the families in which the launch heeds `Shape.invariant`.
    most_k: the largest K that its sums hold, None for any.
    chosen_untuned: whether `gemm` may choose it where no tuning table has a time for it, and
        `pack` its layout. A new kernel says no until it has been measured.
    """

    number: int
    name: str
    title: str
    families: tuple[Family, ...]
    unit: Mapping[Family, Unit]
    pack: PackWeights
    activations: Mapping[Family, MakeActivations]
    launch: MakeLaunch
    scratch: Scratch | None = None
    formats: tuple[str, ...] = WEIGHT_FORMATS
    outputs: tuple[str, ...] = ("float32",)
    inputs: tuple[str, ...] = ()
    adds_bias: bool = False
    min_cc: tuple[int, int] = (7, 5)
    max_cc: tuple[int, int] | None = None
    accuracy: Accuracy = "exact"
    most_tokens: int | None = None
    most_k: int | None = None
    invariant: tuple[Family, ...] = ()
    chosen_untuned: bool = False

    def prepare(
        self,
        machine: Machine,
        fmt: Format,
        family: Family,
        shape: Shape,
        weights: tuple[Any, ...],
        activations: tuple[Any, ...],
        out: Any,
    ) -> Launch:
        """The kernel's own launch on a machine, where its scratch memory is allocated first."""
        memory = self.scratch_memory(machine, fmt, family, shape)
        return self.launch(fmt, family, shape, weights, activations, out, *memory)

    def scratch_memory(
        self, machine: Machine, fmt: Format, family: Family, shape: Shape
    ) -> tuple[tuple[Any, ...], ...]:
        """What a launch takes after C: `scratch` on a machine, or nothing."""
        if self.scratch is None:
            return ()
        *others, (counters, dtype) = self.scratch(fmt, family, shape)
        memory = (machine.empty(*each) for each in others)
        return ((*memory, machine.array(np.zeros(counters, dtype))),)

    def supports(
        self,
        format_name: str,
        family: str,
        cc: tuple[int, int] | None = None,
        output: str | None = None,
    ) -> str | None:
        """None, or one sentence saying why this kernel cannot do that (on such a GPU). output: the
        dtype of C, by default its own."""
        if format_name not in self.formats:
            return f"step {self.number} has no {format_name}: it takes {', '.join(self.formats)}"
        if family not in self.families:
            return f"step {self.number} is of family {'/'.join(self.families)}, not {family}"
        if output is not None and output not in self.outputs:
            return f"step {self.number} writes C as {' or '.join(self.outputs)}, not {output}"
        if cc is not None and not self.min_cc <= cc <= (self.max_cc or cc):
            have, least, most = (f"{x[0]}.{x[1]}" for x in (cc, self.min_cc, self.max_cc or cc))
            need = least if cc < self.min_cc else f"{most} at most"
            return f"step {self.number} needs compute capability {need}; this GPU has {have}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Kernel):
    """One rung of the ladder: a kernel, and its place among the others.

    name: that of its file, "step04_dp4a_emulated".
    branch: its branch of the ladder, a key of `BRANCHES`.
    homes: the shapes where it is compared with its parent, if not those of its branch.
    parents: the step each family is compared with ("x parent"); absent for a first rung.
    idea: the instructions or functions that its own kernel must call: "ldmatrix_x4", or
        "cuda.shared.array". A test reads the file for them.
    contains, forbids: SASS opcode prefixes its machine code must and must not hold, per family;
        alternatives of one promise are joined by "|".
    """

    branch: str
    homes: tuple[Size, ...] = ()
    parents: Mapping[Family, int] = field(default_factory=dict)
    idea: tuple[str, ...] = ()
    contains: Mapping[Family, tuple[str, ...]] = field(default_factory=dict)
    forbids: Mapping[Family, tuple[str, ...]] = field(default_factory=dict)

    @property
    def home_shapes(self) -> tuple[Size, ...]:
        """The shapes at which the ladder compares it with its parent, the one of charts first."""
        return self.homes or BRANCHES[self.branch].homes


def dtype_name(array: Any) -> str:
    """ "float32", "float16" or "bfloat16". NumPy has no bfloat16: such arrays are uint16."""
    name = np.dtype(array.dtype).name
    return "bfloat16" if name == "uint16" else name


def array_dtype(name: str) -> np.dtype[Any]:
    """The dtype of arrays that hold numbers of this name, see `dtype_name`."""
    return np.dtype(np.uint16 if name == "bfloat16" else name)


def scheme(format_name: str, family: Family) -> str:
    """W{weight bits}{family}: "W4A16", "W5A8" ... as tables and records name it."""
    return f"W{FORMATS[format_name].bits}{family}"


@dataclass(frozen=True, slots=True)
class Work:
    """One step, or the engineered kernel that it teaches, in one activation family on one weight
    format."""

    step: Kernel
    family: Family
    format: str

    @property
    def scheme(self) -> str:
        return scheme(self.format, self.family)

    def output(self, asked: str | None) -> str:
        """The dtype of C: the one asked for, or the step's own."""
        return asked or self.step.outputs[0]

    def __str__(self) -> str:
        return f"step {self.step.number} {self.scheme} {self.format}"


def ceil_div(a: int, b: int) -> int:
    """The number of tiles of size b that cover a."""
    return -(-a // b)


# --- the device that kernels are sized for --------------------------------------------------------

H200_SMS: Final = 132
H200_SHARED: Final = 227 * 1024


def _numba_cuda() -> Any:
    """numba.cuda, imported when it is asked for: a step's contract alone needs no Numba."""
    from steps.simulator import numpy_shim  # noqa: F401 - before the first use of numba.cuda

    return import_module("numba.cuda")


def why_no_gpu() -> str | None:
    """None where a CUDA GPU can be used, else why not, in words that can end a sentence."""
    cuda = _numba_cuda()
    try:
        if cuda.is_available():
            return None
        error = cuda.cuda_error()
        return str(error).strip().splitlines()[0].rstrip(".") if error else "no device was found"
    except Exception as error:  # a broken driver raises many types; each is a reason, none a crash
        return f"{type(error).__name__}: {error}"


_pretended: tuple[int, int] | None = None


def pretend(sms: int, shared_bytes: int) -> None:
    """Size kernels for such a GPU, from here on: for a process that compiles and has none."""
    global _pretended
    _pretended = sms, shared_bytes
    multiprocessors.cache_clear()
    shared_memory.cache_clear()


@cache
def multiprocessors() -> int:
    """The SMs of the current GPU; without one those of an H200, for which kernels are sized."""
    if _pretended:
        return _pretended[0]
    cuda = _numba_cuda()
    return H200_SMS if why_no_gpu() else int(cuda.get_current_device().MULTIPROCESSOR_COUNT)


@cache
def shared_memory() -> int:
    """Bytes of shared memory that one thread block of the current GPU can be given; see above."""
    if _pretended:
        return _pretended[1]
    if why_no_gpu():
        return H200_SHARED
    cuda = _numba_cuda()
    return int(cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
