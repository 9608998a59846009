"""llama.cpp as a peer: a ggml made of NumPy for the protocol, the real one where it is."""

from __future__ import annotations

import ctypes
import json
import subprocess
from contextlib import closing
from importlib import util
from types import SimpleNamespace

import numpy as np
import pytest

from qformats import FORMATS, WEIGHT_FORMATS, dequantize
from reference import Problem
from results.baselines import llama_cpp
from results.baselines.llama_cpp import Backend, Ggml, NotMeasured, Products, timed
from results.measure.protocol import Budget
from results.record.schema import Peer

QUICK = Budget().scaled(0.02)
NAMES = {number: name for name, number in llama_cpp.TYPES.items()}
HAS_PACKAGE = util.find_spec("llama_cpp") is not None


class Function:
    """A function of a ctypes library: callable, with result and parameter types to set."""

    def __init__(self, run) -> None:
        self.run, self.restype, self.argtypes = run, ctypes.c_int, None

    def __call__(self, *arguments):
        assert self.argtypes is not None, "declared before it is called"
        assert len(arguments) == len(self.argtypes)
        for value, kind in zip(arguments, self.argtypes, strict=True):
            if kind is not ctypes.c_void_p:
                kind.from_param(value)
        return self.run(*arguments)


class FakeGgml:
    """What is used of ggml, over NumPy. Handles are objects, a buffer holds one array of bytes.

    off: what every product is multiplied with, 1 in a right library.
    """

    def __init__(self, off: float = 1.0, devices: tuple[str, ...] = ("CUDA0",)) -> None:
        self.off, self.devices, self.status = off, list(devices), 0
        self.alive, self.computed, self.largest = [], 0, 0
        for name in llama_cpp.FUNCTIONS:
            setattr(self, name, Function(getattr(self, "do_" + name.removeprefix("ggml_"))))

    def _new(self, **facts):
        self.alive.append(made := SimpleNamespace(**facts))
        return made

    def do_type_name(self, kind):
        return NAMES[kind].replace("_k", "_K").encode()

    def do_type_size(self, kind):
        return 4 if NAMES[kind] == "f32" else FORMATS[NAMES[kind]].block_bytes

    def do_blck_size(self, kind):
        return 1 if NAMES[kind] == "f32" else FORMATS[NAMES[kind]].elements

    def do_nbytes(self, tensor):
        kind = tensor.kind
        return tensor.ne0 * tensor.ne1 // self.do_blck_size(kind) * self.do_type_size(kind)

    def do_tensor_overhead(self):
        return 1

    def do_graph_overhead_custom(self, size, grads):
        return size

    def do_init(self, params):
        assert params.no_alloc
        return self._new(left=params.mem_size, tensors=[])

    def do_free(self, context):
        self.alive.remove(context)

    def do_new_tensor_2d(self, context, kind, ne0, ne1):
        context.left -= 1
        assert context.left >= 0, "a context too small for its tensors"
        context.tensors.append(SimpleNamespace(kind=kind, ne0=ne0, ne1=ne1, data=None))
        return context.tensors[-1]

    def do_mul_mat(self, context, w, a):
        assert w.ne0 == a.ne0
        product = self.do_new_tensor_2d(context, 0, w.ne1, a.ne1)
        product.of = (w, a)
        return product

    def do_new_graph_custom(self, context, size, grads):
        context.left -= size
        assert context.left >= 0, "a context too small for its graph"
        return SimpleNamespace(nodes=[], size=size)

    def do_build_forward_expand(self, graph, tensor):
        graph.nodes.append(tensor)
        assert len(graph.nodes) <= graph.size
        self.largest = max(self.largest, len(graph.nodes))

    def do_log_set(self, callback, data):
        pass

    def do_backend_load_all_from_path(self, path):
        self.devices += ["LATE0"]

    def do_backend_dev_by_name(self, name):
        return name if name.decode() in self.devices else None

    def do_backend_dev_description(self, device):
        return b"a fake of " + device

    def do_backend_dev_init(self, device, options):
        return self._new(device=device)

    def do_backend_free(self, backend):
        self.alive.remove(backend)

    def do_backend_supports_op(self, backend, tensor):
        return True

    def do_backend_alloc_ctx_tensors(self, context, backend):
        for tensor in context.tensors:
            tensor.data = np.zeros(self.do_nbytes(tensor), np.uint8)
        return self._new()

    def do_backend_alloc_buffer(self, backend, size):
        return self._new(data=np.zeros(size, np.uint8))

    def do_backend_get_alignment(self, backend):
        return 128

    def do_backend_buffer_get_base(self, buffer):
        return buffer.data

    def do_backend_buffer_clear(self, buffer, value):
        buffer.data[:] = value

    def do_backend_buffer_free(self, buffer):
        self.alive.remove(buffer)

    def do_backend_tensor_alloc(self, buffer, tensor, address):
        assert self.do_nbytes(tensor) <= buffer.data.size
        tensor.data = address[: self.do_nbytes(tensor)]

    def do_backend_tensor_set(self, tensor, address, offset, size):
        tensor.data[offset : offset + size] = np.frombuffer(
            ctypes.string_at(address, size), np.uint8
        )

    def do_backend_tensor_get(self, tensor, address, offset, size):
        ctypes.memmove(address, tensor.data[offset:].ctypes.data, size)

    def do_backend_graph_compute_async(self, backend, graph):
        for node in graph.nodes:
            w, a = node.of
            blocks = w.data.view(FORMATS[NAMES[w.kind]].dtype).reshape(w.ne1, -1)
            c = a.data.view(np.float32).reshape(a.ne1, a.ne0) @ dequantize(blocks).T
            node.data.view(np.float32)[:] = (self.off * c).reshape(-1)
            self.computed += 1
        return self.status

    def do_backend_synchronize(self, backend):
        pass


