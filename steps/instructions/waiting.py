"""What a block needs that waits for other blocks: bounded waits, and small relaxed accesses.

Such a launch needs all of its blocks on the GPU at once. Where something keeps one of them out the
others would wait for ever; these waits end the launch after some seconds instead (`trap`, which
CUDA reports as "unspecified launch failure").
"""

from numba.cuda.types import int32, uint16, uint32

from steps.instructions.define import GLOBAL, SHARED, ptx
from steps.simulator.errors import SimulatorError
from steps.simulator.scheduler import now

PATIENCE = 4_000_000_000
"""Nanoseconds: of a wait at most."""


@ptx(
    "{.reg .pred p; .reg .u64 begin, t; "
    "mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @p bra done; "
    "mov.u64 begin, %globaltimer; "
    "again: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @p bra done; "
    "mov.u64 t, %globaltimer; sub.u64 t, t, begin; "
    f"setp.gt.u64 p, t, {PATIENCE}; @p trap; bra again; done: }}",
    takes=(SHARED, uint32),
    scope="lane",
    memory=True,
    only="sm_90a",
)
def mbarrier_wait_bounded(lane, barrier, bi, parity):
    """`mbarrier_wait` for `PATIENCE` at most."""
    now().wait_for_phase(lane.block.memory.barrier(lane, barrier, bi), parity)


@ptx("mov.u32 $0, %tid.x;", returns=int32, scope="lane", memory=True)
def thread_index(lane):
    """`cuda.threadIdx.x`, read anew: the compiler keeps no register for it from one use to the
    next. S2R."""
    return lane.index


@ptx("trap;", scope="lane", memory=True)
def give_up(lane):
    """End the launch with an error. BPT.TRAP."""
    raise SimulatorError("a thread has given up waiting for another block")


@ptx(
    "ld.relaxed.gpu.global.u32 $0, [$1];",
    returns=uint32,
    takes=(GLOBAL,),
    scope="lane",
    memory=True,
)
def load_u32_relaxed(lane, array, index):
    """4 bytes at array[index] as they are in the L2 now. LDG.E.STRONG.GPU."""
    at = array.locate(index, 4)
    now().pause()
    return int.from_bytes(array.bytes[at : at + 4], "little")


@ptx("st.relaxed.gpu.global.u32 [$0], $1;", takes=(GLOBAL, uint32), scope="lane", memory=True)
def store_u32_relaxed(lane, array, index, value):
    """4 bytes to array[index], for relaxed loads of other blocks. STG.E.STRONG.GPU."""
    at = array.locate(index, 4)
    array.bytes[at : at + 4] = int(value).to_bytes(4, "little")


@ptx("st.relaxed.gpu.global.u16 [$0], $1;", takes=(GLOBAL, uint16), scope="lane", memory=True)
def store_u16_relaxed(lane, array, index, value):
    """2 bytes to array[index], for relaxed loads of other blocks. STG.E.U16.STRONG.GPU."""
    at = array.locate(index, 2)
    array.bytes[at : at + 2] = int(value).to_bytes(2, "little")
