"""A CUDA simulator for any CPU: lanes, scheduler, asynchronous copies, memory checks, bank conflicts."""

from steps.simulator import numpy_shim  # noqa: F401 - before the first use of numba.cuda