def opened(fake: FakeGgml, device: str = "CUDA0") -> Backend:
    return llama_cpp.open_backend(Ggml(fake), llama_cpp.ROOT, device)


# --- the protocol, on the fake --------------------------------------------------------------------


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_a_right_product_is_timed_over_copies_of_the_weights(name: str) -> None:
    fake, problem = FakeGgml(), Problem(3, 5, 64, name)
    bytes_of_w = problem.blocks.nbytes
    with closing(opened(fake)) as backend:
        us, how = timed(backend, problem, problem.a, l2_bytes=2 * bytes_of_w, budget=QUICK)
    assert us > 0
    assert how == "ggml graph, wall clock"
    assert fake.largest % 8 == 0, "eight copies of W fill four L2s, each as often as the others"
    assert fake.alive == [], "every context, buffer and backend is given back"


def test_a_wrong_product_is_not_timed() -> None:
    fake, problem = FakeGgml(off=1.03), Problem(3, 5, 64, "q4_0")
    with closing(opened(fake)) as backend, pytest.raises(NotMeasured, match="e-04 before it is"):
        timed(backend, problem, problem.a, l2_bytes=1, budget=QUICK)
    assert fake.computed == 1
    assert fake.alive == []


def test_what_is_written_while_timing_is_looked_at_too() -> None:
    class Tiring(FakeGgml):
        def do_backend_graph_compute_async(self, backend, graph):
            self.off = 1.0 if self.computed < 3 else np.nan
            return super().do_backend_graph_compute_async(backend, graph)

    problem = Problem(3, 5, 64, "q4_0")
    with closing(opened(Tiring())) as backend, pytest.raises(NotMeasured, match="inf after it is"):
        timed(backend, problem, problem.a, l2_bytes=1, budget=QUICK)


def test_a_graph_that_fails_is_a_sentence() -> None:
    fake = FakeGgml()
    fake.status = -1
    problem = Problem(1, 5, 64, "q4_0")
    with closing(opened(fake)) as backend, pytest.raises(NotMeasured, match="its status is -1"):
        timed(backend, problem, problem.a, l2_bytes=1, budget=QUICK)


