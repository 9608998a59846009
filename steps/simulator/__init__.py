"""A CUDA simulator for any CPU. It runs a kernel's Python source lane by lane and finds races,
misaligned accesses, deadlocks and misused instructions; it knows nothing of speed.

    launch.py           runs a kernel: `simulate`
    scheduler.py        one lane at a time, in an order that can be chosen
    lanes.py            blocks of lanes, and where each waits
    cuda.py             `cuda` inside a kernel: indices, barriers, warp operations, atomics
    twins.py            the meaning of every instruction, registered by `steps.instructions`
    calls.py            instructions as functions of a rebuilt kernel
    c_types.py          what `int32(x)` or a store to a uint8 array does to a value
    arrays.py           arrays whose every access is checked
    local_arrays.py     local arrays, which stand for registers
    shared_memory.py    shared memory as bulk copies and wgmma see it
    asynchronous.py     bulk copies, simulated at their worst
    fragments.py        where a warp's registers lie in the tiles of an mma
    warpgroup_mma.py    wgmma, simulated at its worst
    stream.py           launches one after the other, as far as they may overlap
    ordering.py         what each thread knows to have happened before
    tracked.py          arrays that watch over the order of accesses
    shadow.py           the last accesses to each word, to find those that nothing orders
    banks.py            bank conflicts of an access
    trace.py            each memory instruction of a launch, lane by lane
    errors.py           what can be wrong, naming block, thread and line
    numpy_shim.py       what numba-cuda needs set right before its first use
"""

from steps.simulator import numpy_shim  # noqa: F401 - before the first use of numba.cuda
