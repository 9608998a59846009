"""llama.cpp's kernels, measured here: the ggml inside the package `llama-cpp-python`, by ctypes.

    python -m pip install llama-cpp-python      (a build with CUDA; see that project's README)

A graph of GGML_OP_MUL_MAT nodes, one a product, runs on ggml's CUDA backend: float32 activations
in, float32 out, as many copies of the weights in turn as the steps have. Its time is therefore a
total: ggml quantizes the activations in every node. A result is compared with the float64 product
before its time is believed and again after.

ggml ends the process where an assertion of its fails, and a library of another ABI may do worse, so
all of this happens in a process of its own: `measured` starts it, and `python -m
results.baselines.llama_cpp` answers with a line of JSON for each product. Whatever keeps it from
measuring is one sentence.

The functions and types are those of ggml's public headers (include/ggml.h, ggml-backend.h,
ggml-alloc.h, https://github.com/ggml-org/ggml), as they have been since its backends have a
registry (November 2024, llama-cpp-python 0.3.2). Nothing is taken on trust that can be asked: the
size of every block format, the bytes of every tensor, and the result.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any, Final

import numpy as np

from qformats import FILE_FORMATS, FORMATS, WEIGHT_FORMATS, format_of
from reference import Problem, nmse, same_operands_a16
from reference.sampling import sample as choose
from results.baselines.recorded import recorded
from results.measure.loop import Contestant, round_robin
from results.measure.protocol import Budget, slots_for
from results.record import ROOT
from results.record.schema import Peer

PACKAGE: Final = "llama-cpp-python"
CUDA: Final = "CUDA0"
"""The name ggml gives to the first GPU."""

NMSE_LIMIT: Final = 5e-4
"""ggml's own limit for MUL_MAT (tests/test-backend-ops.cpp): it quantizes the activations."""

COMPARED: Final = 2**16  # outputs compared with float64; in all of them NaN is sought
NAN_BYTE: Final = 0xFF  # four of them are a NaN
WARM_UP: Final = (
    3  # passes before the first that is timed: ggml captures a CUDA graph in the second
)
PASS_SECONDS: Final = 0.02  # of passes back to back: the host prepares one while another runs
MAX_PASSES: Final = 64
SECONDS_PER_WORK: Final = 60  # that the process may take for a product, drawing its data included

BUDGET: Final = Budget(replay_seconds=5e-3, warm_seconds=0.02, seconds=0.2, min_rounds=3)
"""Of a product: it has the GPU to itself, and a pass is run several times for a figure."""

TYPES: Final = {
    **{"f32": 0, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8},
    **{"q2_k": 10, "q3_k": 11, "q4_k": 12, "q5_k": 13, "q6_k": 14, "iq4_nl": 20, "mxfp4": 39},
}
"""enum ggml_type."""


class NotMeasured(Exception):
    """Why there is no figure, in a sentence."""


# --- the library ----------------------------------------------------------------------------------


class InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


_P, _N, _I, _L = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
_S = ctypes.c_char_p

# name -> result and parameters; _P is a pointer to anything. (ggml_blck_size was an int before it
# was an int64_t, ggml_backend_tensor_alloc returned nothing before it returned a status: the lower
# half is read of the one, and nothing of the other.)
FUNCTIONS: Final[dict[str, tuple[Any, ...]]] = {
    "ggml_init": (_P, InitParams),
    "ggml_free": (None, _P),
    "ggml_type_name": (_S, _I),
    "ggml_type_size": (_N, _I),
    "ggml_blck_size": (_I, _I),
    "ggml_nbytes": (_N, _P),
    "ggml_tensor_overhead": (_N,),
    "ggml_graph_overhead_custom": (_N, _N, ctypes.c_bool),
    "ggml_new_tensor_2d": (_P, _P, _I, _L, _L),
    "ggml_mul_mat": (_P, _P, _P, _P),
    "ggml_new_graph_custom": (_P, _P, _N, ctypes.c_bool),
    "ggml_build_forward_expand": (None, _P, _P),
    "ggml_log_set": (None, _P, _P),
    "ggml_backend_load_all_from_path": (None, _S),
    "ggml_backend_dev_by_name": (_P, _S),
    "ggml_backend_dev_description": (_S, _P),
    "ggml_backend_dev_init": (_P, _P, _S),
    "ggml_backend_free": (None, _P),
    "ggml_backend_supports_op": (ctypes.c_bool, _P, _P),
    "ggml_backend_alloc_ctx_tensors": (_P, _P, _P),
    "ggml_backend_alloc_buffer": (_P, _P, _N),
    "ggml_backend_get_alignment": (_N, _P),
    "ggml_backend_buffer_get_base": (_P, _P),
    "ggml_backend_buffer_clear": (None, _P, ctypes.c_uint8),
    "ggml_backend_buffer_free": (None, _P),
    "ggml_backend_tensor_alloc": (None, _P, _P, _P),
    "ggml_backend_tensor_set": (None, _P, _P, _N, _N),
    "ggml_backend_tensor_get": (None, _P, _P, _N, _N),
    "ggml_backend_graph_compute_async": (_I, _P, _P),
    "ggml_backend_synchronize": (None, _P),
}