@pytest.mark.parametrize("missing", ["ggml_mul_mat", "ggml_backend_dev_by_name"])
def test_a_library_without_a_function_is_refused(missing: str) -> None:
    fake = FakeGgml()
    delattr(fake, missing)
    with pytest.raises(NotMeasured, match=f"its ggml has no {missing}"):
        Ggml(fake)


def test_a_library_with_other_blocks_is_refused() -> None:
    class Older(FakeGgml):
        def do_type_size(self, kind):
            return 20 if NAMES[kind] == "q4_0" else super().do_type_size(kind)

    with pytest.raises(NotMeasured, match=r"\(b'q4_0', 20, 32\) as type 2, not \(b'q4_0', 18"):
        Ggml(Older())


def test_a_library_with_other_tensors_is_refused() -> None:
    class Wider(FakeGgml):
        def do_nbytes(self, tensor):
            return super().do_nbytes(tensor) + 16

    fake, problem = Wider(), Problem(1, 2, 32, "q4_0")
    with closing(opened(fake)) as backend, pytest.raises(NotMeasured, match="has 52 bytes, not 36"):
        Products(backend, problem.a, problem.blocks, 1)
    assert fake.alive == []


def test_a_library_without_cuda_is_refused_and_a_late_device_found() -> None:
    with pytest.raises(NotMeasured, match="no device CUDA0: it was built without CUDA"):
        opened(FakeGgml(devices=("CPU",)))
    assert opened(FakeGgml(), "LATE0").description == "a fake of LATE0"


# --- the process that measures, and who asks it ---------------------------------------------------


@pytest.fixture
def faked(monkeypatch, tmp_path) -> FakeGgml:
    """A package whose library is the fake; what it would be asked in a process is asked here."""
    fake = FakeGgml()
    monkeypatch.setattr(llama_cpp, "library_folder", lambda: tmp_path)
    monkeypatch.setattr(llama_cpp, "load", lambda folder: Ggml(fake))

    def here(command, *, input, **options):
        lines = [json.dumps(answer) for answer in llama_cpp.answers(json.loads(input))]
        text = "".join(line + "\n" for line in lines)
        return subprocess.CompletedProcess(command, 0, text, "")

    monkeypatch.setattr(subprocess, "run", here)
    return fake


def test_figures_of_this_run_say_so(faked: FakeGgml) -> None:
    shapes = [(1, 4, 32), (3, 6, 64), (2, 4, 32)]
    found, why = llama_cpp.measured(
        shapes, ["q4_0", "q8_0"], l2_bytes=1, gpu="a fake of CUDA0", budget=QUICK
    )
    assert why is None
    assert {(p.format, p.shape) for p in found} == {
        (f, s) for f in ("q4_0", "q8_0") for s in shapes
    }
    for peer in found:
        assert peer.peer == "ggml"
        assert peer.same_run
        assert peer.us > 0
        assert "float32 A to float32 C" in peer.source
    assert faked.alive == []


def test_another_gpu_is_not_measured(faked: FakeGgml) -> None:
    found, why = llama_cpp.measured([(1, 4, 32)], ["q4_0"], l2_bytes=1, gpu="NVIDIA H200")
    assert found == ()
    assert why == "ggml's first GPU is the a fake of CUDA0, not the NVIDIA H200"


def test_one_wrong_product_leaves_the_others(faked: FakeGgml) -> None:
    def multiply(backend, graph, right=faked.do_backend_graph_compute_async):
        faked.off = 2.0 if graph.nodes[0].ne1 == 2 else 1.0
        return right(backend, graph)

    faked.ggml_backend_graph_compute_async.run = multiply
    found, why = llama_cpp.measured([(1, 4, 32), (2, 4, 32)], ["q4_0"], l2_bytes=1, budget=QUICK)
    assert [peer.M for peer in found] == [1]
    assert why is not None
    assert why.startswith("ggml's q4_0 product at M=2 N=4 K=32 has an NMSE of 1.0e+00 before")


