"""How a launch reaches the driver: parameters as Numba lays them out, streams of every library."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numba import cuda

from steps.compile.compiler import architecture, machine_code, signature_of
from steps.compile.dry_run import Placeholder
from steps.compile.kernel_cache import CompiledKernel
from steps.contract import Launch
from steps.driver import encode_map, launcher
from steps.driver.launcher import load, parameters, stream_handle
from steps.driver.machines import Gpu
from steps.instructions import TensorMap
from steps.instructions.tensor_map import PADDING_WORDS, PARAMETER_WORDS
from tests.driver.fake_gpu import FakeGpu, device_array, encoded, stream_in
from tests.instructions import hopper_cases

BLOCK = np.dtype([("d", np.float16), ("qs", np.uint8, (16,))])
ARGUMENTS = (
    device_array((5,), np.float32, 4096),
    device_array((3, 7), np.int8, 1 << 45),
    device_array((3, 7, 2), np.float64, 8),
    device_array((3, 4), np.float32, 4096, strides=(4, 12)),
    device_array((3, 4), np.float32, 4096, strides=(64, 8)),
    device_array((1, 96), np.float32, 4096),
    device_array((4, 2), BLOCK, 4096),
    7,
    -7,
    2.5,
    True,
    False,
    np.int8(-3),
    np.uint8(200),
    np.int32(-5),
    np.uint32(2**32 - 1),
    np.uint64(2**64 - 1),
    np.float32(-1.5),
    np.float16(0.25),
    (1, np.int32(2)),
    (device_array((2,), np.uint16, 64), 3),
)


def raw(value: Any) -> bytes:
    """The bytes of a parameter: of a Python int, as Numba and cuda.core take it, 64 bits."""
    if isinstance(value, bool | int):
        return int(value).to_bytes(8, "little", signed=True)
    if isinstance(value, ctypes._SimpleCData):
        return bytes(value)
    return value.tobytes()


@pytest.mark.parametrize("argument", ARGUMENTS, ids=lambda a: type(a).__name__)
def test_parameters_are_those_of_numbas_own_launcher(argument: Any) -> None:
    from numba.cuda.dispatcher import _Kernel

    (kind,) = signature_of((argument,))
    wanted: list[Any] = []
    numba = SimpleNamespace(extensions=[])
    numba._prepare_args = lambda *operands: _Kernel._prepare_args(numba, *operands)
    numba._prepare_args(kind, argument, 0, [], wanted)
    found = parameters((kind,), (argument,))
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        # a bool is an int to Numba, and the kernel reads its first byte
        assert raw(theirs)[: len(raw(ours))] == raw(ours)


def test_arrays_of_any_library_are_laid_out_like_numbas(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = SimpleNamespace(__cuda_array_interface__={})
    own = device_array((3, 4), np.float32, 4096)
    monkeypatch.setattr(cuda, "as_cuda_array", lambda array, sync: own)
    assert parameters(signature_of((own,)), (foreign,)) == parameters(signature_of((own,)), (own,))


def test_what_a_kernel_cannot_take_is_refused() -> None:
    from numba.cuda import types

    with pytest.raises(TypeError, match=r"cannot be launched with 'x', which Numba calls unicode"):
        parameters((types.unicode_type,), ("x",))

    @cuda.jit
    def kernel(out):
        out[0] = 1

    with pytest.raises(TypeError, match=r"argument 0 of kernel is a NumPy array of shape \(2, 3\)"):
        load(Launch(kernel, (1,), (32,), (np.zeros((2, 3)),)))


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (None, 0),
        (4096, 4096),
        (SimpleNamespace(__cuda_stream__=lambda: (0, 77)), 77),  # Numba, cuda.core
        (SimpleNamespace(cuda_stream=78), 78),  # torch
        (SimpleNamespace(ptr=79), 79),  # CuPy
    ],
)
def test_a_stream_of_any_library_has_a_handle(stream: Any, handle: int) -> None:
    assert stream_handle(stream) == handle


@pytest.mark.parametrize("stream", ["0", 1.5, SimpleNamespace(ptr="79"), object()])
def test_what_is_no_stream_is_refused(stream: Any) -> None:
    with pytest.raises(TypeError, match="stream must be 0, a handle, or a stream of Numba"):
        stream_handle(stream)


def test_a_loaded_launch_hands_the_driver_its_parameters(gpu: FakeGpu) -> None:
    array = device_array((3, 5), np.float32, 1 << 50)
    kernel = SimpleNamespace(__name__="kernel")
    loaded = gpu.load(Launch(kernel, (1,), (32,), (array, 7, np.float32(1.5), np.int8(-1))))
    facts = (0, 0, 15, 4, 1 << 50, 3, 5, 20, 4, 7, 0x3FC00000, 0xFF)
    loaded(4096)
    loaded(SimpleNamespace(cuda_stream=78))
    loaded()
    assert gpu.launched == [("kernel", stream, facts) for stream in (4096, 78, 0)]
    assert loaded.within(1 << 50, 60) == [(4, 0)]
    assert loaded.within((1 << 50) - 16, 60) == [(4, 16)]
    assert loaded.within((1 << 50) + 16, 60) == []
    loaded.arguments[4] = 1 << 51
    loaded()
    assert gpu.launched[-1][2][4] == 1 << 51


def test_a_thread_gets_a_context_before_its_first_launch(gpu: FakeGpu, monkeypatch) -> None:
    launched_before: list[int] = []
    monkeypatch.setattr(launcher, "_thread", SimpleNamespace())
    monkeypatch.setattr(cuda, "current_context", lambda: launched_before.append(len(gpu.launched)))
    loaded = gpu.load(Launch(SimpleNamespace(__name__="kernel"), (1,), (32,), (7,)))
    loaded()
    loaded()
    assert (launched_before, len(gpu.launched)) == ([0], 2)


@pytest.mark.parametrize(
    ("stream", "done"), [(7, ["copied on 7", "waited for 7"]), (0, ["copied on 0"])]
)
def test_a_copy_on_a_named_stream_is_waited_for(stream: int, done: list[str], monkeypatch) -> None:
    """On the default stream Numba's copy waits by itself."""
    found: list[str] = []
    wait = SimpleNamespace(synchronize=lambda: found.append(f"waited for {stream}"))
    monkeypatch.setattr(cuda, "external_stream", lambda handle: wait)
    machine = Gpu.__new__(Gpu)
    machine._use(stream)
    machine.host(
        SimpleNamespace(copy_to_host=lambda stream: found.append(f"copied on {machine.stream}"))
    )
    assert found == done


