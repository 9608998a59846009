"""Every instruction in the simulator, bit for bit against plain NumPy, and in the machine code."""

import importlib
import re
from pathlib import Path

import numpy as np
import pytest
from numba import cuda, float32, int32, uint8
from numba.core.errors import TypingError

from steps import instructions
from steps.compile.compiler import (
    _refuse_missing,
    capability,
    machine_code,
    signature_of,
)
from steps.instructions import (
    hfma2,
    high2half2,
    ldmatrix_x4,
    low2half2,
    mma_m16n8k32_s8,
    shfl_xor,
)
from steps.simulator.launch import SimulatorError, simulate
from steps.simulator.twins import INSTRUCTIONS
from tests.compile.cubins import opcodes_of
from tests.instructions import hopper_cases, instruction_cases

ROOT = Path(__file__).resolve().parents[2]
CASES = instruction_cases.CASES + hopper_cases.CASES


def garbage_like(arrays):
    """Outputs prefilled with what no kernel is asked to compute."""
    return tuple(np.full(a.shape, 0x5A, np.uint8).astype(a.dtype) for a in arrays)


@pytest.mark.parametrize("order", [0, -1, 7])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_twin_equals_numpy(case, order):
    inputs, expected = case.prepare(seed=order + 1)
    outputs = garbage_like(expected)
    simulate(case.kernel, case.grid, case.block, (*inputs, *outputs), order=order)
    for got, wanted in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch", ["sm_75", pytest.param("sm_80", marks=pytest.mark.every), "sm_90a"]
)
def test_machine_code_has_the_instruction(arch):
    """In all cases, so that one process of nvdisasm lists them; its start takes longer than a
    compilation. Of the kernels for sm_90a the compiler asks what older architectures lack."""
    codes = {}
    for case in CASES:
        inputs, expected = case.prepare(seed=0)
        if arch >= case.oldest:
            signature = signature_of((*inputs, *expected))
            codes[case] = code = machine_code(case.kernel, signature, arch)
            stack_and_spills = code.stack_bytes, code.spill_store_bytes, code.spill_load_bytes
            assert (code.warnings, stack_and_spills) == ((), (0, 0, 0)), case
    if arch != "sm_75":  # Turing spells some of them otherwise
        for case, found in zip(codes, opcodes_of([*codes.values()]), strict=True):
            for opcode in case.contains:
                wanted = tuple(f"{one}." for one in opcode.split("|"))
                assert any(f"{one}.".startswith(wanted) for one in found), (case, opcode, found)
    if arch == "sm_90a":
        for case, code in codes.items():
            for older in ("sm_75", "sm_80"):
                if older < case.oldest:
                    says = f"needs {case.oldest}; it cannot be compiled for {older}"
                    with pytest.raises(ValueError, match=says):
                        _refuse_missing(
                            code.library.get_llvm_str(), code.name, capability(older), older
                        )


def test_every_instruction_has_a_case():
    """An instruction without a small exact kernel is not proven: also not one that is defined
    outside of `steps.instructions`, whether or not another test has imported it."""
    for path in sorted((ROOT / "steps").rglob("*.py")):
        if "from steps.instructions.define import" in path.read_text(encoding="utf-8"):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    used = set()
    for case in CASES:
        function = case.kernel.py_func
        names = set(function.__code__.co_names) | set(function.__code__.co_freevars)
        known = function.__globals__ | dict(
            zip(
                function.__code__.co_freevars,
                (c.cell_contents for c in function.__closure__ or ()),
                strict=True,
            )
        )
        used |= {id(known[n]) for n in names if n in known}
        used |= {id(getattr(instructions, n)) for n in names if hasattr(instructions, n)}
    # the instructions of one factory differ in a number: one proves them all
    proven = {one_of(d.name) for i, d in INSTRUCTIONS.items() if id(i) in used}
    assert not {one_of(d.name) for d in INSTRUCTIONS.values()} - proven


