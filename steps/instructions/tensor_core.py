"""Tensor cores as Ampere has them: one warp multiplies two small tiles held in its registers.

Every lane of the warp executes the instruction and holds a fixed part, a *fragment*, of each tile.
With g = lane // 4 (0..7) and t = lane % 4 (PTX ISA 9.7.15, "Matrix Fragments for mma"):

    m16n8k32, 8-bit integers: a register is 4 neighbours along K

             A[16, 32]     k = 4t .. 4t+3   16+4t .. 16+4t+3      B[32, 8]         n = g
                 row g    |      a0       |        a2        |      k = 4t ..    |  b0  |
                 row g+8  |      a1       |        a3        |      k = 16+4t .. |  b1  |

    m16n8k16, float16 or bfloat16: a register is 2 neighbours along K

             A[16, 16]     k = 2t, 2t+1       8+2t, 8+2t+1        B[16, 8]         n = g
                 row g    |      a0       |        a2        |      k = 2t ..    |  b0  |
                 row g+8  |      a1       |        a3        |      k = 8+2t ..  |  b1  |

    m16n8k8, tf32: a register is one float32, of which the 10 upper bits of significand are read

             A[16, 8]      k = t    t+4                            B[8, 8]          n = g
                 row g    |  a0   |   a2   |                           k = t     |  b0  |
                 row g+8  |  a1   |   a3   |                           k = t+4   |  b1  |

    all:     C[16, 8]      n = 2t     2t+1
                 row g    |  c0   |   c1   |
                 row g+8  |  c2   |   c3   |

In bytes all are the same picture, so one layout of shared memory and one `ldmatrix` serve all: a
row of A, and a column of B (which is a row of W), is K contiguous bytes.

`ldmatrix` (PTX ISA 9.7.15.5.15) loads 8 x 8 matrices of 16-bit elements: lane 8i + r gives the
address of row r of matrix i (16 bytes, 16-byte aligned), and each lane receives one register per
matrix:

    register i of lane l = elements 2t, 2t+1 of row g of matrix i           plain
                         = elements 2t, 2t+1 of column g of matrix i        .trans

`stmatrix` (9.7.15.5.16; compute capability 9.0) is its inverse: it stores four such matrices.
`movmatrix` (9.7.15.5.17) transposes one matrix that a warp holds in registers.
"""

import numpy as np
from numba.cuda.types import float32, int32, uint32

from steps.instructions.define import SHARED, ptx
from steps.simulator.errors import SimulatorError
from steps.simulator.fragments import (
    A_ROW,
    A_WORD,
    B_WORD,
    BFLOAT16,
    C_COLUMN,
    C_ROW,
    GROUP,
    THREAD,
    numbers,
)


def _multiply(lanes: list[tuple], element, accumulator, exact, element_b=None) -> list[tuple]:
    """C + A @ B of one mma, its fragments given lane by lane, products and sums in `exact`."""
    if len(lanes) != 32:
        raise SimulatorError(f"mma needs a full warp; this one has {len(lanes)} lanes")
    operands = np.array(lanes, np.float64)  # which holds any uint32, int32 and float32
    words = operands[:, :6].astype(np.uint32)
    a, b, c = np.empty((16, 8), np.uint32), np.empty((8, 8), np.uint32), np.empty((16, 8), exact)
    a[A_ROW, A_WORD] = words[:, :4]
    b[GROUP[:, None], B_WORD] = words[:, 4:]
    c[C_ROW, C_COLUMN] = operands[:, 6:]
    c += numbers(a, element).astype(exact) @ numbers(b, element_b or element).astype(exact).T
    results = c[C_ROW, C_COLUMN].astype(accumulator).reshape(-1)
    values = iter(results if accumulator is np.float32 else results.tolist())
    return list(zip(values, values, values, values, strict=True))  # four for each lane


@ptx(
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
    "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
    returns=(int32,) * 4,
    takes=(uint32,) * 6 + (int32,) * 4,
    scope="warp",
    min_cc=(8, 0),
)
def mma_m16n8k32_s8(lanes):
    """(a0..a3, b0, b1, c0..c3) -> C + A @ B in int32, modulo 2^32; A, B signed bytes. IMMA."""
    return _multiply(lanes, np.int8, np.int32, np.int64)


@ptx(
    "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
    "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
    returns=(int32,) * 4,
    takes=(uint32,) * 6 + (int32,) * 4,
    scope="warp",
    min_cc=(8, 0),
)
def mma_m16n8k32_u8(lanes):
    """As `mma_m16n8k32_s8`, the bytes of A unsigned and those of B signed. IMMA."""
    return _multiply(lanes, np.uint8, np.int32, np.int64, np.int8)