NAMED = SimpleNamespace(__name__="kernel")
PADDING = (0,) * PADDING_WORDS


def test_a_tensor_map_is_the_first_parameter_encoded(gpu: FakeGpu) -> None:
    a, out = (device_array((21, 72), np.float16, 1 << place) for place in (44, 45))
    loaded = gpu.load(Launch(NAMED, (1,), (32,), (TensorMap(a, (16, 64)), out, 7)))
    loaded()
    rest = (0, 0, 21 * 72, 2, 1 << 45, 21, 72, 144, 2, 7)
    assert gpu.launched == [("kernel", 0, (*PADDING, *encoded(1 << 44, 21, 72, 16), *rest))]
    assert loaded.within(1 << 44, 4) == [], "the words of a map are the driver's"
    assert loaded.within(1 << 45, 4) == [(PARAMETER_WORDS + 4, 0)]
    assert loaded.mapped_within((1 << 44) - 32, 64) == 32
    assert loaded.mapped_within(1 << 45, 64) is None
    loaded.put_mapped((1 << 46) + 16)
    loaded()
    words = gpu.launched[-1][2][:PARAMETER_WORDS]
    assert words == (*PADDING, *encoded((1 << 46) + 16, 21, 72, 16))


def test_a_tensor_map_of_a_placeholder_waits_for_its_address(gpu: FakeGpu) -> None:
    a = Placeholder(4096, (5, 64), np.dtype(np.uint16))
    loaded = gpu.load(Launch(NAMED, (1,), (32,), (TensorMap(a, (8, 64)),)))
    assert not any(loaded.arguments)
    assert loaded.mapped_within(4000, 100) == 96
    loaded.put_mapped(1 << 40)
    assert tuple(loaded.arguments) == (*PADDING, *encoded(1 << 40, 5, 64, 8))