class Ggml:
    """The functions of `FUNCTIONS` under their own names, declared; NotMeasured where one is not
    there or a block format is another than ours."""

    def __init__(self, library: Any) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}
        for name, (result, *parameters) in FUNCTIONS.items():
            function = getattr(library, name, None)
            if function is None:
                raise NotMeasured(f"its ggml has no {name}: another ABI than is known here")
            function.restype, function.argtypes = result, parameters
            self._functions[name] = function
        for name in (*WEIGHT_FORMATS, *FILE_FORMATS):
            fmt, kind = FORMATS[name], TYPES[name]
            ours = (name.replace("_k", "_K").encode(), fmt.block_bytes, fmt.elements)
            known = (self.ggml_type_name, self.ggml_type_size, self.ggml_blck_size)
            theirs = tuple(ask(kind) for ask in known)
            if theirs != ours:
                raise NotMeasured(f"its ggml has {theirs} as type {kind}, not {ours}")

        self.version = _version_of(library)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        try:
            return self._functions[name]
        except KeyError:
            raise AttributeError(name) from None


def _version_of(library: Any) -> str:
    """What ggml says of itself, since its 0.9; the package's version says it of any."""
    ask = getattr(library, "ggml_version", None)
    if ask is None:
        return ""
    ask.restype, ask.argtypes = _S, []
    return str((ask() or b"").decode(errors="replace"))


def library_folder() -> Path:
    """Where the package keeps its shared libraries. It is not imported: that would load a model
    library and more packages than are needed."""
    found = util.find_spec("llama_cpp")
    if found is None or not found.submodule_search_locations:
        raise NotMeasured(f"{PACKAGE} is not installed")
    folder = Path(next(iter(found.submodule_search_locations))) / "lib"
    if not folder.is_dir():
        raise NotMeasured(f"{PACKAGE} has no folder {folder}")
    return folder


def load(folder: Path) -> Ggml:
    """ggml as the package bundles it: `libggml.so` and what that needs, or `ggml.dll`."""
    names = ("libggml.so", "ggml.dll", "libggml.dll", "libggml.dylib")
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise NotMeasured(f"there is no {names[0]} in {folder}: that version is not known here")
    _load_cuda_runtime()
    try:
        return Ggml(ctypes.CDLL(str(path)))
    except OSError as error:
        raise NotMeasured(f"{path.name} cannot be loaded: {error}") from None


def _load_cuda_runtime() -> None:
    """The CUDA libraries of Python wheels, which no search path leads to; where there are none, the
    system's are found or the error says which is not."""
    try:
        from cuda import pathfinder
    except ImportError:
        return
    for name in ("cudart", "cublasLt", "cublas"):
        try:
            pathfinder.load_nvidia_dynamic_lib(name)
        except Exception:  # each has its own reason; what is missed then is said by the loader
            continue


@dataclass(slots=True)
class Backend:
    """One device of ggml, opened."""

    ggml: Ggml
    handle: Any
    description: str

    def close(self) -> None:
        self.ggml.ggml_backend_free(self.handle)


