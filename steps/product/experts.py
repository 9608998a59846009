"""`experts` and `pack_experts`: products of tokens with the experts chosen for them.

    packed = pack_experts(blocks)               # blocks [E, N, K/32] of qformats, uploaded once
    c = experts(a, packed, ids)                 # [T, S, N] of a [T, K] and ids [T, S]: mul_mat_id

    up = pack_experts(gates_and_ups(gate, up))  # a feed-forward block of experts in two products:
    x = experts(a, up, ids, gate="silu", dtype="float16")           # [T, S, I]
    y = experts(x, down, ids, router=weights, dtype="float16")      # [T, N], summed over S

A call takes the way of `steps.product`: an `ExpertsRequest`, `choose`, an `ExpertsChoice`, a
`Prepared`, then addresses. Nothing waits for the GPU, and calls may be captured into CUDA graphs
(those of a plan, which owns its memory). ids stay on the GPU: which experts they choose is not
known when a launch is made, and does not change it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from qformats.repack import TILE_ROWS, byte_tiles, tiles
from steps.compile.dry_run import OUT, A, ArrayType, DryRun, Placeholder, operands
from steps.contract import FLOATS, Accuracy, Launch, Machine, array_dtype, known_accuracy
from steps.driver.launcher import address_of, stream_handle
from steps.kernels.experts import few, many
from steps.kernels.experts.contract import (
    GATES,
    IDS,
    ExpertsKernel,
    ExpertsOperands,
    ExpertsRequest,
)
from steps.product.choice import MOST_OF_A_SIDE
from steps.product.gemm import (
    PRODUCTS,
    Memory,
    current_device,
    machine_for,
    memory_of,
    new_memory,
)
from steps.product.operands import (
    ARRAYS,
    BYTES,
    address,
    as_array,
    blocks_of,
    empty_beside,
    float_name,
    is_device_array,
    one_of,
    require_apart,
    require_array,
    require_finite,
    require_out,
    require_place,
    require_start_of_a,
    stream_of,
    weight_format,
)
from steps.product.prepared import Kept, Prepared

if TYPE_CHECKING:
    from qformats.gguf_file import Tensor
    from steps.driver.machines import Gpu, Simulator


# --- weights --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts:
    """The weights [E, N, K] of E experts, of one format, on one machine. Made by `pack_experts`. It
    equals itself alone, and is neither copied nor pickled: what can be is the blocks.

    arrays   : (packed, row_scales) of all experts, see `steps.kernels.experts.contract`.
    fast     : the same as kernels of int8 read them; None where no product may be fast.
    accuracy : of products that do not name one.
    products : those prepared on the GPU, by their `ExpertsRequest`.
    """

    format: str
    experts: int
    n: int
    k: int
    arrays: tuple[Any, Any]
    machine: Gpu | Simulator
    fast: tuple[Any, Any] | None = None
    accuracy: Accuracy = "exact"
    products: Kept[ExpertsProduct] = field(init=False, default_factory=lambda: Kept(PRODUCTS))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{self!r} lies on the {self.machine.name} and is neither copied nor pickled: keep its "
            "blocks, and pack them where they are needed"
        )

    def __repr__(self) -> str:
        return f"PackedExperts({self.format} [{self.experts}, {self.n}, {self.k}])"

    def read_by(self, kernel: ExpertsKernel) -> tuple[Any, Any]:
        """The arrays that a kernel reads."""
        if kernel.accuracy == "exact":
            return self.arrays
        assert self.fast is not None
        return self.fast


def pack_experts(
    w: np.ndarray | Tensor,
    *,
    accuracy: Accuracy = "exact",
    machine: Gpu | Simulator | None = None,
) -> PackedExperts:
    """Weights of experts, repacked as kernels read them and uploaded once.

    w       : blocks [E, N, K/32], of K-quants [E, N, K/256], a NumPy array or a tensor of a file.
    accuracy: "exact" or "fast", see `experts`: of products that do not name one. "fast" packs the
              weights once more, for products of many tokens; few tokens are exact.
    machine : by default the current GPU; `steps.driver.machines.Simulator()` needs none, and is
              slow.

    Raises TypeError for what are no blocks, ValueError for other shapes, for blocks without a
    finite scale and for formats that no kernel takes, RuntimeError without a GPU.
    """
    blocks = blocks_of(w)
    name, count, n, k = _of_blocks(blocks)
    packings = [tiles, byte_tiles] if known_accuracy(accuracy) == "fast" else [tiles]
    where = machine_for(machine)
    made = [tuple(map(where.array, packed_arrays(blocks, pack))) for pack in packings]
    where.synchronize()  # an upload may be read on any stream from here on
    fast = made[1] if made[1:] else None
    return PackedExperts(name, count, n, k, made[0], where, fast, accuracy)


def _of_blocks(w: Any) -> tuple[str, int, int, int]:
    """(format, E, N, K) of blocks of experts, which are checked."""
    if getattr(w, "ndim", 3) != 3:
        raise ValueError(
            f"w must have shape [E, N, K/32], a matrix for each expert, got {w.ndim} dimensions: "
            f"{tuple(w.shape)}"
        )
    if isinstance(w, np.ndarray) and not w.size:
        raise ValueError(f"w is empty: its shape is {w.shape}")
    flat = w.reshape(-1, w.shape[-1]) if isinstance(w, np.ndarray) else w
    fmt = weight_format(flat)
    if fmt.name not in few.KERNEL.formats:
        raise ValueError(few.KERNEL.why_not(ExpertsRequest(fmt.name, 1, 1, 1, 1, 1), None))
    count, n, blocks_k = w.shape
    return fmt.name, count, n, blocks_k * fmt.elements


def packed_arrays(blocks: np.ndarray, pack: Any = tiles) -> tuple[np.ndarray, np.ndarray]:
    """(packed uint8, row_scales float32) of blocks [E, N, K/32]: what `tiles` of `qformats.repack`,
    or `byte_tiles`, makes of each expert, one after another."""
    first, scales = pack(blocks[0])
    packed = np.empty((len(blocks), first.size), np.uint8)
    row_scales = np.empty((len(blocks), scales.size), np.float32)
    packed[0], row_scales[0] = first, scales
    for e in range(1, len(blocks)):
        packed[e], row_scales[e] = pack(blocks[e])
    return packed.reshape(-1), row_scales.reshape(-1)


def gates_and_ups(gate: Any, up: Any) -> Any:
    """Rows of gates and ups in turn, 16 rows of each: [E, 2 I', ...] of gate and up [E, I, ...],
    I' = I rounded up to a multiple of 16, with zeros for rows that are missing. For blocks of one
    format, NumPy or torch's bytes, and for biases [E, I]. `gate=` of `experts` multiplies such
    weights."""
    if gate.ndim < 2 or gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gates and ups must be [E, I, ...] and alike, got {gate.dtype} {list(gate.shape)} and "
            f"{up.dtype} {list(up.shape)}"
        )
    e, rows, *rest = gate.shape
    pairs = -(-rows // TILE_ROWS)
    shape = (e, pairs, 2, TILE_ROWS, *rest)
    of_numpy = isinstance(gate, np.ndarray)
    both = np.zeros(shape, gate.dtype) if of_numpy else gate.new_zeros(shape)
    whole = rows // TILE_ROWS
    for which, one in enumerate((gate, up)):
        both[:, :whole, which] = one[:, : whole * TILE_ROWS].reshape(e, whole, TILE_ROWS, *rest)
        if rows % TILE_ROWS:
            both[:, whole, which, : rows % TILE_ROWS] = one[:, whole * TILE_ROWS :]
    return both.reshape(e, pairs * 2 * TILE_ROWS, *rest)


# --- which kernel ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExpertsChoice:
    """A kernel for a product of experts, and why. `str` of it is a sentence."""

    request: ExpertsRequest
    kernel: ExpertsKernel
    why: str

    def __str__(self) -> str:
        asked = self.request
        return (
            f"{self.kernel.title} for T={asked.tokens} S={asked.chosen} E={asked.experts} "
            f"N={asked.n} K={asked.k} in {asked.format}: {self.why}"
        )

    def types(self, weights: Sequence[ArrayType]) -> list[ArrayType]:
        """Of the operands behind A and C: packed weights, ids, bias and the router's weights."""
        asked = self.request
        found = [*weights, ((asked.tokens, asked.chosen), np.dtype(asked.ids))]
        if asked.bias:
            found.append(((asked.experts, asked.n), array_dtype(asked.bias)))
        if asked.router:
            found.append(((asked.tokens, asked.chosen), array_dtype(asked.router)))
        return found

    def on(self, machine: Machine, a: Any, out: Any, arrays: Sequence[Any]) -> tuple[Launch, ...]:
        """The launches on arrays of a machine; arrays: those of `types`, in their order."""
        asked = self.request
        packed, row_scales, ids, *rest = arrays
        bias = rest.pop(0) if asked.bias else None
        router = rest.pop(0) if asked.router else None
        given = ExpertsOperands(packed, row_scales, a, ids, out, bias, router)
        return self.kernel.launches(asked, given, machine)

    def launches(
        self, machine: DryRun | None = None, weights: Sequence[ArrayType] | None = None
    ) -> tuple[Launch, ...]:
        """The launches on placeholders. machine: adds up the memory that they ask for. weights:
        types of the packed arrays; by default ones that have the dtypes alone."""
        asked = self.request
        weights = weights or [((16,), np.dtype(np.uint8)), ((4,), np.dtype(np.float32))]
        a = Placeholder(A, (asked.a_rows, asked.k), array_dtype(asked.a))
        out = Placeholder(OUT, asked.out_shape, array_dtype(asked.c))
        types = self.types(weights)
        arrays = [
            Placeholder(at, tuple(shape), np.dtype(dtype))
            for at, (shape, dtype) in zip(operands(len(types)), types, strict=True)
        ]
        return self.on(machine or DryRun(), a, out, arrays)

    def runs_on(self, cc: tuple[int, int]) -> bool:
        """Whether a GPU of this compute capability runs the kernel."""
        return self.kernel.why_not(self.request, cc) is None


def choose(request: ExpertsRequest, machine: Any) -> ExpertsChoice:
    """The kernel for a product on a machine (its `name`, `cc`). ValueError where there is none."""
    rows = request.slots / request.experts
    for_many = [many.FAST, many.KERNEL] if request.accuracy == "fast" else [many.KERNEL]
    for kernel in for_many:
        more = rows > kernel.rows
        # slots beyond the tables of a thread block are another's, which reads the weights again
        more |= kernel is many.KERNEL and request.slots > few.ROOM[-1]
        if more and not kernel.why_not(request, machine.cc):
            return ExpertsChoice(request, kernel, f"{rows:.3g} rows for an expert on average")
    if why := few.KERNEL.why_not(request, machine.cc):
        raise ValueError(why)
    return ExpertsChoice(request, few.KERNEL, f"{rows:.3g} rows for an expert on average")


# --- a call ---------------------------------------------------------------------------------------


def experts(
    a: Any,
    w: np.ndarray | Tensor | PackedExperts,
    ids: Any,
    *,
    bias: Any = None,
    gate: str | None = None,
    router: Any = None,
    out: Any = None,
    dtype: Any = np.float32,
    accuracy: Accuracy | None = None,
    machine: Gpu | Simulator | None = None,
    stream: Any = None,
    explain: bool = False,
) -> Any:
    """C[t, s] = A[t] @ dequantize(W[ids[t, s]])^T + bias[ids[t, s]], ggml's mul_mat_id.

    a       : float32, float16 or bfloat16 [T, K], or [T, S, K] with a row for each slot;
              C-contiguous, NumPy or on the GPU, there in 16 bits at a multiple of 16 bytes. T may
              be 0.
    w       : blocks [E, N, K/32], of K-quants [E, N, K/256], a NumPy array or a tensor of a file;
              or what `pack_experts` made of them.
    ids     : int32 or int64 [T, S], C-contiguous, where `a` is: the experts of each token, in any
              order, any of them several times. A slot whose id is not one from 0 to E - 1 is NaN,
              and no weights are read for it.
    bias    : None, or float32, float16 or bfloat16 [E, N], C-contiguous, where `a` is.
    gate    : None; "silu": C is [T, S, N/2], silu(gate) * up of each slot, of weights that
              `gates_and_ups` has put in turn; "clamped": the same with gpt-oss's gate.
    router  : None, or float32, float16 or bfloat16 [T, S], C-contiguous, where `a` is: C is [T, N],
              the sum over s of router[t, s] times the product, in float32 before C is rounded. A
              token with an id that is none, is NaN.
    out     : where to write C, C-contiguous, where `a` is.
    dtype   : of C: float32, float16 or bfloat16.
    accuracy: "exact", the default, or "fast", as of `steps.gemm`: products of many tokens may then
              requantize the weights to int8 with one scale per row, and `a` to int8 with one per
              token. Weights that are packed already must be so for "fast" (`pack_experts`), else
              products stay exact.
    machine, stream : see `steps.gemm`.
    explain : return (C, choice), an `ExpertsChoice`.

    Returns C: `out` where it was given, else a new array of the library of `a`. The same arguments
    give the same bits; beside other tokens a row is summed in another order.
    Raises TypeError for arrays of a wrong kind or dtype, ValueError for wrong shapes, values or
    options, RuntimeError without a GPU. Each is one sentence that names the numbers.
    """
    w, given, result = blocks_of(w), a, out
    given_ids, given_bias, given_router = ids, bias, router
    a, ids, out = as_array("a", a), as_array("ids", ids), as_array("out", out)
    bias, router = as_array("bias", bias), as_array("router", router)
    on_device = is_device_array(a)
    weights = (w.format, w.experts, w.n, w.k) if isinstance(w, PackedExperts) else _of_blocks(w)
    request = _request(a, ids, bias, router, on_device, gate, dtype, weights)
    request = replace(request, accuracy=_accuracy(accuracy, w))
    where = machine_for(machine, w)
    if on_device and where.cc is None:
        raise TypeError(f"a is on a GPU and the machine is the {where.name}: pass a NumPy array")
    require_out(out, request.out_shape, on_device, request.c)
    choice = choose(request, where)
    if not request.slots:
        c = empty_beside(given, request.out_shape, request.c, where) if out is None else result
        return (c, choice) if explain else c
    packed = (
        w
        if isinstance(w, PackedExperts)
        else pack_experts(w, accuracy=choice.kernel.accuracy, machine=where)
    )
    if on_device:
        product = product_of(packed, request, where)
        c = product(given, given_ids, result, stream, given_bias, given_router)
        return (c, choice) if explain else c
    c = _on_host(choice, packed, a, ids, bias, router, stream)
    if out is not None:
        require_apart(out, a=a, bias=bias, ids=ids, router=router)
        out[...] = c
        c = out
    return (c, choice) if explain else c


def _on_host(
    choice: ExpertsChoice, packed: PackedExperts, a: Any, ids: Any, bias: Any, router: Any,
    stream: Any,
) -> np.ndarray:  # fmt: skip
    """C of NumPy arrays, which are copied to the machine and back."""
    asked, where = choice.request, packed.machine
    where = where if stream is None else where.on(stream)
    others = (where.array(x) for x in (ids, bias, router) if x is not None)
    arrays = [*packed.read_by(choice.kernel), *others]
    target = where.empty(asked.out_shape, ARRAYS[asked.c])
    source = where.array(np.ascontiguousarray(a).reshape(asked.a_rows, asked.k))
    for launch in choice.on(where, source, target, arrays):
        where.run(launch)
    return where.host(target)


def _accuracy(named: Accuracy | None, w: Any) -> Accuracy:
    """Of a product with w: the one that is named, else that of packed weights."""
    if named is not None:
        known_accuracy(named)
    if not isinstance(w, PackedExperts):
        return named or "exact"
    return "exact" if w.fast is None else named or w.accuracy


def _request(
    a: Any, ids: Any, bias: Any, router: Any, on_device: bool, gate: str | None, dtype: Any,
    weights: tuple[str, int, int, int],
) -> ExpertsRequest:  # fmt: skip
    """The request of arrays; TypeError or ValueError where they do not fit together."""
    format, count, n, k = weights
    where = "on the GPU" if on_device else "a NumPy array"
    for name, x in (("ids", ids), ("bias", bias), ("router", router)):
        if x is not None and is_device_array(x) != on_device:
            raise TypeError(f"{name} must be {where}, as a is, got {type(x).__name__}")
    dimensions = 3 if len(getattr(a, "shape", ())) == 3 else 2
    shape, of_a = require_array("a", a, on_device, FLOATS, dimensions)
    (tokens, chosen), of_ids = require_array("ids", ids, on_device, IDS, 2)
    if shape[0] != tokens or shape[1:-1] not in ((), (chosen,)):
        raise ValueError(
            f"a has shape {list(shape)} and ids {[tokens, chosen]}: a must be [T, K] or [T, S, K] "
            "of ids [T, S]"
        )
    if shape[-1] != k:
        raise ValueError(f"a has K={shape[-1]} columns and w has K={k}: they must be equal")
    of_bias = of_router = None
    if bias is not None:
        got, of_bias = require_array("bias", bias, on_device, FLOATS, 2)
        if got != (count, n):
            raise ValueError(f"bias must have shape [E, N] = [{count}, {n}], got {list(got)}")
    if router is not None:
        got, of_router = require_array("router", router, on_device, FLOATS, 2)
        if got != (tokens, chosen):
            raise ValueError(
                f"router must have the shape of ids, [{tokens}, {chosen}], got {list(got)}"
            )
    if on_device and tokens:
        require_start_of_a(a.__cuda_array_interface__["data"][0], of_a)
    elif not on_device:
        require_finite("a", a, of_a)
    request = ExpertsRequest(
        format, tokens, chosen, count, n, k, of_a, float_name(dtype), of_ids, dimensions == 3,
        of_bias, gate, of_router,
    )  # fmt: skip
    require_product(request)
    return request


def require_product(request: ExpertsRequest) -> None:
    """ValueError for a request that is no product."""
    for name, size in (("T * S", request.slots), ("E * N", request.experts * request.n)):
        if size > MOST_OF_A_SIDE:
            raise ValueError(
                f"{name} is {size} and kernels count to {MOST_OF_A_SIDE}: multiply a part at a time"
            )
    if request.gate is not None and request.gate not in GATES:
        raise ValueError(f"gate is {request.gate!r}: it must be one of {', '.join(GATES)}, or None")
    if request.gate is not None and request.n % (2 * TILE_ROWS):
        raise ValueError(
            f"N={request.n} rows of gates and ups in turn must be a multiple of {2 * TILE_ROWS}: "
            "gates_and_ups pads them"
        )
    if request.gate is not None and request.router is not None:
        raise ValueError("gate and router are of two products: pass one of them at a time")
    if request.leads and request.router is not None:
        raise ValueError("leads and router: out of a product that leads has a row for each slot")
    if request.follows and not request.per_slot:
        raise ValueError(
            "follows without per_slot: a is out of the product before, a row for each slot"
        )
    if not request.chosen and request.tokens:
        raise ValueError(f"ids has no columns: its shape is [{request.tokens}, 0]")


# --- on a GPU -------------------------------------------------------------------------------------


def prepare(choice: ExpertsChoice, weights: Sequence[ArrayType]) -> Prepared:
    """The launches of a choice, loaded on the current GPU: a call brings the addresses of a, out,
    and the operands of `ExpertsChoice.types`."""
    memory = DryRun()
    launches = choice.launches(memory, weights)
    return Prepared(launches, memory, (A, OUT, *operands(len(choice.types(weights)))))


def product_of(w: PackedExperts, request: ExpertsRequest, machine: Any) -> ExpertsProduct:
    """The product on the current GPU, prepared now or before."""
    return w.products.of(request, lambda: ExpertsProduct(choose(request, machine), w))


class ExpertsProduct:
    """A product of arrays on the GPU, chosen and prepared. `experts` and plans call the same."""

    def __init__(self, choice: ExpertsChoice, weights: PackedExperts) -> None:
        """Compile and load the kernels on the current GPU."""
        self.choice, self.weights = choice, weights
        arrays = weights.read_by(choice.kernel)
        self.made = prepare(choice, [(array.shape, array.dtype) for array in arrays])
        self._addresses = tuple(map(address_of, arrays))
        self._device = current_device()

    def __call__(
        self, a: Any, ids: Any, out: Any, stream: Any, bias: Any = None, router: Any = None,
        memory: Memory | None = None,
    ) -> Any:  # fmt: skip
        """C, `out` or a new array; errors as of `experts`. memory: what the kernels work in, by
        default that of the stream."""
        asked, device, machine = self.choice.request, self._device, self.weights.machine
        slots = (asked.tokens, asked.chosen)
        shape = (*slots, asked.k) if asked.per_slot else (asked.tokens, asked.k)
        source = address("a", a, shape, device, asked.a)
        require_start_of_a(source, asked.a)
        read = [("a", source, BYTES[asked.a] * math.prod(shape))]
        wanted = (
            ("ids", ids, slots, asked.ids),
            ("bias", bias, (asked.experts, asked.n), asked.bias),
            ("router", router, slots, asked.router),
        )
        for name, x, size, dtype in wanted:
            if dtype is not None:
                start = address(name, x, size, device, dtype)
                read.append((name, start, BYTES[dtype] * math.prod(size)))
        if out is None:
            out = empty_beside(a, asked.out_shape, asked.c, machine)
        target = address("out", out, asked.out_shape, device, asked.c)
        written = BYTES[asked.c] * math.prod(asked.out_shape)
        for name, start, bytes_read in read:
            require_place(target, written, start, bytes_read, name)
        handle, made = stream_handle(stream_of(a) if stream is None else stream), self.made
        if memory is None:
            memory = memory_of(machine, (device, handle), made.zeroed, made.nbytes)
        addresses = (source, target, *self._addresses, *(start for _, start, _ in read[1:]))
        made(addresses, memory.zeros, memory.workspace, handle)
        return out


def plan(
    tokens: int,
    chosen: int,
    w: np.ndarray | Tensor | PackedExperts,
    *,
    bias: Any = None,
    gate: str | None = None,
    router: Any = None,
    per_slot: bool = False,
    ids: Any = np.int64,
    dtype: Any = np.float32,
    input: Any = np.float32,
    accuracy: Accuracy | None = None,
    leads: bool = False,
    follows: bool = False,
    stream: Any = None,
    machine: Gpu | Simulator | None = None,
) -> ExpertsPlan:
    """A prepared product of `tokens` tokens with `chosen` experts each: call it with (a, ids, out),
    and router=weights where it sums.

    per_slot: whether a is [T, S, K].
    bias, router, ids, dtype, input: dtypes of bias (None for none), of the router's weights (None:
            no sum), of ids, of out and of a.
    leads, follows: of two plans for the same ids, as those of gates and ups and of downs are. out
            of the one that leads is `a` of the one that follows, whose call is queued right behind,
            and nothing else reads it: its rows may be in the order of experts. The one that follows
            begins to read weights while the other still runs.
    gate, accuracy, stream, machine : see `experts`. Raises what `experts` does.
    """
    for name, value in (("tokens", tokens), ("chosen", chosen)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name} is {value!r}: a plan needs a number from 1 up")
    w = blocks_of(w)
    packed = (
        w
        if isinstance(w, PackedExperts)
        else pack_experts(w, accuracy=accuracy or "exact", machine=machine)
    )
    of_ids = _ids_name(ids)
    of_bias = None if bias is None else float_name(bias, "bias")
    of_router = None if router is None else float_name(router, "router")
    request = ExpertsRequest(
        packed.format, int(tokens), int(chosen), packed.experts, packed.n, packed.k,
        float_name(input, "input"), float_name(dtype), of_ids, per_slot, of_bias, gate, of_router,
        leads, follows, _accuracy(accuracy, packed),
    )  # fmt: skip
    require_product(request)
    return ExpertsPlan(packed, request, stream)


def _ids_name(dtype: Any) -> str:
    """One of IDS, given as a name or as a dtype of NumPy or torch; TypeError for anything else."""
    name = str(dtype).removeprefix("torch.")
    with suppress(TypeError):  # of torch's, and of what is no dtype
        name = np.dtype(dtype).name
    if name not in IDS:
        raise TypeError(f"ids must be {one_of(IDS)}, got {name}")
    return name


class ExpertsPlan:
    """A prepared product, see `plan`. `choice` says which kernel it is and why. It owns the memory
    of its kernels: its calls must run one after the other."""

    def __init__(self, weights: PackedExperts, request: ExpertsRequest, stream: Any) -> None:
        machine, self._weights, self._stream = weights.machine, weights, stream
        self.choice = choose(request, machine)
        self._product: ExpertsProduct | None = None
        if machine.cc is not None:
            self._product = product_of(weights, request, machine)
            made = self._product.made
            self._memory = new_memory(machine, made.zeroed, made.nbytes)

    def __repr__(self) -> str:
        return f"ExpertsPlan({self.choice})"

    def __call__(
        self, a: Any, ids: Any, out: Any, *, bias: Any = None, router: Any = None,
        stream: Any = None,
    ) -> None:  # fmt: skip
        """Queue C to out; returns before it is done. Arrays as of `experts`, of the shapes and
        dtypes of the plan, on the GPU. Raises TypeError or ValueError, and launches nothing, for
        arrays that do not fit."""
        if self._product is None:
            asked = self.choice.request
            made = experts(
                a, self._weights, ids, bias=bias, gate=asked.gate, router=router, out=out,
                dtype=asked.c, accuracy=known_accuracy(asked.accuracy), explain=True,
            )[1].request  # fmt: skip
            of_plan, got = (asdict(replace(x, leads=False, follows=False)) for x in (asked, made))
            if differ := [name for name, value in of_plan.items() if got[name] != value]:
                planned, given = (
                    ", ".join(f"{name}={x[name]}" for name in differ) for x in (of_plan, got)
                )
                raise ValueError(f"the plan is for {planned}, got {given}")
            return
        if out is None:
            raise TypeError("out must be on the GPU (with __cuda_array_interface__), got NoneType")
        stream = self._stream if stream is None else stream
        self._product(a, ids, out, stream, bias, router, self._memory)