def test_a_tensor_map_is_encoded_once_for_each_address(gpu: FakeGpu, monkeypatch) -> None:
    calls: list[int] = []
    encode = encode_map.driver_function()

    def counting(*given: Any) -> int:
        calls.append(given[3])
        return encode(*given)

    monkeypatch.setattr(encode_map, "driver_function", lambda: counting)
    a = device_array((5, 64), np.float16, 1 << 40)
    loaded = gpu.load(Launch(NAMED, (1,), (32,), (TensorMap(a, (8, 64)),)))
    for address in (1 << 40, 1 << 41, 1 << 41, 1 << 40):
        loaded.put_mapped(address)
        assert tuple(loaded.arguments) == (*PADDING, *encoded(address, 5, 64, 8))
    assert calls == [1 << 40, 1 << 41], "maps of addresses that were used before are kept"
    monkeypatch.setattr(encode_map, "ADDRESSES", 2)
    loaded = gpu.load(Launch(NAMED, (1,), (32,), (TensorMap(a, (8, 64)),)))
    for address in (1 << 41, 1 << 42, 1 << 40):
        loaded.put_mapped(address)
    assert calls[2:] == [1 << 40, 1 << 41, 1 << 42, 1 << 40], "the one used longest ago gave way"


def test_a_matrix_at_an_odd_place_is_refused(gpu: FakeGpu) -> None:
    sentence = "takes it at a multiple of 16 bytes; this one lies 8 bytes after one"
    odd, even = (device_array((5, 64), np.float16, (1 << 40) + by) for by in (8, 16))
    with pytest.raises(ValueError, match=sentence):
        gpu.load(Launch(NAMED, (1,), (32,), (TensorMap(odd, (8, 64)),)))
    loaded = gpu.load(Launch(NAMED, (1,), (32,), (TensorMap(even, (8, 64)),)))
    before = tuple(loaded.arguments)
    with pytest.raises(ValueError, match=sentence):
        loaded.put_mapped((1 << 41) + 8)
    assert tuple(loaded.arguments) == before
    loaded.put_mapped((1 << 40) + 16)
    assert tuple(loaded.arguments) == before


def test_a_map_that_the_driver_refuses_is_an_error(gpu: FakeGpu, monkeypatch) -> None:
    monkeypatch.setattr(encode_map, "driver_function", lambda: lambda *_: 1)
    a = device_array((5, 64), np.float16, 1 << 40)
    with pytest.raises(
        RuntimeError, match="CUDA_ERROR_INVALID_VALUE for a matrix at 0x10000000000"
    ):
        gpu.load(Launch(NAMED, (1,), (32,), (TensorMap(a, (8, 64)),)))


def test_a_tensor_map_of_a_numpy_array_is_refused() -> None:
    a = TensorMap(np.zeros((8, 64), np.float16), (8, 64))
    with pytest.raises(
        TypeError, match=r"argument 0 of kernel is a NumPy array of shape \(8, 64\)"
    ):
        load(Launch(NAMED, (1,), (32,), (a,)))