def open_backend(ggml: Ggml, folder: Path, device: str = CUDA) -> Backend:
    """NotMeasured where ggml was built without that device, or sees none."""
    found = ggml.ggml_backend_dev_by_name(device.encode())
    if not found:  # it may be a library apart that waits to be loaded
        ggml.ggml_backend_load_all_from_path(str(folder).encode())
        found = ggml.ggml_backend_dev_by_name(device.encode())
    if not found:
        raise NotMeasured(
            f"its ggml has no device {device}: it was built without CUDA, or finds no GPU"
        )
    handle = ggml.ggml_backend_dev_init(found, None)
    if not handle:
        raise NotMeasured(f"ggml cannot open its device {device}")
    description = ggml.ggml_backend_dev_description(found) or b""
    return Backend(ggml, handle, description.decode(errors="replace").strip())


# --- one product ----------------------------------------------------------------------------------


class Products:
    """C[M, N] = A[M, K] @ W[N, K]^T on `copies` copies of W, ready for graphs of many of them.

    a: float32 [M, K]. blocks: [N, K/32]. All products write the same C, as the steps' do.
    """

    def __init__(self, backend: Backend, a: np.ndarray, blocks: np.ndarray, copies: int) -> None:
        self.ggml, self._backend = backend.ggml, backend.handle
        self.m, self.n, self.k = a.shape[0], blocks.shape[0], a.shape[1]
        self._contexts: list[Any] = []
        self._buffers: list[Any] = []
        self._last: Any = None
        self._c_bytes = 4 * self.m * self.n
        try:
            self._allocate(a, blocks, copies)
        except NotMeasured:  # the next, smaller product may have the memory
            self.close()
            raise

    def _allocate(self, a: np.ndarray, blocks: np.ndarray, copies: int) -> None:
        ggml = self.ggml
        context = self._context((copies + 1) * ggml.ggml_tensor_overhead())
        kind = TYPES[format_of(blocks).name]
        self._weights = [
            ggml.ggml_new_tensor_2d(context, kind, self.k, self.n) for _ in range(copies)
        ]
        self._a = ggml.ggml_new_tensor_2d(context, TYPES["f32"], self.k, self.m)
        self._buffer(ggml.ggml_backend_alloc_ctx_tensors(context, self._backend))
        for tensor in self._weights:
            self._upload(tensor, blocks)
        self._upload(self._a, a)
        room = self._c_bytes + ggml.ggml_backend_get_alignment(self._backend)
        self._c = self._buffer(ggml.ggml_backend_alloc_buffer(self._backend, room))

    def close(self) -> None:
        for buffer in self._buffers:
            self.ggml.ggml_backend_buffer_free(buffer)
        for context in self._contexts:
            self.ggml.ggml_free(context)
        self._buffers, self._contexts = [], []

    def graph(self, copies: Sequence[int]) -> Any:
        """A graph of one product with each of these copies, in this order."""
        ggml, count = self.ggml, len(copies)
        size = count + len(self._weights) + 1
        context = self._context(
            count * ggml.ggml_tensor_overhead() + ggml.ggml_graph_overhead_custom(size, False)
        )
        graph = ggml.ggml_new_graph_custom(context, size, False)
        base = ggml.ggml_backend_buffer_get_base(self._c)
        for copy in copies:
            product = ggml.ggml_mul_mat(context, self._weights[copy], self._a)
            if not ggml.ggml_backend_supports_op(self._backend, product):
                raise NotMeasured("ggml does not multiply this on that device")
            self._require_bytes(product, self._c_bytes)
            ggml.ggml_backend_tensor_alloc(self._c, product, base)
            ggml.ggml_build_forward_expand(graph, product)
            self._last = product
        return graph

    def run(self, graph: Any, times: int = 1) -> None:
        """The graph `times` times back to back, and wait."""
        for _ in range(times):
            status = self.ggml.ggml_backend_graph_compute_async(self._backend, graph)
            if status:
                raise NotMeasured(f"ggml could not compute a graph: its status is {status}")
        self.ggml.ggml_backend_synchronize(self._backend)

    def forget(self) -> None:
        """C becomes NaN."""
        self.ggml.ggml_backend_buffer_clear(self._c, NAN_BYTE)

    def result(self) -> np.ndarray:
        """C of the last product, float32 [M, N]."""
        c = np.empty((self.m, self.n), np.float32)
        self.ggml.ggml_backend_tensor_get(self._last, c.ctypes.data, 0, c.nbytes)
        return c

    def capture(self, launches: Sequence[int]) -> Pass:
        """(What a contestant asks of a device; a launch is the number of a copy.)"""
        return Pass(self, launches)

    def round(self, replays: Sequence[Pass]) -> list[float]:
        """(What a loop asks of a device.)"""
        return [replay.seconds() for replay in replays]

    def _context(self, size: int) -> Any:
        context = self.ggml.ggml_init(InitParams(size, None, True))
        if not context:
            raise NotMeasured(f"ggml has no memory for a context of {size} bytes")
        self._contexts.append(context)
        return context

    def _buffer(self, buffer: Any) -> Any:
        if not buffer:
            raise NotMeasured(f"ggml has no memory for M={self.m}, N={self.n}, K={self.k}")
        self._buffers.append(buffer)
        return buffer

    def _upload(self, tensor: Any, array: np.ndarray) -> None:
        array = np.ascontiguousarray(array)
        self._require_bytes(tensor, array.nbytes)
        self.ggml.ggml_backend_tensor_set(tensor, array.ctypes.data, 0, array.nbytes)

    def _require_bytes(self, tensor: Any, size: int) -> None:
        theirs = self.ggml.ggml_nbytes(tensor)
        if theirs != size:
            raise NotMeasured(f"ggml's tensor has {theirs} bytes, not {size}: another ABI")