def test_a_process_that_dies_leaves_what_it_had_measured(faked: FakeGgml, monkeypatch) -> None:
    where = {"format": "q4_0", "M": 1, "N": 4, "K": 32}
    text = "".join(
        json.dumps(line) + "\n"
        for line in ({"ggml": "0.9"}, where, where | {"us": 2.5, "how": "g"}, where | {"M": 2})
    )
    dead = subprocess.CompletedProcess([], -6, text + '{"half', "GGML_ASSERT(x) failed\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: dead)
    found, why = llama_cpp.measured([(1, 4, 32), (2, 4, 32)], ["q4_0"], l2_bytes=1)
    assert [peer.us for peer in found] == [2.5]
    assert why == (
        "the process that measures ggml ended with -6 (GGML_ASSERT(x) failed) at q4_0 M=2 N=4 K=32"
    )


def test_a_process_that_hangs_is_ended(faked: FakeGgml, monkeypatch) -> None:
    def hang(command, *, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout, output=b"")

    monkeypatch.setattr(subprocess, "run", hang)
    found, why = llama_cpp.measured([(1, 4, 32)], ["q4_0"], l2_bytes=1)
    assert found == ()
    assert why == "the process that measures ggml was ended after 120 s"


def test_recorded_figures_stand_for_what_was_not_measured(monkeypatch) -> None:
    shapes = [(512, 4096, 4096), (16, 4096, 14336)]
    here = Peer(
        peer="ggml", format="q4_0", M=512, N=4096, K=4096, us=90.0, same_run=True, source="now"
    )
    monkeypatch.setattr(llama_cpp, "measured", lambda *_, **__: ((here,), "it ended"))
    found, why = llama_cpp.figures("NVIDIA H200", shapes, ["q4_0"], 1)
    assert why == "it ended"
    assert [(p.shape, p.us, p.same_run) for p in found] == [
        ((512, 4096, 4096), 90.0, True),
        ((16, 4096, 14336), 41.7759, False),
    ]


def test_without_the_package_one_sentence_says_so(monkeypatch) -> None:
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    assert llama_cpp.measured([(1, 4, 32)], ["q4_0"], l2_bytes=1) == (
        (),
        "llama-cpp-python is not installed",
    )
    assert llama_cpp.why_not() == "llama-cpp-python is not installed"


def test_a_package_without_a_library_is_a_sentence(tmp_path) -> None:
    with pytest.raises(NotMeasured, match=r"there is no libggml\.so in"):
        llama_cpp.load(tmp_path)
    (tmp_path / "libggml.so").write_bytes(b"no library")
    with pytest.raises(NotMeasured, match=r"libggml\.so cannot be loaded"):
        llama_cpp.load(tmp_path)


# --- the package itself ---------------------------------------------------------------------------


@pytest.mark.skipif(not HAS_PACKAGE, reason="llama-cpp-python is not installed")
def test_the_packages_own_ggml_multiplies_rightly_on_the_cpu() -> None:
    """The same calls as on a GPU, so the ABI is the one that is written down."""
    shapes = [(1, 64, 96), (3, 64, 96), (5, 33, 32)]
    found, why = llama_cpp.measured(
        shapes, WEIGHT_FORMATS, l2_bytes=2**14, budget=QUICK, device="CPU"
    )
    assert why is None
    assert len(found) == len(shapes) * len(WEIGHT_FORMATS)
    assert all(peer.us > 0 and peer.same_run for peer in found)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_PACKAGE, reason="llama-cpp-python is not installed")
def test_the_packages_own_ggml_multiplies_rightly_on_the_gpu() -> None:
    """Or says in a sentence why it cannot, as a package built without CUDA does."""
    found, why = llama_cpp.measured([(1, 512, 1024), (33, 512, 1024)], ["q4_0"], l2_bytes=2**20)
    assert (why is None and len(found) == 2) or (found == () and "ggml" in str(why))
