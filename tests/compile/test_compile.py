"""Offline compilation: the whole path of a launch, without a GPU and without a trace."""

import gc
import re

import numpy as np
import pytest
from numba import cuda, float32, int32, types
from numba.cuda import codegen, dispatcher

from steps.compile import compiler
from steps.compile.compiler import (
    MachineCode,
    capability,
    machine_code,
    opcodes,
    signature_of,
    source_lines,
)
from steps.instructions import TensorMap
from steps.instructions.tensor_map import PADDING_WORDS, PARAMETER_WORDS, PARAMETERS_BEGIN
from tests.instructions import hopper_cases


@cuda.jit(device=True)
def square(x):
    return x * x


@cuda.jit
def squares(x, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = square(x[i])


SQUARES = (float32[::1], float32[::1])


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_kernels_with_device_functions_compile_for_every_architecture(arch):
    code = machine_code(squares, SQUARES, arch)
    assert code.arch == arch
    assert f".target {arch}" in code.ptx
    assert code.count("FMUL") == 1
    assert (
        code.count("LDG") == code.count("STG") == code.count("EXIT") == 1 or code.count("EXIT") > 1
    )
    assert 0 < code.registers < 32
    assert code.shared_bytes == code.stack_bytes == code.spill_store_bytes == 0
    assert code.warnings == ()
    assert code.cubin.startswith(b"\x7fELF")


def test_line_info_says_whose_instruction_is_whose_and_changes_none():
    plain, said = (machine_code(squares, SQUARES, "sm_90a", line_info=on) for on in (False, True))
    assert said.instructions == plain.instructions
    assert said.registers == plain.registers
    assert source_lines(plain.sass)[0][0] is None, "no line without it"
    lines = source_lines(said.sass)
    assert [text for _, text in lines] == [text for _, text in source_lines(plain.sass)]
    first = squares.py_func.__code__.co_firstlineno  # of its decorator
    of = {text.split()[0].split(".")[0]: line for line, text in lines}
    assert of["LDG"] == of["FMUL"] == of["STG"] == first + 4, "square is called there"
    assert {line for line, _ in lines if line} <= set(range(first, first + 5))


def test_results_are_kept():
    assert machine_code(squares, SQUARES, "sm_80") is machine_code(squares, SQUARES, "sm_80")
    text = machine_code(squares, "void(float32[::1], float32[::1])", "sm_80")
    assert text is machine_code(squares, SQUARES, "sm_80")


def test_the_process_is_as_before():
    asked, ensure = dispatcher.get_current_device, codegen.CUDACodeLibrary._ensure_cc
    assert gc.isenabled()
    machine_code(squares, (float32[::1], types.Array(float32, 1, "A")), "sm_80")
    assert gc.isenabled()
    gc.disable()
    try:
        machine_code(squares, (types.Array(float32, 1, "A"), float32[::1]), "sm_80")
        assert not gc.isenabled(), "as the caller had it"
    finally:
        gc.enable()
    with pytest.raises(ValueError, match="sm_75"):
        machine_code(squares, SQUARES, "sm_60")
    assert dispatcher.get_current_device is asked
    assert codegen.CUDACodeLibrary._ensure_cc is ensure
    assert not squares.overloads  # nothing for another architecture can be launched by accident


def accumulate_kernel(**options):
    @cuda.jit(**options)
    def accumulate(x, out):
        values = cuda.local.array(64, float32)
        i = cuda.grid(1)
        for j in range(64):
            values[j] = x[i + 1000 * j]
        for k in range(out.size):
            for j in range(64):
                values[j] = values[j] * values[63 - j] + float32(k)
        total = float32(0)
        for j in range(64):
            total += values[j]
        out[i] = total

    return accumulate


def test_register_options_and_spills():
    free = machine_code(accumulate_kernel(), SQUARES, "sm_80")
    tight = machine_code(accumulate_kernel(max_registers=32), SQUARES, "sm_80")
    bounded = machine_code(accumulate_kernel(launch_bounds=(1024, 2)), SQUARES, "sm_80")
    assert free.registers > 64
    assert free.spill_store_bytes == free.count("STL", "LDL") == 0
    assert tight.registers <= 32
    assert bounded.registers <= 32
    assert tight.spill_store_bytes > 0
    assert tight.spill_load_bytes > 0
    assert tight.stack_bytes > 0
    assert tight.count("STL") > 0


def test_local_memory_and_float64_show():
    @cuda.jit
    def careless(x, out):
        values = cuda.local.array(64, float32)
        i = cuda.grid(1)
        for j in range(64):
            values[j] = x[j] * 0.1  # a Python float is a float64 to Numba
        out[i] = values[i & 63]  # an index known at run time only

    code = machine_code(careless, SQUARES, "sm_80")
    assert code.stack_bytes == 256
    assert code.count("LDL") > 0
    assert code.count("DMUL") > 0


def test_shared_memory_is_reported():
    @cuda.jit
    def stage(x, out):
        tile = cuda.shared.array((8, 33), float32)
        t = cuda.threadIdx.x
        tile[t & 7, t >> 3] = x[t]
        cuda.syncthreads()
        out[t] = tile[t >> 5, t & 31]

    assert machine_code(stage, SQUARES, "sm_90a").shared_bytes == 8 * 33 * 4


def test_the_histogram(monkeypatch):
    listing = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
        /*0020*/             @!UP0 UIADD3 UR4, UR4, 0x1, URZ ;
        /*10a0*/                   IDP.4A.S8.S8 R2, R4, R5, R2 ;
        /*10b0*/              @P1  IDP.4A.U8.S8 R2, R4, R5, R2 ;
        /*10c0*/                   IDPX R2 ;
    .L_x_1:
    """
    assert opcodes(listing) == {
        "LDC": 1,
        "BRA": 1,
        "UIADD3": 1,
        "IDP.4A.S8.S8": 1,
        "IDP.4A.U8.S8": 1,
        "IDPX": 1,
    }
    monkeypatch.setattr(compiler, "disassemble", lambda cubin, *, line_info: listing)
    code = MachineCode("k", "sm_80", "", b"", 1, 0, 0, 0, 0, "")
    assert (code.count("IDP"), code.count("IDP.4A.S8.S8"), code.count("IDP", "BRA")) == (2, 1, 3)


def test_nothing_is_compiled_where_no_listing_can_be_made(monkeypatch):
    monkeypatch.setattr(compiler, "_machine_code", None)
    monkeypatch.setattr(compiler.pathfinder, "find_nvidia_binary_utility", lambda _: None)
    with pytest.raises(RuntimeError, match="nvdisasm was not found: pip install nvidia-cuda-nv"):
        machine_code(squares, SQUARES, "sm_90a")


def test_warnings_of_ptxas():
    log = (
        "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to ...\nptxas info    : Used 20 registers\n"
    )
    code = MachineCode("k", "sm_90a", "", b"", 20, 0, 0, 0, 0, log)
    assert len(code.warnings) == 1
    assert "C7515" in code.warnings[0]


def test_signature_of_arguments():
    block = np.dtype([("d", "<f2"), ("qs", "u1", (16,))])
    blocks, a = np.zeros((2, 3), block), np.zeros((4, 5), np.float32)
    types_found = signature_of((blocks, a, a[:, ::2], np.float32(1), 7, np.zeros(3, np.uint8)))
    assert [str(t) for t in types_found[1:]] == [
        "array(float32, 2d, C)",
        "array(float32, 2d, A)",
        "float32",
        "int64",
        "array(uint8, 1d, C)",
    ]
    assert types_found[0].ndim == 2
    assert types_found[0].dtype.size == 18
    frozen = np.zeros(3, np.int32)
    frozen.flags.writeable = False
    assert signature_of((frozen,)) == (int32[::1],)


@pytest.mark.parametrize("arch", ["sm_61", "90a", "sm_9", "compute_80"])
def test_unknown_architectures(arch):
    with pytest.raises(ValueError, match=re.escape(f"the architecture is {arch!r}")):
        capability(arch)
    assert capability("sm_90a") == (9, 0, "a")
    assert capability("sm_120") == (12, 0, "")


def test_only_kernels_are_compiled():
    with pytest.raises(TypeError, match=r"takes a @cuda.jit kernel"):
        machine_code(square, (float32,), "sm_80")


def test_a_tensor_map_is_a_tuple_of_words_and_comes_first():
    a = np.zeros((8, 64), np.float16)
    tensor_map = TensorMap(a, (8, 64))
    assert signature_of((tensor_map, a)) == (
        types.UniTuple(types.uint64, 22),
        types.float16[:, ::1],
    )
    with pytest.raises(TypeError, match="a tensor map must be the kernel's first argument"):
        signature_of((a, tensor_map))


def test_the_map_lies_at_a_multiple_of_64_of_the_constant_bank():
    """Parameters begin at 0x210: so the address of `out`, the fifth of its facts behind the words
    of the map, is where the code reads it. The map is 48 bytes further, behind the padding."""
    (case,) = (case for case in hopper_cases.CASES if case.name == "boxes")
    inputs, expected = case.prepare(0)
    code = machine_code(case.kernel, signature_of((*inputs, *expected)))
    out = PARAMETERS_BEGIN + 8 * PARAMETER_WORDS + 8 * 4
    assert re.search(rf"ULDC\.64 UR\d+, c\[0x0\]\[{out:#x}\]", code.sass)
    parameters = re.search(r"ULDC\.64 UR(\d+), c\[0x0\]\[0x198\]", code.sass)
    assert parameters, "the address of the parameters is a constant of its own"
    behind = rf"UIADD3 UR\d+, UP0, UR{parameters[1]}, {8 * PADDING_WORDS:#x}, URZ"
    assert len(re.findall(behind, code.sass)) == 2, "of the prefetch and of the copy"
    assert (PARAMETERS_BEGIN + 8 * PADDING_WORDS) % 64 == 0