FACTORIES = (
    "cp_async_wait|wgmma_wait|wgmma_sparse_f16|setmaxnreg_inc|setmaxnreg_dec|zeros_f32|zeros_i32"
)


def one_of(name: str) -> str:
    return re.sub(rf"^({FACTORIES})_\d+$", r"\1_n", name)


def test_the_halves_of_a_word_cost_nothing_as_operands():
    """HFMA2 picks them; a PRMT each would be as many instructions again."""

    @cuda.jit
    def kernel(a, b, c, out):
        i = cuda.grid(1)
        out[i] = hfma2(b[i], low2half2(a[i]), high2half2(c[i]))

    signature = signature_of([np.zeros(32, np.uint32)] * 4)
    code = machine_code(kernel, signature, "sm_90a")
    assert code.count("PRMT") == 0
    assert re.search(r"HFMA2.* R\d+, R\d+\.H._H., R\d+\.H._H. ;", code.sass)


def test_optional_instructions_are_left_out_where_there_are_none():
    """griddepcontrol came with compute capability 9.0; older GPUs get the kernel without it."""
    (case,) = (case for case in CASES if case.name == "launch_order")
    inputs, expected = case.prepare(seed=0)
    signature = signature_of((*inputs, *expected))
    for arch, made in {"sm_75": 0, "sm_80": 0, "sm_89": 0, "sm_90a": 1, "sm_100a": 1}.items():
        code = machine_code(case.kernel, signature, arch)
        assert code.ptx.count("griddepcontrol") == 2 * made
        assert code.count("ACQBULK") == made, arch
        assert code.count("PREEXIT") == made, arch


def test_address_must_be_in_the_right_memory():
    @cuda.jit
    def from_global(source, out):
        x = ldmatrix_x4(source, 0)
        out[0] = x[0]

    with pytest.raises(
        SimulatorError, match="source is in global memory; the instruction takes shared"
    ):
        simulate(from_global, 1, 32, (np.zeros(64, np.uint8), np.zeros(1, np.uint32)))


def test_ldmatrix_blames_the_lane_with_the_bad_address():
    @cuda.jit
    def shifted(out):
        stage = cuda.shared.array(1024, uint8, alignment=16)
        t = cuda.threadIdx.x
        x = ldmatrix_x4(stage, 16 * t + (t == 9))
        out[t] = x[0]

    with pytest.raises(SimulatorError, match=r"index 145 .* thread \(9, 0, 0\)"):
        simulate(shifted, 1, 32, (np.zeros(32, np.uint32),))


def test_warp_instructions_need_a_full_warp():
    @cuda.jit
    def partial(out):
        t = cuda.threadIdx.x
        out[t] = mma_m16n8k32_s8(1, 1, 1, 1, 1, 1, 0, 0, 0, 0)[0]

    with pytest.raises(SimulatorError, match="mma needs a full warp; this one has 20 lanes"):
        simulate(partial, 1, 20, (np.zeros(32, np.int32),))


def test_shuffles_refuse_64_bits():
    @cuda.jit
    def widened(out):
        out[0] = shfl_xor(out[0] + 1, 1)

    with pytest.raises(TypingError, match="shfl_xor takes an int32, uint32 or float32, not int64"):
        machine_code(widened, (int32[::1],), "sm_80")


def test_operands_are_cast_as_in_c():
    """An int64 reaches a 32-bit operand modulo 2^32 and a float stored to bytes is truncated."""

    @cuda.jit
    def cast(out, floats):
        out[0] = instructions.dp4a(0x1_0000_0001, 3, 1 << 32)
        floats[0] = float32(1) / float32(3)
        out[1] = int32(3_000_000_000)
        out[2] = int32(float32(-2.9))

    out, floats = np.zeros(3, np.int32), np.zeros(1, np.float32)
    simulate(cast, 1, 1, (out, floats))
    assert out.tolist() == [3, 3_000_000_000 - (1 << 32), -2]
    assert floats[0] == np.float32(1) / np.float32(3)