def test_a_refused_launch_says_which(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings.driver import CUresult

    refused = int(CUresult.CUDA_ERROR_INVALID_VALUE)
    monkeypatch.setattr(launcher, "launch_function", lambda: lambda *_: refused)
    loaded = gpu.load(Launch(SimpleNamespace(__name__="kernel"), (1,), (32,), ()))
    with pytest.raises(Exception, match="kernel was not launched: CUDA_ERROR_INVALID_VALUE") as one:
        loaded()
    assert type(one.value).__name__ == "CudaAPIError", "as steps.checks.run.fatal knows it"


def test_code_is_loaded_once_on_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def context(number: int) -> Any:
        def create_module_image(image: Any) -> Any:
            loaded.append((number, image.code))
            return SimpleNamespace(get_function=lambda name: (number, name))

        device = SimpleNamespace(id=number)
        return SimpleNamespace(device=device, create_module_image=create_module_image)

    loaded: list[tuple[int, bytes]] = []
    code = CompiledKernel("entry", b"cubin", False)
    for number in (0, 1, 0, 1):
        monkeypatch.setattr(cuda, "current_context", lambda number=number: context(number))
        assert launcher._on_gpu(code) == (number, "entry")
    assert loaded == [(0, b"cubin"), (1, b"cubin")]


@pytest.mark.parametrize(("cc", "attributes"), [((9, 0), 1), ((8, 9), 0)])
def test_a_launch_overlaps_where_the_gpu_can(cc, attributes, monkeypatch) -> None:
    from cuda.bindings.driver import CUlaunchAttributeID

    device = SimpleNamespace(compute_capability=cc)
    monkeypatch.setattr(cuda, "get_current_device", lambda: device)
    source = Launch(None, (3, 2), (64,), (), shared_bytes=1024, overlap=True)
    config = launcher._config(source, cooperative=False)
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (3, 2, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (64, 1, 1)
    assert config.sharedMemBytes == 1024
    assert config.numAttrs == attributes
    config.hStream = 77
    assert stream_in(int(config.getPtr())) == 77
    for attribute in config.attrs or ():
        name = CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        assert attribute.id == name
        assert attribute.value.programmaticStreamSerializationAllowed == 1
    plain = launcher._config(Launch(None, (1,), (32,), ()), cooperative=False)
    assert plain.numAttrs == 0


def test_the_limit_of_shared_memory_is_raised_once_a_size(monkeypatch) -> None:
    asked: list[int] = []

    def set_attribute(attribute: Any, size: int, handle: Any, device: int) -> tuple[Any]:
        asked.append(size)
        result = launcher.driver.CUresult
        return (result.CUDA_SUCCESS if size <= 200_000 else result.CUDA_ERROR_INVALID_VALUE,)

    monkeypatch.setattr(cuda, "get_current_device", lambda: SimpleNamespace(id=0))
    monkeypatch.setattr(launcher.driver, "cuKernelSetAttribute", set_attribute)

    class Compiled:
        pass

    compiled = Compiled()
    kernel = SimpleNamespace(attrs=SimpleNamespace(shared=8192), handle=1)
    named = SimpleNamespace(__name__="kernel")
    for size in (0, 40_960, 40_961, 40_961, 30_000, 100_000, 90_000):
        source = Launch(named, (1,), (32,), (), shared_bytes=size)
        launcher._allow_shared(compiled, kernel, source)
    assert asked == [40_961, 100_000]
    with pytest.raises(RuntimeError, match="kernel with 300000 bytes of dynamic shared memory is"):
        launcher._allow_shared(
            compiled, kernel, Launch(named, (1,), (32,), (), shared_bytes=300_000)
        )


def test_blocks_that_wait_for_each_other_have_room_at_once(monkeypatch) -> None:
    """Of an SM's room, as the driver counts it, and all SMs."""

    def of_sm(function: Any, threads: int, shared: int) -> tuple[Any, int]:
        assert (int(function), threads, shared) == (5, 96, 1000)
        return launcher.driver.CUresult.CUDA_SUCCESS, 2

    device = SimpleNamespace(MULTIPROCESSOR_COUNT=4)
    monkeypatch.setattr(cuda, "get_current_device", lambda: device)
    monkeypatch.setattr(
        launcher.driver, "cuOccupancyMaxActiveBlocksPerMultiprocessor", of_sm, raising=True
    )
    named = SimpleNamespace(__name__="kernel")
    launcher._require_room(Launch(named, (4, 2), (32, 3), (), 1000), 5)
    with pytest.raises(RuntimeError, match=r"kernel has 9 thread blocks .* room for 8 at once"):
        launcher._require_room(Launch(named, (9,), (96,), (), 1000), 5)


# --- on a GPU -------------------------------------------------------------------------------------


@cuda.jit
def scale_and_add(x, factor, offset, y):
    i = cuda.grid(1)
    if i < x.shape[0]:
        y[i] = x[i] * factor + offset


def operands(size: int = 1000) -> tuple[Any, Any, np.ndarray]:
    host = np.arange(size, dtype=np.float32)
    return cuda.to_device(host), cuda.to_device(np.zeros_like(host)), host * 3 + 2


@pytest.mark.gpu
def test_streams_of_numba_and_cuda_core_and_a_handle() -> None:
    from cuda.core import Device

    cuda.current_context()
    device = Device()
    device.set_current()
    own = device.create_stream()
    for stream in (0, cuda.stream(), own, int(own.handle)):
        x, y, wanted = operands()
        cuda.synchronize()
        args = (x, np.float32(3), np.float32(2), y)
        load(Launch(scale_and_add, (8,), (128,), args))(stream)
        cuda.synchronize()
        np.testing.assert_array_equal(y.copy_to_host(), wanted)


@pytest.mark.gpu
def test_a_thread_that_never_used_cuda_can_launch() -> None:
    import threading

    x, y, wanted = operands()
    loaded = load(Launch(scale_and_add, (8,), (128,), (x, np.float32(3), np.float32(2), y)))
    thread = threading.Thread(target=loaded)
    thread.start()
    thread.join()
    cuda.synchronize()
    np.testing.assert_array_equal(y.copy_to_host(), wanted)


@pytest.mark.gpu
def test_a_captured_launch_runs_when_the_graph_does() -> None:
    from cuda.core import Device

    x, y, wanted = operands()
    loaded = load(Launch(scale_and_add, (8,), (128,), (x, np.float32(3), np.float32(2), y)))
    device = Device()
    device.set_current()
    builder, stream = device.create_graph_builder(), device.create_stream()
    builder.begin_building()
    loaded(builder)
    builder.end_building()
    graph = builder.complete()
    assert not y.copy_to_host().any()
    graph.launch(stream)
    stream.sync()
    np.testing.assert_array_equal(y.copy_to_host(), wanted)


@pytest.mark.gpu
def test_a_loaded_launch_knows_what_its_kernel_takes() -> None:
    x, y, _ = operands()
    arguments = (x, np.float32(3), np.float32(2), y)
    loaded = load(Launch(scale_and_add, (8,), (128,), arguments, shared_bytes=512))
    arch = architecture(cuda.get_current_device().compute_capability)
    code = machine_code(scale_and_add, signature_of(arguments), arch)
    assert loaded.resources() == {
        "registers": code.registers,
        "spill_bytes": 0,
        "smem_bytes": code.shared_bytes + 512,
    }


def boxes_on_the_gpu() -> tuple[Launch, Any, np.ndarray]:
    """A launch with a tensor map, its output and what must be there."""
    if cuda.get_current_device().compute_capability != (9, 0):
        pytest.skip("tensor maps are for compute capability 9.0")
    (case,) = (case for case in hopper_cases.CASES if case.name == "boxes")
    (source,), (wanted,) = case.prepare(0)
    a, out = cuda.to_device(source.array), cuda.to_device(np.zeros_like(wanted))
    launch = Launch(case.kernel, case.grid, (case.block,), (TensorMap(a, source.box), out))
    return launch, out, wanted


@pytest.mark.gpu
def test_a_tensor_map_follows_its_matrix() -> None:
    launch, out, wanted = boxes_on_the_gpu()
    loaded = load(launch)
    loaded()
    cuda.synchronize()
    np.testing.assert_array_equal(out.copy_to_host(), wanted)
    elsewhere = cuda.to_device(-launch.args[0].array.copy_to_host())
    loaded.put_mapped(launcher.address_of(elsewhere))
    loaded()
    cuda.synchronize()
    np.testing.assert_array_equal(out.copy_to_host().view(np.float16), -wanted.view(np.float16))


@pytest.mark.gpu
def test_a_captured_launch_keeps_its_tensor_map() -> None:
    from cuda.core import Device

    launch, out, wanted = boxes_on_the_gpu()
    loaded = load(launch)
    device = Device()
    device.set_current()
    builder, stream = device.create_graph_builder(), device.create_stream()
    builder.begin_building()
    loaded(builder)
    builder.end_building()
    graph = builder.complete()
    elsewhere = cuda.to_device(np.zeros((37, 104), np.float16))
    loaded.put_mapped(launcher.address_of(elsewhere))  # the graph has the words of before
    graph.launch(stream)
    stream.sync()
    np.testing.assert_array_equal(out.copy_to_host(), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "kind", "k"), [("float16", "FLOAT16", 104), ("int8", "UINT8", 208)]
)
def test_a_tensor_map_is_encoded_as_cuda_bindings_do(dtype: str, kind: str, k: int) -> None:
    from cuda.bindings import driver as d

    cuda.current_context()
    room = np.zeros(16, np.uint64)
    a = cuda.to_device(np.zeros((37, k), dtype))
    address, columns = launcher.address_of(a), 128 * k // 208
    encode_map.EncodedMap(TensorMap(a, (24, columns)), room.ctypes.data).put(address)
    error, wanted = d.cuTensorMapEncodeTiled(
        getattr(d.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}"),
        2,
        address,
        [d.cuuint64_t(k), d.cuuint64_t(37)],
        [d.cuuint64_t(208)],
        [d.cuuint32_t(columns), d.cuuint32_t(24)],
        [d.cuuint32_t(1), d.cuuint32_t(1)],
        d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    assert not error
    assert room.tolist() == [int(word) for word in wanted.opaque]
