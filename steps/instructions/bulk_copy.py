"""Bulk copies from global to shared memory, and the barriers in memory that they complete on.

One thread issues a copy of kilobytes (PTX ISA, cp.async.bulk; compute capability 9.0). The
copy reports to an *mbarrier*: a word of 8 bytes in shared memory that counts, phase by phase, the
arrivals and the bytes still missing. A phase is complete when both counts are zero; then the next
begins by itself, with the same number of arrivals to come. A waiting thread names the phase by its
*parity*: 0 for the first, 1 for the second, 0 for the third. A wait for parity 1 on a new barrier
returns at once, as if a phase before the first were complete: so a producer's first wait for an
empty buffer needs no special case.

    a ring of stages       full[s]: 1 arrival, the producer's, and the bytes of its copies
                           empty[s]: an arrival of each consumer that has read the stage

    producer, one thread                               consumers
        mbarrier_wait(empty, s, parity ^ 1)                mbarrier_wait(full, s, parity)
        mbarrier_arrive_expect(full, s, bytes)             ... read stage s ...
        bulk_copy(stage, .., w, .., bytes, full, s)        mbarrier_arrive(empty, s)

    and both go on to stage s + 1; back at stage 0 they flip `parity`.

Memory is seen through two windows, *proxies*: loads, stores and `cp.async` use the generic one,
bulk copies and `wgmma` the asynchronous one. What threads stored to shared memory, or copied there
with `cp.async`, a `wgmma` sees only after the writer's `fence_proxy_async` and a barrier. What bulk
copies write needs none: waiting on the mbarrier is enough.
"""

from numba.cuda.types import uint32

from steps.instructions.define import GLOBAL, SHARED, ptx
from steps.simulator.arrays import CheckedArray
from steps.simulator.asynchronous import BulkCopy
from steps.simulator.errors import SimulatorError
from steps.simulator.lanes import here
from steps.simulator.scheduler import now
from steps.simulator.shared_memory import MBarrier

_UNIT = 16  # bytes: addresses and sizes of bulk copies are multiples
_HOPPER = (9, 0)


@ptx(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
    takes=(SHARED, GLOBAL, uint32, SHARED),
    scope="lane",
    memory=True,
    min_cc=_HOPPER,
)
def bulk_copy(lane, destination, di, source, si, size, barrier, bi):
    """Begin to copy `size` bytes from source[si] to destination[di], to be reported to the mbarrier
    at barrier[bi]. Both addresses and the size are multiples of 16. UBLKCP."""
    if not size or size % _UNIT:
        raise SimulatorError(f"bulk_copy takes a multiple of 16 bytes, got {size}")
    reports_to = reported_to("bulk_copy", lane, barrier, bi)
    write = CheckedArray.locate(destination, di, size, _UNIT)
    start = source.locate(si, size, _UNIT)

    def read():
        return source.bytes[start : start + size]

    now().copy(BulkCopy(lane, here(), destination, write, read, size, reports_to))


def reported_to(name: str, lane, barrier, bi) -> MBarrier:
    """The mbarrier at barrier[bi], if a copy may report to it."""
    found: MBarrier = lane.block.memory.barrier(lane, barrier, bi)
    if not found.fenced:
        raise SimulatorError(
            f"{name} reports to mbarrier {found.name}, which its maker has not made known: "
            "fence_mbarrier_init follows mbarrier_init"
        )
    return found


@ptx(
    "cp.async.bulk.prefetch.L2.global [$0], $1;",
    takes=(GLOBAL, uint32),
    scope="lane",
    memory=True,
    min_cc=_HOPPER,
    optional=True,
)
def prefetch_l2(lane, source, si, size):
    """Begin to load `size` bytes (a multiple of 16) from memory into the L2. UBLKPF."""
    source.locate(si, size, _UNIT)


@ptx("fence.proxy.async.shared::cta;", scope="lane", memory=True, min_cc=_HOPPER)
def fence_proxy_async(lane):
    """What this thread wrote to shared memory before, bulk copies and `wgmma` may read after."""
    lane.block.order.fence_proxy(lane)


@ptx("fence.proxy.async.global;", scope="lane", memory=True, min_cc=_HOPPER)
def fence_proxy_async_global(lane):
    """The same of global memory: what this thread knows to be written there, by others too, copies
    that it issues after may read."""
    lane.block.order.fence_proxy_global(lane)


# --- mbarriers


@ptx(
    "mbarrier.init.shared::cta.b64 [$0], $1;",
    takes=(SHARED, uint32),
    scope="lane",
    memory=True,
    min_cc=_HOPPER,
)
def mbarrier_init(lane, barrier, bi, count):
    """Make the 8 bytes at barrier[bi] an mbarrier whose phases take `count` arrivals each.

    One thread does so for all barriers, then `fence_mbarrier_init`; `cuda.syncthreads` follows.
    """
    lane.block.memory.make_barrier(lane, barrier, bi, count)


@ptx("fence.mbarrier_init.release.cluster;", scope="lane", memory=True, min_cc=_HOPPER)
def fence_mbarrier_init(lane):
    """Make this thread's new mbarriers known to bulk copies."""
    for made in lane.block.memory.barriers.values():
        made.fenced |= made.maker == lane.index


# `.release.cta` and `.acquire.cta` are what arrive and wait mean without a qualifier. With
# `.cluster` every arrival would be a fence of the whole GPU.
@ptx(
    "mbarrier.arrive.shared::cta.b64 _, [$0];",
    takes=(SHARED,),
    scope="lane",
    memory=True,
    min_cc=_HOPPER,
)
def mbarrier_arrive(lane, barrier, bi):
    """Count an arrival in the current phase: who waits for it sees what this thread did before."""
    now().arrive(lane.block.memory.barrier(lane, barrier, bi))


@ptx(
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
    takes=(SHARED, uint32),
    scope="lane",
    memory=True,
    min_cc=_HOPPER,
)
def mbarrier_arrive_expect(lane, barrier, bi, size):
    """Count an arrival, and `size` bytes of bulk copies that the current phase must wait for."""
    now().arrive(lane.block.memory.barrier(lane, barrier, bi), size)


@ptx(
    "{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @!p bra again;}",
    takes=(SHARED, uint32),
    scope="lane",
    memory=True,
    min_cc=_HOPPER,
)
def mbarrier_wait(lane, barrier, bi, parity):
    """Wait until the phase of this parity (0 or 1) is complete. SYNCS.PHASECHK."""
    now().wait_for_phase(lane.block.memory.barrier(lane, barrier, bi), parity)


PATIENCE = 20_000_000_000  # nanoseconds of a bounded wait


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
    min_cc=_HOPPER,
)
def mbarrier_wait_bounded(lane, barrier, bi, parity):
    """The same, but for `PATIENCE` at most, where it hangs on other blocks: then the launch ends
    with an error, as by `trap`."""
    now().wait_for_phase(lane.block.memory.barrier(lane, barrier, bi), parity)