class Pass:
    """One graph, timed by the host's clock over several passes: a `protocol.Replay`."""

    how = "ggml graph, wall clock"

    def __init__(self, products: Products, copies: Sequence[int]) -> None:
        self.launches = len(copies)
        self._products = products
        self._graph = products.graph(copies)
        products.run(self._graph, WARM_UP)
        self._passes = 1
        once = self.seconds()
        self._passes = min(max(1, math.ceil(PASS_SECONDS / max(once, 1e-7))), MAX_PASSES)

    def seconds(self) -> float:
        start = time.perf_counter()
        self._products.run(self._graph, self._passes)
        return (time.perf_counter() - start) / self._passes


def timed(
    backend: Backend, problem: Problem, a: np.ndarray, l2_bytes: int, budget: Budget
) -> tuple[float, str]:
    """(microseconds a product, how it was timed) of a right result; NotMeasured of a wrong one.

    a: the first tokens of the problem's activations, float32 [M, K].
    """
    blocks = problem.blocks
    copies = slots_for(blocks.nbytes, l2_bytes)
    rows, columns = choose(a.shape[0], problem.n, COMPARED)
    wanted = same_operands_a16(a[rows], blocks[columns])

    def require_right(when: str) -> None:
        c = products.result()
        error = nmse(c[np.ix_(rows, columns)], wanted) if np.isfinite(c).all() else math.inf
        if not error < NMSE_LIMIT:
            raise NotMeasured(
                f"ggml's {problem.format} product at M={a.shape[0]} N={problem.n} K={problem.k} "
                f"has an NMSE of {error:.1e} {when} it is timed, the limit is {NMSE_LIMIT:.0e}"
            )

    with closing(Products(backend, a, blocks, copies)) as products:
        products.forget()
        products.run(products.graph([copies - 1]))
        require_right("before")
        products.forget()
        contestant = Contestant(products, lambda i: (i,), copies, budget)
        round_robin(products, [contestant], budget)
        require_right("after")
    return contestant.timing.us, contestant.how


# --- the process that measures --------------------------------------------------------------------

Work = tuple[str, int, int, int]
"""format, M, N, K."""


