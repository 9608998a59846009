"""What can be wrong with a simulated kernel. Each message names block, thread and source line."""


class SimulatorError(RuntimeError):
    """A kernel did what it must not do; also the base of the more exact errors below."""

    lane_in_warp: int | None = None  # whose fault it is, when found while acting for a whole warp
    site: object = None  # where it began, when an asynchronous operation finds it later


class OutOfRange(SimulatorError):
    """An access outside an array, or with a negative index."""


class Misaligned(SimulatorError):
    """An access at an address that is not a multiple of its size: CUDA error 716 on the GPU."""


class BarrierDivergence(SimulatorError):
    """Threads that must meet at one barrier wait at different ones, or have exited."""


class Race(SimulatorError):
    """Two accesses to one place, one of them a store, that nothing orders: the result is up to
    chance, in whatever order the simulator runs them."""


class Deadlock(SimulatorError):
    """No thread can go on: they wait for each other, or poll memory that nobody will write."""