@ptx(
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
    "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
    returns=(float32,) * 4,
    takes=(uint32,) * 6 + (float32,) * 4,
    scope="warp",
    min_cc=(8, 0),
)
def mma_m16n8k8_tf32(lanes):
    """(a0..a3, b0, b1, c0..c3) -> C + A @ B in float32; A, B the bits of float32s, of which the
    lower 13 are not read. HMMA.1688.F32.TF32. Rounding as in `mma_m16n8k16_f16`."""
    kept = [(*(x & 0xFFFFE000 for x in lane[:6]), *lane[6:]) for lane in lanes]
    return _multiply(kept, np.float32, np.float32, np.float64)


@ptx(
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
    "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
    returns=(float32,) * 4,
    takes=(uint32,) * 6 + (float32,) * 4,
    scope="warp",
    min_cc=(8, 0),
)
def mma_m16n8k16_f16(lanes):
    """(a0..a3, b0, b1, c0..c3) -> C + A @ B in float32; A, B pairs of float16. HMMA.16816.F32.

    The products are exact in both worlds. The twin rounds their sum once; hardware adds in an order
    and with a rounding that are not documented, so results agree to about a unit in the last place
    of the largest term, and exactly where every partial sum is a float32.
    """
    return _multiply(lanes, np.float16, np.float32, np.float64)


@ptx(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
    returns=(float32,) * 4,
    takes=(uint32,) * 6 + (float32,) * 4,
    scope="warp",
    min_cc=(8, 0),
)
def mma_m16n8k16_bf16(lanes):
    """As `mma_m16n8k16_f16`; A, B pairs of bfloat16. HMMA.16816.F32.BF16."""
    return _multiply(lanes, BFLOAT16, np.float32, np.float64)


def _rows(name: str, lanes: list[tuple], *, stores: bool = False) -> list[tuple]:
    """(array, byte) of each row of four matrices; lane 8i + r addresses row r of matrix i."""
    if len(lanes) != 32:
        raise SimulatorError(f"{name} needs a full warp; this one has {len(lanes)} lanes")
    rows = []
    for i, (array, index, *_) in enumerate(lanes):
        try:
            rows.append((array, array.locate_for(i, index, 16, stores=stores)))
        except SimulatorError as error:
            error.lane_in_warp = i
            raise
    return rows


def _matrices(lanes: list[tuple], transposed: bool) -> list[tuple]:
    """What four matrices give each lane."""
    rows = [array.bytes[at : at + 16] for array, at in _rows("ldmatrix", lanes)]
    matrices = np.frombuffer(b"".join(rows), np.uint16).reshape(4, 8, 8)
    if transposed:
        matrices = matrices.transpose(0, 2, 1)
    words = np.ascontiguousarray(matrices).view(np.uint32)  # [matrix, 8, 4]
    return words[:, GROUP, THREAD].T.tolist()


@ptx(
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];",
    returns=(uint32,) * 4,
    takes=(SHARED,),
    scope="warp",
    memory=True,
)
def ldmatrix_x4(lanes):
    """(array, index) -> four registers, one from each of four 8 x 8 matrices in shared memory.
    LDSM."""
    return _matrices(lanes, transposed=False)


@ptx(
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];",
    returns=(uint32,) * 4,
    takes=(SHARED,),
    scope="warp",
    memory=True,
)
def ldmatrix_x4_trans(lanes):
    """As `ldmatrix_x4`, each matrix transposed. LDSM.T."""
    return _matrices(lanes, transposed=True)


@ptx(
    "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};",
    takes=(SHARED, *[uint32] * 4),
    scope="warp",
    memory=True,
    min_cc=(9, 0),
)
def stmatrix_x4_trans(lanes):
    """(array, index, x0..x3): register i of lane l is elements 2t, 2t+1 of column g of matrix i, as
    `ldmatrix_x4_trans` loads it; row r of matrix i goes to where lane 8i + r says. STSM."""
    rows = _rows("stmatrix", lanes, stores=True)
    words = np.array([lane[2:] for lane in lanes], np.uint32)  # [lane, matrix]
    columns = np.ascontiguousarray(words.T).view(np.uint16).reshape(4, 8, 8)
    matrices = np.ascontiguousarray(columns.transpose(0, 2, 1)).reshape(32, 8)
    for (array, at), row in zip(rows, matrices, strict=True):
        array.writable_bytes[at : at + 16] = row.tobytes()
    return [None] * len(lanes)


@ptx(
    "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
    returns=uint32,
    takes=(uint32,),
    scope="warp",
)
def movmatrix_trans(lanes):
    """(word) -> the word of the transposed matrix, 8 x 8 elements of 16 bits. Lane l has elements
    2t, 2t+1 of row g, and gets those of column g: g = l // 4, t = l % 4. MOVM.16.MT88."""
    if len(lanes) != 32:
        raise SimulatorError(f"movmatrix needs a full warp; this one has {len(lanes)} lanes")
    words = np.empty((8, 4), np.uint32)
    words[GROUP, THREAD] = [word for (word,) in lanes]
    columns = np.ascontiguousarray(words.view(np.uint16).T).view(np.uint32)
    return columns[GROUP, THREAD].tolist()