def answers(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A dictionary for each product that was measured, and one with "why" for what was not."""
    budget = Budget(**request["budget"])
    try:
        folder = library_folder()
        ggml = load(folder)
        quiet = ctypes.CFUNCTYPE(None, _I, _S, _P)(lambda *_: None)
        ggml.ggml_log_set(quiet, None)
        with closing(open_backend(ggml, folder, request["device"])) as backend:
            if request["gpu"] not in (None, backend.description):
                raise NotMeasured(
                    f"ggml's first GPU is the {backend.description}, not the {request['gpu']}"
                )
            yield {"ggml": ggml.version}
            for (name, n, k), group in itertools.groupby(
                map(tuple, request["works"]), key=lambda work: (work[0], *work[2:])
            ):
                tokens = [m for _, m, _, _ in group]
                problem = Problem(max(tokens), n, k, name)
                for m in tokens:
                    where = {"format": name, "M": m, "N": n, "K": k}
                    yield where  # so that who asked knows where a crash was
                    try:
                        us, how = timed(
                            backend, problem, problem.a[:m], request["l2_bytes"], budget
                        )
                    except NotMeasured as error:
                        yield {"why": str(error)}
                    else:
                        yield where | {"us": us, "how": how}
            ggml.ggml_log_set(None, None)
    except NotMeasured as error:
        yield {"why": str(error)}


def main() -> int:
    """Reads a request from standard input, writes a line of JSON for each answer."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what ggml prints is no answer
    for answer in answers(json.load(sys.stdin)):
        print(json.dumps(answer), file=out, flush=True)
    return 0


# --- asking it ------------------------------------------------------------------------------------


def measured(
    shapes: Sequence[tuple[int, int, int]],
    formats: Sequence[str],
    *,
    l2_bytes: int,
    gpu: str | None = None,
    budget: Budget | None = None,
    device: str = CUDA,
) -> tuple[tuple[Peer, ...], str | None]:
    """(llama.cpp's figures for (M, N, K) in each format, why some are missing or None).

    gpu: the name of the GPU the figures are for; ggml's must have the same.
    """
    ordered = sorted(shapes, key=lambda shape: (*shape[1:], shape[0]))
    works: list[Work] = [(name, *shape) for name in formats for shape in ordered]
    lines, why = _asked(works, l2_bytes=l2_bytes, gpu=gpu, budget=budget, device=device)
    at = next((line for line in reversed(lines) if "format" in line), None)
    if why and at and "us" not in at:
        why += " at {format} M={M} N={N} K={K}".format(**at)
    found = next((line["ggml"] for line in lines if "ggml" in line), "")
    source = f"{PACKAGE} {_package_version()}" + (f" (ggml {found})" if found else "")
    peers = tuple(
        Peer(
            peer="ggml",
            format=line["format"],
            M=line["M"],
            N=line["N"],
            K=line["K"],
            us=line["us"],
            same_run=True,
            source=f"{source}, float32 A to float32 C, {line['how']}",
        )
        for line in lines
        if "us" in line
    )
    return peers, why or next((line["why"] for line in lines if "why" in line), None)


def figures(
    gpu: str | None, shapes: Sequence[tuple[int, int, int]], formats: Sequence[str], l2_bytes: int
) -> tuple[tuple[Peer, ...], str | None]:
    """llama.cpp at each (M, N, K) in each format: measured here, else as recorded on such a GPU.

    Returns the figures and, where some were not measured, why not.
    """
    here, why = measured(shapes, formats, l2_bytes=l2_bytes, gpu=gpu)
    done = {peer.key for peer in here}
    others = recorded(gpu, shapes, formats)
    return (*here, *(peer for peer in others if peer.key not in done)), why


def why_not() -> str | None:
    """None where llama.cpp can be measured here, else why not."""
    lines, why = _asked([], l2_bytes=0)
    return why or next((line["why"] for line in lines if "why" in line), None)


def _asked(
    works: Sequence[Work],
    *,
    l2_bytes: int,
    gpu: str | None = None,
    budget: Budget | None = None,
    device: str = CUDA,
) -> tuple[list[dict[str, Any]], str | None]:
    """(the answers of a process that measures, how it ended where it did not end well)."""
    try:
        library_folder()
    except NotMeasured as error:  # the usual case needs no process
        return [], str(error)
    request = {
        "works": works,
        "l2_bytes": l2_bytes,
        "gpu": gpu,
        "device": device,
        "budget": asdict(budget or BUDGET),
    }
    seconds = SECONDS_PER_WORK * (len(works) + 1)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "results.baselines.llama_cpp"],
            cwd=ROOT,
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        text = said.decode() if isinstance(said, bytes) else said
        return _lines(text), f"the process that measures ggml was ended after {seconds} s"
    why = None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["and said nothing"])[-1]
        why = f"the process that measures ggml ended with {done.returncode} ({last.strip()})"
    return _lines(done.stdout), why


def _lines(text: str) -> list[dict[str, Any]]:
    """Whole lines only: a process that was killed may have left half of one."""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _package_version() -> str:
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:  # a folder on the path, not an installed package
        return "of unknown version"


if __name__ == "__main__":
    sys.exit(main())
